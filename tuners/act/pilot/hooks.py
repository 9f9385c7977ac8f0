"""Where the pilot holds on to PyTorch: its public hooks, and the few places that have none.

What is not a hook of PyTorch's own, and why:

- `nn.Module._compiled_call_impl`: the slot through which `Module.compile` replaces the call of one
  module. PyTorch leaves it out of pickles and deep copies, so that a checkpoint of a whole model
  or an EMA copy never holds anything of advisor's. Hooks on the module would be copied, and would
  be traced by torch.compile.
- `DataLoader.__iter__` and `_BaseDataLoaderIter.__next__`: which loader feeds the steps, and what
  they wait for it, cannot be seen from elsewhere. What the loader gives is its own iterator, of
  its own class, which frameworks look at. The constructor is left alone: it runs before anything
  is known of what trains.
- `_sampler_iter` of such an iterator: what its sampler has left to say, which is all that workers
  need to go on from the middle of an epoch. `_base_seed`: what they seed themselves by.
- `_worker_pids_set` of an iterator that has workers of advisor's: PyTorch raises in the middle of
  whatever runs where one of them dies. That they are missed when a batch is due is enough.
- `Tensor.backward`, in runs that are compared only: the loss is what it is called on.
- `sys.excepthook`: why a script ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

Remove = Callable[[], None]
"""Takes a hook away again."""


def on_calls(
    called: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
    within: Callable[[nn.Module], None],
) -> Remove:
    """Tell of every module that is called by no other one, once its call is over; and of every
    one that is called, before it.

    It slows the call of every module: for the first steps only.
    """
    inside: list[nn.Module] = []

    def enter(module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        within(module)
        if not inside:
            inside.append(module)

    def leave(module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
        if inside and inside[0] is module:
            inside.clear()
            called(module, args, kwargs)

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, with_kwargs=True, always_call=True),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def on_step(stepped: Callable[[torch.optim.Optimizer], None]) -> Remove:
    """Tell of every step of every optimizer, once it is over."""
    inside = False
    handles: list[RemovableHandle] = []

    def hook(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        nonlocal inside
        inside = True
        try:
            stepped(optimizer)
        finally:
            inside = False

    def remove() -> None:
        if inside:
            # PyTorch goes through its hooks just now, and raises where one is gone; through those
            # of a module's call it goes by a copy.
            handles.append(register_module_forward_pre_hook(lambda _module, _args: remove()))
            return
        for handle in handles:
            handle.remove()

    handles.append(register_optimizer_step_post_hook(hook))
    return remove


def through(model: nn.Module, call: Callable[..., Any] | None) -> None:
    """Call a module through something else; None: as it is by itself."""
    if call is None:
        vars(model).pop("_compiled_call_impl", None)
    else:
        model._compiled_call_impl = call


def on_batches(
    begun: Callable[[DataLoader[Any], Any], None],
    fetch: Callable[[Any, Callable[[Any], Any]], Any],
) -> Remove:
    """Tell of every iterator that a DataLoader gives, and have its batches come through `fetch`,
    which is given the iterator, and what gives its next batch by itself."""
    from torch.utils.data import dataloader

    iterator_of = dataloader._BaseDataLoaderIter
    plain, next_ = dataloader.DataLoader.__iter__, iterator_of.__next__

    def iterate(self: DataLoader[Any]) -> Any:
        iterator = plain(self)
        begun(self, iterator)
        return iterator

    def batch(iterator: Any) -> Any:
        return fetch(iterator, next_)

    dataloader.DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    iterator_of.__next__ = batch  # type: ignore[assignment, method-assign]

    def remove() -> None:
        dataloader.DataLoader.__iter__ = plain  # type: ignore[method-assign]
        iterator_of.__next__ = next_  # type: ignore[method-assign]

    return remove


def indices_of(iterator: Any) -> Iterator[Any]:
    """What a DataLoader's iterator has left to fetch."""
    indices: Iterator[Any] = iterator._sampler_iter
    return indices


def fetch_by(iterator: Any, indices: Iterator[Any]) -> None:
    """Have a DataLoader's iterator fetch these from here on."""
    iterator._sampler_iter = indices


def seed_of(iterator: Any) -> int:
    """By which workers of a DataLoader's iterator would seed themselves."""
    return int(iterator._base_seed)


def miss_quietly(iterator: Any) -> None:
    """Have a worker that dies be missed when its batch is due, and not before."""
    if iterator._worker_pids_set:
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def send_away(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator."""
    iterator._shutdown_workers()


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
