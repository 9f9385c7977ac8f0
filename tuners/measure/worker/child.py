"""What the worker process does: it builds, measures, and answers over its pipe."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import gc
import math
import os
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config
from advisor.cache.record import Measurement
from advisor.cache.shown import size
from advisor.errors import AdvisorError, TargetError, TargetFailed
from advisor.tuners import fingerprint, fp8, host, target
from advisor.tuners.act import artifacts
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.served import Served
from advisor.tuners.blocks import repeated
from advisor.tuners.faults import told
from advisor.tuners.knobs import COMPUTE, FORMATS, INPUT, KNOBS, LOADER, TORCH, compiles, plain
from advisor.tuners.measure import numerics
from advisor.tuners.measure.loading.loadable import Loadable
from advisor.tuners.measure.made_up import Feed
from advisor.tuners.measure.observe import BATCHES, Observer
from advisor.tuners.measure.randomness import draws
from advisor.tuners.measure.timing import (
    Clock,
    CpuClock,
    CudaClock,
    busy_share,
    first_steps,
    time_steps,
    warm_up,
)
from advisor.tuners.measure.worker import handed
from advisor.tuners.measure.worker.wire import (
    CHANGED,
    Costs,
    DataFacts,
    Facts,
    Job,
    receive,
    send,
)
from advisor.tuners.measure.workload import Layers, Workload

# PyTorch gives out-of-memory a type; cuDNN, cuBLAS, the driver and the CPU say it in words.
OUT_OF_MEMORY = (
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "std::bad_alloc",
)


INPUTS = tuple(knob.name for knob in KNOBS if knob.stage == INPUT)

NOTHING = Config()

LEFTOVER = 256 * 2**20
"""Bytes that may stay allocated after a trial."""


def is_out_of_memory(exc: BaseException) -> bool:
    if isinstance(exc, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and any(
        words.lower() in str(exc).lower() for words in OUT_OF_MEMORY
    )


class _SeesConvolution(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or "convolution" in str(func)
        return func(*args, **(kwargs or {}))


def recognise(job: Job, loaded: target.Loaded) -> None:
    """Before anything is run: whether this is the target that the job knows, if it knows one.

    Raises:
        TargetError: its model or its hooks are others.
    """
    if not job.known:
        return
    model = fingerprint.of_model(target.build(loaded))
    hooks = fingerprint.of_hooks(loaded.make_batch, loaded.loss)
    for what, now, then in zip(
        ("model", "make_batch or loss"), (model, hooks), job.known, strict=True
    ):
        if now != then:
            raise TargetError(f"the {what} of {loaded.spec.name} {CHANGED}")


def code_of(spec: target.Spec) -> str:
    """Digest of the target's source; '' where it cannot be read so, as a very large file."""
    try:
        return spec.code
    except TargetError:
        return ""


