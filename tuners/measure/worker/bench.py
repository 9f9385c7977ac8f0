"""Builds workloads, keeps them and times them, in the worker process."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from advisor.cache.config import Config
from advisor.cache.shown import size
from advisor.errors import TargetError, TargetFailed
from advisor.tuners import host, target
from advisor.tuners.act import artifacts
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.act.applied import AppliedConfig
from advisor.tuners.act.compiled import CompiledCode, free, graphs_compiled, raise_recompile_limit
from advisor.tuners.act.pilot.loop_observer import RngState
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.decisions import POINTS
from advisor.tuners.environment import allocated, free_bytes, limit_memory, synchronize
from advisor.tuners.faults import failure
from advisor.tuners.knobs import INPUT, KNOBS, TORCH
from advisor.tuners.measure.compare import References, plain_of
from advisor.tuners.measure.loading import Described, LoaderFeed, costs, described
from advisor.tuners.measure.runner import Block, Compared, ConfigFailed
from advisor.tuners.measure.worker.wire import DataFacts, SampleCosts, WorkerJob
from advisor.tuners.measure.workload import RepeatableWorkload, Workload
from advisor.tuners.offloading import elapsed_s, moment

T = TypeVar("T")
INPUTS = tuple(knob.name for knob in KNOBS if knob.stage == INPUT)
LEFTOVER = 256 * 2**20  # bytes that a failed config may leave: workspaces take some tens of MiB


@dataclass(slots=True)
class _Built:
    """A workload with its compiled code."""

    workload: Workload
    code: set[str | int] = field(default_factory=set)  # ids, as of `CompiledCode.claim`
    own_bytes: int = 0  # of memory that it holds
    peak_bytes: int = 0  # of memory that it has held at most


class Bench:
    """Measures configs of one job."""

    def __init__(self, job: WorkerJob) -> None:
        self.job, self._task = job, job.task
        self.device = torch.device(job.device)
        self._cuda = self.device.type == "cuda"
        self._built: dict[Config, _Built] = {}
        self._peak_bytes = 0
        self._at_work: Config | None = None
        self._fed: tuple[Workload, LoaderFeed] | None = None
        self._references: dict[Config, References] = {}
        self._code = CompiledCode()
        self.healthy = True  # whether this process may measure further configs
        if self._cuda:
            torch.cuda.set_device(self.device)
            limit_memory(self.device, self._task.max_memory)
        self.loaded = target.load(target.parse(self._task.target), self._task.model_args)
        self.code = ""
        with contextlib.suppress(TargetError):  # the file is very large
            # Read now: later edits are not measured.
            self.code = self.loaded.spec.code
        self._subject = RepeatableWorkload(self.new_model, self._workload)

    @functools.cached_property
    def loading(self) -> Described:
        """The user's own data; raises as `described`."""
        return described(self._task, made_batches=self.loaded.make_batch is not None)

    def describe_data(self) -> DataFacts:
        return self.loading.facts

    def block(self, config: Config, steps: int, warm: int) -> Block:
        """As Runner; raises ConfigFailed."""
        foreign = self._foreign_bytes()
        try:
            return self._with_room(config, lambda: self._block(config, steps, warm))
        except ConfigFailed:
            self._leave()
            self.forget(config)
            self.healthy = self._works(foreign)
            raise

    def costs(self, seconds: float) -> SampleCosts:
        """A loader worker's time for a sample; raises TargetFailed."""
        try:
            return costs(self.loading.data, self._task.batch, seconds)
        except Exception as exc:  # the user's code may raise anything; shown as one line
            raise TargetFailed(f"data {self.loading.facts.name!r}: {failure(exc)[1]}") from exc

    def compare(self, config: Config, fp32: Config, seconds: float) -> Compared:
        """Compare the timed code with strict fp32, within `seconds`; raises ConfigFailed."""
        over = time.monotonic() + seconds
        self._leave()
        code = config.without(*INPUTS)

        def compared() -> Compared:
            if fp32 not in self._references:
                workload, rng = self._workload(fp32), RngState()
                workload.step()
                self._subject.draws = rng.has_advanced()
                made = References(self._subject, fp32, tolerance=self._task.tolerance)
                self._references = {fp32: made}
            found = self._references[fp32].compare(code, left_s=lambda: over - time.monotonic())
            if found.outcome == "out_of_memory":
                raise ConfigFailed(found.outcome, found.reason)
            return found

        try:
            return self._with_room(code, compared)
        finally:
            try:
                there = self._built.keys() & {code, plain_of(code, fp32), fp32}
                self._subject.restore(self._built[one].workload for one in there)
            except Exception:  # a lost device may raise anything
                self.healthy = False

    def forget(self, config: Config) -> None:
        """Free a config's workload; if a loader feeds the config, only end the loader."""
        if self._at_work == config:
            self._leave()
        built = None if self._loads(config) else self._built.pop(config.without(*INPUTS), None)
        if built is not None:
            code = built.code
            del built
            free(code)

    def save(self, config: Config, file: str) -> bool:
        self._with_room(config, lambda: self._workload(config.without(*INPUTS)))
        artifacts.save(Path(file))
        return True

    def _with_room(self, config: Config, act: Callable[[], T]) -> T:
        """Call `act` for a config; if memory runs out, free all workloads and call it again."""
        try:
            return act()
        except ConfigFailed as exc:
            failed = exc.with_traceback(None)
        except Exception as exc:  # a config may fail in any way; its frames hold memory
            failed = ConfigFailed(*failure(exc))
        if failed.outcome != "out_of_memory" or not self._built.keys() - {config.without(*INPUTS)}:
            raise failed
        self.release()
        return self._with_room(config, act)

    def _block(self, config: Config, steps: int, warm: int) -> Block:
        began, switched = time.perf_counter(), config != self._at_work
        if switched:
            self._leave()
        built = self._build(config.without(*INPUTS))
        if switched:
            self._switch(config, built.workload)
        workload, feeding = self._fed or (built.workload, None)
        if feeding is not None:
            steps = -(-steps // feeding.together) * feeding.together
            warm = max(warm, feeding.settling) if switched else warm
        held = allocated(self.device) - built.own_bytes
        for _ in range(warm):
            workload.step()
        synchronize(self.device)
        first_s = time.perf_counter() - began if switched else 0.0
        retries, graphs = self._retries(), graphs_compiled()
        waited_s = feeding.waited_s if feeding else 0.0
        start, mark = time.perf_counter(), moment(self.device)
        for _ in range(steps):
            workload.step()
        end = moment(self.device)
        synchronize(self.device)
        seconds = time.perf_counter() - start
        if self._retries() > retries:
            said = "the allocator kept retrying under memory pressure"
            raise ConfigFailed("out_of_memory", said)
        if workload.loss is not None and not math.isfinite(loss := float(workload.loss)):
            raise ConfigFailed("wrong", f"the loss is {loss}")
        self._hold(built, held)
        self._at_work = config
        samples = sum(shape[0] for shape in self._task.mix) or config.batch or self._task.batch
        return Block(
            steps=steps,
            samples=samples * steps,
            seconds=seconds,
            first_s=first_s,
            waited_s=feeding.waited_s - waited_s if feeding else 0.0,
            gpu_s=elapsed_s(mark, end) if self._cuda else 0.0,
            peak_bytes=built.peak_bytes,
            compiled=graphs_compiled() - graphs,
        )

    def _hold(self, built: _Built, held: int) -> None:
        """Record the code that a config has compiled, and its memory in addition to `held`."""
        peak, most = self.peak_bytes(held), self._task.max_memory
        if not self._cuda and most and peak > most:
            said = f"it held {size(peak)} of the {size(most)} permitted"
            raise ConfigFailed("out_of_memory", said)
        built.code |= self._code.claim()
        if self._fed is None:  # a loader's batches are freed with the loader
            built.own_bytes = allocated(self.device) - held
        built.peak_bytes = max(built.peak_bytes, peak)
        self._peak_bytes = max(self._peak_bytes, peak)

    def _switch(self, config: Config, workload: Workload) -> None:
        """Set a config's flags, and start its loader."""
        self.reset_peak()
        PROCESS_FLAGS.release()
        if self._loads(config):
            advice = self._advice(config)
            feeding = LoaderFeed(self.loading.data.loader(**advice.loader))
            workload = workload.fed(advice, feeding)
            self._fed = workload, feeding
        else:
            workload.rewind()
        workload.advice.set_flags()

    def _leave(self) -> None:
        """End the present config's loader, whose workers would slow the next config."""
        self._at_work = None
        fed, self._fed = self._fed, None
        if fed is not None:
            fed[1].close()

    def _workload(self, config: Config) -> Workload:
        workload = self._build(config).workload
        PROCESS_FLAGS.release()
        workload.advice.set_flags()
        return workload

    def _build(self, config: Config) -> _Built:
        if config in self._built:
            return self._built[config]
        if self._free_bytes() < self._peak_bytes:
            self.release()
        if AppliedConfig(config, TORCH, self.device).compiles:
            raise_recompile_limit()
            artifacts.use_stable_keys()
        before = allocated(self.device)
        self.reset_peak()
        workload = self.workload(config)
        workload.start()
        synchronize(self.device)
        built = _Built(workload)
        self._hold(built, before)
        self._built[config] = built
        return built

    def workload(self, config: Config, built: nn.Module | None = None) -> Workload:
        PROCESS_FLAGS.release()
        batch = config.batch or self._task.batch
        own = batch == self._task.batch
        given = self.loading.batches if self._task.data and own and built is None else ()
        loaded = self.loaded if built is None else replace(self.loaded, factory=lambda: built)
        # Configs of other batch sizes are not compared, so one batch is enough.
        return Workload(
            loaded,
            self._task,
            self._advice(config),
            batch=batch,
            seed=self.job.seed,
            count=POINTS if own else 1,
            given=given,
        )

    def _advice(self, config: Config) -> Advice:
        batch = config.batch or self._task.batch
        # As in a script: values that are torch's default are not set.
        served = Served(default=TORCH.at(batch))
        return Advice(config, device=self.job.device, batch_size=batch, served=served)

    def new_model(self) -> nn.Module:
        torch.manual_seed(self.job.seed)
        return target.build(self.loaded)

    def release(self) -> None:
        self._leave()
        for config in list(self._built):
            self.forget(config)
        gc.collect()
        torch.cuda.empty_cache()

    def _free_bytes(self) -> int:
        most = self._task.max_memory or sys.maxsize
        if self._cuda:
            return min(free_bytes(self.device), most - allocated(self.device))
        return min(host.free_bytes(), most - host.resident_bytes(os.getpid()))

    def _works(self, foreign: int) -> bool:
        """Whether the device still works, and a config that failed has left no memory behind."""
        if not self._cuda:
            return True
        gc.collect()
        try:
            synchronize(self.device)
            torch.rand(1, device=self.device).item()  # a failed capture may break the generator
        except RuntimeError:
            return False
        return self._foreign_bytes() <= foreign + LEFTOVER

    def _foreign_bytes(self) -> int:
        return allocated(self.device) - sum(one.own_bytes for one in self._built.values())

    def _loads(self, config: Config) -> bool:
        return bool(self._task.data and config.only(*INPUTS))

    def _retries(self) -> int:
        stats = torch.cuda.memory_stats(self.device) if self._cuda else {}
        return int(stats.get("num_alloc_retries", 0))

    def reset_peak(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            host.reset_peak()

    def peak_bytes(self, held: int = 0) -> int:
        if self._cuda:
            return int(torch.cuda.max_memory_allocated(self.device)) - held
        return host.peak_bytes()
