"""What is told to be done: one thing, and one that helps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Choice, Measurement, Record, Trial
from advisor.cache.task import Task
from advisor.frameworks.tables import hf
from advisor.report import tables
from advisor.report.sections import report
from advisor.report.text import ratios
from advisor.tuners import fp8
from tests.cache.examples import DEFAULT, KEY, TASK, choice, record, trial, winners
from tests.face.commands import SHAPE, advisor

RUN = dataclasses.replace(
    KEY, task=dataclasses.replace(TASK, command=("python", "train.py", "--lr", "1"))
)


def advising(best: Choice, key: object = RUN) -> Record:
    made = record(key)  # type: ignore[arg-type]
    winners = tuple(dataclasses.replace(one, choice=best) for one in made.winners)
    return dataclasses.replace(
        made, baseline=choice(), winners=winners, input=Config(), raced=(choice(),)
    )


@pytest.mark.parametrize(
    ("key", "how"), [(RUN, "run it as usual"), (KEY, "train as usual")], ids=["run", "target"]
)
def test_nothing_to_gain_is_not_started_with_an_advice(key: object, how: str) -> None:
    said = f"Nothing measured clearly gains on this machine; {how}."
    nothing = advising(choice(), key)
    assert list(tables.start(nothing, None)) == ["", said]
    assert list(tables.start(nothing, None, url="https://host")) == ["", said]
    (section,) = (one for one in report(nothing).sections if one.name == "script")
    assert (section.lines, section.code) == ((said,), ())


def measured(number: int, config: Config, rate: float) -> Trial:
    ok = Measurement(outcome="ok", samples_per_s=rate, steps=4, blocks=(0.1,))
    return dataclasses.replace(trial(number, config), measurement=ok)


def test_a_trial_is_shown_with_the_ratio_that_was_told_when_it_ended() -> None:
    fast = DEFAULT.replace(channels_last=True)
    tried = [measured(0, DEFAULT, 100.0), measured(1, fast, 150.0), measured(2, DEFAULT, 125.0)]
    tried += [measured(3, fast, 150.0)]
    assert ratios(tried, DEFAULT) == {0: 1.0, 1: 1.5, 2: 1.0, 3: 1.2}
    made = dataclasses.replace(advising(choice()), trials=tuple(tried))
    assert made.baseline.samples_per_s == 2000.0  # of the race
    shown = {row.cells[0]: row.cells[4] for row in tables.trials(made).rows}
    assert shown == {"0": "1.00x", "1": "1.50x", "2": "1.00x", "3": "1.20x"}


@pytest.mark.parametrize(
    ("effort", "said"),
    [("normal", "Nothing measured clearly gains"), ("interrupted", "Could not tell what gains")],
)
def test_what_could_not_be_told_is_not_said_to_gain_nothing(effort: str, said: str) -> None:
    nothing = advising(choice(), RUN)
    made = dataclasses.replace(nothing.provenance, effort=effort)
    fast = measured(1, DEFAULT.replace(channels_last=True), 150.0)
    tried = (measured(0, DEFAULT, 100.0), fast)
    found = dataclasses.replace(nothing, provenance=made, trials=tried)
    lines = [*tables.remarks(found), *tables.start(found, None)]
    assert lines[-1].startswith(f"{said} on this machine; run it as usual.")
    assert sum("--force" in line for line in lines) == (effort == "interrupted")


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("train", "it needs a GPU of compute capability 8.9 or more"),
        ("infer", "it is for training"),
    ],
)
def test_tuning_says_why_fp8_is_not_tried(
    here: Path, unmeasured: list[Task], mode: str, why: str
) -> None:
    tune = ("tune", "model.py", "--shape", SHAPE, "--device", "cpu", "--mode", mode)
    asked = advisor(here, *tune, "--precisions", "default,fp8")
    assert f"fp8 is not tried: {why}" in asked.stderr
    assert "fp8 is not tried" not in advisor(here, *tune).stderr


def test_a_record_with_fp8_says_what_no_comparison_shows() -> None:
    made = record()
    assert fp8.CAVEAT not in list(tables.remarks(made))
    config = DEFAULT.replace(precision="fp8")
    found = dataclasses.replace(made, winners=winners(choice(config), choice(config)))
    assert list(tables.remarks(found)).count(fp8.CAVEAT) == 1
    assert hf.setup(found, config).unsupported["precision"] == "fp8"
