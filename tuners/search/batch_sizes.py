"""The largest batch that fits, and the fastest one: repeats a step of a run with other sizes."""

from __future__ import annotations

import dataclasses
import statistics

from advisor.cache.record import PILOT, Measurement, Trial
from advisor.errors import TargetFailed, WorkerError
from advisor.tuners.act.pilot.parts import micro_batches, size_of
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.decisions import PAIRS, TURN_S
from advisor.tuners.knobs import COMPILE
from advisor.tuners.measure.run.run import Run
from advisor.tuners.measure.runner import ConfigFailed
from advisor.tuners.search.plan import Clock
from advisor.tuners.search.race import SearchResult
from advisor.tuners.search.space import ladder
from advisor.tuners.search.visit import turn_steps

OTHER_BATCH, LARGEST = "batch", "largest"  # the stage of trials; the origin of one


class BatchSizes:
    """Other batches in a run. A size is the number of samples of one call."""

    def __init__(self, run: Run, seen: ScriptFacts, clock: Clock) -> None:
        self._run, self._seen, self._clock = run, seen, clock
        self._calls, self._batch = micro_batches(seen.others), run.baseline.batch
        self._own, self._largest = self._batch // self._calls, 0
        self._times: dict[int, list[float]] = {}  # seconds of a call and its backward, by size
        self._peaks: dict[int, int] = {}  # bytes of a step, without gradients of earlier calls

    def add_to(self, found: SearchResult) -> SearchResult:
        """`found` with a trial of each batch that fits, or a remark on why there is none."""
        try:
            self._measure(found)
        except (ConfigFailed, TargetFailed, WorkerError) as exc:
            said = f"No other batch was measured: {exc}"
            return dataclasses.replace(found, remarks=(*found.remarks, said))
        except KeyboardInterrupt:
            found = dataclasses.replace(found, interrupted=True)
        trials = [self._trial(*one) for one in enumerate(sorted(self._times), len(found.trials))]
        return dataclasses.replace(found, trials=(*found.trials, *trials))

    def _measure(self, found: SearchResult) -> None:
        """Try halves and doubles of the script's own size, then the largest that fits. Nothing is
        compiled, as each size would be: if the advice compiles, the fastest other config counts."""
        advised = {one.choice.config for one in found.winners if one.use == PILOT}
        failed = {one.config for one in found.trials if not one.measurement.ok}
        mine = [t for t in found.trials if t.config.batch == self._batch and t.config not in failed]
        eager = [one for one in mine if one.config.get(COMPILE, "none") == "none"]
        if not eager:
            raise WorkerError("the script compiles its model, and would again for each batch")
        best = max(eager, key=lambda one: (one.config in advised, one.measurement.samples_per_s))
        for choice in found.raced:
            self._run.forget(choice.config)  # graphs hold memory
        self._config, own, most_s = best.config, self._own, self._clock.deadline_s
        steps = turn_steps(best.measurement.step_s, TURN_S)
        self._step = self._run.block(best.config, steps, deadline_s=most_s)
        first = self._run.block(best.config, PAIRS, deadline_s=most_s, batch=own)
        self._times[own], self._peaks[own] = [first.step_s], best.measurement.peak_bytes
        self._beside = best.measurement.peak_bytes - first.peak_bytes
        self._try(*(own >> n for n in range(1, PAIRS + 1) if own % 2**n == 0))
        # A few doubles if the memory is not known, as on a CPU.
        full = self._try(*ladder(own, fits=own * (256 if self._run.memory else 4))[1:])
        low, least = max(self._times), min(self._times)
        if full and full.outcome == "out_of_memory":
            # Where the memory ends, on a line through two peaks; or less.
            grows = (self._peaks[low] - self._peaks[least]) / max(1, low - least)
            more = ((self._run.memory or 2**62) - self._peaks[low]) / max(1.0, grows)
            for part in (1, 2, 4):
                size = low + int(min(more, low - 1) / part)
                if size <= low or self._try(size) is None:
                    self._largest = max(self._times)
                    break
        elif full and len(self._times) == 1:
            raise full
        self._try(*sorted(self._times, reverse=True) * (PAIRS - 1))

    def _try(self, *sizes: int) -> ConfigFailed | None:
        """Time each size once more, until one fails. Returns how."""
        for size in sizes:
            step_s, clock = self._step.step_s * size / self._own, self._clock
            if (PAIRS + 1) * step_s > clock.left_s:
                return ConfigFailed("timed_out", "no time is left")
            try:
                passes, most_s = turn_steps(step_s, TURN_S), clock.deadline_s
                block = self._run.block(self._config, passes, deadline_s=most_s, batch=size)
            except ConfigFailed as exc:
                return exc
            self._peaks[size] = block.peak_bytes + self._beside
            if 0 < self._run.memory < self._peaks[size]:
                return ConfigFailed("out_of_memory", "it would not fit")
            self._times.setdefault(size, []).append(block.step_s)
        return None

    def _trial(self, number: int, size: int) -> Trial:
        """What a step takes beside its calls, in time and memory, is the same for all sizes."""
        own_s, size_s = (statistics.median(self._times[one]) for one in (self._own, size))
        steps = self._calls if self._batch % size else self._batch // size  # to keep the batch
        fed_s = self._step.step_s - self._step.waited_s / self._step.steps
        step_s = max(0.0, fed_s - self._calls * own_s) + steps * size_s
        stays = size_of(self._seen.memory, "gradients") if steps > self._calls == 1 else 0
        rate, peak = steps * size / step_s, max(0, self._peaks[size] + stays)
        return Trial(
            number=number,
            config=self._config.at(self._calls * size),
            measurement=Measurement(outcome="ok", samples_per_s=rate, peak_bytes=peak),
            stage=OTHER_BATCH,
            origin=LARGEST if size == self._largest else "replay",
            seconds=sum(self._times[size]),
        )
