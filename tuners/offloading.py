"""What a model keeps for backward, in page-locked memory of the host. Unlike PyTorch's save_on_cpu
(https://docs.pytorch.org/docs/stable/autograd.html), weights and small tensors stay where they are,
and no copy waits for the device.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import mmap
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from advisor.tuners import environment, host
from advisor.tuners.act.hooks import ModuleCall, replace_call
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


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Bytes of the host to copy a device's tensors to, page-locked for a GPU; may raise
    RuntimeError.

    PyTorch's own way takes three to eight times as long, because one thread makes all pages, and
    doubles the memory at worst (benchmarks/results/memory.md). A process that the script forks does
    not get these pages: Linux would copy them all for it.
    """
    if device.type != "cuda":
        return torch.empty(nbytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    found = torch.frombuffer(pages, dtype=torch.uint8).zero_()  # by several threads
    if code := int(torch.cuda.cudart().cudaHostRegister(found.data_ptr(), nbytes, 0)):
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)  # takes CUDA's last error, which the script would get
        raise RuntimeError(f"cudaHostRegister failed with code {code}")
    unlock = torch.cuda.cudart().cudaHostUnregister
    weakref.finalize(pages, unlock, found.data_ptr()).atexit = False
    return found


@torch.no_grad()
def copy_to(buffer: Tensor, tensor: Tensor) -> Tensor:
    """A copy of a tensor in a buffer, with the same strides; does not wait for the device."""
    strides = torch.empty_like(tensor, device="meta").stride()
    found = buffer[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, strides)
    return found.copy_(tensor, non_blocking=True)


class HostMemory:
    """The memory of the host that the activations of this process may take. A step's buffers stay
    for the next steps."""

    def __init__(self) -> None:
        self._most: int | None = None
        # By the stream that copies to and from them, so that its next copy comes after the last
        # one; the smallest come first.
        self._unused: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._returned: deque[tuple[Tensor, int]] = deque()  # not yet in `_unused`
        self._lock = threading.RLock()
        self._taken = self.most_held = 0  # bytes

    @property
    def held(self) -> int:
        """Bytes of the buffers in use."""
        return self._taken - sum(len(buffer) for buffer, _ in [*self._returned])

    def take(self, nbytes: int, device: torch.device) -> Tensor | None:
        """A buffer for a tensor; None if there is no room."""
        with self._lock:
            if self._most is None:
                ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
                self._most = int(HOST_SHARE * host.free_bytes() / ranks)
            while self._returned:
                buffer, stream = self._returned.popleft()
                self._taken -= len(buffer)
                bisect.insort(self._unused[stream], buffer, key=len)
            unused = self._unused[stream_of(device)]
            at = bisect.bisect_left(unused, nbytes, key=len)
            if at < len(unused) and len(unused[at]) <= 2 * nbytes:
                found = unused.pop(at)
            else:
                left = self._most - self._taken - nbytes
                if sum(map(len, itertools.chain(*self._unused.values()))) > left:
                    environment.synchronize(device)  # copies may still use them
                    self._unused.clear()
                if left < 0:
                    return None
                try:
                    found = host_buffer(nbytes, device)
                except RuntimeError:  # no page-locked memory is left
                    return None
            self._taken += len(found)
            self.most_held = max(self.most_held, self._taken)
            return found

    def give_back(self, buffer: Tensor, stream: int) -> None:
        """Of any thread, also from within `take`, by the garbage collector."""
        self._returned.append((buffer, stream))


HOST_MEMORY = HostMemory()


def stream_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    found: int = torch.cuda.current_stream(device).cuda_stream
    return hash((device.index, found))  # a GPU's default stream is 0 on each


class OffloadedCall(ModuleCall):
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
            if moves(tensor):
                taken = HOST_MEMORY.take(tensor.nbytes, tensor.device)
                if taken is not None:
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
    def __init__(self, tensor: Tensor, call: OffloadedCall, buffer: Tensor) -> None:
        self._call, self._buffer = call, buffer
        self._device, self._stream = tensor.device, stream_of(tensor.device)
        call.hold(tensor.nbytes)
        with EXTRA_TIME.counted(self._device):
            self._copy = copy_to(buffer, tensor.detach())

    def __del__(self) -> None:
        HOST_MEMORY.give_back(self._buffer, self._stream)
        self._call.hold(-self._copy.nbytes)

    def tensor(self) -> Tensor:
        here = stream_of(self._device) == self._stream
        with EXTRA_TIME.counted(self._device):
            if not here:  # the copies of two streams do not wait for each other
                environment.synchronize(self._device)
            # A copy also on the CPU: the buffer's next tensor may come before this one's end.
            found = self._copy.to(self._device, non_blocking=here, copy=True)
        return found


def offload_in_place(model: nn.Module) -> OffloadedCall:
    """Have a model's next calls keep their activations on the host."""
    there: Callable[..., Any] | None = vars(model).get("_compiled_call_impl")
    call = OffloadedCall(model, model._call_impl if there is None else there)
    replace_call(model, call)
    return call


def plain_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call without `offload_in_place`."""
    return call.plain if isinstance(call, OffloadedCall) else call
