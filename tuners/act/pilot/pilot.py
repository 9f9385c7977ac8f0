"""A pilot: watches the first steps of a script, then sets the configs that its guide asks for."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from advisor.cache import settings
from advisor.cache.config import Config
from advisor.errors import AdvisorError
from advisor.tuners import environment, host
from advisor.tuners.act import hooks
from advisor.tuners.act.advice_usage import is_followed
from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.act.hooks import STEP_HOOKS
from advisor.tuners.act.pilot.loaders import Loaders
from advisor.tuners.act.pilot.loop_observer import RETIRED, LoopObserver, TrainedModel
from advisor.tuners.act.pilot.losses import LossObserver
from advisor.tuners.act.pilot.protocol import (
    MAX_MEMORY,
    BlockRequest,
    BlockResult,
    CompareRequest,
    Guide,
)
from advisor.tuners.decisions import HEADROOM, IN_A_ROW, MAX_OBSERVED_STEPS
from advisor.tuners.faults import NEEDS_OPTIMIZER, UNSTEPPED, Stopped, failure, is_out_of_memory
from advisor.tuners.knobs import CHECKPOINT
from advisor.tuners.offloading import EXTRA_TIME, offload_in_place
from advisor.tuners.recomputation import recompute_in_place

if TYPE_CHECKING:
    from advisor.tuners.act.pilot.flops import StepFlops
    from advisor.tuners.act.pilot.switch import ConfigSwitch

P = ParamSpec("P")
T = TypeVar("T")
Verdict = tuple[str, str, str]  # a BlockResult's outcome, reason and blames
OK = ("ok", "", "")
_log = logging.getLogger("advisor")

_UNSEEN = "no module whose parameters the optimizer holds ran"
UNSEEN = (
    f"{_UNSEEN} with gradients; advisor tunes models that train and are called as model(x), "
    "through the __call__ of nn.Module"
)
UNSEEN_COMPILED = (
    f"{_UNSEEN} where advisor sees it: the script compiles a function that calls the model, or "
    "calls model.compile(); use torch.compile(model) instead"
)
EVALUATING = "the script trains its model in evaluation mode; call model.train() before training"
_MOST_CALLS = 8 * MAX_OBSERVED_STEPS  # of a model before the first optimizer step
BY_HAND = (
    f"in {_MOST_CALLS} calls of a model with gradients, no optimizer of torch.optim "
    f"made a step; {NEEDS_OPTIMIZER}"
)
ANOTHER = "the script trains another model now"
UNADVISED = "another model trains now than the one that the advice in force is for"
UNORDERED = (
    f"in {MAX_OBSERVED_STEPS} steps the optimizers never repeat an order, so advisor cannot tell "
    "where a step of the script ends; it tunes scripts whose optimizers all step in turn"
)
IN_THREADS = "models train in several threads; advisor tunes scripts that train in one"
LITTLE = "not tried: little of the device's memory is free"
FELL_BACK = "RecompileLimit: torch.compile has given up: shapes vary too much"


class StepComparer(Protocol):
    """Compares configs on recorded steps of the script. Methods return None before the verdict."""

    measured: dict[str, Any]  # fields of the BlockResult, if the request had `passes`

    def begin(self, switch: ConfigSwitch, asked: CompareRequest) -> Verdict | None:
        """Begin a comparison. The script's steps that it records are unmodified."""

    def stepped(self) -> Verdict | None:
        """Go on with the comparison after a step."""

    def faults(self) -> tuple[tuple[str, ...], bool]:
        """`BlockResult.faults` and `BlockResult.watches`, up to now."""

    def close(self) -> None:
        """Free all that was recorded."""


