"""Measures how long a search takes to find a good config, on replayed tables.

    python benchmarks/search_efficiency.py FOLDER --seeds 20

Every *.jsonl in FOLDER whose rows have `config` and `samples_per_s` (or `ok: false`) replaces a
device. The first row is torch's default at the user's batch. The search is that of `advisor tune`,
but its measurements are the table's numbers with --noise, and its clock counts the seconds that
measuring would have taken. Rows with unknown or forbidden knobs or values are skipped. A knob that
a row does not name has torch's default value.

`reached`: share of seeds that verified a config within 1% of the table's best before the budget
ended. `seconds`: median time until then. `found`, `worst`: speed of the advised config as a share
of the table's best, mean and minimum over seeds. Speeds are the table's, without noise. If the
batch is free, the search advises the smallest batch that is about as fast as any. Prints a table,
then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import record as results
from replay import ReplayRunner
from rich.console import Console
from rich.progress import track
from rich.table import Table

from advisor.cache.config import Config, Value
from advisor.cache.record import LOOP, USES
from advisor.tuners import knobs
from advisor.tuners.search.journal import JournaledTrial
from advisor.tuners.search.plan import Clock, Progress
from advisor.tuners.search.space import Space
from advisor.tuners.search.tuner import SearchOptions, Tuner

NEAR = 0.99
BUDGETS_S = (60.0, 150.0, 300.0)
PERMITS = {"precisions": ("default", "tf32", "bf16", "fp16")}
"""The values that the search may use."""


class TableSpace(Space):
    """The configs that are in a table."""

    def __init__(self, rows: Sequence[Config]) -> None:
        default = rows[0]
        choices: dict[str, tuple[Value, ...]] = {
            name: tuple({repr(row[name]): row[name] for row in rows}.values()) for name in default
        }
        super().__init__(choices)
        self._rows = frozenset(rows)

    def holds(self, config: Config) -> bool:
        """Whether the table has this config."""
        return config in self._rows

    def configs(self, batch: int, feed: Mapping[str, Value] | None = None) -> Iterator[Config]:
        """Yields the table's configs at one batch size."""
        return (config for config in super().configs(batch, feed) if config in self._rows)


@dataclass(frozen=True)
class MeasuredTable:
    """A table to replay. `rows` maps configs to samples/s, in the order of the file."""

    name: str
    file: Path
    rows: dict[Config, float]

    @classmethod
    def read(cls, path: Path, folder: Path) -> MeasuredTable | None:
        """Reads a table and copies its usable rows to `folder`; None if it is not a table."""
        kept: dict[Config, dict[str, Any]] = {}
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("config"), dict):
                return None
            config = _completed(row["config"])
            if config is not None and ("samples_per_s" in row or not row.get("ok", True)):
                kept.setdefault(config, row | {"config": dict(config)})
        names = [frozenset(config) for config in kept]
        kept = {config: row for config, row in kept.items() if frozenset(config) == names[0]}
        file = folder / path.name
        file.write_text("".join(json.dumps(row) + "\n" for row in kept.values()))
        rates = {
            config: float(row["samples_per_s"]) if row.get("ok", True) else 0.0
            for config, row in kept.items()
        }
        return cls(path.stem, file, rates)

    def of(self, *, free: bool) -> dict[Config, float]:
        """Returns the rows at any batch if `free`, else those at the user's batch."""
        own = next(iter(self.rows)).batch
        return {c: rate for c, rate in self.rows.items() if free or c.batch == own}


def _completed(values: dict[str, Value]) -> Config | None:
    """Adds the knobs that a row does not name; None if a knob or value is unknown or forbidden."""
    if any(n not in knobs.BY_NAME or not knobs.BY_NAME[n].holds(v) for n, v in values.items()):
        return None
    config = knobs.TORCH.only(*TABLE_KNOBS) | Config(values)
    return config if knobs.permits(PERMITS, config) else None


