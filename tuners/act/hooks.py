"""Where advisor attaches to PyTorch: public hooks, and these private or patched places.

- `nn.Module._compiled_call_impl`: the slot through which `Module.compile` replaces a call. Pickles
  and deep copies leave it out, so that no checkpoint or EMA copy holds anything of advisor's.
- `DataLoader.__iter__` and `_BaseDataLoaderIter.__next__`: which loader feeds the steps, and how
  long they wait. The script gets the loader's own iterator.
- `_sampler_iter`, `_base_seed`, `_tasks_outstanding`, `_shutdown` and the queues of such an
  iterator: what workers need to go on in the middle of an epoch, and whether they keep up.
- `_worker_pids_set` of advisor's own workers: if one dies, PyTorch raises at once, wherever it is.
- `torch.autograd.backward`, which `Tensor.backward` calls, while a config is set or compared: no
  hook is told which loss it begins at, or what it raises.
- `torch._C._current_graph_task_id`, as in PyTorch's own checkpoint: whether backward runs.
- `step` of an optimizer with other kernels than the script's: no hook reports its exceptions.
- `sys.excepthook`: why a script ends.
- `_global_forward_hooks_with_kwargs`: what a global hook leaves there when it is removed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from advisor.tuners.act.compiled import graphs_compiled

Function = Callable[..., Any]
Remove = Callable[[], None]


class Patch:
    """Replaces a function of an object or a class by what `replacement` makes of it. What others
    put in its place later stays there; a removed patch only calls the original."""

    def __init__(self, owner: Any, name: str, replacement: Callable[[Function], Function]) -> None:
        self._owner, self._name = owner, name
        self._inherited = name not in vars(owner)
        self._original: Function = getattr(owner, name)
        self._acts = replacement(self._original)

        bound = isinstance(self._original, MethodType)

        @wraps(self._original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._acts(*args[bound:], **kwargs)

        # A bound method stays one: learning rate schedulers look for its function.
        self._call: Function = MethodType(call, owner) if bound else call
        setattr(owner, name, self._call)

    def remove(self) -> None:
        """Put the original back if the replacement still stands."""
        self._acts = self._original
        if vars(self._owner).get(self._name) is not self._call:
            return
        if self._inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)


class StepHooks:
    """The end of every optimizer's step. One hook serves all who wait for it: PyTorch raises if one
    comes or goes while it runs them, as when a pilot compiles there."""

    def __init__(self) -> None:
        self._told: list[Callable[[torch.optim.Optimizer], None]] = []
        self._handle: RemovableHandle | None = None
        self._inside = False

    def register(self, stepped: Callable[[torch.optim.Optimizer], None]) -> Callable[[], None]:
        """Have it called with the optimizer after each step of any; returns what ends that."""
        self._told.append(stepped)
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._stepped)

        def remove() -> None:
            if stepped in self._told:
                self._told.remove(stepped)
                self._let_go()

        return remove

    def _let_go(self) -> None:
        if self._inside and not self._told:
            # At the next call of a module, whose hooks PyTorch runs from a copy.
            def later(_module: nn.Module, _args: object) -> None:
                handle.remove()
                self._let_go()

            handle = register_module_forward_pre_hook(later)
        elif self._handle is not None and not self._told:
            self._handle.remove()
            self._handle = None

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        self._inside = True
        try:
            for stepped in tuple(self._told):
                stepped(optimizer)
        finally:
            self._inside = False


STEP_HOOKS = StepHooks()


class CallHooks:
    """Reports outermost calls once they are over, and each call before it is made, but none that
    raises or is recomputed. It slows every call."""

    def __init__(
        self,
        called: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
        within: Callable[[nn.Module], None],
    ) -> None:
        inside: list[nn.Module] = []
        self._resting = False
        self._compiled = graphs_compiled()

        def ignores() -> bool:
            # What torch.compile traces of a hook must touch nothing.
            return torch.compiler.is_compiling() or self._resting or in_backward()

        def enter(module: nn.Module, _args: Any) -> None:
            if not ignores():
                within(module)
                if not inside:
                    inside.append(module)

        def leave(module: nn.Module, args: Any, *rest: Any) -> None:
            if not ignores() and inside and inside[0] is module:
                inside.clear()
                # For a call that raises PyTorch gives no keyword arguments.
                if len(rest) == 2:
                    called(module, args, rest[0])

        # It tells the user of hooks that are not theirs.
        warnings.filterwarnings("ignore", ".*when there are global hooks on modules")
        self._before = register_module_forward_pre_hook(enter)
        self._after = register_module_forward_hook(leave, with_kwargs=True, always_call=True)

    def pause(self) -> None:
        """Report no more. Hooks stay if they may be part of the script's compiled code, which would
        be compiled again without them."""
        self._resting = True
        if graphs_compiled() == self._compiled:
            self.remove()

    def remove(self) -> None:
        """Take the hooks away."""
        self._before.remove()
        self._after.remove()
        # PyTorch forgets this one, and has torch.compile warn of hooks from then on.
        _global_forward_hooks_with_kwargs.pop(self._after.id, None)


def in_backward() -> bool:
    """Whether backward runs: in it a checkpoint calls again, and may raise to stop early."""
    return torch._C._current_graph_task_id() != -1


def replace_call(model: nn.Module, call: Callable[..., Any] | None) -> None:
    if call is None:
        vars(model).pop("_compiled_call_impl", None)
    else:
        model._compiled_call_impl = call


def on_backward(
    begins: Callable[[Any], None] | None = None, failed: Callable[[Exception], None] | None = None
) -> Remove:
    """Report what a backward pass begins at, and what it raises, before the script gets that."""

    def backward(plain: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if begins is not None:
            begins(tensors)
        try:
            plain(tensors, *args, **kwargs)
        except Exception as exc:  # whatever it is: the script's, once it was told
            if failed is not None:
                failed(exc)
            raise

    return Patch(torch.autograd, "backward", lambda plain: partial(backward, plain)).remove


def on_script_failure(failed: Callable[[BaseException], None]) -> Remove:
    """Report what ends the script, once it is printed: `failed` may end the process."""

    def hook(plain: Callable[..., Any], kind: Any, exc: BaseException, trace: Any) -> Any:
        try:
            return plain(kind, exc, trace)
        finally:
            sys.stderr.flush()
            failed(exc)

    return Patch(sys, "excepthook", lambda plain: partial(hook, plain)).remove
