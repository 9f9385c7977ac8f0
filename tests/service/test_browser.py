"""The pages in a real Chromium: a job from the login to its record, live, with a keyboard, small
and large, light and dark."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.cache.name import record_key
from advisor.cache.record import Part
from advisor.service import schema
from advisor.service.executors import Capacity, Machine, Start
from tests.cache.examples import KEY, changed, record
from tests.service.serving import Served
from tests.service.test_jobs import beat, claimed, ended, submit
from tests.service.test_pages import keep
from tests.service.test_records import named, put

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

SMALL, LARGE = 390, 1280
STAYS = "window.stayed = true"
"""Forgotten if the page is loaded again."""
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
SCREENS = [(LARGE, "light"), (SMALL, "dark")]
FOUND = replace(
    record(trials=6),
    parts=(Part(knob=Config(precision="bf16"), stage="compute", ratio=1.5, low=1.46, high=1.54),),
)


def new_job(served: Served, *command: str) -> int:
    asked = {"command": list(command), "gpu": "Z9000", "options": {"budget": "5m"}}
    number: int = submit(served, "admin", **asked).json["id"]
    return number


def started(served: Served, trials: int, log: str) -> Start:
    """Start the jobs that wait; the last one reports."""
    for one in iter(lambda: claimed(served, "NVIDIA Z9000"), None):
        last = one
    measured = [
        {"number": n, "what": "channels_last, bf16, compile=max-autotune", "batch": 64 << n % 3}
        | {"samples_per_s": 2000.0 + 300 * (n % 5), "ratio": 1.0 + 0.15 * (n % 5)}
        | {"outcome": "out of memory" if n == 3 else ""}
        for n in range(trials)
    ]
    beat(served, last, trials=measured, log=log, device="NVIDIA Z9000 (GPU-1)")
    return last


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@dataclass
class Person:
    """Somebody at a screen, whose browser has nothing to complain of."""

    served: Served
    page: Any
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(WAITS_MS)
        self.page.on("console", lambda said: said.type == "error" and self.wrong.append(said.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))

    def go(self, path: str) -> None:
        self.page.goto(f"http://127.0.0.1:{self.served.port}{path}")

    def log_in(self) -> None:
        self.go("/login")
        self.page.wait_for_selector("[name=token]:focus")
        self.page.keyboard.type(self.served.tokens["admin"])
        self.page.keyboard.press("Enter")
        self.page.wait_for_url("**/")

    def looks(self, what: str, width: int, scheme: str) -> None:
        """What is seen is no wider than the screen, and nothing is too faint."""
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # colours at once
        wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not self.page.evaluate(wide), what
        assert self.page.evaluate(DIM) == [], what

    def text(self, selector: str) -> str:
        found: str = self.page.inner_text(selector)
        return found

    def waits_for(self, selector: str) -> None:
        self.page.wait_for_selector(selector, state="attached")


Sits = Callable[..., Person]


@pytest.fixture
def sits(served_lite: Served, chromium: Any) -> Iterator[Sits]:
    contexts, persons = [], []

    def person(width: int = LARGE, scheme: str = "light") -> Person:
        size = {"width": width, "height": 800}
        contexts.append(chromium.new_context(viewport=size, color_scheme=scheme))
        persons.append(Person(served_lite, contexts[-1].new_page()))
        persons[-1].log_in()
        return persons[-1]

    yield person
    for context in contexts:
        context.close()
    assert [found.wrong for found in persons] == [[] for _ in persons]


def test_a_job_from_the_login_to_its_record(served_lite: Served, sits: Sits) -> None:
    """Three people watch it on three pages; nobody loads a page again."""
    watcher, lister, mechanic = sits(), sits(SMALL, "dark"), sits()
    assert "Nothing is here yet" in watcher.text("h1")
    watcher.page.get_by_role("link", name="Jobs", exact=True).click()
    assert "advisor submit" in watcher.text("#live")
    command = ("torchrun", "--nproc-per-node", "4", "train.py", "--epochs", "1")
    number = new_job(served_lite, *command)
    lister.go("/jobs")
    mechanic.go("/machines")
    watcher.page.get_by_role("link", name=f"{number}: ").click()
    assert watcher.text("#live .badge >> nth=0") == "queued"
    assert lister.text(f"#job-{number} .badge") == "queued"
    for person in (watcher, lister, mechanic):
        person.page.evaluate(STAYS)
    log = "".join(f"trial {n}: <b>measured</b>\n" for n in range(40))
    one = started(served_lite, 9, log)
    watcher.waits_for("svg.timeline circle >> nth=7")
    assert watcher.text("#live .badge >> nth=0") == "running"
    assert "<b>measured</b>" in watcher.text("#log")
    assert watcher.page.locator("#log b").count() == 0
    assert "out of memory" in watcher.text("tr.warns")
    at = "log => [log.scrollHeight - log.clientHeight + log.scrollTop, Math.abs(log.scrollTop)]"
    above, below = watcher.page.eval_on_selector("pre.log", at)
    assert above > 0 and below < 2, "the log is where it ends"
    lister.waits_for(f"#job-{number} .is-running")
    lister.waits_for(f"#job-{number} progress")
    mechanic.page.get_by_role("link", name=f"{number}: torchrun").wait_for()
    made = replace(FOUND.provenance, created=FOUND.provenance.created + 1)
    put(served_lite, *named(replace(FOUND, provenance=made)), one.external)
    assert ended(served_lite, one, state="done", record=FOUND.id).status == 200
    link = watcher.page.get_by_role("button", name="See the record")
    link.wait_for()
    assert watcher.text("#live .badge >> nth=0") == "done"
    assert all(person.page.evaluate("stayed") for person in (watcher, lister, mechanic))
    with watcher.page.expect_event("requestfinished", lambda one: "/records/" in one.url):
        link.click()
    assert "1.50x" in watcher.text(".figures")
    watcher.page.get_by_role("button", name="Measure again").click()
    watcher.page.wait_for_url("**/jobs/*")
    assert "torchrun" in watcher.text("h1") and "queued" in watcher.text("#live")


def test_every_page_on_every_screen(served_lite: Served, sits: Sits) -> None:
    running, failed = used(served_lite)
    person = sits()
    for path in (
        *("/", "/?device=NVIDIA B200&sort=-speedup", f"/records/{FOUND.id}"),
        *("/jobs", "/jobs?state=preempted", f"/jobs/{running}", f"/jobs/{failed}"),
        *("/machines", "/tokens", "/records/000000000000@1"),
    ):
        person.go(path)
        assert person.page.title().endswith(" - advisor")
        for width, scheme in SCREENS:
            person.looks(path, width, scheme)
    (missing,) = person.wrong
    assert "404" in missing
    person.wrong.clear()
    moves = "getComputedStyle(document.querySelector('#live .badge'), '::before').animationName"
    person.go(f"/jobs/{running}")
    for motion, name in (("reduce", "none"), ("no-preference", "beat")):
        person.page.emulate_media(reduced_motion=motion)
        assert person.page.evaluate(moves) == name


def used(served: Served) -> tuple[int, int]:
    """A team was here for a while; the numbers of a job that runs and of one that failed."""
    devices = ("NVIDIA B200", "NVIDIA A100-SXM4-80GB", "AMD EPYC 9654 96-Core Processor")
    keep(served, FOUND, *(record(key=changed(KEY, "device.name", one)) for one in devices))
    place, today = record_key(FOUND), int(time.time() // 86_400)
    with served.database.writing() as session:
        for device, where, model, outcome, count in (
            ("NVIDIA H200", place, "ab" * 6, "exact", 1200),
            ("NVIDIA H200", place, "ab" * 6, "stale", 90),
            ("NVIDIA B200", "", "cd" * 6, "miss", 40),
            ("NVIDIA L40S", place, "ab" * 6, "nearest", 25),
        ):
            row = {"device": device, "record_key": where, "model": model, "outcome": outcome}
            session.add(schema.Lookup(day=today, count=count, **row))
    failed = new_job(served, "python", "train.py", "--data", "/data/" + "imagenet-" * 12)
    one = started(served, 2, "Traceback (most recent call last):\nRuntimeError: no data\n")
    why = "the command ended with status 1: RuntimeError: no data; the log has more"
    ended(served, one, state="failed", reason=why)
    running = new_job(served, "torchrun", "--nproc-per-node", "4", "train.py")
    started(served, 9, "epoch 1\nepoch 2\n")
    new_job(served, "python", "waits.py")
    busy = Capacity(gpu="NVIDIA B200", gpus=0, total=1, why="a job runs there")
    up = [Capacity(gpu="NVIDIA Z9000", gpus=3, total=4), busy]
    served.service.machines = {
        "local:here": Machine(name="local:here", capacities=up),
        "ray:there": Machine(name="ray:there", why="no answer"),
    }
    return running, failed


def test_a_keyboard_reaches_everything(served_lite: Served, sits: Sits) -> None:
    person = sits()
    number = new_job(served_lite, "python", "keys.py")
    keep(served_lite, FOUND)
    every = f"""[...document.querySelectorAll("{FOCUSABLE}")]"""
    reachable = f"""{every}.map((one, n) => one.matches("{UNREACHED}") ? -1 : n)"""
    focused = f"""() => {{
        const one = document.activeElement, seen = getComputedStyle(one);
        const box = one.getBoundingClientRect();
        return [{every}.indexOf(one),
                seen.outlineStyle != "none" && box.width > 0 && box.left >= 0];
    }}"""
    for path in ("/", "/jobs", f"/jobs/{number}", f"/records/{FOUND.id}", "/machines", "/tokens"):
        person.go(path)
        wanted = {n for n in person.page.evaluate(reachable) if n >= 0}
        reached = set()
        for _ in wanted:
            person.page.keyboard.press("Tab")
            nth, seen = person.page.evaluate(focused)
            assert seen, f"{path}: the focus on {nth} is not to be seen"
            reached.add(nth)
        assert reached == wanted, path
    person.go("/")
    person.page.keyboard.press("Tab")
    person.page.keyboard.press("Enter")
    assert person.page.evaluate("document.activeElement.id") == "main"
    person.go(f"/jobs/{number}")
    person.page.locator("#cancel").focus()
    person.page.keyboard.press("Enter")
    person.waits_for("#live .badge:text-is('cancelled')")
    assert person.page.locator("#cancel").count() == 0
    assert "by a admin" in person.text("#live")


def test_records_are_filtered_and_sorted_in_place(served_lite: Served, sits: Sits) -> None:
    used(served_lite)
    person = sits()
    person.page.evaluate(STAYS)
    rows = person.page.locator("#list tbody tr")
    person.page.get_by_label("Device").select_option("NVIDIA B200")
    person.page.wait_for_url("**/?*device=NVIDIA*")
    person.page.wait_for_function("document.querySelectorAll('#list tbody tr').length == 1")
    assert "NVIDIA B200" in rows.inner_text()
    person.page.get_by_label("Device").select_option("")
    person.page.get_by_label("Model").press_sequentially("nothing")
    person.page.get_by_text("No record fits this filter").wait_for()
    assert person.page.evaluate("stayed")
    person.page.get_by_role("link", name="Show all records").click()
    person.page.get_by_role("link", name="Speed-up").click()
    person.waits_for("th[aria-sort=descending]:has-text('Speed-up')")
    id = rows.first.locator("code").inner_text()
    rows.first.locator("td").nth(1).click(force=True)  # its link is over the whole row
    person.page.wait_for_url(f"**/records/{id}")
