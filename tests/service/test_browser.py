"""The web pages in a real Chromium: live updates, keyboard, screen sizes, colour schemes."""

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
from tests.service.serving import LiveServer
from tests.service.test_jobs import beat, claim_job, end, submit
from tests.service.test_pages import put_all
from tests.service.test_records import packed, put

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

SMALL, LARGE = 390, 1280
MARK_PAGE = "window.stayed = true"  # sets a variable that a page reload would clear
WAITS_MS = 20_000
SLOW_MS = 500  # more than the delay after which a filter is sent, and enough for its answer
FOCUSABLE = "a[href], button, input:not([type=hidden]), select, summary, [tabindex='0']"
FOLDED = "details:not([open]) > :not(summary)"
UNREACHED = f"{FOLDED}, {FOLDED} *, [type=radio]:not(:checked)"
"""What Tab skips: folded content, and unchecked buttons of a radio group."""
LOW_CONTRAST = """() => {
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
"""Lists elements whose text contrast is below 4.5 to 1 (WCAG 2.2, 1.4.3)."""
SCREENS = [(LARGE, "light"), (SMALL, "dark")]
RECORD = replace(
    record(trials=6),
    parts=(Part(knob=Config(precision="bf16"), stage="compute", ratio=1.5, low=1.46, high=1.54),),
)


def new_job(server: LiveServer, *command: str) -> int:
    asked = {"command": list(command), "gpu": "Z9000", "options": {"budget": "5m"}}
    number: int = submit(server, "admin", **asked).json["id"]
    return number


def start_jobs(server: LiveServer, trials: int, log: str) -> Start:
    """Start all queued jobs; the last one sends a heartbeat."""
    for one in iter(lambda: claim_job(server, "NVIDIA Z9000"), None):
        last = one
    measured = [
        {"number": n, "what": "channels_last, bf16, compile=max-autotune", "batch": 64 << n % 3}
        | {"samples_per_s": 2000.0 + 300 * (n % 5), "ratio": 1.0 + 0.15 * (n % 5)}
        | {"outcome": "out of memory" if n == 3 else ""}
        for n in range(trials)
    ]
    beat(server, last, trials=measured, log=log, device="NVIDIA Z9000 (GPU-1)")
    return last


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@dataclass
class User:
    """A logged-in user with one page; `errors` collects JavaScript and console errors."""

    server: LiveServer
    page: Any
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(WAITS_MS)
        self.page.on("console", lambda log: log.type == "error" and self.errors.append(log.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def go(self, path: str) -> None:
        self.page.goto(f"http://127.0.0.1:{self.server.port}{path}")

    def log_in(self) -> None:
        self.go("/login")
        self.page.wait_for_selector("[name=token]:focus")
        self.page.keyboard.type(self.server.tokens["admin"])
        self.page.keyboard.press("Enter")
        self.page.wait_for_url("**/")

    def check_layout(self, what: str, width: int, scheme: str) -> None:
        """The page is not wider than the screen, and its text has enough contrast."""
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # no transitions
        wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not self.page.evaluate(wide), what
        assert self.page.evaluate(LOW_CONTRAST) == [], what

    def text(self, selector: str) -> str:
        found: str = self.page.inner_text(selector)
        return found

    def wait_for(self, selector: str) -> None:
        self.page.wait_for_selector(selector, state="attached")


NewUser = Callable[..., User]


@pytest.fixture
def new_user(sqlite_server: LiveServer, chromium: Any) -> Iterator[NewUser]:
    contexts, users = [], []

    def create(width: int = LARGE, scheme: str = "light") -> User:
        size = {"width": width, "height": 800}
        contexts.append(chromium.new_context(viewport=size, color_scheme=scheme))
        users.append(User(sqlite_server, contexts[-1].new_page()))
        users[-1].log_in()
        return users[-1]

    yield create
    for context in contexts:
        context.close()
    assert [user.errors for user in users] == [[] for _ in users]


def test_pages_follow_a_job_live(sqlite_server: LiveServer, new_user: NewUser) -> None:
    """Three users watch it on three pages without a reload."""
    watcher, reader, admin = new_user(), new_user(SMALL, "dark"), new_user()
    assert "Nothing is here yet" in watcher.text("h1")
    watcher.page.get_by_role("link", name="Jobs", exact=True).click()
    assert "advisor submit" in watcher.text("#live")
    command = ("torchrun", "--nproc-per-node", "4", "train.py", "--epochs", "1")
    number = new_job(sqlite_server, *command)
    reader.go("/jobs")
    admin.go("/machines")
    watcher.page.get_by_role("link", name=f"{number}: ").click()
    assert watcher.text("#live .badge >> nth=0") == "queued"
    assert reader.text(f"#job-{number} .badge") == "queued"
    for user in (watcher, reader, admin):
        user.page.evaluate(MARK_PAGE)
    log = "".join(f"trial {n}: <b>measured</b>\n" for n in range(40))
    one = start_jobs(sqlite_server, 9, log)
    watcher.wait_for("svg.timeline circle >> nth=7")
    assert watcher.text("#live .badge >> nth=0") == "running"
    assert "<b>measured</b>" in watcher.text("#log")
    assert watcher.page.locator("#log b").count() == 0
    assert "out of memory" in watcher.text("tr.warns")
    at = "log => [log.scrollHeight - log.clientHeight + log.scrollTop, Math.abs(log.scrollTop)]"
    above, below = watcher.page.eval_on_selector("pre.log", at)
    assert above > 0 and below < 2, "the log is where it ends"
    reader.wait_for(f"#job-{number} .is-running")
    reader.wait_for(f"#job-{number} progress")
    admin.page.get_by_role("link", name=f"{number}: torchrun").wait_for()
    made = replace(RECORD.provenance, created=RECORD.provenance.created + 1)
    put(sqlite_server, *packed(replace(RECORD, provenance=made)), one.external)
    assert end(sqlite_server, one, state="done", record=RECORD.id).status == 200
    link = watcher.page.get_by_role("button", name="See the record")
    link.wait_for()
    assert watcher.text("#live .badge >> nth=0") == "done"
    assert all(user.page.evaluate("stayed") for user in (watcher, reader, admin))
    with watcher.page.expect_event("requestfinished", lambda one: "/records/" in one.url):
        link.click()
    assert "1.50x" in watcher.text(".figures")
    watcher.page.get_by_role("button", name="Measure again").click()
    watcher.page.wait_for_url("**/jobs/*")
    assert "torchrun" in watcher.text("h1") and "queued" in watcher.text("#live")


def test_every_page_fits_every_screen(sqlite_server: LiveServer, new_user: NewUser) -> None:
    running, failed = fill_server(sqlite_server)
    user = new_user()
    for path in (
        *("/", "/?device=NVIDIA B200&sort=-speedup", f"/records/{RECORD.id}"),
        *("/jobs", "/jobs?state=preempted", f"/jobs/{running}", f"/jobs/{failed}"),
        *("/machines", "/tokens", "/records/000000000000@1"),
    ):
        user.go(path)
        assert user.page.title().endswith(" - advisor")
        for width, scheme in SCREENS:
            user.check_layout(path, width, scheme)
    (missing,) = user.errors
    assert "404" in missing
    user.errors.clear()
    moves = "getComputedStyle(document.querySelector('#live .badge'), '::before').animationName"
    user.go(f"/jobs/{running}")
    for motion, name in (("reduce", "none"), ("no-preference", "beat")):
        user.page.emulate_media(reduced_motion=motion)
        assert user.page.evaluate(moves) == name


def fill_server(server: LiveServer) -> tuple[int, int]:
    """Add records, lookups, jobs and machines; return the ids of a running and a failed job."""
    devices = ("NVIDIA B200", "NVIDIA A100-SXM4-80GB", "AMD EPYC 9654 96-Core Processor")
    put_all(server, RECORD, *(record(key=changed(KEY, "device.name", one)) for one in devices))
    place, today = record_key(RECORD), int(time.time() // 86_400)
    with server.database.writing() as session:
        for device, where, model, outcome, count in (
            ("NVIDIA H200", place, "ab" * 6, "exact", 1200),
            ("NVIDIA H200", place, "ab" * 6, "stale", 90),
            ("NVIDIA B200", "", "cd" * 6, "miss", 40),
            ("NVIDIA L40S", place, "ab" * 6, "nearest", 25),
        ):
            row = {"device": device, "record_key": where, "model": model, "outcome": outcome}
            session.add(schema.Lookup(day=today, count=count, **row))
    failed = new_job(server, "python", "train.py", "--data", "/data/" + "imagenet-" * 12)
    one = start_jobs(server, 2, "Traceback (most recent call last):\nRuntimeError: no data\n")
    why = "the command ended with status 1: RuntimeError: no data; the log has more"
    end(server, one, state="failed", reason=why)
    running = new_job(server, "torchrun", "--nproc-per-node", "4", "train.py")
    start_jobs(server, 9, "epoch 1\nepoch 2\n")
    new_job(server, "python", "waits.py")
    busy = Capacity(gpu="NVIDIA B200", gpus=0, total=1, why="a job runs there")
    up = [Capacity(gpu="NVIDIA Z9000", gpus=3, total=4), busy]
    server.service.machines = {
        "local:here": Machine(name="local:here", capacities=up),
        "ray:there": Machine(name="ray:there", why="no answer"),
    }
    return running, failed


def test_the_keyboard_reaches_every_control(sqlite_server: LiveServer, new_user: NewUser) -> None:
    user = new_user()
    number = new_job(sqlite_server, "python", "keys.py")
    put_all(sqlite_server, RECORD)
    every = f"""[...document.querySelectorAll("{FOCUSABLE}")]"""
    reachable = f"""{every}.map((one, n) => one.matches("{UNREACHED}") ? -1 : n)"""
    focused = f"""() => {{
        const one = document.activeElement, seen = getComputedStyle(one);
        const box = one.getBoundingClientRect();
        return [{every}.indexOf(one),
                seen.outlineStyle != "none" && box.width > 0 && box.left >= 0];
    }}"""
    for path in ("/", "/jobs", f"/jobs/{number}", f"/records/{RECORD.id}", "/machines", "/tokens"):
        user.go(path)
        wanted = {n for n in user.page.evaluate(reachable) if n >= 0}
        reached = set()
        for _ in wanted:
            user.page.keyboard.press("Tab")
            nth, seen = user.page.evaluate(focused)
            assert seen, f"{path}: the focus on {nth} is not to be seen"
            reached.add(nth)
        assert reached == wanted, path
    user.go("/")
    user.page.keyboard.press("Tab")
    user.page.keyboard.press("Enter")
    assert user.page.evaluate("document.activeElement.id") == "main"
    user.go(f"/jobs/{number}")
    user.page.locator("#cancel").focus()
    user.page.keyboard.press("Enter")
    user.wait_for("#live .badge:text-is('cancelled')")
    assert user.page.locator("#cancel").count() == 0
    assert "by a admin" in user.text("#live")


def test_filtering_and_sorting_need_no_reload(sqlite_server: LiveServer, new_user: NewUser) -> None:
    fill_server(sqlite_server)
    user = new_user()
    user.page.evaluate(MARK_PAGE)
    rows = user.page.locator("#list tbody tr")
    user.page.get_by_label("Device").select_option("NVIDIA B200")
    user.page.wait_for_url("**/?*device=NVIDIA*")
    user.page.wait_for_function("document.querySelectorAll('#list tbody tr').length == 1")
    assert "NVIDIA B200" in rows.inner_text()
    user.page.get_by_label("Device").select_option("")
    user.page.get_by_label("Model").fill("nothing")
    user.page.get_by_text("No record fits this filter").wait_for()
    assert user.page.evaluate("stayed")
    user.page.get_by_role("link", name="Show all records").click(delay=SLOW_MS)
    user.page.get_by_role("link", name="Speed-up").click()
    user.wait_for("th[aria-sort=descending]:has-text('Speed-up')")
    id = rows.first.locator("code").inner_text()
    rows.first.locator("td").nth(1).click(force=True)  # the link covers the whole row
    user.page.wait_for_url(f"**/records/{id}")


def test_the_list_shows_what_was_typed_last(sqlite_server: LiveServer, new_user: NewUser) -> None:
    """A slow first answer does not drop the later ones."""
    fill_server(sqlite_server)
    user, held = new_user(), list[Any]()
    user.page.route("**/?model=n&*", lambda one: held.append(one))
    for typed in ("n", "no", "nothing"):
        user.page.get_by_label("Model").fill(typed)
        user.page.wait_for_timeout(SLOW_MS)
    for one in held:
        one.continue_()
    user.page.wait_for_url("**/?model=nothing&*")
    user.page.get_by_text("No record fits this filter").wait_for()
