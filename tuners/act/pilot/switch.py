"""Sets configs in a running script, at the boundary of a step, through the knobs' rows."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from advisor.cache.config import Config
from advisor.tuners.act import buckets
from advisor.tuners.act.acting import Acting
from advisor.tuners.act.artifacts import have_own_keys, have_stable_keys
from advisor.tuners.act.compiled import CompiledCode, RecompileLimit, fallbacks, free
from advisor.tuners.act.gate import Gate
from advisor.tuners.act.in_force import IN_FORCE
from advisor.tuners.act.pilot import hooks
from advisor.tuners.act.pilot.crew import Trained
from advisor.tuners.act.pilot.orders import of_config
from advisor.tuners.act.pilot.parts import NONE, Parts
from advisor.tuners.act.pilot.trees import mapped, returned
from advisor.tuners.act.replays import Replays
from advisor.tuners.act.storages import Storages, strided

LEAST_FREE = 0.1
"""Of a device's memory: with less of it free, what PyTorch keeps in reserve goes back at a switch.
That waits for the device, and later steps allocate anew."""


class Call:
    """What a trained model is called through: it counts, and acts where a config says so.

    Evaluation is left to the script, as it is. What a backward pass calls again is called as it
    was, and counted once; what that raises is told by the backward pass.

    Attributes:
        failed: told at once of what `act` raises: the script may catch it, and go on.
        struck: told of it instead, and has `act` be `plain` from then on; None: it is raised. Not
            told of what `plain` raises too: that is the script's own.
        parts: of the model, which a config has compiled for training calls.
    """

    def __init__(
        self,
        one: Trained,
        plain: Callable[..., Any],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.one = one
        self._failed = failed
        self.plain = plain
        self.act = plain
        self.struck: Callable[[Exception], None] | None = None
        self.parts = NONE

    def plainly(self, *args: Any, **kwargs: Any) -> Any:
        """The call without what is compiled."""
        with self.parts.aside():
            return self.plain(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self.one.model.training:
            self.one.evaluated |= not self.one.model.training
            return self.plainly(*args, **kwargs)
        if hooks.recomputes():
            return self.act(*args, **kwargs)
        if self.act is self.plain:
            self.one.saw(args, kwargs)
            return self.plain(*args, **kwargs)
        self.one.count(args, kwargs)
        try:
            return self.act(*args, **kwargs)
        except Exception as exc:  # whatever a config raises: a run is worth more than its advice
            if self.struck is None:
                self._failed(exc)
                raise
            raised = exc.with_traceback(None)  # its frames hold what the call has taken
        if of_config(raised):
            self.struck(raised)
            return self.plainly(*args, **kwargs)
        found = _again(self.plainly, args, kwargs, raised)
        self.struck(raised)
        return found


def _again(
    plainly: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], raised: Exception
) -> Any:
    """What raised under a config, done without it; what that raises is the script's own."""
    try:
        return plainly(*args, **kwargs)
    except Exception as own:
        own.add_note(f"advisor: raised in a second call; the first, under advice: {raised!r}")
        raise


