"""Who may do what: every route is walked, so that none is forgotten."""

from __future__ import annotations

import re
import sqlite3
import time
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from sqlalchemy.orm import Session
from starlette.routing import Mount

from advisor.jobs.token import TOKEN_PREFIX, digest, made
from advisor.service import database, schema, tokens
from advisor.service.access import COOKIE, Guesses
from advisor.service.app import application
from advisor.service.routes import admin
from tests.service.serving import Served, caller, revoke, serving, token

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
    *(("POST", "/api/measure/{record}"), ("POST", "/records/{id}/measure")),
}
WORK = {
    ("GET", "/api/archives/{digest}"),
    ("GET", "/api/attempt/studies/{name}"),
}
"""Routes that only read, and are for workers."""
FILLED = {
    "{number}": "1",
    "{key:path}": "record/" + "/".join(["ab" * 6] * 4) + "/64/2.0.0." + "ab" * 6,
    **dict.fromkeys(("{record}", "{id}"), "ab" * 6 + "@64"),
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
    served = served_lite
    served.tokens["gone"], late = (
        token(served.database, "admin", time.time() + 0.1) for _ in range(2)
    )
    revoke(served, "gone")
    time.sleep(0.1)
    served.service.guesses = Guesses(most=10**6)
    for method, path in routes(served):
        if (method, path) in OPEN:
            expected = 401 if method == "POST" else 200
            assert served.ask(method, filled(path)).status == expected, path
            continue
        for text in ("", TOKEN_PREFIX + "x" * 43, "x", "é", served.tokens["gone"], late):
            bearer = {"Authorization": f"Bearer {text}".encode("latin-1")} if text else {}
            cookie = {"Cookie": f"{COOKIE}={text}".encode("latin-1")}
            answer = served.ask(method, filled(path), headers=cookie if is_page(path) else bearer)
            if is_page(path):
                assert answer.status == 303, path
                assert answer.headers["location"].partition("?")[0] == "/login", path
            else:
                assert answer.status == 401, (method, path, text, answer.data)
                assert answer.headers["www-authenticate"] == "Bearer"


def test_every_route_takes_its_role_and_not_the_one_below(served_lite: Served) -> None:
    for level, role in enumerate(tokens.ROLES):
        one = caller(served_lite, role)
        cookie = f"{COOKIE}={served_lite.database.write(tokens.log_in, one)}"
        page = {"headers": {"Cookie": cookie, "Sec-Fetch-Site": "same-origin"}}
        for method, path in routes(served_lite):
            role_needed = needed(method, path)
            lacking = tokens.ROLES.index(role_needed) - level
            if lacking not in (0, 1) or (method, path) in {*OPEN, START, ("POST", "/logout")}:
                continue
            how: dict[str, Any] = page if is_page(path) else {}
            answer = served_lite.ask(method, filled(path), "" if how else role, **how)
            refused = answer.status == 403 and f"role '{role_needed}';" in answer.json["detail"]
            assert refused == bool(lacking), (method, path, role, answer.data)
    assert served_lite.ask(*START, "admin").status == 401


def test_a_token_is_shown_once_and_not_kept(served: Served) -> None:
    made = served.ask("POST", "/api/tokens", "admin", {"name": "ci", "role": "worker"})
    assert made.status == 201
    text, number = made.json["token"], made.json["id"]
    assert re.fullmatch(r"adv_[\w-]{43}", text)
    assert served.ask("GET", "/api/tokens", "admin").data.find(text.encode()) == -1
    row = served.database.read(Session.get_one, schema.Token, number)
    assert row.digest == digest(text) and row.used is None
    served.tokens["ci"] = text
    assert served.ask("GET", "/api/self", "ci").json["role"] == "worker"
    served.service.flush()
    used = served.database.read(Session.get_one, schema.Token, number).used
    assert used is not None and abs(used - time.time()) < 60
    assert served.ask("DELETE", f"/api/tokens/{number}", "admin").status == 200
    assert served.ask("GET", "/api/self", "ci").status == 401
    log = served.ask("GET", "/api/audit", "admin").json["events"]
    wanted = [(action, "a admin", "127.0.0.1") for action in ("token revoked", "token made")]
    assert [(one["action"], one["by"], one["address"]) for one in log[:2]] == wanted
    assert served.ask("DELETE", "/api/tokens/99999", "admin").status == 404


def test_a_lookup_waits_for_no_writer(lite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds the database: lookups and uses of tokens are noted later."""
    monkeypatch.setattr(database, "WAITS_S", 0.1)
    new = {"name": "x", "role": "read"}
    with serving(lite) as served:
        lock = sqlite3.connect(lite.removeprefix("sqlite:///"), isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        assert served.ask("GET", "/api/lookup?file=x", "read").status == 200
        assert served.ask("POST", "/api/tokens", "admin", new).status == 503
        lock.close()
        assert served.ask("POST", "/api/tokens", "admin", new).status == 201


def test_tokens_that_are_not_made(served_lite: Served) -> None:
    wrong = [{"role": "king"}, {"expires": 1.0}, {"expires": "nan"}, {"more": 1}]
    wrong += [{"name": name} for name in ("", "a\nb", "x" * 65, "'; DROP TABLE tokens; --")]
    for one in wrong:
        asked = {"name": "x", "role": "read"} | one
        assert served_lite.ask("POST", "/api/tokens", "admin", asked).status == 422, one


def test_guesses_are_few_and_cost_others_nothing(
    served_lite: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = served_lite
    served.service.guesses = Guesses(most=3)
    assert served.ask("GET", "/api/self", "read").status == 200
    guess = {"Authorization": f"Bearer {made()}"}
    said = [served.ask("GET", "/api/self", headers=guess).status for _ in range(3)]
    assert said == [401, 401, 401]
    with monkeypatch.context() as patched:
        patched.setattr(served.database, "read", lambda *_: pytest.fail("it was looked up"))
        for method, path in (
            *(("GET", "/api/self"), ("POST", "/api/attempt/beat"), ("POST", "/api/attempt/begin")),
            ("PUT", f"/api/archives/{'ab' * 32}"),
        ):
            refused = served.ask(method, path, "", {"digest": "x"}, guess)
            assert (refused.status, refused.headers["retry-after"]) == (429, "30"), path
    assert served.ask("GET", "/api/self", "read").status == 200  # it was good before
    assert served.ask("GET", "/api/self", "admin").status == 429
    served.service.guesses = Guesses(most=1, period_s=0.0)
    assert [served.ask("GET", "/api/self", headers=guess).status for _ in range(2)] == [401] * 2


def test_pages_of_the_audit_log(served_lite: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MAX_EVENTS", 3)
    forged = {"X-Forwarded-For": "6.6.6.6, 10.1.2.3"}
    for behind in (False, True):
        served_lite.service.behind_proxy = behind
        new = {"name": "x", "role": "read"}
        assert served_lite.ask("POST", "/api/tokens", "admin", new, headers=forged).status == 201
    seen: list[Any] = []
    while page := served_lite.ask(
        "GET", f"/api/audit?before={seen[-1]['id']}" if seen else "/api/audit", "admin"
    ).json["events"]:
        assert len(page) <= 3
        seen += page
    numbers = [one["id"] for one in seen]
    assert numbers == sorted(numbers, reverse=True) and len(seen) == len(tokens.ROLES) + 2
    assert [one["address"] for one in seen[:2]] == ["10.1.2.3", "127.0.0.1"]
