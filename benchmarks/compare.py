"""torch's default, the usual guide and the winner for each use in one process, measured in turn.

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
from advisor.tuners.knobs import described
from advisor.tuners.measure.worker.child import Bench
from advisor.tuners.measure.worker.wire import Job
from advisor.tuners.search.plan import Clock
from advisor.tuners.search.race import paired_ratio, race

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
    named = compared(held, free)
    configs = {n: one.config if isinstance(one, Choice) else one for n, one in named.items()}
    device = "cpu" if held.key.environment.device.kind == "cpu" else "cuda:0"
    runner = Here(Job(task=dataclasses.replace(task, device=device), device=device, seed=1))
    rates = race(runner, list(configs.values()), Clock(turns).part(), drop=False)
    rows = {}
    for name, config in configs.items():
        seen = rates.get(config)
        if not seen:
            print(f"{name:<20} did not run")
            continue
        reference = rates[configs["default"]]
        common = min(len(seen), len(reference))
        ratio = paired_ratio(seen[:common], reference[:common])
        row = {
            "config": dict(config),
            "samples_per_s": statistics.median(seen),
            "turns": seen,
            "x_default": ratio.mean,
            "low": ratio.low,
            "high": ratio.high,
        }
        claim = ""
        one = named[name]
        if isinstance(one, Choice):
            row |= {"claimed_samples_per_s": one.samples_per_s, "claimed_x_default": one.speedup}
            off = statistics.median(seen) / one.samples_per_s - 1
            claim = f"   claimed {one.speedup:.3f}x, absolute {off:+.1%}"
        rows[name] = row
        print(
            f"{name:<20} {statistics.median(seen):>12,.1f} samples/s   {ratio.mean:.3f}x "
            f"({ratio.low:.3f}-{ratio.high:.3f}){claim}   {described(config, configs['default'])}"
        )
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
