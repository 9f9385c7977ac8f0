"""The worker process: loads the target, describes it, and answers requests over its pipe."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config
from advisor.errors import AdvisorError, TargetError, TargetFailed
from advisor.tuners import environment, fingerprint, fp8, target
from advisor.tuners.act.pilot.protocol import receive, send
from advisor.tuners.act.pilot.script_facts import model_facts
from advisor.tuners.faults import is_out_of_memory
from advisor.tuners.knobs import plain
from advisor.tuners.measure.runner import ConfigFailed
from advisor.tuners.measure.worker.bench import Bench
from advisor.tuners.measure.worker.wire import CHANGED, Facts, WorkerJob
from advisor.tuners.measure.workload import Workload, layer_that_raised


def describe(bench: Bench) -> Facts:
    """Run two steps with torch's defaults. Raises TargetError if the model rejects the sample or
    is not the job's, TargetFailed if the user's code raised, ConfigFailed if memory runs out."""
    loaded, device = bench.loaded, bench.device
    built = bench.new_model()
    known = model_facts([built])  # before any knob touches the model, as in a script
    hooks = fingerprint.of_hooks(loaded.make_batch, loaded.loss)
    found = {"model": known["model"], "make_batch or loss": hooks}
    for (what, now), then in zip(found.items(), bench.job.known, strict=False):
        if now != then:
            raise TargetError(f"the {what} of {loaded.spec.name} {CHANGED}")
    wide = sum(map(fp8.gains, built.modules()))
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    bench.reset_peak()
    workload = _first_step(bench, built)
    began = time.perf_counter()
    workload.step()
    environment.synchronize(bench.device)
    step_s = time.perf_counter() - began
    return Facts(
        name=loaded.spec.name,
        hooks=hooks,
        code=bench.code,
        device_uuid=str(getattr(properties, "uuid", "")),
        memory_bytes=getattr(properties, "total_memory", 0),
        peak_bytes=bench.peak_bytes(),
        step_s=step_s,
        wide=wide,
        **known,
    )


def _first_step(bench: Bench, built: nn.Module) -> Workload:
    """Take a step at the user's batch; errors name the layer that raised them."""
    task, spec = bench.job.task, bench.loaded.spec
    try:
        workload = bench.workload(plain(task, bench.job.device), built)
        workload.step()
        environment.synchronize(bench.device)
        return workload
    except AdvisorError:
        raise
    except Exception as exc:  # the user's code may raise anything; it is reported whole
        if is_out_of_memory(exc):
            raise ConfigFailed("out_of_memory", "out of memory") from exc
        at = f" at {layer}" if (layer := layer_that_raised(built, exc)) else ""
        message = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        shape = " --shape ".join("x".join(map(str, one)) for one in task.shapes)
        raise TargetError(
            f"target {spec.name!r} rejects --shape {shape} {task.dtype}{at}: {message}",
            target.failed(spec, "", exc).details,
        ) from exc


def _answer(bench: Bench, what: str, given: dict[str, Any]) -> dict[str, Any]:
    act = describe if what == "describe" else getattr(Bench, what)
    # Only configs are sent as maps.
    given = {name: Config(v) if isinstance(v, dict) else v for name, v in given.items()}
    try:
        reply = {"answer": to_plain(act(bench, **given))}
    except ConfigFailed as failed:
        reply = {"outcome": failed.outcome, "reason": str(failed)}
    return reply | {"healthy": bench.healthy}


def main() -> int:
    """Answer requests until the tuning process is gone."""
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)
    warnings.simplefilter("ignore")  # the user's own run shows them; a trial would repeat them
    # At exit, an Advice warns of unused pieces; the last line must be the user's own output.
    logging.getLogger("advisor").setLevel(logging.CRITICAL)
    atexit.register(gc.unfreeze)  # or nanobind reports frozen objects as leaks at exit
    bench: Bench | None = None
    while True:
        try:
            message = receive(pipe)
        except EOFError:
            return 0
        reply: dict[str, Any] = {}
        what = message.pop("do")
        try:
            if bench is None:
                bench = Bench(from_plain(WorkerJob, message["job"]))
            else:
                reply = _answer(bench, what, message)
        except (TargetError, TargetFailed) as exc:
            reply = {"error": type(exc).__name__, "message": str(exc), "details": exc.details}
        if bench is not None and what in ("load", "describe"):
            bench.release()
            gc.freeze()  # going through torch's modules at each collection takes 0.4 s
            gc.enable()
        send(pipe, reply)
