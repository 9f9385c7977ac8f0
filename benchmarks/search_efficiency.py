"""How much measuring the search needs, replayed from measured tables.

    python benchmarks/search_efficiency.py FOLDER --plot search_efficiency.png

Every *.jsonl in FOLDER whose rows hold `config` and `samples_per_s` (or `ok: false`) takes the
place of a device; the first row is torch's default at the user's batch. The search, the race of
the finalists and the verdict are those of `advisor tune`; only the worker is swapped for the
table, its numbers blurred by --noise, and the clock for one that counts what measuring would have
taken: a row's first step, three steps to settle, and blocks of 0.1 s or a step, six of them, five
where the config is hopeless. A first step that compiles is QUICKER once the same code was compiled;
"advisor" builds AT_ONCE codes in the time of the slowest, "advisor one by one" none before it is
measured. Against it: Optuna's random and default TPE samplers over the same choices, and a pass
over the whole table.

`share`: seconds until a config within 1% of the best was measured, over those of a pass over all
configs that were to choose from; where torch's default and one guess are all that was measured, a
table of N configs cannot give less than about 2/N; 1 where it was not found before such a pass
would have ended. `of the table` divides by the pass over all
batches instead. `seconds`: until then, in the median. `compiled`: configs that compile, measured
before the race. `regret`: how far the config returned in the end, by the table's own number, is
below the best; with the batch free, below what the rule asks for: 97% of the fastest. Prints a
table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import optuna
import record as results
from rich.console import Console
from rich.progress import track
from rich.table import Table

from advisor.cache.config import Config, Value
from advisor.cache.record import RACED, Measurement
from advisor.tuners.decide.finalists import finalists
from advisor.tuners.decide.race import race
from advisor.tuners.decide.winners import FREE_WITHIN, choose
from advisor.tuners.knobs import BY_NAME, code, compiles
from advisor.tuners.measure.runner import Built, ReplayRunner
from advisor.tuners.measure.timing import BLOCK_S, HOPELESS_BLOCKS, MIN_BLOCKS, WARM_STEPS
from advisor.tuners.search.ahead import QUICKER
from advisor.tuners.search.journal import open_study
from advisor.tuners.search.plan import RACE, RESERVE, Clock, Plan
from advisor.tuners.search.space import Space
from advisor.tuners.search.study import Scope, Search

NEAR = 0.99
BUDGET_S = Plan(effort="exhaustive").seconds
AT_ONCE = 6
"""Builds at once: as many as 16 cores and 140 GB are given of ResNet-50."""
START_S = 8.0
"""Of a process that builds: it imports PyTorch and runs a step as it is."""
FREE_TRIALS = 300
"""At which Optuna's samplers end where they have not found the best before."""


class TableSpace(Space):
    """The configs of a table, and nothing else."""

    def __init__(self, rows: list[Config]) -> None:
        names = sorted({name for config in rows for name in config})
        default = rows[0]
        choices: dict[str, tuple[Value, ...]] = {}
        for name in names:
            seen = [config[name] for config in rows if name in config]
            first = [default[name]] if name in default else []
            choices[name] = tuple({repr(v): v for v in [*first, *seen]}.values())
        dear = [name for name in names if name in BY_NAME and BY_NAME[name].dear]
        conflicts = {name: BY_NAME[name].conflicts for name in names if name in BY_NAME}
        super().__init__(choices, dear=dear, conflicts=conflicts)
        self._rows = dict.fromkeys(rows)

    def holds(self, config: Config) -> bool:
        return config in self._rows

    def configs(self, batch: int, *, dear: bool = False) -> Iterator[Config]:
        for config in self._rows:
            if config.batch == batch and (dear or not self.is_dear(config)):
                yield config


