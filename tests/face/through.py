"""One hostile store through every command and apply(): what each did and said."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

import advisor as package
from advisor.open_store import open_records
from tests import hostile
from tests.cache.examples import record
from tests.face.commands import MODEL, SHAPE, advisor
from tests.face.unmeasured import unmeasured

OTHER = hostile.OTHER.id
COMMANDS: dict[str, tuple[str, ...]] = {
    "show": ("show",),
    "show it": ("show", OTHER),
    "report": ("report", OTHER, "--html", "-"),
    "why": ("why", "model.py:Net", "--shape", SHAPE),
    "tune": ("tune", "model.py", "--shape", SHAPE, "--device", "cpu"),
    "verify": ("verify", OTHER, "--budget", "3s"),
    "gc": ("gc", "--yes"),
}


class Happened(NamedTuple):
    """`code`: of the command; of apply(), which goes on, 0."""

    code: int
    said: str


def through(case: hostile.Case, folder: Path) -> dict[str, Happened]:
    """Make the store in a folder, beside a model, and ask every command of it.

    Tuning measures nothing: it is refused, or remembers a made-up record in the store. The store's
    URL is then in the file `url`.
    """
    (folder / "model.py").write_text(MODEL)
    url = case.make(folder)
    (folder / "url").write_text(url)
    with unmeasured():
        happened = {"apply": Happened(0, _warned(folder, url))}
        for name, words in COMMANDS.items():
            done = advisor(folder, *words, "--cache", url)
            happened[name] = Happened(done.returncode, done.stdout + done.stderr)
    return happened


def _warned(folder: Path, url: str) -> str:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        patch.chdir(folder)
        warnings.simplefilter("always")
        package.lookup(package.Model("model.py:Net", device="cpu"), shape=SHAPE, store=url)
    return "\n".join(str(one.message) for one in seen)


def lost(case: hostile.Case, folder: Path) -> bool:
    """Whether the honest record is not there any more."""
    url = (folder / "url").read_text()
    return case.honest and record().id not in {one.id for one in open_records(url).all()}
