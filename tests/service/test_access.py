"""Who may do what: every route is walked, so that none is forgotten."""

from __future__ import annotations

import inspect
import itertools
import re
import sqlite3
import time

import pytest
from fastapi.routing import APIRoute, iter_route_contexts
from sqlalchemy import select

from advisor.errors import UsageError
from advisor.jobs.token import PREFIX, digest, made
from advisor.service import database, schema, tokens
from advisor.service import jobs as jobs_of
from advisor.service.access import COOKIE
from advisor.service.app import application
from advisor.service.job_pages import job_pages
from advisor.service.limits import Guesses, Rate, Rates
from advisor.service.pages import site
from advisor.service.record_forms import record_forms
from advisor.service.routes import admin, attempts, health, jobs, records
from tests.service.serving import Served, serving, statements, token, wait_until

OPEN = {
    *(("GET", path) for path in ("/healthz", "/readyz", "/openapi.json", "/style.css")),
    ("GET", "/static/{file}"),
    ("GET", "/login"),
    ("POST", "/login"),
}
"""Routes that anybody may ask."""
PAGES = {
    route.path  # type: ignore[attr-defined]
    for route in (*site.routes, *job_pages.routes, *record_forms.routes)
}
"""Routes that ask for a session, and send who has none to the login."""
READING = {("POST", "/api/records")}
"""Routes that a read token may use although they are no GET."""
SUBMITTING = {
    *(("PUT", "/api/archives/{digest}"), ("POST", "/api/jobs")),
    ("POST", "/api/jobs/{number}/cancel"),
    ("POST", "/jobs/{number}/cancel"),
    ("POST", "/api/measure/{record}"),
    ("POST", "/records/{record}/measure"),
}
"""Routes that write, and no records."""
WORKING = {("GET", path) for path in ("/api/archives/{digest}", "/api/attempt")} | {
    ("GET", "/api/attempt/studies/{name}")
}
"""Routes that only read, and are for workers."""
STARTING = {("POST", "/api/attempt/begin")}
"""Routes that take an attempt's start token, and no other whatever its role."""
ADMIN = {
    *("/api/tokens", "/api/tokens/{number}", "/api/audit"),
    *("/tokens", "/tokens/{number}/revoke"),
}


def routes(served: Served) -> list[tuple[str, str]]:
    """Method and path of each, from the application that is being served."""
    found = []
    for route in iter_route_contexts(application(served.service, "1").routes):
        assert route.path and route.methods, f"{route}: could be anything"
        found += [(method, route.path) for method in sorted(set(route.methods) - {"HEAD"})]
    return found


def filled(path: str) -> str:
    """A path with something for each of its parameters."""
    key = "record/" + "/".join(["ab" * 6] * 4) + "/64/2.0.0." + "ab" * 6
    known = {
        "{number}": "1",
        "{key:path}": key,
        "{key}": "ab" * 6 + "@64",
        "{record}": "ab" * 6 + "@64",
    }
    known |= {"{label}": "-".join(["ab" * 6, "ab" * 6, "64", "ab" * 6]) + "." + "ab" * 6}
    known |= {"{digest}": "ab" * 32, "{name}": "ab@1", "{file}": "icon.svg"}
    return re.sub(r"\{.*?\}", lambda one: known[one[0]], path)


def test_every_route_asks_for_a_token(served: Served) -> None:
    known = routes(served)
    assert ("PUT", "/api/records/{key:path}") in known and len(known) > 10
    assert set(known) >= OPEN
    gone = token(served.database, "admin")
    with served.database.writing() as session:
        caller = tokens.find(session, gone, "")
        assert caller is not None and jobs_of.revoke_token(session, caller.token, caller)
    late = token(served.database, "admin", expires=time.time() + 0.2)
    time.sleep(0.3)
    served.service.guesses = Guesses(Rate(a_second=1e6, at_once=1e6))
    wrong = {
        "none": "",
        "wrong": PREFIX + "x" * 43,
        "nonsense": "x",
        "a cookie's": "é",
        "revoked": gone,
        "expired": late,
    }
    for method, path in known:
        if (method, path) in OPEN:
            expected = 401 if method == "POST" else 200
            assert served.ask(method, filled(path)).status == expected, path
            continue
        for what, text in wrong.items():
            if path in PAGES:
                sent = {"Cookie": f"{COOKIE}={text}".encode("latin-1")}
                answer = served.ask(method, filled(path), headers=sent)
                assert answer.status == 303, path
                assert answer.headers["location"].partition("?")[0] == "/login", path
                continue
            headers = {"Authorization": f"Bearer {text}".encode("latin-1")} if text else {}
            answer = served.ask(method, filled(path), headers=headers)
            assert answer.status == 401, (method, path, what, answer.data)
            assert answer.headers["www-authenticate"] == "Bearer"


