"""Jobs: submitting, claiming, losing, ending, cancelling; limits on worker messages."""

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
from tests.service.serving import Answer, LiveServer, actions, ask, begun, caller, events, token
from tests.service.test_records import packed, put

CODE = gzip.compress(b"the code")
DIGEST = hashlib.sha256(CODE).hexdigest()
COMMAND = {"command": ["python", "train.py", "--lr", "0.1"]}
RECORD = f"{record().key.id}@{record().batch}"


def submit(server: LiveServer, role: str = "submit", **asked: Any) -> Answer:
    return server.ask("POST", "/api/jobs", role, COMMAND | asked)


def job_of(server: LiveServer, number: int) -> dict[str, Any]:
    found: dict[str, Any] = server.ask("GET", f"/api/jobs/{number}", "read").json
    return found


def log_of(server: LiveServer, number: int, after: int = 0) -> dict[str, Any]:
    path = f"/api/jobs/{number}/log?after={after}"
    found: dict[str, Any] = server.ask("GET", path, "read").json
    return found


def claim_job(server: LiveServer, gpu: str = "NVIDIA H100", gpus: int = 2) -> Start | None:
    """Claim a job and begin its attempt; `server.tokens` then has the attempt's token."""
    found = commit(server, attempts.claim, "local:here", Capacity(gpu=gpu, gpus=gpus))
    if found is not None:
        server.tokens[found.external] = begun(server.database, found)
    return found


def number_of(one: Start) -> int:
    """Number of the attempt within its job, read from its external name."""
    return int(one.external.split("-")[2])


def begin(server: LiveServer, one: Start, own: str) -> Answer:
    """Send a worker's first request, with the token `own` that the worker made."""
    body = {"digest": digest(own).hex()}
    return ask(server.port, "POST", "/api/attempt/begin", one.token, body)


def unbegun(server: LiveServer) -> Start:
    """A claimed attempt whose worker has sent nothing yet."""
    assert submit(server).status < 300
    found: Start = commit(server, attempts.claim, "local:here", Capacity(gpu="NVIDIA H100", gpus=2))
    return found


def start_job(server: LiveServer, role: str = "submit", **asked: Any) -> Start:
    assert submit(server, role, **asked).status == 201
    found = claim_job(server)
    assert found is not None
    return found


def beat(server: LiveServer, one: Start, **message: Any) -> Answer:
    return server.ask("POST", "/api/attempt/beat", one.external, message)


def study_file(server: LiveServer, one: Start, name: str, *data: bytes) -> Answer:
    """PUT a study file if data is given, GET it otherwise."""
    method = "PUT" if data else "GET"
    return server.ask(method, f"/api/attempt/studies/{name}", one.external, *data)


def end(server: LiveServer, one: Start, **last: Any) -> Answer:
    return server.ask("POST", "/api/attempt/end", one.external, last)


def put_code(
    server: LiveServer, data: bytes = CODE, role: str = "submit", digest: str = ""
) -> Answer:
    digest = digest or hashlib.sha256(data).hexdigest()
    return server.ask("PUT", f"/api/archives/{digest}", role, data)


def commit(server: LiveServer, change: Callable[..., Any], *what: Any) -> Any:
    """Call a function in a transaction of its own and return its result."""
    with server.database.writing() as session:
        return change(session, *what)


def set_rows(server: LiveServer, table: type[schema.Base], *where: Any, **values: Any) -> None:
    commit(server, lambda session: session.execute(update(table).where(*where).values(**values)))


