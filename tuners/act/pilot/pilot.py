"""The pilot of one process: looks at the first steps, then does what its guide says."""

from __future__ import annotations

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
from advisor.tuners.act.pilot import hooks
from advisor.tuners.act.pilot.crew import (
    LET_GO,
    MOST_PERIOD,
    Brief,
    Crew,
    Over,
    Trained,
    Unclear,
    Untrained,
)
from advisor.tuners.act.pilot.loaders import Loaders
from advisor.tuners.act.pilot.orders import Comparison, Guide, Lap, Order, of_graphs, told
from advisor.tuners.act.steps import EVERY_STEP

if TYPE_CHECKING:
    from advisor.tuners.act.pilot.switch import Switch

P = ParamSpec("P")
_log = logging.getLogger("advisor")

HEADROOM = 1.5
"""Of the memory that a step of the script takes beyond what it holds: so much must be free before
a careful config is tried."""
COMPARES = 3.0
"""The same for a comparison: strict fp32 takes twice what half precision does, and its gradients
lie beside those of the script."""
LOOKED = 256
"""Steps of optimizers after which a script whose steps cannot be told apart is left alone."""
ELSEWHERE = 2 * MOST_PERIOD
"""Steps of other optimizers in a row after which a trial is over: what it times trains no more."""
ANEW = 8
"""Steps in a row of an optimizer like those that advice is in force for, after which it is put in
force anew; and steps in all of others, after which the user is told once. An optimizer that makes
fewer, as one that fits a few weights before the training, is not worth a warning."""
MOST_CUTS = 3
"""Times that a lap begins anew after an evaluation; a script that evaluates more often has it in
its steps."""
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


class RecompileLimit(Exception):
    """A model's shapes vary more than can be compiled for."""


class Watch(Protocol):
    """Compares configs, on calls that it has seen the script make."""

    def begin(
        self,
        switch: Switch,
        trained: Sequence[Trained],
        device: torch.device,
        asked: Comparison,
    ) -> bool:
        """Compare; whether it is over already, as all steps that it needs were seen before. Else
        the next step is the first to be looked at, and the script trains unmodified."""

    def stepped(self) -> bool:
        """A step is over; whether the comparison is."""

    def verdict(self) -> tuple[str, str, str]:
        """Outcome, reason and what is blamed; the script is as it was."""

    def close(self) -> None:
        """Let go of all that was kept."""


