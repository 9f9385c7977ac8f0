"""A record is measured again: the job that found it is queued once more."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update

from advisor.service.run import tidy
from advisor.service.schema import Archive, Item, JobRow
from tests.cache.examples import record
from tests.service.serving import Answer, Served, revoke
from tests.service.test_jobs import CODE, DIGEST, RECORD, claimed, ended, submit, told
from tests.service.test_pages import Browser
from tests.service.test_records import named, put

H200 = "NVIDIA H200"


def found(served: Served, archive: str = DIGEST, **asked: Any) -> int:
    """A job that found the record."""
    if archive == DIGEST:
        served.ask("PUT", f"/api/archives/{DIGEST}", "submit", CODE)
    number: int = submit(served, archive=archive, **asked).json["id"]
    gpus = asked.get("gpus", 1)
    one = claimed(served, H200 if gpus else "", gpus)
    assert one is not None
    put(served, *named(record(created=1.7e9 + number)), one.external)
    assert ended(served, one, state="done", record=RECORD).status == 200
    return number


def again(served: Served, role: str = "submit") -> Answer:
    return served.ask("POST", f"/api/measure/{RECORD}", role)


@pytest.mark.parametrize(("gpus", "gpu"), [(1, H200), (0, "")])
def test_the_job_is_queued_once_more(served_lite: Served, gpus: int, gpu: str) -> None:
    served = served_lite
    first = found(served, gpus=gpus, options={"seed": 1})
    said = again(served)
    assert (said.status, said.json["state"], said.json["gpu"]) == (201, "queued", gpu)
    second = said.json["id"]
    with served.database.reading() as session:
        asked = {n: json.loads(session.get_one(JobRow, n).asked) for n in (first, second)}
    assert asked[second] == asked[first] | {"force": True, "gpu": gpu}
    assert (again(served).status, again(served).json["id"]) == (200, second)
    page = Browser(served, "submit").post(f"/records/{RECORD}/measure", {})
    assert (page.status, page.headers["location"]) == (303, f"/jobs/{second}")


def test_what_cannot_be_measured_again_says_why(served_lite: Served) -> None:
    served = served_lite
    put(served, *named(record()))
    none = again(served)
    assert none.status == 422 and "no job of this server" in none.json["detail"]
    job = found(served)
    assert again(served, "read").status == 403
    with served.database.writing() as session:
        session.execute(delete(Archive))
    assert again(served).status == 428
    revoke(served, "submit")
    assert again(served, "admin").status == 422
    page = Browser(served, "admin").post(f"/records/{RECORD}/measure", {}, Accept="text/html")
    assert page.status == 422 and b"submit the command" in page.data
    assert told(served, job)["state"] == "done"


def test_code_is_kept_as_long_as_its_record(served: Served) -> None:
    for seed, code in enumerate((CODE, CODE + b"more")):
        digest = hashlib.sha256(code).hexdigest()
        assert served.ask("PUT", f"/api/archives/{digest}", "submit", code).status == 201
        job = found(served, digest, options={"seed": seed})
    with served.database.writing() as session:
        session.execute(update(Archive).values(used=0.0))
    tidy(served.service)
    with served.database.reading() as session:
        assert list(session.scalars(select(Archive.key))) == [digest]
        assert session.get_one(JobRow, job).archive == digest
    with served.database.writing() as session:
        session.execute(delete(Item))
    tidy(served.service)
    with served.database.reading() as session:
        assert session.scalar(select(func.count(Archive.key))) == 0
