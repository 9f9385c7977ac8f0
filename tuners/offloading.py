"""What a model keeps for backward, in page-locked memory of the host. Unlike PyTorch's save_on_cpu
(https://docs.pytorch.org/docs/stable/autograd.html), weights and small tensors stay where they are,
and no copy waits for the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from advisor.tuners import host
from advisor.tuners.act.hooks import replace_call

LEAST_BYTES = 2**20
"""A smaller tensor stays on the device: its copy takes as long as starting it."""
HOST_SHARE = 0.5
"""Fraction of the host's free memory that may hold activations."""


class ExtraTime:
    """Counts the time that steps take to save memory: to recompute and to copy activations."""

    def __init__(self) -> None:
        self.counts = False
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host_s = 0.0

    @contextlib.contextmanager
    def counted(self, device: torch.device) -> Iterator[None]:
        if not self.counts:
            yield
            return
        began_s = time.perf_counter()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * (device.type == "cuda"))]
        for event in events[:1]:
            event.record()
        try:
            yield
        finally:  # a second call ends early, by an exception
            for event in events[1:]:
                event.record()
                self._events.append((events[0], event))
            self._host_s += 0.0 if events else time.perf_counter() - began_s

    def take(self) -> float:
        """Return the seconds since the last call."""
        if self._events:
            self._events[-1][1].synchronize()
        taken = self._host_s + sum(float(a.elapsed_time(b)) for a, b in self._events) / 1e3
        self._events.clear()
        self._host_s = 0.0
        return taken


EXTRA_TIME = ExtraTime()


class OffloadedCall:
    """Replaces the call of a model."""

    def __init__(self, module: nn.Module, plain: Callable[..., Any]) -> None:
        self.module, self.plain = module, plain
        self._most: int | None = None  # bytes of the host's memory that it may use
        self._held = self.most_bytes = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.offloads() if torch.is_grad_enabled() else contextlib.nullcontext():
            return self.plain(*args, **kwargs)

    def offloads(self) -> saved_tensors_hooks:
        """Context manager: what is kept for backward goes to the host."""
        if self._most is None:
            self._most = int(HOST_SHARE * host.free_bytes())
        most = self._most
        weights = {weight.untyped_storage().data_ptr() for weight in self.module.parameters()}

        def pack(tensor: Tensor) -> Tensor | _OnHost:
            tensor = tensor.detach()  # an output that refers to its own graph is never freed
            stored, large = tensor.untyped_storage(), tensor.nbytes >= LEAST_BYTES
            plain = type(tensor) is Tensor and tensor.layout is torch.strided
            fits = tensor.nbytes <= min(most - self._held, stored.nbytes())
            if plain and large and fits and stored.data_ptr() not in weights:
                return _OnHost(tensor, self)
            return tensor

        return saved_tensors_hooks(pack, _unpack)

    def hold(self, nbytes: int) -> None:
        self._held += nbytes
        self.most_bytes = max(self.most_bytes, self._held)


class _OnHost:
    def __init__(self, tensor: Tensor, call: OffloadedCall) -> None:
        self._call, self.device = call, tensor.device
        call.hold(tensor.nbytes)
        pinned = tensor.device.type == "cuda"
        with EXTRA_TIME.counted(self.device):
            self.copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            self.copy.copy_(tensor, non_blocking=True)

    def __del__(self) -> None:
        self._call.hold(-self.copy.nbytes)


def _unpack(kept: Tensor | _OnHost) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    with EXTRA_TIME.counted(kept.device):
        return kept.copy.to(kept.device, non_blocking=True)


def offload_in_place(model: nn.Module) -> OffloadedCall:
    """Have a model's next calls keep their activations on the host."""
    there: Callable[..., Any] | None = vars(model).get("_compiled_call_impl")
    call = OffloadedCall(model, model._call_impl if there is None else there)
    replace_call(model, call)
    return call


def plain_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call without `offload_in_place`."""
    return call.plain if isinstance(call, OffloadedCall) else call