def session_of(served: Served, text: str) -> str:
    with served.database.writing() as session:
        caller = tokens.find(session, text, "")
        assert caller is not None
        return tokens.log_in(session, caller)


def test_every_role_may_what_it_may(served: Served) -> None:
    known = routes(served)
    sessions = {role: session_of(served, text) for role, text in served.tokens.items()}
    for role, (method, path) in itertools.product(tokens.ROLES, known):
        if (method, path) in OPEN:
            continue
        reads = {("GET", path), *READING} - WORKING
        if path in PAGES and path not in ADMIN:
            continue  # any session may read them
        if (method, path) in STARTING:
            assert served.ask(method, filled(path), role).status == 401, (method, path, role)
            continue
        needed = "read" if (method, path) in reads else "worker"
        needed = "submit" if (method, path) in SUBMITTING else needed
        needed = "admin" if path in ADMIN else needed
        may = tokens.ROLES.index(role) >= tokens.ROLES.index(needed)
        how = {"Cookie": f"{COOKIE}={sessions[role]}"} if path in PAGES else {}
        answer = served.ask(method, filled(path), "" if how else role, headers=how)
        if how and may and method == "POST":
            assert "of another session" in answer.json["detail"]  # so far, and no further
            continue
        refused = answer.status == 403 and f"needs {needed}" in answer.json["detail"]
        assert refused != may, (method, path, role, answer.data)


def test_a_route_knows_what_it_needs() -> None:
    """Whatever its handler does: the role stands in its signature."""
    subjects = (health, records, jobs, attempts, admin)
    for route in (*(route for one in subjects for route in one.api.routes), *site.routes):
        assert isinstance(route, APIRoute)
        needs = [one.call for one in route.dependant.dependencies if hasattr(one.call, "role")]
        methods = {(method, route.path) for method in route.methods}
        assert bool(needs) != bool(methods & OPEN), route.path


def test_a_lookup_takes_two_threads() -> None:
    """One finds the token, one the records: each more costs as much as a query."""
    (route,) = [one for one in records.api.routes if one.path == "/api/lookup"]  # type: ignore[attr-defined]
    assert isinstance(route, APIRoute)
    waiting, calls = [route.dependant], set()
    while waiting:
        one = waiting.pop()
        waiting += one.dependencies
        calls.add(one.call)
    slow = [one for one in calls if not any(map(inspect.iscoroutinefunction, (one, one.__call__)))]  # type: ignore[union-attr]
    assert {one.__name__ for one in slow} == {"lookup", "caller"}  # type: ignore[union-attr]


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
    said = served.ask("GET", "/api/audit", "admin").json["events"]
    assert [(one["action"], one["by"]) for one in said[:2]] == [
        ("token revoked", "a admin"),
        ("token made", "a admin"),
    ]
    assert said[0]["address"] == "127.0.0.1"
    assert served.ask("DELETE", "/api/tokens/99999", "admin").status == 404


