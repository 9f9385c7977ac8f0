"""What is told to be done: one thing, and one that helps."""

from __future__ import annotations

import dataclasses

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Choice, Measurement, Record, Trial
from advisor.cli.measuring import unfinished
from advisor.report import tables
from advisor.report.sections import report
from advisor.report.text import ratios
from advisor.tuners.search.plan import Plan
from tests.cache.examples import DEFAULT, KEY, TASK, choice, record, trial

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
    said = f"Nothing to gain on this machine; {how}."
    nothing = advising(choice(), key)
    assert list(tables.start(nothing, None)) == ["", said]
    assert list(tables.start(nothing, None, url="https://host")) == ["", said]
    (section,) = (one for one in report(nothing).sections if one.name == "script")
    assert (section.lines, section.code) == ((said,), ())


def test_an_advice_is_started() -> None:
    lines = list(
        tables.start(advising(choice(DEFAULT.replace(precision="bf16"), 3000.0, 1.5)), None)
    )
    assert lines == ["", "Start it like this:", "    advisor run -- python train.py --lr 1"]


@pytest.mark.parametrize(
    ("trials", "remedy"),
    [(1, "Give a larger --trials, or none."), (None, "Give a larger --budget.")],
)
def test_one_remedy_for_what_is_not_tuned_yet(trials: int | None, remedy: str) -> None:
    failed = Measurement(outcome="timed_out", reason="no time is left")
    other = dataclasses.replace(
        trial(1, DEFAULT.replace(channels_last=True), "timed_out"), measurement=failed
    )
    made = dataclasses.replace(
        advising(choice()), trials=(trial(), other), provenance=record(RUN, trials=2).provenance
    )
    plan = Plan.of({"trials": trials})
    said = unfinished(made, plan)
    assert said.endswith(remedy) and said.count("Give") == 1
    if trials is None:
        assert "Give" not in unfinished(made, plan, short=True)


def test_a_host_that_was_busy_is_no_remedy_beside_another() -> None:
    wide = dataclasses.replace(choice(), low=1000.0, high=3000.0, rounds=(2000.0,))
    unfinished = dataclasses.replace(
        advising(wide), baseline=wide, raced=(wide,), trials=(trial(),)
    )
    assert not unfinished.compares
    assert not any("--force" in line for line in tables.remarks(unfinished))


def test_a_budget_that_is_named_is_the_only_remedy() -> None:
    """A remark has named one: the same command goes on with it, and measures the leaders again."""
    fast = DEFAULT.replace(precision="bf16")
    unsteady = dataclasses.replace(choice(fast, 3000.0, 1.5), low=1000.0)
    late = dataclasses.replace(trial(1, fast), measurement=Measurement(outcome="timed_out"))
    undecided = dataclasses.replace(advising(choice()), trials=(trial(), late))
    for made in (advising(unsteady), undecided):
        for short in (False, True):
            lines = [*tables.summary(made, short=short), *tables.start(made, None, short=short)]
            assert sum(line.endswith(tables.AGAIN) for line in lines) == (not short)


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


def test_what_could_not_be_told_is_not_said_to_gain_nothing() -> None:
    fast, code = DEFAULT.replace(channels_last=True), DEFAULT.replace(compile="default")
    late = dataclasses.replace(trial(1, code), measurement=Measurement(outcome="timed_out"))
    seemed = [measured(0, DEFAULT, 100.0), measured(1, fast, 150.0)]
    level = [measured(0, DEFAULT, 100.0), measured(1, fast, 102.0)]
    wide = dataclasses.replace(choice(fast), speedup=1.02, speedup_low=0.5, speedup_high=1.9)
    narrow = dataclasses.replace(wide, speedup_low=1.0, speedup_high=1.05)
    nothing = advising(choice(), RUN)

    def said(trials: list[Trial], *raced: Choice) -> str:
        made = dataclasses.replace(nothing, trials=tuple(trials), raced=(choice(), *raced))
        lines = [*tables.remarks(made), *tables.start(made, None)]
        assert sum("--force" in line for line in lines) == lines[-1].count("--force")
        return lines[-1].partition(" on this machine")[0]

    assert said([measured(0, DEFAULT, 100.0), late]) == "Could not tell what gains"
    assert said(seemed) == "Could not tell what gains"
    assert said(level, wide) == "Could not tell what gains"
    assert said(seemed, narrow) == "Nothing to gain"
    assert said(level) == "Nothing to gain"
