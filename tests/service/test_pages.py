"""The web pages, requested as a browser does."""

from __future__ import annotations

import hashlib
import html
import json
import re
import time
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from advisor.cache.codec import to_plain
from advisor.cache.config import Config
from advisor.cache.key import fields
from advisor.cache.record import Record, Target
from advisor.client import Client
from advisor.jobs.token import MAY, digest
from advisor.report.data import Timeline
from advisor.report.jobs import listing
from advisor.report.sections import report
from advisor.report.text import LISTED, age
from advisor.service import catalog, job_pages, lookups, records, schema
from advisor.service.access import COOKIE
from advisor.service.catalog import View
from advisor.service.executors import Capacity, Machine
from advisor.service.loop import Loop
from advisor.service.run import tidy
from tests.cache.examples import KEY, changed, choice, record
from tests.face.test_doubtful import BUSY
from tests.face.test_doubtful import made as busy
from tests.service.serving import Answer, LiveServer, events, revoke
from tests.service.test_jobs import (
    CODE,
    RECORD,
    beat,
    claim_job,
    end,
    put_code,
    set_rows,
    start_job,
    submit,
)
from tests.service.test_records import packed, put

EVIL = "<script>alert(1)</script>"


def links(text: str) -> list[str]:
    return re.findall(r'<a [^>]*?href="(.*?)"', text)


def post(server: LiveServer, path: str, fields: dict[str, str], **headers: str) -> Answer:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    sent["Content-Type"] = "application/x-www-form-urlencoded"
    return server.ask("POST", path, "", urlencode(fields).encode(), headers=sent)


class Browser:
    """A logged-in browser: it sends the session cookie."""

    def __init__(self, server: LiveServer, role: str) -> None:
        self._server = server
        answer = post(server, "/login", {"token": server.tokens[role]})
        assert (answer.status, answer.headers["location"]) == (303, "/")
        self.set = answer.headers["set-cookie"]
        self.cookie = self.set.partition(";")[0]

    def get(self, path: str) -> Answer:
        headers = {"Cookie": self.cookie, "Accept": "text/html,*/*"}
        return self._server.ask("GET", path, headers=headers)

    def text(self, path: str) -> str:
        return html.unescape(self.get(path).data.decode())

    def links(self, path: str) -> list[str]:
        answer = self.get(path)
        assert answer.status == 200, answer.data
        return links(answer.data.decode())

    def post(self, path: str, fields: dict[str, str] | None = None, **more: str) -> Answer:
        return post(self._server, path, fields or {}, Cookie=self.cookie, **more)


def put_all(server: LiveServer, *several: Record) -> None:
    for one in several:
        assert put(server, *packed(one)).status == 201


def with_speedup(one: Record, speedup: float, **changes: Any) -> Record:
    """The record, with another config as winner for all uses."""
    rounds = tuple(speedup * rate for rate in one.baseline.rounds)
    best = replace(choice(speedup=speedup, rate=rounds[1]), rounds=rounds, low=rounds[0])
    best = replace(best, high=rounds[2], config=one.baseline.config.replace(threads=2))
    winners = tuple(replace(winner, choice=best) for winner in one.winners)
    return replace(one, winners=winners, **changes)


def test_a_login_sets_a_protected_cookie(sqlite_server: LiveServer) -> None:
    server = sqlite_server
    browser = Browser(server, "read")
    for word in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"):
        assert word in browser.set
    assert "Secure" not in browser.set and server.tokens["read"] not in browser.set
    server.service.behind_proxy = True
    sent = {"token": server.tokens["read"]}
    assert "Secure" in post(server, "/login", sent, X_Forwarded_Proto="https").headers["set-cookie"]
    assert (events(server)[0]["action"], events(server)[0]["by"]) == ("logged in", "a read")
    wrong = post(server, "/login", {"token": "x", "to": "/jobs"})
    assert wrong.status == 401 and "set-cookie" not in wrong.headers
    assert b'value="/jobs"' in wrong.data
    target = "/jobs?state=done&most=2"
    page = server.ask("GET", server.ask("GET", target).headers["location"])
    assert f'value="{html.escape(target)}"' in page.data.decode()
    elsewhere = ("//x.example", "/\\x.example", "/\t/x.example", "https://x.example", "")
    for to in (target, *elsewhere):
        goes = post(server, "/login", sent | {"to": to}).headers["location"]
        assert goes == (target if to == target else "/"), to


