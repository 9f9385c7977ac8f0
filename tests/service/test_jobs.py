"""Jobs: asked for, claimed, lost, ended, cancelled; and what a worker may say."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select, update

from advisor.errors import UsageError
from advisor.jobs.code_archive import MAX_PACKED
from advisor.jobs.spec import AttemptOver, JobSpec
from advisor.jobs.token import digest, made
from advisor.service import attempts, blobs, jobs, schema, tokens
from advisor.service.executors import Capacity, Start
from advisor.service.run import tidy
from tests.cache.examples import record
from tests.service.serving import Answer, Served, actions, ask, begun, caller, events, token
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


def log_of(served: Served, number: int, after: int = 0) -> dict[str, Any]:
    path = f"/api/jobs/{number}/log?after={after}"
    found: dict[str, Any] = served.ask("GET", path, "read").json
    return found


def claimed(served: Served, gpu: str = "NVIDIA H100", gpus: int = 2) -> Start | None:
    """As a reconciler claims and a worker begins; its own token is then one of the served ones."""
    found = of(served, attempts.claim, "local:here", Capacity(gpu=gpu, gpus=gpus))
    if found is not None:
        served.tokens[found.external] = begun(served.database, found)
    return found


def number_of(one: Start) -> int:
    """The attempt's within its job, as its name has it."""
    return int(one.external.split("-")[2])


def exchanged(served: Served, one: Start, own: str) -> Answer:
    """What a worker that has made this token is answered to its first request."""
    body = {"digest": digest(own).hex()}
    return ask(served.port, "POST", "/api/attempt/begin", one.token, body)


def waiting_to_begin(served: Served) -> Start:
    """An attempt that was started, and whose worker has not said anything yet."""
    assert submit(served).status < 300
    found: Start = of(served, attempts.claim, "local:here", Capacity(gpu="NVIDIA H100", gpus=2))
    return found


def started(served: Served, role: str = "submit", **asked: Any) -> Start:
    """A job that was asked for and claimed."""
    assert submit(served, role, **asked).status == 201
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


def of(served: Served, change: Callable[..., Any], *what: Any) -> Any:
    """The result of one function in a transaction of its own."""
    with served.database.writing() as session:
        return change(session, *what)


def change(served: Served, table: type[schema.Base], *where: Any, **values: Any) -> None:
    of(served, lambda session: session.execute(update(table).where(*where).values(**values)))


def test_a_job_from_its_first_state_to_its_last(served: Served) -> None:
    assert submit(served, archive=DIGEST).status == 428
    for odd in (b"[]", b"[" * 100_000):
        assert served.ask("POST", "/api/jobs", "submit", odd).status == 422
    assert sent(served).status == 201
    said = submit(served, archive=DIGEST, folder="here", gpu="H100", options={"budget": "1m"})
    assert (said.status, said.json["state"], said.json["new"]) == (201, "queued", True)
    number = said.json["id"]
    assert said.json["what"] == "python train.py --lr 0.1"
    one = claimed(served)
    assert one is not None and (one.job, number_of(one), one.asked.folder) == (number, 1, "here")
    assert served.ask("GET", f"/api/archives/{DIGEST}", one.external).data == CODE
    trial = {"number": 3, "what": "tf32", "samples_per_s": 9.5, "ratio": 1.5, "origin": "guess"}
    said = beat(served, one, trials=[trial], log="one\x1b[31m\x07\ntwo\r", device="GPU 1")
    assert said.json == {"go_on": True}
    beat(served, one, trials=[trial], log="3")
    assert study(served, one, "a@1-b", b"x" * 9).status == 200
    assert study(served, one, "a@1-b").data == b"x" * 9
    done = {"state": "done", "record": RECORD}
    put(served, *named(record()))  # others' does not count: the job would name what they measured
    refused = ended(served, one, **done)
    assert refused.status == 422 and "did not store it" in refused.json["detail"]
    key, data = named(record(created=1.7e9 + 5))
    put(served, key, data, one.external)
    assert served.ask("DELETE", f"/api/records/{key}", one.external).status == 403
    assert ended(served, one, **done).json == {"state": "done"}
    again = put(served, *named(record()), one.external)
    for late in (ended(served, one, state="failed"), beat(served, one), again):
        assert late.status == 401
    found = told(served, number)
    assert (found["state"], found["record"], found["by"]) == ("done", RECORD, "a submit")
    assert [(t["state"], t["device"]) for t in found["attempts"]] == [("done", "GPU 1")]
    assert [(t["number"], t["what"], t["ratio"]) for t in found["trials"]] == [(3, "tf32", 1.5)]
    log = log_of(served, number)
    assert (log["text"], log["ended"]) == ("one?\ntwo\n3", True)
    assert log_of(served, number, log["next"]) == log | {"text": ""}
    assert actions(served) == [
        *("job done", "attempt done", "put", "put", "attempt begun", "job running"),
        *("job submitted", "archive kept"),
        *["token made"] * 4,
    ]