class Clocked(ReplayRunner):
    """Replays, and adds up what measuring would have taken."""

    def __init__(self, table: Path, *, noise: float, seed: int, at_once: int = 1) -> None:
        super().__init__(table, noise=noise, seed=seed)
        self._at_once = at_once
        # What some rows leave out is torch's default there: None, so that every row has all knobs.
        names = {name for config in self._rows for name in config}
        bare = Config(dict.fromkeys(names))
        self._rows = {bare | config: row for config, row in self._rows.items()}
        self.time = 0.0
        self.log: list[tuple[float, Config]] = []
        self.compiled = 0
        self._built: set[Config] = set()
        self._compiled: set[Config] = set()

    def now(self) -> float:
        return self.time

    def rate(self, config: Config) -> float:
        """The table's own number; 0 for what did not run."""
        row = self._rows[config]
        return float(str(row["samples_per_s"])) if row.get("ok", True) else 0.0

    def first_step_s(self, config: Config) -> float:
        """Seconds, as they fall now."""
        first_s = float(str(self._rows[config].get("first_step_s", 0.0)))
        return first_s / QUICKER if code(config) in self._compiled else first_s

    def room(self, peak_bytes: int) -> int:
        return self._at_once

    def build(
        self, configs: Sequence[Config], *, room: int, deadline_s: float
    ) -> dict[Config, Built]:
        del room
        built = {}
        for config in configs:
            first_s = self.first_step_s(config)
            late = START_S + first_s > deadline_s
            outcome = "timed_out" if late else "ok" if self.rate(config) else "out_of_memory"
            measured = Measurement(outcome=outcome, first_step_s=first_s)
            seconds = min(deadline_s, START_S + first_s)
            built[config] = Built(measurement=measured, seconds=seconds)
        self._compiled |= {code(config) for config, one in built.items() if one.measurement.ok}
        self.time += max(one.seconds for one in built.values())
        return built

    def cost(self, config: Config, *, floor: float = 0.0) -> float:
        """Seconds of one trial."""
        row = self._rows[config]
        first = self.first_step_s(config)
        if not row.get("ok", True):
            return first
        step_s = config.batch / self.rate(config)
        blocks = HOPELESS_BLOCKS if self.rate(config) < floor else MIN_BLOCKS
        return first + WARM_STEPS * step_s + blocks * max(BLOCK_S, step_s)

    def measure(
        self,
        config: Config,
        *,
        seconds: float,
        stage: str = "compute",
        keep: bool = False,
        floor: float = 0.0,
        deadline_s: float | None = None,
    ) -> Measurement:
        measured = super().measure(config, seconds=seconds)
        if measured.ok:
            measured = replace(measured, first_step_s=self.first_step_s(config))
        if not keep:
            self.time += self.cost(config, floor=floor)
        else:  # a turn of the race
            step_s = measured.step_s if measured.ok else 0.0
            self.time += max(seconds, step_s) + step_s
            if config not in self._built:
                self.time += self.first_step_s(config)
        self._built.add(config)
        if measured.ok and compiles(config):
            self._compiled.add(code(config))
        self.log.append((self.time, config))
        return measured


@dataclass(frozen=True)
class Question:
    """A table at the batch of its first row, or with the batch free."""

    table: Path
    free: bool
    noise: float
    budget_s: float = BUDGET_S

    def runner(self, seed: int, at_once: int = 1) -> Clocked:
        return Clocked(self.table, noise=self.noise, seed=seed, at_once=at_once)

    def rows(self, runner: Clocked) -> list[Config]:
        rows = runner.configs()
        return [c for c in rows if self.free or c.batch == rows[0].batch]

    def reached(self, runner: Clocked) -> float:
        """Seconds until a config within 1% of the best was measured."""
        best = max(map(runner.rate, self.rows(runner)))
        return next((t for t, config in runner.log if runner.rate(config) >= NEAR * best), math.inf)

    def regret(self, runner: Clocked, returned: Config) -> float:
        asked = max(map(runner.rate, self.rows(runner))) * (FREE_WITHIN if self.free else 1)
        return max(0.0, 1 - runner.rate(returned) / asked)


def by_advisor(
    question: Question,
    seed: int,
    sampler: optuna.samplers.BaseSampler | None = None,
    first: Sequence[Config] = (),
    at_once: int = AT_ONCE,
) -> tuple[Clocked, Config]:
    """As advisor.tuning does; `first`: what was best for near records."""
    runner = question.runner(seed, at_once)
    space = TableSpace(question.rows(runner))
    clock = Clock(question.budget_s, now=runner.now)
    scope = Scope(clock=clock, seed=seed, first=first, sampler=sampler, builder=runner)
    with tempfile.TemporaryDirectory() as folder:
        search = Search(runner, space, open_study(Path(folder), "replay")[0], scope)
        trials = search.run()
    runner.compiled = sum(space.is_dear(trial.config) for trial in trials)
    rates = race(runner, finalists(space, trials), clock.part(RACE, reserve=RESERVE))
    peaks = {trial.config: trial.measurement.peak_bytes for trial in trials}
    return runner, choose(space, rates, peaks).winner(RACED[-1], free=question.free).config