def test_a_page_needs_a_valid_session(sqlite_server: LiveServer) -> None:
    server = sqlite_server
    browser = Browser(server, "admin")
    assert browser.get("/tokens").status == 200
    for cookie in ("", "x", server.tokens["admin"], "é"):
        sent = {"Cookie": f"{COOKIE}={cookie}".encode("latin-1")}
        answer = server.ask("GET", "/", headers=sent)
        assert (answer.status, answer.headers["location"]) == (303, "/login")
    assert browser.post("/logout").status == 303
    assert browser.get("/").status == 303
    assert Browser(server, "worker").get("/tokens").status == 403
    poll = server.ask("GET", "/jobs", headers={"HX-Request": "true"})
    assert (poll.status, poll.headers["hx-refresh"]) == (401, "true"), "it goes to the login"
    late, revoked = Browser(server, "admin"), Browser(server, "worker")
    that = schema.Session.digest == digest(late.cookie.partition("=")[2])
    set_rows(server, schema.Session, that, expires=time.time() - 1)
    revoke(server, "worker")
    assert [one.get("/").status for one in (late, revoked)] == [303, 303]


def test_cross_site_forms_are_refused(sqlite_server: LiveServer) -> None:
    browser = Browser(sqlite_server, "admin")
    here = f"http://127.0.0.1:{sqlite_server.port}"
    own: list[dict[str, str]] = [{}, {"Sec_Fetch_Site": "same-origin"}, {"Origin": here}]
    others = [{"Sec_Fetch_Site": site} for site in ("cross-site", "same-site")]
    others += [{"Origin": origin} for origin in ("http://evil.example", "null", "http://[")]
    for headers in (*own, *others):
        made = browser.post("/tokens", {"name": "x", "role": "read"}, **headers)
        assert made.status == (200 if headers in own else 403), headers
        login = post(sqlite_server, "/login", {"token": "x"}, **headers)
        assert (login.status == 403) == (headers in others)
    names = [one["name"] for one in sqlite_server.ask("GET", "/api/tokens", "admin").json["tokens"]]
    assert names.count("x") == len(own)


def test_the_tokens_page_makes_and_revokes_tokens(sqlite_server: LiveServer) -> None:
    server = sqlite_server
    browser = Browser(server, "admin")
    answer = browser.post("/tokens", {"name": "gpu-01", "role": "worker", "days": "30"})
    (text,) = re.findall(r"<code>(adv_[\w-]{43})</code>", answer.data.decode())
    server.tokens["new"] = text
    assert server.ask("GET", "/api/self", "new").json["role"] == "worker"
    page = browser.text("/tokens")
    assert text not in page and "gpu-01" in page
    (path, *_) = re.findall(r'action="(/tokens/\d+/revoke)"', page)
    assert browser.post(path).status == 303
    assert server.ask("GET", "/api/self", "new").status == 401
    for days in ("-1", "x", "999999", "²"):
        response = browser.post("/tokens", {"name": "y", "role": "read", "days": days})
        assert "days: expected a number" in response.data.decode()
    assert "expected one of read" in browser.post("/tokens", {"name": "y"}).data.decode()
    assert browser.post("/tokens", {f"f{n}": "1" for n in range(50)}).status == 422
    for role, may in MAY.items():
        assert f'value="{role}"' in page and may in page


