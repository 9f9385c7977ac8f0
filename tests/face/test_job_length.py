"""apply(steps=...), the break-even table, and what tuning for a job and with an effort keeps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import advisor
from advisor.cache.codec import decode, encode
from advisor.cache.config import Config
from advisor.cache.record import Choice, Record, Winner
from advisor.cache.records import Records
from advisor.cache.stores import open_store
from advisor.command_snippets import tune_again
from advisor.resolve.answer import break_even
from advisor.tuners.search.plan import suffices
from advisor.tuning import Tuned
from tests.builders import lookup_arguments, verified
from tests.builders import measured as trial
from tests.cache import examples
from tests.face.commands import MODEL, SHAPE
from tests.face.commands import advisor as command
from tests.face.test_apply import DEFAULT, remember

CHEAP = DEFAULT.replace(channels_last=True, compile="none")
BASE = DEFAULT.replace(compile="none")
COMPILED = CHEAP.replace(compile="default")
ONCE = BASE.replace(precision="tf32")


def choice(config: Config, rate: float, first_step_s: float) -> Choice:
    made = examples.choice(config, rate, rate / 100.0)
    return replace(made, first_step_s=first_step_s)


def winners(loop: Choice, flags: Choice) -> tuple[Winner, ...]:
    """Of a record whose captured step is no better than its loop."""
    named = {"flags": flags, "pilot": flags, "loop": loop, "capture": loop}
    return tuple(Winner(use=use, free=False, choice=one) for use, one in named.items())


def keep(record: Record) -> None:
    """In place of what is there of the same measurement."""
    Records(open_store(None)).put(replace(record, revised=time.time()))


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    """Steps of 40 ms; a cheap config of 20 ms; compiled 10 ms, after 30 s."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    made = replace(
        remember(),
        baseline=choice(BASE, 100.0, 1.0),
        winners=winners(choice(COMPILED, 400.0, 31.0), choice(BASE, 100.0, 1.0)),
        raced=(
            choice(BASE, 100.0, 1.0),
            choice(CHEAP, 200.0, 1.0),
            choice(COMPILED, 400.0, 31.0),
        ),
        trials=(
            trial(BASE, 100.0, 0.5),
            trial(CHEAP, 200.0, 0.05),
            trial(COMPILED, 400.0, 29.0),
            trial(ONCE, 190.0, 0.1),
            verified(ONCE),
        ),
    )
    keep(made)
    yield made


def served(**asked: object) -> advisor.Advice:
    return advisor.lookup(**lookup_arguments("model.py:Net", device="cpu", strict=True, **asked))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "config"),
    [
        ({}, COMPILED),
        ({"steps": 1}, BASE),
        ({"steps": 10}, CHEAP),
        ({"steps": 2900}, CHEAP),
        ({"steps": 3100}, COMPILED),
        ({"duration": "30s"}, CHEAP),
        ({"duration": 55}, CHEAP),
        ({"duration": "2h"}, COMPILED),
    ],
)
def test_the_length_of_the_job_decides(
    record: Record, asked: dict[str, object], config: Config
) -> None:
    assert served(**asked).config == config


def test_a_run_as_it_is_pays_for_nothing_that_was_tried_in_it(record: Record) -> None:
    """A record of trials alone, one of which is slow to begin."""

    def raced(config: Config, rate: float) -> Choice:
        return choice(config, rate, 0.0)

    base, compiled = raced(BASE, 100.0), raced(COMPILED, 400.0)
    trials = (
        trial(BASE, 100.0, 0.04),
        trial(ONCE, 90.0, 15.0),
        trial(COMPILED, 400.0, 30.04),
    )
    task = replace(record.key.task, command=("python", "train.py"))
    run = replace(
        record,
        key=replace(record.key, task=task),
        baseline=base,
        winners=winners(compiled, base),
        raced=(base, compiled),
        trials=trials,
    )
    # 30 s at 30 ms saved a step; with what the other trial took it would be half of that.
    assert [(row.steps, row.candidate.config) for row in break_even(run)] == [
        (1, BASE),
        (1002, COMPILED),
    ]


def test_what_was_measured_once_is_said_so(record: Record) -> None:
    alone = replace(
        record,
        raced=record.raced[:1],
        winners=winners(record.baseline, record.baseline),
        trials=(*record.trials[::3], verified(ONCE)),
    )
    keep(alone)
    # A race has said that nothing is faster in the steady state: no single measurement undoes it.
    assert served(steps=10**6).config == BASE
    short = replace(alone.provenance, steps=1)
    keep(replace(alone, provenance=short))
    assert "chosen for a job of 1 steps" in served().served.reason
    advice = served(steps=10**6)
    assert advice.config == ONCE
    assert "measured once" in advice.served.reason and "slowest one seen" in advice.served.reason


def test_the_table(record: Record) -> None:
    rows = break_even(record)
    assert [row.candidate.config for row in rows] == [CHEAP, COMPILED]
    assert [row.steps for row in rows] == [1, 3002]
    assert all(row.candidate.raced and row.candidate.fresh for row in rows)
    assert decode(encode(record)) == record
    shown = command(Path.cwd(), "show", record.id[:6])
    assert "best from step" in shown.stdout and "3,002" in shown.stdout
    assert "The advice pays from step 3,002 on (1m 01s)." in shown.stdout
    data = json.loads(command(Path.cwd(), "show", record.id, "--json").stdout)
    assert [row["from_step"] for row in data["break_even"]] == [1, 3002]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"steps": 0}, "steps 0: expected a number from 1"),
        ({"steps": 1.5}, "steps 1.5: expected a number"),
        ({"duration": "soon"}, "'soon': expected a time above zero, as 90s"),
        ({"duration": -3}, "'-3'|-3: expected a time"),
    ],
)
def test_wrong_lengths(record: Record, asked: dict[str, object], says: str) -> None:
    with pytest.raises(advisor.UsageError, match=says):
        served(**asked)


def test_efforts() -> None:
    assert suffices("exhaustive", "quick") and suffices("normal", "normal")
    assert not suffices("quick", "normal") and not suffices("heroic", "quick")


@pytest.mark.usefixtures("made_up")
def test_more_effort_goes_on_and_less_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []

    def tune(effort: str, seconds: float, steps: int | None) -> Tuned:
        return advisor.tune(
            advisor.Model("model.py", device="cpu"),
            shape=SHAPE,
            permit=advisor.Permit(batches=[], compile=False, tolerance=0),
            budget=advisor.Budget(effort=effort, time=seconds, length=steps),
            on_event=lambda event: said.append(event.get("text", "")),
        )

    first = tune("normal", 6.0, 300).record
    assert (first.provenance.effort, first.provenance.steps) == ("normal", 300)
    assert "--steps 300" in tune_again(first)
    said.clear()
    less = tune("quick", 6.0, 300)
    assert less.known and less.record == first and said == []
    more = tune("exhaustive", 3.0, None).record
    assert said[0] == "tuned with --effort normal; goes on with --effort exhaustive"
    assert (more.provenance.effort, more.provenance.steps) == ("exhaustive", 0)
    assert "--effort exhaustive" in tune_again(more)
