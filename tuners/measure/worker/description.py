"""What a worker finds out about a workload by running its first steps."""

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
from advisor.tuners.measure.timing import Clock
from advisor.tuners.measure.worker.bench import Bench, draws, is_out_of_memory
from advisor.tuners.measure.worker.wire import CHANGED, Facts, Job
from advisor.tuners.measure.workload import Workload, layer_that_raised


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


def describe(bench: Bench) -> Facts:
    """Run three steps as torch does by default.

    Raises:
        TargetError: the model rejects the sample.
        TargetFailed: the user's code raised.
    """
    loaded, device = bench.loaded, bench.device
    torch.manual_seed(bench.job.seed)
    built = target.build(loaded)
    modules, parameters = fingerprint.size(built)
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    # Before any knob touches the model, as in a script.
    known: dict[str, Any] = {
        "name": loaded.spec.name,
        "model": fingerprint.of_model(built),
        "hooks": fingerprint.of_hooks(loaded.make_batch, loaded.loss),
        "code": bench.code,
        "libraries": fingerprint.libraries(built),
        "family": fingerprint.family(built),
        "modules": modules,
        "parameters": parameters,
        "repeats": bool(repeated(built)),
        "threads": torch.get_num_threads(),
        "device_uuid": str(getattr(properties, "uuid", "")) if properties else "",
        "memory_bytes": int(properties.total_memory) if properties else 0,
        "wide": sum(map(fp8.gains, built.modules())),
    }
    bench.reset_peak()
    workload, convolves = first_step(bench, built)
    began = time.perf_counter()
    bench.drew = draws(workload.step, device)
    Clock(device).synchronize()
    return Facts(
        convolves=convolves,
        draws=bench.drew,
        peak_bytes=bench.peak_bytes(),
        step_s=time.perf_counter() - began,
        **known,
    )


def first_step(bench: Bench, built: nn.Module) -> tuple[Workload, bool]:
    """Take a step at the user's batch; whether it convolves.

    Raises:
        TargetError: the model rejects the sample; the layer that does is named.
        TargetFailed: memory does not do. AdvisorError: as a Workload.
    """
    task, spec = bench.job.task, bench.loaded.spec
    # The model that is run must be the one whose layers have names here.
    bench.loaded, loaded = dataclasses.replace(bench.loaded, factory=lambda: built), bench.loaded
    with _SeesConvolution() as sees:
        try:
            workload = bench.workload(bench.default, made_up=True)
            workload.step()
            Clock(bench.device).synchronize()
            return workload, sees.seen
        except AdvisorError:
            raise
        except Exception as exc:  # the user's code may raise anything; it is reported whole
            if is_out_of_memory(exc):
                raise TargetFailed(
                    f"batch {task.batch} does not fit on {bench.job.device} with torch's default "
                    "settings: out of memory; give a smaller batch"
                ) from exc
            where = layer_that_raised(built, exc)
            said = str(exc).strip().splitlines()
            message = said[0] if said else type(exc).__name__
            shape = " --shape ".join("x".join(map(str, one)) for one in task.shapes)
            raise TargetError(
                f"target {spec.name!r} rejects --shape {shape} {task.dtype}"
                + (f" at {where}" if where else "")
                + f": {message}",
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
