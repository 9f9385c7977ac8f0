"""Builds workloads and times them, in the worker process; what is built stays until it must go."""

from __future__ import annotations

import functools
import gc
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from advisor.cache.config import Config
from advisor.cache.shown import size
from advisor.errors import TargetError, TargetFailed
from advisor.tuners import host, target
from advisor.tuners.act import artifacts
from advisor.tuners.act.acting import Acting
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.compiled import CompiledCode, RecompileLimit, free, graphs_compiled
from advisor.tuners.act.in_force import IN_FORCE
from advisor.tuners.act.served import Served
from advisor.tuners.faults import told
from advisor.tuners.knobs import INPUT, KNOBS, TORCH, plain
from advisor.tuners.measure.compare import References
from advisor.tuners.measure.loading.loadable import Loadable
from advisor.tuners.measure.loading.timed import Feeding
from advisor.tuners.measure.place import Block, Compared, ConfigFailed
from advisor.tuners.measure.timing import Clock, warm_up
from advisor.tuners.measure.worker.subject import POINTS, WorkloadSubject
from advisor.tuners.measure.worker.wire import Costs, Job
from advisor.tuners.measure.workload import Workload

# PyTorch gives out-of-memory a type; cuDNN, cuBLAS, the driver and the CPU say it in words.
OUT_OF_MEMORY = (
    "out of memory",
    "cudnn_status_alloc_failed",
    "cublas_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "there is no memory",  # as a step that is captured says it
    "std::bad_alloc",
)
T = TypeVar("T")
INPUTS = tuple(knob.name for knob in KNOBS if knob.stage == INPUT)
LEFTOVER = 256 * 2**20
"""Bytes that may stay allocated after a config: libraries keep workspaces of some tens of MiB."""


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether memory is what was missing."""
    if isinstance(exc, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(exc).lower()
    return isinstance(exc, RuntimeError) and any(words in said for words in OUT_OF_MEMORY)


def failure(exc: Exception, reason: str = "") -> ConfigFailed:
    """What a config raised, as a line; it holds on to none of the frames that raised it."""
    if isinstance(exc, ConfigFailed):
        return exc.with_traceback(None)
    lines = str(exc).strip().splitlines()
    first = lines[0] if lines else ""
    # Some say only at the end of their own traceback what it was.
    last = f" ... {lines[-1].strip()}" if len(lines) > 1 and first.endswith(":") else ""
    reason = reason or f"{type(exc).__name__}: {first}{last}"[:300]
    return ConfigFailed("out_of_memory" if is_out_of_memory(exc) else "failed", reason)


@dataclass(slots=True)
class _Built:
    """A workload that is there, with what was compiled for it, the bytes that it holds and the most
    that it took."""

    workload: Workload
    code: tuple[set[str], set[int]] = field(default_factory=lambda: (set(), set()))
    own_bytes: int = 0
    peak_bytes: int = 0


class Bench:
    """Visits configs of one job.

    Attributes:
        healthy: whether this process may go on.
        drew: whether a step draws random numbers; None where that is not known yet.
    """

    def __init__(self, job: Job) -> None:
        self.job, self._task = job, job.task
        self.device = torch.device(job.device)
        self._cuda = self.device.type == "cuda"
        self._clock = Clock(self.device)
        self._built: dict[Config, _Built] = {}  # the one used last comes last
        self._at_work: Config | None = None
        self._fed: tuple[Workload, Feeding] | None = None
        self._peaks: dict[int, int] = {}
        self._references: tuple[tuple[Config, float], References] | None = None
        self.drew: bool | None = None
        self._limit, self._code = RecompileLimit(), CompiledCode()
        self.default = plain(self._task, job.device)
        self.healthy = True
        if self._cuda:
            torch.cuda.set_device(self.device)
            if self._task.max_memory:
                total = torch.cuda.get_device_properties(self.device).total_memory
                share = min(1.0, self._task.max_memory / total)
                torch.cuda.set_per_process_memory_fraction(share)
        self.loaded = target.load(target.parse(self._task.target), self._task.model_args)
        # Read when it was imported: what is edited later is not what is measured.
        self.code = code_of(self.loaded.spec)
        self._subject = WorkloadSubject(self._new_model, self._workload, self.device, draws=False)

    @functools.cached_property
    def data(self) -> Loadable:
        """The user's own data, once it is asked for.

        Raises:
            TargetError, TargetFailed: it gives none, or others than are tuned.
        """
        return Loadable(self._task, made_batches=self.loaded.make_batch is not None)

    def block(self, config: Config, steps: int, warm: int) -> Block:
        """Time steps of a config, built where it is not there.

        Raises:
            ConfigFailed: it fails; `healthy` then says whether another may be asked for.
        """
        foreign = self._foreign_bytes()
        try:
            return self._with_room(config, lambda: self._block(config, steps, warm))
        except ConfigFailed:
            self._leave()
            self.forget(config)
            self.healthy = self._works(foreign)
            raise

    def loader_rate(self, config: Config, seconds: float) -> float:
        """Samples per second of a config's loader without a step.

        Raises:
            ConfigFailed: it gives none.
        """
        self._leave()
        advice = self._advice(config)
        IN_FORCE.release()
        advice.set_flags()
        try:
            return self.data.rate(advice, seconds)
        except Exception as exc:  # the user's code may raise anything; it is told as a line
            raise failure(exc, told(exc)) from None

    def costs(self, seconds: float) -> Costs:
        """What a sample costs a loader's worker.

        Raises:
            TargetFailed: the user's code raised.
        """
        try:
            return self.data.costs(seconds)
        except Exception as exc:  # the user's code may raise anything; it is told as a line
            raise TargetFailed(f"data {self.data.facts.name!r}: {told(exc)}") from exc

    def compare(
        self, config: Config, fp32: Config, plain: Config, seconds: float, tolerance: float
    ) -> Compared:
        """Compare the code that is timed for a config with strict fp32, within so many seconds."""
        over = time.monotonic() + seconds
        self._leave()
        code = config.without(*INPUTS)

        def compared() -> Compared:
            references = self._references_of(fp32, tolerance)
            found = references.compare(code, plain, left_s=lambda: over - time.monotonic())
            if found.outcome == "out_of_memory":
                raise ConfigFailed(found.outcome, found.reason)
            return found

        try:
            found = self._with_room(code, compared)
        except ConfigFailed as failed:
            found = Compared(outcome=failed.outcome, reason=str(failed))
        try:
            self._subject.restore()
        except Exception:  # a device that is lost raises what it likes
            self.healthy = False
        return found

    def forget(self, config: Config) -> None:
        """Free what was built for a config; of one that a loader feeds, the loader alone."""
        if self._at_work == config:
            self._leave()
        if self._loads(config):
            return
        code = config.without(*INPUTS)
        self._subject.forget(code)
        if (built := self._built.pop(code, None)) is not None:
            compiled = built.code
            del built
            free(*compiled)

    def save(self, config: Config, file: Path) -> None:
        """Save what this process has compiled, a config built among it.

        Raises:
            ConfigFailed: it fails.
        """
        if Acting(config, TORCH, self.device).compiles:
            code = config.without(*INPUTS)
            self._with_room(code, lambda: self._workload(code))
            artifacts.save(file)

    def _with_room(self, config: Config, act: Callable[[], T]) -> T:
        """Do something with a config; where memory does not do, once more with no other built."""
        try:
            return act()
        except Exception as exc:  # a config may fail in any way; the outcome names it
            loading = self._loads(config) and not isinstance(exc, ConfigFailed)
            failed = failure(exc, told(exc) if loading else "")
        others = [one for one in self._built if one != config.without(*INPUTS)]
        if failed.outcome != "out_of_memory" or not others:
            raise failed
        self.release()
        return self._with_room(config, act)

    def _block(self, config: Config, steps: int, warm: int) -> Block:
        switched = config != self._at_work
        began = self._clock.now()
        if switched:
            self._leave()
        code = config.without(*INPUTS)
        built = self._built.get(code) or self._build(code)
        self._built[code] = self._built.pop(code)
        workload, feeding = self._begin(config, built.workload, switched)
        if feeding is not None:
            steps = -(-steps // feeding.together) * feeding.together
            warm = max(warm, feeding.settling) if switched else warm
        held = self._allocated() - built.own_bytes
        for _ in range(warm):
            workload.step()
        self._clock.synchronize()
        first_s = self._clock.now() - began if switched else 0.0
        block = self._timed(workload, feeding, steps)
        self._check(workload, built, held)
        self._at_work = config
        batch = code.batch or self._task.batch
        samples = sum(shape[0] for shape in self._task.mix) or batch
        self._peaks[batch] = max(self._peaks.get(batch, 0), built.peak_bytes)
        return Block(samples=samples * steps, first_s=first_s, peak_bytes=built.peak_bytes, **block)

    def _timed(self, workload: Workload, feeding: Feeding | None, steps: int) -> dict[str, Any]:
        """The fields of a Block that these steps decide.

        Raises:
            ConfigFailed: they were short of memory.
        """
        clock = self._clock
        retries, graphs = self._retries(), graphs_compiled()
        waited_s = feeding.waited_s if feeding else 0.0
        start, mark = clock.now(), clock.mark()
        for _ in range(steps):
            workload.step()
        end = clock.mark()
        clock.synchronize()
        seconds = clock.now() - start
        if self._retries() > retries:
            said = "the allocator kept retrying under memory pressure"
            raise ConfigFailed("out_of_memory", said)
        return {
            "steps": steps,
            "seconds": seconds,
            "waited_s": feeding.waited_s - waited_s if feeding else 0.0,
            "gpu_s": clock.between(mark, end),
            "compiled": graphs_compiled() - graphs,
        }

    def _check(self, workload: Workload, built: _Built, held: int) -> None:
        """Check the loss, and the memory at the peak.

        Raises:
            ConfigFailed: the loss is not finite, or more memory was held than is permitted.
        """
        loss = workload.loss
        if loss is not None and not math.isfinite(float(loss)):
            raise ConfigFailed("wrong", f"the loss is {float(loss)}")
        peak, most = self.peak_bytes(held), self._task.max_memory
        if not self._cuda and most and peak > most:
            said = f"it held {size(peak)} of the {size(most)} permitted"
            raise ConfigFailed("out_of_memory", said)
        built.peak_bytes = max(built.peak_bytes, peak)

    def _begin(
        self, config: Config, workload: Workload, switched: bool
    ) -> tuple[Workload, Feeding | None]:
        """What steps under a config, and the loader that feeds it, where the config has one."""
        if not switched:
            return self._fed or (workload, None)
        self.reset_peak()
        IN_FORCE.release()
        if not self._loads(config):
            workload.rewind()
            workload.advice.set_flags()
            return workload, None
        under = workload.under(self._advice(config))
        under.advice.set_flags()
        self._fed = under, self.data.feeding(under.advice)
        under.feed(self._fed[1])
        return self._fed

    def _leave(self) -> None:
        """End the loader of the config at work: its workers would take others' time."""
        self._at_work = None
        fed, self._fed = self._fed, None
        if fed is not None:
            fed[1].close()

    def _workload(self, config: Config) -> Workload:
        """The workload of a config with its flags set, built where it is not there."""
        built = self._built.get(config)
        if built is None:
            built = self._build(config)
        self._built[config] = self._built.pop(config)
        IN_FORCE.release()
        built.workload.advice.set_flags()
        return built.workload

    def _build(self, config: Config) -> _Built:
        batch = config.batch or self._task.batch
        self._make_room(batch)
        if Acting(config, TORCH, self.device).compiles:
            self._limit.raise_it()
            artifacts.have_stable_keys()
        before = self._allocated()
        self.reset_peak()
        workload = self.workload(config)
        warm_up(workload.step, self._clock, workload.start)
        built = self._built[config] = _Built(workload, self._code.claim())
        built.own_bytes = self._allocated() - before
        built.peak_bytes = self.peak_bytes(before)
        return built

    def workload(self, config: Config, *, made_up: bool = False) -> Workload:
        """A new workload of a config, of which no step has been made.

        Args:
            made_up: on made-up batches even where the task has data.
        """
        IN_FORCE.release()
        batch = config.batch or self._task.batch
        own = batch == self._task.batch
        given = self.data.batches if self._task.data and own and not made_up else ()
        # At other batches nothing is compared.
        return Workload(
            self.loaded,
            self._task,
            self._advice(config),
            batch=batch,
            seed=self.job.seed,
            count=POINTS if own else 1,
            given=given,
        )

    def _advice(self, config: Config) -> Advice:
        batch = config.batch or self._task.batch
        # As a script has it: what is torch's default already is left alone, and not set.
        served = Served(default=TORCH.at(batch))
        return Advice(config, device=self.job.device, batch_size=batch, served=served)

    def _new_model(self) -> torch.nn.Module:
        torch.manual_seed(self.job.seed)
        return target.build(self.loaded)

    def _references_of(self, fp32: Config, tolerance: float) -> References:
        """Samples that are made once; of another fp32 than before, anew."""
        if self._references is None or self._references[0] != (fp32, tolerance):
            if self.drew is None:
                self.drew = draws(self._workload(fp32).step, self.device)
            self._subject = WorkloadSubject(
                self._new_model, self._workload, self.device, draws=self.drew
            )
            made = References(self._subject, fp32, tolerance=tolerance)
            self._references = (fp32, tolerance), made
        return self._references[1]

    def _make_room(self, batch: int) -> None:
        """Drop what was used the longest ago as long as the largest config so far would not fit."""
        need = max((peak * max(1.0, batch / b) for b, peak in self._peaks.items()), default=0)
        while self._built and self._free_bytes() < need:
            self.forget(next(iter(self._built)))
            self._empty()

    def release(self) -> None:
        """Drop all workloads, and give their memory back."""
        self._leave()
        for config in list(self._built):
            self.forget(config)
        self._empty()

    def _empty(self) -> None:
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()

    def _free_bytes(self) -> int:
        """Of the memory that workloads may take, by whoever holds the rest."""
        most = self._task.max_memory or sys.maxsize
        if not self._cuda:
            return min(host.free_bytes(), most - host.resident_bytes(os.getpid()))
        held = self._allocated()
        cached = torch.cuda.memory_reserved(self.device) - held
        return min(int(torch.cuda.mem_get_info(self.device)[0]) + cached, most - held)

    def _works(self, foreign: int) -> bool:
        """Whether the device still works, and a config that failed has left no memory behind."""
        if not self._cuda:
            return True
        gc.collect()
        try:
            torch.cuda.synchronize(self.device)
            torch.rand(1, device=self.device).item()  # also what a failed capture may break
        except RuntimeError:
            return False
        return self._foreign_bytes() <= foreign + LEFTOVER

    def _foreign_bytes(self) -> int:
        """That are allocated, and no workload's that is built."""
        return self._allocated() - sum(one.own_bytes for one in self._built.values())

    def _loads(self, config: Config) -> bool:
        """Whether a config has a loader feed its steps."""
        return bool(self._task.data and config.only(*INPUTS))

    def _allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self.device)) if self._cuda else 0

    def _retries(self) -> int:
        if not self._cuda:
            return 0
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def reset_peak(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            host.reset_peak()

    def peak_bytes(self, held: int = 0) -> int:
        """Bytes at the peak beside those that others hold."""
        if self._cuda:
            return int(torch.cuda.max_memory_allocated(self.device)) - held
        return host.peak_bytes()


def code_of(spec: target.Spec) -> str:
    """Digest of the target's source; '' where it cannot be read so, as a very large file."""
    try:
        return spec.code
    except TargetError:
        return ""


def draws(step: Callable[[], None], device: torch.device) -> bool:
    """Whether a step draws random numbers of PyTorch's."""

    def states() -> list[Tensor]:
        on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]

    before = states()
    step()
    return not all(map(torch.equal, before, states()))
