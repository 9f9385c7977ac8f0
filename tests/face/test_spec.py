"""What is asked of a server: as JSON, and as the options of the command line."""

from __future__ import annotations

import contextlib
import functools
import json
from typing import Any

import pytest

from advisor.cache.task import Task, permissions
from advisor.cli.measuring import tune
from advisor.cli.options import collected
from advisor.errors import UsageError
from advisor.jobs.spec import JobSpec
from advisor.tuners.search.plan import Plan

TARGET = "model.py:Net"
OPTIONS: dict[str, Any] = {
    "shape": ["64x3x32x32"],
    "model_arg": ["width=8", 'name="1"'],
    "batches": [],
    "compile": False,
    "deterministic": True,
    "max_memory": "20GiB",
    "tolerance": 0.0,
    "budget": "1h30m",
    "trials": 9,
    "seed": 3,
    "duration": "2h",
}


def given() -> dict[str, Any]:
    return {"model_args" if name == "model_arg" else name: v for name, v in OPTIONS.items()}


def test_the_command_line_reads_its_words() -> None:
    asked = JobSpec(target=TARGET, options=given())
    options = tune.make_context("tune", [*asked.words(), TARGET]).params
    plan = {name: value for name, value in given().items() if name in ("budget", "trials", "seed")}
    plan["duration"] = "2h"
    assert Plan.of(collected(Plan, options)) == Plan.of(plan) == asked.plan
    task = {name: value for name, value in given().items() if name not in plan}
    assert Task.of(TARGET, collected(Task, options)) == Task.of(TARGET, task)


def test_a_commands_too() -> None:
    allowed = {"precisions": "tf32,default", "max_memory": "20GiB", "tolerance": 0.0}
    asked = JobSpec(command=("python", "x.py"), options={**allowed, "budget": "1m"})
    options = tune.make_context("tune", [*asked.words(), "--", *asked.command]).params
    assert permissions(collected(Task, options)) == permissions(allowed)
    assert asked.plan.seconds == 60


def test_json_and_back() -> None:
    asked = JobSpec(target=TARGET, options=given(), gpu="H100", gpus=4, env={"pip": "timm"})
    again = JobSpec.of(json.loads(json.dumps(asked.plain)))
    assert again == asked and again.key == asked.key


def test_what_is_the_same_has_the_same_key() -> None:
    def key(**more: Any) -> str:
        return JobSpec(**({"target": TARGET, "options": given()} | more)).key

    same = given() | {"budget": 5400, "shape": [64, 3, 32, 32], "max_memory": 20 * 2**30}
    assert key() == key(options=same) == key(force=True)
    others = [
        key(options=given() | {"budget": "5m"}),
        *(key(gpu="H100"), key(gpus=2), key(archive="ab" * 32), key(env={"pip": "timm"})),
        key(archive="ab" * 32, folder="x"),
    ]
    assert len({key(), *others}) == 1 + len(others)


def test_a_long_command_is_shown_in_short() -> None:
    shown = JobSpec(command=("python", "-c", "x" * 1000)).what
    assert len(shown) == 300 and shown.startswith("python -c x") and shown.endswith("…")


def test_an_unknown_option_is_told_with_those_there_are() -> None:
    for name in ("script", "bogus"):
        with pytest.raises(UsageError, match=f"{name}: not an option; expected .*budget.*shape"):
            JobSpec(target="model.py:Net", options={"shape": "64x8", name: "x"})


@pytest.mark.parametrize("budget", ["1s", "-5m", [], {}, 10**400, True, "never"])
def test_a_wrong_option_is_refused_at_once(budget: object) -> None:
    with pytest.raises(UsageError):
        JobSpec(command=("python",), options={"budget": budget})


DEEP: Any = functools.reduce(lambda inner, _: [inner], range(20_000), [])


@pytest.mark.parametrize("value", ["\x1b[2J", "a\nb", "\ud800", float("nan"), 10**400, DEEP])
def test_no_option_smuggles_anything_in(value: Any) -> None:
    for options in ({"shape": value}, {"shape": "1x8", "model_args": {"a": value}}):
        with contextlib.suppress(UsageError):
            asked = JobSpec.of({"target": TARGET, "options": options})
            assert all(word.isprintable() for word in asked.words())
            assert json.loads(json.dumps(asked.plain, allow_nan=False)) == asked.plain
