"""The same study on one GPU and on several, with the same budget: trials, and what they found.

    python benchmarks/study_on_gpus.py torchvision:resnet50 --shape 64x3x224x224 --devices cuda:0-1

The winners are then measured in turn, on the first GPU, beside torch's default: whether the study
on several found the same, or better.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import record as results
from compare import Here, raced

import advisor
from advisor.cache.record import CAPTURE, Record, Trial
from advisor.cache.task import Task
from advisor.tuners.environment import devices as named
from advisor.tuners.knobs import described
from advisor.tuners.measure.worker.wire import Job
from advisor.tuners.search.plan import Progress
from advisor.tuners.search.race import paired


class Told(Progress):
    """Prints, and counts what the search tried, and when it tried it last."""

    def __init__(self) -> None:
        self.trials = self.compiled = 0
        self.searched_s = 0.0

    def tried(self, trial: Trial, spent_s: float) -> None:
        self.trials += 1
        self.compiled += trial.config.get("compile", "none") != "none"
        self.searched_s = spent_s
        said = trial.measurement.outcome
        if trial.measurement.ok:
            said = f"{trial.measurement.samples_per_s:,.0f}/s"
            said += ", the host is the limit" * trial.measurement.host_bound
        shown = described(trial.config)
        print(f"{spent_s:6.1f} s  {trial.number}  {shown} at {trial.config.batch}: {said}")

    def phase(self, what: str) -> None:
        print(f"        {what}")

    def notice(self, text: str) -> None:
        print(f"        {text}", flush=True)


def tuned(target: str, shape: str, device: str, budget: str) -> tuple[Record, dict[str, Any]]:
    """One tuning, in a store of its own."""
    told = Told()
    print(f"== {device}", flush=True)
    with tempfile.TemporaryDirectory() as store, tempfile.TemporaryDirectory() as compiled:
        # What the study before has compiled is not there.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{compiled}/inductor"
        os.environ["TRITON_CACHE_DIR"] = f"{compiled}/triton"
        began = time.monotonic()
        found = advisor.tune(
            target, shape, device=device, budget=budget, cache=f"dir:{store}", progress=told
        )
        took_s = time.monotonic() - began
    record = found.record
    choice = record.winner(CAPTURE)
    row = {
        "device": device,
        "trials": told.trials,
        "compiled": told.compiled,
        "trials_per_minute": 60 * told.trials / told.searched_s,
        "took_s": took_s,
        "config": dict(choice.config),
        "samples_per_s": choice.samples_per_s,
        "x_default": choice.speedup,
    }
    print(
        f"{device}: {told.trials} trials, {told.compiled} compiled, "
        f"{row['trials_per_minute']:.1f} a minute, took {took_s:.0f} s: "
        f"{described(choice.config, record.baseline.config)} {choice.speedup:.2f}x",
        flush=True,
    )
    return record, row


@click.command(help=__doc__)
@click.argument("target", default="torchvision:resnet50")
@click.option("--shape", default="64x3x224x224")
@click.option("--devices", default="cuda:0-1", help="Those of the second study.")
@click.option("--budget", default="75s", help="Of each.")
@click.option("--seconds", default=20.0, help="Of turns, at the end.")
@click.option("--results", "folder", type=click.Path(path_type=Path), default=results.RESULTS)
def main(target: str, shape: str, devices: str, budget: str, seconds: float, folder: Path) -> None:
    first = named(devices)[0]
    rows = []
    for device in (first, devices):
        record, row = tuned(target, shape, device, budget)
        rows.append((record.winner(CAPTURE).config, row))
    default = record.baseline.config
    runner = Here(Job(task=Task.of(target, {"shape": shape}), device=first, seed=0))
    turns = raced(runner, list(dict.fromkeys([default, *(config for config, _ in rows)])), seconds)
    for config, row in rows:
        ratio = paired(turns[config], turns[default])
        row |= {"again_x_default": ratio.mean, "low": ratio.low, "high": ratio.high}
        print(f"{row['device']}: {statistics.median(turns[config]):,.0f}/s, {ratio.mean:.3f}x")
    (one, _), (several, _) = rows
    ratio = paired(turns[several], turns[one])
    print(f"several over one: {ratio.mean:.3f}x ({ratio.low:.3f}-{ratio.high:.3f})")
    results.append(
        "study_on_gpus",
        {
            "target": target,
            "shape": shape,
            "budget": budget,
            "studies": [row for _, row in rows],
            "same_winner": one == several,
            "several_over_one": ratio.mean,
            "low": ratio.low,
            "high": ratio.high,
        },
        folder,
    )


if __name__ == "__main__":
    main()