class Pilot:
    """Attached to a script, until `release`.

    Args:
        another: brings the next pilot, once this one has left: its models train no more, and what
            does is a model like them.
    """

    def __init__(
        self,
        guide: Guide,
        watch: Watch | None = None,
        another: Callable[[], None] | None = None,
    ) -> None:
        self._guide = guide
        self._watch = watch
        self._another = another
        self._comparing = False
        self._crew = Crew()
        self._trained: Sequence[Trained] = ()
        self._looked = 0
        self._switch: Switch | None = None
        self._order = Order(config=Config())
        self._period = 0
        self._at = self._done = self._warm = self._graphs = 0
        self._elsewhere = self._unadvised = 0
        self._began = self._first_s = self._waited_s = self._switched = 0.0
        self._blames, self._of_graphs = "", False
        self._cuts = 0
        self._fresh = self._released = False
        self._own_peak = 0
        self._outcome, self._reason = "ok", ""
        self._loaders = Loaders(self._gave_up, override=settings.overrides_loader())
        self._calls = hooks.Calls(
            self._guarded(self._crew.saw_call), self._guarded(self._crew.saw_within)
        )
        self._count_no_more = EVERY_STEP.tell(self._guarded(self._stepped))
        self._outlive = hooks.on_failure(self._ended)
        self._unexit = hooks.on_exit(self._guarded(self._exits))

    def release(self) -> None:
        """Leave the script as it was found, and everything of PyTorch's too."""
        self._leave()
        self._calls.remove()

    def _leave(self) -> None:
        """The same, but for hooks that the script has compiled into a function of its own."""
        self._released = True
        self._calls.rest()
        self._comparing = False
        if self._watch is not None:
            self._watch.close()
        if self._switch is not None:
            self._switch.release()
            self._switch = None
        self._crew.forget()
        self._trained = ()
        self._loaders.remove()
        self._count_no_more()
        self._outlive()
        self._unexit()

    def _guarded(self, told: Callable[P, None]) -> Callable[P, None]:
        """A run is worth more than its advice: what goes wrong here ends the pilot alone."""

        def hook(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                told(*args, **kwargs)
            except AdvisorError:
                raise  # it was to be strict
            except Exception as exc:
                _log.error("the pilot failed; please report this", exc_info=exc)
                self._guide.failed(exc)
                self._leave()

        return hook

    def _ended(self, exc: BaseException) -> None:
        """The script has ended of this."""
        self._unexit()
        self._guide.failed(exc)
        if self._looked:
            self._exits()
        if self._switch is not None and self._order.config != self._switch.own:
            self._guide.ended(exc, self._order)

    def _exits(self) -> None:
        if self._crew.called and not self._looked and self._guide.takes_over():
            self._guide.failed(Untrained(UNSTEPPED))
        elif self._looked and self._switch is None:
            steps = f"{self._looked} step{'s' * (self._looked != 1)} of its optimizers"
            self._guide.failed(Brief(f"the script ended after {steps}"))

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._released:
            return
        if self._switch is None:
            self._look(optimizer)
            return
        if not self._crew.includes(optimizer):
            if self._another is not None and not self._order.steps and self._crew.joins(optimizer):
                self._leave()
                self._another()
                return
            self._stepped_elsewhere(optimizer)
            return
        self._elsewhere = 0
        self._at += 1
        if self._at >= self._period:
            self._at = 0
            self._step(self._switch)

    def _stepped_elsewhere(self, optimizer: torch.optim.Optimizer) -> None:
        self._elsewhere += 1
        if self._order.steps:
            if self._elsewhere >= ELSEWHERE:
                self._guide.failed(Over(ANOTHER))
                self._leave()
        elif self._another is None or optimizer in LET_GO:
            return
        elif self._crew.is_like(optimizer):
            if self._elsewhere >= ANEW:
                LET_GO.update(self._crew.optimizers)
                self._leave()
                self._another()
        else:
            self._unadvised += 1
            if self._unadvised == ANEW:
                self._guide.failed(Over(UNADVISED))

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        self._crew.saw_step(optimizer)
        self._looked += 1
        if self._looked == 1:
            self._loaders.look_anew()
        self._period = self._crew.period()
        if not self._period:
            if self._looked >= LOOKED:
                self._guide.failed(Unclear(UNORDERED))
                self._leave()
            return
        trained = self._crew.trained()
        if not trained:
            self._guide.failed(Unclear(UNSEEN_COMPILED if hooks.compiled() else UNSEEN))
            self._leave()
            return
        from advisor.tuners.act.pilot.seen import Seen
        from advisor.tuners.act.pilot.switch import Switch

        self._calls.rest()
        if not self._guide.takes_over():
            self._leave()
            return
        seen = Seen.of(self._crew, self._looked // self._period, self._loaders.seen())
        self._device = torch.device(seen.device)
        self._trained = trained
        self._per_step = seen.shape[0] // seen.processes
        self._processes, self._rank = seen.processes, seen.rank
        order = self._guide.begin(seen)
        if not order.own:
            self._leave()
            return
        self._switch = Switch(
            trained,
            self._crew.optimizers,
            order.own,
            self._device,
            self._loaders.set,
            self._guide.failed,
        )
        self._obey(self._switch, order)

    def _step(self, switch: Switch) -> None:
        switch.began()
        if self._crew.spends:
            switch.spent()
        if not self._order.steps:
            return
        if self._comparing:
            self._compared_step(switch)
            return
        # Of several processes one that stopped before the others would have them wait in backward.
        cut_short = self._outcome != "ok" and self._processes == 1
        if self._warm and not cut_short:
            self._warm -= 1
            if not self._warm:
                self._synchronize()
                self._first_s = time.perf_counter() - self._switched if self._fresh else 0.0
                self._begin_lap()
            return
        self._done += 1
        if self._evaluated() and self._cuts < MOST_CUTS:
            self._cuts += 1
            self._begin_lap()
            return
        if self._done >= self._order.steps or cut_short:
            self._synchronize()
            if switch.fell_back:
                self._fell_back(switch)
            if self._released:
                return
            self._finish(switch)

    def _compared_step(self, switch: Switch) -> None:
        assert self._watch is not None
        self._done += 1
        if self._watch.stepped():
            self._outcome, self._reason, self._blames = self._watch.verdict()
            self._finish(switch)

    def _finish(self, switch: Switch) -> None:
        """Report on the order that is over, and take the next one."""
        self._comparing = False
        lap = self._lap()
        if self._order.config == switch.own:
            self._own_peak = max(self._own_peak, lap.peak_bytes)
        self._obey(switch, self._guide.next(lap))

    def _lap(self) -> Lap:
        cuda = self._device.type == "cuda"
        return Lap(
            steps=self._done,
            samples=self._trained[0].samples or self._per_step * self._done,
            seconds=time.perf_counter() - self._began,
            first_s=self._first_s,
            waited_s=self._loaders.waited_s - self._waited_s,
            peak_bytes=torch.cuda.max_memory_allocated(self._device) if cuda else 0,
            compiled=hooks.compiled() - self._graphs,
            feed=self._loaders.fed(),
            outcome=self._outcome,
            reason=self._reason,
            blames=self._blames,
            graphs=self._of_graphs,
        )

    def _obey(self, switch: Switch, order: Order) -> None:
        while self._begin(switch, order):
            order = self._guide.next(self._lap())

    def _begin(self, switch: Switch, order: Order) -> bool:
        """Begin what is ordered; whether it is over at once."""
        self._fresh = order.config != switch.config
        self._outcome, self._reason, self._blames, self._of_graphs = "ok", "", "", False
        self._switched = time.perf_counter()
        self._order, self._first_s, self._cuts = order, 0.0, 0
        if order.forget is not None:
            switch.forget(order.forget)
        self._save(order)
        if self._fresh:
            self._set(switch, order)
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
        if not order.steps:
            self._stay(switch, order)
        self._warm = order.warm
        self._begin_lap()
        return order.compare is not None and self._compare(switch, order, order.compare)

    def _stay(self, switch: Switch, order: Order) -> None:
        """No order comes after this one: go out of the way of what is not needed any more."""
        switch.stay()
        if self._watch is not None:
            self._watch.close()
        if not self._loaders.at_work:
            self._loaders.remove()
        if not (switch.counts_steps or self._another):
            self._count_no_more()
        if order.config == switch.own:
            self._outlive()

    def _save(self, order: Order) -> None:
        if order.saves and self._rank == 0:
            from advisor.tuners.act import artifacts

            artifacts.save(Path(order.saves))

    def _begin_lap(self) -> None:
        self._done = 0
        self._crew.looked_at()
        self._synchronize()
        self._waited_s = self._loaders.waited_s
        self._graphs = hooks.compiled()
        self._loaders.begin_lap()
        self._began = time.perf_counter()

    def _evaluated(self) -> bool:
        """Whether the script has evaluated since the lap began, which is no part of a step. Where
        there are other processes they may not, and all are to end a lap with the same step."""
        return self._processes == 1 and any(one.evaluated for one in self._trained)

    def _set(self, switch: Switch, order: Order) -> None:
        if not order.careful or order.config == switch.own:
            switch.set(order.config)
        elif not order.needs_room or self._has_room(HEADROOM):
            struck, lost = (functools.partial(one, switch) for one in (self._struck, self._lost))
            switch.set(order.config, struck, lost)
        else:
            switch.set(switch.own)
            self._outcome = "out_of_memory"
            self._reason = "not tried: little of the device's memory is free"

    def _compare(self, switch: Switch, order: Order, asked: Comparison) -> bool:
        """Compare; whether that is over at once."""
        if order.needs_room and not self._has_room_to_compare():
            self._outcome, self._reason = "out_of_memory", "little memory is free"
            return True
        assert self._watch is not None, "whoever asks for a comparison brings what makes it"
        self._comparing = not self._watch.begin(switch, self._trained, self._device, asked)
        if not self._comparing:
            self._outcome, self._reason, self._blames = self._watch.verdict()
        return not self._comparing

    def _struck(self, switch: Switch, exc: Exception) -> None:
        """A careful config has raised in a model's call: the lap ends with this step."""
        switch.give_up()
        self._gave_up(exc)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _gave_up(self, exc: Exception) -> None:
        """The script goes on without what has failed: a model's call, or the loader's workers."""
        self._outcome, self._reason = told(exc)
        self._of_graphs = of_graphs(exc)
        if not self._order.steps:
            self._guide.gave_up(exc)

    def _lost(self, switch: Switch, exc: Exception) -> None:
        """Backward has raised under a careful config."""
        switch.give_up()
        self._outcome, self._reason = told(exc)
        self._of_graphs = of_graphs(exc)
        self._guide.lost(exc, self._order)
        if self._order.steps and self._processes == 1:
            # Told now, as the script may end of it; of several processes the others wait in theirs.
            self._obey(switch, self._guide.next(self._lap()))

    def _fell_back(self, switch: Switch) -> None:
        """What is timed is not what the config says, and nor would another be that compiles."""
        exc = RecompileLimit("torch.compile has given up: shapes vary too much")
        if self._order.careful:
            switch.give_up()
            self._outcome, self._reason = told(exc)
        else:
            self._guide.failed(exc)
            self.release()

    def _has_room_to_compare(self) -> bool:
        if self._device.type == "cuda":
            return self._has_room(COMPARES)
        return host.free_bytes() >= host.peak_bytes()

    def _has_room(self, times: float) -> bool:
        """Whether so many times what a step takes beyond what is held is free on the device."""
        if self._device.type != "cuda":
            return True
        free, _all = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_allocated(self._device)
        free += torch.cuda.memory_reserved(self._device) - held
        return bool(free >= times * (self._own_peak - held))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
