"""Jobs: asked for, claimed, lost, ended, cancelled; and what a worker may say."""

from __future__ import annotations

import gzip
import hashlib
import json
from typing import Any

import pytest

from advisor.service import attempts
from advisor.service.attempts import Claimed
from tests.cache.examples import record
from tests.service.serving import Answer, Served
from tests.service.test_records import named, put

CODE = gzip.compress(b"the code")
DIGEST = hashlib.sha256(CODE).hexdigest()
COMMAND = {"command": ["python", "train.py", "--lr", "0.1"]}
RECORD = f"{record().key.id}@{record().batch}"


def submit(served: Served, role: str = "submit", **asked: Any) -> Answer:
    return served.ask("POST", "/api/jobs", role, COMMAND | asked)


def told(served: Served, number: int) -> dict[str, Any]:
    found: dict[str, Any] = served.ask("GET", f"/api/jobs/{number}", "read").json
    return found


def claimed(served: Served, gpu: str = "NVIDIA H100", gpus: int = 2) -> Claimed | None:
    """As a reconciler claims; the attempt's token is then one of the served ones."""
    with served.database.writing() as session:
        found = attempts.claim(session, "local:here", gpu, gpus)
    if found is not None:
        served.tokens[found.external] = found.token
    return found


def started(served: Served, **asked: Any) -> Claimed:
    """A job that was asked for and claimed."""
    assert submit(served, **asked).status == 201
    found = claimed(served)
    assert found is not None
    return found


def ended(served: Served, one: Claimed, **last: Any) -> Answer:
    return served.ask("POST", "/api/attempt/end", one.external, last)


def test_a_job_from_its_first_state_to_its_last(served: Served) -> None:
    assert served.ask("PUT", f"/api/archives/{DIGEST}", "submit", CODE).status == 201
    said = submit(served, archive=DIGEST, folder="here", gpu="H100", options={"budget": "1m"})
    assert (said.status, said.json["state"], said.json["new"]) == (201, "queued", True)
    number = said.json["id"]
    assert said.json["what"] == "python train.py --lr 0.1"
    one = claimed(served)
    assert one is not None and (one.job, one.number, one.asked.folder) == (number, 1, "here")
    asked = served.ask("GET", "/api/attempt", one.external).json
    assert (asked["job"], asked["number"], asked["studies"]) == (number, 1, [])
    assert asked["asked"]["options"] == {"budget": "1m"}
    assert served.ask("GET", f"/api/archives/{DIGEST}", one.external).data == CODE
    trial = {"number": 3, "what": "tf32", "samples_per_s": 9.5, "ratio": 1.5, "origin": "guess"}
    beat = {"trials": [trial], "log": "one\x1b[31m\x07\ntwo\r", "device": "GPU 1"}
    assert served.ask("POST", "/api/attempt/beat", one.external, beat).json == {"go_on": True}
    served.ask("POST", "/api/attempt/beat", one.external, {"trials": [trial], "log": "3"})
    assert served.ask("PUT", "/api/attempt/studies/a@1-b", one.external, b"x" * 9).status == 200
    assert served.ask("GET", "/api/attempt/studies/a@1-b", one.external).data == b"x" * 9
    assert served.ask("GET", "/api/attempt", one.external).json["studies"] == ["a@1-b"]
    assert ended(served, one, state="done", record=RECORD).status == 422
    put(served, *named(record()), one.external)
    assert ended(served, one, state="done", record=RECORD).json == {"state": "done"}
    assert ended(served, one, state="failed").status == 409
    assert served.ask("POST", "/api/attempt/beat", one.external, {}).status == 409
    assert put(served, *named(record()), one.external).status == 401
    done = told(served, number)
    assert (done["state"], done["record"], done["by"]) == ("done", RECORD, "a submit")
    assert [(t["state"], t["device"]) for t in done["tries"]] == [("done", "GPU 1")]
    assert [(t["number"], t["what"], t["ratio"]) for t in done["trials"]] == [(3, "tf32", 1.5)]
    log = served.ask("GET", f"/api/jobs/{number}/log", "read").json
    assert (log["text"], log["ended"]) == ("one?\ntwo\n3", True)
    rest = served.ask("GET", f"/api/jobs/{number}/log?after={log['next']}", "read").json
    assert rest == {"text": "", "next": log["next"], "ended": True}
    actions = [one["action"] for one in served.ask("GET", "/api/audit", "admin").json["events"]]
    assert actions == [
        *("job done", "attempt done", "put", "job running", "job submitted", "archive kept"),
        *["token made"] * 4,
    ]


