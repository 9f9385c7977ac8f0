"""Jobs: asked for, claimed, lost, ended, cancelled; and what a worker may say."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, update

from advisor.cache.codec import to_plain
from advisor.cache.key import fields
from advisor.errors import UsageError
from advisor.jobs.code_archive import MAX_PACKED
from advisor.jobs.spec import JobSpec, gpu_matches
from advisor.jobs.token import digest, made
from advisor.service import attempts, jobs, quotas, schema, tokens, upkeep
from advisor.service.executors import Capacity, Start
from tests.cache.examples import KEY, changed, record
from tests.service.serving import Answer, Served, ask, begun
from tests.service.test_records import look, named, put

CODE = gzip.compress(b"the code")
DIGEST = hashlib.sha256(CODE).hexdigest()
COMMAND = {"command": ["python", "train.py", "--lr", "0.1"]}
RECORD = f"{record().key.id}@{record().batch}"


def submit(served: Served, role: str = "submit", **asked: Any) -> Answer:
    return served.ask("POST", "/api/jobs", role, COMMAND | asked)


def told(served: Served, number: int) -> dict[str, Any]:
    found: dict[str, Any] = served.ask("GET", f"/api/jobs/{number}", "read").json
    return found


def claimed(served: Served, gpu: str = "NVIDIA H100", gpus: int = 2) -> Start | None:
    """As a reconciler claims and a worker begins; its own token is then one of the served ones."""
    with served.database.writing() as session:
        found = attempts.claim(session, "local:here", Capacity(gpu=gpu, gpus=gpus))
    if found is not None:
        served.tokens[found.external] = begun(served.database, found)
    return found


def exchanged(served: Served, one: Start, own: str) -> Answer:
    """What a worker that has made this token is answered to its first request."""
    body = {"digest": digest(own).hex()}
    return ask(served.port, "POST", "/api/attempt/begin", one.token, body)


def waiting_to_begin(served: Served) -> Start:
    """An attempt that was started, and whose worker has not said anything yet."""
    assert submit(served).status < 300
    with served.database.writing() as session:
        found = attempts.claim(session, "local:here", Capacity(gpu="NVIDIA H100", gpus=2))
    assert found is not None
    return found


def started(served: Served, **asked: Any) -> Start:
    """A job that was asked for and claimed."""
    assert submit(served, **asked).status == 201
    found = claimed(served)
    assert found is not None
    return found


def beat(served: Served, one: Start, **said: Any) -> Answer:
    return served.ask("POST", "/api/attempt/beat", one.external, said)


def study(served: Served, one: Start, name: str, *data: bytes) -> Answer:
    """A file of the search, as it is now or after it was sent."""
    method = "PUT" if data else "GET"
    return served.ask(method, f"/api/attempt/studies/{name}", one.external, *data)


def ended(served: Served, one: Start, **last: Any) -> Answer:
    return served.ask("POST", "/api/attempt/end", one.external, last)


def sent(served: Served, data: bytes = CODE, role: str = "submit", digest: str = "") -> Answer:
    digest = digest or hashlib.sha256(data).hexdigest()
    return served.ask("PUT", f"/api/archives/{digest}", role, data)


def change(served: Served, table: type[schema.Base], *where: Any, **values: Any) -> None:
    with served.database.writing() as session:
        session.execute(update(table).where(*where).values(**values))


def actions(served: Served) -> list[dict[str, Any]]:
    """The audit log, the newest first."""
    found: list[dict[str, Any]] = served.ask("GET", "/api/audit", "admin").json["events"]
    return found


def test_a_job_from_its_first_state_to_its_last(served: Served) -> None:
    assert sent(served).status == 201
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
    said = beat(served, one, trials=[trial], log="one\x1b[31m\x07\ntwo\r", device="GPU 1")
    assert said.json == {"go_on": True}
    beat(served, one, trials=[trial], log="3")
    assert study(served, one, "a@1-b", b"x" * 9).status == 200
    assert study(served, one, "a@1-b").data == b"x" * 9
    assert served.ask("GET", "/api/attempt", one.external).json["studies"] == ["a@1-b"]
    assert ended(served, one, state="done", record=RECORD).status == 422
    put(served, *named(record()), one.external)
    assert ended(served, one, state="done", record=RECORD).json == {"state": "done"}
    assert ended(served, one, state="failed").status == 401
    assert beat(served, one).status == 401
    assert put(served, *named(record()), one.external).status == 401
    done = told(served, number)
    assert (done["state"], done["record"], done["by"]) == ("done", RECORD, "a submit")
    assert [(t["state"], t["device"]) for t in done["attempts"]] == [("done", "GPU 1")]
    assert [(t["number"], t["what"], t["ratio"]) for t in done["trials"]] == [(3, "tf32", 1.5)]
    log = served.ask("GET", f"/api/jobs/{number}/log", "read").json
    assert (log["text"], log["ended"]) == ("one?\ntwo\n3", True)
    rest = served.ask("GET", f"/api/jobs/{number}/log?after={log['next']}", "read").json
    assert rest == {"text": "", "next": log["next"], "ended": True}
    assert [one["action"] for one in actions(served)] == [
        *("job done", "attempt done", "put", "attempt begun", "job running"),
        *("job submitted", "archive kept"),
        *["token made"] * 4,
    ]


def test_the_same_twice_is_one_job(served: Served) -> None:
    first = submit(served)
    assert submit(served, role="admin").json == {**first.json, "new": False}
    assert submit(served, gpus=2).json["new"]
    one = claimed(served)
    assert one is not None and submit(served, force=True).json["id"] == one.job
    put(served, *named(record()), one.external)
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
    put(served, key, data, one.external)
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
def test_what_is_not_queued(served_lite: Served, asked: dict[str, Any]) -> None:
    served = served_lite
    answer = submit(served, **asked)
    status = 428 if asked == {"archive": "ab" * 32} else 422
    assert answer.status == status and "\n" not in answer.json["detail"], answer.data
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


def states(served: Served, number: int) -> tuple[str, list[str]]:
    """Of a job and of its attempts."""
    found = told(served, number)
    return found["state"], [one["state"] for one in found["attempts"]]


def of(served: Served, change: Callable[..., Any], *what: Any) -> Any:
    """What one function does to the database, and its answer."""
    with served.database.writing() as session:
        return change(session, *what)


@pytest.mark.parametrize(
    ("gpu", "name", "meant"),
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
def test_a_kind_of_gpu_is_matched_by_its_whole_name(gpu: str, name: str, meant: bool) -> None:
    assert gpu_matches(gpu, name) is meant


def test_an_attempt_is_done_with_a_record_of_its_own(served: Served) -> None:
    """Not with any record that is here: the job would name what others measured."""
    put(served, *named(record()))
    one = started(served)
    refused = ended(served, one, state="done", record=RECORD)
    assert refused.status == 422 and "did not put it here" in refused.json["detail"]
    put(served, *named(record(created=1.7e9 + 5)), one.external)
    assert ended(served, one, state="done", record=RECORD).status == 200


def test_what_is_lost_is_tried_again_and_not_for_ever(served: Served) -> None:
    one = started(served)
    study(served, one, "x", b"half")
    for number in range(1, attempts.MAX_LOST + 1):
        assert one is not None and one.number == number
        assert study(served, one, "x").data == b"half"
        assert of(served, attempts.end, one.attempt, "lost", f"node {number % 2} is gone")
        assert not of(served, attempts.end, one.attempt, "lost", "again")
        assert ended(served, one, state="failed").status == 401
        last, one = one, claimed(served)
    assert one is None
    found = told(served, last.job)
    assert found["state"] == "failed" and len(found["attempts"]) == attempts.MAX_LOST
    assert found["reason"] == "5 attempts were lost: node 1 is gone; node 0 is gone"
    assert submit(served).json["new"]


def test_what_is_preempted_has_not_failed(served: Served) -> None:
    one = started(served)
    for _ in range(attempts.MAX_LOST):
        beat(served, one)
        assert ended(served, one, state="preempted", reason="a spot").status == 200
        assert states(served, one.job)[0] == "preempted"
        again = claimed(served)
        assert again is not None and again.job == one.job
        assert of(served, attempts.end, again.attempt, "preempted", "the node is drained")
        one = again
        one = claimed(served) or pytest.fail("it waits")
    assert states(served, one.job)[0] == "running"


def test_what_cannot_begin_rests_longer_each_time(served: Served) -> None:
    waits = []
    for turn in range(8):
        one = started(served) if not turn else claimed(served) or pytest.fail("it is due")
        if turn == 6:  # it trains for once
            beat(served, one)
        ended(served, one, state="preempted", reason="other processes use the GPU")
        with served.database.writing() as session:
            job = session.get_one(schema.Job, one.job)
            waits.append(max(0.0, job.due - job.changed))
        if waits[-1]:
            reason = told(served, one.job)["reason"]
            assert re.fullmatch(r"waits until \d\d:\d\d:\d\d UTC: other processes .*", reason)
            assert claimed(served) is None
        change(served, schema.Job, due=0.0)
    assert waits == pytest.approx([30, 60, 120, 240, 480, 600, 0, 30], abs=5)


def test_what_a_command_fails_with_is_not_tried_again(served: Served) -> None:
    one = started(served)
    assert ended(served, one, state="failed", reason="exit 2\x1b[2J").status == 200
    found = told(served, one.job)
    assert (found["state"], found["reason"]) == ("failed", "exit 2?[2J")
    assert claimed(served) is None


def test_what_cannot_be_placed_waits_and_says_why(served: Served) -> None:
    number = submit(served).json["id"]
    submit(served, gpus=2)
    one = waiting_to_begin(served)
    assert one.job == number
    assert of(served, attempts.put_back, one.attempt, "no node has an H100")
    assert not of(served, attempts.put_back, one.attempt, "no node has an H100")
    assert exchanged(served, one, made()).status == 401
    found = told(served, number)
    assert (found["state"], found["reason"]) == ("queued", "no node has an H100")
    assert found["attempts"] == [] and found["attempt"] == 0
    other = claimed(served)
    assert other is not None and other.job != number  # others do not wait for it
    assert not of(served, attempts.put_back, other.attempt, "what was begun is somewhere")
    assert claimed(served) is None
    of(served, jobs.explain_wait, [schema.Job.id == number], "no executor")
    assert told(served, number)["reason"] == "no executor"
    of(served, jobs.explain_wait, [schema.Job.id == other.job], "no executor")
    assert told(served, other.job)["reason"] != "no executor"
    change(served, schema.Job, due=0.0)
    again = claimed(served)
    assert again is not None and again.job == one.job and again.number == 1


def test_a_revoked_token_leaves_no_jobs(served: Served) -> None:
    """Neither queued nor running, nor a record: another's job goes on."""
    made_token = served.ask("POST", "/api/tokens", "admin", {"name": "gone", "role": "submit"}).json
    served.tokens["gone"] = made_token["token"]
    running = submit(served, "gone").json["id"]
    one = claimed(served)
    assert one is not None and one.job == running
    queued = submit(served, "gone", options={"seed": 1}).json["id"]
    others = submit(served, options={"seed": 2}).json["id"]
    assert served.ask("DELETE", f"/api/tokens/{made_token['id']}", "admin").status == 200
    for number in (running, queued):
        found = told(served, number)
        assert (found["state"], found["reason"]) == (
            "cancelled",
            "the token that asked for it was revoked",
        )
    assert put(served, *named(record()), one.external).status == 401
    assert beat(served, one).status == 401
    (seen,) = of(served, attempts.running)
    assert seen.unwanted  # the reconciler stops it
    other = claimed(served)
    assert other is not None and other.job == others


