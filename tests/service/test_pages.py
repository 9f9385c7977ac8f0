"""The pages, as a browser asks for them."""

from __future__ import annotations

import contextlib
import html
import html.parser
import json
import re
import time
from dataclasses import replace
from http.client import HTTPConnection
from urllib.parse import quote, urlencode

import pytest
from sqlalchemy import select, update

from advisor.cache.codec import encode, to_plain
from advisor.cache.config import Config
from advisor.cache.key import fields
from advisor.cache.name import Name
from advisor.cache.reader import Sought
from advisor.cache.record import Record, Target
from advisor.cache.records import Records
from advisor.client import Job
from advisor.jobs.token import digest
from advisor.report.jobs import listing
from advisor.report.sections import report
from advisor.report.text import LISTED
from advisor.service import coverage, job_pages, jobs, live, records, schema, tokens
from advisor.service import pages as site
from advisor.service.access import COOKIE
from tests.cache.examples import KEY, changed, record
from tests.service.serving import Answer, Served, serving, statements, token
from tests.service.test_jobs import ended, started, submit

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
        if tag not in ("meta", "link", "input", "br"):
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

    def get(self, path: str, **more: str) -> Answer:
        sent = {name.replace("_", "-"): value for name, value in more.items()}
        headers = {"Cookie": self.cookie, "Accept": "text/html,*/*", **sent}
        return self._served.ask("GET", path, headers=headers)

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


def test_who_logs_in_goes_on_to_the_page_that_was_asked_for(served: Served) -> None:
    login = served.ask("GET", "/jobs?state=done&most=2").headers["location"]
    (field,) = [
        one
        for one in Read(served.ask("GET", login).data.decode()).all("input")
        if one["name"] == "to"
    ]
    token = served.tokens["read"]
    for to, goes in {
        str(field["value"]): "/jobs?state=done&most=2",
        "//elsewhere.example": "/",
        "/\\elsewhere.example": "/",
        "/\t/elsewhere.example": "/",
        "https://elsewhere.example": "/",
        "": "/",
    }.items():
        assert post(served, "/login", {"token": token, "to": to}).headers["location"] == goes
    wrong = post(served, "/login", {"token": "x", "to": "/jobs"}).data.decode()
    assert 'value="/jobs"' in wrong


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
        there = session.get(schema.Session, digest(again.cookie.partition("=")[2]))
        assert there is not None
        there.expires = time.time() - 1
    assert again.get("/").status == 303
    gone = served.tokens["gone"] = token(served.database, "read")
    last = Browser(served, "gone")
    with served.database.writing() as session:
        caller = tokens.find(session, gone, "")
        assert caller is not None
        jobs.revoke_token(session, caller.token, caller)
    assert last.get("/").status == 303
    assert Browser(served, "worker").get("/audit").status == 403