def test_a_stream_tells_all_of_it(served: Served) -> None:
    one = started(served)
    beat = {"trials": [{"number": 0, "what": "tf32"}], "log": "a\nb"}
    served.ask("POST", "/api/attempt/beat", one.external, beat)
    ended(served, one, state="failed", reason="no such file")
    said = served.ask("GET", f"/api/jobs/{one.job}/events", "read")
    assert said.headers["content-type"].startswith("text/event-stream")
    parts = [part.splitlines() for part in said.data.decode().split("\n\n") if part]
    names = [part[0] for part in parts]
    assert names[:3] == ["event: trial", "event: log", "event: state"]
    assert json.loads(parts[1][1].removeprefix("data: "))["text"] == "a\nb"
    assert json.loads(parts[2][1].removeprefix("data: "))["reason"] == "no such file"
    last = names[3].removeprefix("id: ")
    how = {"Last-Event-ID": last}
    again = served.ask("GET", f"/api/jobs/{one.job}/events", "read", headers=how).data.decode()
    assert "event: trial" not in again and "event: log" not in again and "event: state" in again


def test_the_same_twice_is_one_job(served: Served) -> None:
    first = submit(served)
    assert submit(served, role="admin").json == {**first.json, "new": False}
    assert submit(served, gpus=2).json["new"]
    one = claimed(served)
    assert one is not None and submit(served, force=True).json["id"] == one.job
    put(served, *named(record()))
    ended(served, one, state="done", record=RECORD)
    assert submit(served).json["state"] == "done"
    assert submit(served, force=True).json["new"]
    assert submit(served, **{"command": ["x"]}).status == 201
    page = served.ask("GET", "/api/jobs?most=2", "read").json
    assert [one["what"] for one in page["jobs"]] == ["x", "python train.py --lr 0.1"]
    assert page["more"]
    rest = served.ask("GET", f"/api/jobs?before={page['jobs'][-1]['id']}&state=done", "read").json
    assert [one["state"] for one in rest["jobs"]] == ["done"] and not rest["more"]


def test_what_was_done_and_is_gone_is_done_again(served: Served) -> None:
    one = started(served)
    key, data = named(record())
    put(served, key, data)
    ended(served, one, state="done", record=RECORD)
    assert not submit(served).json["new"]
    served.ask("DELETE", f"/api/records/{key}", "admin")
    assert submit(served).json["new"]


@pytest.mark.parametrize(
    "asked",
    [
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
        {"options": {"budget": "never"}},
        {"options": {"force": True}},
        {"options": {"others": "x"}},
        {"options": {"nothing": 1}},
        {"options": {"trials": [[[1]]]}},
        {"options": []},
        {"gpus": -1},
        {"gpus": True},
        {"gpus": 0, "gpu": "H100"},
        {"gpu": "H100'; DROP TABLE jobs; --"},
        {"env": {"LD_PRELOAD": "x"}},
        {"env": {"pip": "a\nb"}},
        {"archive": "x"},
        {"archive": "ab" * 32},
        {"folder": "x"},
        {"folder": "../x", "archive": "ab" * 32},
        {"folder": "/x", "archive": "ab" * 32},
        {"more": 1},
    ],
)
def test_what_is_not_queued(served: Served, asked: dict[str, Any]) -> None:
    answer = submit(served, **asked)
    assert answer.status == 422 and "\n" not in answer.json["detail"], answer.data
    assert answer.json["detail"].isprintable()
    assert served.ask("GET", "/api/jobs", "read").json["jobs"] == []


def test_a_job_goes_where_it_asked_to(served: Served) -> None:
    asked = ({"gpu": "h100", "gpus": 2}, {"gpus": 0}, {"gpus": 1})
    numbers = [submit(served, **one).json["id"] for one in asked]
    for gpu, gpus, expected in (
        ("NVIDIA H100", 1, 3),
        ("NVIDIA A100", 8, None),
        ("", 0, 2),
        ("NVIDIA H100 80GB", 8, 1),
        ("NVIDIA H100 80GB", 8, None),
        ("", 0, None),
    ):
        one = claimed(served, gpu, gpus)
        assert (one and numbers.index(one.job) + 1) == expected, (gpu, gpus)