def by_advisor_alone(question: Question, seed: int) -> tuple[Clocked, Config]:
    """The same where one process compiles at a time, as each is measured."""
    return by_advisor(question, seed, at_once=1)


def by_advisor_with_tpe(question: Question, seed: int) -> tuple[Clocked, Config]:
    """The same search, its last stage by Optuna's TPE, which is kept from dear knobs: it does not
    count what they cost."""

    tpe = optuna.samplers.TPESampler(seed=seed, n_startup_trials=8, multivariate=True)
    return by_advisor(question, seed, tpe)


def by_optuna(
    question: Question, seed: int, sampler: optuna.samplers.BaseSampler
) -> tuple[Clocked, Config]:
    """A study as a user of Optuna writes it: ask, measure, tell; the best trial is returned."""
    runner = question.runner(seed)
    rows = question.rows(runner)
    space = TableSpace(rows)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    seen: dict[Config, float] = {}
    pass_s = sum(map(runner.cost, rows))
    for _ in range(FREE_TRIALS):
        trial = study.ask()
        values = {n: trial.suggest_categorical(n, list(v)) for n, v in space.choices.items()}
        config = Config(values)
        if not space.holds(config):
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        measured = runner.measure(config, seconds=2.0)
        seen[config] = measured.samples_per_s
        study.tell(trial, measured.samples_per_s)
        if runner.time > min(pass_s, question.budget_s):
            break
    runner.compiled = sum(map(space.is_dear, seen))
    return runner, max(seen, key=lambda config: seen[config]) if seen else rows[0]


def by_random(question: Question, seed: int) -> tuple[Clocked, Config]:
    return by_optuna(question, seed, optuna.samplers.RandomSampler(seed=seed))


def by_tpe(question: Question, seed: int) -> tuple[Clocked, Config]:
    return by_optuna(question, seed, optuna.samplers.TPESampler(seed=seed))


def by_pass(question: Question, seed: int) -> tuple[Clocked, Config]:
    """All configs, in an order drawn by the seed, as nobody knows which way round is lucky."""
    runner = question.runner(seed)
    rows = question.rows(runner)
    random.Random(seed).shuffle(rows)
    rates = {config: runner.measure(config, seconds=2.0).samples_per_s for config in rows}
    return runner, max(rates, key=lambda config: rates[config])


METHODS: dict[str, Callable[[Question, int], tuple[Clocked, Config]]] = {
    "advisor": by_advisor,
    "advisor one by one": by_advisor_alone,
    "advisor with TPE": by_advisor_with_tpe,
    "Optuna TPE": by_tpe,
    "Optuna random": by_random,
    "exhaustive": by_pass,
}


def ask(question: Question, method: str, seeds: int) -> dict[str, object]:
    shares, of_table, regrets, trials, seconds, compiled = [], [], [], [], [], []
    for seed in range(seeds):
        runner, returned = METHODS[method](question, seed)
        fresh = question.runner(seed)
        pass_s = sum(map(fresh.cost, question.rows(fresh)))
        all_s = sum(map(fresh.cost, fresh.configs()))
        reached = question.reached(runner)
        shares.append(min(1.0, reached / pass_s))  # 1: not before a pass would have ended
        of_table.append(min(1.0, reached / all_s))
        regrets.append(question.regret(runner, returned))
        trials.append(len({config for _, config in runner.log}))
        seconds.append(reached)
        compiled.append(runner.compiled)
    middle = statistics.median(seconds)
    return {
        "share_to_1pct": round(statistics.median(shares), 4),
        "share_of_table": round(statistics.median(of_table), 4),
        "missed": sum(share == 1.0 for share in shares) / seeds,
        "regret_p90": round(sorted(regrets)[math.ceil(0.9 * seeds) - 1], 4),
        "configs_measured": statistics.median(trials),
        "seconds_to_1pct": round(middle, 1) if middle < math.inf else None,
        "compiled": statistics.median(compiled),
        "shares": sorted(shares),
    }