def test_a_job_goes_from_queued_to_done(server: LiveServer) -> None:
    assert submit(server, archive=DIGEST).status == 428
    for odd in (b"[]", b"[" * 100_000):
        assert server.ask("POST", "/api/jobs", "submit", odd).status == 422
    assert put_code(server).status == 201
    answer = submit(server, archive=DIGEST, folder="here", gpu="H100", options={"budget": "1m"})
    assert (answer.status, answer.json["state"], answer.json["new"]) == (201, "queued", True)
    number = answer.json["id"]
    assert answer.json["what"] == "python train.py --lr 0.1"
    one = claim_job(server)
    assert one is not None and (one.job, number_of(one), one.asked.folder) == (number, 1, "here")
    assert server.ask("GET", f"/api/archives/{DIGEST}", one.external).data == CODE
    trial = {"number": 3, "what": "tf32", "samples_per_s": 9.5, "ratio": 1.5, "origin": "guess"}
    answer = beat(server, one, trials=[trial], log="one\x1b[31m\x07\ntwo\r", device="GPU 1")
    assert answer.json == {"go_on": True}
    beat(server, one, trials=[trial], log="3")
    assert study_file(server, one, "a@1-b", b"x" * 9).status == 200
    assert study_file(server, one, "a@1-b").data == b"x" * 9
    done = {"state": "done", "record": RECORD}
    put(server, *packed(record()))  # from another token: it is not this job's record
    refused = end(server, one, **done)
    assert refused.status == 422 and "did not store it" in refused.json["detail"]
    key, data = packed(record(created=1.7e9 + 5))
    put(server, key, data, one.external)
    assert server.ask("DELETE", f"/api/records/{key}", one.external).status == 403
    assert end(server, one, **done).json == {"state": "done"}
    again = put(server, *packed(record()), one.external)
    for late in (end(server, one, state="failed"), beat(server, one), again):
        assert late.status == 401
    found = job_of(server, number)
    assert (found["state"], found["record"], found["by"]) == ("done", RECORD, "a submit")
    assert [(t["state"], t["device"]) for t in found["attempts"]] == [("done", "GPU 1")]
    assert [(t["number"], t["what"], t["ratio"]) for t in found["trials"]] == [(3, "tf32", 1.5)]
    log = log_of(server, number)
    assert (log["text"], log["ended"]) == ("one?\ntwo\n3", True)
    assert log_of(server, number, log["next"]) == log | {"text": ""}
    assert actions(server) == [
        *("job done", "attempt done", "put", "put", "attempt begun", "job running"),
        *("job submitted", "archive kept"),
        *["token made"] * 4,
    ]


def test_an_identical_submission_returns_the_existing_job(server: LiveServer) -> None:
    first = submit(server)
    assert submit(server, role="admin").json == {**first.json, "new": False}
    assert submit(server, gpus=2).json["new"]
    one = claim_job(server)
    assert one is not None and submit(server, force=True).json["id"] == one.job
    key, data = packed(record())
    put(server, key, data, one.external)
    end(server, one, state="done", record=RECORD)
    assert submit(server).json["state"] == "done"
    assert submit(server, force=True).json["new"]
    assert submit(server, **{"command": ["x"]}).status == 201
    metrics = server.ask("GET", "/metrics", "read").data.decode()
    for metric in ('jobs{state="queued"} 3', 'attempts{state="done"} 1', 'jobs{state="failed"} 0'):
        assert f"advisor_{metric}.0" in metrics
    page = server.ask("GET", "/api/jobs?most=2", "read").json
    assert [one["what"] for one in page["jobs"]] == ["x", "python train.py --lr 0.1"]
    assert page["more"]
    rest = server.ask("GET", f"/api/jobs?before={page['jobs'][-1]['id']}&state=done", "read").json
    assert [one["state"] for one in rest["jobs"]] == ["done"] and not rest["more"]
    set_rows(server, schema.JobRow, schema.JobRow.record == "", state="cancelled")
    assert not submit(server).json["new"]
    server.ask("DELETE", f"/api/records/{key}", "admin")
    assert submit(server).json["new"]
    answers = in_parallel(8, lambda _number: submit(server, options={"seed": 1}))
    assert sorted(one.status for one in answers) == [200] * 7 + [201]
    assert len({one.json["id"] for one in answers}) == 1


def states(server: LiveServer, number: int) -> tuple[str, list[str]]:
    """State of a job, and the states of its attempts."""
    found = job_of(server, number)
    return found["state"], [one["state"] for one in found["attempts"]]


