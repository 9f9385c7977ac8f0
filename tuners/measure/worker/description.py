"""Finds out what a workload is by running its first steps."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.errors import AdvisorError, TargetError, TargetFailed
from advisor.tuners import fingerprint, fp8, target
from advisor.tuners.blocks import repeated
from advisor.tuners.measure.timing import clock_of
from advisor.tuners.measure.worker.bench import Bench, draws, is_out_of_memory
from advisor.tuners.measure.worker.wire import CHANGED, Facts, Job
from advisor.tuners.measure.workload import Layers, Workload


def recognise(job: Job, loaded: target.Loaded) -> None:
    """Check, before anything is run, that this is the target that the job knows, if it knows one.

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


def describe(bench: Bench) -> Facts:
    """Run two steps as torch does by default.

    Raises:
        TargetError: the model rejects the sample.
        TargetFailed: the user's code raised, or memory does not do.
    """
    loaded, device = bench.loaded, bench.device
    torch.manual_seed(bench.job.seed)
    built = target.build(loaded)
    modules, parameters = fingerprint.size(built)
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    # Before any knob touches the model, as in a script.
    known: dict[str, Any] = {
        "model": fingerprint.of_model(built),
        "libraries": fingerprint.libraries(built),
        "family": fingerprint.family(built),
        "repeats": bool(repeated(built)),
        "threads": torch.get_num_threads(),
        "wide": sum(map(fp8.gains, built.modules())),
    }
    bench.reset_peak()
    with _SeesConvolution() as sees:
        workload = _first_step(bench, built)
    began = time.perf_counter()
    bench.drew = draws(workload.step, device)
    clock_of(device).synchronize()
    return Facts(
        name=loaded.spec.name,
        hooks=fingerprint.of_hooks(loaded.make_batch, loaded.loss),
        code=bench.code,
        modules=modules,
        parameters=parameters,
        convolves=sees.seen,
        draws=bench.drew,
        device_uuid=str(getattr(properties, "uuid", "")) if properties else "",
        memory_bytes=int(properties.total_memory) if properties else 0,
        peak_bytes=bench.peak_bytes(),
        step_s=time.perf_counter() - began,
        **known,
    )


def _first_step(bench: Bench, built: nn.Module) -> Workload:
    """Take a step at the user's batch; errors name the layer that raised them."""
    task, spec = bench.job.task, bench.loaded.spec
    # The layers are known by the model that is run, so it is built before they are watched.
    bench.loaded, loaded = dataclasses.replace(bench.loaded, factory=lambda: built), bench.loaded
    with Layers(built) as layers:
        try:
            workload = bench.workload(bench.default, made_up=True)
            workload.step()
            clock_of(bench.device).synchronize()
            return workload
        except AdvisorError:
            raise
        except Exception as exc:  # the user's code may raise anything; it is reported whole
            if is_out_of_memory(exc):
                raise TargetFailed(
                    f"batch {task.batch} does not fit on {bench.job.device} with torch's default "
                    "settings: out of memory; give a smaller batch"
                ) from exc
            at = f" at {where}" if (where := layers.innermost()) else ""
            message = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
            shape = " --shape ".join("x".join(map(str, one)) for one in task.shapes)
            raise TargetError(
                f"target {spec.name!r} rejects --shape {shape} {task.dtype}{at}: {message}",
                target.failed(spec, "", exc).details,
            ) from exc
        finally:
            bench.loaded = loaded


class _SeesConvolution(TorchDispatchMode):
    """While active, notices convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or "convolution" in str(func)
        return func(*args, **(kwargs or {}))
