"""Sets configs in a running script, at the boundary of a step, through the knobs' rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from advisor.cache.config import Config
from advisor.tuners.act import buckets
from advisor.tuners.act.acting import Acting
from advisor.tuners.act.artifacts import have_stable_keys
from advisor.tuners.act.in_force import IN_FORCE
from advisor.tuners.act.pilot import hooks
from advisor.tuners.act.pilot.crew import Trained, batch_of
from advisor.tuners.act.pilot.orders import of_config
from advisor.tuners.act.pilot.parts import NONE, Parts
from advisor.tuners.act.pilot.trees import mapped, returned
from advisor.tuners.act.replays import Replays

RECOMPILATIONS = 64
"""Of one function: each config is another one to torch.compile, and eight is its own limit."""


def fallbacks() -> int:
    """Times that torch.compile has come to its limit of compilations of one function, and given up
    on it: it runs as it is from then on, which it logs only."""
    from torch._dynamo.utils import counters

    given_up = counters["unimplemented"]
    return sum(n for why, n in given_up.items() if why.startswith("Dynamo recompile limit"))


def forget_shapes() -> None:
    """Have torch.compile take shapes and strides as the first that it sees.

    What differs from those of an earlier config, as channels_last does, it would compile for any
    strides at all, which a run that starts with the config does not.
    """
    from torch._dynamo.pgo import reset_code_state

    reset_code_state()


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
        self._one = one
        self._failed = failed
        self.plain = plain
        self.act = plain
        self.struck: Callable[[Exception], None] | None = None
        self.parts = NONE

    def _plainly(self, *args: Any, **kwargs: Any) -> Any:
        with self.parts.aside():
            return self.plain(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self._one.model.training:
            self._one.evaluated |= not self._one.model.training
            return self._plainly(*args, **kwargs)
        if hooks.recomputes():
            return self.act(*args, **kwargs)
        self._one.calls += 1
        self._one.samples += batch_of(args, kwargs)
        if self.act is self.plain:
            return self.plain(*args, **kwargs)
        try:
            return self.act(*args, **kwargs)
        except Exception as exc:  # whatever a config raises: a run is worth more than its advice
            if self.struck is None:
                self._failed(exc)
                raise
            raised = exc.with_traceback(None)  # its frames hold what the call has taken
        if of_config(raised):
            self.struck(raised)
            return self._plainly(*args, **kwargs)
        try:
            found = self._plainly(*args, **kwargs)
        except Exception as own:
            own.add_note(f"advisor: raised in a second call; the first, under advice: {raised!r}")
            raise
        self.struck(raised)
        return found


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
        self._device = device
        self._optimizers = list(optimizers)
        self._groups = [[dict(group) for group in one.param_groups] for one in optimizers]
        laid_out = [one for one in trained if buckets.can_rebuild(one.outer)]
        self._formats = [
            (tensor, tensor.stride())
            for one in laid_out
            for tensor in (*one.model.parameters(), *one.model.buffers())
            if tensor.dim() > 3
        ]
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
        self._recompile_limit: int | None = None  # the script's own, once it is another
        self._flags = Config()
        self._kept: dict[tuple[nn.Module, Config], tuple[Callable[..., Any], Parts]] = {}
        self._calls: dict[nn.Module, Call] = {}
        self._unwatch: hooks.Remove = _nothing
        for one in trained:
            seat = seat_of(one.outer)
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
        self._unwatch()
        self._unwatch = _nothing if lost is None else hooks.on_failing_backward(lost)
        acting = Acting(config, self.own, self._device)
        IN_FORCE.release(self._flags)
        self._flags = Config({knob.name: value for knob, value in acting.rows if knob.flag})
        IN_FORCE.put(self._flags)
        self._feed(acting.loader())
        with torch.no_grad():
            self._lay_out(acting)
            self._set_optimizers(acting.optimizer())
        for seat, call in self._calls.items():
            call.parts.set_back()
            call.act, call.parts = self._act(seat, call, acting)
            call.parts.set()
            call.struck = struck
        self.config = config
        self.counts_steps = acting.graphs
        compiles = any(knob.dear for knob, _value in acting.rows)
        self._fallbacks = fallbacks() if compiles else None

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
        for call in self._calls.values():
            call.parts.set_back()
            call.act, call.parts, call.struck = call.plain, NONE, None

    @property
    def calls(self) -> list[Call]:
        """What the trained models are called through."""
        return list(self._calls.values())

    @property
    def seats(self) -> list[nn.Module]:
        """The modules whose calls these are."""
        return list(self._calls)

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
        if self._recompile_limit is not None:
            torch._dynamo.config.recompile_limit = self._recompile_limit
        self._calls.clear()
        self._kept.clear()

    @staticmethod
    def _leave(seat: nn.Module, call: Call) -> None:
        hooks.through(seat, None if call.plain == seat._call_impl else call.plain)

    def _lay_out(self, acting: Acting) -> None:
        before = [tensor.stride() for tensor, _own in self._formats]
        for tensor, stride in self._formats:
            if tensor.stride() != stride:
                tensor.data = _strided(tensor.data, stride)
        for model in self._laid_out:
            for knob, value in acting.rows:
                if knob.layout is not None and knob.model is not None:
                    knob.model(model, value)
        if before == [tensor.stride() for tensor, _own in self._formats]:
            return
        for outer in self._outers:
            buckets.rebuild(outer)
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[name] = _strided(value, parameter.stride())
        for tensor, _stride in self._formats:
            if tensor.grad is not None:
                tensor.grad = _strided(tensor.grad, tensor.stride())

    def _set_optimizers(self, found: dict[str, Any]) -> None:
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            for group, own in zip(optimizer.param_groups, groups, strict=False):
                group |= {n: own[n] for n in ("fused", "foreach") if n in own}
                if found and "fused" in own:
                    group |= found | {"foreach": False}
            for parameter, state in optimizer.state.items():
                step = state.get("step")
                if isinstance(step, Tensor) and self._steps_on_host:
                    state["step"] = step.to(parameter.device if found else "cpu")

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
        called = Config({k.name: value for k, value in acting.rows if k.model or k.autocast})
        if not called:
            return call.plain, NONE
        if acting.compiles:
            # What is compiled, or replayed, has the flags in it that were set then.
            called = Config(called | self._flags)
        if (seat, called) not in self._kept:
            inner, parts = self._compiled(seat, call, acting)
            self._kept[seat, called] = _around(inner, acting, self._device), parts
        return self._kept[seat, called]

    def _compiled(
        self, seat: nn.Module, call: Call, acting: Acting
    ) -> tuple[Callable[..., Any], Parts]:
        compiles = [(k.model, value) for k, value in acting.rows if k.model and not k.layout]
        if not compiles:
            return call.plain, NONE
        if self._recompile_limit is None:
            self._recompile_limit = torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = max(RECOMPILATIONS, self._recompile_limit)
            have_stable_keys()
        forget_shapes()
        hooks.through(seat, None)
        for compile_, value in compiles:
            compile_(seat, value)
        if acting.graphs:
            self._replays.attach(seat)
        found = vars(seat).get("_compiled_call_impl") or call.plain
        hooks.through(seat, call)
        return found, Parts.taken_out(seat)


def _step_on_host(kept: Any) -> Any:
    """One parameter's state, its step on the CPU."""
    step = kept.get("step") if isinstance(kept, dict) else None
    return kept | {"step": step.cpu()} if isinstance(step, Tensor) else kept


def _nothing() -> None:
    """What takes no hook away."""


def seat_of(outer: nn.Module) -> nn.Module | None:
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
        if dtype is None:
            found = inner(*args, **kwargs)
        else:
            with torch.autocast(device.type, dtype=dtype):
                found = inner(*args, **kwargs)
        return returned(handed_back, found)

    def handed_back(tensor: Tensor) -> Tensor:
        if dtype is not None and tensor.dtype in (torch.bfloat16, torch.float16):
            tensor = tensor.float()
        # A script may call `view` on what its model has always returned.
        return tensor.contiguous() if layouts and tensor.dim() > 3 else tensor

    return call


def _strided(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The same values with another memory format."""
    if tensor.stride() == stride:
        return tensor
    other = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return other.copy_(tensor)
