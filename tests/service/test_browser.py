"""The pages in a real Chromium: a job from the login to its record, live, without scripts, with a
keyboard, small and large, light and dark. ADVISOR_ARTEFACTS names a folder for the screenshots."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from advisor.cache.codec import encode
from advisor.cache.config import Config
from advisor.cache.name import Name
from advisor.cache.record import Part
from advisor.jobs import parcel
from advisor.service import attempts, schema
from advisor.service.database import Database
from advisor.service.executors import Room
from tests.cache.examples import KEY, changed, record
from tests.service.serving import Answer, ask, begun
from tests.service.test_serve import Process

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

SMALL, LARGE = 390, 1280
WAITS_MS = 20_000
FOCUSABLE = "a[href], button, input:not([type=hidden]), select, summary, [tabindex='0']"
FOLDED = "details:not([open]) > :not(summary)"
UNREACHED = f"{FOLDED}, {FOLDED} *, [type=radio]:not(:checked)"
"""Not reached by Tab: what is folded away, and the other buttons of a radio group."""
DIM = """() => {
    const shine = text => {
        const parts = text.match(/[\\d.]+/g).map(Number).slice(0, 3).map(
            one => (one /= 255) <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    const behind = one => {
        for (; one; one = one.parentElement) {
            const colour = getComputedStyle(one).backgroundColor;
            if (!colour.endsWith(", 0)")) return colour;
        }
    };
    const faded = one => one && (getComputedStyle(one).opacity < 1 || faded(one.parentElement));
    const dim = one => {
        const both = [shine(getComputedStyle(one).color), shine(behind(one))].sort((a, b) => b - a);
        return faded(one) || (both[0] + 0.05) / (both[1] + 0.05) < 4.5;
    };
    return [...document.body.querySelectorAll("a, b, p, h1, h2, td, th, dt, dd, small, code, "
        + "label, button, span, figcaption, li")].filter(one => !one.closest("svg") && dim(one))
        .map(one => one.outerHTML.slice(0, 100));
}"""
"""What is written too faintly to be read: a contrast below 4.5 to 1 (WCAG 2.2, 1.4.3)."""
FOUND = replace(
    record(trials=6),
    parts=(Part(knob=Config(precision="bf16"), stage="compute", ratio=1.5, low=1.46, high=1.54),),
)


@dataclass
class Team:
    """A server that was started as people start it, and who asks it for something."""

    port: int
    token: str
    database: Database
    artefacts: Path
    attempt: str = ""
    submitted: int = 0

    def ask(self, method: str, path: str, *more: Any) -> Answer:
        answer = ask(self.port, method, path, self.token, *more)
        assert answer.status < 300, answer.data
        return answer

    def submit(self, *command: str) -> int:
        """A job for a GPU that no machine has, so that nobody but a test starts it."""
        asked = {"command": list(command), "gpu": "Z9000", "options": {"budget": "5m"}}
        self.submitted = self.ask("POST", "/api/jobs", asked).json["id"]
        return self.submitted

    def claim(self) -> None:
        """Start the job that was submitted last, and those before it."""
        job = 0
        while job != self.submitted:
            with self.database.writing() as session:
                found = attempts.claim(session, "local:here", Room(gpu="NVIDIA Z9000", gpus=1))
            assert found is not None
            job = found.job
        self.attempt = begun(self.database, found)

    def beat(self, numbers: range, log: str) -> None:
        """What a worker says while it measures."""
        trials = [
            {
                "number": n,
                "what": "channels_last, bf16, compile=max-autotune" if n else "torch default",
                "batch": 64 << n % 3,
                "samples_per_s": 0.0 if n == 3 else 2000.0 + 300 * (n % 5),
                "ratio": 0.0 if n == 3 else 1.0 + 0.15 * (n % 5),
                "outcome": "out of memory" if n == 3 else "",
                "origin": "guess",
            }
            for n in numbers
        ]
        said = {"trials": trials, "log": log, "device": "NVIDIA Z9000 (GPU-1)"}
        assert ask(self.port, "POST", "/api/attempt/beat", self.attempt, said).status == 200

    def done(self) -> None:
        """The attempt leaves a version of its own of the record."""
        made = replace(FOUND.provenance, created=FOUND.provenance.created + self.submitted)
        found = replace(FOUND, provenance=made)
        data = encode(found)
        key = quote(Name.of(found, data).text)
        assert ask(self.port, "PUT", f"/api/records/{key}", self.attempt, data).status == 201
        last = {"state": "done", "record": FOUND.id}
        assert ask(self.port, "POST", "/api/attempt/end", self.attempt, last).status == 200


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    url = f"sqlite:///{tmp_path_factory.mktemp('database')}/service.db"
    kept = os.environ.get("ADVISOR_ARTEFACTS")
    artefacts = Path(kept) if kept else tmp_path_factory.mktemp("screenshots")
    server, database = Process("--database", url), Database(url)
    try:
        yield Team(server.port, server.token, database, artefacts)
    finally:
        server.stop(signal.SIGTERM)  # and what it tunes
        database.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@dataclass
class Person:
    """Somebody at a screen, whose browser has nothing to complain of."""

    team: Team
    page: Any
    name: str
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(WAITS_MS)
        self.page.on("console", lambda said: said.type == "error" and self.wrong.append(said.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))

    def go(self, path: str) -> None:
        self.page.goto(f"http://127.0.0.1:{self.team.port}{path}")

    def log_in(self) -> None:
        self.go("/login")
        self.page.wait_for_selector("[name=token]:focus")
        self.page.keyboard.type(self.team.token)
        self.page.keyboard.press("Enter")
        self.page.wait_for_url("**/")

    def turns_to(self, width: int, scheme: str) -> None:
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # colours at once
        self.name = f"{width}-{scheme}"

    def shoot(self, what: str) -> None:
        """Keep what is seen; nothing of it is wider than the screen."""
        file = self.team.artefacts / f"{what}-{self.name}.png"
        self.page.screenshot(path=file, full_page=True)
        wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not self.page.evaluate(wide), file.name
        assert self.page.evaluate(DIM) == [], file.name

    def text(self, selector: str) -> str:
        found: str = self.page.inner_text(selector)
        return found

    def sees(self, text: str) -> None:
        """Waits for it, without loading the page again."""
        self.page.get_by_text(text, exact=True).first.wait_for()


Sits = Callable[..., Person]


@pytest.fixture
def sits(team: Team, chromium: Any) -> Iterator[Sits]:
    contexts, persons = [], []

    def person(width: int, scheme: str, **how: Any) -> Person:
        size = {"width": width, "height": 800}
        context = chromium.new_context(viewport=size, color_scheme=scheme, **how)
        contexts.append(context)
        found = Person(team, context.new_page(), f"{width}-{scheme}")
        persons.append(found)
        found.log_in()
        return found

    yield person
    for context in contexts:
        context.close()
    assert [found.wrong for found in persons] == [[] for _ in persons]


def test_a_job_from_the_login_to_its_record(team: Team, sits: Sits) -> None:
    """Two people watch it on the screens they have; neither loads the page again."""
    both = sits(LARGE, "light"), sits(SMALL, "dark")
    for person in both:
        assert "Nothing is here yet" in person.text("h1")
        person.shoot("0-nothing")
        person.page.get_by_role("link", name="Jobs", exact=True).click()
        assert "advisor submit" in person.text("#live")
        person.shoot("1-no-jobs")
    number = team.submit("torchrun", "--nproc-per-node", "4", "train.py", "--epochs", "1")
    for person in both:
        person.page.reload()
        person.page.get_by_role("link", name=f"{number}: ").click()
        assert person.text("#now .badge >> nth=0") == "queued"
        person.page.evaluate("window.stayed = true")
        person.shoot("2-queued")
    team.claim()
    team.beat(range(1), "epoch 1\n")
    for person in both:
        person.sees("torch default")
        assert "epoch 1" in person.text("#log")
    team.beat(range(1, 9), "".join(f"trial {n}: <b>measured</b>\n" for n in range(40)))
    for person in both:
        person.page.wait_for_selector("svg.timeline circle >> nth=7", state="attached")
        assert person.text("#now .badge >> nth=0") == "running"
        assert "<b>measured</b>" in person.text("#log")
        assert person.page.locator("#log b").count() == 0
        assert "out of memory" in person.text("tr.warns")
        at = "log => log.scrollHeight - log.clientHeight + log.scrollTop"
        assert person.page.eval_on_selector("pre.log", at) > 0, "the log is where it ends"
        assert abs(person.page.eval_on_selector("pre.log", "log => log.scrollTop")) < 2
        person.shoot("3-running")
    team.done()
    for person in both:
        link = person.page.get_by_role("button", name="See the record")
        link.wait_for()
        assert person.text("#now .badge >> nth=0") == "done"
        assert person.page.evaluate("window.stayed"), "it was loaded again"
        assert person.page.locator("#log").inner_text().count("epoch 1") == 1
        person.shoot("4-done")
        link.click()
        assert "1.50x" in person.text(".figures")
        person.shoot("5-record")


def test_what_is_asked_for_is_begun_on_this_machine(team: Team, sits: Sits, tmp_path: Path) -> None:
    """By the server's own executor and a worker, and watched until it is over: here it fails."""
    (tmp_path / "train.py").write_text("raise SystemExit('no data here')\n")
    code = parcel.pack(tmp_path)
    team.ask("PUT", f"/api/archives/{code.digest}", code.archive)
    asked = {"command": ["python", "train.py"], "gpus": 0, "archive": code.digest}
    number = team.ask("POST", "/api/jobs", asked).json["id"]
    person = sits(LARGE, "light")
    person.go(f"/jobs/{number}")
    person.page.evaluate("window.stayed = true")
    failed = person.page.locator("#now .is-failed").first
    failed.wait_for(timeout=10 * WAITS_MS)
    assert "no data here" in person.text("#now") and "no data here" in person.text("#log")
    assert person.page.evaluate("window.stayed"), "it was loaded again"
    assert tempfile.gettempdir() not in person.text("main")  # what lay there is gone


def test_every_page_on_every_screen(team: Team, sits: Sits) -> None:
    failed = used(team)
    paths = {
        **{path or "records": f"/{path}" for path in ("", "jobs", "machines", "tokens")},
        "not-found": "/records/000000000000@1",
        "failed-job": f"/jobs/{failed}",
        "failed-jobs": "/jobs?state=failed",
        "preempted-jobs": "/jobs?state=preempted",
        "record": f"/records/{FOUND.id}",
        "filtered": "/?device=NVIDIA B200&sort=-speedup",
    }
    person = sits(LARGE, "light")
    for name, path in paths.items():
        person.go(path)
        assert person.page.title().endswith(" - advisor")
        for width, scheme in ((LARGE, "light"), (LARGE, "dark"), (SMALL, "dark"), (SMALL, "light")):
            person.turns_to(width, scheme)
            person.shoot(f"7-{name}")
    (missing,) = person.wrong
    assert "404" in missing
    person.wrong.clear()


def used(team: Team) -> int:
    """A team was here for a while; the number of a job that failed."""
    data = encode(FOUND)
    name = Name.of(FOUND, data)
    team.ask("PUT", f"/api/records/{quote(name.text)}", data)
    for device in ("NVIDIA B200", "NVIDIA A100-SXM4-80GB", "AMD EPYC 9654 96-Core Processor"):
        one = record(key=changed(KEY, "device.name", device))
        data = encode(one)
        team.ask("PUT", f"/api/records/{quote(Name.of(one, data).text)}", data)
    rows = [
        ("NVIDIA H200", name.record_key, "ab" * 6, "exact", 1200),
        ("NVIDIA H200", name.record_key, "ab" * 6, "stale", 90),
        ("NVIDIA B200", "", "cd" * 6, "miss", 40),
        ("NVIDIA L40S", name.record_key, "ab" * 6, "nearest", 25),
        ("NVIDIA L40S", "", "ab" * 6, "miss", 7),
    ]
    names, today = ("device", "place", "model", "outcome", "count"), int(time.time() // 86_400)
    with team.database.writing() as session:
        for row in rows:
            session.merge(schema.Lookup(day=today, **dict(zip(names, row, strict=True))))
    number = team.submit("python", "train.py", "--data", "/data/" + "imagenet-" * 12)
    team.claim()
    team.beat(range(2), "Traceback (most recent call last):\nRuntimeError: no data\n")
    why = "the command ended with status 1: RuntimeError: no data; the log has more"
    last = {"state": "failed", "reason": why}
    assert ask(team.port, "POST", "/api/attempt/end", team.attempt, last).status == 200
    return number


def test_a_keyboard_reaches_everything(team: Team, sits: Sits) -> None:
    person = sits(LARGE, "light")
    number = team.submit("python", "keys.py")
    found = encode(FOUND)
    team.ask("PUT", f"/api/records/{quote(Name.of(FOUND, found).text)}", found)
    for path in ("/", "/jobs", f"/jobs/{number}", f"/records/{FOUND.id}", "/machines", "/tokens"):
        person.go(path)
        wanted = set(
            person.page.evaluate(
                f"""() => [...document.querySelectorAll("{FOCUSABLE}")].map((one, n) =>
                    one.matches("{UNREACHED}") ? -1 : n).filter(n => n >= 0)"""
            )
        )
        reached = set()
        for _ in wanted:
            person.page.keyboard.press("Tab")
            found = person.page.evaluate(
                f"""() => {{
                    const one = document.activeElement, seen = getComputedStyle(one);
                    const box = one.getBoundingClientRect();
                    return [[...document.querySelectorAll("{FOCUSABLE}")].indexOf(one),
                            seen.outlineStyle != "none" && box.width > 0 && box.left >= 0];
                }}"""
            )
            assert found[1], f"{path}: the focus on {found[0]} is not to be seen"
            reached.add(found[0])
        assert reached == wanted, path
    person.go("/")
    person.page.keyboard.press("Tab")
    person.page.keyboard.press("Enter")
    assert person.page.evaluate("document.activeElement.id") == "main"
    person.go(f"/jobs/{number}")
    person.page.locator("#cancel").focus()
    person.page.keyboard.press("Enter")
    person.page.wait_for_selector("#now .badge:text-is('cancelled')")
    assert person.page.locator("#cancel").count() == 0
    assert "by first admin" in person.text("#now")


def test_without_scripts_a_job_is_followed_by_loading_it_again(team: Team, sits: Sits) -> None:
    person = sits(SMALL, "light", java_script_enabled=False)
    number = team.submit("python", "still.py")
    person.go(f"/jobs/{number}")
    assert "queued" in person.text("#now")
    person.shoot("6-without-scripts")
    team.claim()
    team.beat(range(4), "begun\n")
    person.page.get_by_role("link", name="load it again").click()
    assert "running" in person.text("#now") and "begun" in person.text("#log")
    assert person.page.locator("svg.timeline circle").count() == 3
    person.page.get_by_role("button", name="Cancel the job").click()
    assert "cancelled" in person.text("#now")


def test_nothing_moves_for_who_asks_for_that(team: Team, sits: Sits) -> None:
    number = team.submit("python", "calm.py")
    team.claim()
    moves = "getComputedStyle(document.querySelector('#now .badge'), '::before').animationName"
    person = sits(LARGE, "light")
    person.go(f"/jobs/{number}")
    for reduced, name in (("no-preference", "beat"), ("reduce", "none")):
        person.page.emulate_media(reduced_motion=reduced)
        assert person.page.evaluate(moves) == name


@pytest.mark.parametrize("path", ["/jobs/{number}", "/jobs", "/machines"])
def test_a_page_that_is_left_alone_asks_for_a_login_when_the_session_is_over(
    team: Team, sits: Sits, path: str
) -> None:
    person = sits(LARGE, "light")
    path = path.format(number=team.submit("python", "left.py"))
    person.go(path)
    with team.database.writing() as session:
        session.execute(schema.Session.__table__.delete())
    person.page.wait_for_url("**/login?*")
    assert person.page.input_value("[name=to]", strict=True) == path
    assert all("401" in one for one in person.wrong)
    person.wrong.clear()


def test_records_are_filtered_and_sorted_without_loading_the_page_again(
    team: Team, sits: Sits
) -> None:
    used(team)
    person = sits(LARGE, "light")
    person.page.evaluate("window.stayed = true")
    rows = person.page.locator("#list tbody tr")
    person.page.get_by_label("Device").select_option("NVIDIA B200")
    person.page.wait_for_url("**/?*device=NVIDIA*")
    person.page.wait_for_function("document.querySelectorAll('#list tbody tr').length == 1")
    assert "NVIDIA B200" in rows.inner_text()
    person.page.get_by_label("Device").select_option("")
    person.page.get_by_label("Model").press_sequentially("nothing")
    person.page.get_by_text("No record fits this filter").wait_for()
    assert person.page.evaluate("window.stayed"), "it was loaded again"
    person.page.get_by_role("link", name="Show all records").click()
    person.page.get_by_role("link", name="Speed-up").click()
    person.page.wait_for_selector("th[aria-sort=descending]:has-text('Speed-up')")
    row = rows.first
    id = row.locator("code").inner_text()
    row.locator("td").nth(1).click(force=True)  # its link is over the whole row
    person.page.wait_for_url(f"**/records/{id}")


def test_the_list_of_jobs_and_the_machines_follow_what_happens(team: Team, sits: Sits) -> None:
    number = team.submit("python", "followed.py")
    person, other = sits(LARGE, "light"), sits(SMALL, "dark")
    person.go("/jobs")
    other.go("/machines")
    for one in (person, other):
        one.page.evaluate("window.stayed = true")
    assert person.text(f"#job-{number} .badge") == "queued"
    team.claim()
    team.beat(range(3), "x\n")
    person.page.wait_for_selector(f"#job-{number} .is-running")
    person.page.wait_for_selector(f"#job-{number} progress")
    other.page.get_by_role("link", name=f"{number}: python followed.py").wait_for()
    for one in (person, other):
        assert one.page.evaluate("window.stayed"), "it was loaded again"


def test_a_record_is_measured_again_at_the_press_of_a_button(team: Team, sits: Sits) -> None:
    number = team.submit("python", "again.py")
    team.claim()
    team.done()
    person = sits(LARGE, "light")
    person.go(f"/jobs/{number}")
    person.page.get_by_role("button", name="See the record").click()
    person.page.get_by_role("button", name="Measure again").click()
    person.page.wait_for_url("**/jobs/*")
    assert "python again.py" in person.text("h1") and "queued" in person.text("#now")
