"""Where advisor attaches to PyTorch: public hooks, and these private or patched places.

- `nn.Module._compiled_call_impl`: the slot through which `Module.compile` replaces a call. Pickles
  and deep copies leave it out, so that no checkpoint or EMA copy holds anything of advisor's.
- `nn.Module.compile`: PyTorch runs no hook of a module whose call it has replaced.
- `DataLoader.__iter__` and `_BaseDataLoaderIter.__next__`: to see which loader feeds the steps, and
  how long the steps wait. The script gets the loader's own iterator.
- `_sampler_iter`, `_base_seed`, `_tasks_outstanding`, `_shutdown` and the queues of such an
  iterator: to start workers in the middle of an epoch, and to see whether they keep up.
- `_dataset`, `_collate_fn` and `_num_workers` of one, to see the stacks of its loading.
- `_worker_pids_set` of advisor's own workers: otherwise the script raises as soon as one dies.
- `torch.autocast.__enter__`, to undo the script's own, which a model may enter itself.
- `torch.autograd.backward`, which `Tensor.backward` calls, while a config is set or compared, two
  commands are, or a step is counted: no hook gets the loss, or an exception. For a count also
  `JITFunction.run` of Triton; for two commands `GradScaler.scale`, to know the loss without it.
- `torch._C._current_graph_task_id`, as in PyTorch's own checkpoint: to see whether backward runs.
- `step` of an optimizer with other kernels than the script's: no hook reports its exceptions.
- `sys.excepthook`: to see the exception that ends a script.
- `_global_forward_hooks_with_kwargs`: to delete the entry that a removed global hook leaves.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import get_worker_info
from torch.utils.hooks import RemovableHandle

from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.fingerprint import unwrapped

# torch.jit.script would compile what `replace_call` sets.
getattr(torch.jit._recursive, "ignored_attributes", []).append("_compiled_call_impl")
Function = Callable[..., Any]
Remove = Callable[[], None]


class Patch:
    """Has `act` called in place of a function of an object or a class, with that function as its
    first argument. A later patch of other code stays; a removed Patch only calls the original."""

    def __init__(self, owner: Any, name: str, act: Function) -> None:
        self._owner, self._name = owner, name
        self._inherited = name not in vars(owner)
        self._original: Function = getattr(owner, name)
        self._acts: Function = partial(act, self._original)

        bound = isinstance(self._original, MethodType)

        @wraps(self._original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._acts(*args[bound:], **kwargs)

        # A bound method stays a method: learning rate schedulers read its `__func__`.
        self._call: Function = MethodType(call, owner) if bound else call
        setattr(owner, name, self._call)

    def remove(self) -> None:
        """Restore the original, unless other code has replaced the function since."""
        self._acts = self._original
        if vars(self._owner).get(self._name) is not self._call:
            return
        if self._inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)


class StepHooks:
    """Callbacks after every optimizer's step. They share one PyTorch hook: PyTorch raises if a hook
    is added or removed while its hooks run, for example when a pilot compiles in one."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[torch.optim.Optimizer], None]] = []
        self._handle: RemovableHandle | None = None
        self._inside = False

    def register(self, stepped: Callable[[torch.optim.Optimizer], None]) -> Callable[[], None]:
        """Call `stepped` after each step of any optimizer. Returns a function that ends this."""
        self._callbacks.append(stepped)
        if self._handle is None:
            untraced = _disable_dynamo(lambda *given: self._stepped(*given))

            def hook(*given: Any) -> None:
                # The script may compile its optimizer's step. `untraced` takes 7 µs.
                (untraced if torch.compiler.is_compiling() else self._stepped)(*given)

            self._handle = register_optimizer_step_post_hook(hook)

        def remove() -> None:
            if stepped in self._callbacks:
                self._callbacks.remove(stepped)
                self._unhook_if_unused()

        return remove

    def _unhook_if_unused(self) -> None:
        if self._inside and not self._callbacks:
            # At the next call of a module: PyTorch copies module hooks before it runs them.
            def later(_module: nn.Module, _args: object) -> None:
                handle.remove()
                self._unhook_if_unused()

            handle = register_module_forward_pre_hook(later)
        elif self._handle is not None and not self._callbacks:
            self._handle.remove()
            self._handle = None

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        self._inside = True
        try:
            for stepped in tuple(self._callbacks):
                stepped(optimizer)
        finally:
            self._inside = False


STEP_HOOKS = StepHooks()


