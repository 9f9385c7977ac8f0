"""What a loader feeds the advised step: by the advice, by torch's default, by the usual recipe.

    python benchmarks/loaders.py --results FOLDER
    python benchmarks/loaders.py --cases small-resnet50 --budget 60s

Each case is tuned with `--data` in a process of its own; then a plain loop trains with the advised
step on batches of three loaders in turn: torch's default, workers = cores with pinned memory, and
the advice. Beside them stand the step alone, on a batch that lies on the device, and the advised
loader alone: no loader feeds more than the lesser of the two. The JPEG files are made here. 'four'
has a quota of four cores where a control group can be made (version 2, as root), else by affinity.
Two minutes and the budget for each case on an H200.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import record as results
import torch
from torch.utils.data import DataLoader

import advisor
from advisor.cache.kinds import Duration
from advisor.report import feeding
from advisor.tuners import host
from advisor.tuners.target import build, load, parse

HERE = Path(__file__).parent
FILES, TOKENS = 512, 2**24
TURNS, TURN_S = 5, 3.0
WARM = 3
HANGS_S = 300.0
"""Beyond its budget, a case that is given up."""
GROUP = Path("/sys/fs/cgroup/advisor-loaders")
QUICK = advisor.Permit(compile=False, step_graph=False, batches=[], tolerance=0.0)
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
    "large-mobilenet": Case("torchvision:mobilenet_v3_large", (128, 3, 224, 224), "551x676"),
    "small-resnet50-four": Case("torchvision:resnet50", (128, 3, 224, 224), "256x256", cores=4),
    "light": Case(str(HERE / "targets/light.py"), (32, 3, 224, 224), "256x256"),
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
        own = torch.set_num_threads
        with ProcessPoolExecutor(host.cores(), initializer=own, initargs=(1,)) as pool:
            list(pool.map(partial(jpeg, place, (height, width)), range(FILES)))
    return {"root": str(place), "crop": case.shape[-1]}


def endless(loader: DataLoader[Any]) -> Generator[Any]:
    while True:
        yield from loader


def speed(take: Callable[[], object], batch: int, loader: DataLoader[Any] | None = None) -> float:
    """Samples/s. With a loader: once what may lie ready has been taken, of whole rounds of its
    workers, whose batches come together."""
    workers = loader.num_workers if loader else 0
    ready = workers * (1 + (loader.prefetch_factor or 0)) if loader else 0
    together = max(1, workers)

    def now() -> float:
        if DEVICE != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(max(WARM, ready)):
        take()
    taken, began = 0, now()
    while time.perf_counter() - began < TURN_S:
        for _ in range(together):
            take()
        taken += together
    return taken * batch / (now() - began)


def measured(case: Case, arguments: dict[str, Any], budget_s: float) -> dict[str, Any]:
    """Tune the case and hold its loader against the others."""
    data = str(HERE / "targets" / case.data)
    model_of = advisor.Model(
        case.target,
        dtype=case.dtype,
        vocab=None if case.dtype == "float32" else 30000,
        device=DEVICE,
        data=data,
        data_args=arguments,
    )
    with tempfile.TemporaryDirectory() as store:
        given: dict[str, Any] = {"shape": case.shape, "permit": QUICK, "store": store}
        budget = advisor.Budget(time=budget_s, trials=TRIALS)
        found = advisor.tune(model_of, budget=budget, **given).record
        advice = advisor.lookup(model_of, **given)
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

    common = {"dataset": dataset, "shuffle": True, "drop_last": True, "batch_size": batch}
    # As most scripts have it, which know of no quota.
    pinned = {"num_workers": len(os.sched_getaffinity(0)), "pin_memory": DEVICE != "cpu"}
    loaders = {
        "default": partial(DataLoader, **common),
        "recipe": partial(DataLoader, **common, **pinned),
        "advice": partial(DataLoader, **{**common, **advice.loader}),
    }
    first = next(iter(loaders["default"]()))
    placed = itertools.repeat(advice.place(first))
    turns: dict[str, list[float]] = {name: [] for name in ("step", *loaders, "loader")}

    def fed(name: str) -> float:
        loader = loaders[name]()
        with contextlib.closing(advice.batches(endless(loader))) as batches:
            return speed(partial(train, batches), batch, loader)

    def alone() -> float:
        loader = loaders["advice"]()
        with contextlib.closing(endless(loader)) as batches:
            return speed(partial(next, batches), batch, loader)

    for turn in range(TURNS):
        turns["step"].append(speed(partial(train, placed), batch))
        for name in list(loaders)[:: (-1) ** turn]:  # there and back
            turns[name].append(fed(name))
        turns["loader"].append(alone())
    middle = {name: statistics.median(rates) for name, rates in turns.items()}
    limit = min(middle["step"], middle["loader"])
    return {
        "loader": {name: value for name, value in advice.loader.items() if name != "batch_size"},
        "recipe": pinned,
        "cores": host.cores(),
        "shared_bytes": host.shared_bytes()[0],
        "samples_per_s": middle,
        "limit": limit,
        "turns": turns,
        "of_the_limit": middle["advice"] / limit,
        "over_the_recipe": middle["advice"] / middle["recipe"],
        "over_the_default": middle["advice"] / middle["default"],
        "looked_at": [looked_at(pair) for pair in feeding.pairs(found)],
    }


def looked_at(pair: feeding.Pair) -> dict[str, Any]:
    """What the tuning measured of a loader, samples/s."""
    return {**pair.loader, "together": pair.together.samples_per_s}


def limited(cores: int) -> str:
    """How this process, and what it starts, is kept to so many cores."""
    try:
        (GROUP.parent / "cgroup.subtree_control").write_text("+cpu")
        GROUP.mkdir(exist_ok=True)
        (GROUP / "cpu.max").write_text(f"{cores * 100_000} 100000")
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
        return "affinity"
    return "quota"


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
        by = limited(case.cores) if case.cores else ""
        found = measured(case, arguments, Duration().checked("budget", given.budget))
        print(json.dumps({"limited": by, **found}))
        return
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in given.cases:
            found = in_a_process(name, folder, given)
            if found is None:
                failed = True
                continue
            results.append("loaders", {"case": name, **found}, given.results)
            rates = {what: round(rate) for what, rate in found["samples_per_s"].items()}
            print(name, found["loader"], rates, f"{found['of_the_limit']:.0%} of the limit,")
            print(f"  {found['over_the_recipe']:.2f}x the recipe", flush=True)
    sys.exit(failed)


def in_a_process(name: str, folder: str, given: argparse.Namespace) -> dict[str, Any] | None:
    """What a case gives; None where it failed, which costs no other."""
    words = [sys.executable, __file__, "--one", name, folder, "--budget", given.budget]
    words += ["--batch", str(given.batch)] if given.batch else []
    most = Duration().checked("budget", given.budget) + HANGS_S
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=most, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        return None
    finally:
        with contextlib.suppress(OSError):
            GROUP.rmdir()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
