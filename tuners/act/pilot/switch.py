"""Sets configs in a running script, between two of its steps."""

from __future__ import annotations

import contextlib
import itertools
import math
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils._pytree import tree_leaves

from advisor.cache.config import Config
from advisor.tuners.act import compiled, hooks, layouts, ranks
from advisor.tuners.act.applied import AppliedConfig
from advisor.tuners.act.artifacts import restore_keys, use_stable_keys
from advisor.tuners.act.gate import Gate
from advisor.tuners.act.pilot.loop_observer import TrainedModel, weights_of
from advisor.tuners.act.pilot.wrappers import Shards, Wrappers
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.act.replays import Replays
from advisor.tuners.act.trees import map_tensors
from advisor.tuners.decisions import LEAST_FREE
from advisor.tuners.faults import is_config_error
from advisor.tuners.fingerprint import wrapped
from advisor.tuners.offloading import OffloadedCall, plain_call
from advisor.tuners.recomputation import recomputed_calls, replace_calls

OnError = Callable[[Exception], object] | None
CompiledRegions = dict[nn.Module, Callable[..., Any]]  # the compiled calls of a model's modules


class ModelCall(hooks.ModuleCall):
    """Replaces the call of a trained model: counts calls, and makes training calls through `act`.
    Evaluation stays the script's own. `on_error` gets exceptions that only `act` raises."""

    def __init__(
        self,
        one: TrainedModel,
        module: nn.Module,
        shards: Shards | None = None,
        own_layout: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.one, self.module, self._shards = one, module, shards or Shards(())
        self._own_layout = own_layout
        there = vars(module).get("_compiled_call_impl")
        self.plain: Callable[..., Any] = module._call_impl if there is None else there
        self.bare = plain_call(self.plain)  # whose activations stay on the device
        self.act = self.plain
        self.on_error: OnError = None
        self.base: CompiledRegions = {}  # of the script's own config
        self.regions: CompiledRegions = {}
        self.outputs: list[weakref.ref[Tensor]] = []  # of the last call, if `keeps_outputs`
        self.keeps_outputs = False
        self.made = False  # whether this step has made a call through `act`

    def leave(self, call: Callable[..., Any]) -> None:
        """Put a call back, unless the model was compiled in the meantime."""
        if vars(self.module).get("_compiled_call_impl") is self:
            hooks.replace_call(self.module, None if call == self.module._call_impl else call)

    def put(self, regions: CompiledRegions) -> None:
        """Replace the calls of these modules, and restore those of all others."""
        for module in {**self.base, **self.regions}:
            hooks.replace_call(module, regions.get(module))

    def uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model as the script's own config does."""
        self.put(self.base)
        try:
            return self.plain(*args, **kwargs)
        finally:
            self.put(self.regions)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "forward" in vars(self.module) and hooks.redirects(self.module):
            return self.plain(*args, **kwargs)
        training = torch.is_grad_enabled() and self.one.model.training
        if not training or hooks.is_tracing():  # compiled code cannot be traced
            self.one.evaluated |= not self.one.model.training
            if not torch.is_grad_enabled():
                self._shards.evaluate()
            return self.uncompiled(*args, **kwargs)
        if hooks.in_backward():
            return self.act(*args, **kwargs)
        self._shards.train()
        if self.act is self.plain:
            self.one.saw(args, kwargs)
            return self.plain(*args, **kwargs)
        self.one.count(args, kwargs)
        try:
            found = self.act(*args, **kwargs)
            self.made = True
            if self.keeps_outputs:
                self.outputs = [weakref.ref(o) for o in tree_leaves(found) if isinstance(o, Tensor)]
            return found
        except Exception as exc:  # whatever a config raises: a run is worth more than its advice
            if self.on_error is None or not self._shards.recover():
                raise
            raised = exc.with_traceback(None)  # its frames hold memory of the call
        if is_config_error(raised):
            self.on_error(raised)
            return self.uncompiled(*args, **kwargs)
        with self._own_layout():
            found = _retry(self.uncompiled, args, kwargs, raised)
        self.on_error(raised)
        return found


def _retry(
    uncompiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], raised: Exception
) -> Any:
    """Repeat a call without the config under which it raised. Another exception is the script's."""
    try:
        return uncompiled(*args, **kwargs)
    except Exception as own:
        own.add_note(f"advisor: raised in a second call; the first, with advice, raised {raised!r}")
        raise


