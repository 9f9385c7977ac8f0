"""A recorder for the CPU that replays the ATen operations of a step into the same tensors.

It acts like a CUDA graph: a replay runs none of the step's Python code, writes each result to its
old memory and draws new random numbers. After recording, changes to older tensors are undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
"""Operations for which the host would wait for the device."""


class AtenRecorder:
    """Implements `advisor.tuners.act.capture.captured_graph.Recorder`. `fault`: called with an
    operation's name; if true, replays leave it out."""

    device = "cpu"

    def __init__(self) -> None:
        self.fault: Callable[[str], bool] = lambda _name: False
        self.exhausted = False
        self.recordings = self.replays = 0

    @contextmanager
    def side_stream(self) -> Iterator[list[str]]:
        waits: list[str] = []
        with _Waits(waits):
            yield waits

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.recordings += 1
        state, tape = torch.get_rng_state(), _Tape(self.fault)
        try:
            with tape:
                output = step()
        finally:
            tape.undo()
            torch.set_rng_state(state)

        def replay() -> None:
            if self.exhausted:
                raise torch.OutOfMemoryError("out of memory")
            self.replays += 1
            tape.replay()

        return replay, output


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


class _Waits(TorchDispatchMode):
    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITS:
            self.waits.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class _Tape(TorchDispatchMode):
    def __init__(self, fault: Callable[[str], bool]) -> None:
        super().__init__()
        self.fault = fault
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: set[int] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in WAITS:
            raise RuntimeError(f"operation not permitted during capture: {name}")
        given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(given.get(argument.name)):
                    self._save(tensor)
        result = func(*args, **kwargs)
        known = set(map(_storage, _tensors((args, kwargs))))
        self.made |= set(map(_storage, _tensors(result))) - known
        if not self.fault(name):
            self.calls.append((func, args, kwargs, result))
        return result

    def _save(self, tensor: Tensor) -> None:
        if _storage(tensor) not in self.made and id(tensor) not in self.before:
            self.before[id(tensor)] = tensor, tensor.detach().clone()

    def undo(self) -> None:
        with torch.no_grad():
            for tensor, saved in reversed(self.before.values()):
                tensor.detach().copy_(saved)

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, result in self.calls:
                known = {_storage(tensor) for tensor in _tensors((args, kwargs))}
                results = _tensors(func(*args, **kwargs))
                for ours, theirs in zip(_tensors(result), results, strict=True):
                    if _storage(ours) not in known and ours.numel():
                        ours.detach().copy_(theirs)