def test_an_unreadable_job_and_a_failed_command_keep_their_reason(server: LiveServer) -> None:
    number = submit(server).json["id"]
    set_rows(server, schema.JobRow, asked='{"another": 1}')
    one = start_job(server, gpus=2)
    assert one.job != number
    found = job_of(server, number)
    assert found["state"] == "failed" and "unknown field `another`" in found["reason"]
    assert end(server, one, state="failed", reason="exit 2\x1b[2J").status == 200
    found = job_of(server, one.job)
    assert (found["state"], found["reason"]) == ("failed", "exit 2?[2J")
    assert claim_job(server) is None


def test_lost_attempts_are_retried_up_to_a_limit(server: LiveServer) -> None:
    one = start_job(server)
    study_file(server, one, "x", b"half")
    for number in range(1, attempts.MAX_LOST + 1):
        assert one is not None and number_of(one) == number
        assert study_file(server, one, "x").data == b"half"
        commit(server, attempts.end, one.attempt, "lost", f"node {number % 2} is gone")
        with pytest.raises(AttemptOver):
            commit(server, attempts.end, one.attempt, "lost", "again")
        assert end(server, one, state="failed").status == 401
        last, one = one, claim_job(server)
    assert one is None
    found = job_of(server, last.job)
    assert found["state"] == "failed" and len(found["attempts"]) == attempts.MAX_LOST
    assert found["reason"] == "5 attempts were lost: node 1 is gone; node 0 is gone"
    assert submit(server).json["new"]


def test_repeated_preemption_backs_off_exponentially(server: LiveServer) -> None:
    """A heartbeat resets the pause to zero."""
    pauses = []
    for turn in range(8):
        one = start_job(server) if not turn else claim_job(server) or pytest.fail("it is due")
        if turn == 6:  # this time it trains
            beat(server, one)
        end(server, one, state="preempted", reason="other processes use the GPU")
        with server.database.reading() as session:
            job = session.get_one(schema.JobRow, one.job)
            assert job.state == "preempted"
            pauses.append(max(0.0, job.due - job.changed))
        if pauses[-1]:
            reason = job_of(server, one.job)["reason"]
            assert re.fullmatch(r"waits until \d\d:\d\d:\d\d UTC: other processes .*", reason)
            assert claim_job(server) is None
        set_rows(server, schema.JobRow, due=0.0)
    assert pauses == pytest.approx([30, 60, 120, 240, 480, 600, 0, 30], abs=5)
    again = claim_job(server)
    assert again is not None
    commit(server, attempts.end, again.attempt, "preempted", "node drains")
    assert claim_job(server) is not None


def test_an_unplaceable_job_waits_with_a_reason_and_others_run(server: LiveServer) -> None:
    number = submit(server).json["id"]
    submit(server, gpus=2)
    one = unbegun(server)
    assert one.job == number
    commit(server, attempts.put_back, one.attempt, "no node has an H100")
    with pytest.raises(AttemptOver):
        commit(server, attempts.put_back, one.attempt, "again")
    assert begin(server, one, made()).status == 401
    found = job_of(server, number)
    assert found["state"] == "queued" and found["reason"].endswith(" UTC: no node has an H100")
    assert found["attempts"] == [] and found["attempt"] == 0
    other = claim_job(server)
    assert other is not None and other.job != number  # other jobs do not wait for it
    commit(server, attempts.put_back, other.attempt, "what was begun is somewhere")
    assert states(server, other.job) == ("running", ["running"]) and claim_job(server) is None
    for job, explained in ((number, True), (other.job, False)):
        commit(server, jobs.explain_wait, [schema.JobRow.id == job], "no executor")
        assert (job_of(server, job)["reason"] == "no executor") is explained
    set_rows(server, schema.JobRow, due=0.0)
    again = claim_job(server)
    assert again is not None and again.job == one.job and number_of(again) == 1