class Pilot:
    """Observes the script of this process and sets configs in it, until `release`."""

    def __init__(self, guide: Guide, comparer: StepComparer | None = None) -> None:
        self._guide = guide
        self._comparer = comparer
        self._stepping, self._threaded = threading.RLock(), threading.Event()
        self._attach()

    def _attach(self) -> None:
        self._observer = LoopObserver()
        self._trained: Sequence[TrainedModel] = ()
        self._switch: ConfigSwitch | None = None
        self._request = BlockRequest(config=Config())
        self._saves: Collection[str] | None = None  # None until the first training call
        self._looked = self._period = 0
        self._at = self._done = self._warm = self._graphs = 0
        self._elsewhere = self._own_peak = 0
        self._began = self._first_s = self._switched = self._joules = 0.0
        self._flops: StepFlops | None = None  # while a step is counted
        self._counted = Config()  # once a step was counted
        self._limits: Any = None  # a LimitObserver, once asked for
        self._exchange: Any = None  # an ExchangeTimer, while a block is profiled
        self._fresh = self._cut = self._flags_released = self._broken = False
        self._verdict: Verdict = OK
        self._losses = LossObserver()
        before: Loaders | None = vars(self).get("_loaders")
        self._loaders = Loaders(self._gave_up, override=settings.is_on("ADVISOR_OVERRIDE_LOADER"))
        if before is not None:
            self._loaders.know(before)
        self._calls = hooks.CallHooks(
            self._guarded(self._called),
            self._guarded(self._observer.on_autocast),
            self._guarded(self._begins),
        )
        self._count_no_more = STEP_HOOKS.register(self._guarded(self._stepped))
        self._unhook_failure = hooks.on_script_failure(self._ended)
        self._at_exit = atexit.register(self._guarded(self._exits))

    def release(self) -> None:
        """Leave the script and PyTorch as they were found."""
        self._leave()
        self._count_no_more()
        self._calls.remove()

    def _leave(self) -> None:
        """As `release`, but keep hooks that are part of the script's compiled code."""
        self._calls.pause()
        if self._comparer is not None:
            self._comparer.close()
        if self._flops is not None:
            self._flops.end(0)
        if self._limits is not None:
            self._limits.close()
        if self._exchange is not None:
            self._exchange.end(0, 0.0, 0.0)
            self._exchange = None
        if self._switch is not None:
            self._switch.release()
            self._switch = None
        self._observer.forget()
        self._losses.remove()
        self._trained = ()
        self._loaders.remove()
        if not self._threaded.is_set():  # else another thread may be iterating over PyTorch's hooks
            self._count_no_more()
        self._unhook_failure()
        atexit.unregister(self._at_exit)

    def _stop(self, exc: Exception) -> None:
        self._guide.failed(exc)
        self._leave()

    def _guarded(self, hook: Callable[P, T]) -> Callable[P, T | None]:
        """Wrap a hook: an exception in it ends the pilot, and not the run."""

        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            if self._broken:
                return None
            try:
                return hook(*args, **kwargs)
            except AdvisorError:
                raise  # strict=True
            except Exception as exc:
                self._broken = True
                _log.error("the pilot failed; please report this", exc_info=exc)
                with suppress(Exception):  # what is broken may not be undone either
                    self._stop(Stopped("broken", f"the pilot failed: {failure(exc)[1]}"))
                return None

        return guarded

    def _ended(self, exc: BaseException) -> None:
        atexit.unregister(self._at_exit)
        self._guide.failed(exc)
        if self._looked:
            self._guarded(self._tell_if_brief)()
        if self._switch is not None and self._request.config != self._switch.own:
            self._guide.script_failed(exc, self._request)

    def _exits(self) -> None:
        self._tell_if_brief()
        # Free the script's objects: a file that it never closes is written out then.
        self._calls.pause()
        self._observer.forget()
        self._switch, self._trained = None, ()

    def _tell_if_brief(self) -> None:
        if self._observer.called and not self._looked and self._guide.takes_over():
            self._guide.failed(Stopped("untrained", UNSTEPPED))
        elif self._looked and self._switch is None:
            steps = f"{self._looked} step{'s' * (self._looked != 1)} of its optimizers"
            self._guide.failed(Stopped("brief", f"the script ended after {steps}"))

    def _begins(self, module: nn.Module) -> AbstractContextManager[Any] | None:
        """Before its first training call, have a model that runs out of memory otherwise take the
        least. Returns a context for this call."""
        if not torch.is_grad_enabled() or not module.training or module in self._observer.called:
            return None
        if self._saves is None:
            device = next(module.parameters()).device
            self._saves = self._guide.saves_memory(str(device))
            environment.limit_memory(device, int(os.environ.get(MAX_MEMORY) or 0))
            if self._saves:
                environment.expand_segments(device)
        if not self._saves:
            return None
        from advisor.tuners.act.pilot.switch import callable_module

        if (called := callable_module(module)) is None:
            return None
        if CHECKPOINT in self._saves:
            recompute_in_place(called)
        return offload_in_place(called).offloads()

    def _called(self, module: nn.Module, *call: Any) -> None:
        self._observer.on_call(module, *call)
        made = sum(one.signatures.calls for one in self._observer.called.values())
        if made >= _MOST_CALLS and not self._looked and not is_followed():
            self._stop(Stopped("unclear", BY_HAND))

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        # No thread waits for another one: the thread that holds the lock ends the pilot.
        if self._threaded.is_set() or not self._stepping.acquire(blocking=False):
            self._threaded.set()
            return
        try:
            self._stepped_alone(optimizer)
        finally:
            self._stepping.release()
        if self._threaded.is_set():
            self._stop(Stopped("unclear", IN_THREADS))

    def _stepped_alone(self, optimizer: torch.optim.Optimizer) -> None:
        if self._switch is None:
            self._look(optimizer)
        elif (kind := self._observer.kind(optimizer)) == "known":
            if self._request.steps:
                self._elsewhere = 0
            elif self._flags_released:
                self._flags_released = False
                self._switch.put_flags()
            self._at += 1
            if self._at >= self._period:
                self._at = 0
                self._step(self._switch)
        elif kind != "retired" or self._request.steps:
            self._stepped_elsewhere(self._switch, kind)

    def _stepped_elsewhere(self, switch: ConfigSwitch, kind: str) -> None:
        """Handle a step of an optimizer that was not recorded."""
        self._elsewhere += 1
        if self._request.steps:
            if self._elsewhere >= MAX_OBSERVED_STEPS:
                self._stop(Stopped("over", ANOTHER))
        elif kind == "new" or (kind == "similar" and self._elsewhere >= IN_A_ROW):
            if kind == "similar":
                RETIRED.update(self._observer.optimizers)
            self._leave()
            self._attach()
        elif self._elsewhere == IN_A_ROW:
            self._flags_released = True  # until the advised model steps again
            switch.release_flags()
            self._guide.failed(Stopped("over", UNADVISED))

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        self._observer.on_step(optimizer)
        self._looked += 1
        if self._looked == 1:
            self._loaders.restart_observation()
        self._period = self._observer.period()
        if self._period:
            self._found(self._observer.trained())
        elif self._looked >= MAX_OBSERVED_STEPS:
            self._stop(Stopped("unclear", UNORDERED))

    def _found(self, trained: Sequence[TrainedModel]) -> None:
        """Ask the guide whether to take over: a step of the script is known now."""
        if not trained:
            said = UNSEEN_COMPILED if graphs_compiled() else UNSEEN
            if self._observer.trains_in_evaluation_mode():
                said = EVALUATING
            return self._stop(Stopped("unclear", said))
        from advisor.tuners.act.pilot.flops import StepFlops
        from advisor.tuners.act.pilot.script_facts import ScriptFacts
        from advisor.tuners.act.pilot.switch import ConfigSwitch

        self._calls.pause()
        if not self._guide.takes_over():
            return self._leave()
        try:
            seen = ScriptFacts.of(self._observer, self._loaders.seen(), bool(self._saves))
            self._seen = seen
            self._device, self._trained = torch.device(seen.device), trained
            request = self._guide.begin(seen)
        except Stopped as exc:
            return self._stop(exc)
        if not request.own or self._threaded.is_set():
            return self._leave()
        optimizers, feed = self._observer.optimizers, self._loaders.set
        self._switch = ConfigSwitch(
            trained, optimizers, request.own, self._device, feed, self._observer.wrappers
        )
        self._follow(self._switch, request)
        if request.steps and request.warm and request.config == request.own:
            self._flops = StepFlops(self._switch.calls, real=request.needs_room)

    def _step(self, switch: ConfigSwitch) -> None:
        """Handle the end of a step of the script."""
        switch.begin_step(freed=self._observer.frees_gradients)
        self._losses.end_step()
        if self._limits is not None:
            self._limits.end_step()
        steps = self._request.steps or self._request.warm
        if not steps:
            return
        if self._request.compare is not None:
            assert self._comparer is not None
            self._done += 1
            if verdict := self._comparer.stepped():
                self._verdict = verdict
                self._finish(switch)
            return
        # All processes of a job must end a block with the same step, or some wait in backward.
        alone = self._seen.processes == 1
        cut_short = alone and self._verdict is not OK
        if self._warm and not cut_short:
            self._warm -= 1
            if not self._warm:
                environment.synchronize(self._device)
                self._first_s = time.perf_counter() - self._switched if self._fresh else 0.0
                self._begin_block()
            return
        self._done += 1
        if alone and not self._cut and any(one.evaluated for one in self._trained):
            self._cut = True  # restart once only: a block may be longer than an evaluation interval
            self._begin_block()
        elif self._done >= steps or cut_short:
            environment.synchronize(self._device)
            if switch.fell_back:  # the timed code is not the config's
                switch.drop_config()
                self._verdict = ("failed", FELL_BACK, "")
            self._finish(switch)

    def _finish(self, switch: ConfigSwitch) -> None:
        """Report the result of the request, and begin the next request."""
        result = self._result()
        if self._request.config == switch.own:
            self._own_peak = max(self._own_peak, result.peak_bytes)
        self._follow(switch, self._guide.next(result))

    def _result(self) -> BlockResult:
        cuda = self._device.type == "cuda"
        per_step = self._seen.shape[0] // self._seen.processes
        faults, watches = ((), False) if self._comparer is None else self._comparer.faults()
        found = BlockResult(
            steps=self._done,
            samples=self._trained[0].samples or per_step * self._done,
            seconds=time.perf_counter() - self._began,
            joules=environment.energy_j(self._seen.device) - self._joules if self._joules else 0.0,
            first_s=self._first_s,
            waited_s=self._loaders.waited_s,
            peak_bytes=torch.cuda.max_memory_allocated(self._device) if cuda else 0,
            compiled=graphs_compiled() - self._graphs,
            extra_s=EXTRA_TIME.take(),
            loader_load=self._loaders.load,
            prefetched=self._loaders.prefetched,
            outcome=self._verdict[0],
            reason=self._verdict[1],
            blames=self._verdict[2],
            faults=faults,
            watches=watches,
            counted=self._counted,
            losses=self._losses.taken(),
            limits=() if self._limits is None else self._limits.found(),
        )
        if self._exchange is not None:
            ended, self._exchange = self._exchange.end, None
            steps = ended(found.steps, found.seconds, found.waited_s)
            found = dataclasses.replace(found, ranks=steps)
        asked, comparer = self._request.compare, self._comparer
        more = comparer.measured if comparer and asked and asked.passes else {}
        return dataclasses.replace(found, **more)

    def _begin_block(self) -> None:
        if self._flops is not None:
            samples = self._loaders.batches * self._trained[0].call_samples
            # The last batch may be smaller, or be dropped.
            epoch = min(samples, self._loaders.samples or samples) * self._seen.processes
            counted, self._flops = self._flops.end(self._trained[0].samples), None
            self._counted = counted.replace(epoch=epoch)
        self._done = 0
        for one in self._trained:
            one.samples, one.evaluated = 0, False
        environment.synchronize(self._device)
        self._graphs = graphs_compiled()
        EXTRA_TIME.take()
        EXTRA_TIME.counts = self._request.steps > 0
        self._loaders.begin_block()
        self._joules = environment.energy_j(self._seen.device) if self._request.steps else 0.0
        if self._exchange is not None:
            self._exchange.begin()
        self._began = time.perf_counter()

    def _follow(self, switch: ConfigSwitch, request: BlockRequest) -> None:
        while self._begin(switch, request):
            request = self._guide.next(self._result())

    def _begin(self, switch: ConfigSwitch, request: BlockRequest) -> bool:
        """Begin a request. Returns whether it is over at once."""
        self._fresh = request.config != switch.config
        self._verdict = OK
        self._switched = time.perf_counter()
        self._request, self._first_s, self._cut = request, 0.0, False
        if request.forget is not None:
            switch.forget(request.forget)
        if request.saves and self._seen.rank == 0:
            from advisor.tuners.act import artifacts

            artifacts.save(Path(request.saves))
        if self._fresh:
            self._set(switch, request)
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
        if not request.steps:
            self._make_final(switch, request)
        if request.losses:
            self._losses.begin()
        self._warm = request.warm
        if request.ranks:
            from advisor.tuners.act.pilot.exchange import ExchangeTimer

            self._exchange = ExchangeTimer(self._device)
        self._begin_block()
        if request.limits:
            from advisor.tuners.act.pilot.limits import LimitObserver

            given = switch.calls, self._loaders, self._seen.shape[0] // self._seen.processes
            self._limits = self._limits or LimitObserver(*given)
        return request.compare is not None and self._compare(switch, request, request.compare)

    def _set(self, switch: ConfigSwitch, request: BlockRequest) -> None:
        if request.config == switch.own:
            switch.set(request.config)
        elif not request.needs_room or self._has_room(HEADROOM):
            call_failed = functools.partial(self._call_failed, switch)
            failed = call_failed, functools.partial(self._backward_failed, switch)
            switch.set(request.config, *failed, disposable=self._is_disposable)
        else:
            switch.set(switch.own)
            self._verdict = ("out_of_memory", LITTLE, "")

    def _make_final(self, switch: ConfigSwitch, request: BlockRequest) -> None:
        """Remove hooks that the last request no longer needs."""
        switch.make_final()
        if self._comparer is not None:
            self._comparer.close()
        if not self._loaders.at_work:
            self._loaders.remove()
        if request.config == switch.own:
            self._unhook_failure()

    def _compare(self, switch: ConfigSwitch, request: BlockRequest, asked: CompareRequest) -> bool:
        """Begin a comparison. Returns whether it is over at once."""
        if request.needs_room and not self._has_room(2 * HEADROOM, host.peak_bytes()):
            self._verdict = ("out_of_memory", "little memory is free", "")
            return True
        assert self._comparer is not None, "a guide that compares comes with a comparer"
        self._verdict = self._comparer.begin(switch, asked) or OK
        return self._verdict is not OK

    def _gave_up(self, exc: Exception) -> None:
        """Note an exception of a model's call or of loader workers, which the script survives."""
        self._verdict = (*failure(exc), "")
        if not self._request.steps:
            self._guide.config_dropped(exc)

    def _call_failed(self, switch: ConfigSwitch, exc: Exception) -> None:
        """Handle an exception of a model's call under a config: the block ends with this step."""
        switch.drop_config()
        self._gave_up(exc)
        torch.cuda.empty_cache()

    @property
    def _is_disposable(self) -> bool:
        """Whether the script's steps are only measured, in one process."""
        request = self._request
        return request.steps > 0 and not request.needs_room and self._seen.processes == 1

    def _backward_failed(self, switch: ConfigSwitch, exc: Exception) -> bool:
        """Handle an exception of backward under a config. Returns whether the script goes on with
        zero gradients: if memory ran out and its steps are disposable. Else the script may end
        because of it, so the next config is asked for at the next step."""
        switch.drop_config()
        self._verdict = (*failure(exc), "")
        if self._is_disposable and is_out_of_memory(exc):
            exc.with_traceback(None)  # its frames hold memory
            switch.abandon_step()
            torch.cuda.empty_cache()
            return True
        self._guide.backward_failed(exc, self._request)
        return False

    def _has_room(self, times: float, host_bytes: int = 0) -> bool:
        """Whether `times` a step's memory is free on the GPU, or else `host_bytes` on the host."""
        if self._device.type != "cuda":
            return host.free_bytes() >= host_bytes
        needs = self._own_peak - environment.allocated(self._device)
        return environment.free_bytes(self._device) >= times * needs


class ActivePilot:
    """Keeps the first pilot that is attached: `advisor run` comes before its script's `apply()`."""

    def __init__(self) -> None:
        self._pilot: Pilot | None = None

    def attach(self, guide: Guide, comparer: StepComparer | None = None) -> None:
        """Attach a pilot, unless one is attached already."""
        if self._pilot is None:
            self._pilot = Pilot(guide, comparer)

    def release(self) -> None:
        """Leave the script and PyTorch as they were found, including the flags of an advice."""
        from advisor.tuners.act.artifacts import restore_keys
        from advisor.tuners.act.process_flags import PROCESS_FLAGS

        if self._pilot is not None:
            self._pilot.release()
            self._pilot = None
        PROCESS_FLAGS.release()
        restore_keys()


ACTIVE_PILOT = ActivePilot()
