"""How much time a search needs, replayed from measured tables.

    python benchmarks/search_efficiency.py FOLDER --seeds 20

Every *.jsonl in FOLDER whose rows hold `config` and `samples_per_s` (or `ok: false`) takes the
place of a device; its first row is torch's default at the user's batch. Visits, race and verdict
are those of `advisor tune`; only the place is swapped for the table, whose numbers are blurred by
--noise, and the clock for one that counts what measuring would have taken. Rows with knobs or
values that are not known or that the task does not permit are left out; a knob that a row leaves
out has torch's own value.

`reached`: share of the seeds that verified a config within 1% of the table's best within the
budget; `seconds`: until then, in the median; `found`: samples/s of what was advised, by the table's
own number, as a share of the table's best, in the mean and at worst. With the batch free the rule
asks for the smallest batch that is about as fast as any. Prints a table, then one line of JSON.
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
from replay import ReplayPlace
from rich.console import Console
from rich.progress import track
from rich.table import Table

from advisor.cache.config import Config, Value
from advisor.cache.record import LOOP, RACED
from advisor.tuners import knobs
from advisor.tuners.search.journal import JournaledTrial
from advisor.tuners.search.plan import Clock, Progress
from advisor.tuners.search.space import Space
from advisor.tuners.search.tuner import SearchOptions, Tuner

NEAR = 0.99
BUDGETS_S = (60.0, 150.0, 300.0)
PERMITS = {"precisions": ("default", "tf32", "bf16", "fp16")}
"""What the task of a table permits."""


class TableSpace(Space):
    """The configs of a table, and nothing else."""

    def __init__(self, rows: Sequence[Config]) -> None:
        default = rows[0]
        choices: dict[str, tuple[Value, ...]] = {
            name: tuple({repr(row[name]): row[name] for row in rows}.values()) for name in default
        }
        super().__init__(choices)
        self._rows = frozenset(rows)

    def holds(self, config: Config) -> bool:
        """Whether the table has it."""
        return config in self._rows

    def configs(self, batch: int, feed: Mapping[str, Value] | None = None) -> Iterator[Config]:
        """Those of the table at one batch."""
        return (config for config in super().configs(batch, feed) if config in self._rows)


@dataclass(frozen=True)
class Measured:
    """A table as it is replayed: rows in the order of the file, by config."""

    name: str
    file: Path
    rows: dict[Config, float]

    @classmethod
    def read(cls, path: Path, folder: Path) -> Measured | None:
        """A table, and a copy of its rows that can be replayed; None where it has none."""
        kept: dict[Config, dict[str, Any]] = {}
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("config"), dict):
                return None
            config = _whole(row["config"])
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
        """Those at the user's batch, or at all."""
        own = next(iter(self.rows)).batch
        return {c: rate for c, rate in self.rows.items() if free or c.batch == own}


def _whole(given: dict[str, Value]) -> Config | None:
    """A row's config with all knobs of tables; None where it is not permitted, or unknown."""
    if any(n not in knobs.BY_NAME or not knobs.BY_NAME[n].holds(v) for n, v in given.items()):
        return None
    config = knobs.TORCH.only(*TABLED) | Config(given)
    return config if knobs.permits(PERMITS, config) else None


TABLED = tuple(name for name in knobs.TORCH if knobs.BY_NAME[name].stage == knobs.COMPUTE)


class Verified(Progress):
    """When a config that is known to be right came near the best."""

    def __init__(self, rows: dict[Config, float], now: Callable[[], float]) -> None:
        self._rows, self._now = rows, now
        self._goal = NEAR * max(rows.values())
        self.reached_s: float | None = None

    def visited(self, done: JournaledTrial, what: str, best: Config, left_s: float) -> None:
        """A visit is over."""
        reached = max(self._rows[best], self._rows[done.trial.config])
        if self.reached_s is None and reached >= self._goal:
            self.reached_s = self._now()


@dataclass(frozen=True)
class Run:
    """One search: seconds until it verified a config near the best, None for never; what it found
    as a share of the best; how many visits it made."""

    reached_s: float | None
    found: float
    visits: int


def search(table: Measured, *, free: bool, budget_s: float, noise: float, seed: int) -> Run:
    """One search of a table, as `advisor tune` makes it."""
    rows = table.of(free=free)
    place = ReplayPlace(table.file, noise=noise, seed=seed)
    heard = Verified(rows, place.now)
    study = optuna.create_study(direction="maximize")
    scope, clock = SearchOptions(seed=seed), Clock(budget_s, now=place.now)
    found = Tuner(place, TableSpace(list(rows)), study, scope, heard, clock).run()
    use = RACED[-1] if "step_graph" in next(iter(rows)) else LOOP
    winners = {(one.use, one.free): one.choice.config for one in found.winners}
    best = winners.get((use, free), winners[use, False])
    return Run(heard.reached_s, rows[best] / max(rows.values()), len(found.trials))


def summary(runs: Sequence[Run]) -> dict[str, float | None]:
    """Over seeds."""
    reached = [run.reached_s for run in runs if run.reached_s is not None]
    return {
        "reached": len(reached) / len(runs),
        "seconds": round(statistics.median(reached), 1) if 2 * len(reached) > len(runs) else None,
        "found": round(statistics.fmean(run.found for run in runs), 4),
        "worst": round(min(run.found for run in runs), 4),
        "visits": statistics.median(run.visits for run in runs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--noise", type=float, default=0.005)
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS_S, help="seconds each")
    parser.add_argument("--results", type=Path, help="folder to append the figures to")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    shown = Table("table", "batch", "configs", "budget", "reached", "seconds", box=None)
    for heading in ("found", "worst", "visits"):
        shown.add_column(heading)
    told: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = sorted(given.folder.glob("*.jsonl"))
        read = {path: Measured.read(path, Path(folder)) for path in paths}
        for path in (path for path, table in read.items() if table is None):
            print(f"{path.name}: no rows of configs; skipped", file=sys.stderr)
        tables = [table for table in read.values() if table is not None]
        jobs = [(t, kind, s) for t in tables for kind in ("fixed", "free") for s in given.budgets]
        for table, kind, budget_s in track(jobs, console=Console(stderr=True), transient=True):
            how = {"free": kind == "free", "budget_s": budget_s, "noise": given.noise}
            one = summary([search(table, **how, seed=seed) for seed in range(given.seeds)])
            told.setdefault(table.name, {}).setdefault(kind, {})[f"{budget_s:g}s"] = one
            shown.add_row(
                *(table.name, kind, str(len(table.of(free=kind == "free"))), f"{budget_s:g}s"),
                *(f"{one['reached']:.0%}", "-" if one["seconds"] is None else f"{one['seconds']}"),
                *(f"{one[key]:.1%}" for key in ("found", "worst")),
                f"{one['visits']:.0f}",
            )
    if not told:
        parser.error(f"{given.folder}: no table (*.jsonl with rows of `config`, `samples_per_s`)")
    Console().print(shown)
    if given.results:
        results.append("search_efficiency", {"tables": told}, given.results)
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