def test_the_same_twice_is_one_job(served: Served) -> None:
    first = submit(served)
    assert submit(served, role="admin").json == {**first.json, "new": False}
    assert submit(served, gpus=2).json["new"]
    one = claimed(served)
    assert one is not None and submit(served, force=True).json["id"] == one.job
    key, data = named(record())
    put(served, key, data, one.external)
    ended(served, one, state="done", record=RECORD)
    assert submit(served).json["state"] == "done"
    assert submit(served, force=True).json["new"]
    assert submit(served, **{"command": ["x"]}).status == 201
    metrics = served.ask("GET", "/metrics", "read").data.decode()
    for metric in ('jobs{state="queued"} 3', 'attempts{state="done"} 1', 'jobs{state="failed"} 0'):
        assert f"advisor_{metric}.0" in metrics
    page = served.ask("GET", "/api/jobs?most=2", "read").json
    assert [one["what"] for one in page["jobs"]] == ["x", "python train.py --lr 0.1"]
    assert page["more"]
    rest = served.ask("GET", f"/api/jobs?before={page['jobs'][-1]['id']}&state=done", "read").json
    assert [one["state"] for one in rest["jobs"]] == ["done"] and not rest["more"]
    change(served, schema.JobRow, schema.JobRow.record == "", state="cancelled")
    assert not submit(served).json["new"]
    served.ask("DELETE", f"/api/records/{key}", "admin")
    assert submit(served).json["new"]
    said = together(8, lambda _number: submit(served, options={"seed": 1}))
    assert sorted(one.status for one in said) == [200] * 7 + [201]
    assert len({one.json["id"] for one in said}) == 1


def states(served: Served, number: int) -> tuple[str, list[str]]:
    """Of a job and of its attempts."""
    found = told(served, number)
    return found["state"], [one["state"] for one in found["attempts"]]


def test_what_another_version_took_or_a_command_fails_with_stays(served: Served) -> None:
    number = submit(served).json["id"]
    change(served, schema.JobRow, asked='{"another": 1}')
    one = started(served, gpus=2)
    assert one.job != number
    found = told(served, number)
    assert found["state"] == "failed" and "unknown field `another`" in found["reason"]
    assert ended(served, one, state="failed", reason="exit 2\x1b[2J").status == 200
    found = told(served, one.job)
    assert (found["state"], found["reason"]) == ("failed", "exit 2?[2J")
    assert claimed(served) is None


def test_what_is_lost_is_tried_again_and_not_for_ever(served: Served) -> None:
    one = started(served)
    study(served, one, "x", b"half")
    for number in range(1, attempts.MAX_LOST + 1):
        assert one is not None and number_of(one) == number
        assert study(served, one, "x").data == b"half"
        of(served, attempts.end, one.attempt, "lost", f"node {number % 2} is gone")
        with pytest.raises(AttemptOver):
            of(served, attempts.end, one.attempt, "lost", "again")
        assert ended(served, one, state="failed").status == 401
        last, one = one, claimed(served)
    assert one is None
    found = told(served, last.job)
    assert found["state"] == "failed" and len(found["attempts"]) == attempts.MAX_LOST
    assert found["reason"] == "5 attempts were lost: node 1 is gone; node 0 is gone"
    assert submit(served).json["new"]


def test_what_cannot_begin_pauses_longer_each_time(served: Served) -> None:
    """A job that is preempted has not failed: it goes on at once if it has been tuned before."""
    pauses = []
    for turn in range(8):
        one = started(served) if not turn else claimed(served) or pytest.fail("it is due")
        if turn == 6:  # it trains for once
            beat(served, one)
        ended(served, one, state="preempted", reason="other processes use the GPU")
        with served.database.reading() as session:
            job = session.get_one(schema.JobRow, one.job)
            assert job.state == "preempted"
            pauses.append(max(0.0, job.due - job.changed))
        if pauses[-1]:
            reason = told(served, one.job)["reason"]
            assert re.fullmatch(r"waits until \d\d:\d\d:\d\d UTC: other processes .*", reason)
            assert claimed(served) is None
        change(served, schema.JobRow, due=0.0)
    assert pauses == pytest.approx([30, 60, 120, 240, 480, 600, 0, 30], abs=5)
    again = claimed(served)
    assert again is not None
    of(served, attempts.end, again.attempt, "preempted", "node drains")
    assert claimed(served) is not None