def noted_use(served: Served, name: str) -> float:
    """When a token was used last, once that is noted: after the answer."""
    query = select(schema.Token.used).where(schema.Token.digest == digest(served.tokens[name]))
    limit = time.monotonic() + 60
    while True:
        with served.database.reading() as session:
            if (used := session.scalar(query)) is not None:
                return used
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_lookup_waits_for_no_writer(
    lite: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever holds the database, and though the use of the token is to be noted."""
    monkeypatch.setattr(database, "WAITS_S", 0.1)
    with serving(lite) as served:
        lock = sqlite3.connect(lite.removeprefix("sqlite:///"), isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        assert served.ask("GET", "/api/lookup?file=x", "read").status == 200
        assert (
            served.ask("POST", "/api/tokens", "admin", {"name": "x", "role": "read"}).status == 503
        )
        wait_until(lambda: "could not be noted" in caplog.text)
        lock.close()
        assert (
            served.ask("POST", "/api/tokens", "admin", {"name": "x", "role": "read"}).status == 201
        )


def test_tokens_that_are_not_made(served: Served) -> None:
    for asked in (
        {"name": "x", "role": "king"},
        {"name": "", "role": "read"},
        {"name": "a\nb", "role": "read"},
        {"name": "x" * 65, "role": "read"},
        {"name": "x", "role": "read", "expires": 1.0},
        {"name": "x", "role": "read", "expires": "nan"},
        {"name": "x", "role": "read", "more": 1},
        {"name": "'; DROP TABLE tokens; --", "role": "read"},
    ):
        assert served.ask("POST", "/api/tokens", "admin", asked).status == 422, asked


def test_guesses_are_few_and_cost_others_nothing(served: Served) -> None:
    served.service.guesses = Guesses(Rate(a_second=1e-6, at_once=3))
    assert served.ask("GET", "/api/self", "read").status == 200
    noted_use(served, "read")
    guess = f"Bearer {made()}"
    said = [
        served.ask("GET", "/api/self", headers={"Authorization": guess}).status for _ in range(3)
    ]
    assert said == [401, 401, 401]
    with statements(served.database) as asked:
        for method, path in (
            *(("GET", "/api/self"), ("GET", "/api/attempt"), ("POST", "/api/attempt/begin")),
            ("PUT", f"/api/archives/{'ab' * 32}"),
        ):
            refused = served.ask(method, path, "", {"digest": "x"}, {"Authorization": guess})
            assert (refused.status, refused.headers["retry-after"]) == (429, "1"), path
    assert asked == []
    assert served.ask("GET", "/api/self", "read").status == 200  # it was good before
    assert served.ask("GET", "/api/self", "admin").status == 429


def test_a_token_is_used_so_often(served: Served) -> None:
    served.service.reads = Rates(Rate(a_second=1e-6, at_once=2))
    assert [served.ask("GET", "/api/self", "read").status for _ in range(3)] == [200, 200, 429]
    assert served.ask("GET", "/api/self", "worker").status == 200


def test_rates_fill_again() -> None:
    rates = Rates(Rate(a_second=1000, at_once=1))
    assert rates.take("a") and not Rates(Rate(a_second=1, at_once=0.5)).take("a")
    time.sleep(0.05)
    assert rates.take("a")


def test_of_a_proxys_list_only_its_own_word_counts(served: Served) -> None:
    forged = {"X-Forwarded-For": "6.6.6.6, 10.1.2.3"}
    make = {"name": "x", "role": "read"}
    for behind, seen in ((False, "127.0.0.1"), (True, "10.1.2.3")):
        served.service.behind_proxy = behind
        assert served.ask("POST", "/api/tokens", "admin", make, headers=forged).status == 201
        (last, *_) = served.ask("GET", "/api/audit", "admin").json["events"]
        assert last["address"] == seen


def test_the_log_has_pages(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "EVENTS", 3)
    seen: list[int] = []
    while page := served.ask(
        "GET", f"/api/audit?before={seen[-1]}" if seen else "/api/audit", "admin"
    ).json["events"]:
        assert len(page) <= 3
        seen += [one["id"] for one in page]
    assert seen == sorted(seen, reverse=True) and len(seen) == len(tokens.ROLES)


def test_roles_are_an_order() -> None:
    caller = tokens.Caller(1, "x", "submit")
    assert [caller.may(role) for role in tokens.ROLES] == [True, True, False, False]


def test_a_session_is_its_tokens(served: Served) -> None:
    text = token(served.database, "admin")
    with served.database.writing() as session:
        caller = tokens.find(session, text, "")
        assert caller is not None
        cookie = tokens.log_in(session, caller)
        assert tokens.logged_in(session, cookie, "") == caller
        assert tokens.logged_in(session, text, "") is None
        jobs_of.revoke_token(session, caller.token, caller)
        assert tokens.logged_in(session, cookie, "") is None


def test_a_role_is_one_of_four() -> None:
    with pytest.raises(UsageError, match="expected one of read, submit, worker, admin"):
        tokens.make(None, "x", "root", None, None)  # type: ignore[arg-type]