def test_a_token_that_was_revoked_meanwhile_asks_for_nothing(served: Served) -> None:
    with served.database.writing() as session:
        caller = tokens.find(session, served.tokens["submit"], "")
        assert caller is not None
        jobs.revoke_token(session, caller.token, caller)
    with served.database.writing() as session, pytest.raises(UsageError, match="revoked"):
        jobs.submit(session, JobSpec(command=("python", "train.py")), caller)


def test_what_another_version_took_holds_nobody_up(served: Served) -> None:
    number = submit(served).json["id"]
    change(served, schema.Job, asked='{"another": 1}')
    one = started(served, gpus=2)
    assert one.job != number
    found = told(served, number)
    assert found["state"] == "failed" and "unknown field `another`" in found["reason"]


def cancelled(served: Served, number: int, role: str = "submit") -> Answer:
    return served.ask("POST", f"/api/jobs/{number}/cancel", role)


def test_a_job_is_its_owners_to_cancel(served: Served) -> None:
    number = submit(served).json["id"]
    assert cancelled(served, number, "worker").status == 403
    assert cancelled(served, 9999999).status == 404
    for role in ("submit", "submit", "admin"):
        assert cancelled(served, number, role).json == {"state": "cancelled"}
    assert claimed(served) is None
    one = started(served)
    assert cancelled(served, one.job, "admin").status == 200
    with served.database.reading() as session:
        (seen,) = attempts.running(session, "local:here")
        assert seen.unwanted and seen.silent_s < 60 and not attempts.running(session, "ray:x")
    assert beat(served, one, log="last words").json == {"go_on": False}
    if number % 2:
        assert of(served, attempts.end, one.attempt, "lost", "")
    else:
        assert ended(served, one, state="done", record=RECORD).status == 200
    assert states(served, one.job) == ("cancelled", ["cancelled"])
    assert ended(served, one, state="failed").status == 401
    assert cancelled(served, one.job).json == {"state": "cancelled"}


