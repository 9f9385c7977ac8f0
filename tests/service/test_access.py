"""Access control. The tests walk over all routes, so that none is forgotten."""

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
from tests.service.serving import LiveServer, caller, revoke, serving, token

PUBLIC = {
    *(("GET", path) for path in ("/healthz", "/readyz", "/openapi.json", "/style.css", "/login")),
    ("POST", "/login"),
}
"""Routes that need no token."""
START = ("POST", "/api/attempt/begin")
"""The only route that takes an attempt's start token; it takes no other token."""
READ = {("POST", "/api/records"), ("POST", "/logout")}
"""Routes that are not GET but need only the read role."""
SUBMIT = {
    *(("PUT", "/api/archives/{digest}"), ("POST", "/api/jobs")),
    *(("POST", f"{start}/jobs/{{number}}/cancel") for start in ("", "/api")),
    *(("POST", "/api/measure/{record}"), ("POST", "/records/{id}/measure")),
}
WORK = {("GET", "/api/archives/{digest}"), ("GET", "/api/attempt/studies/{name}")}
"""GET routes that need the worker role."""
PATH_VALUES = {
    "{number}": "1",
    "{key:path}": "record/" + "/".join(["ab" * 6] * 4) + "/64/2.0.0." + "ab" * 6,
    **dict.fromkeys(("{record}", "{id}"), "ab" * 6 + "@64"),
    "{label}": "-".join(["ab" * 6, "ab" * 6, "64", "ab" * 6]) + "." + "ab" * 6,
    "{digest}": "ab" * 32,
    "{name}": "ab@1",
}


def routes(server: LiveServer) -> list[tuple[str, str]]:
    """Method and path of every route of the application."""
    found = []
    for route in iter_route_contexts(application(server.service, "1").routes):
        if not isinstance(route, Mount) and route.path != "/static":
            assert route.path and route.methods, f"{route}: could be anything"
            found += [(method, route.path) for method in sorted(set(route.methods) - {"HEAD"})]
    assert ("PUT", "/api/records/{key:path}") in found and set(found) >= PUBLIC
    return found


def fill_in(path: str) -> str:
    """The path with an example value for each parameter."""
    return re.sub(r"\{.*?\}", lambda one: PATH_VALUES[one[0]], path)


def required_role(method: str, path: str) -> str:
    if "token" in path or path == "/api/audit":
        return "admin"
    if (method, path) in SUBMIT:
        return "submit"
    return "read" if (method, path) in {("GET", path), *READ} - WORK else "worker"


def is_page(path: str) -> bool:
    return not path.startswith(("/api", "/metrics"))


def test_every_route_rejects_missing_and_invalid_tokens(sqlite_server: LiveServer) -> None:
    server = sqlite_server
    server.tokens["gone"], late = (
        token(server.database, "admin", time.time() + 0.1) for _ in range(2)
    )
    revoke(server, "gone")
    time.sleep(0.1)
    server.service.guesses = Guesses(most=10**6)
    for method, path in routes(server):
        if (method, path) in PUBLIC:
            expected = 401 if method == "POST" else 200
            assert server.ask(method, fill_in(path)).status == expected, path
            continue
        for text in ("", TOKEN_PREFIX + "x" * 43, "x", "é", server.tokens["gone"], late):
            bearer = {"Authorization": f"Bearer {text}".encode("latin-1")} if text else {}
            cookie = {"Cookie": f"{COOKIE}={text}".encode("latin-1")}
            answer = server.ask(method, fill_in(path), headers=cookie if is_page(path) else bearer)
            if is_page(path):
                assert answer.status == 303, path
                assert answer.headers["location"].partition("?")[0] == "/login", path
            else:
                assert answer.status == 401, (method, path, text, answer.data)
                assert answer.headers["www-authenticate"] == "Bearer"


def test_every_route_accepts_its_role_and_rejects_the_next_lower(sqlite_server: LiveServer) -> None:
    for level, role in enumerate(tokens.ROLES):
        one = caller(sqlite_server, role)
        cookie = f"{COOKIE}={sqlite_server.database.write(tokens.log_in, one)}"
        page = {"headers": {"Cookie": cookie, "Sec-Fetch-Site": "same-origin"}}
        for method, path in routes(sqlite_server):
            role_needed = required_role(method, path)
            lacking = tokens.ROLES.index(role_needed) - level
            if lacking not in (0, 1) or (method, path) in {*PUBLIC, START, ("POST", "/logout")}:
                continue
            how: dict[str, Any] = page if is_page(path) else {}
            answer = sqlite_server.ask(method, fill_in(path), "" if how else role, **how)
            refused = answer.status == 403 and f"role '{role_needed}';" in answer.json["detail"]
            assert refused == bool(lacking), (method, path, role, answer.data)
    assert sqlite_server.ask(*START, "admin").status == 401