def readable(path: Path) -> bool:
    """Whether a file holds rows of configs; the benchmark knows no table by its name."""
    first = next(iter(path.read_text().splitlines()), "{}")
    try:
        return {"config"} <= json.loads(first).keys()
    except (ValueError, AttributeError):
        return False


def draw(found: dict[str, dict[str, dict[str, dict[str, object]]]], path: Path) -> None:
    """Cumulative shares of seeds, by the measuring time it took to come within 1%."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2, len(found), figsize=(3.6 * len(found), 6), sharey=True, squeeze=False
    )
    for column, (table, kinds) in enumerate(found.items()):
        for row, (kind, methods) in enumerate(kinds.items()):
            axis = axes[row][column]
            for name, figures in methods.items():
                shares = figures["shares"]
                assert isinstance(shares, list)
                heights = [(i + 1) / len(shares) for i in range(len(shares))]
                axis.step(shares, heights, where="post", label=name)
            axis.axvline(0.05, color="grey", linewidth=0.8, linestyle=":")
            axis.set(xscale="log", xlim=(0.005, 1.5), title=f"{table}, batch {kind}")
            axis.set_xlabel("share of the exhaustive measuring time")
    axes[0][0].set_ylabel("seeds within 1% of the best")
    axes[1][0].set_ylabel("seeds within 1% of the best")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=70)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--noise", type=float, default=0.005)
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of each search")
    parser.add_argument("--methods", default=",".join(METHODS), help="with commas between")
    parser.add_argument("--plot", type=Path, help="PNG or SVG (needs matplotlib)")
    parser.add_argument("--results", type=Path, help="folder to append the figures to")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    methods = given.methods.split(",")
    if set(methods) - set(METHODS) or given.seeds < 1:
        parser.error(f"--methods: some of {', '.join(METHODS)}; --seeds: at least 1")
    tables = [path for path in sorted(given.folder.glob("*.jsonl")) if readable(path)]
    for path in sorted(set(given.folder.glob("*.jsonl")) - set(tables)):
        print(f"{path.name}: no rows of configs; skipped", file=sys.stderr)
    if not tables:
        parser.error(f"{given.folder}: no table (*.jsonl with rows of `config`, `samples_per_s`)")
    out = Console()
    shown = Table("table", "batch", "configs", "method", "share", "of the table", box=None)
    for heading in ("missed", "regret p90", "measured", "compiled", "seconds"):
        shown.add_column(heading)
    found: dict[str, dict[str, dict[str, dict[str, object]]]] = {}
    jobs = [(path, kind, name) for path in tables for kind in ("fixed", "free") for name in methods]
    for path, kind, name in track(jobs, console=Console(stderr=True), transient=True):
        question = Question(path, free=kind == "free", noise=given.noise, budget_s=given.budget)
        figures = ask(question, name, given.seeds)
        found.setdefault(path.stem, {}).setdefault(kind, {})[name] = figures
        shown.add_row(
            path.stem,
            kind,
            str(len(question.rows(question.runner(0)))),
            name,
            *(f"{figures[key]:.1%}" for key in ("share_to_1pct", "share_of_table")),
            *(f"{figures[key]:.1%}" for key in ("missed", "regret_p90")),
            *(f"{figures[key]:.0f}" for key in ("configs_measured", "compiled")),
            f"{figures['seconds_to_1pct'] or math.inf:.0f}",
        )
    out.print(shown)
    if given.plot:
        draw(found, given.plot)
    ours = {
        table: {
            kind: {key: by[methods[0]][key] for key in ("share_to_1pct", "regret_p90")}
            for kind, by in kinds.items()
        }
        for table, kinds in found.items()
    }
    if given.results:
        brief = {
            table: {
                kind: {
                    name: {k: v for k, v in figures.items() if k != "shares"}
                    for name, figures in by.items()
                }
                for kind, by in kinds.items()
            }
            for table, kinds in found.items()
        }
        results.append("search_efficiency", {"tables": brief}, given.results)
    print(json.dumps(ours))
    return 0


if __name__ == "__main__":
    sys.exit(main())