def test_a_token_has_so_many_jobs(served_lite: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served = served_lite
    monkeypatch.setattr(jobs, "MAX_LIVE", 2)
    first = submit(served, gpus=1).json["id"]
    assert submit(served, gpus=2).status == 201
    assert "2 jobs of this token" in submit(served, gpus=3).json["detail"]
    assert submit(served, gpus=2).status == 200
    assert submit(served, "admin", gpus=3).status == 201
    cancelled(served, first)
    assert submit(served, gpus=4).status == 201


def test_what_a_worker_says_is_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    one = started(served)
    for said in (
        {"trials": [{"number": 0, "samples_per_s": -1.0}]},
        {"trials": [{"number": 0, "ratio": 1e99}]},
        {"trials": [{"number": 2**40}]},
        {"trials": [{"number": 0, "more": 1}]},
        {"trials": [{"number": 0, "what": "x" * 70_000}]},
        {"trials": [{"number": 0}] * 1001},
        {"log": 5},
        b'{"trials": [{"number": 0, "ratio": NaN}]}',
        b'{"log": "\\ud800"}',
    ):
        assert served.ask("POST", "/api/attempt/beat", one.external, said).status == 422, said
    for last in ({"state": "queued"}, {"state": "done"}, {"state": "done", "record": "../x"}):
        assert ended(served, one, **last).status == 422
    wild = [{"number": 1, "what": "a\nb\x1b[2J"}]
    assert beat(served, one, trials=wild, device="\x00", log="\0a").status == 200
    assert told(served, one.job)["trials"][0]["what"] == "a b?[2J"
    monkeypatch.setattr(jobs, "MAX_LOG", 100)
    for _ in range(3):
        beat(served, one, log="x" * 60)
    text = served.ask("GET", f"/api/jobs/{one.job}/log", "read").json["text"]
    assert len(text) < 200 and text.count("the log ends here") == 1
    monkeypatch.setattr(jobs, "MAX_TEXT", 50)
    log, after = "", 0
    for _ in range(4):
        part = served.ask("GET", f"/api/jobs/{one.job}/log?after={after}", "read").json
        log, after = log + part["text"], part["next"]
    assert log == text
    monkeypatch.setattr(jobs, "MAX_TRIALS", 3)
    beat(served, one, trials=[{"number": number} for number in range(9)])
    assert len(told(served, one.job)["trials"]) == 3
    for number in range(attempts.MAX_STUDIES + 1):
        kept = served.ask("PUT", f"/api/attempt/studies/{number}", one.external, b"")
    assert kept.status == 422
    assert study(served, one, "nothing").status == 404


def test_only_an_attempts_own_token_speaks_for_it(served: Served) -> None:
    sent(served)
    other = started(served, archive=DIGEST)
    one = started(served, gpus=2)
    for role in ("worker", "admin"):
        assert served.ask("GET", "/api/attempt", role).status == 403
    for role, status in (("worker", 403), (one.external, 403), (other.external, 200)):
        assert served.ask("GET", f"/api/archives/{DIGEST}", role).status == status
    assert served.ask("GET", f"/api/archives/{DIGEST}", "admin").data == CODE
    assert served.ask("GET", f"/api/archives/{'ab' * 32}", "admin").status == 404
    for role, status in ((one.external, 403), ("worker", 201)):
        assert submit(served, role, gpus=3).status == status
    names = {one["name"] for one in served.ask("GET", "/api/tokens", "admin").json["tokens"]}
    assert names == {"a read", "a submit", "a worker", "a admin"}


def test_a_start_token_is_good_once(served: Served) -> None:
    one = waiting_to_begin(served)
    served.tokens["start"] = one.token
    for method, path in (("GET", "/api/attempt"), ("GET", "/api/self"), ("POST", "/api/jobs")):
        assert served.ask(method, path, "start").status == 401
    own, other = served.tokens["own"], served.tokens["other"] = made(), made()
    assert exchanged(served, one, served.tokens["worker"]).status == 422
    for _ in range(2):  # the second time of who heard no answer
        assert exchanged(served, one, own).json == {"number": 1}
    assert served.ask("GET", "/api/attempt", "own").json["number"] == 1
    for _ in range(3):
        refused = exchanged(served, one, other)
        assert refused.status == 409 and "another has this attempt" in refused.json["detail"]
    assert served.ask("GET", "/api/attempt", "other").status == 401
    assert served.ask("GET", "/api/attempt", "start").status == 401
    last = {"state": "failed", "reason": "exit 2"}
    assert served.ask("POST", "/api/attempt/end", "own", last).status == 200
    for mine in (own, other):
        assert exchanged(served, one, mine).json["detail"] == "this attempt is over"
    (attempt,) = told(served, one.job)["attempts"]
    assert attempt["reason"] == ("its start token was used a second time, from 127.0.0.1; exit 2")
    events = actions(served)
    begins = [
        (event["action"], event["by"], event["address"])
        for event in events
        if event["action"].startswith("attempt begun")
    ]
    assert begins == [
        ("attempt begun twice", one.external, "127.0.0.1"),
        ("attempt begun", one.external, "127.0.0.1"),
    ]


def test_what_died_before_it_said_anything_has_another_start_token(served: Served) -> None:
    one = waiting_to_begin(served)
    own = made()
    assert exchanged(served, one, own).status == 200
    assert of(served, attempts.end, one.attempt, "lost", "its node is gone")
    again = waiting_to_begin(served)
    assert (again.job, again.number) == (one.job, 2) and again.token != one.token
    assert exchanged(served, one, own).status == 409
    assert exchanged(served, again, own).status == 422  # it is another's
    assert exchanged(served, again, made()).status == 200


def test_of_those_who_exchange_at_once_one_has_the_attempt(served: Served) -> None:
    one = waiting_to_begin(served)
    mine = [made() for _ in range(8)]
    said = together(8, lambda number: (exchanged(served, one, mine[number]).status, mine[number]))
    assert sorted(status for status, _own in said) == [200] + [409] * 7
    ((_status, served.tokens["own"]),) = [one for one in said if one[0] == 200]
    assert served.ask("GET", "/api/attempt", "own").json["number"] == 1


def test_archives_are_bounded_and_what_they_say(served_lite: Served) -> None:
    served = served_lite
    large = gzip.compress(random.Random(1).randbytes(2**21), 1)
    for role, status in (("read", 403), ("submit", 201), ("submit", 200)):
        assert sent(served, large, role).status == status
    assert sent(served, large, digest=DIGEST).status == 422
    assert sent(served, b"no gzip").status == 422
    assert sent(served, bytes(MAX_PACKED + 1)).status == 413
    assert served.ask("POST", "/api/jobs", "submit", b"x" * (2**20 + 1)).status == 413
    one = started(served)
    large = bytes(2**20 + 1)
    assert study(served, one, "x", large).status == 200
    assert served.ask("PUT", "/api/attempt/studies/x", "submit", large).status == 403


def test_what_is_old_goes(served: Served) -> None:
    sent(served)
    done, live = started(served, archive=DIGEST), started(served, gpus=2)
    with served.database.writing() as session:
        caller = tokens.find(session, served.tokens["read"], "")
        assert caller is not None
        over, lasting = (digest(tokens.log_in(session, caller)) for _ in range(2))
        session.get_one(schema.Session, over).expires = 1.0
    for one in (done, live):
        beat(served, one, log="x")
        study(served, one, "x", b"x")
    change(served, schema.Archive, used=0.0)
    change(served, schema.Job, changed=0.0)
    upkeep.tidy(served.service)
    assert served.ask("GET", f"/api/archives/{DIGEST}", "admin").status == 200
    ended(served, done, state="failed")
    change(served, schema.Job, changed=0.0)
    upkeep.tidy(served.service)
    assert served.ask("GET", f"/api/archives/{DIGEST}", "admin").status == 404
    assert served.ask("GET", f"/api/jobs/{done.job}/log", "read").json["text"] == ""
    assert served.ask("GET", f"/api/jobs/{live.job}/log", "read").json["text"] == "x"
    with served.database.reading() as session:
        assert list(session.scalars(select(schema.Study.job))) == [live.job]
        assert list(session.scalars(select(schema.Session.digest))) == [lasting]


def test_attempts_go_and_what_they_did_stays(served: Served) -> None:
    old, new = started(served), started(served, gpus=2)
    trial = {"number": 0, "what": "tf32"}
    for number, one in enumerate((old, new)):
        beat(served, one, trials=[trial])
        put(served, *named(record(created=1.7e9 + number)), one.external)
        ended(served, one, state="done", record=RECORD)
    job, event = schema.Job, schema.Event
    change(served, job, job.id == old.job, changed=job.changed - jobs.ATTEMPTS_KEPT_S - 1)
    change(served, event, event.action == "token made", at=event.at - tokens.AUDIT_KEPT_S - 1)
    upkeep.tidy(served.service)
    assert (told(served, old.job)["attempts"], told(served, old.job)["trials"]) == ([], [])
    assert told(served, old.job)["record"] == RECORD
    assert len(told(served, new.job)["trials"]) == 1
    events = actions(served)
    puts = [event["by"] for event in events if event["action"] == "put"]
    assert puts == [new.external, "a submit"]
    assert not [event for event in events if event["action"] == "token made"]
    with served.database.reading() as session:
        names = session.scalars(select(schema.Token.name)).all()
        owners = select(schema.Token.name).join(schema.Item, schema.Item.token == schema.Token.id)
        kept = session.scalars(owners.order_by(schema.Item.created)).all()
    assert old.external not in names and new.external in names
    assert kept == ["a submit", new.external]


def test_a_token_keeps_so_much(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what attempts at its jobs put here; another token has its own quota."""
    key, data = named(record())
    quotas_of = {schema.Archive: len(CODE), schema.Artifacts: 5, schema.Item: len(data) + 9}
    monkeypatch.setattr(quotas, "QUOTAS", quotas_of)
    assert sent(served).status == 201
    assert sent(served).status == 200
    more = gzip.compress(b"more")
    refused = sent(served, more)
    assert refused.status == 422 and "archives: this token keeps" in refused.json["detail"]
    assert sent(served, more, "admin").status == 201
    first, second = started(served), started(served, gpus=2)
    assert put(served, key, data, first.external).status == 201
    again = named(record(created=1.7e9 + 5))
    assert put(served, *again, second.external).status == 422
    assert put(served, *again).status == 201
    name = f"/api/artifacts/{'-'.join(['ab' * 6, 'cd' * 6, '1', 'ef' * 6])}.{'09' * 6}"
    for text, status in ((b"12345", 201), (b"123", 200), (b"123456", 422), (b"54321", 200)):
        assert served.ask("PUT", name, "worker", text).status == status


def test_lookups_are_counted(served: Served) -> None:
    for key in (KEY, changed(KEY, "software.driver", "590.2")):
        put(served, *named(record(key=key)))
    wanted = to_plain(fields(KEY))
    asked: list[tuple[str, dict[str, Any]]] = [
        ("exact", wanted),
        ("exact", wanted),
        ("stale", wanted | {"software.driver": "1.1"}),
        ("nearest", wanted | {"device.name": "NVIDIA B200"}),
    ]
    for _outcome, want in asked:
        assert look(served, model=KEY.model, wanted=json.dumps(want)).status == 200
    assert look(served, model="cd" * 32, wanted=json.dumps(wanted)).status == 200
    assert look(served, model=KEY.model).status == 200  # a list, and no script
    with served.database.reading() as session:
        assert session.scalar(select(schema.Lookup.day)) is None  # no lookup writes
    for _ in range(2):
        served.service.lookups.flush(served.database)
    assert look(served, model=KEY.model, wanted=json.dumps(wanted)).status == 200
    served.service.lookups.flush(served.database)
    with served.database.reading() as session:
        rows = session.scalars(select(schema.Lookup)).all()
        found = {(one.outcome, one.device): one.count for one in rows}
        places = {one.outcome: bool(one.record_key) for one in rows}
    here = KEY.environment.device.name
    assert found == {
        ("exact", here): 3,
        ("stale", here): 1,
        ("nearest", "NVIDIA B200"): 1,
        ("miss", here): 1,
    }
    assert places == {"exact": True, "stale": True, "nearest": True, "miss": False}


def test_metrics_of_jobs(served: Served) -> None:
    submit(served)
    started(served, gpus=2)
    said = served.ask("GET", "/metrics", "read").data.decode()
    assert 'advisor_jobs{state="queued"} 1.0' in said
    assert 'advisor_attempts{state="running"} 1.0' in said
    assert "advisor_oldest_waiting_job_seconds 0." in said


def together(count: int, does: Callable[[int], Any]) -> list[Any]:
    """What several threads come to that begin at once."""
    found: list[Any] = []
    begin = threading.Barrier(count)

    def run(number: int) -> None:
        begin.wait()
        found.append(does(number))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == count  # none raised
    return found


def test_eight_claim_each_job_once(served: Served) -> None:
    numbers = {submit(served, options={"seed": seed}).json["id"] for seed in range(16)}

    def claim(_number: int) -> list[Start]:
        return list(itertools.takewhile(bool, (claimed(served) for _ in itertools.count())))  # type: ignore[arg-type]

    found = [one for some in together(8, claim) for one in some]
    assert sorted(one.job for one in found) == sorted(numbers)
    assert {one.number for one in found} == {1} and len({one.token for one in found}) == 16


def test_the_same_at_once_is_one_job(served: Served) -> None:
    said = together(8, lambda _number: submit(served))
    assert sorted(one.status for one in said) == [200] * 7 + [201]
    assert len({one.json["id"] for one in said}) == 1


def test_a_job_is_finished_once(served: Served) -> None:
    """By its worker that says it twice, a reconciler that gave it up, and who cancels it."""
    for turn in range(6):
        one = started(served, options={"seed": turn})
        put(served, *named(record(created=1.7e9 + turn)), one.external)
        does: list[Callable[[], Any]] = [
            lambda one=one: ended(served, one, state="done", record=RECORD).status,  # type: ignore[misc]
            lambda one=one: ended(served, one, state="failed").status,  # type: ignore[misc]
            lambda one=one: cancelled(served, one.job).json["state"],  # type: ignore[misc]
            lambda one=one: of(served, attempts.end, one.attempt, "lost", "gone"),  # type: ignore[misc]
        ]
        does = does[turn % 2 :]
        said = together(len(does), lambda number, does=does: does[number]())  # type: ignore[misc]
        assert [*said].count(200) + said.count(True) == 1, said
        state, tries = states(served, one.job)
        assert len(tries) == 1 and tries[0] != "running"
        events = actions(served)
        subjects = [event for event in events if event["subject"].startswith(f"{one.job} ")]
        subjects += [event for event in events if event["subject"] == str(one.job)]
        last = [event["action"] for event in subjects if event["action"] != "job queued"]
        final = {"job done", "job failed", "job cancelled"}
        assert sum(action in final for action in last) == 1, last
        assert f"job {state}" in last