class Switch:
    """One script's models and optimizers, and what is set in them.

    Args:
        own: the config that the script itself has: what it sets is set back to that.
        feed: has its loaders work by these keyword arguments; by none as they are.
        failed: told of what a model's call raises under another config.

    Attributes:
        counts_steps: whether what is set must be told where a step begins.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
        optimizers: Sequence[torch.optim.Optimizer],
        own: Config,
        device: torch.device,
        feed: Callable[[Mapping[str, Any]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.own = self.config = own
        self._feed = feed
        self._failed = failed
        self._device = device
        self._optimizers = list(optimizers)
        self._groups = [[dict(group) for group in one.param_groups] for one in optimizers]
        self._unprotect: list[hooks.Remove] = []
        laid_out = [one for one in trained if buckets.can_rebuild(one.outer)]
        self._formatted = [
            tensor
            for one in laid_out
            for tensor in (*one.model.parameters(), *one.model.buffers())
            if tensor.dim() > 3
        ]
        self._strides: dict[Layout, list[tuple[int, ...]]] = {
            (): [tensor.stride() for tensor in self._formatted]
        }
        self._storages = Storages()
        self._laid_out = [one.model for one in laid_out if not replicates(one.outer)]
        self._outers = [one.outer for one in laid_out]
        self._steps_on_host = not any(
            group.get("fused") or group.get("capturable")
            for groups in self._groups
            for group in groups
        )
        self._unsave = [one.register_state_dict_post_hook(self._saved) for one in optimizers]
        self._replays = Replays()
        self.counts_steps = False
        self._fallbacks: int | None = None
        self._recompile_limit = RecompileLimit()
        self._compiled_code = CompiledCode()
        self._code_of: dict[Config, set[str]] = {}
        self._replays_of: dict[Config, set[int]] = {}
        self._seen = {own: Acting(own, own, device)}
        self._flags = Config()
        self._kept: dict[tuple[nn.Module, Config], tuple[Callable[..., Any], Parts]] = {}
        self._calls: dict[nn.Module, Call] = {}
        self._unwatch: hooks.Remove = _nothing
        for one in trained:
            seat = callable_module(one.outer)
            if seat is not None:
                there = vars(seat).get("_compiled_call_impl")
                call = Call(one, seat._call_impl if there is None else there, failed)
                self._calls[seat] = call
                hooks.through(seat, call)

    def set(
        self,
        config: Config,
        struck: Callable[[Exception], None] | None = None,
        lost: Callable[[Exception], None] | None = None,
    ) -> None:
        """Have the script train with a config from here on.

        Args:
            struck: told what the config raises in a model's call; the call is then made without it.
            lost: told what backward raises, which the script then has.
        """
        self._claim()
        self._unwatch()
        self._unwatch = _nothing if lost is None else hooks.on_failing_backward(lost)
        acting = self._seen[config] = Acting(config, self.own, self._device)
        IN_FORCE.release(self._flags)
        self._flags = _flags(acting)
        IN_FORCE.put(self._flags)
        self._feed(acting.loader())
        with torch.no_grad():
            self._lay_out(acting)
            self._set_optimizers(acting.optimizer(), struck, lost)
        for seat, call in self._calls.items():
            call.parts.set_back()
            call.act, call.parts = self._act(seat, call, acting)
            call.parts.set()
            call.struck = struck
        self.config = config
        self.counts_steps = acting.graphs
        compiles = any(knob.dear for knob, _value in acting.rows)
        self._fallbacks = fallbacks() if compiles else None
        self._make_room()

    def forget(self, config: Config) -> None:
        """Free what was compiled and laid out for a config alone, which is not the one that is set.
        Set again, it is compiled again."""
        if config in (self.own, self.config) or config not in self._seen:
            return
        self._claim()
        acting = self._seen.pop(config)
        code, layout = _code(acting), _layout(acting)
        if code not in map(_code, self._seen.values()):
            self._kept = {there: made for there, made in self._kept.items() if there[1] != code}
            free(self._code_of.pop(code, set()), self._replays_of.pop(code, set()))
        if layout not in map(_layout, self._seen.values()):
            self._forget_layout(layout)
        self._make_room()

    def _claim(self) -> None:
        """What was compiled since this was called last is the code of the config that is set."""
        code = _code(self._seen[self.config])
        codes, replays = self._compiled_code.claim()
        self._code_of.setdefault(code, set()).update(codes)
        self._replays_of.setdefault(code, set()).update(replays)

    def _make_room(self) -> None:
        if self._device.type == "cuda":
            available, memory = torch.cuda.mem_get_info(self._device)
            if available < LEAST_FREE * memory:
                torch.cuda.empty_cache()

    @property
    def fell_back(self) -> bool:
        """Whether the config that is set compiles, and no longer does."""
        return self._fallbacks is not None and fallbacks() > self._fallbacks

    def give_up(self) -> None:
        """Within a step: have models called as they are, and forget what was compiled for it.
        Weights stay laid out until the next `set`: the step may still need what it kept of them."""
        self._unwatch()
        IN_FORCE.release(self._flags)
        spent = [call.act for call in self._calls.values()]
        self._kept = {there: made for there, made in self._kept.items() if made[0] not in spent}
        self._set_optimizers({})
        for call in self._calls.values():
            call.parts.set_back()
            call.act, call.parts, call.struck = call.plain, NONE, None

    @property
    def calls(self) -> list[Call]:
        """What the trained models are called through."""
        return list(self._calls.values())

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The script's optimizers."""
        return self._optimizers

    def began(self) -> None:
        """A step begins."""
        if self.counts_steps:
            self._replays.begin()

    def spent(self) -> None:
        """The gradients that are there are of a step that is over; the script lets go of them."""
        if self.counts_steps:
            self._replays.let_go(self._optimizers)

    def stay(self) -> None:
        """No other config will be set: what acts on no call is out of its way."""
        for seat, call in self._calls.items():
            if call.act is call.plain:
                self._leave(seat, call)

    def release(self) -> None:
        """Leave the script as it was found."""
        self.set(self.own)
        for seat, call in self._calls.items():
            self._leave(seat, call)
        for handle in self._unsave:
            handle.remove()
        self._recompile_limit.restore()
        have_own_keys()
        self._calls.clear()
        self._kept.clear()
        self._storages = Storages()

    @staticmethod
    def _leave(seat: nn.Module, call: Call) -> None:
        hooks.leave(seat, call, None if call.plain == seat._call_impl else call.plain)

    def _lay_out(self, acting: Acting) -> None:
        layout = _layout(acting)
        before = [tensor.stride() for tensor in self._formatted]
        if layout not in self._strides:
            self._restride(self._strides[()])
            for model in self._laid_out:
                for knob, value in acting.rows:
                    if knob.layout is not None and knob.model is not None:
                        knob.model(model, value)
            self._strides[layout] = [tensor.stride() for tensor in self._formatted]
        self._restride(self._strides[layout])
        if before == [tensor.stride() for tensor in self._formatted]:
            return
        for outer in self._outers:
            buckets.rebuild(outer)
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        there = (id(parameter), name)
                        state[name] = self._storages.laid_out(there, value, parameter.stride())
        for tensor in self._formatted:
            if tensor.grad is not None:
                tensor.grad = strided(tensor.grad, tensor.stride())

    def _restride(self, strides: Sequence[tuple[int, ...]]) -> None:
        for tensor, stride in zip(self._formatted, strides, strict=True):
            laid_out = self._storages.laid_out(id(tensor), tensor.data, stride)
            if tensor.stride() != stride:
                tensor.data = laid_out

    def _forget_layout(self, layout: Layout) -> None:
        if not layout:
            return
        left = [strides for known, strides in self._strides.items() if known != layout]
        del self._strides[layout]
        for n, tensor in enumerate(self._formatted):
            keep = {strides[n] for strides in left} | {tensor.stride()}
            self._storages.forget(id(tensor), keep)
            states = (one.state.get(tensor, {}) for one in self._optimizers)
            for name in {name for state in states for name in state}:
                self._storages.forget((id(tensor), name), keep)

    def _set_optimizers(
        self,
        found: dict[str, Any],
        struck: Callable[[Exception], None] | None = None,
        lost: Callable[[Exception], None] | None = None,
    ) -> None:
        for remove in self._unprotect:
            remove()
        self._unprotect.clear()
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            changes = bool(found) and _takes_fused(optimizer)
            for group, own in zip(optimizer.param_groups, groups, strict=False):
                group |= {n: own[n] for n in ("fused", "foreach") if n in own}
                if changes and "fused" in own:
                    group |= found | {"foreach": False}
            for parameter, state in optimizer.state.items():
                step = state.get("step")
                if isinstance(step, Tensor) and self._steps_on_host:
                    state["step"] = step.to(parameter.device if changes else "cpu")
            if changes:
                self._protect(optimizer, struck, lost)

    def _protect(
        self,
        optimizer: torch.optim.Optimizer,
        struck: Callable[[Exception], None] | None,
        lost: Callable[[Exception], None] | None,
    ) -> None:
        """Have the rest of a step that fails under the config made without it."""

        def around(step: Callable[..., Any]) -> Callable[..., Any]:
            def protected(*args: Any, **kwargs: Any) -> Any:
                counters = [_version(group, optimizer) for group in optimizer.param_groups]
                try:
                    return step(*args, **kwargs)
                except Exception as exc:  # whatever a config raises: see Call
                    if struck is None:
                        self._failed(exc)
                        raise
                    done = _groups_done(optimizer, exc)
                    if done is not None:
                        _uncount(optimizer.param_groups[done], optimizer, counters[done])
                    self._set_optimizers({})
                    if done is None:
                        if lost is not None:
                            lost(exc)
                        raise
                    raised = exc.with_traceback(None)
                struck(raised)  # before the step is over, where another config may be set
                groups = optimizer.param_groups
                optimizer.param_groups = groups[done:]
                try:
                    return _again(step, args, kwargs, raised)
                finally:
                    optimizer.param_groups = groups

            return protected

        self._unprotect.append(hooks.around_step(optimizer, around))

    def _saved(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint has of an optimizer: as the script's own, whatever is set in it now.

        What `saved` shares with the optimizer is copied before it is changed.
        """
        groups = [dict(group) for group in saved["param_groups"]]
        own_groups = self._groups[self._optimizers.index(optimizer)]
        for group, own in zip(groups, own_groups, strict=False):
            group |= {n: own[n] for n in ("fused", "foreach") if n in own}
        state = saved["state"]
        if self._steps_on_host:
            state = {index: _step_on_host(kept) for index, kept in state.items()}
        return saved | {"param_groups": groups, "state": state}

    def _act(self, seat: nn.Module, call: Call, acting: Acting) -> tuple[Callable[..., Any], Parts]:
        """What a model's training calls go through under a config, and parts of it."""
        code = _code(acting)
        if not code:
            return call.plain, NONE
        if (seat, code) not in self._kept:
            inner, parts = self._compiled(seat, call, acting)
            self._kept[seat, code] = _around(inner, acting, self._device), parts
        return self._kept[seat, code]

    def _compiled(
        self, seat: nn.Module, call: Call, acting: Acting
    ) -> tuple[Callable[..., Any], Parts]:
        compiles = [(k.model, value) for k, value in acting.rows if k.model and not k.layout]
        if acting.undoes_compile:
            return functools.partial(_eagerly, call.plain), NONE
        if not compiles:
            return call.plain, NONE
        self._recompile_limit.raise_it()
        have_stable_keys()
        hooks.through(seat, None)
        for compile_, value in compiles:
            compile_(seat, value)
        if acting.graphs:
            self._replays.attach(seat)
        found = vars(seat).get("_compiled_call_impl") or call.plain
        hooks.through(seat, call)
        sizes, seen = not acting.any_size, call.one.signatures
        gate = Gate(seat, found, call.plainly, seen=seen, sizes=sizes)
        return gate, Parts.taken_out(seat)


Layout = tuple[tuple[str, Any], ...]
"""What of a config decides the memory format of weights."""


def _layout(acting: Acting) -> Layout:
    return tuple((k.name, value) for k, value in acting.rows if k.layout and k.model)


def _flags(acting: Acting) -> Config:
    return Config({knob.name: value for knob, value in acting.rows if knob.flag})


def _code(acting: Acting) -> Config:
    """What of a config decides the code that a model's call runs."""
    called = Config({k.name: value for k, value in acting.rows if k.model or k.autocast})
    # What is compiled, or replayed, has the flags in it that were set then.
    return Config(called | _flags(acting)) if acting.compiles else called


def _takes_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether fused kernels can make an optimizer's steps; see torch.optim.Adam."""
    devices = _get_fused_kernels_supported_devices()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return all(
        torch.is_floating_point(weight)
        and weight.device.type in devices
        and (weight.grad is None or not weight.grad.is_sparse)
        for weight in weights
    )


def _groups_done(optimizer: torch.optim.Optimizer, exc: Exception) -> int | None:
    """How many of an optimizer's groups have made their step when one raised this; None where that
    one may have changed a part of its weights: fused kernels count no versions of them."""
    for frame, _line in traceback.walk_tb(exc.__traceback__):
        # All of torch.optim go through their groups so.
        at = frame.f_locals.get("group")
        for number, group in enumerate(optimizer.param_groups):
            if group is at:
                weights = [weight for weight in group["params"] if weight.grad is not None]
                kernels = {(weight.device, weight.dtype) for weight in weights}
                return number if len(kernels) == 1 else None
    return None


def _counted(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The counters of steps of a group's weights."""
    states = (optimizer.state.get(one, {}) for one in group["params"] if one.grad is not None)
    return [one for state in states if isinstance(one := state.get("step"), Tensor)]


def _version(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> int:
    """How often the counter of a group's first weight was changed."""
    first = next((one for one in group["params"] if one.grad is not None), None)
    step = None if first is None else optimizer.state.get(first, {}).get("step")
    return step._version if isinstance(step, Tensor) else 0


def _uncount(group: dict[str, Any], optimizer: torch.optim.Optimizer, version: int) -> None:
    """Take a step off a group's counters where it was counted since they had that version."""
    counters = _counted(group, optimizer)
    if counters and counters[0]._version != version:
        with torch.no_grad():
            torch._foreach_sub_(counters, 1)


def _step_on_host(kept: Any) -> Any:
    """One parameter's state, its step on the CPU."""
    step = kept.get("step") if isinstance(kept, dict) else None
    return kept | {"step": step.cpu()} if isinstance(step, Tensor) else kept


def _nothing() -> None:
    """What takes no hook away."""


def callable_module(outer: nn.Module) -> nn.Module | None:
    """The module whose call is the pilot's: the user's own under DistributedDataParallel.

    What the script compiled itself is called as compiled. None where replicas are made of a
    module at each call, as DataParallel does on several devices: what is set in it would be in
    none of them.
    """
    while isinstance(outer, nn.parallel.DistributedDataParallel | nn.DataParallel):
        if replicates(outer):
            return None
        outer = outer.module
    return outer


def replicates(outer: nn.Module) -> bool:
    """Whether a module is copied to several devices at each call."""
    return isinstance(outer, nn.DataParallel) and len(outer.device_ids) > 1


def _eagerly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of what the script has compiled itself, uncompiled."""
    with torch.compiler.set_stance("force_eager"):
        return call(*args, **kwargs)


def _around(inner: Callable[..., Any], acting: Acting, device: torch.device) -> Callable[..., Any]:
    """A call with its inputs laid out, in autocast, its outputs in float32.

    The loss is the script's and stays outside: over all of a script autocast reaches into losses
    that forbid it, as BCELoss (so do Accelerate's prepared models).
    """
    dtype, layouts = acting.autocast, acting.layouts

    def placed(tensor: Tensor) -> Tensor:
        for layout, wanted in layouts:
            if (found := layout(tensor, wanted)) is not None:
                tensor = tensor.to(memory_format=found)
        return tensor

    def call(*args: Any, **kwargs: Any) -> Any:
        if layouts:
            args, kwargs = mapped(placed, (args, kwargs))
        if dtype is None and not acting.undoes_autocast:
            found = inner(*args, **kwargs)
        else:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                found = inner(*args, **kwargs)
        return returned(handed_back, found)

    def handed_back(tensor: Tensor) -> Tensor:
        if dtype is not None and tensor.dtype in (torch.bfloat16, torch.float16):
            tensor = tensor.float()
        # A script may call `view` on what its model has always returned.
        return tensor.contiguous() if layouts and tensor.dim() > 3 else tensor

    return call
