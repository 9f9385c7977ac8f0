"""Stale records that are in use, measured again by the server itself."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update

from advisor.cache.codec import to_plain
from advisor.cache.key import Key, fields
from advisor.service import jobs, retuning, tokens, upkeep
from advisor.service.database import Database
from advisor.service.retuning import DAY_S, RESTS_S, Retuning
from advisor.service.schema import Archive, Attempt, Item, Job, Lookup
from tests.cache.examples import KEY, changed, record
from tests.service.serving import Served
from tests.service.test_jobs import CODE, DIGEST, claimed, ended, started, told
from tests.service.test_pages import Browser
from tests.service.test_reconcile import Made
from tests.service.test_records import look, named, put

H200 = "NVIDIA H200"
NEW_TORCH = "2.12.0"
OTHER = changed(KEY, "model", "cd" * 32)


def measured(served: Served, key: Key = KEY, **asked: Any) -> int:
    """A job that found a record before today."""
    one = started(served, **asked)
    found(served, one, key)
    with served.database.writing() as session:
        session.execute(update(Item).values(stored=Item.stored - DAY_S))
    return one.job


def found(served: Served, one: Any, key: Key) -> None:
    put(served, *named(record(key=key, created=1.7e9 + one.job)), one.external)
    assert ended(served, one, state="done", record=record(key=key).id).status == 200


def starts(served: Served, count: int, key: Key = KEY, torch: str = NEW_TORCH) -> None:
    """Scripts that start with this version of torch."""
    wanted = json.dumps(to_plain(fields(changed(key, "software.torch", torch))))
    for _ in range(count):
        assert look(served, model=key.model, wanted=wanted).status == 200
    served.service.lookups.flush(served.database)


def retune(served: Served, minutes: int = 10, gpu: str = H200, gpus: int = 1) -> list[int]:
    """The server's own jobs, after it looked for what is stale."""
    served.service.retuning = Retuning([Made(gpu=gpu, gpus=gpus)], minutes)
    upkeep.retune(served.service)
    return own(served)


def own(served: Served) -> list[int]:
    with served.database.reading() as session:
        return [job.id for job in reversed(retuning.lately(session))]


def whys(served: Served) -> dict[str, str]:
    with served.database.reading() as session:
        return {one.wanted.record: one.why for one in served.service.retuning.stale(session)}


def test_what_is_most_used_is_measured_again_within_the_budget(served: Served) -> None:
    served.ask("PUT", f"/api/archives/{DIGEST}", "submit", CODE)
    little, much = measured(served, OTHER), measured(served, archive=DIGEST, options={"seed": 1})
    starts(served, 1, OTHER)
    starts(served, 2)
    starts(served, 9, torch=KEY.environment.software.torch)
    (again,) = retune(served, minutes=5)
    assert retune(served, minutes=5) == [again]  # it has the whole budget, and is one job
    job = told(served, again)
    assert (job["by"], job["state"], job["gpu"]) == ("(server)", "queued", H200)
    with served.database.reading() as session:
        asked = {n: json.loads(session.get_one(Job, n).asked) for n in (much, again)}
    assert asked[again] == asked[much] | {"force": True, "gpu": H200}
    text = Browser(served, "read").get("/").data.decode()
    assert "5 of 5 GPU minutes of 24 hours" in text and f"job {again} is queued" in text
    events = served.ask("GET", "/api/audit", "admin").json["events"]
    assert ("job submitted", "(server)") in [(one["action"], one["by"]) for one in events]
    one = claimed(served, H200)
    assert one is not None and one.job == again
    found(served, one, changed(KEY, "software.torch", NEW_TORCH))
    starts(served, 5)
    assert list(whys(served)) == [record(key=OTHER).id]  # for those of the new torch it is there
    assert len(retune(served, minutes=6)) == 2 and told(served, little)["state"] == "done"


def test_what_it_measured_itself_it_measures_again(served: Served) -> None:
    measured(served)
    starts(served, 1)
    retune(served)
    one = claimed(served, H200)
    assert one is not None
    new = changed(KEY, "software.torch", NEW_TORCH)
    found(served, one, new)
    with served.database.writing() as session:
        session.execute(update(Item).values(stored=Item.stored - DAY_S))
        session.execute(update(Job).values(changed=Job.changed - RESTS_S["done"]))
        session.execute(delete(Lookup))
    starts(served, 1, torch="2.13.0")
    assert list(whys(served)) == [record(key=new).id]
    assert len(retune(served)) == 1 and told(served, own(served)[0])["gpu"] == H200


