"""Who may do what: every route is walked, so that none is forgotten."""

from __future__ import annotations

import itertools
import re
import sqlite3
import time
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from sqlalchemy import select
from starlette.routing import Mount

from advisor.jobs.token import PREFIX, digest, made
from advisor.service import database, schema, tokens
from advisor.service import jobs as jobs_of
from advisor.service.access import COOKIE
from advisor.service.app import application
from advisor.service.limits import Guesses
from advisor.service.routes import admin
from tests.service.serving import Served, serving, statements, token, wait_until

OPEN = {
    *(("GET", path) for path in ("/healthz", "/readyz", "/openapi.json", "/style.css", "/login")),
    ("POST", "/login"),
}
"""Routes that anybody may ask."""
START = ("POST", "/api/attempt/begin")
"""The route that takes an attempt's start token, and no other whatever its role."""
READ = {("POST", "/api/records"), ("POST", "/logout")}
"""Routes that a read token may use although they are no GET."""
SUBMIT = {
    *(("PUT", "/api/archives/{digest}"), ("POST", "/api/jobs")),
    *(("POST", f"{start}/jobs/{{number}}/cancel") for start in ("", "/api")),
    *(("POST", "/api/measure/{record}"), ("POST", "/records/{record}/measure")),
}
WORK = {
    *(("GET", path) for path in ("/api/archives/{digest}", "/api/attempt")),
    ("GET", "/api/attempt/studies/{name}"),
}
"""Routes that only read, and are for workers."""
FILLED = {
    "{number}": "1",
    "{key:path}": "record/" + "/".join(["ab" * 6] * 4) + "/64/2.0.0." + "ab" * 6,
    "{record}": "ab" * 6 + "@64",
    "{label}": "-".join(["ab" * 6, "ab" * 6, "64", "ab" * 6]) + "." + "ab" * 6,
    "{digest}": "ab" * 32,
    "{name}": "ab@1",
}


def routes(served: Served) -> list[tuple[str, str]]:
    """Method and path of each, from the application that is being served."""
    found = []
    for route in iter_route_contexts(application(served.service, "1").routes):
        if not isinstance(route, Mount) and route.path != "/static":
            assert route.path and route.methods, f"{route}: could be anything"
            found += [(method, route.path) for method in sorted(set(route.methods) - {"HEAD"})]
    assert ("PUT", "/api/records/{key:path}") in found and set(found) >= OPEN
    return found


def filled(path: str) -> str:
    """A path with something for each of its parameters."""
    return re.sub(r"\{.*?\}", lambda one: FILLED[one[0]], path)


def needed(method: str, path: str) -> str:
    """The role that a route needs."""
    if "token" in path or path == "/api/audit":
        return "admin"
    if (method, path) in SUBMIT:
        return "submit"
    return "read" if (method, path) in {("GET", path), *READ} - WORK else "worker"


def is_page(path: str) -> bool:
    return not path.startswith(("/api", "/metrics"))


def test_every_route_asks_for_a_token(served_lite: Served) -> None:
    gone, late = (token(served_lite.database, "admin", time.time() + 0.2) for _ in range(2))
    with served_lite.database.writing() as session:
        caller = tokens.find(session, gone, "")
        assert caller is not None and jobs_of.revoke_token(session, caller.token, caller)
    time.sleep(0.2)
    served_lite.service.guesses = Guesses(most=10**6)
    for method, path in routes(served_lite):
        if (method, path) in OPEN:
            expected = 401 if method == "POST" else 200
            assert served_lite.ask(method, filled(path)).status == expected, path
            continue
        for text in ("", PREFIX + "x" * 43, "x", "é", gone, late):
            if is_page(path):
                sent = {"Cookie": f"{COOKIE}={text}".encode("latin-1")}
                answer = served_lite.ask(method, filled(path), headers=sent)
                assert answer.status == 303, path
                assert answer.headers["location"].partition("?")[0] == "/login", path
                continue
            headers = {"Authorization": f"Bearer {text}".encode("latin-1")} if text else {}
            answer = served_lite.ask(method, filled(path), headers=headers)
            assert answer.status == 401, (method, path, text, answer.data)
            assert answer.headers["www-authenticate"] == "Bearer"


def session_of(served: Served, text: str) -> str:
    with served.database.writing() as session:
        caller = tokens.find(session, text, "")
        assert caller is not None
        return tokens.log_in(session, caller)


def test_every_role_may_what_it_may(served_lite: Served) -> None:
    for role, (method, path) in itertools.product(tokens.ROLES, routes(served_lite)):
        if (method, path) in OPEN:
            continue
        how: dict[str, Any] = {}
        if is_page(path):
            cookie = session_of(served_lite, served_lite.tokens[role])
            how["headers"] = {"Cookie": f"{COOKIE}={cookie}", "Sec-Fetch-Site": "same-origin"}
        answer = served_lite.ask(method, filled(path), "" if how else role, **how)
        if (method, path) == START:
            assert answer.status == 401, role
            continue
        may = tokens.ROLES.index(role) >= tokens.ROLES.index(needed(method, path))
        refused = answer.status == 403 and f"needs {needed(method, path)}" in answer.json["detail"]
        assert refused != may, (method, path, role, answer.data)


