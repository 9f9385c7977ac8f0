"""One hostile store through every command and apply(): what each did, said and took."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import advisor as package
from tests import hostile
from tests.cache.examples import record
from tests.face.commands import MODEL, SHAPE, advisor
from tests.face.unmeasured import unmeasured

OTHER = hostile.OTHER.id
COMMANDS: dict[str, tuple[str, ...]] = {
    "apply": (),
    "show": ("show",),
    "show it": ("show", OTHER),
    "report": ("report", OTHER, "--html", "-"),
    "why": ("why", "model.py:Net", "--shape", SHAPE),
    "tune": ("tune", "model.py", "--shape", SHAPE, "--device", "cpu"),
    "verify": ("verify", OTHER, "--budget", "3s"),
    "gc": ("gc", "--yes"),
}


@dataclass(frozen=True, slots=True)
class Happened:
    """`code`: of the command; of apply(), 0 where it went on and 1 where it raised."""

    code: int
    said: str
    seconds: float


def through(case: hostile.Case, folder: Path) -> dict[str, Happened]:
    """Make the store in a folder, beside a model, and ask every command of it.

    Tuning measures nothing: it is refused, or remembers a made-up record in the store. The store's
    URL is then in the file `url`.
    """
    (folder / "model.py").write_text(MODEL)
    url = case.make(folder)
    (folder / "url").write_text(url)
    happened = {}
    with unmeasured():
        for name, words in COMMANDS.items():
            act = _command(folder, url, words) if words else _apply(folder, url)
            began = time.monotonic()
            code, said = act()
            happened[name] = Happened(code, said, time.monotonic() - began)
    return happened


def _command(folder: Path, url: str, words: tuple[str, ...]) -> Callable[[], tuple[int, str]]:
    def act() -> tuple[int, str]:
        done = advisor(folder, *words, "--cache", url)
        return done.returncode, done.stdout + done.stderr

    return act


def _apply(folder: Path, url: str) -> Callable[[], tuple[int, str]]:
    def act() -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
            patch.chdir(folder)
            warnings.simplefilter("always")
            package.lookup(package.Model("model.py:Net", device="cpu"), shape=SHAPE, store=url)
        return 0, "\n".join(str(one.message) for one in seen)

    return act


def lost(case: hostile.Case, folder: Path) -> bool:
    """Whether the honest record is not there any more."""
    from advisor.open_store import open_records

    url = (folder / "url").read_text()
    return case.honest and record().id not in {one.id for one in open_records(url).all()}