def test_what_cannot_be_placed_waits_and_says_why(served: Served) -> None:
    number = submit(served).json["id"]
    submit(served, gpus=2)
    one = waiting_to_begin(served)
    assert one.job == number
    of(served, attempts.put_back, one.attempt, "no node has an H100")
    with pytest.raises(AttemptOver):
        of(served, attempts.put_back, one.attempt, "again")
    assert exchanged(served, one, made()).status == 401
    found = told(served, number)
    assert found["state"] == "queued" and found["reason"].endswith(" UTC: no node has an H100")
    assert found["attempts"] == [] and found["attempt"] == 0
    other = claimed(served)
    assert other is not None and other.job != number  # others do not wait for it
    of(served, attempts.put_back, other.attempt, "what was begun is somewhere")
    assert states(served, other.job) == ("running", ["running"]) and claimed(served) is None
    for job, explained in ((number, True), (other.job, False)):
        of(served, jobs.explain_wait, [schema.JobRow.id == job], "no executor")
        assert (told(served, job)["reason"] == "no executor") is explained
    change(served, schema.JobRow, due=0.0)
    again = claimed(served)
    assert again is not None and again.job == one.job and number_of(again) == 1


def test_a_revoked_token_leaves_no_jobs(served: Served) -> None:
    """Neither queued nor running, nor a record: another's job goes on."""
    served.tokens["gone"] = token(served.database, "submit")
    gone = caller(served, "gone")
    one = started(served, "gone")
    queued = submit(served, "gone", options={"seed": 1}).json["id"]
    others = submit(served, options={"seed": 2}).json["id"]
    assert served.ask("DELETE", f"/api/tokens/{gone.token}", "admin").status == 200
    for number in (one.job, queued):
        found = told(served, number)
        why = "the token that submitted it was revoked"
        assert (found["state"], found["reason"]) == ("cancelled", why)
    for said in (put(served, *named(record()), one.external), beat(served, one)):
        assert said.status == 401
    (seen,) = of(served, attempts.running)
    assert seen.cancelled  # the reconciler stops it
    other = claimed(served)
    assert other is not None and other.job == others
    with pytest.raises(UsageError, match="revoked"):  # a request that was admitted before
        of(served, jobs.submit, JobSpec(command=("python", "train.py")), gone)


def cancelled(served: Served, number: int, role: str = "submit") -> Answer:
    return served.ask("POST", f"/api/jobs/{number}/cancel", role)


@pytest.mark.parametrize("lost", [True, False])
def test_a_job_is_its_owners_to_cancel(served: Served, lost: bool) -> None:
    number = submit(served).json["id"]
    assert cancelled(served, number, "worker").status == 403
    assert cancelled(served, 9999999).status == 404
    for role in ("submit", "submit", "admin"):
        assert cancelled(served, number, role).json == {"state": "cancelled"}
    assert claimed(served) is None
    one = started(served)
    assert cancelled(served, one.job, "admin").status == 200
    (seen,) = of(served, attempts.running)
    assert seen.cancelled and seen.silent_s < 60
    assert beat(served, one, log="last words").json == {"go_on": False}
    if lost:
        of(served, attempts.end, one.attempt, "lost", "")
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
    assert "this token has 2 unfinished jobs" in submit(served, gpus=3).json["detail"]
    assert submit(served, gpus=2).status == 200
    assert submit(served, "admin", gpus=3).status == 201
    cancelled(served, first)
    assert submit(served, gpus=4).status == 201


