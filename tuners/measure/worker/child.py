"""The worker process: `python -P -m advisor.tuners.measure.worker.child FD LIFELINE`."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import sys
import threading
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.cache.codec import to_plain
from advisor.cache.config import Config
from advisor.cache.key import Sample
from advisor.cache.record import Measurement
from advisor.errors import AdvisorError, TargetError, TargetFailed
from advisor.tuners import fingerprint, target
from advisor.tuners.act.advice import Advice
from advisor.tuners.knobs import INPUT, KNOBS
from advisor.tuners.measure import numerics as verify
from advisor.tuners.measure.timing import (
    Clock,
    CpuClock,
    CudaClock,
    first_steps,
    time_steps,
    warm_up,
)
from advisor.tuners.measure.worker.wire import Facts, Job, receive, send
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


class Bench:
    """Builds and measures workloads for one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._device = torch.device(job.device)
        self._cuda = self._device.type == "cuda"
        self._threads = torch.get_num_threads()
        self._clock: Clock = CudaClock(self._device) if self._cuda else CpuClock()
        self._kept: dict[tuple[Config, str], tuple[Workload, float, float]] = {}
        self._floor = 0
        self.healthy = True
        if self._cuda:
            torch.cuda.set_device(self._device)
            if job.max_memory:
                total = torch.cuda.get_device_properties(self._device).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, job.max_memory / total))
        arguments = Config(job.arguments)
        self._loaded = target.load(target.parse(job.target), arguments)

    def describe(self) -> Facts:
        """Run one step as torch does by default.

        Raises:
            TargetError: the model rejects the sample.
            TargetFailed: the user's code raised.
        """
        config = Config(precision="default", cudnn_deterministic=self._job.deterministic)
        self._reset_peak()
        workload = self._build(config.replace(batch_size=self._job.batch), "compute")
        sees = _SeesConvolution()
        with sees:
            workload.step()
        start = self._clock.now()
        workload.step()
        self._clock.synchronize()
        step_s = self._clock.now() - start
        modules, parameters = fingerprint.size(workload.model)
        properties = torch.cuda.get_device_properties(self._device) if self._cuda else None
        # The model's own fingerprint is taken before any knob touched it, as in a script.
        built = target.build(self._loaded)
        facts = Facts(
            name=self._loaded.spec.name,
            model=fingerprint.of_model(built),
            family=fingerprint.family(built),
            modules=modules,
            parameters=parameters,
            convolves=sees.seen,
            threads=self._threads,
            device_uuid=str(getattr(properties, "uuid", "")) if properties else "",
            memory_bytes=int(properties.total_memory) if properties else 0,
            peak_bytes=self._peak(0),
            step_s=step_s,
        )
        del workload, built
        self.release()
        self._floor = int(torch.cuda.memory_allocated(self._device)) if self._cuda else 0
        return facts

    def verify(self, config: Config, against: Config, steps: int, tolerance: float) -> Measurement:
        """Hold a config against strict fp32; outcome 'ok' or 'wrong', and how near it is."""

        def build(which: str, **disturbed: Any) -> Workload:
            self.release()
            how = {"batches": verify.BATCHES, "watch": True, **disturbed}
            return self._build(config if which == "candidate" else against, "compute", **how)

        try:
            good, reason = verify.check(build, steps, tolerance)
            result = Measurement(outcome="ok" if good else "wrong", reason=reason, steps=steps)
        except Exception as exc:  # a config may fail in any way; the outcome names it
            result = _failure(exc)
        self.release()
        self.healthy = self._came_back()
        return result

    def start(self, config: Config) -> Measurement:
        """What a config pays before its steps settle, in a process that has run none before."""
        try:
            first, settled = first_steps(self._build(config, "compute").step, self._clock)
        except Exception as exc:  # a config may fail in any way; the outcome names it
            return _failure(exc)
        return Measurement(outcome="ok", first_step_s=first, step_s=settled)

    def _beside(self, config: Config, stage: str) -> Workload | None:
        """What is kept already of a config that differs in its input pipeline alone."""
        batch = config["batch_size"]
        assert isinstance(batch, int)
        for (other, at), (workload, _first, _expected) in self._kept.items():
            if stage == at == INPUT and other.without(*INPUTS) == config.without(*INPUTS):
                advice = Advice(config, device=self._job.device, batch_size=batch)
                return workload.fed_by(advice, batch)
        return None

    def _build(self, config: Config, stage: str, **watched: Any) -> Workload:
        batch = config["batch_size"]
        assert isinstance(batch, int)
        advice = Advice(config, device=self._job.device, batch_size=batch)
        workload = Workload(
            self._loaded,
            advice,
            sample=Sample(shape=self._job.shape, dtype=self._job.dtype),
            vocab=self._job.vocab,
            batch=batch,
            mode=self._job.mode,
            optimizer=self._job.optimizer,
            from_loader=stage == INPUT,
            seed=self._job.seed,
            mix=self._job.mix,
            **watched,
        )
        return workload

    def first_step(self) -> None:
        """One forward and backward at the user's batch, naming the layer that rejects it."""
        job = self._job
        advice = Advice(
            Config(precision="default", cudnn_deterministic=job.deterministic), device=job.device
        )
        torch.manual_seed(job.seed)
        # The layers are known by the model that is run, so it is built before they are watched.
        built = target.build(self._loaded)
        loaded = dataclasses.replace(self._loaded, factory=lambda: built)
        with Layers(built) as layers:
            try:
                Workload(
                    loaded,
                    advice,
                    sample=Sample(shape=job.shape, dtype=job.dtype),
                    vocab=job.vocab,
                    batch=job.batch,
                    mode=job.mode,
                    optimizer=job.optimizer,
                    from_loader=False,
                    seed=job.seed,
                    mix=job.mix,
                ).step()
                self._clock.synchronize()
            except AdvisorError:
                raise
            except Exception as exc:  # the user's code may raise anything; it is reported whole
                where = layers.innermost()
                if is_out_of_memory(exc):
                    raise TargetFailed(
                        f"batch {job.batch} does not fit on {job.device} with torch's default "
                        "settings: out of memory; give a smaller batch"
                    ) from exc
                raw = target.failed(self._loaded.spec, "", exc)
                said = str(exc).strip().splitlines()
                message = said[0] if said else type(exc).__name__
                shapes = job.mix or ((job.batch, *job.shape),)
                shape = " --shape ".join("x".join(map(str, one)) for one in shapes)
                raise TargetError(
                    f"target {self._loaded.spec.name!r} rejects --shape {shape} {job.dtype}"
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
            result = self._measure(config, seconds, stage, keep, floor)
        except Exception as exc:  # a config may fail in any way; the outcome names it
            result = _failure(exc)
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
        kept = self._kept.get((config, stage))
        if kept is None:
            workload = self._beside(config, stage) or self._build(config, stage)
            first, expected = warm_up(workload.step, self._clock, workload.start)
        else:
            # Built and warm: one step brings its memory back into the caches.
            workload, first, expected = kept
            workload.advice.set_flags()
            workload.step()
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
        loss = workload.loss
        if loss is not None and not math.isfinite(float(loss)):
            return Measurement(outcome="wrong", reason=f"the loss is {float(loss)}")
        if self._retries() > retries:
            return Measurement(
                outcome="out_of_memory", reason="the allocator kept retrying under memory pressure"
            )
        samples = self._samples(config, stage)
        return Measurement(
            outcome="ok",
            samples_per_s=samples / timing.step_s,
            low=samples / timing.high_s,
            high=samples / timing.low_s,
            step_s=timing.step_s,
            gpu_s=timing.gpu_s,
            first_step_s=timing.first_step_s,
            peak_bytes=self._peak(held),
            steps=timing.steps,
            blocks=timing.blocks,
        )

    def _samples(self, config: Config, stage: str) -> int:
        """Of one step; of a whole pass through a mix of shapes, but for the input pipeline."""
        if self._job.mix and stage != INPUT:
            return sum(shape[0] for shape in self._job.mix)
        batch = config["batch_size"]
        assert isinstance(batch, int)
        return batch

    def release(self) -> None:
        """Drop all workloads, what was compiled for them, and give their memory back."""
        self._kept.clear()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()

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
        _reset_resident_peak()
        return 0

    def _peak(self, held: int) -> int:
        if self._cuda:
            return int(torch.cuda.max_memory_allocated(self._device)) - held
        return _resident_peak()


def _reset_resident_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # not Linux: the peak is not known there


def _resident_peak() -> int:
    """Peak resident bytes of this process (Linux: VmHWM, proc(5)), 0 where not known."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM:")), 0)


def _failure(exc: Exception) -> Measurement:
    said = str(exc).strip().splitlines()
    reason = f"{type(exc).__name__}: {said[0] if said else ''}"[:300]
    return Measurement(
        outcome="out_of_memory" if is_out_of_memory(exc) else "failed", reason=reason
    )


def _job(plain: dict[str, Any]) -> Job:
    mix = tuple(tuple(shape) for shape in plain["mix"])
    return Job(**plain | {"shape": tuple(plain["shape"]), "mix": mix})


def _stay_alive_with(lifeline: int) -> None:
    """End this process when the tuning process is gone, whatever the user's code is doing."""

    def wait() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    pipe = Connection(int(sys.argv[1]))
    _stay_alive_with(int(sys.argv[2]))
    warnings.simplefilter("ignore")  # the user's own run shows them; a trial would repeat them
    bench: Bench | None = None
    send(pipe, {"ready": True})
    while True:
        try:
            request = receive(pipe)
        except EOFError:
            return 0
        try:
            if "job" in request:
                bench = Bench(_job(request["job"]))
                if request.get("start"):
                    measured = bench.start(Config(request["start"]))
                    reply: dict[str, Any] = {"measurement": to_plain(measured)}
                else:
                    bench.first_step()
                    bench.release()
                    reply = {"facts": dataclasses.asdict(bench.describe())}
            else:
                assert bench is not None
                if request.get("release"):
                    bench.release()
                    continue
                config = Config(request["config"])
                if "steps" in request:
                    measured = bench.verify(
                        config, Config(request["against"]), request["steps"], request["tolerance"]
                    )
                else:
                    measured = bench.measure(
                        config,
                        request["seconds"],
                        request["stage"],
                        request["keep"],
                        request["floor"],
                    )
                reply = {"measurement": to_plain(measured), "healthy": bench.healthy}
        except (TargetError, TargetFailed) as exc:
            reply = {"error": type(exc).__name__, "message": str(exc), "details": exc.details}
        send(pipe, reply)


assert len({knob.name for knob in KNOBS}) == len(KNOBS)

if __name__ == "__main__":
    sys.exit(main())