class ConfigSwitch:
    """Sets configs in one script's models and optimizers.

    Args:
        own: the script's own config; setting it restores the script.
        feed: sets these keyword arguments of the script's loaders; none restores the loaders.
        wrappers: of the models.
    """

    def __init__(
        self,
        trained: Sequence[TrainedModel],
        optimizers: Sequence[torch.optim.Optimizer],
        own: Config,
        device: torch.device,
        feed: Callable[[Mapping[str, Any]], None],
        wrappers: Wrappers | None = None,
    ) -> None:
        self.own = self.config = own
        self._feed, self.trained, self.device = feed, trained, device
        self.wrappers = wrappers or Wrappers(())
        self.optimizers = list(optimizers)
        self._groups = [[dict(group) for group in one.param_groups] for one in optimizers]
        self._watching = contextlib.ExitStack()  # catches the present config's exceptions
        self._attached = contextlib.ExitStack()
        outers = dict.fromkeys(one.caller for one in trained if not replicates(one.outer))
        self._outers = [outer for outer in outers if layouts.can_rebuild(outer)]
        weights = (w for outer in self._outers for w in (*outer.parameters(), *outer.buffers()))
        self._strides = {w: w.stride() for w in weights if w.dim() > 3 and layouts.is_alone(w)}
        self._storages = layouts.Storages()
        every = itertools.chain(*self._groups)
        self._steps_on_host = not any(one.get("fused") or one.get("capturable") for one in every)
        for one in optimizers:
            self._attached.callback(one.register_state_dict_post_hook(self._saved).remove)
        self._attached.callback(restore_keys)
        self._replays = Replays()
        self._fallbacks = math.inf
        self._compiled_code = compiled.CompiledCode()
        self._made: dict[Config, set[str | int]] = {}
        self._seen = {own: AppliedConfig(own, own, device)}
        self._flags = Config()
        self._kept: dict[Config, dict[nn.Module, tuple[Callable[..., Any], CompiledRegions]]] = {}
        self.calls: list[ModelCall] = []
        for trains in trained:
            module = callable_module(trains.outer)
            if module is not None and all(call.module is not module for call in self.calls):
                shards, own_layout = self.wrappers.shards, self._own_layout
                self.calls.append(ModelCall(trains, module, shards, own_layout))
                hooks.replace_call(module, self.calls[-1])
                self.calls[-1].base = self.calls[-1].regions = recomputed_calls(module)

    @property
    def fell_back(self) -> bool:
        return compiled.fallbacks() > self._fallbacks

    def set(
        self,
        config: Config,
        on_error: OnError = None,
        on_backward: OnError = None,
        *,
        disposable: bool = False,
    ) -> None:
        """Have the script train with a config from now on.

        Args:
            on_error: gets the exception of a call or step, which is repeated without the config.
            on_backward: gets the exception of backward; the script gets it too, unless it returns
                True.
            disposable: whether `abandon_step` may follow.
        """
        self._claim()
        self._watching.close()
        if on_backward is not None:
            self._watching.callback(hooks.on_backward(failed=on_backward))
        applied = self._seen[config] = AppliedConfig(config, self.own, self.device)
        PROCESS_FLAGS.release(self._flags)
        self._flags = Config({knob.name: value for knob, value in applied.rows if knob.flag})
        self.put_flags()
        self._feed(applied.loader())
        self.wrappers.set(Config({knob.name: value for knob, value in applied.rows}))
        if self.wrappers.is_sharded:  # FSDP2's policy sets the number format
            applied.autocast, applied.undoes_autocast = None, False
        with torch.no_grad():
            self._lay_out(applied)
            self._set_optimizers(applied.optimizer(), on_error, on_backward)
        for call in self.calls:
            call.put({})
            call.act, call.regions = self._act(call, applied)
            call.put(call.regions)
            call.on_error, call.keeps_outputs = on_error, disposable
        self.config = config
        compiles = any(knob.compile_s for knob, _value in applied.rows)
        self._fallbacks = compiled.fallbacks() if compiles else math.inf
        self._make_room()

    def put_flags(self) -> None:
        """Set the flags of the present config."""
        PROCESS_FLAGS.put(self._flags)

    def release_flags(self) -> None:
        """Reset the flags, because another model trains, for which they were not measured; unless
        the config compiles: code that depends on the flags would be compiled again."""
        if not self._seen[self.config].compiles:
            PROCESS_FLAGS.release(self._flags)

    def forget(self, config: Config) -> None:
        """Free the code and storages that only this config uses, unless it is the present one."""
        if config in (self.own, self.config) or config not in self._seen:
            return
        self._claim()
        code = _code(self._seen.pop(config))
        if code not in map(_code, self._seen.values()):
            self._kept.pop(code, None)
            compiled.free(self._made.pop(code, set()))
        if not any(applied.layouts for applied in self._seen.values()):
            self._storages = layouts.Storages()  # weights are where the script has them
        self._make_room()

    def _claim(self) -> None:
        """Assign the code that was compiled since the last call to the present config."""
        made = self._made.setdefault(_code(self._seen[self.config]), set())
        made |= self._compiled_code.claim()

    def _make_room(self) -> None:
        if self.device.type == "cuda":
            available, memory = torch.cuda.mem_get_info(self.device)
            if available < LEAST_FREE * memory:
                torch.cuda.empty_cache()

    def drop_config(self) -> None:
        """Within a step, go back to the script's own calls, and drop the config's code. Weights
        keep their present memory format until the next `set`: the step may still need it."""
        self._watching.close()
        PROCESS_FLAGS.release(self._flags)
        self._kept.pop(_code(self._seen[self.config]), None)
        self._set_optimizers({})
        for call in self.calls:
            call.put(call.base)
            call.act, call.regions, call.on_error = call.plain, call.base, None

    def abandon_step(self) -> None:
        """After a failed backward, free the step's graph, and have its update change little."""
        for output in (there() for call in self.calls for there in call.outputs):
            with contextlib.suppress(RuntimeError):  # a view keeps its graph
                if output is not None:
                    output.detach_()
        for weight in itertools.chain(*map(weights_of, self.optimizers)):
            if weight.requires_grad:
                weight.grad = torch.zeros_like(weight)

    def begin_step(self, *, freed: bool = False) -> None:
        """Begin a step; `freed`: whether the script frees the last step's gradients."""
        self.wrappers.shards.begin_step()
        for call in self.calls:
            call.made = False
        if self._seen[self.config].graphs:
            self._replays.begin()
            if freed:
                self._replays.let_go(self.optimizers)

    def make_final(self) -> None:
        """Restore the calls of models that the present config, the last one, does not change."""
        for call in self.calls:
            if call.act is call.plain:
                call.leave(call.plain)

    def release(self) -> None:
        self.set(self.own)
        for call in self.calls:
            call.put({})
            call.leave(call.bare)
        self._attached.close()
        self.calls.clear()
        self._kept.clear()
        self._storages = layouts.Storages()

    @contextlib.contextmanager
    def _own_layout(self) -> Iterator[None]:
        """Weights have the script's own memory format, for a call that failed in another, as a
        `view` of its activations does; after a second failure as before. Not if compiled code of
        this step may need them as they are, or another rank has not failed."""
        applied = self._seen[self.config]
        stays = not applied.layouts or (applied.compiles and any(one.made for one in self.calls))
        if stays or not ranks.all_failed():
            yield
            return
        with torch.no_grad():
            self._lay_out(self._seen[self.own])
        try:
            yield
        except BaseException:
            with torch.no_grad():
                self._lay_out(applied)
            raise

    def _lay_out(self, applied: AppliedConfig) -> None:
        changes = False
        for tensor, stride in self._strides.items():  # the script's own
            for layout, value in applied.layouts:
                if (found := layout(tensor, value)) is not None:
                    stride = torch.empty_like(tensor, device="meta", memory_format=found).stride()
            laid_out = self._storages.laid_out(id(tensor), tensor.data, stride)
            if tensor.stride() != stride:
                tensor.data, changes = laid_out, True
        if not changes:
            return
        for outer in self._outers:
            layouts.rebuild(outer)
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for name, value in state.items() if isinstance(parameter, Tensor) else ():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        there = (id(parameter), name)
                        state[name] = self._storages.laid_out(there, value, parameter.stride())
        for tensor in self._strides:
            if tensor.grad is not None:
                tensor.grad = layouts.strided(tensor.grad, tensor.stride())

    def _set_optimizers(
        self, given: dict[str, Any], on_error: OnError = None, on_backward: OnError = None
    ) -> None:
        """Set these options in every parameter group; the script's other options stay."""
        for optimizer, groups in zip(self.optimizers, self._groups, strict=True):
            changes = bool(given) and _takes_fused(optimizer)
            for group, own in zip(optimizer.param_groups, groups, strict=False):
                group |= _kernels(own)
                if changes and "fused" in own:
                    group |= given | {"foreach": False}
            for parameter, state in optimizer.state.items():
                # Some optimizers keep other things beside their weights' states.
                step = state.get("step") if isinstance(parameter, Tensor) else None
                if isinstance(step, Tensor) and self._steps_on_host:
                    state["step"] = step.to(parameter.device if changes else "cpu")
            if changes and on_error is not None:
                self._guard_step(optimizer, on_error, on_backward)

    def _guard_step(
        self,
        optimizer: torch.optim.Optimizer,
        on_error: Callable[[Exception], object],
        on_backward: OnError,
    ) -> None:
        """If an optimizer's step fails under the config, make the rest of it without the config."""

        def protected(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            groups = optimizer.param_groups
            versions = [_version(one, optimizer) for one in groups]
            try:
                return step(*args, **kwargs)
            except Exception as exc:  # whatever a config raises: see ModelCall
                done = _groups_done(optimizer, exc)
                if done is not None and _version(groups[done], optimizer) != versions[done]:
                    with torch.no_grad():
                        torch._foreach_sub_(list(_counters(groups[done], optimizer)), 1)
                self._watching.close()
                self._set_optimizers({})
                if done is None:
                    if on_backward is not None:
                        on_backward(exc)
                    raise
                raised = exc.with_traceback(None)
            on_error(raised)  # now: at the end of the step another config may be set
            optimizer.param_groups = groups[done:]
            try:
                return _retry(step, args, kwargs, raised)
            finally:
                optimizer.param_groups = groups

        self._watching.callback(hooks.Patch(optimizer, "step", protected).remove)

    def _saved(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state_dict with the script's own kernels; `saved` stays."""
        own_groups = self._groups[self.optimizers.index(optimizer)]
        groups = [dict(group) for group in saved["param_groups"]]
        for group, own in zip(groups, own_groups, strict=False):  # groups may have been added
            group |= _kernels(own)
        state = dict(saved["state"])
        for index, kept in state.items() if self._steps_on_host else ():
            step = kept.get("step") if isinstance(kept, dict) else None
            if isinstance(step, Tensor):
                state[index] = kept | {"step": step.cpu()}
        return saved | {"param_groups": groups, "state": state}

    def _act(
        self, call: ModelCall, applied: AppliedConfig
    ) -> tuple[Callable[..., Any], CompiledRegions]:
        """The function for a model's training calls under a config, and its compiled regions."""
        code = _code(applied)
        if not code:
            return call.plain, call.base
        kept = self._kept.setdefault(code, {})
        if call.module not in kept:
            inner: Callable[..., Any] = call.bare
            if applied.undoes_compile:
                inner = torch.compiler.set_stance("force_eager")(call.bare)
            elif applied.compiles:
                inner = self._compiled(call, applied)
            chosen = list(call.base)[:: applied.every] if applied.every else []
            regions = {block: call.base[block] for block in chosen}
            if applied.compiles:
                replace_calls(chosen)
                regions = _detach_regions(call.module)
            inner = OffloadedCall(call.module, inner) if applied.offloads else inner
            kept[call.module] = _wrapped(inner, applied, self.device), regions
        return kept[call.module]

    def _compiled(self, call: ModelCall, applied: AppliedConfig) -> Gate:
        module = call.module
        self._attached.callback(compiled.raise_recompile_limit())
        use_stable_keys()
        hooks.replace_call(module, None)
        for knob, value in applied.rows:
            if knob.model is not None and not knob.layout:
                knob.model(module, value)
        if applied.graphs:
            self._replays.attach(module)
        found = vars(module).get("_compiled_call_impl") or call.bare
        hooks.replace_call(module, call)
        sizes, seen = not applied.any_size, call.one.signatures
        return Gate(module, found, call.uncompiled, seen=seen, sizes=sizes)


def _detach_regions(outer: nn.Module) -> CompiledRegions:
    """Remove the compiled calls of a model's inner modules, and return them."""
    inner = (module for module in outer.modules() if module is not outer)
    found = {m: call for m in inner if (call := vars(m).get("_compiled_call_impl")) is not None}
    for module in found:
        hooks.replace_call(module, None)
    return found


def _code(applied: AppliedConfig) -> Config:
    """The part of a config that decides the code of a model's call: flags too, if it compiles."""
    flags = applied.compiles
    rows = applied.rows
    decides = ((k, v) for k, v in rows if k.model or k.blocks or k.autocast or (k.flag and flags))
    return Config({knob.name: value for knob, value in decides})


def _kernels(group: Mapping[str, Any]) -> dict[str, Any]:
    """The choice of kernels in a parameter group."""
    return {name: group[name] for name in ("fused", "foreach") if name in group}


def _takes_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether fused kernels can make an optimizer's steps; see torch.optim.Adam."""
    devices = _get_fused_kernels_supported_devices()
    return all(
        torch.is_floating_point(weight)
        and weight.device.type in devices
        and (weight.grad is None or not weight.grad.is_sparse)
        for weight in weights_of(optimizer)
    )


def _groups_done(optimizer: torch.optim.Optimizer, exc: Exception) -> int | None:
    """The number of parameter groups that were updated before a group raised; None if some weights
    of that group may be updated."""
    for frame, _line in traceback.walk_tb(exc.__traceback__):
        at = frame.f_locals.get("group")
        for number, group in enumerate(optimizer.param_groups):
            if group is at:
                weights = [weight for weight in group["params"] if weight.grad is not None]
                kernels = {(weight.device, weight.dtype) for weight in weights}
                return number if len(kernels) == 1 else None
    return None


def _counters(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """The step counters of a group's weights that have gradients; not all optimizers count."""
    weights = (one for one in group["params"] if one.grad is not None)
    return (optimizer.state.get(one, {}).get("step") for one in weights)


def _version(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> int:
    """A number that grows with each counted step of a group."""
    counter = next(_counters(group, optimizer), None)
    return counter._version if isinstance(counter, Tensor) else 0


def callable_module(outer: nn.Module) -> nn.Module | None:
    """The module whose call the pilot replaces: the user's, in the wrappers of `wrapped`.
    None if DataParallel copies the module to devices at each call: copies lack the pilot's call."""
    if replicates(outer):
        return None
    inner = wrapped(outer)
    return outer if inner is None else callable_module(inner)


def replicates(outer: nn.Module) -> bool:
    """Whether a module is copied to several devices at each call."""
    return isinstance(outer, nn.DataParallel) and len(outer.device_ids) > 1


def _wrapped(
    inner: Callable[..., Any], applied: AppliedConfig, device: torch.device
) -> Callable[..., Any]:
    """Wrap a call: inputs in the memory format, autocast, outputs in float32. The script's loss
    stays outside of autocast, which some losses, such as BCELoss, forbid."""
    dtype, layouts = applied.autocast, applied.layouts

    def placed(tensor: Tensor) -> Tensor:
        for layout, wanted in layouts:
            if (found := layout(tensor, wanted)) is not None:
                tensor = tensor.to(memory_format=found)
        return tensor

    def call(*args: Any, **kwargs: Any) -> Any:
        if layouts:
            args, kwargs = map_tensors(placed, (args, kwargs))
        if dtype is None and not applied.undoes_autocast:
            found = inner(*args, **kwargs)
        elif dtype is None and (applied.undoes_compile or not compiled.graphs_compiled()):
            with hooks.no_autocast(device.type):
                found = inner(*args, **kwargs)
        else:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                found = inner(*args, **kwargs)
        return map_tensors(handed_back, found)

    def handed_back(tensor: Tensor) -> Tensor:
        if dtype is not None and tensor.dtype in (torch.bfloat16, torch.float16):
            tensor = tensor.float()
        # A script may call `view` on the model's outputs, which must stay contiguous.
        return tensor.contiguous() if layouts and tensor.dim() > 3 else tensor

    return call
