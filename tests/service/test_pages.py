"""The pages, as a browser asks for them."""

from __future__ import annotations

import html
import json
import re
import time
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from advisor.cache.codec import encode, to_plain
from advisor.cache.config import Config
from advisor.cache.key import fields
from advisor.cache.name import Name
from advisor.cache.reader import RecordFilter
from advisor.cache.record import Record, Target
from advisor.cache.records import Records
from advisor.client import Client
from advisor.jobs.token import digest
from advisor.report.jobs import listing
from advisor.report.sections import report
from advisor.report.text import LISTED
from advisor.service import catalog, job_pages, lookups, progress, records, schema
from advisor.service.access import COOKIE
from advisor.service.catalog import View
from advisor.service.executors import Capacity
from advisor.service.loop import Loop
from advisor.service.machines import Machine
from advisor.service.roles import MAY
from tests.cache.examples import KEY, changed, choice, record
from tests.face.test_doubtful import BUSY
from tests.face.test_doubtful import made as busy
from tests.service.serving import Answer, Served
from tests.service.test_jobs import ended, started, submit

FORM = "application/x-www-form-urlencoded"
EVIL = "<script>alert(1)</script>"


def links(text: str) -> list[str]:
    return re.findall(r'<a [^>]*?href="(.*?)"', text)


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

    def text(self, path: str) -> str:
        return self.get(path).data.decode()

    def links(self, path: str) -> list[str]:
        answer = self.get(path)
        assert answer.status == 200, answer.data
        return links(answer.data.decode())

    def post(self, path: str, fields: dict[str, str], **more: str) -> Answer:
        return post(self._served, path, fields, Cookie=self.cookie, **more)


def post(served: Served, path: str, fields: dict[str, str], **headers: str) -> Answer:
    body = urlencode(fields).encode()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return served.ask("POST", path, "", body, headers={"Content-Type": FORM, **sent})


def keep(served: Served, one: Record) -> None:
    data = encode(one)
    key = Name.of(one, data).text
    assert served.ask("PUT", f"/api/records/{quote(key)}", "worker", data).status == 201


def test_a_login_is_a_cookie_that_scripts_and_other_sites_do_not_get(served_lite: Served) -> None:
    served = served_lite
    browser = Browser(served, "read")
    for word in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"):
        assert word in browser.set
    assert "Secure" not in browser.set and served.tokens["read"] not in browser.set
    served.service.behind_proxy = True
    sent = {"token": served.tokens["read"]}
    assert "Secure" in post(served, "/login", sent, X_Forwarded_Proto="https").headers["set-cookie"]
    (last, *_) = served.ask("GET", "/api/audit", "admin").json["events"]
    assert (last["action"], last["by"]) == ("logged in", "a read")
    wrong = post(served, "/login", {"token": "x", "to": "/jobs"})
    assert wrong.status == 401 and "set-cookie" not in wrong.headers
    assert b'value="/jobs"' in wrong.data


@pytest.mark.parametrize(
    ("to", "goes"),
    [
        ("/jobs?state=done&most=2", "/jobs?state=done&most=2"),
        ("//elsewhere.example", "/"),
        ("/\\elsewhere.example", "/"),
        ("/\t/elsewhere.example", "/"),
        ("https://elsewhere.example", "/"),
        ("", "/"),
    ],
)
def test_a_login_goes_on_to_the_page_that_was_asked_for(
    served_lite: Served, to: str, goes: str
) -> None:
    if to == goes:
        login = served_lite.ask("GET", to)
        page = served_lite.ask("GET", login.headers["location"])
        assert f'value="{html.escape(to)}"' in page.data.decode()
    sent = {"token": served_lite.tokens["read"], "to": to}
    assert post(served_lite, "/login", sent).headers["location"] == goes


def test_a_page_needs_a_session_that_holds(served_lite: Served) -> None:
    served = served_lite
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
        there = session.get_one(schema.Session, digest(again.cookie.partition("=")[2]))
        there.expires = time.time() - 1
    assert again.get("/").status == 303
    assert Browser(served, "worker").get("/tokens").status == 403
    poll = served.ask("GET", "/jobs", headers={"HX-Request": "true"})
    assert (poll.status, poll.headers["hx-refresh"]) == (401, "true"), "it goes to the login"


