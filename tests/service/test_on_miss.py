"""on_miss="request": what a script does not find is asked of the server, and nobody waits."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

import advisor
from advisor.cli import main
from advisor.errors import AdvisorWarning
from advisor.open_store import open_records
from advisor.resolve import job as filing
from advisor.resolve.job import THREAD
from advisor.service.schema import JobRow
from tests.builders import lookup_arguments
from tests.cache import servers
from tests.face import test_why
from tests.face.commands import MODEL
from tests.face.commands import advisor as command
from tests.runs.test_apply import Net, trained
from tests.runs.test_commands import TRAINING
from tests.service.serving import Served

SHAPE = (4, 3, 8, 8)
NAMELESS = type("Net", (Net,), {"__module__": "nowhere"})()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(TRAINS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False
    )
    monkeypatch.setenv("ADVISOR_ON_MISS", "request")
    return tmp_path


def waited() -> None:
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(60)
            assert not thread.is_alive()


def missed(target: Any = "model.py:Net", **more: Any) -> str:
    """The warning of a lookup that finds nothing, once what it asks for is through."""
    with pytest.warns(AdvisorWarning) as warned:
        advice = advisor.lookup(**lookup_arguments(target, **{"shape": SHAPE} | more))
    assert advice.status == "miss" and len(warned) == 1
    waited()
    return str(warned[0].message)


def asked(served: Served) -> list[dict[str, Any]]:
    """What is asked for, as the server has it."""
    with served.database.reading() as session:
        return [json.loads(one) for one in session.scalars(select(JobRow.asked))]


def test_what_is_not_found_is_asked_for_once(
    team: Served, project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And only so many an hour."""
    caplog.set_level(logging.INFO, logger="advisor")
    monkeypatch.setattr(filing, "MAX_AN_HOUR", 2)
    wanted = {"steps": 500, "precisions": ["bf16", "default"], "model_args": {"width": 4}}
    said, url = missed(**wanted), f"http://127.0.0.1:{team.port}?timeout=20s"
    assert f"; a tuning is asked for at {url}" in said
    assert f"job 1 at {url} is queued: model.py:Net" in caplog.text
    (job,) = asked(team)
    assert (job["target"], job["gpus"], job["gpu"], job["folder"]) == ("model.py:Net", 0, "", "")
    options = {"shape": [[4, 3, 8, 8]], "device": "cpu", "precisions": ["default", "bf16"]}
    options |= {"model_args": ["width=4"], "steps": 500}
    assert job["options"] == options and len(job["archive"]) == 64
    missed(**wanted)
    assert "no tuning is asked for: this job was requested 0 min ago" in caplog.text
    assert len(asked(team)) == 1
    for batch in (2, 3):
        missed(shape=(batch, 3, 8, 8))
    assert len(asked(team)) == 2 and "2 jobs were requested in the last hour" in caplog.text
    for file in open_records(None, fallback=True).study("0.asked").parent.glob("*.asked"):
        os.utime(file, (1, 1))
    missed(shape=(3, 3, 8, 8))
    assert len(asked(team)) == 3


def test_a_batch_is_asked_for(team: Served, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_why.keep(test_why.made(), f"dir:{project}/local")
    monkeypatch.setenv("ADVISOR_CACHE", f"dir:{project}/local,{team.url}")
    assert main(["why", "model.py:Net", "--shape", "7x3x8x8", "--device", "cpu"]) == 0
    waited()
    assert asked(team) == []
    said = missed(shape=(7, 3, 8, 8), device="cpu")
    assert "was not measured at batch 7" in said and "; a tuning is asked for at" in said
    assert [job["options"]["shape"] for job in asked(team)] == [[[7, 3, 8, 8]]]


@pytest.mark.usefixtures("project")
def test_what_is_not_asked_for(team: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, given, says in (
        ({"ADVISOR_ON_MISS": "default"}, {}, ""),
        ({"ADVISOR_ON_MISS": ""}, {"on_miss": "nearest"}, ""),
        ({"ADVISOR_CACHE": "dir:store"}, {}, "no server is among the stores; set ADVISOR_CACHE"),
        ({}, {"shape": None}, "by its name and a shape"),
        ({}, {"target": NAMELESS}, "no tuning is asked for: give apply() a target by its name"),
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            said = missed(**given)
        assert says in said and "asked for at" not in said
    monkeypatch.setenv("RANK", "1")  # rank 0 speaks for all
    advice = advisor.lookup(**lookup_arguments("model.py:Net", shape=SHAPE, on_miss="request"))
    assert "rank 0 asks" in advice.reason and asked(team) == []


def test_what_cannot_be_sent_is_a_line_in_the_log(
    team: Served, project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = project.parent / "elsewhere.py"
    elsewhere.touch()
    away = f"http://127.0.0.1:{servers.free_port()}"
    for change, says in (
        (("advisor.jobs.code_archive.MAX_PACKED", 200), "packed, at most 200 B can be sent; the "),
        ((sys.modules["__main__"], "__file__", str(elsewhere)), "lies outside"),
        (
            (os.environ, "ADVISOR_TOKEN", team.tokens["read"]),
            "this needs role 'submit'; this token has role 'read'",
        ),
        ((os.environ, "ADVISOR_CACHE", away), "refused"),
    ):
        caplog.clear()
        with monkeypatch.context() as patch:
            (patch.setitem if change[0] is os.environ else patch.setattr)(*change)
            missed()
        (line,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert says in line.getMessage()
    assert asked(team) == []


TRAINS = f"""{TRAINING}
import os, threading

os.chdir("/")  # as some frameworks do
train(8)
for thread in threading.enumerate():
    if thread.name == "{THREAD}":
        thread.join(60)
"""


@pytest.mark.long
def test_a_run_is_asked_for_as_it_was_started(team: Served, project: Path) -> None:
    words = ["run", "--", sys.executable, "train.py", "--lr", "0.1"]
    found = command(project, *words, process=True)
    assert found.returncode == 0, found.stderr
    assert "this run was not tuned" in found.stderr and "a tuning is asked for at" in found.stderr
    (job,) = asked(team)
    assert job["command"] == ["python", "train.py", "--lr", "0.1"]
    assert (job["gpus"], job["target"], job["options"]) == (0, "", {})


def test_a_run_from_inside(team: Served, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python3", "train.py"])
    with pytest.warns(AdvisorWarning, match="a tuning is asked for at"):
        try:
            advisor.apply(permit=advisor.Permit(precisions=["default", "tf32"]))
            monkeypatch.chdir("/")
            trained(Net())
        finally:
            advisor.release()
    waited()
    (job,) = asked(team)
    assert job["command"] == ["python3", "train.py"]
    assert job["options"] == {"precisions": ["default", "tf32"]}
