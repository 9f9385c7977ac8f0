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

import advisor
from advisor.cli import main
from advisor.errors import AdvisorWarning
from advisor.open_store import open_records
from advisor.resolve import job as filing
from advisor.resolve.job import THREAD
from tests.builders import lookup_arguments
from tests.cache import servers
from tests.face import test_why
from tests.face.commands import MODEL
from tests.face.commands import advisor as command
from tests.runs.test_apply import Net, trained
from tests.service.serving import Served

SHAPE = (4, 3, 8, 8)


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


def missed(target: Any = "model.py:Net", **asked: Any) -> str:
    """The warning of a lookup that finds nothing, once what it asks for is through."""
    with pytest.warns(AdvisorWarning) as warned:
        advice = advisor.lookup(**lookup_arguments(target, **{"shape": SHAPE} | asked))
    assert advice.status == "miss" and len(warned) == 1
    waited()
    return str(warned[0].message)


def asked(served: Served) -> list[dict[str, Any]]:
    """What is asked for, as the server has it."""
    import sqlalchemy

    from advisor.service.schema import Job

    with served.database.reading() as session:
        return [json.loads(one) for one in session.scalars(sqlalchemy.select(Job.asked))]


def test_what_is_not_found_is_asked_for_once(
    team: Served, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="advisor"):
        said = missed(steps=500, precisions=["bf16", "default"], model_args={"width": 4})
    url = f"http://127.0.0.1:{team.port}?timeout=20s"
    assert f"; a tuning is asked for at {url}" in said
    assert f"job 1 at {url} is queued: model.py:Net" in caplog.text
    (job,) = asked(team)
    assert (job["target"], job["gpus"], job["gpu"], job["folder"]) == ("model.py:Net", 0, "", "")
    assert job["options"] == {
        "shape": [[4, 3, 8, 8]],
        "device": "cpu",
        "precisions": ["default", "bf16"],
        "model_args": ["width=4"],
        "steps": 500,
        "duration": None,
    }
    assert len(job["archive"]) == 64
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="advisor"):
        missed(steps=500, precisions=["bf16", "default"], model_args={"width": 4})
    assert "no tuning is asked for: it was 0 min ago" in caplog.text
    assert len(asked(team)) == 1


def test_a_batch_that_a_record_lacks_is_asked_for(
    team: Served, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_why.keep(test_why.made(), f"dir:{project}/local")
    monkeypatch.setenv("ADVISOR_CACHE", f"dir:{project}/local,{team.url}")
    said = missed(shape=(7, 3, 8, 8), device="cpu")
    assert "was not measured at batch 7" in said and "; a tuning is asked for at" in said
    assert [job["options"]["shape"] for job in asked(team)] == [[[7, 3, 8, 8]]]


def test_the_model_in_hand_is_asked_for_by_its_class(team: Served, project: Path) -> None:
    sys.path.insert(0, str(project))
    try:
        from model import Net  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(project))
        sys.modules.pop("model", None)
    assert "no tuning is asked for: give apply() a target by its name" in missed(Net())
    assert asked(team) == []


@pytest.mark.parametrize(
    ("variables", "given", "says"),
    [
        ({"ADVISOR_ON_MISS": "default"}, {}, ""),
        ({"ADVISOR_ON_MISS": ""}, {"on_miss": "nearest"}, ""),
        ({"RANK": "1"}, {}, "rank 0 asks"),
        ({"ADVISOR_CACHE": "dir:store"}, {}, "no server is among the stores; set ADVISOR_CACHE"),
        ({}, {"shape": None}, "by its name and a shape"),
        ({"ADVISOR_ON_MISS": "panic"}, {}, "expected one of default, nearest, request"),
    ],
)
def test_what_is_not_asked_for(
    team: Served,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    given: dict[str, Any],
    says: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if variables.get("RANK"):  # rank 0 speaks for all
        with pytest.MonkeyPatch.context():
            advice = advisor.lookup(**lookup_arguments("model.py:Net", shape=SHAPE, **given))
        assert says in advice.reason
    else:
        said = missed(**given)
        assert says in said and "asked for at" not in said
    assert asked(team) == []


def test_what_cannot_be_sent_is_a_line_in_the_log(
    team: Served, project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def logged(**more: Any) -> str:
        caplog.clear()
        missed(**more)
        (line,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
        return line.getMessage()

    monkeypatch.setattr("advisor.jobs.code_archive.MAX_PACKED", 200)
    assert "packed, at most 200 B can be sent; most is in " in logged()
    monkeypatch.undo()
    monkeypatch.chdir(project)
    monkeypatch.setenv("ADVISOR_ON_MISS", "request")
    monkeypatch.setenv("ADVISOR_CACHE", team.url)
    elsewhere = project.parent / "elsewhere.py"
    elsewhere.touch()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(elsewhere), raising=False)
    monkeypatch.setenv("ADVISOR_TOKEN", team.tokens["submit"])
    assert "lies outside" in logged()
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(project / "train.py"), raising=False
    )
    monkeypatch.setenv("ADVISOR_TOKEN", team.tokens["read"])
    assert "may read; this needs submit" in logged()
    monkeypatch.setenv("ADVISOR_CACHE", f"http://127.0.0.1:{servers.free_port()}")
    assert "refused" in logged()
    assert asked(team) == []


def test_only_so_many_an_hour(
    team: Served, project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(filing, "MAX_AN_HOUR", 2)
    with caplog.at_level(logging.INFO, logger="advisor"):
        for batch in (1, 2, 3):
            missed(shape=(batch, 3, 8, 8))
    assert len(asked(team)) == 2 and "2 were in the last hour" in caplog.text
    folder = open_records(None, fallback=True).study("0.asked").parent
    for file in folder.glob("*.asked"):
        os.utime(file, (1, 1))
    missed(shape=(3, 3, 8, 8))
    assert len(asked(team)) == 3


def test_why_asks_for_nothing(team: Served, project: Path) -> None:
    assert main(["why", "model.py:Net", "--shape", "4x3x8x8"]) == 0
    waited()
    assert asked(team) == []


TRAINS = """
import os
import threading

import torch
from torch import nn

os.chdir("/")  # as some frameworks do
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(8):
    loss = net(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
for thread in threading.enumerate():
    if thread.name == "advisor: a job":
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


def test_a_run_is_asked_for_from_inside(
    team: Served, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
