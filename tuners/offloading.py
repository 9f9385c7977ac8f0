"""What a model keeps for backward, in page-locked memory of the host. Unlike PyTorch's save_on_cpu
(https://docs.pytorch.org/docs/stable/autograd.html), weights and small tensors stay where they are,
and no copy waits for the device.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from advisor.tuners import host
from advisor.tuners.act.hooks import replace_call
from advisor.tuners.faults import NotRecomputable

LEAST_BYTES = 2**20
"""A smaller tensor stays on the device: its copy takes as long as starting it."""
HOST_SHARE = 0.5
"""Fraction of the host's free memory that may hold activations of all processes of a job."""


class ExtraTime:
    """Counts the time that steps take to save memory: to recompute and to copy activations."""

    def __init__(self) -> None:
        self.counts = False
        self._spans: list[tuple[_Moment, _Moment]] = []

    @contextlib.contextmanager
    def counted(self, device: torch.device) -> Iterator[None]:
        if not self.counts:
            yield
            return
        began = moment(device)
        try:
            yield
        finally:  # a second call ends early, by an exception
            self._spans.append((began, moment(device)))

    def take(self) -> float:
        """Return the seconds since the last call."""
        taken, self._spans = self._spans, []
        return math.fsum(elapsed_s(*span) for span in taken)


_Moment = float | torch.cuda.Event


def moment(device: torch.device) -> _Moment:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_s(began: _Moment, ended: _Moment) -> float:
    """Seconds between two moments, on a GPU by its own clock; waits for the second one."""
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    assert isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


EXTRA_TIME = ExtraTime()


class HostMemory:
    """The memory of the host that the activations of this process may take."""

    def __init__(self) -> None:
        self._most: int | None = None
        self.held = self.most_held = 0

    def take(self, nbytes: int) -> int:
        """Reserve memory for a tensor; returns the reserved bytes, 0 if there is no room."""
        if self._most is None:
            ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
            self._most = int(HOST_SHARE * host.free_bytes() / ranks)
        rounded = 1 << (nbytes - 1).bit_length()  # as PyTorch's allocator of page-locked memory
        if self.held + rounded > self._most:
            return 0
        self.held += rounded
        self.most_held = max(self.most_held, self.held)
        return rounded


HOST_MEMORY = HostMemory()


class OffloadedCall:
    """Replaces the call of a model."""

    def __init__(self, module: nn.Module, plain: Callable[..., Any]) -> None:
        self.module, self.plain = module, plain
        self._held = self.most_bytes = 0
        # Its kernel fills what it keeps after that is kept.
        self._fills_late = any(isinstance(one, nn.RReLU) for one in module.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.offloads() if torch.is_grad_enabled() else contextlib.nullcontext():
            return self.plain(*args, **kwargs)

    def offloads(self) -> saved_tensors_hooks:
        """Context manager: what is kept for backward goes to the host."""
        if self._fills_late:
            return saved_tensors_hooks(_OnDevice, lambda kept: kept.tensor())
        fixed = itertools.chain(self.module.parameters(), self.module.buffers())
        there = {0, *map(_address, fixed)}

        def moves(tensor: Tensor) -> bool:
            plain = type(tensor) is Tensor and tensor.layout is torch.strided
            if not plain or _address(tensor) in there:
                return False
            # An expanded tensor is smaller than it says.
            return LEAST_BYTES <= tensor.nbytes <= tensor.untyped_storage().nbytes()

        def pack(tensor: Tensor) -> _OnDevice | _OnHost:
            if moves(tensor) and (taken := HOST_MEMORY.take(tensor.nbytes)):
                with contextlib.suppress(RuntimeError):  # no page-locked memory is left
                    return _OnHost(tensor, self, taken)
            return _OnDevice(tensor)

        return saved_tensors_hooks(pack, lambda kept: kept.tensor())

    def hold(self, nbytes: int) -> None:
        self._held += nbytes
        self.most_bytes = max(self.most_bytes, self._held)


def _address(tensor: Tensor) -> int:
    """Where a tensor's storage lies; 0 if it has none of its own, as sharded and sparse ones."""
    with contextlib.suppress(RuntimeError):
        return tensor.untyped_storage().data_ptr()
    return 0


class _OnDevice:
    """A tensor that stays. PyTorch itself no longer sees whether it changes before backward."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()  # an output that refers to its own graph is never freed
        self._version = self._tensor._version

    def tensor(self) -> Tensor:
        if self._version != self._tensor._version:
            raise NotRecomputable("what backward needs was changed in place before it ran")
        return self._tensor


class _OnHost:
    def __init__(self, tensor: Tensor, call: OffloadedCall, taken: int) -> None:
        self._call, self._taken, self._nbytes = call, taken, 0
        self._device = tensor.device
        pinned = tensor.device.type == "cuda"
        with EXTRA_TIME.counted(self._device):
            copy = torch.empty_like(tensor.detach(), device="cpu", pin_memory=pinned)
            self._copy = copy.copy_(tensor.detach(), non_blocking=True)
        self._nbytes = tensor.nbytes
        call.hold(self._nbytes)

    def __del__(self) -> None:
        HOST_MEMORY.held -= self._taken
        self._call.hold(-self._nbytes)

    def tensor(self) -> Tensor:
        with EXTRA_TIME.counted(self._device):
            return self._copy.to(self._device, non_blocking=True)


def offload_in_place(model: nn.Module) -> OffloadedCall:
    """Have a model's next calls keep their activations on the host."""
    there: Callable[..., Any] | None = vars(model).get("_compiled_call_impl")
    call = OffloadedCall(model, model._call_impl if there is None else there)
    replace_call(model, call)
    return call


def plain_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call without `offload_in_place`."""
    return call.plain if isinstance(call, OffloadedCall) else call