def test_an_empty_server_shows_first_steps(sqlite_server: LiveServer) -> None:
    browser = Browser(sqlite_server, "read")
    text = browser.text("/")
    assert "Nothing is here yet" in text and "advisor sync" in text
    assert f"ADVISOR_CACHE=http://127.0.0.1:{sqlite_server.port}" in text
    menu = set(links(text))
    assert {"/", "/jobs", "/machines"} <= menu and "/tokens" not in menu
    assert "/tokens" in Browser(sqlite_server, "admin").links("/")
    assert "No job yet" in browser.text("/jobs")
    for path in ("/machines", "/jobs"):
        assert 'role="alert"' in browser.text(path), "there is no executor"


def listed(browser: Browser, **view: str) -> list[str]:
    """Ids of the records that the page lists, in order."""
    links = browser.links(f"/?{urlencode(view)}")
    return [link.removeprefix("/records/") for link in links if "/records/" in link]


def test_records_sort_and_filter(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record has one row, for its newest version."""
    h200 = with_speedup(record(name="net.py:Net", created=1.7e9), 1.5)
    older = with_speedup(record(name="net.py:Net", created=1.69e9), 9.0)
    same = replace(older, provenance=replace(older.provenance, seconds=9.0))
    libraries = ("transformers==5.1.0",)
    key = replace(changed(KEY, "device.name", "NVIDIA B200"), libraries=libraries)
    b200 = with_speedup(record(key=key, name="100%.py:Net", created=1.72e9), 3.0)
    stale = record(key=changed(KEY, "mode", "infer"), name="old.py:Net", created=1.71e9)
    stale = with_speedup(stale, 2.0, stale="it is 1.1x now")
    put_all(server, older, same, h200, b200, stale)
    browser = Browser(server, "read")
    assert listed(browser) == [b200.id, stale.id, h200.id], "the newest first"
    for view, ids in (
        ({"sort": "created"}, [h200, stale, b200]),
        ({"sort": "-speedup"}, [b200, stale, h200]),
        ({"sort": "speedup", "trust": "verified"}, [h200, b200]),
        ({"sort": "model"}, [b200, h200, stale]),
        ({"device": "NVIDIA B200"}, [b200]),
        ({"framework": "transformers"}, [b200]),
        ({"framework": "torch", "sort": "-model"}, [stale, h200]),
        ({"trust": "stale"}, [stale]),
        ({"model": "NET.PY"}, [h200]),
        ({"model": "0%"}, [b200]),
        ({"model": h200.id[:9]}, [h200]),
        ({"model": "nothing"}, []),
    ):
        assert listed(browser, **view) == [one.id for one in ids], view
    (line,), number = server.database.read(catalog.listed, View(model="net.py"))
    assert (line.speedup, number) == (1.5, 1)
    page = browser.text("/?sort=-speedup&device=NVIDIA+H200")
    assert 'aria-sort="descending"><a href="/?device=NVIDIA+H200&sort=speedup"' in page
    monkeypatch.setattr(catalog, "ON_A_PAGE", 2)
    assert "Next page" in browser.text("/") and len(listed(browser)) == 2
    assert listed(browser, page="1") == [h200.id]
    last = browser.text("/?page=1")
    assert "Previous page" in last and "Next page" not in last


def test_a_record_page_starts_with_the_code_to_paste(sqlite_server: LiveServer) -> None:
    """If nothing gains, it says what to do instead."""
    made, browser = record(), Browser(sqlite_server, "read")
    put_all(sqlite_server, made)
    text = browser.text(f"/records/{made.id}")
    paste = text.index("advice = advisor.apply(")
    assert "shape=(64, 3, 256, 256)" in text
    assert paste < text.index("95% interval") < text.index("What was chosen")
    assert f"export ADVISOR_CACHE=http://127.0.0.1:{sqlite_server.port} " in text
    assert "What each knob contributes" not in text, "no empty sections"
    default = tuple(replace(one, choice=made.baseline) for one in made.winners)
    put_all(sqlite_server, replace(made, winners=default, input=Config(), revised=time.time()))
    text = browser.text(f"/records/{made.id}")
    assert "What to do: Nothing measured clearly gains on this machine" in text
    assert "export ADVISOR_CACHE" not in text


def test_error_pages_have_one_message_and_the_menu(sqlite_server: LiveServer) -> None:
    browser = Browser(sqlite_server, "read")
    for path, status, says in (
        ("/records/000000000000@64", 404, "there is no record"),
        ("/records/x", 422, "id 'x': expected a record's id, such as ae1bff61eea5@64 "),
        ("/jobs/abc", 422, "number 'abc': expected a whole number "),
        ("/jobs?before=z", 422, "before 'z': expected a whole number "),
        ("/jobs?state=odd", 422, "state 'odd': expected 'queued', 'preempted', 'running', "),
        ("/?sort=key", 422, "sort 'key': expected one of model, device, framework, "),
        ("/?trust=odd", 422, "trust 'odd': expected 'verified', 'unverified', 'doubtful' or "),
        ("/?page=-1", 422, "page '-1': expected at least 0 "),
        (f"/?model={'x' * 5000}", 422, "expected at most 4096 characters "),
        ("/odd", 404, "there is no page /odd"),
        (f"/{EVIL}", 404, "there is no page /"),
        ("/jobs/999", 404, "there is no job 999"),
    ):
        answer = browser.get(path)
        text = answer.data.decode()
        assert answer.status == status and EVIL not in text, path
        (line,) = re.findall(r'role="alert"><p>(.*?)</p>', text)
        assert says in html.unescape(line), path
        assert "should" not in line and "pars" not in line and "; " not in html.unescape(line)[:80]
        assert {"/", "/jobs", "/machines"} <= set(links(text))


def test_trust_levels_and_the_median_speedup(sqlite_server: LiveServer) -> None:
    whole = record()
    numbers = record(key=changed(KEY, "mode", "infer"))  # without a comparison with fp32
    for one, trust in (
        (numbers, "unverified"),
        (with_speedup(whole, 1.5), "verified"),
        (with_speedup(whole, 1.5, stale="now 1.0x"), "stale"),
        (busy(BUSY, 22.9), "doubtful"),
    ):
        assert records.trust_of(one) == trust
    for number in range(4):  # several, for both orders of the two keys
        one = with_speedup(record(name=f"net{number}.py:Net"), 1.5)
        put_all(sqlite_server, one, replace(one, stale="now 1.0x", revised=1.75e9))
    browser = Browser(sqlite_server, "read")
    assert len(listed(browser, trust="stale")) == len(listed(browser)) > 0
    # The median counts the newest version of each verified record.
    devices = [changed(KEY, "device.name", f"NVIDIA {one}") for one in ("B200", "L40S", "A100")]
    b200, l40s, a100 = (record(key=key, created=1.7e9) for key in devices)
    again = with_speedup(replace(b200, revised=1.75e9), 1.2)
    put_all(sqlite_server, with_speedup(b200, 9.0), again, with_speedup(l40s, 1.4), a100)
    put_all(sqlite_server, busy(BUSY, 22.9, changed(KEY, "shapes", (3, 8, 8))))
    assert sqlite_server.database.read(catalog.median) == (2, pytest.approx(1.3))
    assert "<b>1.30x</b>median speed-up of 2 verified" in browser.text("/")


@pytest.mark.parametrize("run_at", [1.69e9, 1.71e9])
@pytest.mark.parametrize("script", ["b.py", "c.py"])
def test_a_record_page_shows_one_version(
    sqlite_server: LiveServer, script: str, run_at: float
) -> None:
    """Title, texts and numbers come from the newest version, in any order of digests."""
    task = replace(KEY.task, command=("python", script), target=script)
    run, target = record(replace(KEY, task=task), script, created=run_at), record()
    put_all(sqlite_server, run, target)
    counts = max(run, target, key=lambda one: one.provenance.created)
    page = Browser(sqlite_server, "read").text(f"/records/{run.id}")
    assert f"<title>{report(counts, None, None).title} - advisor</title>" in page
    assert f"<h1>{counts.target.name}</h1>" in page
    assert f"as fast as {counts.key.task.baseline}</div>" in page


def test_lookup_statistics_on_the_home_page(server: LiveServer) -> None:
    put_all(server, record())
    wanted = fields(KEY)
    for outcome, one in {
        "exact": wanted,
        "stale": wanted | {"software.torch": "2.12.0"},
        "nearest": wanted | {"device.name": "NVIDIA B200"},
        "miss": wanted,
    }.items():
        model = "cd" * 32 if outcome == "miss" else KEY.model
        query = urlencode({"model": model, "wanted": json.dumps(to_plain(one))})
        for _ in range(2):
            assert server.ask("GET", f"/api/lookup?{query}", "read").status == 200
    server.service.flush()
    read = server.database.read
    missed = {(one.device, one.model, one.target) for one in read(lookups.missed)}
    (line,), _number = read(catalog.listed, View())
    assert read(lookups.covered) == dict.fromkeys(["exact", "stale", "nearest", "miss"], 2)
    h200, b200 = "NVIDIA H200", "NVIDIA B200"
    assert missed == {(h200, "cd" * 6, ""), (b200, KEY.model[:12], "model.py:Net")}
    assert (line.used, line.stale) == (4, 2)
    text = Browser(server, "read").text("/")
    assert "<b>50%</b>of 8 lookups" in text and "2 other software" in text
    assert "Looked up, but not measured" in text


def test_the_machines_page(sqlite_server: LiveServer) -> None:
    server = sqlite_server
    browser = Browser(server, "read")
    one = start_job(server)
    rooms = [
        Capacity(gpu="NVIDIA H200", gpus=0, total=4, why="a job runs there"),
        Capacity(gpu="NVIDIA H200", gpus=3, total=4),
        Capacity(gpu="NVIDIA B200", gpus=0, total=1, why=EVIL),
    ]
    up = Machine(name="local:here", capacities=rooms)
    down = Machine(name="ray:there", why="no answer")
    server.service.machines = {one.name: one for one in (up, down)}
    text = browser.get("/machines").data.decode()
    cells = r'<tr><th scope="row">(.*?)</th><td .*?><span.*?>(.*?)</span></td><td.*?>(.*?)<'
    assert re.findall(cells, text) == [
        ("NVIDIA B200", "busy", "0 of 1"),
        ("NVIDIA H200", "free", "3 of 8"),
        ("CPU", "busy", "0 of 1"),
    ]
    assert ">up<" in text and ">down<" in text and "no answer" in text and EVIL not in text
    assert f"/jobs/{one.job}" in links(text) and 'role="alert"' not in text
    server.service.machines = {down.name: down}
    loop = Loop("reconciler", 1.0, lambda: bool(1 // 0))
    loop.once()
    server.service.loops.append(loop)
    text = browser.text("/machines")
    assert 'role="alert"' in text and "ray:there is down: no answer" in text
    assert "another server" in text and f"/jobs/{one.job}" in text
    for path in ("/machines", "/jobs"):
        assert "the reconciler failed" in browser.text(path)


def test_a_job_for_an_unknown_gpu_says_so_at_once(sqlite_server: LiveServer) -> None:
    server = sqlite_server
    cpu = Machine(name="local:here", capacities=[Capacity(gpu="", gpus=0)])
    server.service.machines = {cpu.name: cpu}
    why = "no known machine has a GPU named 'H100' (known: the CPU); the job waits"
    job = submit(server, gpu="H100").json
    assert (job["state"], job["reason"]) == ("queued", why)
    assert submit(server, gpus=0).json["reason"] == ""
    for path in ("/jobs", f"/jobs/{job['id']}"):
        assert why.partition(" (")[0] in Browser(server, "read").text(path)


def test_the_job_list_shows_progress(sqlite_server: LiveServer) -> None:
    server = sqlite_server
    one = start_job(server, options={"budget": "5m"})
    tried = ((0, 64, 1.0, ""), (1, 64, 1.5, ""), (2, 128, 4.0, ""), (3, 64, 9.0, "wrong"))
    trials = [
        {"number": n, "what": "tf32", "batch": batch, "ratio": ratio, "outcome": outcome}
        for n, batch, ratio, outcome in tried
    ]
    beat(server, one, trials=trials)
    before = {"started": 100, "changed": 100, "created": 160}
    values = {name: getattr(schema.JobRow, name) - seconds for name, seconds in before.items()}
    set_rows(server, schema.JobRow, schema.JobRow.id == one.job, **values)
    submit(server, options={"seed": 3})
    text = Browser(server, "read").text("/jobs")
    waits, runs = re.findall(r'<tr id="job-\d+">(.*?)</tr>', text)
    for part in ('value="0.3', "4 trials, about 3m", ">5m 00s<", ">1m 0", "1.50x"):
        assert part in runs, part
    assert "<progress" not in waits and "trial" not in waits


def test_owner_and_admin_cancel(sqlite_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = sqlite_server
    owner, other = Browser(server, "submit"), Browser(server, "worker")
    reader, admin = Browser(server, "read"), Browser(server, "admin")
    numbers = [submit(server, options={"seed": n}).json["id"] for n in range(3)]
    texts = [browser.get(f"/jobs/{numbers[0]}").data for browser in (owner, admin, other, reader)]
    assert [b">Cancel the job<" in text for text in texts] == [True, True, False, False]
    path = f"/jobs/{numbers[0]}/cancel"
    assert [other.post(path).status, reader.post(path).status] == [403, 403]
    assert owner.post(path).headers["location"] == f"/jobs/{numbers[0]}"
    assert admin.post(f"/jobs/{numbers[1]}/cancel").status == 303
    assert admin.post("/jobs/999/cancel").status == admin.get("/jobs/999").status == 404
    links = set(reader.links("/jobs?state=cancelled"))
    assert {f"/jobs/{n}" for n in numbers} & links == {f"/jobs/{n}" for n in numbers[:2]}
    assert "No job is done" in reader.text("/jobs?state=done")
    monkeypatch.setattr(catalog, "ON_A_PAGE", 2)
    (older,) = re.findall(r'href="(/jobs\?before=\d+)"', reader.text("/jobs"))
    assert f'"/jobs/{numbers[0]}"' in reader.text(older)


def test_job_lists_shorten_long_texts(sqlite_server: LiveServer) -> None:
    word, reason = "w" * 3000, "r" * 300
    one = start_job(sqlite_server, command=["python", word])
    end(sqlite_server, one, state="failed", reason=reason)
    browser = Browser(sqlite_server, "read")
    table = listing(Client(sqlite_server.url, sqlite_server.tokens["read"]).jobs())
    assert all(len(cell) <= LISTED for row in table.rows for cell in row.cells)
    for text in (word, reason):
        assert text not in browser.text("/jobs")
        assert text in browser.text(f"/jobs/{one.job}")


def test_a_job_and_its_record_link_to_each_other(sqlite_server: LiveServer) -> None:
    server = sqlite_server
    shapes = ["64x3x256x256", "32x3x256x256"]
    one = start_job(server, command=[], target="model.py:Net", options={"shape": shapes})
    browser = Browser(server, "read")
    found = record(key=changed(KEY, "device.kind", "cpu"))
    assert put(server, *packed(found), one.external).status == 201
    page, job = f"/records/{found.id}", f"/jobs/{one.job}"
    assert "measured by" not in browser.text(page)
    assert end(server, one, state="done", record=found.id).status == 200
    assert page in browser.links(job) and ", ".join(shapes) in browser.text(job)
    assert job in browser.links(page) and 'device="cpu"' in browser.text(page)


def test_a_doubtful_record_shows_no_speedup(sqlite_server: LiveServer) -> None:
    server, found = sqlite_server, busy(BUSY, 22.9)
    one, browser = start_job(server), Browser(server, "read")
    assert put(server, *packed(found), one.external).status == 201
    assert end(server, one, state="done", record=found.id).status == 200
    for path, cell in (
        ("/", r'data-label="Speed-up"[^>]*>(.*?)</td>'),
        ("/jobs", r'data-label="Speed-up"[^>]*>(.*?)</td>'),
        (f"/jobs/{one.job}", "<b>([^<]*)</b>speed-up of the record"),
        (f"/records/{found.id}", "<b>([^<]*)</b>as fast as"),
    ):
        assert re.findall(cell, browser.text(path)) == ["?"], path


@pytest.mark.parametrize(
    ("days", "shown"),
    [(0, "now"), (1, "1 d"), (60, "60 d"), (61, "2 months"), (730, "23 months"), (1105, "3 years")],
)
def test_age_text(days: float, shown: str) -> None:
    assert age(0.0, now=86_400.0 * days) == shown


def test_trials_at_another_batch_are_marked_in_the_chart() -> None:
    trials = [
        {"number": n, "what": "tf32", "at": 2.0, "outcome": "", "batch": batch}
        | {"samples_per_s": speed}
        for n, (speed, batch) in enumerate([(10.0, 64), (30.0, 128), (20.0, 64), (15.0, None)])
    ]
    tried = job_pages.tried({"attempts": [{"started": 1.0}], "trials": trials})
    chart = Timeline("", tuple(tried))
    assert [point.at_batch for point in chart.points] == [True, False, True, True]
    assert [point.label for point in chart.leaders] == ["0: tf32, batch 64", "2: tf32, batch 64"]


def finish_job(server: LiveServer, code: bytes = CODE, gpus: int = 1) -> int:
    """Run a job that produces RECORD; return its number."""
    assert put_code(server, code).status < 300
    archive = hashlib.sha256(code).hexdigest()
    number: int = submit(server, archive=archive, gpus=gpus).json["id"]
    one = claim_job(server, "NVIDIA H200" if gpus else "", gpus)
    assert one is not None
    put(server, *packed(record(created=1.7e9 + number)), one.external)
    assert end(server, one, state="done", record=RECORD).status == 200
    return number


@pytest.mark.parametrize(("gpus", "gpu"), [(1, "NVIDIA H200"), (0, "")])
def test_remeasuring_repeats_the_job(sqlite_server: LiveServer, gpus: int, gpu: str) -> None:
    server = sqlite_server

    def again(role: str = "submit") -> Answer:
        return server.ask("POST", f"/api/measure/{RECORD}", role)

    put_all(server, record())
    none = again()
    assert none.status == 422 and "no job of this server" in none.json["detail"]
    first = finish_job(server, gpus=gpus)
    assert again("read").status == 403
    server.database.write(Session.execute, delete(schema.Archive))
    assert again().status == 428
    put_code(server)
    answer = again()
    assert (answer.status, answer.json["state"], answer.json["gpu"]) == (201, "queued", gpu)
    second = answer.json["id"]
    rows = [server.database.read(Session.get_one, schema.JobRow, n) for n in (first, second)]
    asked = [json.loads(row.asked) for row in rows]
    assert asked[1] == asked[0] | {"force": True, "gpu": gpu}
    assert (again().status, again().json["id"]) == (200, second)
    page = Browser(server, "submit").post(f"/records/{RECORD}/measure", {})
    assert (page.status, page.headers["location"]) == (303, f"/jobs/{second}")
    revoke(server, "submit")
    page = Browser(server, "admin").post(f"/records/{RECORD}/measure", {}, Accept="text/html")
    assert page.status == 422 and b"submit the command" in page.data


def test_an_archive_is_kept_as_long_as_its_record(server: LiveServer) -> None:
    for code in (CODE, CODE + b"more"):
        finish_job(server, code)
    set_rows(server, schema.Archive, used=0.0)
    query = select(schema.Archive.key)
    for kept in ([hashlib.sha256(code).hexdigest()], []):
        tidy(server.service)
        assert server.database.read(lambda session: session.scalars(query).all()) == kept
        server.database.write(Session.execute, delete(schema.Item))


def test_text_of_jobs_and_records_is_escaped(sqlite_server: LiveServer) -> None:
    server = sqlite_server
    one, browser = start_job(server, command=["python", EVIL]), Browser(server, "read")
    trial = {"number": 1, "what": EVIL, "samples_per_s": 9.0, "origin": EVIL}
    log = f"one\n{EVIL}\r\n\nthree\n"
    assert beat(server, one, trials=[trial], log=log).status == 200
    page = f"/jobs/{one.job}"
    loaded = browser.get(page).data.decode()
    assert f'hx-get="{page}"' in loaded and "three" in loaded
    assert end(server, one, state="failed", reason=EVIL).status == 200
    last = browser.get(page).data.decode()
    assert "hx-get" not in last, "it asks no more"
    key = changed(KEY, "device.name", EVIL)
    key = replace(key, task=replace(key.task, model_args=Config(a=EVIL), target=EVIL))
    found = replace(record(key=key), target=Target(name=EVIL, origin="ab"))
    put_all(server, found)
    paths = ("/jobs", "/", f"/records/{found.id}", f"/?model={quote(EVIL)}&device={quote(EVIL)}")
    for text in (loaded, last, *(browser.get(path).data.decode() for path in paths)):
        assert EVIL not in text and "&lt;script&gt;" in text
        assert text.count("<script") == 1


def test_pages_load_nothing_from_other_servers(sqlite_server: LiveServer) -> None:
    put_all(sqlite_server, record())
    job, browser = start_job(sqlite_server).job, Browser(sqlite_server, "admin")
    paths = ("/", "/jobs", f"/jobs/{job}", f"/records/{record().id}", "/machines", "/tokens")
    for path in (*paths, "/login"):
        page = browser.get(path)
        policy, text = page.headers["content-security-policy"], page.data.decode()
        assert "script-src 'self'; connect-src 'self'" in policy and "unsafe" not in policy
        assert not re.search(r"<(img|iframe|style)|<[^>]* (style|on\w+)=", text), path
        for link in re.findall(r' (?:href|src|action)="(.*?)"', text):
            assert link.startswith("/") or f' id="{link[1:]}"' in text, (path, link)
        assert '<html lang="en">' in text and links(text)[0] == "#main" and 'id="main"' in text
        for script in re.findall(r'<script src="(.*?)"', text):
            answer = sqlite_server.ask("GET", script)
            assert answer.headers["content-type"].startswith("text/javascript"), script
    css = browser.get("/style.css")
    assert css.headers["content-type"].startswith("text/css")
    assert "prefers-color-scheme: dark" in css.data.decode() and "url(" not in css.data.decode()
    vendored = sqlite_server.ask("GET", "/static/pico-2.1.1.min.css")
    assert set(re.findall(r"url\(.{6}", vendored.data.decode())) == {'url("data:'}
    again = {"If-None-Match": vendored.headers["etag"]}
    assert sqlite_server.ask("GET", "/static/pico-2.1.1.min.css", headers=again).status == 304
    assert sqlite_server.ask("GET", "/static/..%2Fschema.py").status == 404
