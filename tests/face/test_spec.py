"""A job for a server: as JSON, and as options of the command line."""

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
from advisor.jobs.spec import JobSpec, gpu_matches
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


def test_tune_parses_the_words_of_a_target_job() -> None:
    job = JobSpec(target=TARGET, options=given())
    options = tune.make_context("tune", [*job.words(), TARGET]).params
    plan = {name: value for name, value in given().items() if name in ("budget", "trials", "seed")}
    plan["duration"] = "2h"
    assert Plan.of(collected(Plan, options)) == Plan.of(plan) == job.plan
    task = {name: value for name, value in given().items() if name not in plan}
    assert Task.of(TARGET, collected(Task, options)) == Task.of(TARGET, task)


def test_tune_parses_the_words_of_a_command_job() -> None:
    allowed = {"precisions": "tf32,default", "max_memory": "20GiB", "tolerance": 0.0}
    job = JobSpec(command=("python", "x.py"), options={**allowed, "budget": "1m"})
    options = tune.make_context("tune", [*job.words(), "--", *job.command]).params
    assert permissions(collected(Task, options)) == permissions(allowed)
    assert job.plan.seconds == 60


def test_a_job_survives_json() -> None:
    job = JobSpec(target=TARGET, options=given(), gpu="H100", gpus=4, env={"pip": "timm"})
    again = JobSpec.of(json.loads(json.dumps(job.plain)))
    assert again == job and again.key == job.key


def test_equal_jobs_have_the_same_key() -> None:
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


def test_a_long_command_is_shortened() -> None:
    shown = JobSpec(command=("python", "-c", "x" * 1000)).what
    assert len(shown) == 300 and shown.startswith("python -c x") and shown.endswith("…")


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    for name in ("script", "bogus"):
        with pytest.raises(UsageError, match=f"{name}: not an option; expected .*budget.*shape"):
            JobSpec(target="model.py:Net", options={"shape": "64x8", name: "x"})


@pytest.mark.parametrize(
    "fields",
    [
        *({"options": {"budget": one}} for one in ("1s", "-5m", [], {}, 10**400, True, "never")),
        {"command": []},
        {"command": "python"},
        {"command": ["python", "a\nb"]},
        {"command": [""]},
        {"command": ["x" * 70_000]},
        {"target": "model.py"},
        {"command": [], "target": "model.py"},
        {"command": [], "target": "-x", "options": {"shape": "1x2"}},
        {"command": [], "target": "\x1b[2J", "options": {"shape": "1x2"}},
        {"options": {"shape": "1x2"}},
        {"options": {"force": True}},
        {"options": {"others": "x"}},
        {"options": {"trials": [[[1]]]}},
        {"options": []},
        {"gpus": -1},
        {"gpus": True},
        {"gpus": 0, "gpu": "H100"},
        {"gpu": "H100'; DROP TABLE jobs; --"},
        {"env": {"LD_PRELOAD": "x"}},
        {"env": {"pip": "a\nb"}},
        {"archive": "x"},
        {"folder": "x"},
        {"folder": "../x", "archive": "ab" * 32},
        {"folder": "/x", "archive": "ab" * 32},
        {"more": 1},
    ],
)
def test_an_invalid_job_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        JobSpec.of({"command": ["python"]} | fields)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("gpu", "name", "matches"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("", "H100", True),
        ("NVIDIA H100 80GB HBM3", "H100", True),
        ("NVIDIA A100-SXM4-80GB", "A100", True),
        ("NVIDIA GeForce RTX 5090", "GeForce-RTX-5090", True),
        ("NVIDIA L40S", "L4", False),
        ("NVIDIA H100 80GB HBM3", "A100", False),
        ("NVIDIA H100 80GB HBM3", "", False),
    ],
)
def test_a_gpu_is_matched_by_whole_words(gpu: str, name: str, matches: bool) -> None:
    assert gpu_matches(gpu, name) is matches


DEEP: Any = functools.reduce(lambda inner, _: [inner], range(20_000), [])


@pytest.mark.parametrize("value", [7, "\x1b[2J", "a\nb", "\ud800", float("nan"), 10**400, DEEP])
def test_options_are_printable_json_or_refused(value: Any) -> None:
    for options in ({"shape": value}, {"shape": "1x8", "model_args": {"a": value}}):
        with contextlib.suppress(UsageError):
            job = JobSpec.of({"target": TARGET, "options": options})
            assert all(word.isprintable() for word in job.words())
            assert json.loads(json.dumps(job.plain, allow_nan=False)) == job.plain
