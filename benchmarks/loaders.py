"""Compares data loaders for the advised step: torch's default, the usual recipe, and the advice.

    python benchmarks/loaders.py --results FOLDER
    python benchmarks/loaders.py --cases small-resnet50 --budget 60s

Each case is tuned with `--data` in its own process. Then a plain loop trains with the advised step
and each loader in turn; the recipe is one worker per core and pinned memory. The step alone, on a
batch that is on the device, and the advised loader alone are measured too: the slower of them is
the limit. The benchmark makes the JPEG files. Cases named 'four' have a quota of four cores, if a
cgroup can be made (version 2, as root), else a CPU affinity. On an H200, a case takes its budget
and two minutes.
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
OVERTIME_S = 300.0
"""Seconds after its budget when a case is aborted."""
GROUP = Path("/sys/fs/cgroup/advisor-loaders")
QUICK = advisor.Permit(compile=False, step_graph=False, batches=[], tolerance=0.0)
TRIALS = 2
"""Trials of the step: torch's default and the best guess. The loader is what matters here."""


@dataclass(frozen=True)
class Case:
    """A target and its data; `data_name` is the name of the data in the folder."""

    target: str
    shape: tuple[int, ...]
    data_name: str
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


def make_jpeg(folder: Path, size: tuple[int, int], number: int) -> None:
    """Writes a file with noise at several scales, which decodes as slowly as a photograph."""
    from torchvision.io import write_jpeg
    from torchvision.transforms.v2.functional import resize

    generator = torch.Generator().manual_seed(number)
    image = sum(
        resize(torch.rand(3, size[0] // scale, size[1] // scale, generator=generator), list(size))
        for scale in (2, 8, 32)
    )
    write_jpeg((image / 3 * 255).to(torch.uint8), str(folder / f"{number}.jpg"), quality=90)


def make_data(case: Case, folder: Path) -> dict[str, Any]:
    """Makes the case's data unless it exists. Returns the arguments of its make_dataset."""
    path = folder / case.data_name
    if case.data == "tokens.py":
        if not path.exists():
            torch.randint(30000, (TOKENS,)).to(torch.uint16).numpy().tofile(path)
        return {"file": str(path), "length": case.shape[1]}
    if not path.exists():
        path.mkdir()
        height, width = map(int, case.data_name.split("x"))
        initializer = torch.set_num_threads
        with ProcessPoolExecutor(host.cores(), initializer=initializer, initargs=(1,)) as pool:
            list(pool.map(partial(make_jpeg, path, (height, width)), range(FILES)))
    return {"root": str(path), "crop": case.shape[-1]}


def repeat(loader: DataLoader[Any]) -> Generator[Any]:
    while True:
        yield from loader


def speed(take: Callable[[], object], batch: int, loader: DataLoader[Any] | None = None) -> float:
    """Measures samples/s. With a loader, first takes the prefetched batches, then counts whole
    rounds of its workers, because their batches arrive together."""
    workers = loader.num_workers if loader else 0
    prefetched = workers * (1 + (loader.prefetch_factor or 0)) if loader else 0
    round_batches = max(1, workers)

    def now() -> float:
        if DEVICE != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(max(WARM, prefetched)):
        take()
    taken, began = 0, now()
    while time.perf_counter() - began < TURN_S:
        for _ in range(round_batches):
            take()
        taken += round_batches
    return taken * batch / (now() - began)


def measure_case(case: Case, arguments: dict[str, Any], budget_s: float) -> dict[str, Any]:
    """Tunes a case and compares its loader with the others."""
    data = str(HERE / "targets" / case.data)
    tuned_model = advisor.Model(
        case.target,
        dtype=case.dtype,
        vocab=None if case.dtype == "float32" else 30000,
        device=DEVICE,
        data=data,
        data_args=arguments,
    )
    with tempfile.TemporaryDirectory() as store:
        options: dict[str, Any] = {"shape": case.shape, "permit": QUICK, "store": store}
        budget = advisor.Budget(time=budget_s, trials=TRIALS)
        record = advisor.tune(tuned_model, budget=budget, **options).record
        advice = advisor.lookup(tuned_model, **options)
    batch = case.shape[0]
    model = advice.prepare(build(load(parse(case.target), record.key.task.model_args)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, **advice.optimizer)
    advice.set_flags()
    make_dataset = parse(f"{data}:make_dataset", role="data")
    dataset: Any = load(make_dataset, record.key.task.data_args).factory()

    def train(batches: Iterator[Any]) -> None:
        inputs, target = next(batches)
        with advice.autocast():
            loss = torch.nn.functional.cross_entropy(model(inputs), target)
        advice.step(loss, optimizer)

    common = {"dataset": dataset, "shuffle": True, "drop_last": True, "batch_size": batch}
    # Most scripts do this and ignore CPU quotas.
    pinned = {"num_workers": len(os.sched_getaffinity(0)), "pin_memory": DEVICE != "cpu"}
    loaders = {
        "default": partial(DataLoader, **common),
        "recipe": partial(DataLoader, **common, **pinned),
        "advice": partial(DataLoader, **{**common, **advice.loader}),
    }
    first = next(iter(loaders["default"]()))
    placed = itertools.repeat(advice.place(first))
    turns: dict[str, list[float]] = {name: [] for name in ("step", *loaders, "loader")}

    def with_loader(name: str) -> float:
        loader = loaders[name]()
        with contextlib.closing(advice.batches(repeat(loader))) as batches:
            return speed(partial(train, batches), batch, loader)

    def loader_alone() -> float:
        loader = loaders["advice"]()
        with contextlib.closing(repeat(loader)) as batches:
            return speed(partial(next, batches), batch, loader)

    for turn in range(TURNS):
        turns["step"].append(speed(partial(train, placed), batch))
        for name in list(loaders)[:: (-1) ** turn]:  # alternates the order
            turns[name].append(with_loader(name))
        turns["loader"].append(loader_alone())
    medians = {name: statistics.median(rates) for name, rates in turns.items()}
    limit = min(medians["step"], medians["loader"])
    return {
        "loader": {name: value for name, value in advice.loader.items() if name != "batch_size"},
        "recipe": pinned,
        "cores": host.cores(),
        "shared_bytes": host.shared_bytes()[0],
        "samples_per_s": medians,
        "limit": limit,
        "turns": turns,
        "of_the_limit": medians["advice"] / limit,
        "over_the_recipe": medians["advice"] / medians["recipe"],
        "over_the_default": medians["advice"] / medians["default"],
        "looked_at": [pair_figures(pair) for pair in feeding.pairs(record)],
    }


def pair_figures(pair: feeding.Pair) -> dict[str, Any]:
    """Returns a loader's settings and speeds in the tuning, in samples/s."""
    return {**pair.loader, "together": pair.together.samples_per_s}


def limit_cores(cores: int) -> str:
    """Limits the cores of this process and its children. Returns the means: quota or affinity."""
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
    parser.add_argument("--batch", type=int, help="batch size for all cases")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, folder = args.one
        case = CASES[name]
        if args.batch:
            case = Case(**{**vars(case), "shape": (args.batch, *case.shape[1:])})
        arguments = make_data(case, Path(folder))
        limited_by = limit_cores(case.cores) if case.cores else ""
        figures = measure_case(case, arguments, Duration().checked("budget", args.budget))
        print(json.dumps({"limited": limited_by, **figures}))
        return
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in args.cases:
            figures = run_case(name, folder, args)
            if figures is None:
                failed = True
                continue
            results.append("loaders", {"case": name, **figures}, args.results)
            rates = {what: round(rate) for what, rate in figures["samples_per_s"].items()}
            print(name, figures["loader"], rates, f"{figures['of_the_limit']:.0%} of the limit,")
            print(f"  {figures['over_the_recipe']:.2f}x the recipe", flush=True)
    sys.exit(failed)


def run_case(name: str, folder: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Runs a case in a new process. Returns its figures, or None if it failed."""
    words = [sys.executable, __file__, "--one", name, folder, "--budget", args.budget]
    words += ["--batch", str(args.batch)] if args.batch else []
    limit = Duration().checked("budget", args.budget) + OVERTIME_S
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=limit, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        return None
    finally:
        with contextlib.suppress(OSError):
            GROUP.rmdir()
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    main()