def test_revoking_a_token_cancels_its_jobs_only(server: LiveServer) -> None:
    server.tokens["gone"] = token(server.database, "submit")
    gone = caller(server, "gone")
    one = start_job(server, "gone")
    queued = submit(server, "gone", options={"seed": 1}).json["id"]
    others = submit(server, options={"seed": 2}).json["id"]
    assert server.ask("DELETE", f"/api/tokens/{gone.token}", "admin").status == 200
    for number in (one.job, queued):
        found = job_of(server, number)
        why = "the token that submitted it was revoked"
        assert (found["state"], found["reason"]) == ("cancelled", why)
    for answer in (put(server, *packed(record()), one.external), beat(server, one)):
        assert answer.status == 401
    (seen,) = commit(server, attempts.running)
    assert seen.cancelled  # the reconciler stops it
    other = claim_job(server)
    assert other is not None and other.job == others
    with pytest.raises(UsageError, match="revoked"):  # a request admitted before the revocation
        commit(server, jobs.submit, JobSpec(command=("python", "train.py")), gone)


def cancel(server: LiveServer, number: int, role: str = "submit") -> Answer:
    return server.ask("POST", f"/api/jobs/{number}/cancel", role)


@pytest.mark.parametrize("lost", [True, False])
def test_only_the_owner_or_an_admin_cancels_a_job(server: LiveServer, lost: bool) -> None:
    number = submit(server).json["id"]
    assert cancel(server, number, "worker").status == 403
    assert cancel(server, 9999999).status == 404
    for role in ("submit", "submit", "admin"):
        assert cancel(server, number, role).json == {"state": "cancelled"}
    assert claim_job(server) is None
    one = start_job(server)
    assert cancel(server, one.job, "admin").status == 200
    (seen,) = commit(server, attempts.running)
    assert seen.cancelled and seen.silent_s < 60
    assert beat(server, one, log="last words").json == {"go_on": False}
    if lost:
        commit(server, attempts.end, one.attempt, "lost", "")
    else:
        assert end(server, one, state="done", record=RECORD).status == 200
    assert states(server, one.job) == ("cancelled", ["cancelled"])
    assert end(server, one, state="failed").status == 401
    assert cancel(server, one.job).json == {"state": "cancelled"}


