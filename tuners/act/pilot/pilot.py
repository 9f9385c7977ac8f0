"""The pilot of a process: watches the first steps of a script, then does what its guide orders."""

from __future__ import annotations

import atexit
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, Protocol

import torch

from advisor.cache import settings
from advisor.cache.config import Config
from advisor.errors import AdvisorError
from advisor.tuners import host
from advisor.tuners.act import hooks
from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.act.hooks import EVERY_STEP
from advisor.tuners.act.pilot.crew import LET_GO, Crew, Trained
from advisor.tuners.act.pilot.loaders import Loaders
from advisor.tuners.act.pilot.orders import Comparison, Guide, Lap, Order
from advisor.tuners.decisions import HEADROOM, IN_A_ROW, LOOKED
from advisor.tuners.faults import Stopped, failure

if TYPE_CHECKING:
    from advisor.tuners.act.pilot.switch import Switch

P = ParamSpec("P")
Verdict = tuple[str, str, str]  # a Lap's outcome, reason and blames
OK = ("ok", "", "")
_log = logging.getLogger("advisor")

_UNSEEN = "no module whose parameters the optimizer holds ran"
UNSEEN = f"{_UNSEEN} with gradients; what can be tuned trains, and is called as model(x)"
UNSEEN_COMPILED = (
    f"{_UNSEEN} where it can be seen: a function that the script compiles calls the model; compile "
    "the model instead, as model.compile()"
)
UNSTEPPED = (
    "a model was called with gradients, and no optimizer of torch.optim made a step: nothing was "
    "looked up or tuned, and the run was as it is"
)
ANOTHER = "it trains another model now"
UNADVISED = "a model trains now that the advice in force is not for"
UNORDERED = (
    f"in {LOOKED} steps of the optimizers no order repeats, so that a step of the script cannot be "
    "told; what can be tuned has all of its optimizers step in turn"
)
LITTLE = "not tried: little of the device's memory is free"
FELL_BACK = "RecompileLimit: torch.compile has given up: shapes vary too much"


class Watch(Protocol):
    """Compares configs on kept steps of the script. Both return None while it needs more steps."""

    def begin(
        self, switch: Switch, trained: Sequence[Trained], device: torch.device, asked: Comparison
    ) -> Verdict | None:
        """Compare. Steps that it needs for it are unmodified ones."""

    def stepped(self) -> Verdict | None:
        """A step is over."""

    def close(self) -> None:
        """Free all that was kept."""


