"""torch's default, the usual guide and the winner for each use in one process, measured in turn.

Those at the user's batch together; each at another batch beside the default alone, as two of these
need not fit in memory at once.

    python benchmarks/compare.py torchvision:resnet50 --shape 64x3x224x224

Tune the target first, with the same options: the record is looked up as a training script would.
Prints samples/s and the ratios to torch's default with their 95% intervals beside what the record
claims, and appends them to benchmarks/results/.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import click
import record as results

import advisor
from advisor.cache.config import Config
from advisor.cache.record import Choice, Measurement, Record
from advisor.cache.task import Task
from advisor.cli.options import collected, row_options
from advisor.finding.answer import unverified
from advisor.tuners.decide.race import TURN_S, paired, race
from advisor.tuners.knobs import described
from advisor.tuners.measure.worker.child import Bench
from advisor.tuners.measure.worker.wire import Job
from advisor.tuners.search.plan import Clock

Rates = dict[Config, tuple[list[float], list[float]]]
"""Samples/s of each turn: a config's, and the default's beside it."""

GUIDE = {"precision": "bf16", "channels_last": True, "cudnn_benchmark": True}


class Here:
    """A Runner in this very process: no worker, as in a training script."""

    def __init__(self, job: Job) -> None:
        self._bench = Bench(job)

    def measure(self, config: Config, *, seconds: float, keep: bool, **_more: Any) -> Measurement:
        return self._bench.measure(config, seconds, "compute", keep)

    def release(self) -> None:
        self._bench.release()


def compared(held: Record, free: bool) -> dict[str, Choice | Config]:
    """What is measured: the default, the guide, and what the record has for each use."""
    default = held.baseline.config
    known = {name: value for name, value in GUIDE.items() if name in default}
    found: dict[str, Choice | Config] = {
        "default": held.baseline,
        "guide": default.replace(**known),
    }
    for one in held.winners:
        if free or not one.free:
            found[f"{one.use}{', batch free' * one.free}"] = one.choice
    return found


def raced(runner: Here, configs: list[Config], seconds: float) -> dict[Config, list[float]]:
    """Samples/s of each turn; the first config is the default.

    All are built before the first turn, as a race leaves out what is not built in time. One that
    fails takes those built before it out of memory: they are built again, without it.
    """
    default = configs[0]
    while True:
        failed = []
        for config in configs:
            built = runner.measure(config, seconds=TURN_S, keep=True)
            if not built.ok:
                failed.append(config)
                print(f"failed: {described(config, default)}: {built.reason}", flush=True)
        if default in failed:
            raise SystemExit("torch's default does not run")
        if not failed:
            return race(runner, configs, Clock(seconds).part(), drop=False)
        configs = [config for config in configs if config not in failed]


def told(held: Record, name: str, one: Choice | Config, rates: Rates) -> dict[str, Any]:
    """Print one config's line, and return its row."""
    default = held.baseline.config
    config = one.config if isinstance(one, Choice) else one
    if config not in rates:
        print(f"{name:<20} did not run", flush=True)
        return {"config": dict(config), "turns": []}
    ours, theirs = rates[config]
    ratio, rate = paired(ours, theirs), statistics.median(ours)
    row = {
        "config": dict(config),
        "samples_per_s": rate,
        "turns": ours,
        "default_turns": theirs,
        "x_default": ratio.mean,
        "low": ratio.low,
        "high": ratio.high,
    }
    claim = doubt = ""
    if isinstance(one, Choice):
        doubt = unverified(held, config)
        row |= {
            "claimed_samples_per_s": one.samples_per_s,
            "claimed_x_default": one.speedup,
            "unverified": doubt.removeprefix("; "),
        }
        claim = f"   claimed {one.speedup:.3f}x, absolute {rate / one.samples_per_s - 1:+.1%}"
    print(
        f"{name:<20} {rate:>12,.1f} samples/s   {ratio.mean:.3f}x "
        f"({ratio.low:.3f}-{ratio.high:.3f}){claim}   {described(config, default)}{doubt}",
        flush=True,
    )
    return row


@click.command(help=__doc__)
@click.argument("target")
@row_options(Task)
@click.option("--turns", type=float, default=90.0, help="Seconds for all turns.")
@click.option("--free", is_flag=True, help="Also the winners with the batch free.")
@click.option("--results", "folder", type=Path, default=results.RESULTS)
def main(target: str, turns: float, free: bool, folder: Path, **options: Any) -> None:
    given = collected(Task, options)
    task = Task.of(target, given)
    held = advisor.lookup(target, strict=True, capture=True, **given).record
    assert held is not None
    default = held.baseline.config
    named = compared(held, free)
    configs = {n: one.config if isinstance(one, Choice) else one for n, one in named.items()}
    distinct = dict.fromkeys(configs.values())
    races = [[config for config in distinct if config.batch == default.batch]]
    races += [[default, config] for config in distinct if config.batch != default.batch]
    device = "cpu" if held.key.environment.device.kind == "cpu" else "cuda:0"
    runner = Here(Job(task=dataclasses.replace(task, device=device), device=device, seed=1))
    rates: Rates = {}
    rows: dict[str, dict[str, Any]] = {}
    for together in races:
        seen = raced(runner, together, turns / len(races))
        for config in together:
            if config in seen:
                rates.setdefault(config, (seen[config], seen[default]))
        for name, config in configs.items():
            if config in together and name not in rows:
                rows[name] = told(held, name, named[name], rates)
    path = results.append(
        "compare",
        {
            "target": target,
            "shape": task.inputs,
            "batch": task.batch,
            "rows": rows,
            "record": held.id,
            "tuned_s": held.provenance.seconds,
            "budget_s": held.provenance.budget_s,
        },
        folder,
    )
    print(f"appended to {path.name}")


if __name__ == "__main__":
    main()