class CallHooks:
    """Calls `within` before each call of a module, and `called` after an outermost call, unless it
    raises; its last argument is the module that redirects to it, else the same. An outermost call
    runs in the context that `begins` returns. Not for recomputed calls, calls in a loader's worker,
    and modules without weights, such as losses and transforms. Every call becomes slower."""

    def __init__(
        self,
        called: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], nn.Module], None],
        within: Callable[[nn.Module], None],
        begins: Callable[[nn.Module], AbstractContextManager[Any] | None] = lambda _module: None,
    ) -> None:
        inside, redirecting = list[nn.Module](), list[nn.Module]()
        self._around = around = ExitStack()
        self._resting = False
        self._compiled = graphs_compiled()

        def ignores() -> bool:
            # While torch.compile traces a hook, the hook must have no effect. torch.jit traces for
            # TensorBoard's graph of the model, as in YOLOv5.
            if torch.compiler.is_compiling() or is_tracing() or self._resting or in_backward():
                return True
            return get_worker_info() is not None  # a worker inherits these hooks

        def enter(module: nn.Module, _args: Any) -> None:
            if not ignores():
                within(module)
                # A model may define another `parameters`.
                if not inside and any(True for _ in nn.Module.parameters(module)):
                    (redirecting if redirects(module) else inside).append(module)
                    if inside and (context := begins(module)) is not None:
                        around.enter_context(context)

        def leave(module: nn.Module, args: Any, *rest: Any) -> None:
            if not ignores() and inside and inside[0] is module:
                inside.clear()
                around.close()
                # PyTorch passes no keyword arguments if the call has raised.
                if len(rest) == 2:
                    called(module, args, rest[0], (redirecting or [module])[0])
            elif redirecting and redirecting[0] is module:
                redirecting.clear()

        def compile(plain: Function, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            plain(module, *args, **kwargs)
            compiled: Any = module._compiled_call_impl  # None in some of PyTorch's stubs

            def call(*args: Any, **kwargs: Any) -> Any:
                enter(module, args)
                done: tuple[Any, ...] = ()
                try:
                    done = kwargs, compiled(*args, **kwargs)
                    return done[1]
                finally:
                    leave(module, args, *done)

            replace_call(module, call)

        # Otherwise PyTorch warns the user of advisor's hooks.
        warnings.filterwarnings("ignore", ".*when there are global hooks on modules")
        self._before = register_module_forward_pre_hook(enter)
        self._after = register_module_forward_hook(leave, with_kwargs=True, always_call=True)
        self._compile = Patch(nn.Module, "compile", compile)

    def pause(self) -> None:
        """Stop reporting. Hooks that may be part of compiled code stay: it would compile again."""
        self._resting = True
        self._around.close()
        if graphs_compiled() == self._compiled:
            self.remove()

    def remove(self) -> None:
        """Remove the hooks. The calls of modules that were compiled meanwhile report no more."""
        self._resting = True
        self._compile.remove()
        self._before.remove()
        self._after.remove()
        # PyTorch leaves this entry, and torch.compile would warn of hooks from then on.
        _global_forward_hooks_with_kwargs.pop(self._after.id, None)


def is_tracing() -> bool:
    """Whether torch.jit traces a call."""
    return torch._C._is_tracing()


def in_backward() -> bool:
    """Whether backward runs. Activation checkpointing calls modules again in backward."""
    return torch._C._current_graph_task_id() != -1


def replace_call(model: nn.Module, call: Callable[..., Any] | None) -> None:
    if call is None:
        vars(model).pop("_compiled_call_impl", None)
    else:
        vars(model)["_compiled_call_impl"] = call  # Fabric's wrapper would set it in its model too


class ModuleCall:
    """What replaces a module's call. Copies of the module do not have it, however they are made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def redirects(module: nn.Module) -> bool:
    """Whether this call of a module, or of a wrapper of it, runs another method for Lightning, such
    as training_step, in which the script calls its models."""
    call = vars(unwrapped(module)).get("forward")
    return getattr(call, "__name__", "") == "wrapped_forward" and "lightning" in call.__module__


def on_backward(
    begins: Callable[[Any], None] | None = None, failed: Callable[[Exception], object] | None = None
) -> Remove:
    """Call `begins` with the loss of a backward pass, and `failed` with its exception. If `failed`
    returns True, the script does not get the exception, and the loss has no graph any more."""

    def backward(plain: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if begins is not None:
            begins(tensors)
        try:
            plain(tensors, *args, **kwargs)
        except Exception as exc:  # of any kind
            if failed is None or failed(exc) is not True:
                raise
            for tensor in tree_leaves(tensors):
                tensor.detach_()

    return Patch(torch.autograd, "backward", backward).remove


@contextmanager
def no_autocast(kind: str) -> Iterator[None]:
    """Context manager: autocast does nothing, also where the model itself enters it. Code must not
    be compiled meanwhile: its guards would not see this."""

    def enter(plain: Callable[..., Any], context: Any) -> Any:
        own, context._enabled = context._enabled, False
        try:
            return plain(context)
        finally:
            context._enabled = own

    patch = Patch(torch.autocast, "__enter__", enter)
    try:
        with torch.autocast(kind):
            yield
    finally:
        patch.remove()


def on_script_failure(failed: Callable[[BaseException], None]) -> Remove:
    """Call `failed` with the exception that ends the script, once that is printed."""

    def hook(plain: Callable[..., Any], kind: Any, exc: BaseException, trace: Any) -> Any:
        try:
            return plain(kind, exc, trace)
        finally:
            sys.stderr.flush()
            failed(exc)

    return Patch(sys, "excepthook", hook).remove