def test_the_budget_is_of_a_day_and_counts_all_gpus(served: Served) -> None:
    measured(served, gpus=2)
    starts(served, 1)
    assert retune(served, minutes=9, gpus=2) == []
    assert "takes 10 GPU minutes" in whys(served)[record().id]
    assert retune(served, gpus=1) == []
    assert "no executor of this server has its device" in whys(served)[record().id]
    assert len(retune(served, minutes=10, gpus=2)) == 1
    one = claimed(served, H200)
    assert one is not None
    with served.database.writing() as session:
        earlier = update(Attempt).where(Attempt.id == one.attempt)
        session.execute(earlier.values(started=Attempt.started - 1800))
    with served.database.reading() as session:
        assert retuning.used(session) == pytest.approx(60, abs=1)
    ended(served, one, state="failed")
    with served.database.writing() as session:
        times = {name: getattr(Attempt, name) - DAY_S + 900 for name in ("started", "ended")}
        session.execute(earlier.values(times))
    with served.database.reading() as session:
        assert retuning.used(session) == pytest.approx(30, abs=1)


@pytest.mark.parametrize("state", ["failed", "done", "cancelled"])
def test_what_was_tried_rests(served: Served, state: str) -> None:
    """Done, too: where the executor is in the environment of before, it is as stale as it was."""
    measured(served)
    starts(served, 1)
    (first,) = retune(served)
    if state == "cancelled":
        assert served.ask("POST", f"/api/jobs/{first}/cancel", "submit").status == 403
        assert served.ask("POST", f"/api/jobs/{first}/cancel", "admin").status == 200
    else:
        one = claimed(served, H200)
        assert one is not None
        ended(served, one, state=state, record=record().id)
    assert retune(served) == [first]
    assert f"job {first} is {state}; not again before 2" in whys(served)[record().id]
    with served.database.writing() as session:
        session.execute(update(Job).values(changed=Job.changed - RESTS_S[state]))
    assert len(retune(served)) == 1 and own(served) != [first]


def test_what_cannot_be_measured_again_says_why(served: Served) -> None:
    put(served, *named(record()))
    served.ask("PUT", f"/api/archives/{DIGEST}", "submit", CODE)
    job = measured(served, OTHER, archive=DIGEST)
    starts(served, 2)
    starts(served, 1, OTHER)
    with served.database.writing() as session:
        session.execute(delete(Archive))
    assert retune(served) == []
    said = [
        "no job of this server measured it: tune it again by hand",
        f"the code of job {job} is not here any more: submit it again",
    ]
    assert list(whys(served).values()) == said
    assert said[0] in Browser(served, "read").get("/").data.decode()
    with served.database.writing() as session:
        owner = session.get_one(Job, job).token
        jobs.revoke_token(session, owner, tokens.itself(session))
    assert whys(served)[record(key=OTHER).id] == f"the token that asked for job {job} was revoked"
    assert retune(served, minutes=0) == []
    assert "--retune 0" in Browser(served, "read").get("/").data.decode()


def test_what_is_measured_anew_by_hand_is_not_measured_again(served: Served) -> None:
    measured(served)
    starts(served, 1)
    put(served, *named(record(key=changed(KEY, "software.torch", NEW_TORCH))))
    assert retune(served) == [] and whys(served) == {}


def test_on_a_cpu(served: Served) -> None:
    measured_on = started_on_cpu(served)
    starts(served, 1)
    (again,) = retune(served)
    job = told(served, again)
    assert (job["gpu"], job["gpus"], again > measured_on) == ("", 0, True)


def started_on_cpu(served: Served) -> int:
    said = served.ask("POST", "/api/jobs", "submit", {"command": ["x"], "gpus": 0})
    one = claimed(served, "", 0)
    assert one is not None
    found(served, one, KEY)
    with served.database.writing() as session:
        session.execute(update(Item).values(stored=Item.stored - DAY_S))
    number: int = said.json["id"]
    return number


def test_code_is_kept_as_long_as_its_record(served: Served) -> None:
    for code in (CODE, CODE + b"more"):
        digest = served_archive(served, code)
        job = measured(served, archive=digest)
    with served.database.writing() as session:
        session.execute(update(Archive).values(used=0.0))
    upkeep.tidy(served.service)
    with served.database.reading() as session:
        assert list(session.scalars(select(Archive.digest))) == [digest]
        assert session.get_one(Job, job).archive == digest
    with served.database.writing() as session:
        session.execute(delete(Item))
    upkeep.tidy(served.service)
    with served.database.reading() as session:
        assert session.scalar(select(func.count(Archive.digest))) == 0


def served_archive(served: Served, code: bytes) -> str:
    digest = hashlib.sha256(code).hexdigest()
    assert served.ask("PUT", f"/api/archives/{digest}", "submit", code).status == 201
    return digest


def test_several_servers_ask_once(served: Served) -> None:
    measured(served)
    starts(served, 1)
    url = served.database._engine.url.render_as_string(hide_password=False)
    databases = [Database(url) for _ in range(4)]
    each = [
        threading.Thread(target=Retuning([Made(gpu=H200, gpus=1)], 60).turn, args=(one,))
        for one in databases
    ]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    for one in databases:
        one.close()
    assert len(own(served)) == 1
    listed = served.ask("GET", "/api/tokens", "admin").json["tokens"]
    assert "(server)" not in [one["name"] for one in listed]
