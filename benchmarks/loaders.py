"""What a loader feeds the advised step: by the advice, by torch's default, by the usual recipe.

    python benchmarks/loaders.py --results FOLDER
    python benchmarks/loaders.py --cases small-resnet50 --budget 60s

Each case is tuned with `--data` in a process of its own; then a plain loop trains with the advised
step on batches of three loaders in turn: torch's default, workers = cores with pinned memory, and
the advice. Beside them stand the step alone, on a batch that lies on the device, and the advised
loader alone: no loader feeds more than the lesser of the two. The JPEG files are made here. 'four'
has four cores by affinity. Some six minutes on an H200, two thirds of them the budgets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import record as results
import torch
from torch.utils.data import DataLoader

import advisor
from advisor.cache.kinds import Seconds
from advisor.tuners.target import build, load, parse

HERE = Path(__file__).parent
FILES, TOKENS = 512, 2**24
TURNS, TURN_S, SETTLE_S = 2, 1.2, 1.0
QUICK = {"compile": False, "step_graph": False, "batches": [], "tolerance": 0.0}
TRIALS = 2
"""Of the step: torch's default and the best guess. It is the loader that is looked at."""


@dataclass(frozen=True)
class Case:
    """A target, and the data that it trains on: `made` in the folder."""

    target: str
    shape: tuple[int, ...]
    made: str
    data: str = "jpegs.py"
    dtype: str = "float32"
    cores: int = 0


CASES = {
    "small-resnet50": Case("torchvision:resnet50", (128, 3, 224, 224), "256x256"),
    "large-resnet50": Case("torchvision:resnet50", (128, 3, 224, 224), "551x676"),
    "small-mobilenet": Case("torchvision:mobilenet_v3_large", (128, 3, 224, 224), "256x256"),
    "small-resnet50-four": Case("torchvision:resnet50", (128, 3, 224, 224), "256x256", cores=4),
    "text": Case(str(HERE / "targets/encoder.py"), (32, 128), "tokens", "tokens.py", "int64"),
}


def jpeg(folder: Path, size: tuple[int, int], number: int) -> None:
    """One file: noise of several scales, which takes as long to decode as a photograph."""
    from torchvision.io import write_jpeg
    from torchvision.transforms.v2.functional import resize

    draw = torch.Generator().manual_seed(number)
    image = sum(
        resize(torch.rand(3, size[0] // scale, size[1] // scale, generator=draw), list(size))
        for scale in (2, 8, 32)
    )
    write_jpeg((image / 3 * 255).to(torch.uint8), str(folder / f"{number}.jpg"), quality=90)


def make(case: Case, folder: Path) -> dict[str, Any]:
    """The case's data, made where it is not there yet; its arguments."""
    place = folder / case.made
    if case.data == "tokens.py":
        if not place.exists():
            torch.randint(30000, (TOKENS,)).to(torch.uint16).numpy().tofile(place)
        return {"file": str(place), "length": case.shape[1]}
    if not place.exists():
        place.mkdir()
        height, width = map(int, case.made.split("x"))
        with ProcessPoolExecutor() as pool:
            list(pool.map(partial(jpeg, place, (height, width)), range(FILES)))
    return {"root": str(place), "crop": case.shape[-1]}


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def speed(take: Callable[[], object], batch: int, device: str) -> float:
    """Samples/s, once what lay ready has been taken."""

    def now() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    end = now() + SETTLE_S
    while time.perf_counter() < end:
        take()
    taken, began = 0, now()
    while time.perf_counter() - began < TURN_S:
        take()
        taken += 1
    return taken * batch / (now() - began)


def measured(case: Case, arguments: dict[str, Any], budget_s: float) -> dict[str, Any]:
    """Tune the case and hold its loader against the others."""
    data = str(HERE / "targets" / case.data)
    task = {"shape": case.shape, "dtype": case.dtype, "device": DEVICE, **QUICK}
    if case.dtype != "float32":
        task["vocab"] = 30000
    with tempfile.TemporaryDirectory() as store:
        given = {"data": data, "data_args": arguments, "budget": budget_s, "trials": TRIALS}
        found = advisor.tune(case.target, **task, **given, cache=store).record
        advice = advisor.lookup(case.target, **task, cache=store)
    batch = case.shape[0]
    model = advice.prepare(build(load(parse(case.target), found.key.task.model_args)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, **advice.optimizer)
    advice.set_flags()
    make_dataset = parse(f"{data}:make_dataset", role="data")
    dataset: Any = load(make_dataset, found.key.task.data_args).factory()

    def train(batches: Iterator[Any]) -> None:
        inputs, target = next(batches)
        with advice.autocast():
            loss = torch.nn.functional.cross_entropy(model(inputs), target)
        advice.step(loss, optimizer)

    cores = len(os.sched_getaffinity(0))
    common = {"dataset": dataset, "shuffle": True, "drop_last": True, "batch_size": batch}
    pinned = {"num_workers": cores, "pin_memory": DEVICE != "cpu"}
    loaders = {
        "default": partial(DataLoader, **common),
        "recipe": partial(DataLoader, **common, **pinned),
        "advice": partial(DataLoader, **{**common, **advice.loader}),
    }
    first = next(iter(loaders["default"]()))
    placed = itertools.repeat(advice.place(first))
    turns: dict[str, list[float]] = {name: [] for name in ("step", *loaders, "loader")}
    for _ in range(TURNS):
        turns["step"].append(speed(lambda: train(placed), batch, DEVICE))
        for name, made in loaders.items():
            batches = advice.batches(endless(made()))
            turns[name].append(speed(partial(train, batches), batch, DEVICE))
            batches.close()
        alone = endless(loaders["advice"]())
        turns["loader"].append(speed(partial(next, alone), batch, "cpu"))
    middle = {name: statistics.median(rates) for name, rates in turns.items()}
    limit = min(middle["step"], middle["loader"])
    return {
        "loader": dict(found.input),
        "cores": cores,
        "samples_per_s": middle,
        "turns": turns,
        "of_the_limit": middle["advice"] / limit,
        "over_the_recipe": middle["advice"] / middle["recipe"],
        "over_the_default": middle["advice"] / middle["default"],
    }


DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--budget", default="45s")
    parser.add_argument("--batch", type=int, help="in place of each case's own")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, folder = given.one
        case = CASES[name]
        if given.batch:
            case = Case(**{**vars(case), "shape": (given.batch, *case.shape[1:])})
        arguments = make(case, Path(folder))
        if case.cores:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: case.cores])
        print(json.dumps(measured(case, arguments, Seconds().checked("budget", given.budget))))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in given.cases:
            batch = ["--batch", str(given.batch)] if given.batch else []
            words = [sys.executable, __file__, "--one", name, folder, "--budget", given.budget]
            done = subprocess.run([*words, *batch], stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{name}: failed with exit code {done.returncode}", file=sys.stderr)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            results.append("loaders", {"case": name, **found}, given.results)
            rates = {what: round(rate) for what, rate in found["samples_per_s"].items()}
            print(name, found["loader"], rates, f"{found['of_the_limit']:.0%} of the limit")


if __name__ == "__main__":
    main()
