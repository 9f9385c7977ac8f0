"""The pages, as a browser asks for them."""

from __future__ import annotations

import html.parser
import re
import time
from dataclasses import replace
from urllib.parse import quote, urlencode

import pytest

from advisor.cache.codec import encode
from advisor.cache.config import Config
from advisor.cache.name import Name
from advisor.cache.record import Record, Target
from advisor.service import pages as site
from advisor.service import records, schema, tokens
from advisor.service.access import COOKIE
from tests.cache.examples import KEY, changed, record
from tests.service.serving import Answer, Served, token

FORM = "application/x-www-form-urlencoded"
EVIL = "<script>alert(1)</script>"


class Read(html.parser.HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


class Browser:
    """One that is logged in."""

    def __init__(self, served: Served, role: str) -> None:
        self._served = served
        answer = post(served, "/login", {"token": served.tokens[role]})
        assert (answer.status, answer.headers["location"]) == (303, "/")
        self.set = answer.headers["set-cookie"]
        self.cookie = self.set.partition(";")[0]

    def get(self, path: str) -> Answer:
        return self._served.ask(
            "GET", path, headers={"Cookie": self.cookie, "Accept": "text/html,*/*"}
        )

    def read(self, path: str) -> Read:
        answer = self.get(path)
        assert answer.status == 200, answer.data
        return Read(answer.data.decode())

    def post(
        self, path: str, fields: dict[str, str], key: str | None = None, **more: str
    ) -> Answer:
        own = tokens.form_key(self.cookie.partition("=")[2]) if key is None else key
        return post(self._served, path, {**fields, "form_key": own}, Cookie=self.cookie, **more)


def post(served: Served, path: str, fields: dict[str, str], **headers: str) -> Answer:
    body = urlencode(fields).encode()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return served.ask("POST", path, "", body, headers={"Content-Type": FORM, **sent})


def keep(served: Served, one: Record) -> None:
    data = encode(one)
    key = Name.of(one, data).text
    assert served.ask("PUT", f"/api/records/{quote(key)}", "worker", data).status == 201


def test_a_login_is_a_cookie_that_scripts_and_other_sites_do_not_get(served: Served) -> None:
    browser = Browser(served, "read")
    for word in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"):
        assert word in browser.set
    assert "Secure" not in browser.set
    assert served.tokens["read"] not in browser.set
    served.service.behind_proxy = True
    sent = {"token": served.tokens["read"]}
    assert "Secure" in post(served, "/login", sent, X_Forwarded_Proto="https").headers["set-cookie"]
    (last, *_) = served.ask("GET", "/api/audit", "admin").json["events"]
    assert (last["action"], last["by"]) == ("logged in", "a read")
    wrong = post(served, "/login", {"token": "x"})
    assert wrong.status == 401 and "set-cookie" not in wrong.headers


def test_a_page_needs_a_session_that_holds(served: Served) -> None:
    browser = Browser(served, "admin")
    assert browser.get("/tokens").status == 200
    for cookie in ("", "x", served.tokens["admin"], "é"):
        sent = {"Cookie": f"{COOKIE}={cookie}".encode("latin-1")}
        answer = served.ask("GET", "/", headers=sent)
        assert (answer.status, answer.headers["location"]) == (303, "/login")
    assert browser.post("/logout", {}).status == 303
    assert browser.get("/").status == 303
    again = Browser(served, "admin")
    with served.database.writing() as session:
        there = session.get(schema.Session, tokens.digest(again.cookie.partition("=")[2]))
        assert there is not None
        there.expires = time.time() - 1
    assert again.get("/").status == 303
    gone = served.tokens["gone"] = token(served.database, "read")
    last = Browser(served, "gone")
    with served.database.writing() as session:
        caller = tokens.find(session, gone, "")
        assert caller is not None
        tokens.revoke(session, caller.token, caller)
    assert last.get("/").status == 303
    assert Browser(served, "worker").get("/audit").status == 403


def test_forms_of_others_are_refused(served: Served) -> None:
    browser = Browser(served, "admin")
    new = {"name": "x", "role": "read"}
    for key in ("", "x", "é", tokens.form_key("another")):
        assert browser.post("/tokens", new, key).status == 403
    assert browser.post("/tokens", new, Sec_Fetch_Site="cross-site").status == 403
    assert post(served, "/login", {"token": "x"}, Sec_Fetch_Site="cross-site").status == 403
    assert browser.post("/tokens", new, Sec_Fetch_Site="same-origin").status == 200
    many = {f"f{n}": "1" for n in range(50)}
    assert browser.post("/tokens", many).status == 422
    assert browser.post("/logout", {}, "wrong").status == 403
    names = [one["name"] for one in served.ask("GET", "/api/tokens", "admin").json["tokens"]]
    assert names.count("x") == 1


def test_tokens_are_made_and_revoked_on_their_page(served: Served) -> None:
    browser = Browser(served, "admin")
    answer = browser.post("/tokens", {"name": "gpu-01", "role": "worker", "days": "30"})
    (text,) = re.findall(r"<code>(adv_[\w-]{43})</code>", answer.data.decode())
    served.tokens["new"] = text
    assert served.ask("GET", "/api/self", "new").json["role"] == "worker"
    page = browser.get("/tokens").data.decode()
    assert text not in page and "gpu-01" in page
    (path, *_) = [one["action"] for one in Read(page).all("form") if "revoke" in str(one["action"])]
    assert browser.post(str(path), {}).status == 303
    assert served.ask("GET", "/api/self", "new").status == 401
    for days in ("-1", "x", "999999", "²"):
        said = browser.post("/tokens", {"name": "y", "role": "read", "days": days})
        assert "days: expected a number" in said.data.decode()
    assert "expected one of read" in browser.post("/tokens", {"name": "y"}).data.decode()
    assert "token revoked" in browser.get("/audit").data.decode()


def test_an_empty_server_says_what_to_do(served: Served) -> None:
    browser = Browser(served, "read")
    text = browser.get("/").data.decode()
    assert "Nothing is here yet" in text and "advisor sync" in text
    assert f"ADVISOR_CACHE=http://127.0.0.1:{served.port}" in text
    menu = [one["href"] for one in Read(text).all("a")]
    assert "/why" in menu and "/tokens" not in menu
    assert "/tokens" in browser_menu(Browser(served, "admin"))


def browser_menu(browser: Browser) -> list[str | None]:
    return [one["href"] for one in browser.read("/").all("a")]


def test_the_fleet_and_a_record(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (KEY, changed(KEY, "device.name", "NVIDIA B200"), changed(KEY, "mode", "infer")):
        keep(served, record(key=key))
    keep(served, record(created=1.72e9))  # another version of the first
    browser = Browser(served, "read")
    with served.database.reading() as session:
        lines, devices = records.newest(session, 10), records.fleet(session)
    assert len(lines) == 3 and lines[0].id == record().id
    assert [(one.device, one.records, one.mean) for one in devices] == [
        ("NVIDIA H200", 2, 1.5),
        ("NVIDIA B200", 1, 1.5),
    ]
    page = browser.read("/")
    links = [str(one["href"]) for one in page.all("a") if "/records/" in str(one["href"])]
    assert len(links) == 3 and page.all("svg")
    for link in links:
        text = browser.get(link).data.decode()
        Read(text)
        assert "What was chosen" in text and "1.5" in text
    assert browser.get("/records/000000000000@64").status == 404
    assert b"there is no record" in browser.get("/records/000000000000@64").data
    assert browser.get("/records/x").status == 422
    monkeypatch.setattr(site, "ON_A_PAGE", 2)
    assert "Older" in browser.get("/").data.decode()
    last = browser.get("/?page=1").data.decode()
    assert "Newer" in last and "Older" not in last


def test_why(served: Served) -> None:
    for key in (KEY, changed(KEY, "device.name", "NVIDIA B200")):
        keep(served, record(key=key))
    browser = Browser(served, "read")
    asked = {"target": "model.py:Net", "device": "NVIDIA H200", "shape": "8x3x256x256", "mode": ""}
    text = browser.get(f"/why?{urlencode(asked)}").data.decode()
    rows = re.findall(r"<td class=\"whole\">(yes|no|as stale)</td><td>(.*?)</td>", text)
    assert rows == [("yes", "nothing"), ("no", "device name NVIDIA B200 -&gt; NVIDIA H200")]
    assert "Nothing here is of this target" in browser.get("/why?target=other.py").data.decode()
    assert "yes" in browser.get("/why?target=model.py").data.decode()
    assert 'role="alert"' in browser.get("/why?target=x&shape=bad").data.decode()


def test_nothing_in_a_record_is_markup(served: Served) -> None:
    one = record(key=changed(KEY, "device.name", EVIL))
    task = replace(one.key.task, model_args=Config(a=EVIL), target=EVIL)
    one = replace(one, key=replace(one.key, task=task), target=Target(name=EVIL, origin="ab"))
    keep(served, one)
    browser = Browser(served, "read")
    for path in ("/", f"/records/{one.id}", f"/why?target={quote(EVIL)}&device={quote(EVIL)}"):
        text = browser.get(path).data.decode()
        assert EVIL not in text and "&lt;script&gt;" in text, path
        assert Read(text).all("script") == []
    assert EVIL not in browser.get(f"/{EVIL}").data.decode()


def test_every_page_is_of_this_server_alone_and_works_with_a_keyboard(served: Served) -> None:
    keep(served, record())
    browser = Browser(served, "admin")
    for path in ("/", f"/records/{record().id}", "/why", "/tokens", "/audit", "/docs", "/login"):
        page = browser.read(path)
        assert not page.all("script") and not page.all("img") and not page.all("iframe")
        for _tag, attrs in page.tags:
            assert "style" not in attrs and not any(name.startswith("on") for name in attrs)
            for name in ("href", "src", "action"):
                assert str(attrs.get(name, "/")).startswith(("/", "#")), (path, attrs)
        assert {"lang": "en"} in page.all("html") and page.all("main")[0]["id"] == "main"
        assert page.all("a")[0]["href"] == "#main"
        for one in page.all("div"):
            assert one.get("class") != "scroll" or one["tabindex"] == "0"
    css = browser.get("/style.css")
    assert css.headers["content-type"].startswith("text/css")
    assert "prefers-color-scheme: dark" in css.data.decode() and "url(" not in css.data.decode()


def test_the_api_is_shown(served: Served) -> None:
    text = served.ask("GET", "/docs").data.decode()
    for path in ("/api/lookup", "/api/records/{key}", "/api/tokens", "/healthz"):
        assert path in text