class Bench:
    """Builds and measures workloads for one job."""

    def __init__(self, job: Job) -> None:
        self._job, self._task = job, job.task
        self._device = torch.device(job.device)
        self._cuda = self._device.type == "cuda"
        self._threads = torch.get_num_threads()
        self._clock: Clock = CudaClock(self._device) if self._cuda else CpuClock()
        self._kept: dict[tuple[Config, str], tuple[Workload, float, float]] = {}
        self._floor = 0
        self._references = numerics.References(draws=True)
        self._default = plain(self._task, job.device) | job.under
        self.healthy = True
        if self._cuda:
            torch.cuda.set_device(self._device)
            if self._task.max_memory:
                total = torch.cuda.get_device_properties(self._device).total_memory
                share = min(1.0, self._task.max_memory / total)
                torch.cuda.set_per_process_memory_fraction(share)
        self._loaded = target.load(target.parse(self._task.target), self._task.model_args)
        # Read when it was imported: what is edited later is not what is measured.
        self._code = code_of(self._loaded.spec)

    def describe(self) -> Facts:
        """Run one step as torch does by default.

        Raises:
            TargetError: the model rejects the sample.
            TargetFailed: the user's code raised.
        """
        self._reset_peak()
        workload = self._build(self._default, "compute")
        sees = _SeesConvolution()
        with sees:
            workload.step()
        start = self._clock.now()
        drew = draws(workload.step, self._device)
        self._references = numerics.References(draws=drew)
        self._clock.synchronize()
        step_s = self._clock.now() - start
        modules, parameters = fingerprint.size(workload.model)
        properties = torch.cuda.get_device_properties(self._device) if self._cuda else None
        # The model's own fingerprint is taken before any knob touched it, as in a script.
        built = target.build(self._loaded)
        facts = Facts(
            name=self._loaded.spec.name,
            model=fingerprint.of_model(built),
            hooks=fingerprint.of_hooks(self._loaded.make_batch, self._loaded.loss),
            code=self._code,
            libraries=fingerprint.libraries(built),
            family=fingerprint.family(built),
            modules=modules,
            parameters=parameters,
            convolves=sees.seen,
            repeats=bool(repeated(built)),
            draws=drew,
            threads=self._threads,
            device_uuid=str(getattr(properties, "uuid", "")) if properties else "",
            memory_bytes=int(properties.total_memory) if properties else 0,
            peak_bytes=self._peak(0),
            step_s=step_s,
            wide=sum(map(fp8.gains, built.modules())),
        )
        del workload, built
        self.release()
        self._floor = int(torch.cuda.memory_allocated(self._device)) if self._cuda else 0
        return facts

    def costs(self, seconds: float) -> Costs:
        """What a sample costs a loader's worker.

        Raises:
            TargetFailed: the user's code raised.
        """
        try:
            return self._data.costs(seconds)
        except Exception as exc:  # the user's code may raise anything; it is told as a line
            raise TargetFailed(f"data {self._data.facts.name!r}: {told(exc)}") from exc

    def verify(self, config: Config, against: Config, steps: int, tolerance: float) -> Measurement:
        """Hold a config against strict fp32; outcome 'ok' or 'wrong', and how near it is."""

        # What a difference beyond rounding is not due to.
        same = config.only(*FORMATS)
        configs = numerics.Configs(fp32=against, candidate=config, plain=against.replace(**same))

        def build(one: Config) -> Workload:
            self.release()
            return self._watched(one)

        try:
            good, reason = numerics.check(build, configs, steps, self._references, tolerance)
            result = Measurement(outcome="ok" if good else "wrong", reason=reason, steps=steps)
        except Exception as exc:  # a config may fail in any way; the outcome names it
            result = _failure(exc)
        self.release()
        self.healthy = self._came_back()
        return result

    def start(self, config: Config, loads: str = "", saves: str = "") -> Measurement:
        """What a config pays before its steps settle, in a process that has run none before.

        Args:
            loads, saves: files of artifacts; loading them is part of the first step.
        """
        try:
            # As a script has it: what is torch's default already is left alone, and not set.
            workload = self._build(config, "compute", default=Config(TORCH | self._default))

            def start() -> None:
                if loads and (found := artifacts.saved(Path(loads))):
                    artifacts.load(found[1])
                workload.start()

            first, settled = first_steps(workload.step, self._clock, start)
            if saves:
                artifacts.save(Path(saves))
        except Exception as exc:  # a config may fail in any way; the outcome names it
            return _failure(exc)
        return Measurement(outcome="ok", first_step_s=first, step_s=settled)

    def build(self, config: Config, *, compared: bool) -> Measurement:
        """As `start`, after a step as torch does by default: what every process loads at its first
        is no part of it, as it is none of a trial's. `compared`: as it is compared with fp32."""
        try:
            self._build(self._default, "compute").step()
            self._clock.synchronize()
            self.release()
            if compared:
                Observer(self._watched(config)).points()
                return Measurement(outcome="ok")
        except Exception as exc:  # beside others it may find no memory; the outcome names it
            return _failure(exc)
        return self.start(config)

    def _watched(self, config: Config) -> Workload:
        return self._build(config, "compute", count=BATCHES, watch=True)

    def _build(
        self,
        config: Config,
        stage: str,
        *,
        count: int = 1,
        watch: bool = False,
        default: Config = NOTHING,
    ) -> Workload:
        if compiles(config):
            artifacts.have_stable_keys()
        batch = config.batch
        served = Served(default=default)
        advice = Advice(config, device=self._job.device, batch_size=batch, served=served)
        given = self._data.batch if stage == INPUT else None
        feed = Feed(batch=batch, seed=self._job.seed, count=count, given=given)
        return Workload(self._loaded, self._task, advice, feed, watch=watch)

    @functools.cached_property
    def _data(self) -> Loadable:
        """The user's own data, once it is asked for."""
        return Loadable(self._task, made_batches=self._loaded.make_batch is not None)

    def describe_data(self) -> DataFacts:
        """What is known of the data by loading a batch of it.

        Raises:
            TargetError, TargetFailed: it gives none, or others than are tuned.
        """
        return self._data.facts

    def _advice(self, config: Config) -> Advice:
        return Advice(config, device=self._job.device, batch_size=config.batch)

    def first_step(self) -> None:
        """One forward and backward at the user's batch, naming the layer that rejects it."""
        job, task = self._job, self._task
        recognise(job, self._loaded)
        advice = Advice(self._default, device=job.device)
        torch.manual_seed(job.seed)
        # The layers are known by the model that is run, so it is built before they are watched.
        built = target.build(self._loaded)
        loaded = dataclasses.replace(self._loaded, factory=lambda: built)
        with Layers(built) as layers:
            try:
                Workload(loaded, task, advice, Feed(batch=task.batch, seed=job.seed)).step()
                self._clock.synchronize()
            except AdvisorError:
                raise
            except Exception as exc:  # the user's code may raise anything; it is reported whole
                where = layers.innermost()
                if is_out_of_memory(exc):
                    raise TargetFailed(
                        f"batch {task.batch} does not fit on {job.device} with torch's default "
                        "settings: out of memory; give a smaller batch"
                    ) from exc
                raw = target.failed(self._loaded.spec, "", exc)
                said = str(exc).strip().splitlines()
                message = said[0] if said else type(exc).__name__
                shape = " --shape ".join("x".join(map(str, one)) for one in task.shapes)
                raise TargetError(
                    f"target {self._loaded.spec.name!r} rejects --shape {shape} {task.dtype}"
                    + (f" at {where}" if where else "")
                    + f": {message}",
                    raw.details,
                ) from exc

    def measure(
        self, config: Config, seconds: float, stage: str, keep: bool, floor: float = 0.0
    ) -> Measurement:
        """Measure one config; whatever goes wrong is the measurement's outcome.

        Afterwards `healthy` says whether this process may measure another.
        """
        if not keep:
            self.release()
        try:
            if stage == LOADER:
                result = self._data.alone(self._advice(config), seconds)
            else:
                result = self._measure(config, seconds, stage, keep, floor)
        except Exception as exc:  # a config may fail in any way; the outcome names it
            result = _failure(exc) if stage == COMPUTE else _failure(exc, told(exc))
        if not result.ok and self._kept:
            # Beside others in memory it may have failed for their sake: once more, alone.
            self.release()
            return self.measure(config, seconds, stage, keep, floor)
        if not keep or not result.ok:
            self.release()
            self.healthy = self._came_back()
        return result

    def _measure(
        self, config: Config, seconds: float, stage: str, keep: bool, floor: float
    ) -> Measurement:
        held = self._reset_peak()
        loading, config = config.only(*INPUTS), config.without(*INPUTS)
        kept = self._kept.get((config, stage))
        if kept is None:
            workload = self._build(config, stage)
            first, expected = warm_up(workload.step, self._clock, workload.start)
        else:
            # Built and warm: one step brings its memory back into the caches.
            workload, first, expected = kept
            workload.advice.set_flags()
            workload.step()
        if loading:
            self._kept[config, stage] = (workload, first, expected)
            under = workload.under(self._advice(config | loading))
            return self._data.fed(under, under.advice, seconds, self._clock)
        retries = self._retries()
        timing = time_steps(
            workload.step,
            self._clock,
            seconds=seconds,
            first_s=first,
            expected_s=expected,
            least=1 if keep else 2,
            slowest_s=self._samples(config, stage) / floor if floor else math.inf,
        )
        if keep:
            self._kept[config, stage] = (workload, first, timing.step_s)
        asked = self._job.shares_host and not keep
        busy = busy_share(workload.step, self._clock, timing) if asked else 0.0
        loss = workload.loss
        if loss is not None and not math.isfinite(float(loss)):
            return Measurement(outcome="wrong", reason=f"the loss is {float(loss)}")
        if self._retries() > retries:
            return Measurement(
                outcome="out_of_memory", reason="the allocator kept retrying under memory pressure"
            )
        peak, most = self._peak(held), self._task.max_memory
        if not self._cuda and most and peak > most:
            return Measurement(
                outcome="out_of_memory",
                reason=f"it held {size(peak)} of the {size(most)} permitted",
                peak_bytes=peak,
            )
        samples = self._samples(config, stage)
        return Measurement(
            outcome="ok",
            samples_per_s=samples / timing.step_s,
            low=samples / timing.high_s,
            high=samples / timing.low_s,
            step_s=timing.step_s,
            gpu_s=timing.gpu_s,
            busy=busy,
            first_step_s=timing.first_step_s,
            peak_bytes=peak,
            steps=timing.steps,
            blocks=timing.blocks,
        )

    def _samples(self, config: Config, stage: str) -> int:
        """Of one step; of a whole pass through a mix of shapes, but for the input pipeline."""
        if self._task.mix and stage != INPUT:
            return sum(shape[0] for shape in self._task.mix)
        return config.batch

    def release(self) -> None:
        """Drop all workloads, what was compiled for them, and give their memory back."""
        self._kept.clear()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Of the device's memory, whoever holds the rest."""
        return int(torch.cuda.mem_get_info(self._device)[0]) if self._cuda else host.free_bytes()

    def _came_back(self) -> bool:
        """Whether the device still works and the trial's memory is free again."""
        if not self._cuda:
            return True
        try:
            torch.cuda.synchronize(self._device)
            torch.rand(1, device=self._device).item()  # also what a failed capture may break
        except RuntimeError:
            return False
        # Libraries keep workspaces of some tens of MiB: those are not a trial's.
        return torch.cuda.memory_allocated(self._device) <= self._floor + LEFTOVER

    def _retries(self) -> int:
        if not self._cuda:
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def _reset_peak(self) -> int:
        """Start a new peak; bytes in use now, which are not this trial's."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
            return int(torch.cuda.memory_allocated(self._device))
        host.reset_peak()
        return 0

    def _peak(self, held: int) -> int:
        if self._cuda:
            return int(torch.cuda.max_memory_allocated(self._device)) - held
        return host.peak_bytes()


def build_handed(folder: Path, config: Config) -> Measurement:
    """As `Bench.build`, of the calls that a run has handed over."""
    try:
        first_step_s = handed.first_step(handed.load(folder), config)
    except Exception as exc:  # the user's code may raise anything, and a config; the outcome says
        return _failure(exc)
    return Measurement(outcome="ok", first_step_s=first_step_s, steps=1)


def _failure(exc: Exception, reason: str = "") -> Measurement:
    said = str(exc).strip().splitlines()
    first = said[0] if said else ""
    # Some say only at the end of their own traceback what it was.
    last = f" ... {said[-1].strip()}" if len(said) > 1 and first.endswith(":") else ""
    reason = reason or f"{type(exc).__name__}: {first}{last}"[:300]
    return Measurement(
        outcome="out_of_memory" if is_out_of_memory(exc) else "failed", reason=reason
    )


class Answers:
    """What a worker does for each message, by its `do`; a reply for all but 'release'."""

    def __init__(self) -> None:
        self._bench: Bench | None = None

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Raises: TargetError, TargetFailed: as `Bench`."""
        what = message.pop("do")
        if what == "load":
            self._bench = Bench(from_plain(Job, message["job"]))
            return {}
        if what == "build":
            gc.enable()  # as a script has it
            job, config = from_plain(Job, message["job"]), Config(message["config"])
            if job.handed:
                built = build_handed(Path(job.handed), config)
            else:
                built = Bench(job).build(config, compared=message["compared"])
            return {"measurement": to_plain(built)}
        assert self._bench is not None
        answer: Callable[..., dict[str, Any] | None] = getattr(self, f"_{what}")
        return answer(self._bench, **message)

    def _describe(self, bench: Bench) -> dict[str, Any]:
        bench.first_step()
        bench.release()
        # What is left is torch's modules above all: going through them would take each trial 0.4 s.
        gc.freeze()
        gc.enable()
        return {"facts": to_plain(bench.describe())}

    def _describe_data(self, bench: Bench) -> dict[str, Any]:
        return {"facts": to_plain(bench.describe_data())}

    def _costs(self, bench: Bench, *, seconds: float) -> dict[str, Any]:
        return {"costs": to_plain(bench.costs(seconds))}

    def _start(self, bench: Bench, *, config: dict[str, Any], **files: str) -> dict[str, Any]:
        gc.enable()  # as a script has it
        return {"measurement": to_plain(bench.start(Config(config), **files))}

    def _save(self, _bench: Bench, *, file: str) -> dict[str, Any]:
        artifacts.save(Path(file))
        return {}

    def _free(self, bench: Bench) -> dict[str, Any]:
        return {"bytes": bench.free_bytes()}

    def _measure(self, bench: Bench, *, config: dict[str, Any], **how: Any) -> dict[str, Any]:
        measured = bench.measure(Config(config), **how)
        return {"measurement": to_plain(measured), "healthy": bench.healthy}

    def _verify(
        self, bench: Bench, *, config: dict[str, Any], against: dict[str, Any], **how: Any
    ) -> dict[str, Any]:
        measured = bench.verify(Config(config), Config(against), **how)
        return {"measurement": to_plain(measured), "healthy": bench.healthy}

    def _release(self, bench: Bench) -> None:
        bench.release()


def main() -> int:
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)
    warnings.simplefilter("ignore")  # the user's own run shows them; a trial would repeat them
    atexit.register(gc.unfreeze)  # nanobind tells of all that is still there at the end
    # Pickle would name it where it writes what is compiled, and no script has such a module.
    sys.modules.pop("__mp_main__", None)
    answers = Answers()
    send(pipe, {"ready": True})
    while True:
        try:
            message = receive(pipe)
        except EOFError:
            return 0
        try:
            if message["do"] != "release":
                send(pipe, {"heard": True})
            reply = answers.answer(message)
        except (TargetError, TargetFailed) as exc:
            reply = {"error": type(exc).__name__, "message": str(exc), "details": exc.details}
        if reply is not None:
            send(pipe, reply)
