"""The same study on one GPU and on several, with the same budget: trials, and what they found.

    python benchmarks/study_on_gpus.py torchvision:resnet50 --shape 64x3x224x224 --devices cuda:0-1

Both run at the same time where the one GPU is none of the several; compilers of one then run beside
trials of the other. The winners are measured in turn afterwards, on the first GPU, beside torch's
default: whether the study on several found the same, or better.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import record as results
from compare import Here, raced

import advisor
from advisor.cache.config import Config
from advisor.cache.record import CAPTURE, Trial
from advisor.cache.task import Task
from advisor.tuners.decide.race import paired
from advisor.tuners.environment import devices as named
from advisor.tuners.knobs import described
from advisor.tuners.measure.worker.wire import Job
from advisor.tuners.search.plan import Progress


class Told(Progress):
    """Prints, and counts what the search tried, and when it tried it last."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.trials = self.compiled = 0
        self.searched_s = 0.0

    def say(self, text: str) -> None:
        print(f"{self.device}: {text}", flush=True)

    def tried(self, trial: Trial, spent_s: float) -> None:
        self.trials += 1
        self.compiled += trial.config.get("compile", "none") != "none"
        self.searched_s = spent_s
        said = trial.measurement.outcome
        if trial.measurement.ok:
            said = f"{trial.measurement.samples_per_s:,.0f}/s"
            if trial.measurement.busy:
                said += f", busy {trial.measurement.busy:.0%}"
        shown = f"{described(trial.config)} at {trial.config.batch}"
        took = f"{trial.origin}, {trial.seconds:.1f} s"
        self.say(f"{spent_s:6.1f} s  {trial.number}  {shown}: {said} ({took})")

    def phase(self, what: str) -> None:
        self.say(what)

    def notice(self, text: str) -> None:
        self.say(text)


def tuned(target: str, shape: str, device: str, budget: str) -> dict[str, Any]:
    """One tuning, in a process and a store of its own."""
    told = Told(device)
    with tempfile.TemporaryDirectory() as store, tempfile.TemporaryDirectory() as compiled:
        # What another study has compiled is not there.
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
        "searched_s": told.searched_s,
        "took_s": took_s,
        "default": dict(record.baseline.config),
        "config": dict(choice.config),
        "samples_per_s": choice.samples_per_s,
        "x_default": choice.speedup,
    }
    told.say(
        f"{told.trials} trials in {told.searched_s:.0f} s, {told.compiled} compiled, "
        f"{row['trials_per_minute']:.1f} a minute, took {took_s:.0f} s: "
        f"{described(choice.config, record.baseline.config)} {choice.speedup:.2f}x"
    )
    return row


@click.command(help=__doc__)
@click.argument("target", default="torchvision:resnet50")
@click.option("--shape", default="64x3x224x224")
@click.option("--devices", default="cuda:0-1", help="Those of one study.")
@click.option("--alone", help="That of the other; default: the first of these, after them.")
@click.option("--budget", default="210s", help="Of each.")
@click.option("--seconds", default=20.0, help="Of turns, at the end.")
@click.option("--results", "folder", type=click.Path(path_type=Path), default=results.RESULTS)
def main(
    target: str,
    shape: str,
    devices: str,
    alone: str | None,
    budget: str,
    seconds: float,
    folder: Path,
) -> None:
    shared = alone is None or alone in named(devices)
    first = named(devices)[0]
    with ProcessPoolExecutor(
        1 if shared else 2, get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        studies = [
            pool.submit(tuned, target, shape, device, budget)
            for device in (devices, alone or first)
        ]
        rows = [study.result() for study in studies]
    default, several, one = (
        Config(found) for found in (rows[0]["default"], *(row["config"] for row in rows))
    )
    runner = Here(Job(task=Task.of(target, {"shape": shape}), device=first, seed=0))
    turns = raced(runner, list(dict.fromkeys([default, several, one])), seconds)
    for config, row in zip((several, one), rows, strict=True):
        ratio = paired(turns[config], turns[default])
        row |= {"again_x_default": ratio.mean, "low": ratio.low, "high": ratio.high}
        print(f"{row['device']}: {statistics.median(turns[config]):,.0f}/s, {ratio.mean:.3f}x")
    ratio = paired(turns[several], turns[one])
    more = rows[0]["trials_per_minute"] / rows[1]["trials_per_minute"]
    print(
        f"several over one: {more:.2f}x the trials a minute, "
        f"{'the same winner' if several == one else 'another winner'}, "
        f"{ratio.mean:.3f}x as fast ({ratio.low:.3f}-{ratio.high:.3f})"
    )
    results.append(
        "study_on_gpus",
        {
            "target": target,
            "shape": shape,
            "budget": budget,
            "at_once": not shared,
            "studies": rows,
            "trials_several_over_one": more,
            "same_winner": several == one,
            "several_over_one": ratio.mean,
            "low": ratio.low,
            "high": ratio.high,
        },
        folder,
    )


if __name__ == "__main__":
    main()