def test_live_jobs_are_limited(sqlite_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = sqlite_server
    monkeypatch.setattr(jobs, "MAX_LIVE", 2)
    first = submit(server, gpus=1).json["id"]
    assert submit(server, gpus=2).status == 201
    assert "this token has 2 unfinished jobs" in submit(server, gpus=3).json["detail"]
    assert submit(server, gpus=2).status == 200
    assert submit(server, "admin", gpus=3).status == 201
    cancel(server, first)
    assert submit(server, gpus=4).status == 201


def test_worker_messages_are_bounded(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start_job(server)
    for body in (
        *({"trials": [{"number": 0, "samples_per_s": odd}]} for odd in (-1.0, "x" * 70_000)),
        {"trials": [{"number": 0, "ratio": 1e99}]},
        {"trials": [{"number": 2**40, "more": 1}]},
        {"trials": [{"number": 0, "what": "x" * 70_000}]},
        {"trials": [{"number": 0}] * 1001},
        {"log": 5},
        b'{"trials": [{"number": 0, "ratio": NaN}]}',
        b'{"log": "\\ud800"}',
    ):
        assert server.ask("POST", "/api/attempt/beat", one.external, body).status == 422, body
    for last in ({"state": "queued"}, {"state": "done"}, {"state": "done", "record": "../x"}):
        assert end(server, one, **last).status == 422
    wild = [{"number": 1, "what": "a\nb\x1b[2J"}]
    assert beat(server, one, trials=wild, device="\x00", log="\0a").status == 200
    assert job_of(server, one.job)["trials"][0]["what"] == "a b?[2J"
    monkeypatch.setattr(jobs, "MAX_LOG", 100)
    for _ in range(3):
        beat(server, one, log="x" * 60)
    text = log_of(server, one.job)["text"]
    assert len(text) < 200 and text.count("the log ends here") == 1
    monkeypatch.setattr(jobs, "MAX_PIECES", 1)
    log, after = "", 0
    for _ in range(4):
        part = log_of(server, one.job, after)
        log, after = log + part["text"], part["next"]
    assert log == text
    monkeypatch.setattr(jobs, "MAX_JOB_TRIALS", 3)
    beat(server, one, trials=[{"number": number} for number in range(9)])
    assert len(job_of(server, one.job)["trials"]) == 3
    kept = [study_file(server, one, f"{n}", b"").status for n in range(attempts.MAX_STUDIES + 1)]
    assert kept == [200] * attempts.MAX_STUDIES + [422]
    assert study_file(server, one, "nothing").status == 404


def test_attempt_routes_need_the_token_of_that_attempt(server: LiveServer) -> None:
    put_code(server)
    other, one = start_job(server, archive=DIGEST), start_job(server, gpus=2)
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
        assert server.ask(method, path, role, body).status == status, (role, path)
    names = {one["name"] for one in server.ask("GET", "/api/tokens", "admin").json["tokens"]}
    assert names == {"a read", "a submit", "a worker", "a admin"}
    set_rows(server, schema.Attempt, started=schema.Attempt.started - tokens.ATTEMPT_S - 700)
    assert beat(server, one).status == 401


def test_a_start_token_works_once(server: LiveServer) -> None:
    one = unbegun(server)
    server.tokens["start"] = one.token
    for path in ("/api/attempt/beat", "/api/records", "/api/jobs"):
        assert server.ask("POST", path, "start").status == 401
    assert begin(server, one, server.tokens["worker"]).status == 422  # a token already in use
    mine = [made() for _ in range(8)]
    answers = in_parallel(8, lambda number: (begin(server, one, mine[number]).status, mine[number]))
    assert sorted(status for status, _own in answers) == [200] + [409] * 7
    ((_status, own),) = [one for one in answers if one[0] == 200]
    other = next(one for one in mine if one != own)
    server.tokens |= {"own": own, "other": other}
    again = begin(server, one, own)  # a worker that retries because it got no response
    assert again.json == {"asked": JobSpec.of(COMMAND).plain, "studies": []}
    assert "another worker has this attempt" in begin(server, one, other).json["detail"]
    for role, status in (("own", 200), ("other", 401), ("start", 401)):
        assert server.ask("POST", "/api/attempt/beat", role, {}).status == status
    last = {"state": "failed", "reason": "exit 2"}
    assert server.ask("POST", "/api/attempt/end", "own", last).status == 200
    for one_token in (own, other):
        assert begin(server, one, one_token).json["detail"] == "this attempt is over"
    (attempt,) = job_of(server, one.job)["attempts"]
    assert attempt["reason"] == "its start token was used a second time, from 127.0.0.1; exit 2"
    begins = [event for event in events(server) if event["action"].startswith("attempt begun")]
    assert [(event["action"], event["by"], event["address"]) for event in begins] == [
        ("attempt begun twice", one.external, "127.0.0.1"),
        ("attempt begun", one.external, "127.0.0.1"),
    ]


def test_archives_and_study_files_are_checked_and_bounded(sqlite_server: LiveServer) -> None:
    server = sqlite_server
    large = gzip.compress(random.Random(1).randbytes(2**21), 1)
    for role, status in (("read", 403), ("submit", 201), ("submit", 200)):
        assert put_code(server, large, role).status == status
    assert put_code(server, large, digest=DIGEST).status == 422
    assert put_code(server, b"no gzip").status == 422
    assert put_code(server, bytes(MAX_PACKED + 1)).status == 413
    one = start_job(server)
    large = bytes(2**20 + 1)
    assert study_file(server, one, "x", large).status == 200
    assert server.ask("PUT", "/api/attempt/studies/x", "submit", large).status == 403


def test_tidy_removes_old_rows_and_keeps_the_audit_log(server: LiveServer) -> None:
    put_code(server)
    old, live = start_job(server, archive=DIGEST), start_job(server, gpus=2)
    reader = caller(server, "read")
    over, lasting = (digest(commit(server, tokens.log_in, reader)) for _ in range(2))
    set_rows(server, schema.Session, schema.Session.digest == over, expires=1.0)
    for number, one in enumerate((old, live)):
        beat(server, one, log="x", trials=[{"number": 0, "what": "tf32"}])
        study_file(server, one, "x", b"x")
        put(server, *packed(record(created=1.7e9 + number)), one.external)
    event = schema.Event
    set_rows(server, event, event.action == "token made", at=event.at - tokens.AUDIT_KEPT_S - 1)
    set_rows(server, schema.Archive, used=0.0)
    for archive, trials in ((200, 1), (404, 0)):
        set_rows(server, schema.JobRow, changed=0.0)
        tidy(server.service)
        assert server.ask("GET", f"/api/archives/{DIGEST}", "admin").status == archive
        assert len(job_of(server, old.job)["trials"]) == trials
        end(server, old, state="failed")
    for one, text in ((old, ""), (live, "x")):
        found = job_of(server, one.job)
        rows = len(found["attempts"]), len(found["trials"])
        assert (log_of(server, one.job)["text"], rows) == (text, (len(text), len(text)))
    puts = [event["by"] for event in events(server) if event["action"] == "put"]
    assert puts == [live.external, old.external] and "token made" not in actions(server)
    with server.database.reading() as session:
        assert list(session.scalars(select(schema.Study.job))) == [live.job]
        assert list(session.scalars(select(schema.Session.digest))) == [lasting]
        owners = select(schema.Token.name).join(schema.Item, schema.Item.token == schema.Token.id)
        assert session.scalars(owners).all() == ["a submit"] * 2


def test_tokens_have_a_storage_quota(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads by attempts count towards the quota of the job's owner."""
    key, data = packed(record())
    quotas_of = {schema.Archive: len(CODE), schema.ArtifactsRow: 5, schema.Item: len(data) + 9}
    monkeypatch.setattr(blobs, "QUOTAS", quotas_of)
    assert put_code(server).status == 201
    assert put_code(server).status == 200
    more = gzip.compress(b"more")
    refused = put_code(server, more)
    assert refused.status == 422 and "archives: this token stores" in refused.json["detail"]
    assert put_code(server, more, "admin").status == 201
    first, second = start_job(server), start_job(server, gpus=2)
    assert put(server, key, data, first.external).status == 201
    again = packed(record(created=1.7e9 + 5))
    assert put(server, *again, second.external).status == 422
    assert put(server, *again).status == 201
    name = f"/api/artifacts/{'-'.join(['ab' * 6, 'cd' * 6, '1', 'ef' * 6])}.{'09' * 6}"
    for text, status in ((b"12345", 201), (b"123", 200), (b"123456", 422), (b"54321", 200)):
        assert server.ask("PUT", name, "worker", text).status == status


def in_parallel(count: int, does: Callable[[int], Any]) -> list[Any]:
    """Run `does` in `count` threads that start together; return the results."""
    begin = threading.Barrier(count)

    def run(number: int) -> Any:
        begin.wait()
        return does(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def test_eight_claimers_claim_each_job_once(server: LiveServer) -> None:
    numbers = {submit(server, options={"seed": seed}).json["id"] for seed in range(16)}
    claims = in_parallel(8, lambda _number: list(iter(lambda: claim_job(server), None)))
    found = [one for some in claims for one in some]
    assert sorted(one.job for one in found) == sorted(numbers)
    assert set(map(number_of, found)) == {1} and len({one.token for one in found}) == 16


def test_a_job_finishes_exactly_once(server: LiveServer) -> None:
    """Two worker messages, a reconciler and a cancellation compete to finish it."""

    def is_lost(one: Start) -> bool:
        with contextlib.suppress(AttemptOver):
            commit(server, attempts.end, one.attempt, "lost", "gone")
            return True
        return False

    finishes: list[Callable[[Start], bool]] = [
        lambda one: end(server, one, state="done", record=RECORD).status == 200,
        lambda one: end(server, one, state="failed").status == 200,
        is_lost,
        lambda one: cancel(server, one.job).status != 200,
    ]
    for turn in range(6):
        one = start_job(server, options={"seed": turn})
        put(server, *packed(record(created=1.7e9 + turn)), one.external)
        done = in_parallel(3 + turn % 2, lambda n, one=one: finishes[n](one))
        state, tries = states(server, one.job)
        assert sum(done) == len(tries) == 1 and tries[0] != "running"
        changes = ("job done", "job failed", "job cancelled")
        of_job = [e["action"] for e in events(server) if e["subject"].split()[0] == str(one.job)]
        final = [f"job {state}"] * (state != "queued")
        assert [action for action in of_job if action in changes] == final
        cancel(server, one.job)