TABLE_KNOBS = tuple(name for name in knobs.TORCH if knobs.BY_NAME[name].stage == knobs.COMPUTE)


class GoalProgress(Progress):
    """Records when a config was first verified that is within 1% of the best."""

    def __init__(self, rows: dict[Config, float], now: Callable[[], float]) -> None:
        self._rows, self._now = rows, now
        self._goal = NEAR * max(rows.values())
        self.reached_s: float | None = None

    def visited(self, done: JournaledTrial, what: str, best: Config, left_s: float) -> None:
        """See Progress."""
        reached = max(self._rows[best], self._rows[done.trial.config])
        if self.reached_s is None and reached >= self._goal:
            self.reached_s = self._now()


@dataclass(frozen=True)
class Run:
    """One search: seconds until it verified a config near the best, or None; the speed of the
    advised config as a share of the best; the number of trials."""

    reached_s: float | None
    share: float
    visits: int


def search(table: MeasuredTable, *, free: bool, budget_s: float, noise: float, seed: int) -> Run:
    """Searches a table as `advisor tune` searches a device."""
    rows = table.of(free=free)
    runner = ReplayRunner(table.file, noise=noise, seed=seed)
    progress = GoalProgress(rows, runner.now)
    study = optuna.create_study(direction="maximize")
    options, clock = SearchOptions(seed=seed), Clock(budget_s, now=runner.now)
    record = Tuner(runner, TableSpace(list(rows)), study, options, progress, clock).run()
    use = USES[-1] if "step_graph" in next(iter(rows)) else LOOP
    winners = {(one.use, one.free): one.choice.config for one in record.winners}
    best = winners.get((use, free), winners[use, False])
    return Run(progress.reached_s, rows[best] / max(rows.values()), len(record.trials))


def summary(runs: Sequence[Run]) -> dict[str, float | None]:
    """Aggregates the runs of all seeds."""
    reached = [run.reached_s for run in runs if run.reached_s is not None]
    return {
        "reached": len(reached) / len(runs),
        "seconds": round(statistics.median(reached), 1) if 2 * len(reached) > len(runs) else None,
        "found": round(statistics.fmean(run.share for run in runs), 4),
        "worst": round(min(run.share for run in runs), 4),
        "visits": statistics.median(run.visits for run in runs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--noise", type=float, default=0.005)
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS_S, help="in seconds")
    parser.add_argument("--results", type=Path, help="folder for the results")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    printed = Table("table", "batch", "configs", "budget", "reached", "seconds", box=None)
    for heading in ("found", "worst", "visits"):
        printed.add_column(heading)
    figures: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = sorted(args.folder.glob("*.jsonl"))
        tables_read = {path: MeasuredTable.read(path, Path(folder)) for path in paths}
        for path in (path for path, table in tables_read.items() if table is None):
            print(f"{path.name}: no rows of configs; skipped", file=sys.stderr)
        tables = [table for table in tables_read.values() if table is not None]
        jobs = [(t, kind, s) for t in tables for kind in ("fixed", "free") for s in args.budgets]
        for table, kind, budget_s in track(jobs, console=Console(stderr=True), transient=True):
            settings = {"free": kind == "free", "budget_s": budget_s, "noise": args.noise}
            one = summary([search(table, **settings, seed=seed) for seed in range(args.seeds)])
            figures.setdefault(table.name, {}).setdefault(kind, {})[f"{budget_s:g}s"] = one
            printed.add_row(
                *(table.name, kind, str(len(table.of(free=kind == "free"))), f"{budget_s:g}s"),
                *(f"{one['reached']:.0%}", "-" if one["seconds"] is None else f"{one['seconds']}"),
                *(f"{one[key]:.1%}" for key in ("found", "worst")),
                f"{one['visits']:.0f}",
            )
    if not figures:
        parser.error(f"{args.folder}: no table (*.jsonl with rows of `config`, `samples_per_s`)")
    Console().print(printed)
    if args.results:
        results.append("search_efficiency", {"tables": figures}, args.results)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