def test_what_a_worker_says_is_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    one = started(served)
    for said in (
        *({"trials": [{"number": 0, "samples_per_s": odd}]} for odd in (-1.0, "x" * 70_000)),
        {"trials": [{"number": 0, "ratio": 1e99}]},
        {"trials": [{"number": 2**40, "more": 1}]},
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
    text = log_of(served, one.job)["text"]
    assert len(text) < 200 and text.count("the log ends here") == 1
    monkeypatch.setattr(jobs, "MAX_PIECES", 1)
    log, after = "", 0
    for _ in range(4):
        part = log_of(served, one.job, after)
        log, after = log + part["text"], part["next"]
    assert log == text
    monkeypatch.setattr(jobs, "MAX_JOB_TRIALS", 3)
    beat(served, one, trials=[{"number": number} for number in range(9)])
    assert len(told(served, one.job)["trials"]) == 3
    kept = [study(served, one, f"{n}", b"").status for n in range(attempts.MAX_STUDIES + 1)]
    assert kept == [200] * attempts.MAX_STUDIES + [422]
    assert study(served, one, "nothing").status == 404


def test_only_an_attempts_own_token_speaks_for_it(served: Served) -> None:
    sent(served)
    other, one = started(served, archive=DIGEST), started(served, gpus=2)
    archive = f"/api/archives/{DIGEST}"
    for role, method, path, status in (
        *((role, "GET", "/api/attempt/studies/x", 403) for role in ("worker", "admin")),
        *((role, "GET", archive, 403) for role in ("worker", one.external)),
        *((role, "GET", archive, 200) for role in ("admin", other.external)),
        ("admin", "GET", f"/api/archives/{'ab' * 32}", 404),
        (one.external, "POST", "/api/jobs", 403),
        ("worker", "POST", "/api/jobs", 201),
    ):
        body = COMMAND | {"gpus": 3} if method == "POST" else None
        assert served.ask(method, path, role, body).status == status, (role, path)
    names = {one["name"] for one in served.ask("GET", "/api/tokens", "admin").json["tokens"]}
    assert names == {"a read", "a submit", "a worker", "a admin"}
    change(served, schema.Attempt, started=schema.Attempt.started - tokens.ATTEMPT_S - 700)
    assert beat(served, one).status == 401


def test_a_start_token_is_good_once(served: Served) -> None:
    one = waiting_to_begin(served)
    served.tokens["start"] = one.token
    for path in ("/api/attempt/beat", "/api/records", "/api/jobs"):
        assert served.ask("POST", path, "start").status == 401
    assert exchanged(served, one, served.tokens["worker"]).status == 422  # it is another's
    mine = [made() for _ in range(8)]
    said = together(8, lambda number: (exchanged(served, one, mine[number]).status, mine[number]))
    assert sorted(status for status, _own in said) == [200] + [409] * 7
    ((_status, own),) = [one for one in said if one[0] == 200]
    other = next(one for one in mine if one != own)
    served.tokens |= {"own": own, "other": other}
    again = exchanged(served, one, own)  # of a worker that heard no answer
    assert again.json == {"asked": JobSpec.of(COMMAND).plain, "studies": []}
    assert "another worker has this attempt" in exchanged(served, one, other).json["detail"]
    for role, status in (("own", 200), ("other", 401), ("start", 401)):
        assert served.ask("POST", "/api/attempt/beat", role, {}).status == status
    last = {"state": "failed", "reason": "exit 2"}
    assert served.ask("POST", "/api/attempt/end", "own", last).status == 200
    for one_token in (own, other):
        assert exchanged(served, one, one_token).json["detail"] == "this attempt is over"
    (attempt,) = told(served, one.job)["attempts"]
    assert attempt["reason"] == "its start token was used a second time, from 127.0.0.1; exit 2"
    begins = [event for event in events(served) if event["action"].startswith("attempt begun")]
    assert [(event["action"], event["by"], event["address"]) for event in begins] == [
        ("attempt begun twice", one.external, "127.0.0.1"),
        ("attempt begun", one.external, "127.0.0.1"),
    ]


def test_archives_are_bounded_and_what_they_say(served_lite: Served) -> None:
    served = served_lite
    large = gzip.compress(random.Random(1).randbytes(2**21), 1)
    for role, status in (("read", 403), ("submit", 201), ("submit", 200)):
        assert sent(served, large, role).status == status
    assert sent(served, large, digest=DIGEST).status == 422
    assert sent(served, b"no gzip").status == 422
    assert sent(served, bytes(MAX_PACKED + 1)).status == 413
    one = started(served)
    large = bytes(2**20 + 1)
    assert study(served, one, "x", large).status == 200
    assert served.ask("PUT", "/api/attempt/studies/x", "submit", large).status == 403


def test_what_is_old_goes_and_what_it_did_stays(served: Served) -> None:
    sent(served)
    old, live = started(served, archive=DIGEST), started(served, gpus=2)
    reader = caller(served, "read")
    over, lasting = (digest(of(served, tokens.log_in, reader)) for _ in range(2))
    change(served, schema.Session, schema.Session.digest == over, expires=1.0)
    for number, one in enumerate((old, live)):
        beat(served, one, log="x", trials=[{"number": 0, "what": "tf32"}])
        study(served, one, "x", b"x")
        put(served, *named(record(created=1.7e9 + number)), one.external)
    event = schema.Event
    change(served, event, event.action == "token made", at=event.at - tokens.AUDIT_KEPT_S - 1)
    change(served, schema.Archive, used=0.0)
    for archive, trials in ((200, 1), (404, 0)):
        change(served, schema.JobRow, changed=0.0)
        tidy(served.service)
        assert served.ask("GET", f"/api/archives/{DIGEST}", "admin").status == archive
        assert len(told(served, old.job)["trials"]) == trials
        ended(served, old, state="failed")
    for one, text in ((old, ""), (live, "x")):
        found = told(served, one.job)
        rows = len(found["attempts"]), len(found["trials"])
        assert (log_of(served, one.job)["text"], rows) == (text, (len(text), len(text)))
    puts = [event["by"] for event in events(served) if event["action"] == "put"]
    assert puts == [live.external, old.external] and "token made" not in actions(served)
    with served.database.reading() as session:
        assert list(session.scalars(select(schema.Study.job))) == [live.job]
        assert list(session.scalars(select(schema.Session.digest))) == [lasting]
        owners = select(schema.Token.name).join(schema.Item, schema.Item.token == schema.Token.id)
        assert session.scalars(owners).all() == ["a submit"] * 2


def test_a_token_keeps_so_much(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what attempts at its jobs put here; another token has its own quota."""
    key, data = named(record())
    quotas_of = {schema.Archive: len(CODE), schema.ArtifactsRow: 5, schema.Item: len(data) + 9}
    monkeypatch.setattr(blobs, "QUOTAS", quotas_of)
    assert sent(served).status == 201
    assert sent(served).status == 200
    more = gzip.compress(b"more")
    refused = sent(served, more)
    assert refused.status == 422 and "archives: this token stores" in refused.json["detail"]
    assert sent(served, more, "admin").status == 201
    first, second = started(served), started(served, gpus=2)
    assert put(served, key, data, first.external).status == 201
    again = named(record(created=1.7e9 + 5))
    assert put(served, *again, second.external).status == 422
    assert put(served, *again).status == 201
    name = f"/api/artifacts/{'-'.join(['ab' * 6, 'cd' * 6, '1', 'ef' * 6])}.{'09' * 6}"
    for text, status in ((b"12345", 201), (b"123", 200), (b"123456", 422), (b"54321", 200)):
        assert served.ask("PUT", name, "worker", text).status == status


def together(count: int, does: Callable[[int], Any]) -> list[Any]:
    """What several threads come to that begin at once."""
    begin = threading.Barrier(count)

    def run(number: int) -> Any:
        begin.wait()
        return does(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def test_eight_claim_each_job_once(served: Served) -> None:
    numbers = {submit(served, options={"seed": seed}).json["id"] for seed in range(16)}
    claims = together(8, lambda _number: list(iter(lambda: claimed(served), None)))
    found = [one for some in claims for one in some]
    assert sorted(one.job for one in found) == sorted(numbers)
    assert set(map(number_of, found)) == {1} and len({one.token for one in found}) == 16


def test_a_job_is_finished_once(served: Served) -> None:
    """By its worker that says it twice, a reconciler that gave it up, and who cancels it."""

    def is_lost(one: Start) -> bool:
        with contextlib.suppress(AttemptOver):
            of(served, attempts.end, one.attempt, "lost", "gone")
            return True
        return False

    finishes: list[Callable[[Start], bool]] = [
        lambda one: ended(served, one, state="done", record=RECORD).status == 200,
        lambda one: ended(served, one, state="failed").status == 200,
        is_lost,
        lambda one: cancelled(served, one.job).status != 200,
    ]
    for turn in range(6):
        one = started(served, options={"seed": turn})
        put(served, *named(record(created=1.7e9 + turn)), one.external)
        done = together(3 + turn % 2, lambda n, one=one: finishes[n](one))
        state, tries = states(served, one.job)
        assert sum(done) == len(tries) == 1 and tries[0] != "running"
        changes = ("job done", "job failed", "job cancelled")
        of_job = [e["action"] for e in events(served) if e["subject"].split()[0] == str(one.job)]
        final = [f"job {state}"] * (state != "queued")
        assert [action for action in of_job if action in changes] == final
        cancelled(served, one.job)
