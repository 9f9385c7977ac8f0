"""Looks for faults of a script's own settings that no comparison of its model's calls can show: a
missing GradScaler, a loss in half precision, a learning rate schedule that does not move."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR
from torch.utils.data.dataloader import _BaseDataLoaderIter

from advisor.tuners.act.hooks import STEP_HOOKS, Patch
from advisor.tuners.act.pilot.loop_observer import weights_of
from advisor.tuners.act.pilot.switch import ConfigSwitch
from advisor.tuners.decisions import UPDATE_OFF
from advisor.tuners.knobs import FORMATS
from advisor.tuners.measure.run.recorded_state import RecordedUpdates

_HALF = (torch.bfloat16, torch.float16)


class ScriptChecks:
    """Watches the steps of an unmodified script, until `close`. `names`: the parameters' names by
    `id`; `room`: as in RecordedUpdates."""

    def __init__(self, switch: ConfigSwitch, names: Mapping[int, str], room: int | None) -> None:
        self._optimizers = optimizers = switch.optimizers
        self._names, self._room = names, room
        dtypes = {weight.dtype for one in optimizers for weight in weights_of(one)}
        self._half = dtypes.intersection(_HALF)  # the script's own choice
        # And no GradScaler has scaled the loss:
        self.unscaled = switch.own.get(FORMATS[0]) == "fp16"
        self.flushed = (0.0, "")  # the share of a gradient that fp16 flushes to zero, and its name
        self._loss: torch.dtype | None = None
        self._updates: dict[int, RecordedUpdates | None] = {}
        self._worst = (0.0, "")  # an update's error, and its weight's name
        self._rates = {id(one): {_rates(one)} for one in optimizers}
        self._schedules = [(one, one.last_epoch) for one in _schedules()]
        # Passes over a loader: those that gave batches since the last step, those that steps use.
        self._given, self._used = WeakSet[_BaseDataLoaderIter](), WeakSet[_BaseDataLoaderIter]()
        self._ended = self._epoch_over = False  # a used pass; all of them, and a step followed
        # A loss was scaled; optimizers that a GradScaler takes care of; what took such gradients.
        self._scaled_now, self._cared_for, self._took = False, set[int](), dict[str, str]()
        hooks: list[Any] = [one.register_step_pre_hook(self._begins) for one in optimizers]
        hooks.append(Patch(torch.amp.GradScaler, "scale", self._scaled))
        for name in ("unscale_", "step"):
            hooks.append(Patch(torch.amp.GradScaler, name, self._cares))
        hooks.append(Patch(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", self._clips))
        hooks.append(Patch(_BaseDataLoaderIter, "__next__", self._batch))
        self._removes = [STEP_HOOKS.register(self._stepped), *(one.remove for one in hooks)]

    def close(self) -> None:
        for remove in self._removes:
            remove()

    def saw_loss(self, loss: Any) -> None:
        """Note the loss of a backward pass."""
        if isinstance(loss, Tensor) and loss.dtype in _HALF and not self._half:
            self._loss = loss.dtype

    @property
    def watches(self) -> bool:
        """Whether a schedule has not moved, and no epoch was over yet."""
        still = [one for one, before in self._schedules if one.last_epoch == before]
        return not self._epoch_over and any(map(self._trains, still))

    def faults(self) -> Iterator[str]:
        if self.flushed[1]:
            yield (
                f"fp16 without a GradScaler: {self.flushed[0]:.2%} of the gradient of "
                f"{self.flushed[1]} is flushed to zero now, and more as it shrinks; use "
                "torch.amp.GradScaler, or bf16"
            )
        for what, mend in self._took.items():
            yield (
                f"{what} gradients of a loss that GradScaler has scaled; {mend}call "
                "scaler.unscale_(optimizer) before"
            )
        if self._loss is not None:
            off, kind = torch.finfo(self._loss).eps / 2, str(self._loss).removeprefix("torch.")
            yield (
                f"the loss is computed in {kind}, which rounds it by up to {off:.2%}: autocast "
                "reaches it; compute it in float32, outside of autocast or from outputs.float()"
            )
        part, name = self._worst
        if part > UPDATE_OFF:
            yield (
                f"the optimizer's update of {name} is {part:.2%} off from its class's own, "
                f"uncompiled and unfused; at most {UPDATE_OFF:.2%} is allowed"
            )
        for optimizer in self._optimizers:
            if len(rates := self._rates[id(optimizer)]) == 1:
                rate = " and ".join(f"{one:g}" for one in dict.fromkeys(next(iter(rates))))
                if why := self._frozen(optimizer):
                    yield f"{why}: the learning rate stays {rate}"

    def _frozen(self, optimizer: torch.optim.Optimizer) -> str:
        """Why a schedule does not move an optimizer's learning rate; '' if none should have."""
        own = [one for one, _ in self._schedules if _same_groups(one.optimizer, optimizer)]
        moved = [one for one, before in self._schedules if one.last_epoch != before]
        if own and not any(one in own for one in moved):
            what = f"{type(own[0]).__name__} never moves although an epoch ended; call its step()"
            return what if self._epoch_over else ""
        for one in moved:
            wanted = float(one.get_last_lr()[0])
            if one in own and not math.isclose(wanted, _rates(optimizer)[0], rel_tol=1e-4):
                return f"{type(one).__name__} has no effect"
            if not own and not self._trains(one) and _same_weights(one.optimizer, optimizer):
                return f"{type(one).__name__} moves an optimizer that never steps"
        return ""

    def _trains(self, schedule: LRScheduler) -> bool:
        return any(_same_groups(schedule.optimizer, one) for one in self._optimizers)

    def _scaled(self, plain: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        self.unscaled &= not scaler.is_enabled()
        self._scaled_now |= scaler.is_enabled()
        self.saw_loss(outputs)  # the scaled loss may be in another format
        return plain(scaler, outputs)

    def _batch(self, plain: Callable[..., Any], batches: Any) -> Any:
        try:
            found = plain(batches)
            self._given.add(batches)
            return found
        except StopIteration:
            self._given.discard(batches)
            self._ended |= batches in self._used
            self._used.discard(batches)
            raise

    def _cares(self, plain: Callable[..., Any], scaler: Any, optimizer: Any, *more: Any) -> Any:
        self._cared_for.add(id(optimizer))
        return plain(scaler, optimizer, *more)

    def _clips(self, plain: Callable[..., Any], parameters: Any, *more: Any, **given: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clipped = set(map(id, parameters))
        for one in self._optimizers if self._scaled_now else ():
            if id(one) not in self._cared_for and clipped.intersection(map(id, weights_of(one))):
                self._took["clip_grad_norm_ clips"] = ""
        return plain(parameters, *more, **given)

    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        known = id(optimizer) in self._cared_for or id(optimizer) not in self._rates
        if self._scaled_now and not known:
            self._took["an optimizer steps with"] = "use scaler.step(optimizer), or "
        # The first update alone, as copies take time, and none that a GradScaler scales or skips,
        # before which a closure computes gradients, or after which a hook may change the weights.
        given = [getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")]
        given += [*args[1:], *kwargs.values(), *optimizer._optimizer_step_post_hooks.values()]
        if id(optimizer) not in self._updates and all(one is None for one in given):
            with suppress(RuntimeError):  # out of memory: its updates are not compared
                self._updates[id(optimizer)] = RecordedUpdates([optimizer], self._room)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if (updates := self._updates.get(id(optimizer))) is not None:
            with suppress(Exception):  # a class of the script's own may keep another state
                self._worst = max(self._worst, updates.made_error(self._names))
            self._updates[id(optimizer)] = None
        if id(optimizer) in self._rates:
            self._rates[id(optimizer)].add(_rates(optimizer))
            self._epoch_over |= self._ended and not self._used
            self._used |= self._given
            self._given.clear()
            self._scaled_now = False
            self._cared_for.discard(id(optimizer))


def _schedules() -> list[LRScheduler]:
    """The schedules that exist, without parts of others, those that follow a metric, and SWALR,
    which begins late."""
    # There is no other list of them.
    found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
    parts = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    return [
        one
        for one in found
        if id(one) not in parts and not isinstance(one, ReduceLROnPlateau | SWALR)
        if hasattr(one, "last_epoch") and hasattr(one, "optimizer")
    ]


def _rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)


def _same_groups(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Whether two optimizers are one, perhaps within a wrapper such as Accelerate's."""
    return not {*map(id, one.param_groups)}.isdisjoint(map(id, other.param_groups))


def _same_weights(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    return not {*map(id, weights_of(one))}.isdisjoint(map(id, weights_of(other)))
