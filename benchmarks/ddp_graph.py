"""One graph over the step under DistributedDataParallel: what it gives, and how jobs end that fail.

    python benchmarks/ddp_graph.py --processes 2 --results FOLDER

Each model is trained on its own, with and without the graph, in turn, and twice without: how far
losses are apart that differ by nothing but rounding. Then jobs of which one rank cannot: its step
looks at the loss, it has no memory to capture, it breaks off amid a comparison; how they ended, and
after how long. Every job is its own torchrun, and is given up after --limit seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import record as results
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from advisor.cache.config import Config
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.capture.recorder import RECORDERS, CudaRecorder
from advisor.tuners.act.capture.step_graph import WARM_STEPS_PARALLEL, StepGraph
from advisor.tuners.decide.race import paired
from advisor.tuners.target import build, load, parse

LOSSES = 40
"""Steps whose losses are compared, the graph's first ones among them."""
TURN_S = 0.4
FAILURES = ("looks", "full", "amid")
"""What rank 1 does: waits for its loss, has no memory left, breaks off in a comparison."""
LEFT = 96 * 2**20
"""Bytes that a rank without memory has left."""

EAGER = Config(precision="bf16", channels_last=True, cudnn_benchmark=True, fused_optimizer=True)
MNIST = Config(precision="tf32", fused_optimizer=True)


def mobilenet() -> nn.Module:
    import torchvision

    made: nn.Module = torchvision.models.mobilenet_v3_large(weights=None)
    return made


def mnist() -> nn.Module:
    path = Path(__file__).parents[1] / "examples" / "mnist.py"
    return build(load(parse(str(path)), Config({})))


@dataclasses.dataclass(frozen=True)
class Job:
    make: Callable[[], nn.Module]
    batch: int
    sample: tuple[int, ...]
    classes: int
    config: Config


JOBS = {
    "mobilenet_v3_large": Job(mobilenet, 64, (3, 224, 224), 1000, EAGER),
    "mnist": Job(mnist, 128, (1, 28, 28), 10, MNIST),
}


class Training:
    """A script's own loop under DistributedDataParallel."""

    def __init__(self, job: Job, device: torch.device, *, graph: bool, how: str = "") -> None:
        torch.manual_seed(0)
        knobs = dict(job.config)
        if graph:
            knobs |= {"step_graph": True, "fused_optimizer": False}
        self.advice = advice = Advice(Config(knobs), device=str(device))
        advice.set_flags()
        model = advice.prepare(job.make())
        ids = [device.index] if device.type == "cuda" else None
        self.model = DistributedDataParallel(model, device_ids=ids)
        optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, momentum=0.9, **advice.optimizer
        )
        net, looks = self.model, how == "looks" and dist.get_rank() == 1

        def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
            with advice.autocast():
                loss = functional.cross_entropy(net(batch[0]), batch[1])
            if looks:
                loss.item()
            advice.step(loss, optimizer)
            return loss

        draw = torch.Generator().manual_seed(dist.get_rank())
        self.batches = [
            advice.place(
                (
                    torch.randn(job.batch, *job.sample, generator=draw),
                    torch.randint(job.classes, (job.batch,), generator=draw),
                )
            )
            for _ in range(4)
        ]
        self.step = advice.capture(train_step, self.batches[0])
        self.taken = 0

    @property
    def failure(self) -> str:
        if isinstance(self.step, StepGraph):
            return self.step.failure
        return "there is no graph"

    def one(self) -> Tensor:
        self.taken += 1
        loss: Tensor = self.step(self.batches[self.taken % len(self.batches)])
        return loss

    def losses(self, steps: int) -> list[float]:
        return [float(loss) for loss in [self.one().detach().clone() for _ in range(steps)]]

    def rate(self, steps: int) -> float:
        """Samples/s of all ranks over so many steps, on all of them."""
        synchronize()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.one()
        synchronize()
        return (
            steps * len(self.batches[0][0]) * dist.get_world_size() / (time.perf_counter() - began)
        )


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def together(value: float, device: torch.device) -> float:
    """Rank 0's number, on all ranks."""
    held = torch.tensor([value], dtype=torch.float64, device=device)
    dist.broadcast(held, 0)
    return float(held)


def apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def measured(name: str, seconds: float, device: torch.device) -> dict[str, Any]:
    """Losses of three trainings, and samples/s of two of them in turn."""
    job = JOBS[name]
    began = time.monotonic()
    captured, plain, twin = (Training(job, device, graph=g) for g in (True, False, False))
    kinds = {"graph": captured, "plain": plain, "twin": twin}
    losses = {kind: one.losses(LOSSES) for kind, one in kinds.items()}
    built_s = time.monotonic() - began
    turns: dict[str, list[float]] = {"graph": [], "plain": []}
    steps = {}
    for kind in turns:
        kinds[kind].rate(10)
        rate = kinds[kind].rate(10) / job.batch / dist.get_world_size()
        steps[kind] = max(5, int(together(TURN_S * rate, device)))
    end = time.monotonic() + seconds
    order = ["plain", "graph"]
    while together(end - time.monotonic(), device) > 0:
        for kind in order:
            turns[kind].append(kinds[kind].rate(steps[kind]))
        order.reverse()
    ratio = paired(turns["graph"], turns["plain"])
    return {
        "job": name,
        "batch_of_each": job.batch,
        "failure": captured.failure,
        "samples_per_s": {kind: statistics.median(rates) for kind, rates in turns.items()},
        "turns": turns,
        "x_plain": ratio.mean,
        "low": ratio.low,
        "high": ratio.high,
        "losses_apart": apart(losses["graph"], losses["plain"]),
        "losses_of_twins_apart": apart(losses["twin"], losses["plain"]),
        "losses": {kind: [each[0], each[-1]] for kind, each in losses.items()},
        "built_s": built_s,
    }


class Amid(CudaRecorder):
    """Has no memory for the step that a replay is compared with."""

    recorded = False

    def record(self, step: Callable[[], Any]) -> Any:
        found = super().record(step)
        self.recorded = True
        return found

    def beside(self) -> Any:
        if self.recorded:
            raise torch.OutOfMemoryError("out of memory, on purpose")
        return super().beside()


def failing(how: str, device: torch.device) -> dict[str, Any]:
    """What becomes of a job whose rank 1 cannot."""
    if how == "amid" and dist.get_rank() == 1:
        RECORDERS["cuda"] = Amid
    training = Training(JOBS["mobilenet_v3_large"], device, graph=True, how=how)
    losses = training.losses(WARM_STEPS_PARALLEL)
    hoard = None
    if how == "full" and dist.get_rank() == 1:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        hoard = torch.empty(max(0, free - step_bytes() - LEFT), dtype=torch.uint8, device=device)
    losses += training.losses(LOSSES - WARM_STEPS_PARALLEL)
    del hoard
    return {"job": how, "steps": training.taken, "failure": training.failure, "last": losses[-1]}


def step_bytes() -> int:
    """What a step takes without a graph: less, and the training itself would not go on."""
    return int(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())


def rank(what: str, seconds: float, folder: Path) -> None:
    number = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(number)
        device = torch.device("cuda", number)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    run = functools.partial(failing, what)
    if what in JOBS:
        run = functools.partial(measured, what, seconds)
    (folder / str(number)).write_text(json.dumps(run(device)))
    dist.destroy_process_group()


def job(what: str, processes: int, seconds: float, limit_s: float) -> dict[str, Any]:
    """Start a job, and say how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc-per-node", str(processes), __file__]
        words += ["--what", what, "--seconds", str(seconds), "--folder", folder]
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as said:
            running = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT)
            try:
                code, hung = running.wait(limit_s), False
            except subprocess.TimeoutExpired:
                running.terminate()  # which ends its ranks
                code, hung = running.wait(), True
            said.seek(0)
            printed = said.read()
        took_s = time.monotonic() - began
        written = sorted(Path(folder).glob("[0-9]*"), key=lambda path: int(path.name))
        ranks = [json.loads(path.read_text()) for path in written]
    if len(ranks) < processes:
        print(printed[-3000:], flush=True)
    first = ranks[0] if ranks else {"job": what}
    failures = [one.get("failure", "") for one in ranks]
    ended = {"processes": processes, "hung": hung, "exit_code": code, "took_s": took_s}
    return first | ended | {"failures": failures}


@click.command(help=__doc__)
@click.option("--processes", default=2, help="GPUs.")
@click.option("--seconds", default=12.0, help="Of turns, for each model.")
@click.option("--limit", "limit_s", default=100.0, help="Seconds for each job.")
@click.option("--only", multiple=True, type=click.Choice([*JOBS, *FAILURES]))
@click.option("--results", "folder", type=click.Path(path_type=Path), default=results.RESULTS)
@click.option("--what", default="", hidden=True)
@click.option("--folder", "into", type=click.Path(path_type=Path), hidden=True)
def main(
    processes: int,
    seconds: float,
    limit_s: float,
    only: tuple[str, ...],
    folder: Path,
    what: str,
    into: Path,
) -> None:
    if what:
        rank(what, seconds, into)
        return
    for name in only or (*JOBS, *FAILURES):
        row = job(name, processes, seconds, limit_s)
        results.append("ddp_graph", row, folder)
        shown = {key: value for key, value in row.items() if key != "turns"}
        print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