def test_a_token_is_shown_once_and_not_kept(served: Served) -> None:
    made = served.ask("POST", "/api/tokens", "admin", {"name": "ci", "role": "worker"})
    assert made.status == 201
    text, number = made.json["token"], made.json["id"]
    assert re.fullmatch(r"adv_[\w-]{43}", text)
    assert served.ask("GET", "/api/tokens", "admin").data.find(text.encode()) == -1
    with served.database.reading() as session:
        row = session.get(schema.Token, number)
        assert row is not None and row.digest == digest(text) and row.used is None
    served.tokens["ci"] = text
    assert served.ask("GET", "/api/self", "ci").json["role"] == "worker"
    assert abs(noted_use(served, "ci") - time.time()) < 60
    assert served.ask("DELETE", f"/api/tokens/{number}", "admin").status == 200
    assert served.ask("GET", "/api/self", "ci").status == 401
    log = served.ask("GET", "/api/audit", "admin").json["events"]
    assert [(one["action"], one["by"]) for one in log[:2]] == [
        ("token revoked", "a admin"),
        ("token made", "a admin"),
    ]
    assert log[0]["address"] == "127.0.0.1"
    assert served.ask("DELETE", "/api/tokens/99999", "admin").status == 404


def noted_use(served: Served, name: str) -> float:
    """When a token was used last, once that is noted: after the answer."""
    query = select(schema.Token.used).where(schema.Token.digest == digest(served.tokens[name]))
    found: list[float] = []

    def noted() -> bool:
        with served.database.reading() as session:
            found.extend(one for one in session.scalars(query) if one is not None)
        return bool(found)

    wait_until(noted)
    return found[0]


def test_a_lookup_waits_for_no_writer(
    lite: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever holds the database, and though the use of the token is to be noted."""
    monkeypatch.setattr(database, "WAITS_S", 0.1)
    new = {"name": "x", "role": "read"}
    with serving(lite) as served:
        lock = sqlite3.connect(lite.removeprefix("sqlite:///"), isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        assert served.ask("GET", "/api/lookup?file=x", "read").status == 200
        assert served.ask("POST", "/api/tokens", "admin", new).status == 503
        wait_until(lambda: "could not be noted" in caplog.text)
        lock.close()
        assert served.ask("POST", "/api/tokens", "admin", new).status == 201


@pytest.mark.parametrize(
    "asked",
    [
        {"name": "x", "role": "king"},
        {"name": ""},
        {"name": "a\nb"},
        {"name": "x" * 65},
        {"name": "x", "expires": 1.0},
        {"name": "x", "expires": "nan"},
        {"name": "x", "more": 1},
        {"name": "'; DROP TABLE tokens; --"},
    ],
)
def test_tokens_that_are_not_made(served_lite: Served, asked: dict[str, Any]) -> None:
    answer = served_lite.ask("POST", "/api/tokens", "admin", {"role": "read"} | asked)
    assert answer.status == 422


def test_guesses_are_few_and_cost_others_nothing(served_lite: Served) -> None:
    served = served_lite
    served.service.guesses = Guesses(most=3)
    assert served.ask("GET", "/api/self", "read").status == 200
    noted_use(served, "read")
    guess = {"Authorization": f"Bearer {made()}"}
    said = [served.ask("GET", "/api/self", headers=guess).status for _ in range(3)]
    assert said == [401, 401, 401]
    with statements(served.database) as asked:
        for method, path in (
            *(("GET", "/api/self"), ("GET", "/api/attempt"), ("POST", "/api/attempt/begin")),
            ("PUT", f"/api/archives/{'ab' * 32}"),
        ):
            refused = served.ask(method, path, "", {"digest": "x"}, guess)
            assert (refused.status, refused.headers["retry-after"]) == (429, "30"), path
    assert asked == []
    assert served.ask("GET", "/api/self", "read").status == 200  # it was good before
    assert served.ask("GET", "/api/self", "admin").status == 429
    served.service.guesses = Guesses(most=1, period_s=0.0)
    assert [served.ask("GET", "/api/self", headers=guess).status for _ in range(2)] == [401] * 2


@pytest.mark.parametrize(("behind", "seen"), [(False, "127.0.0.1"), (True, "10.1.2.3")])
def test_only_the_proxys_own_word_counts(served_lite: Served, behind: bool, seen: str) -> None:
    served_lite.service.behind_proxy = behind
    forged = {"X-Forwarded-For": "6.6.6.6, 10.1.2.3"}
    made = {"name": "x", "role": "read"}
    assert served_lite.ask("POST", "/api/tokens", "admin", made, headers=forged).status == 201
    (last, *_) = served_lite.ask("GET", "/api/audit", "admin").json["events"]
    assert last["address"] == seen


def test_the_log_has_pages(served_lite: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "EVENTS", 3)
    seen: list[int] = []
    while page := served_lite.ask(
        "GET", f"/api/audit?before={seen[-1]}" if seen else "/api/audit", "admin"
    ).json["events"]:
        assert len(page) <= 3
        seen += [one["id"] for one in page]
    assert seen == sorted(seen, reverse=True) and len(seen) == len(tokens.ROLES)


def test_a_session_is_its_tokens(served: Served) -> None:
    text = token(served.database, "admin")
    cookie = session_of(served, text)
    with served.database.writing() as session:
        caller = tokens.logged_in(session, cookie, "")
        assert caller is not None and caller.role == "admin"
        assert tokens.logged_in(session, text, "") is None
        jobs_of.revoke_token(session, caller.token, caller)
        assert tokens.logged_in(session, cookie, "") is None