@pytest.mark.parametrize(
    ("headers", "own"),
    [
        ({}, True),
        ({"Sec_Fetch_Site": "same-origin"}, True),
        ({"Origin": "http://HERE"}, True),
        ({"Sec_Fetch_Site": "cross-site"}, False),
        ({"Sec_Fetch_Site": "same-site"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://["}, False),
    ],
)
def test_forms_of_other_sites_are_refused(
    served_lite: Served, headers: dict[str, str], own: bool
) -> None:
    browser = Browser(served_lite, "admin")
    here = f"127.0.0.1:{served_lite.port}"
    sent = {name: value.replace("HERE", here) for name, value in headers.items()}
    assert browser.post("/tokens", {"name": "x", "role": "read"}, **sent).status == (
        200 if own else 403
    )
    assert (post(served_lite, "/login", {"token": "x"}, **sent).status == 403) != own
    names = [one["name"] for one in served_lite.ask("GET", "/api/tokens", "admin").json["tokens"]]
    assert names.count("x") == own


def test_a_form_has_few_fields(served_lite: Served) -> None:
    many = {f"f{n}": "1" for n in range(50)}
    assert Browser(served_lite, "admin").post("/tokens", many).status == 422


def test_tokens_are_made_and_revoked_on_their_page(served_lite: Served) -> None:
    served = served_lite
    browser = Browser(served, "admin")
    answer = browser.post("/tokens", {"name": "gpu-01", "role": "worker", "days": "30"})
    (text,) = re.findall(r"<code>(adv_[\w-]{43})</code>", answer.data.decode())
    served.tokens["new"] = text
    assert served.ask("GET", "/api/self", "new").json["role"] == "worker"
    page = browser.text("/tokens")
    assert text not in page and "gpu-01" in page
    (path, *_) = re.findall(r'action="(/tokens/\d+/revoke)"', page)
    assert browser.post(path, {}).status == 303
    assert served.ask("GET", "/api/self", "new").status == 401
    for days in ("-1", "x", "999999", "²"):
        said = browser.post("/tokens", {"name": "y", "role": "read", "days": days})
        assert "days: expected a number" in said.data.decode()
    assert "expected one of read" in browser.post("/tokens", {"name": "y"}).data.decode()
    for role, may in MAY.items():
        assert f'value="{role}"' in page and html.escape(may, quote=False) in page


def test_an_empty_server_says_what_to_do(served_lite: Served) -> None:
    text = Browser(served_lite, "read").text("/")
    assert "Nothing is here yet" in text and "advisor sync" in text
    assert f"ADVISOR_CACHE=http://127.0.0.1:{served_lite.port}" in text
    menu = set(links(text))
    assert {"/", "/jobs", "/machines"} <= menu and "/tokens" not in menu
    assert "/tokens" in Browser(served_lite, "admin").links("/")


def listed(browser: Browser, **view: str) -> list[str]:
    """The records that the page lists, in its order."""
    links = browser.links(f"/?{urlencode(view)}")
    return [link.removeprefix("/records/") for link in links if "/records/" in link]


def with_speedup(one: Record, speedup: float, **changes: Any) -> Record:
    """A record of another winner."""
    rounds = tuple(speedup * rate for rate in one.baseline.rounds)
    best = replace(choice(speedup=speedup, rate=rounds[1]), rounds=rounds, low=rounds[0])
    best = replace(best, high=rounds[2], config=one.baseline.config.replace(threads=2))
    winners = tuple(replace(winner, choice=best) for winner in one.winners)
    return replace(one, winners=winners, **changes)


def test_records_are_sorted_and_filtered(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = with_speedup(record(name="net.py:Net", created=1.7e9), 1.5)
    libraries = ("transformers==5.1.0",)
    key = replace(changed(KEY, "device.name", "NVIDIA B200"), libraries=libraries)
    b200 = with_speedup(record(key=key, name="100%.py:Net", created=1.72e9), 3.0)
    stale = record(key=changed(KEY, "mode", "infer"), name="old.py:Net", created=1.71e9)
    stale = with_speedup(stale, 2.0, stale="it is 1.1x now")
    for one in (h200, b200, stale):
        keep(served, one)
    browser = Browser(served, "read")
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
    page = browser.text("/?sort=-speedup&device=NVIDIA+H200")
    assert 'aria-sort="descending"><a href="/?device=NVIDIA+H200&amp;sort=speedup"' in page
    monkeypatch.setattr(catalog, "ON_A_PAGE", 2)
    assert "Next page" in browser.text("/") and len(listed(browser)) == 2
    assert listed(browser, page="1") == [h200.id]
    last = browser.text("/?page=1")
    assert "Previous page" in last and "Next page" not in last


def test_a_record_says_first_what_to_paste(served_lite: Served) -> None:
    keep(served_lite, record())
    browser = Browser(served_lite, "read")
    (id,) = listed(browser)
    text = browser.text(f"/records/{id}")
    paste = text.index("advice = advisor.apply(")
    assert "shape=(64, 3, 256, 256)" in text
    assert paste < text.index("95% interval") < text.index("What was chosen")
    assert f"export ADVISOR_CACHE=http://127.0.0.1:{served_lite.port} " in text
    assert "Not measured yet" not in text and "Not known" not in text, "no empty sections"


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/records/000000000000@64", 404, "there is no record"),
        ("/records/x", 422, "Go to the records"),
        ("/odd", 404, "Not Found"),
        ("/jobs/999", 404, "there is no job 999"),
        ("/jobs?state=odd", 422, ""),
        ("/?sort=key", 422, ""),
        ("/?trust=odd", 422, ""),
        ("/?page=-1", 422, ""),
        (f"/?model={'x' * 5000}", 422, ""),
        # What these pages had is JSON: /api/audit, /openapi.json, /api/lookup.
        *((path, 404, "") for path in ("/audit", "/docs", "/why")),
    ],
)
def test_the_page_of_an_error_has_the_menu(
    served_lite: Served, path: str, status: int, says: str
) -> None:
    answer = Browser(served_lite, "read").get(path)
    assert answer.status == status and says in answer.data.decode()
    assert {"/", "/jobs", "/machines"} <= set(links(answer.data.decode()))


def test_a_record_that_no_longer_holds_is_stale_on_the_page(served_lite: Served) -> None:
    for number in range(4):  # whichever version has the first key
        one = with_speedup(record(name=f"net{number}.py:Net"), 1.5)
        keep(served_lite, one)
        keep(served_lite, replace(one, stale="now 1.0x", revised=1.75e9))
    browser = Browser(served_lite, "read")
    assert len(listed(browser, trust="stale")) == len(listed(browser)) > 0


def test_what_can_be_trusted() -> None:
    whole = record()
    numbers = record(key=changed(KEY, "mode", "infer"))  # which nothing compared with fp32
    for one, trust in (
        (numbers, "unverified"),
        (with_speedup(whole, 1.5), "verified"),
        (with_speedup(whole, 1.5, stale="now 1.0x"), "stale"),
        (busy(BUSY, 22.9), "doubtful"),
    ):
        assert records.trust_of(one) == trust
    assert records.framework_of(whole) == "torch"


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
    assert f"<title>{shows.title} - advisor</title>" in page
    assert f"<h1>{counts.target.name}</h1>" in page
    assert f"as fast as {counts.key.task.baseline}</div>" in page
    with served.database.reading() as session:
        stored = records.StoredAnswer(session, records.Question())
        assert Records(stored).get(run.id) == counts
        (of_run,) = Records(stored).held(RecordFilter(target=script))
    assert of_run.record == run, "its numbers, as its words"


def test_what_lookups_found(served: Served) -> None:
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
    with served.database.reading() as session:
        found = lookups.covered(session)
        missed = {(one.device, one.model, one.target) for one in lookups.missed(session)}
        (line,), _number = catalog.listed(session, View())
    assert found == dict.fromkeys(["exact", "stale", "nearest", "miss"], 2)
    h200, b200 = "NVIDIA H200", "NVIDIA B200"
    assert missed == {(h200, "cd" * 6, ""), (b200, KEY.model[:12], "model.py:Net")}
    assert (line.used, line.stale) == (4, 2)
    text = Browser(served, "read").text("/")
    assert "<b>50%</b>of 8 lookups" in text and "2 other software" in text
    assert "Looked up, but not measured" in text


def test_the_median_is_of_the_newest_trustworthy_versions(served: Served) -> None:
    """Two versions of one record count once."""
    kept = [
        with_speedup(record(created=1.7e9), 9.0),
        with_speedup(record(created=1.71e9), 1.2),
        with_speedup(record(key=changed(KEY, "device.name", "NVIDIA B200")), 1.4),
        with_speedup(record(key=changed(KEY, "mode", "infer")), 42.0, stale="now 1.0x"),
        record(key=changed(KEY, "device.name", "NVIDIA L40S")),  # not compared with fp32
        busy(BUSY, 22.9, changed(KEY, "shapes", (3, 8, 8))),
    ]
    for one in kept:
        keep(served, one)
    with served.database.reading() as session:
        found = catalog.median(session)
    assert found == (2, pytest.approx(1.3))
    assert "<b>1.30x</b>median speed-up of 2 verified" in Browser(served, "read").text("/")


def test_versions_of_one_record_are_one_line_and_each_record_is_reached(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions of one second, too, of which a page held both, and what was left out no page."""
    older, other = record(created=1.7e9), changed(KEY, "model", "cd" * 32)
    again = replace(older, provenance=replace(older.provenance, seconds=9.0))
    newest = with_speedup(record(created=1.7e9 + 5), 1.25)
    for one in (older, again, record(key=other, created=1.6e9), newest):
        keep(served, one)
    monkeypatch.setattr(catalog, "ON_A_PAGE", 1)
    with served.database.reading() as session:
        pages = [catalog.listed(session, View(page=page)) for page in range(3)]
    assert [[one.id for one in lines] for lines, _number in pages] == [
        [older.id],
        [record(key=other).id],
        [],
    ]
    assert pages[0][0][0].speedup == 1.25 and {number for _lines, number in pages} == {2}


def test_machines(served_lite: Served) -> None:
    served = served_lite
    browser = Browser(served, "read")
    for path in ("/machines", "/jobs"):
        assert 'role="alert"' in browser.text(path), "there is no executor"
    one = started(served)
    rooms = [
        Capacity(gpu="NVIDIA H200", gpus=0, total=4, why="a job runs there"),
        Capacity(gpu="NVIDIA H200", gpus=3, total=4),
        Capacity(gpu="NVIDIA B200", gpus=0, total=1, why=EVIL),
    ]
    up = Machine(name="local:here", capacities=rooms)
    down = Machine(name="ray:there", why="no answer")
    served.service.machines = {one.name: one for one in (up, down)}
    text = browser.text("/machines")
    cells = r'<tr><th scope="row">(.*?)</th><td .*?><span.*?>(.*?)</span></td><td.*?>(.*?)<'
    rows = re.findall(cells, text)
    assert rows == [
        ("NVIDIA B200", "busy", "0 of 1"),
        ("NVIDIA H200", "free", "3 of 8"),
        ("CPU", "busy", "0 of 1"),
    ]
    assert ">up<" in text and ">down<" in text and "no answer" in text and EVIL not in text
    assert f"/jobs/{one.job}" in links(text)
    assert 'role="alert"' not in text
    served.service.machines = {down.name: down}
    text = browser.text("/machines")
    assert 'role="alert"' in text and "ray:there is down: no answer" in text
    assert "another server" in text and f"/jobs/{one.job}" in text


def test_a_job_says_at_once_that_no_known_machine_has_its_gpu(served_lite: Served) -> None:
    served = served_lite
    cpu = Machine(name="local:here", capacities=[Capacity(gpu="", gpus=0)])
    served.service.machines = {cpu.name: cpu}
    why = "no machine known now has a GPU named 'H100' (known: the CPU); the job waits"
    said = submit(served, gpu="H100").json
    assert (said["state"], said["reason"]) == ("queued", why)
    assert submit(served, gpus=0).json["reason"] == ""
    for path in ("/jobs", f"/jobs/{said['id']}"):
        text = html.unescape(Browser(served, "read").get(path).data.decode())
        assert why.partition(" (")[0] in text


def test_a_thread_that_fails_is_shown(served_lite: Served) -> None:
    served = served_lite
    served.service.machines = {"local:here": Machine(name="local:here")}

    def turn() -> None:
        raise RuntimeError

    loop = Loop("reconciler", 1.0, turn)
    loop.once()
    served.service.loops.append(loop)
    for path in ("/machines", "/jobs"):
        assert "the reconciler failed" in Browser(served, "read").get(path).data.decode()


def test_how_far_a_job_is(served: Served) -> None:
    one = started(served, options={"budget": "5m"})
    trials = [
        {"number": n, "what": "tf32", "samples_per_s": 9.0, "batch": batch, "ratio": ratio}
        | {"outcome": outcome}
        for n, batch, ratio, outcome in [
            (0, 64, 1.0, ""),
            (1, 64, 1.5, ""),
            (2, 128, 4.0, ""),
            (3, 64, 9.0, "wrong"),
        ]
    ]
    served.ask("POST", "/api/attempt/beat", one.external, {"trials": trials})
    with served.database.writing() as session:
        job = session.get_one(schema.Job, one.job)
        assert job.started is not None
        job.started, job.changed, job.created = (
            job.started - 100,
            job.changed - 100,
            job.created - 160,
        )
    waiting = submit(served, options={"seed": 3}).json["id"]
    with served.database.reading() as session:
        found = progress.of_jobs(session, [one.job, waiting])
    runs, waits = found[one.job], found[waiting]
    assert (runs.budget_s, runs.trials, runs.speedup) == (300, 4, 1.5)
    assert (runs.waited_s, runs.spent_s, runs.left_s) == (
        pytest.approx(60, abs=20),
        pytest.approx(100, abs=20),
        pytest.approx(200, abs=20),
    )
    assert runs.share == pytest.approx(1 / 3, abs=0.1)
    assert (waits.trials, waits.speedup, waits.spent_s) == (0, 0.0, 0.0)
    text = Browser(served, "read").text("/jobs")
    assert "4 trials, about 3m" in text and "1.50x" in text and "<progress" in text


def test_jobs_are_listed_and_cancelled_by_whose_they_are(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = Browser(served, "submit"), Browser(served, "worker")
    reader, admin = Browser(served, "read"), Browser(served, "admin")
    assert "No job yet" in reader.text("/jobs")
    numbers = [submit(served, options={"seed": n}).json["id"] for n in range(3)]
    texts = [browser.get(f"/jobs/{numbers[0]}").data for browser in (owner, admin, other, reader)]
    assert [b">Cancel the job<" in text for text in texts] == [True, True, False, False]
    path = f"/jobs/{numbers[0]}/cancel"
    assert [other.post(path, {}).status, reader.post(path, {}).status] == [403, 403]
    assert owner.post(path, {}).headers["location"] == f"/jobs/{numbers[0]}"
    assert admin.post(f"/jobs/{numbers[1]}/cancel", {}).status == 303
    assert admin.post("/jobs/999/cancel", {}).status == admin.get("/jobs/999").status == 404
    links = set(reader.links("/jobs?state=cancelled"))
    assert {f"/jobs/{n}" for n in numbers} & links == {f"/jobs/{n}" for n in numbers[:2]}
    assert "No job is done" in reader.text("/jobs?state=done")
    monkeypatch.setattr(job_pages, "ON_A_PAGE", 2)
    (older,) = re.findall(r'href="(/jobs\?before=\d+)"', reader.text("/jobs"))
    assert f'"/jobs/{numbers[0]}"' in reader.text(older)


def test_a_list_has_of_a_long_job_a_line(served_lite: Served) -> None:
    served = served_lite
    word, reason = "w" * 3000, "r" * 300
    one = started(served, command=["python", word])
    ended(served, one, state="failed", reason=reason)
    browser = Browser(served, "read")
    table = listing(Client(served.url, served.tokens["read"]).jobs())
    assert all(len(cell) <= LISTED for row in table.rows for cell in row.cells)
    for text in (word, reason):
        assert text not in browser.text("/jobs")
        assert text in browser.text(f"/jobs/{one.job}")


def test_a_job_and_its_record_name_each_other(served_lite: Served) -> None:
    served = served_lite
    shapes = ["64x3x256x256", "32x3x256x256"]
    one = started(served, command=[], target="model.py:Net", options={"shape": shapes})
    browser = Browser(served, "read")
    found = record(key=changed(KEY, "device.kind", "cpu"))
    data = encode(found)
    path = f"/api/records/{quote(Name.of(found, data).text)}"
    assert served.ask("PUT", path, one.external, data).status == 201
    page = f"/records/{found.id}"
    assert "measured by" not in browser.get(page).data.decode()
    assert ended(served, one, state="done", record=found.id).status == 200
    assert page in browser.links(f"/jobs/{one.job}")
    assert ", ".join(shapes) in browser.text(f"/jobs/{one.job}")
    assert f"/jobs/{one.job}" in browser.links(page)
    assert "device=&#34;cpu&#34;" in browser.get(page).data.decode()


def test_trials_at_another_batch_are_drawn_apart() -> None:
    tried = [(10.0, 64), (30.0, 128), (20.0, 64), (15.0, None)]
    trials = [
        {"number": n, "what": "tf32", "at": 2.0, "outcome": "", "batch": batch}
        | {"samples_per_s": speed}
        for n, (speed, batch) in enumerate(tried)
    ]
    chart = job_pages.throughput({"attempts": [{"started": 1.0}], "trials": trials})
    assert chart is not None
    assert [(point.label, point.at_batch, point.leads) for point in chart.points] == [
        ("0: tf32, batch 64", True, True),
        ("1: tf32, batch 128", False, False),
        ("2: tf32, batch 64", True, True),
        ("3: tf32", True, False),
    ]


def test_scripts_are_from_here_alone(served_lite: Served) -> None:
    served = served_lite
    one, browser = started(served), Browser(served, "read")
    for path in ("/", "/jobs", f"/jobs/{one.job}"):
        page = browser.get(path)
        policy = page.headers["content-security-policy"]
        assert "script-src 'self'; connect-src 'self'" in policy and "unsafe" not in policy
        (script,) = re.findall(r'<script src="(.*?)"', page.data.decode())
        answer = served.ask("GET", script)
        assert answer.headers["content-type"].startswith("text/javascript"), script
    assert served.ask("GET", "/static/..%2Fschema.py").status == 404


def test_nothing_in_a_job_is_markup(served_lite: Served) -> None:
    one, browser = started(served_lite, command=["python", EVIL]), Browser(served_lite, "read")
    trial = {"number": 1, "what": EVIL, "samples_per_s": 9.0, "origin": EVIL}
    said = {"trials": [trial], "log": f"one\n{EVIL}\r\n\nthree\n"}
    assert served_lite.ask("POST", "/api/attempt/beat", one.external, said).status == 200
    loaded = browser.text(f"/jobs/{one.job}")
    assert f'hx-get="/jobs/{one.job}"' in loaded and "three" in loaded
    assert ended(served_lite, one, state="failed", reason=EVIL).status == 200
    last = browser.text(f"/jobs/{one.job}")
    assert "hx-get" not in last, "it asks no more"
    for text in (loaded, last, browser.text("/jobs")):
        assert EVIL not in text and "&lt;script&gt;" in text


def test_nothing_in_a_record_is_markup(served_lite: Served) -> None:
    served = served_lite
    one = record(key=changed(KEY, "device.name", EVIL))
    task = replace(one.key.task, model_args=Config(a=EVIL), target=EVIL)
    one = replace(one, key=replace(one.key, task=task), target=Target(name=EVIL, origin="ab"))
    keep(served, one)
    browser = Browser(served, "read")
    for path in ("/", f"/records/{one.id}", f"/?model={quote(EVIL)}&device={quote(EVIL)}"):
        text = browser.text(path)
        assert EVIL not in text and "&lt;script&gt;" in text, path
        assert text.count("<script") == 1
    assert EVIL not in browser.text(f"/{EVIL}")


def test_every_page_is_of_this_server_alone(served_lite: Served) -> None:
    keep(served_lite, record())
    browser = Browser(served_lite, "admin")
    for path in ("/", "/jobs", f"/records/{record().id}", "/machines", "/tokens", "/login"):
        text = browser.text(path)
        assert not re.search(r"<(img|iframe|style)|<[^>]* (style|on\w+)=", text), path
        for link in re.findall(r' (?:href|src|action)="(.*?)"', text):
            assert link.startswith(("/", "#")), (path, link)
        assert '<html lang="en">' in text and links(text)[0] == "#main" and 'id="main"' in text
    css = browser.get("/style.css")
    assert css.headers["content-type"].startswith("text/css")
    assert "prefers-color-scheme: dark" in css.data.decode() and "url(" not in css.data.decode()
    vendored = served_lite.ask("GET", "/static/pico-2.1.1.min.css")
    assert set(re.findall(r"url\(.{6}", vendored.data.decode())) == {'url("data:'}
    again = {"If-None-Match": vendored.headers["etag"]}
    assert served_lite.ask("GET", "/static/pico-2.1.1.min.css", headers=again).status == 304
