"""First steps in fresh processes: compiled anew, and with what is kept of the compilation.

    python benchmarks/first_steps.py --results FOLDER
    python benchmarks/first_steps.py --results FOLDER --alone torchvision:resnet50=64x3x224x224

For each target a worker runs the first steps of one compiled config with empty caches, as
`advisor tune` does of what was chosen, and its artifacts are kept beside a record that is made up
around them. Then a fresh process calls apply(), prepare() and trains, its caches empty too: once
more with the artifacts, and with `--alone` without them. Without `--alone` the targets are compiled
beside each other, on as many cores as there are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record as results
import torch
from torch import nn

import advisor
from advisor.cache.artifacts import Purpose
from advisor.cache.config import Config
from advisor.cache.key import Key
from advisor.cache.record import FLAGS, USES, Provenance, Record, Target, Winner
from advisor.cache.task import Task
from advisor.opening import open_records
from advisor.tuners import target
from advisor.tuners.act.artifacts import saved
from advisor.tuners.environment import default_device, detect, own_threads
from advisor.tuners.knobs import plain
from advisor.tuners.measure.first_step import Compiled, empty_caches
from advisor.tuners.measure.worker.parent import Worker
from advisor.tuners.measure.worker.wire import Job

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.cache.examples import choice

ROOT = Path(__file__).parents[1]
TARGETS = (
    "torchvision:resnet50=64x3x224x224",
    "torchvision:efficientnet_v2_s=32x3x300x300",
    f"{ROOT / 'examples' / 'gpt2.py'}:GPT2=8x1024",
)
DEADLINE_S = 400.0
STEPS = 6


@dataclass(frozen=True)
class Subject:
    """A target with its shape, as `advisor tune` takes them."""

    name: str
    shape: str

    @classmethod
    def of(cls, text: str) -> Subject:
        return cls(*text.rsplit("=", 1))

    @property
    def keywords(self) -> dict[str, Any]:
        tokens = {"dtype": "int64", "vocab": 50304} if "gpt2" in self.name else {}
        return {"shape": self.shape, **tokens}

    @property
    def task(self) -> Task:
        return Task.of(self.name, self.keywords)


def compiled(task: Task, device: str) -> tuple[Config, Config]:
    """(torch's default, what is compiled): bf16 where there is a GPU, images laid out for it."""
    base = plain(task, device).replace(compile="none", precision="default")
    base = base.replace(**({"threads": own_threads()} if device == "cpu" else {}))
    gpu: dict[str, Any] = {"precision": "bf16", "fused_optimizer": True}
    if len(task.shapes[0]) == 4:
        gpu["channels_last"] = True
    default = base.replace(**{name: False for name in gpu if name != "precision"})
    return default, default.replace(compile="default", **(gpu if device != "cpu" else {}))


def keep(subject: Subject, device: str, folder: Path, cache: str) -> dict[str, Any]:
    """Run the first steps of what is compiled, and keep what that has compiled."""
    task, file = subject.task, folder / "saved"
    default, advised = compiled(task, device)
    with Worker(Job(task=task, device=device, seed=0), deadline_s=DEADLINE_S) as worker:
        facts = worker.describe()
        how = Compiled(saves=file)
        started = worker.start(advised, deadline_s=DEADLINE_S, compiled=how)
    if not started.ok:
        raise SystemExit(f"{subject.name}: {started.outcome}: {started.reason}")
    key = Key(
        environment=detect(device),
        model=facts.model,
        hooks=facts.hooks,
        task=task,
        libraries=facts.libraries,
        threads=facts.threads if device == "cpu" else 0,
    )
    base, fast = choice(default, 1000.0), choice(advised, 2000.0, 2.0)
    made = Record(
        key=key,
        target=Target(name=facts.name, origin=target.parse(task.target).origin, code=facts.code),
        baseline=base,
        winners=tuple(
            Winner(use=use, free=False, choice=base if use == FLAGS else fast) for use in USES
        ),
        input=Config(),
        trials=(),
        provenance=Provenance(
            created=time.time(),
            seconds=1.0,
            trials=0,
            advisor=advisor.__version__,
            device_uuid="",
            host_cpu="",
            seed=0,
            study="",
            budget_s=1.0,
            modules=facts.modules,
            parameters=facts.parameters,
        ),
    )
    records = open_records(cache)
    store, found = records.put(made), saved(file)
    if found is None:
        raise SystemExit(f"{subject.name}: nothing was compiled that can be kept")
    tools, data = found
    purpose = Purpose.of(made, advised, key.environment, tools)
    size = records.artifacts.keep(data, purpose, store)
    return {"cold_s": started.first_step_s, "unpacked_bytes": len(data), "kept_bytes": size}


def script(subject: Subject, device: str) -> dict[str, Any]:
    """What a user's script does, in this process: seconds of what its first steps pay once."""
    began = time.perf_counter()
    advice = advisor.apply(subject.name, device=device, **subject.keywords)
    loaded = target.load(target.parse(subject.name), Config())
    model = advice.prepare(target.build(loaded))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, **advice.optimizer)
    shape = subject.task.shapes[0]
    if loaded.make_batch is not None:
        batch, labels = loaded.make_batch(shape[0], torch.device(device))
    else:
        batch, labels = torch.randn(shape), torch.randint(10, (shape[0],))
    batch, labels = advice.place(batch), advice.place(labels)
    criterion = loaded.loss or nn.functional.cross_entropy
    times = []
    for _step in range(STEPS):
        start = time.perf_counter()
        with advice.autocast():
            loss = criterion(model(batch), labels)
        advice.step(loss, optimizer)
        loss.item()
        times.append(time.perf_counter() - start)
    from torch._dynamo.utils import counters

    return {
        "first_s": sum(times) - len(times) * min(times),
        "process_s": time.perf_counter() - began,
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
        "said": advice.artifacts.said if advice.artifacts else "no artifacts are looked for",
    }


def in_script(subject: Subject, device: str, cache: str, **more: str) -> dict[str, Any]:
    """The same in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, __file__, "--script", device, f"{subject.name}={subject.shape}"],
            env=os.environ | empty_caches(empty) | {"ADVISOR_CACHE": cache} | more,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--alone", action="store_true", help="One after the other: takes minutes.")
    parser.add_argument("--script", metavar="DEVICE", help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*", metavar="TARGET=SHAPE")
    args = parser.parse_args()
    subjects = [Subject.of(text) for text in args.targets or TARGETS]
    if args.script:
        print(json.dumps(script(subjects[0], args.script)))
        return
    began = time.perf_counter()
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in subjects]
        store = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["XDG_DATA_HOME"] = store  # a key of its own
        cache = f"dir:{store}/records"
        pool = stack.enter_context(ThreadPoolExecutor(1 if args.alone else len(subjects)))
        jobs = [
            pool.submit(keep, subject, args.device, folder, cache)
            for subject, folder in zip(subjects, folders, strict=True)
        ]
        kept = [job.result() for job in jobs]
        for subject, found in zip(subjects, kept, strict=True):
            row = {"target": subject.name, "shape": subject.shape, "alone": args.alone, **found}
            row["loaded"] = in_script(subject, args.device, cache)
            if args.alone:
                row["anew"] = in_script(subject, args.device, cache, ADVISOR_MAX_ARTIFACTS="0")
            row["torch"] = str(torch.__version__)
            row["ratio"] = row["loaded"]["first_s"] / row["cold_s"]
            results.append("first_steps", row, args.results)
            print(json.dumps(row))
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
