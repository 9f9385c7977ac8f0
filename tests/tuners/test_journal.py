"""The study's journal: resuming from it, also after damage to its file."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from optuna.storages.journal import JournalFileBackend
from optuna.trial import create_trial

from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.tuners.measure.runner import Compared
from advisor.tuners.search.journal import Journal, JournaledTrial, open_study
from advisor.tuners.search.ratio import UNKNOWN_RATIO, Ratio
from advisor.tuners.search.space import Space

SPACE = Space({"precision": ("default", "tf32"), "threads": (0, 1, 2), "batch_size": (8, 16)})
CONFIGS = [config for batch in SPACE.batches for config in SPACE.configs(batch)]


def fill(folder: Path, count: int = 5) -> list[JournaledTrial]:
    """Write a journal of trials that differ in speed. Return the trials."""
    journal = Journal(open_study(folder, "s")[0], SPACE)
    return [tell_trial(journal, number) for number in range(count)]


def speeds(trials: Iterable[JournaledTrial]) -> dict[Config, float]:
    return {one.trial.config: one.trial.measurement.samples_per_s for one in trials}


def tell_trial(journal: Journal, number: int) -> JournaledTrial:
    """Add a trial. Every second one was compared. Every third one has no upper bound."""
    pending = journal.ask(CONFIGS[number])
    trial = Trial(
        number=pending.number,
        config=CONFIGS[number],
        measurement=Measurement(outcome="ok", samples_per_s=100.0 + number, low=1.0, high=200.0),
        stage="compute",
        origin="recipe",
        seconds=1.5,
    )
    high = math.inf if number % 3 == 0 else 3.0 + number
    ratio = Ratio(mean=1.0 + number, low=0.5, high=high)
    compared = Compared("ok", "as fp32") if number % 2 else None
    told = JournaledTrial(trial, ratio, compared)
    journal.tell(pending, told, [1.0 + number, 1.1 + number])
    return told


def resume(folder: Path) -> tuple[dict[Config, float], str]:
    """Return the speeds and the notice that the next run gets."""
    study, notice = open_study(folder, "s")
    return speeds(Journal(study, SPACE).resume()), notice


def test_intact_journal_is_read_back_unchanged(tmp_path: Path) -> None:
    written = fill(tmp_path)
    study = open_study(tmp_path, "s")[0]
    assert Journal(study, SPACE).resume() == written
    # A narrower space gets only the trials that it contains.
    narrow = Space({"precision": ("default", "tf32"), "threads": (0, 1), "batch_size": (8,)})
    trials = Journal(study, narrow).resume()
    assert all(narrow.holds(one.trial.config) for one in trials) and len(trials) == 4
    ratios = [list(one.intermediate_values.values()) for one in study.trials]
    assert ratios[:2] == [[1.0, 1.1], [2.0, 2.1]]
    assert resume(tmp_path)[1] == ""
    assert [path.name for path in tmp_path.iterdir()] == ["s.journal"]


def damage_second_trial(lines: list[bytes]) -> list[bytes]:
    """Damage the line that starts the second trial."""
    at = [n for n, line in enumerate(lines) if json.loads(line)["op_code"] == 4][1]
    return [*lines[:at], b"{}}\n", *lines[at + 1 :]]


INVALID_LINES = [b'{"op_code": 99}\n', b"[]\n", b'{"op_code": 4}\n']
# For each damage, the number of trials that stay readable.
DAMAGES: dict[str, tuple[int, Callable[[list[bytes]], list[bytes]]]] = {
    "torn at the end": (4, lambda lines: [*lines[:-1], lines[-1][:20]]),
    "garbage in the middle": (3, lambda lines: [*lines[:4], b"\x00\xff garbage\n", *lines[4:]]),
    "a line lost": (3, lambda lines: [*lines[:4], lines[4][:7] + lines[5], *lines[6:]]),
    "a trial's first line lost": (1, damage_second_trial),
    "the first line lost": (0, lambda lines: [b"\x00" * 40 + b"\n", *lines[1:]]),
    "nonsense that is JSON": (2, lambda lines: [*lines[:3], *INVALID_LINES, *lines[3:]]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_readable_trials_of_a_damaged_journal_are_kept(tmp_path: Path, damage: str) -> None:
    written = speeds(fill(tmp_path))
    path = tmp_path / "s.journal"
    readable, apply_damage = DAMAGES[damage]
    damaged = b"".join(apply_damage(path.read_bytes().splitlines(keepends=True)))
    path.write_bytes(damaged)
    read, notice = resume(tmp_path)
    assert list(read.items()) == list(written.items())[:readable]
    assert "s.journal.damaged-1" in notice
    assert (tmp_path / "s.journal.damaged-1").read_bytes() == damaged
    # The repaired journal takes new trials.
    tell_trial(Journal(open_study(tmp_path, "s")[0], SPACE), 7)
    read, notice = resume(tmp_path)
    assert CONFIGS[7] in read and notice == ""


def test_random_damage_loses_trials_but_invents_none(tmp_path: Path) -> None:
    written = speeds(fill(tmp_path))
    path = tmp_path / "s.journal"
    intact = path.read_bytes()
    rng, readable = random.Random(0), 0
    for _ in range(40):
        at, length = rng.randrange(len(intact)), rng.randrange(1, 400)
        path.write_bytes(intact[:at] + rng.randbytes(rng.randrange(9)) + intact[at + length :])
        read, _notice = resume(tmp_path)
        assert read.items() <= written.items()
        readable += len(read)
        path.unlink()
    assert readable > 40


@pytest.mark.parametrize("kind", ["link", "link to a journal", "folder", "pipe", "sparse"])
def test_journal_that_is_no_regular_file_is_moved_aside(tmp_path: Path, kind: str) -> None:
    path, outside = tmp_path / "s" / "s.journal", tmp_path / "outside"
    path.parent.mkdir()
    before = b""
    if kind == "link to a journal":
        fill(outside.parent / "other")
        outside.write_bytes(before := (outside.parent / "other" / "s.journal").read_bytes())
    if kind.startswith("link"):
        path.symlink_to(outside)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(10 * 2**30)
    study, notice = open_study(path.parent, "s")
    assert "damaged-1" in notice and study.trials == []
    assert path.is_file() and not path.is_symlink()
    assert outside.exists() == bool(before) and (not before or outside.read_bytes() == before)


def test_stale_lock_is_not_waited_for(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "s.journal.lock").symlink_to(tmp_path / "s.journal")
    began = time.monotonic()
    assert len(resume(tmp_path)[0]) == 5
    assert time.monotonic() - began < 20  # Optuna would wait 30 s


@pytest.mark.parametrize("lines", range(5))
def test_full_disk_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int) -> None:
    notices: list[str] = []
    journal = Journal(open_study(tmp_path, "s")[0], SPACE, notice=notices.append)
    original, fits = JournalFileBackend.append_logs, iter([True] * lines)

    def fill_up(backend: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
        """Fail like a full disk in the middle of a line, after `lines` calls."""
        if next(fits, False):
            return original(backend, logs)
        with Path(backend._file_path).open("ab") as file:
            file.write(b'{"op_code": 8, "tri')
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JournalFileBackend, "append_logs", fill_up)
    for number in range(5):
        tell_trial(journal, number)
    assert len(notices) == 1 and "No space left on device" in notices[0]
    assert [t.value for t in journal.study.trials if t.value] == [1.0 + n for n in range(5)]
    assert journal.study.best_value == 5.0
    # With free space again, the next run resumes from what was written.
    monkeypatch.undo()
    read, notice = resume(tmp_path)
    assert "damaged-1" in notice
    assert read.items() <= {CONFIGS[n]: 100.0 + n for n in range(5)}.items()


def test_unwritable_folder_gives_a_notice_and_an_unsaved_study(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    study, notice = open_study(tmp_path / "file", "s")
    assert "cannot be saved" in notice
    tell_trial(Journal(study, SPACE), 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ratio", [2.0, 3.0, 4.0]),
        ("ratio", [math.nan, 0.0, 1.0]),
        ("ratio", "fast"),
        ("seconds", -1.0),
        ("seconds", math.inf),
        ("measurement", {"outcome": "splendid"}),
        ("compared", ["ok"]),
    ],
)
def test_trial_with_an_invalid_attribute_is_skipped(tmp_path: Path, name: str, value: Any) -> None:
    study = open_study(tmp_path, "s")[0]
    tell_trial(Journal(study, SPACE), 0)
    (good,) = study.trials
    attributes = {**good.user_attrs, "compared": None, name: value}
    other = {"params": dict(CONFIGS[1]), "distributions": good.distributions}
    study.add_trial(create_trial(**other, value=2.0, user_attrs=attributes))
    assert set(resume(tmp_path)[0]) == {CONFIGS[0]}


def test_failed_trial_has_value_zero_and_is_resumed_as_failed(tmp_path: Path) -> None:
    journal = Journal(open_study(tmp_path, "s")[0], SPACE)
    told = tell_trial(journal, 1)
    failed = dataclasses.replace(
        told.trial, config=CONFIGS[2], measurement=Measurement(outcome="crashed", reason="so")
    )
    journal.tell(journal.ask(CONFIGS[2]), JournaledTrial(failed, UNKNOWN_RATIO, None), [])
    study = open_study(tmp_path, "s")[0]
    assert [trial.value for trial in study.trials] == [2.0, 0.0]
    outcomes = [one.trial.measurement.outcome for one in Journal(study, SPACE).resume()]
    assert outcomes == ["ok", "crashed"]


def test_interrupt_in_a_write_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, _ = open_study(tmp_path, "s")
    notices: list[str] = []
    journal = Journal(study, SPACE, notice=notices.append)

    def interrupted(_handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tell_trial(journal, 0)
    assert notices == []
