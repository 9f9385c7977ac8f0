"""What was compiled for records, on a server that cannot read it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import update

from advisor.cache import settings
from advisor.cache.name import record_key
from advisor.service import artifacts
from advisor.service.schema import Artifacts
from tests.cache.examples import record
from tests.service.serving import Served
from tests.service.test_records import named, put

ONE = f"{record_key(record()).replace('/', '-')}-{'ef' * 6}.{'09' * 6}"
ALONE = f"{'ab' * 6}-{'cd' * 6}-1-{'ef' * 6}.{'09' * 6}"
LARGE = b"\0" * 2**21


def place(name: str) -> str:
    return f"/api/artifacts/{name}"


def sizes(served: Served) -> dict[str, int]:
    answer = served.ask("GET", "/api/artifacts", "read").json
    assert answer["more"] is False
    found: dict[str, int] = answer["sizes"]
    return found


def test_they_are_kept_replaced_and_removed(served: Served) -> None:
    assert served.ask("PUT", place(ONE), "worker", b"before").status == 201
    assert served.ask("PUT", place(ONE), "worker", LARGE).json == {"outcome": "replaced"}
    assert served.ask("GET", place(ONE), "read").data == LARGE
    assert sizes(served) == {ONE: len(LARGE)}
    assert served.ask("GET", f"/api/artifacts?after={ONE}", "read").json["sizes"] == {}
    for start, found in ((ONE[:-12], {ONE: len(LARGE)}), (ALONE[:-12], {}), ("-", {})):
        assert served.ask("GET", f"/api/artifacts?start={start}", "read").json["sizes"] == found
    assert served.ask("GET", "/api/artifacts?start=%25", "read").status == 422
    served.ask("PUT", place(ONE), "admin", LARGE)
    assert served.ask("DELETE", place(ONE), "worker").status == 403  # another's by now
    assert served.ask("DELETE", place(ONE), "admin").status == 200
    assert served.ask("GET", place(ONE), "read").status == 404 and sizes(served) == {}
    said = served.ask("GET", "/api/audit", "admin").json["events"]
    assert said[0]["action"] == "artifacts deleted" and said[0]["subject"] == ONE


def test_nobody_replaces_what_another_put_there(served: Served) -> None:
    """Nor becomes its owner by it: an admin's is the admin's, and what a worker put there too."""
    served.ask("PUT", place(ONE), "admin", b"the admin's")
    refused = served.ask("PUT", place(ONE), "worker", b"a worker's")
    assert refused.status == 403 and "another token put it there" in refused.json["detail"]
    assert served.ask("GET", place(ONE), "read").data == b"the admin's"
    assert served.ask("DELETE", place(ONE), "worker").status == 403
    assert served.ask("DELETE", place(ONE), "admin").status == 200
    assert served.ask("PUT", place(ONE), "worker", b"a worker's").status == 201
    assert served.ask("PUT", place(ONE), "worker", b"its next").status == 200


def test_who_may_send_how_much(served_lite: Served) -> None:
    served = served_lite
    for role in ("read", "submit"):
        for data in (LARGE, b"little"):
            assert served.ask("PUT", place(ONE), role, data).status == 403
    assert served.ask("PUT", place("elsewhere"), "worker", b"").status == 422
    too_large = bytes(settings.MAX_ARTIFACTS + 1)
    assert served.ask("PUT", place(ONE), "worker", too_large).status == 413
    assert sizes(served) == {}


def test_large_bodies_wait_for_each_other(served_lite: Served) -> None:
    """Refused ones too, or none would come any more."""
    served_lite.service.large = asyncio.Semaphore(1)
    names = [f"{ONE[:-1]}{n}" for n in range(4)]
    with ThreadPoolExecutor(4) as several:
        sent = [several.submit(served_lite.ask, "PUT", place(n), "worker", LARGE) for n in names]
        assert [one.result().status for one in sent] == [201] * 4
    assert served_lite.ask("PUT", place(ONE), "worker", b"").status == 400
    assert served_lite.ask("PUT", place(ONE), "worker", LARGE).status == 201


def test_they_go_a_day_after_their_record(served: Served) -> None:
    put(served, *named(record()))
    for name in (ONE, ALONE):
        served.ask("PUT", place(name), "worker", b"code")
    for kept in ({ONE: 4, ALONE: 4}, {ONE: 4}):
        with served.database.writing() as session:
            artifacts.tidy(session)
        assert sizes(served) == kept
        with served.database.writing() as session:
            session.execute(update(Artifacts).values(stored=0.0))