class Pilot:
    """Attached to a script, until `release`."""

    def __init__(self, guide: Guide, watch: Watch | None = None) -> None:
        self._guide = guide
        self._watch = watch
        self._attach()

    def _attach(self) -> None:
        self._crew = Crew()
        self._trained: Sequence[Trained] = ()
        self._switch: Switch | None = None
        self._order = Order(config=Config())
        self._looked = self._period = 0
        self._at = self._done = self._warm = self._graphs = 0
        self._elsewhere = self._own_peak = 0
        self._began = self._first_s = self._switched = 0.0
        self._fresh = self._cut = self._aside = False
        self._verdict: Verdict = OK
        self._loaders = Loaders(self._gave_up, override=settings.overrides_loader())
        self._calls = hooks.Calls(
            self._guarded(self._crew.saw_call), self._guarded(self._crew.saw_within)
        )
        self._count_no_more = EVERY_STEP.tell(self._guarded(self._stepped))
        self._unhook_failure = hooks.on_failure(self._ended)
        self._at_exit = atexit.register(self._guarded(self._exits))

    def release(self) -> None:
        """Leave the script and PyTorch as they were found."""
        self._leave()
        self._calls.remove()

    def _leave(self) -> None:
        """The same, but for hooks that are part of the script's compiled code."""
        self._calls.rest()
        if self._watch is not None:
            self._watch.close()
        if self._switch is not None:
            self._switch.release()
            self._switch = None
        self._crew.forget()
        self._trained = ()
        self._loaders.remove()
        self._count_no_more()
        self._unhook_failure()
        atexit.unregister(self._at_exit)

    def _stop(self, exc: Exception) -> None:
        self._guide.failed(exc)
        self._leave()

    def _guarded(self, hook: Callable[P, None]) -> Callable[P, None]:
        """The hook; what it raises ends the pilot, and not the run."""

        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                hook(*args, **kwargs)
            except AdvisorError:
                raise  # strict=True
            except Exception as exc:
                _log.error("the pilot failed; please report this", exc_info=exc)
                self._stop(exc)

        return guarded

    def _ended(self, exc: BaseException) -> None:
        atexit.unregister(self._at_exit)
        self._guide.failed(exc)
        if self._looked:
            self._at_exit()
        if self._switch is not None and self._order.config != self._switch.own:
            self._guide.ended(exc, self._order)

    def _exits(self) -> None:
        if self._crew.called and not self._looked and self._guide.takes_over():
            self._guide.failed(Stopped("untrained", UNSTEPPED))
        elif self._looked and self._switch is None:
            steps = f"{self._looked} step{'s' * (self._looked != 1)} of its optimizers"
            self._guide.failed(Stopped("brief", f"the script ended after {steps}"))

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._switch is None:
            self._look(optimizer)
        elif (kind := self._crew.kind(optimizer)) == "ours":
            if self._order.steps:
                self._elsewhere = 0
            elif self._aside:
                self._aside = False
                self._switch.put_flags()
            self._at += 1
            if self._at >= self._period:
                self._at = 0
                self._step(self._switch)
        elif kind != "let go" or self._order.steps:
            self._stepped_elsewhere(self._switch, kind)

    def _stepped_elsewhere(self, switch: Switch, kind: str) -> None:
        """An optimizer made a step that was not among the first ones."""
        self._elsewhere += 1
        if self._order.steps:
            if self._elsewhere >= LOOKED:
                self._stop(Stopped("over", ANOTHER))
        elif kind == "joins" or (kind == "like" and self._elsewhere >= IN_A_ROW):
            if kind == "like":
                LET_GO.update(self._crew.optimizers)
            self._leave()
            self._attach()
        elif self._elsewhere == IN_A_ROW:
            self._aside = True  # until the advised model steps again
            switch.release_flags()
            self._guide.failed(Stopped("over", UNADVISED))

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        self._crew.saw_step(optimizer)
        self._looked += 1
        if self._looked == 1:
            self._loaders.look_anew()
        self._period = self._crew.period()
        if self._period:
            self._found(self._crew.trained())
        elif self._looked >= LOOKED:
            self._stop(Stopped("unclear", UNORDERED))

    def _found(self, trained: Sequence[Trained]) -> None:
        """Take over, if the guide does: it is known what a step of the script is."""
        if not trained:
            said = UNSEEN_COMPILED if graphs_compiled() else UNSEEN
            return self._stop(Stopped("unclear", said))
        from advisor.tuners.act.pilot.seen import Seen
        from advisor.tuners.act.pilot.switch import Switch

        self._calls.rest()
        if not self._guide.takes_over():
            return self._leave()
        self._seen = seen = Seen.of(self._crew, self._loaders.seen())
        self._device, self._trained = torch.device(seen.device), trained
        order = self._guide.begin(seen)
        if not order.own:
            return self._leave()
        optimizers, feed = self._crew.optimizers, self._loaders.set
        self._switch = Switch(trained, optimizers, order.own, self._device, feed)
        self._obey(self._switch, order)

    def _step(self, switch: Switch) -> None:
        """A step of the script is over."""
        switch.began(spent=self._crew.spends)
        if not self._order.steps:
            return
        if self._order.compare is not None:
            assert self._watch is not None
            self._done += 1
            if verdict := self._watch.stepped():
                self._verdict = verdict
                self._finish(switch)
            return
        # All processes of a job must end a lap with the same step, or some wait in backward.
        alone = self._seen.processes == 1
        cut_short = alone and self._verdict is not OK
        if self._warm and not cut_short:
            self._warm -= 1
            if not self._warm:
                self._synchronize()
                self._first_s = time.perf_counter() - self._switched if self._fresh else 0.0
                self._begin_lap()
            return
        self._done += 1
        if alone and not self._cut and any(one.evaluated for one in self._trained):
            self._cut = True  # once: a lap with a second one is longer than what lies between them
            self._begin_lap()
        elif self._done >= self._order.steps or cut_short:
            self._synchronize()
            if switch.fell_back:  # what was timed is not what the config says
                switch.give_up()
                self._verdict = ("failed", FELL_BACK, "")
            self._finish(switch)

    def _finish(self, switch: Switch) -> None:
        """Report on the order that is over, and begin the next one."""
        lap = self._lap()
        if self._order.config == switch.own:
            self._own_peak = max(self._own_peak, lap.peak_bytes)
        self._obey(switch, self._guide.next(lap))

    def _lap(self) -> Lap:
        cuda = self._device.type == "cuda"
        per_step = self._seen.shape[0] // self._seen.processes
        return Lap(
            steps=self._done,
            samples=self._trained[0].samples or per_step * self._done,
            seconds=time.perf_counter() - self._began,
            first_s=self._first_s,
            waited_s=self._loaders.waited_s,
            peak_bytes=torch.cuda.max_memory_allocated(self._device) if cuda else 0,
            compiled=graphs_compiled() - self._graphs,
            borrowed=self._loaders.borrowed,
            ahead=self._loaders.ahead,
            outcome=self._verdict[0],
            reason=self._verdict[1],
            blames=self._verdict[2],
        )

    def _begin_lap(self) -> None:
        self._done = 0
        for one in self._trained:
            one.samples, one.evaluated = 0, False
        self._synchronize()
        self._graphs = graphs_compiled()
        self._loaders.begin_lap()
        self._began = time.perf_counter()

    def _obey(self, switch: Switch, order: Order) -> None:
        while self._begin(switch, order):
            order = self._guide.next(self._lap())

    def _begin(self, switch: Switch, order: Order) -> bool:
        """Begin an order; whether it is over at once."""
        self._fresh = order.config != switch.config
        self._verdict = OK
        self._switched = time.perf_counter()
        self._order, self._first_s, self._cut = order, 0.0, False
        if order.forget is not None:
            switch.forget(order.forget)
        if order.saves and self._seen.rank == 0:
            from advisor.tuners.act import artifacts

            artifacts.save(Path(order.saves))
        if self._fresh:
            self._set(switch, order)
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
        if not order.steps:
            self._stay(switch, order)
        self._warm = order.warm
        self._begin_lap()
        return order.compare is not None and self._compare(switch, order, order.compare)

    def _set(self, switch: Switch, order: Order) -> None:
        if order.config == switch.own:
            switch.set(order.config)
        elif not order.needs_room or self._has_room(HEADROOM):
            struck, lost = (functools.partial(one, switch) for one in (self._struck, self._lost))
            switch.set(order.config, struck, lost)
        else:
            switch.set(switch.own)
            self._verdict = ("out_of_memory", LITTLE, "")

    def _stay(self, switch: Switch, order: Order) -> None:
        """No order comes after this one: remove the hooks that nothing needs any more."""
        switch.stay()
        if self._watch is not None:
            self._watch.close()
        if not self._loaders.at_work:
            self._loaders.remove()
        if order.config == switch.own:
            self._unhook_failure()

    def _compare(self, switch: Switch, order: Order, asked: Comparison) -> bool:
        """Compare; whether that is over at once."""
        if order.needs_room and not self._has_room(2 * HEADROOM, host.peak_bytes()):
            self._verdict = ("out_of_memory", "little memory is free", "")
            return True
        assert self._watch is not None, "a guide that compares comes with a watch"
        verdict = self._watch.begin(switch, self._trained, self._device, asked)
        self._verdict = verdict or OK
        return verdict is not None

    def _gave_up(self, exc: Exception) -> None:
        """The script goes on without what has failed: a model's call, or the loader's workers."""
        self._verdict = (*failure(exc), "")
        if not self._order.steps:
            self._guide.gave_up(exc)

    def _struck(self, switch: Switch, exc: Exception) -> None:
        """A model's call has raised under a config: the lap ends with this step."""
        switch.give_up()
        self._gave_up(exc)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _lost(self, switch: Switch, exc: Exception) -> None:
        """Backward has raised under a config. The script may end of it: the lap, and with it the
        next order, waits for the next step."""
        switch.give_up()
        self._verdict = (*failure(exc), "")
        self._guide.lost(exc, self._order)

    def _has_room(self, times: float, host_bytes: int = 0) -> bool:
        """Whether a GPU has so many times free what a step allocates, or the host so many bytes."""
        if self._device.type != "cuda":
            return host.free_bytes() >= host_bytes
        free, _all = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_allocated(self._device)
        free += torch.cuda.memory_reserved(self._device) - held
        return bool(free >= times * (self._own_peak - held))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class InCharge:
    """Keeps the first pilot that is brought: `advisor run` comes before its script's `apply()`."""

    def __init__(self) -> None:
        self._pilot: Pilot | None = None

    def bring(self, guide: Guide, watch: Watch | None = None) -> None:
        """Attach a pilot, unless there is one."""
        if self._pilot is None:
            self._pilot = Pilot(guide, watch)

    def release(self) -> None:
        """Leave the script and PyTorch as they were found, including the flags of an advice."""
        from advisor.tuners.act.artifacts import have_own_keys
        from advisor.tuners.act.in_force import IN_FORCE

        if self._pilot is not None:
            self._pilot.release()
            self._pilot = None
        IN_FORCE.release()
        have_own_keys()


IN_CHARGE = InCharge()