def test_a_token_is_shown_once_and_only_its_digest_is_stored(server: LiveServer) -> None:
    made = server.ask("POST", "/api/tokens", "admin", {"name": "ci", "role": "worker"})
    assert made.status == 201
    text, number = made.json["token"], made.json["id"]
    assert re.fullmatch(r"adv_[\w-]{43}", text)
    assert server.ask("GET", "/api/tokens", "admin").data.find(text.encode()) == -1
    row = server.database.read(Session.get_one, schema.Token, number)
    assert row.digest == digest(text) and row.used is None
    server.tokens["ci"] = text
    assert server.ask("GET", "/api/self", "ci").json["role"] == "worker"
    server.service.flush()
    used = server.database.read(Session.get_one, schema.Token, number).used
    assert used is not None and abs(used - time.time()) < 60
    assert server.ask("DELETE", f"/api/tokens/{number}", "admin").status == 200
    assert server.ask("GET", "/api/self", "ci").status == 401
    log = server.ask("GET", "/api/audit", "admin").json["events"]
    wanted = [(action, "a admin", "127.0.0.1") for action in ("token revoked", "token made")]
    assert [(one["action"], one["by"], one["address"]) for one in log[:2]] == wanted
    assert server.ask("DELETE", "/api/tokens/99999", "admin").status == 404


def test_lookups_do_not_wait_for_writers(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup counts and token use are written later; a request that must write gets 503."""
    monkeypatch.setattr(database, "WAITS_S", 0.1)
    new = {"name": "x", "role": "read"}
    with serving(sqlite_url) as server:
        lock = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        assert server.ask("GET", "/api/lookup?file=x", "read").status == 200
        assert server.ask("POST", "/api/tokens", "admin", new).status == 503
        lock.close()
        assert server.ask("POST", "/api/tokens", "admin", new).status == 201


def test_invalid_token_requests_are_refused(sqlite_server: LiveServer) -> None:
    wrong = [{"role": "king"}, {"expires": 1.0}, {"expires": "nan"}, {"more": 1}]
    wrong += [{"name": name} for name in ("", "a\nb", "x" * 65, "'; DROP TABLE tokens; --")]
    for one in wrong:
        asked = {"name": "x", "role": "read"} | one
        assert sqlite_server.ask("POST", "/api/tokens", "admin", asked).status == 422, one


def test_token_guesses_are_limited_without_blocking_known_tokens(
    sqlite_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = sqlite_server
    server.service.guesses = Guesses(most=3)
    assert server.ask("GET", "/api/self", "read").status == 200
    guess = {"Authorization": f"Bearer {made()}"}
    statuses = [server.ask("GET", "/api/self", headers=guess).status for _ in range(3)]
    assert statuses == [401, 401, 401]
    with monkeypatch.context() as patched:
        patched.setattr(server.database, "read", lambda *_: pytest.fail("it was looked up"))
        for method, path in (
            *(("GET", "/api/self"), ("POST", "/api/attempt/beat"), ("POST", "/api/attempt/begin")),
            ("PUT", f"/api/archives/{'ab' * 32}"),
        ):
            refused = server.ask(method, path, "", {"digest": "x"}, guess)
            assert (refused.status, refused.headers["retry-after"]) == (429, "30"), path
    assert server.ask("GET", "/api/self", "read").status == 200  # known to be valid
    assert server.ask("GET", "/api/self", "admin").status == 429
    server.service.guesses = Guesses(most=1, period_s=0.0)
    assert [server.ask("GET", "/api/self", headers=guess).status for _ in range(2)] == [401] * 2


def test_audit_log_pagination(sqlite_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MAX_EVENTS", 3)
    forged = {"X-Forwarded-For": "6.6.6.6, 10.1.2.3"}
    for behind in (False, True):
        sqlite_server.service.behind_proxy = behind
        new = {"name": "x", "role": "read"}
        assert sqlite_server.ask("POST", "/api/tokens", "admin", new, headers=forged).status == 201
    seen: list[Any] = []
    while page := sqlite_server.ask(
        "GET", f"/api/audit?before={seen[-1]['id']}" if seen else "/api/audit", "admin"
    ).json["events"]:
        assert len(page) <= 3
        seen += page
    numbers = [one["id"] for one in seen]
    assert numbers == sorted(numbers, reverse=True) and len(seen) == len(tokens.ROLES) + 2
    assert [one["address"] for one in seen[:2]] == ["10.1.2.3", "127.0.0.1"]
