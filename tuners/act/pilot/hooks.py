"""Where the pilot holds on to PyTorch: its public hooks, and the few places that have none.

What is not a hook of PyTorch's own, and why:

- `nn.Module._compiled_call_impl`: the slot through which `Module.compile` replaces the call of one
  module. PyTorch leaves it out of pickles and deep copies, so that a checkpoint of a whole model
  or an EMA copy never holds anything of advisor's. Hooks on the module would be copied, and would
  be traced by torch.compile.
- `_BaseDataLoaderIter.__next__`: what the step waits for its data cannot be seen from elsewhere.
  The iterator keeps its class, which frameworks look at.
- `Tensor.backward`, in runs that are compared only: the loss is what it is called on.
- `torch.autograd.backward`, which `Tensor.backward` calls, while an advice is in force: what is
  compiled lazily for it fails there, or runs out of memory, and no hook is told.
- `sys.excepthook`: why a script ends.
- `_global_forward_hooks_with_kwargs`: what a global hook leaves there when it is removed.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

Remove = Callable[[], None]
"""Takes a hook away again."""


class Calls:
    """Tells of every module that is called by no other one, once its call is over; and of every
    one that is called, before it.

    It slows the call of every module: for the first steps only.
    """

    def __init__(
        self,
        called: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
        within: Callable[[nn.Module], None],
    ) -> None:
        inside: list[nn.Module] = []
        self._resting = False
        self._compiled = compiled()

        def enter(module: nn.Module, _args: Any) -> None:
            # What torch.compile traces of a hook must touch nothing.
            if torch.compiler.is_compiling() or self._resting:
                return
            within(module)
            if not inside:
                inside.append(module)

        def leave(module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
            if torch.compiler.is_compiling() or self._resting:
                return
            if inside and inside[0] is module:
                inside.clear()
                called(module, args, kwargs)

        self._before = register_module_forward_pre_hook(enter)
        self._after = register_module_forward_hook(leave, with_kwargs=True, always_call=True)

    def rest(self) -> None:
        """Tell no more. The hooks go, unless the script has compiled what they are part of: that
        would be compiled again without them."""
        self._resting = True
        if compiled() == self._compiled:
            self.remove()

    def remove(self) -> None:
        """Take the hooks away."""
        self._before.remove()
        self._after.remove()
        # PyTorch forgets one of its lists, and has torch.compile warn of hooks from then on.
        _global_forward_hooks_with_kwargs.pop(self._after.id, None)


def compiled() -> int:
    """Graphs that torch.compile has traced in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def through(model: nn.Module, call: Callable[..., Any] | None) -> None:
    """Call a module through something else; None: as it is by itself."""
    if call is None:
        vars(model).pop("_compiled_call_impl", None)
    else:
        model._compiled_call_impl = call


class Waits:
    """Seconds that the script has waited for its data loaders."""

    def __init__(self) -> None:
        from torch.utils.data import dataloader

        self.seconds = 0.0
        self._class = dataloader._BaseDataLoaderIter
        self._next = self._class.__next__

        def timed(iterator: Any) -> Any:
            began = time.perf_counter()
            try:
                return self._next(iterator)
            finally:
                self.seconds += time.perf_counter() - began

        self._class.__next__ = timed  # type: ignore[assignment, method-assign]

    def remove(self) -> None:
        self._class.__next__ = self._next  # type: ignore[method-assign]


def on_backward(begins: Callable[[Tensor], None]) -> Remove:
    """Tell what `backward` is called on, before it runs."""
    plain = Tensor.backward

    def backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        begins(self)
        return plain(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    Tensor.backward = backward  # type: ignore[method-assign]

    def remove() -> None:
        Tensor.backward = plain  # type: ignore[method-assign]

    return remove


def on_failing_backward(failed: Callable[[Exception], None]) -> Remove:
    """Tell what a backward pass raises, before the script has it."""
    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> None:
        try:
            plain(*args, **kwargs)
        except Exception as exc:  # whatever it is: the script's, once it was told
            failed(exc)
            raise

    torch.autograd.backward = backward

    def remove() -> None:
        if torch.autograd.backward is backward:
            torch.autograd.backward = plain

    return remove


def on_failure(failed: Callable[[BaseException], None]) -> Remove:
    """Tell what ends the script, once it is printed: whoever is told may end the process."""
    plain = sys.excepthook

    def hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> Any:
        try:
            return plain(kind, exc, trace)
        finally:
            sys.stderr.flush()
            failed(exc)

    sys.excepthook = hook

    def remove() -> None:
        if sys.excepthook is hook:
            sys.excepthook = plain

    return remove
