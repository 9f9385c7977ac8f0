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
- `_tasks_outstanding` of an iterator with workers, and the lengths of its queues: that steps find
  their batches ready does not tell whether the workers keep up. `_shutdown`: whether they are gone.
- `_worker_pids_set` of an iterator that has workers of advisor's: PyTorch raises in the middle of
  whatever runs where one of them dies. That they are missed when a batch is due is enough.
- `Tensor.backward`, in runs that are compared only: the loss is what it is called on.
- `torch.autograd.backward`, which `Tensor.backward` calls, while an advice is in force: what is
  compiled lazily for it fails there, or runs out of memory, and no hook is told.
- `torch._C._current_graph_task_id`, as PyTorch's own checkpoints use it: whether a module is called
  from within a backward pass. `torch.autograd` has no name for that.
- `step` of an optimizer, while its kernels are not the script's: what they raise is no script's own
  failure. A hook is not told of what a step raises.
- `sys.excepthook`: why a script ends.
- `_global_forward_hooks_with_kwargs`: what a global hook leaves there when it is removed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.act.patch import Patch

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

Remove = Callable[[], None]
"""Takes a hook away again."""


class Calls:
    """Tells of every module that is called by no other one, once its call is over; and of every
    one that is called, before it. A call that raises is none, nor is one that `recomputes`.

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
            if torch.compiler.is_compiling() or self._resting or recomputes():
                return
            within(module)
            if not inside:
                inside.append(module)

        def leave(module: nn.Module, args: Any, *rest: Any) -> None:
            if torch.compiler.is_compiling() or self._resting or recomputes():
                return
            if inside and inside[0] is module:
                inside.clear()
                # Of a call that raises PyTorch tells no keyword arguments.
                if len(rest) == 2:
                    called(module, args, rest[0])

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


def on_exit(told: Callable[[], None]) -> Remove:
    """Tell when the process ends by itself, whyever."""
    atexit.register(told)
    return functools.partial(atexit.unregister, told)


def recomputes() -> bool:
    """Whether a backward pass runs in this thread: what it calls was called before, as a checkpoint
    does, which may also raise in it to stop early."""
    return torch._C._current_graph_task_id() != -1


compiled = graphs_compiled


def through(model: nn.Module, call: Callable[..., Any] | None) -> None:
    """Call a module through something else; None: as it is by itself."""
    if call is None:
        vars(model).pop("_compiled_call_impl", None)
    else:
        model._compiled_call_impl = call


def leave(model: nn.Module, call: Callable[..., Any], before: Callable[..., Any] | None) -> None:
    """Call a module as before `through`, unless it has been compiled since."""
    if vars(model).get("_compiled_call_impl") is call:
        through(model, before)


def on_batches(
    begun: Callable[[DataLoader[Any], Callable[[Any], Any]], Any],
    fetch: Callable[[Any, Callable[[Any], Any]], Any],
) -> Remove:
    """Have every iterator of a DataLoader come through `begun`, which is given the loader, and what
    makes its iterator by itself; and its batches through `fetch`, which is given the iterator, and
    what gives its next batch by itself."""
    from torch.utils.data import dataloader

    def iterating(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda loader: begun(loader, plain)

    def fetching(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda iterator: fetch(iterator, plain)

    iterators = Patch(dataloader.DataLoader, "__iter__", iterating)
    batches = Patch(dataloader._BaseDataLoaderIter, "__next__", fetching)

    def remove() -> None:
        iterators.remove()
        batches.remove()

    return remove


@contextlib.contextmanager
def without_workers(loader: DataLoader[Any]) -> Iterator[None]:
    """What begins with it fetches by itself."""
    workers, timeout = loader.num_workers, loader.timeout
    loader.num_workers, loader.timeout = 0, 0
    try:
        yield
    finally:
        loader.num_workers, loader.timeout = workers, timeout


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


def unfinished(iterator: Any) -> int:
    """Batches that a DataLoader's iterator has asked its workers for, and that are not there yet.

    Where memory is pinned a thread does that, which has a queue of its own.
    """
    from torch.utils.data import dataloader

    if not isinstance(iterator, dataloader._MultiProcessingDataLoaderIter) or iterator._shutdown:
        return 0
    queues: set[Any] = {iterator._worker_result_queue, iterator._data_queue}
    ready: int = sum(one.qsize() for one in queues)
    return max(0, iterator._tasks_outstanding - ready)


def send_away(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator."""
    iterator._shutdown_workers()


def on_backward(begins: Callable[[Tensor], None]) -> Remove:
    """Tell what `backward` is called on, before it runs."""

    def telling(plain: Callable[..., Any]) -> Callable[..., Any]:
        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            begins(loss)
            return plain(loss, *args, **kwargs)

        return backward

    return Patch(Tensor, "backward", telling).remove


def on_failing_backward(failed: Callable[[Exception], None]) -> Remove:
    """Tell what a backward pass raises, before the script has it."""

    def telling(plain: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> None:
            try:
                plain(*args, **kwargs)
            except Exception as exc:  # whatever it is: the script's, once it was told
                failed(exc)
                raise

        return backward

    return Patch(torch.autograd, "backward", telling).remove


def around_step(
    optimizer: torch.optim.Optimizer, step: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Remove:
    """Have an optimizer's steps made by what `step` makes of its own."""
    return Patch(optimizer, "step", step).remove


def on_failure(failed: Callable[[BaseException], None]) -> Remove:
    """Tell what ends the script, once it is printed: whoever is told may end the process."""

    def telling(plain: Callable[..., Any]) -> Callable[..., Any]:
        def hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> Any:
            try:
                return plain(kind, exc, trace)
            finally:
                sys.stderr.flush()
                failed(exc)

        return hook

    return Patch(sys, "excepthook", telling).remove