def test_forms_of_others_are_refused(served: Served) -> None:
    browser = Browser(served, "admin")
    new = {"name": "x", "role": "read"}
    for key in ("", "x", "é", tokens.form_key("another")):
        assert browser.post("/tokens", new, key).status == 403
    assert browser.post("/tokens", new, Sec_Fetch_Site="cross-site").status == 403
    assert post(served, "/login", {"token": "x"}, Sec_Fetch_Site="cross-site").status == 403
    here = f"http://127.0.0.1:{served.port}"
    for origin, status in (
        (here, 401),
        ("http://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
    ):
        assert post(served, "/login", {"token": "x"}, Origin=origin).status == status, origin
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
        assert f"export ADVISOR_CACHE=http://127.0.0.1:{served.port} " in text
        assert "advice = advisor.apply(&#34;model.py:Net&#34;, shape=(64, 3, 256, 256)" in text
    assert browser.get("/records/000000000000@64").status == 404
    assert b"there is no record" in browser.get("/records/000000000000@64").data
    wrong = browser.get("/records/x")
    assert wrong.status == 422 and "To the fleet" in wrong.data.decode()
    monkeypatch.setattr(site, "ON_A_PAGE", 2)
    assert "Older" in browser.get("/").data.decode()
    last = browser.get("/?page=1").data.decode()
    assert "Newer" in last and "Older" not in last


@pytest.mark.parametrize("run_at", [1.69e9, 1.71e9])
@pytest.mark.parametrize("script", ["b.py", "c.py"])
def test_a_record_of_a_run_and_of_a_target_is_one_version_whole(
    served: Served, script: str, run_at: float
) -> None:
    """Whichever name is the first by its digest: title, words and numbers are of the version that
    counts; the command line says the same."""
    task = replace(KEY.task, command=("python", script), target=script)
    run, target = record(replace(KEY, task=task), script, created=run_at), record()
    for one in (run, target):
        keep(served, one)
    counts = max(run, target, key=lambda one: one.provenance.created)
    page = html.unescape(Browser(served, "read").get(f"/records/{run.id}").data.decode())
    shows = report(counts, None, None)
    assert f"<h1>{shows.title}</h1>" in page and shows.headline in page
    assert counts.key.task.baseline in shows.headline and counts.target.name in shows.title
    with served.database.reading() as session:
        stored = records.Kept(session, records.Question())
        assert Records(stored).get(run.id) == counts
        (of_run,) = Records(stored).held(Sought(target=script))
    assert of_run.record == run, "its numbers, as its words"


def test_what_is_covered_and_what_is_saved(served: Served) -> None:
    """Of lookups as scripts make them."""
    keep(served, record())
    wanted = fields(KEY)
    asked = {
        "exact": wanted,
        "stale": wanted | {"software.torch": "2.12.0"},
        "nearest": wanted | {"device.name": "NVIDIA B200"},
        "miss": wanted,
    }
    for outcome, one in asked.items():
        model = "cd" * 32 if outcome == "miss" else KEY.model
        query = urlencode({"model": model, "wanted": json.dumps(to_plain(one))})
        for _ in range(2):
            assert served.ask("GET", f"/api/lookup?{query}", "read").status == 200
    served.service.lookups.flush(served.database)
    with served.database.writing() as session:  # it came before today
        session.execute(update(schema.Item).values(stored=schema.Item.stored - 86_400))
    with served.database.reading() as session:
        (of_h200, of_b200) = coverage.covered(session)
        assert (of_h200.exact, of_h200.stale, of_h200.miss) == (2, 2, 2)
        assert of_h200.share == pytest.approx(2 / 3)
        assert (of_b200.nearest, of_b200.share) == (2, 0.0)
        saved = coverage.saved(session)
        assert (saved.starts, saved.share) == (2, pytest.approx(2 * (1 - 1 / 1.5)))
        missed = {(one.device, one.model, one.target) for one in coverage.missed(session)}
        (stale,) = coverage.outdated(session)
    h200, b200 = "NVIDIA H200", "NVIDIA B200"
    assert missed == {(h200, "cd" * 6, ""), (b200, KEY.model[:12], "model.py:Net")}
    assert (stale.record, stale.lookups) == (record().id, 2)
    text = Browser(served, "read").get("/?hours=30").data.decode()
    assert "<b>50%</b> of 8 lookups" in text and "<b>20</b> GPU hours saved" in text
    assert "Asked for, and not here" in text and "Stale, and in use" in text
    assert Browser(served, "read").get("/?hours=nan").status == 422


def test_gpu_hours_that_jobs_took(served: Served) -> None:
    one = started(served, gpus=2)
    with served.database.writing() as session:
        attempt = session.get_one(schema.Attempt, one.attempt)
        attempt.started = attempt.beat - 1800
    with served.database.reading() as session:
        assert coverage.spent(session) == pytest.approx(1.0)


def test_jobs_are_listed_and_cancelled_by_whose_they_are(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = Browser(served, "submit"), Browser(served, "worker")
    reader, admin = Browser(served, "read"), Browser(served, "admin")
    assert "Nothing was asked for yet" in reader.get("/jobs").data.decode()
    numbers = [submit(served, options={"seed": n}).json["id"] for n in range(3)]
    texts = [browser.get(f"/jobs/{numbers[0]}").data for browser in (owner, admin, other, reader)]
    assert [b">Cancel<" in text for text in texts] == [True, True, False, False]
    path = f"/jobs/{numbers[0]}/cancel"
    assert [other.post(path, {}).status, reader.post(path, {}).status] == [403, 403]
    assert owner.post(path, {}, "wrong").status == 403
    assert owner.post(path, {}).headers["location"] == f"/jobs/{numbers[0]}"
    assert admin.post(f"/jobs/{numbers[1]}/cancel", {}).status == 303
    assert admin.post("/jobs/999/cancel", {}).status == admin.get("/jobs/999").status == 404
    links = {str(one["href"]) for one in reader.read("/jobs?state=cancelled").all("a")}
    assert {f"/jobs/{n}" for n in numbers} & links == {f"/jobs/{n}" for n in numbers[:2]}
    assert "No job is done" in reader.get("/jobs?state=done").data.decode()
    assert reader.get("/jobs?state=odd").status == 422
    monkeypatch.setattr(job_pages, "ON_A_PAGE", 2)
    (older,) = re.findall(r'href="(/jobs\?before=\d+)"', reader.get("/jobs").data.decode())
    assert f'"/jobs/{numbers[0]}"' in reader.get(older).data.decode()
    assert "job cancelled" in admin.get("/audit").data.decode()


def test_a_list_has_of_a_long_job_a_line(served: Served) -> None:
    word, reason = "w" * 3000, "r" * 300
    one = started(served, command=["python", word])
    ended(served, one, state="failed", reason=reason)
    browser = Browser(served, "read")
    table = listing([Job.of(served.ask("GET", f"/api/jobs/{one.job}", "read").json)])
    assert all(len(cell) <= LISTED for row in table.rows for cell in row.cells)
    for text in (word, reason):
        assert text not in browser.get("/jobs").data.decode()
        assert text in browser.get(f"/jobs/{one.job}").data.decode()


def test_a_job_and_its_record_name_each_other(served: Served) -> None:
    shapes = ["64x3x256x256", "32x3x256x256"]
    one = started(served, command=[], target="model.py:Net", options={"shape": shapes})
    browser = Browser(served, "read")
    found = record(key=changed(KEY, "device.kind", "cpu"))
    data = encode(found)
    path = f"/api/records/{quote(Name.of(found, data).text)}"
    assert served.ask("PUT", path, one.external, data).status == 201
    page = f"/records/{found.id}"
    assert "Found by" not in browser.get(page).data.decode()
    assert ended(served, one, state="done", record=found.id).status == 200
    job = browser.read(f"/jobs/{one.job}")
    assert page in [link["href"] for link in job.all("a")]
    assert ", ".join(shapes) in browser.get(f"/jobs/{one.job}").data.decode()
    assert f"/jobs/{one.job}" in [link["href"] for link in browser.read(page).all("a")]
    assert "device=&#34;cpu&#34;" in browser.get(page).data.decode()


def test_trials_at_another_batch_are_drawn_apart(served: Served) -> None:
    one, browser = started(served), Browser(served, "read")
    trials = [
        {"number": number, "what": "tf32", "samples_per_s": speed} | known
        for number, speed, known in [
            (0, 10.0, {"batch": 64}),
            (1, 30.0, {"batch": 128}),
            (2, 20.0, {"batch": 64}),
            (3, 15.0, {}),
        ]
    ]
    assert served.ask("POST", "/api/attempt/beat", one.external, {"trials": trials}).status == 200
    with served.database.reading() as session:
        told = jobs.told(session, one.job)
    assert told is not None
    chart = job_pages.throughput(told)
    assert chart is not None
    drawn = [(point.label, point.at_batch, point.leads) for point in chart.points]
    assert drawn == [
        ("0: tf32, batch 64", True, True),
        ("1: tf32, batch 128", False, False),
        ("2: tf32, batch 64", True, True),
        ("3: tf32", True, False),
    ]
    assert "at another</span>" in browser.get(f"/jobs/{one.job}").data.decode()


def test_only_the_page_of_a_live_job_has_scripts_and_only_from_here(served: Served) -> None:
    one, browser = started(served), Browser(served, "read")
    page = browser.get(f"/jobs/{one.job}")
    assert "script-src 'self'; connect-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    for script in Read(page.data.decode()).all("script"):
        answer = served.ask("GET", str(script["src"]))
        assert answer.headers["content-type"].startswith("text/javascript"), script
    assert ended(served, one, state="failed", reason=EVIL).status == 200
    assert Read(browser.get(f"/jobs/{one.job}").data.decode()).all("script") == []
    assert "script-src" not in browser.get("/").headers["content-security-policy"]
    assert served.ask("GET", "/static/..%2Fschema.py").status == 404
    assert served.ask("GET", "/static/LICENSE-htmx").status == 404


def test_a_page_that_follows_a_job_goes_on_where_it_was(served: Served) -> None:
    one, browser = started(served, command=["python", EVIL]), Browser(served, "read")
    trial = {"number": 1, "what": EVIL, "samples_per_s": 9.0, "origin": EVIL}
    for text in ("one\n", f"{EVIL}\r\n\n", "three\n"):
        said = {"trials": [trial], "log": text}
        assert served.ask("POST", "/api/attempt/beat", one.external, said).status == 200
    loaded = browser.get(f"/jobs/{one.job}").data.decode()
    (path,) = re.findall(r'hx-sse:connect="(.*?)"', loaded)
    assert ended(served, one, state="failed", reason=EVIL).status == 200
    events = browser.get(path).data.decode()
    assert "three" not in events and "failed" in events
    assert events.endswith("event: ended\ndata:\n\n")
    whole = browser.get(f"/jobs/{one.job}/live").data.decode()
    assert 'data: <hx-partial hx-target="#log" hx-swap="beforeend">one' in whole
    for text in (loaded, events, whole):
        assert EVIL not in text and "&lt;script&gt;" in text
    with served.database.reading() as session:
        first = session.scalars(select(schema.Log.id).order_by(schema.Log.id)).first()
    after = browser.get(path.partition("?")[0], Last_Event_ID=str(first)).data.decode()
    assert ">one" not in after and "three" in after
    away = served.ask("GET", path, headers={"Accept": "text/html, text/event-stream"})
    assert (away.status, away.headers["location"]) == (303, "/session-over")
    assert "Your session is over" in served.ask("GET", "/session-over").data.decode()


def test_a_page_is_told_what_is_new_until_the_job_is_over_or_the_server_stops(
    lite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_pages, "EVERY_S", 0.02)
    with contextlib.ExitStack() as closing, serving(lite) as served:
        over, other = started(served), started(served, gpus=2)
        browser, streams = Browser(served, "read"), []
        for one in (over, other):
            connection = HTTPConnection("127.0.0.1", served.port, timeout=60)
            closing.callback(connection.close)
            headers = {"Cookie": browser.cookie}
            connection.request("GET", f"/jobs/{one.job}/live", headers=headers)
            streams.append(closing.enter_context(connection.getresponse()))
            while b"running" not in streams[-1].readline():
                pass
        trial = {"number": 0, "what": "bf16", "samples_per_s": 9.0}
        served.ask("POST", "/api/attempt/beat", over.external, {"trials": [trial], "log": "now"})
        while b">now<" not in streams[0].readline():
            pass
        with statements(served.database) as asked:
            for _ in range(4):  # nothing is new
                while streams[0].readline() != b": \n":
                    pass
        assert any("logs" in one for one, _values in asked)
        assert not any("trials.what" in one or "jobs.asked" in one for one, _values in asked)
        ended(served, over, state="failed")
        assert b"failed" in streams[0].read()
        assert served.service.streams == 1
        monkeypatch.setattr(live, "MOST_STREAMS", 1)
        assert browser.get(f"/jobs/{over.job}/live").status == 429
        served.server.should_exit = True
        assert b"failed" not in streams[1].read()


def test_why(served: Served) -> None:
    for key in (KEY, changed(KEY, "device.name", "NVIDIA B200")):
        keep(served, record(key=key))
    browser = Browser(served, "read")
    asked = {"target": "model.py:Net", "device": "NVIDIA H200", "shape": "8x3x256x256", "mode": ""}
    text = browser.get(f"/why?{urlencode(asked)}").data.decode()
    cells = r'<td class="whole">(yes|no|as stale)</td><td class="what">(.*?)</td>'
    rows = re.findall(cells, text)
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
    here = ("/", "/jobs", f"/records/{record().id}", "/why", "/tokens", "/audit", "/docs", "/login")
    for path in here:
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
