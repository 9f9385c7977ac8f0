"""How many trials near records save.

    python benchmarks/first_guesses.py replay FOLDER
    python benchmarks/first_guesses.py measure torchvision:resnet18 torchvision:resnet34 \\
        --shape 64x3x224x224 --budget 2m

`replay` takes measured tables in place of a device, as search_efficiency.py does: a search that is
given what another search of the same table found (a driver bump), or one of another table (another
model), against one that is given nothing. `measure` tunes the first target, then the second with
and without the first's record. Counted are the trials, torch's default among them, until a config
within 1% of the best is measured (of 2% where the best is itself measured).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import optuna
import record as results
from rich.console import Console
from rich.table import Table
from search_efficiency import NEAR, Question, TableSpace, by_advisor, readable

from advisor.cache.config import Config
from advisor.cache.kinds import Seconds
from advisor.cache.record import Record
from advisor.tuners.search.plan import Progress
from advisor.tuning import tune

MEASURED_NEAR = 0.98


def trials_to_best(question: Question, seed: int, first: list[Config]) -> int:
    runner, _config = by_advisor(question, seed, first=first)
    best = max(map(runner.rate, question.rows(runner)))
    tried = list(dict.fromkeys(config for _time, config in runner.log))
    return next(n for n, c in enumerate(tried, 1) if runner.rate(c) >= NEAR * best)


def replay(folder: Path, seeds: int, noise: float) -> dict[str, Any]:
    tables = [path for path in sorted(folder.glob("*.jsonl")) if readable(path)]
    found: dict[str, Any] = {}
    for path in tables:
        question = Question(path, free=False, noise=noise)
        space = TableSpace(question.rows(question.runner(0)))
        for source in tables:
            before = Question(source, free=False, noise=noise)
            saved = []
            for seed in range(seeds):
                _runner, advice = by_advisor(before, seed + 1000)
                offered = {
                    name: value
                    for name, value in advice.items()
                    if value in space.choices.get(name, ()) and name != "batch_size"
                }
                saved.append(
                    (
                        trials_to_best(question, seed, []),
                        trials_to_best(question, seed, [Config(offered)]),
                    )
                )
            bare, guided = (statistics.mean(column) for column in zip(*saved, strict=True))
            found.setdefault(path.stem, {})[source.stem] = {
                "without": round(bare, 2),
                "with": round(guided, 2),
                "configs": len(question.rows(question.runner(0))),
            }
    return found


class Heard(Progress):
    """Keeps what tuning says."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def measure(source: str, target: str, given: argparse.Namespace) -> dict[str, Any]:
    def tuned(name: str, folder: str) -> tuple[Record, list[str]]:
        heard = Heard()
        record = tune(
            name,
            given.shape,
            budget_s=Seconds().checked("budget", given.budget),
            effort=given.effort,
            fixed_batch=True,
            device=given.device,
            cache=f"dir:{folder}",
            progress=heard,
        ).record
        return record, heard.notices

    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as full:
        tuned(source, full)
        guided, said = tuned(target, full)
        bare, _said = tuned(target, empty)

    def compute(record: Record) -> list[Any]:
        return [t for t in record.trials if t.stage == "compute" and t.measurement.ok]

    best = max(t.measurement.samples_per_s for r in (guided, bare) for t in compute(r))

    def reached(record: Record) -> dict[str, Any]:
        seconds = 0.0
        for n, trial in enumerate(sorted(compute(record), key=lambda t: t.number), 1):
            seconds += trial.seconds
            if trial.measurement.samples_per_s >= MEASURED_NEAR * best:
                return {"trials": n, "seconds": round(seconds, 1)}
        return {"trials": None, "seconds": None}

    return {
        "source": source,
        "target": target,
        "said": said,
        "with": reached(guided) | {"speedup": guided.at_batch.speedup},
        "without": reached(bare) | {"speedup": bare.at_batch.speedup},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("replay")
    one.add_argument("folder", type=Path)
    one.add_argument("--seeds", type=int, default=30)
    one.add_argument("--noise", type=float, default=0.005)
    two = commands.add_parser("measure")
    two.add_argument("source")
    two.add_argument("target")
    two.add_argument("--shape", required=True)
    two.add_argument("--budget", default="2m")
    two.add_argument("--effort", default="normal")
    two.add_argument("--device")
    for each in (one, two):
        each.add_argument("--results", type=Path, default=results.RESULTS)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    out = Console(width=120)
    if given.command == "measure":
        found = measure(given.source, given.target, given)
        out.print(found)
        results.append("first_guesses", found, given.results)
        return
    tables = replay(given.folder, given.seeds, given.noise)
    shown = Table("table", "configs", "guided by", "trials without", "with", box=None)
    for name, sources in tables.items():
        for source, row in sources.items():
            by = "itself (stale)" if source == name else source
            shown.add_row(name, str(row["configs"]), by, str(row["without"]), str(row["with"]))
    out.print(shown)
    results.append("first_guesses", {"tables": tables}, given.results)


if __name__ == "__main__":
    main()
