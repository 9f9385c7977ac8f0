"""advisor explain and advisor verify, on records that were really tuned."""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from pathlib import Path

import pytest

import advisor as package
from advisor.cache.config import Config
from advisor.cache.record import Part, Record
from advisor.cache.records import Records
from advisor.cache.stores import open_store
from tests.face.commands import MODEL, QUICK, SHAPE, advisor


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("again")
    (folder / "model.py").write_text(MODEL)
    done = advisor(
        folder, "tune", "model.py", "--shape", SHAPE, *QUICK, "--no-compile", **at(folder)
    )
    assert done.returncode == 0, done.stderr
    return folder


def at(folder: Path) -> dict[str, str]:
    return {"ADVISOR_CACHE": str(folder / "cache")}


def held(folder: Path) -> tuple[Records, Record]:
    records = Records(open_store(str(folder / "cache")))
    (record,) = records.all()
    return records, record


def advise(folder: Path, config: dict[str, object], speedup: float) -> Record:
    """The record, made to say that a config of this space is so much faster."""
    records, record = held(folder)
    choice = dataclasses.replace(
        record.baseline,
        config=Config(record.baseline.config | config),  # type: ignore[arg-type]
        speedup=speedup,
        speedup_low=0.99 * speedup,
        speedup_high=1.01 * speedup,
    )
    changed = dataclasses.replace(
        record, at_batch=choice, free=None, stale="", parts=(), revised=time.time()
    )
    records.put(changed)
    return changed


def test_what_contributes_nothing_is_set_back(tuned: Path) -> None:
    # One thread or all: hardly a difference on so small a net, and a config that is sound.
    record = advise(tuned, {"channels_last": True}, 1.3)
    done = advisor(tuned, "explain", record.id, "--budget", "3s", "--plot", "why.png", **at(tuned))
    assert done.returncode == 0, done.stderr
    assert "channels_last" in done.stdout and "contributes" in done.stdout
    assert (tuned / "why.png").stat().st_size > 1000
    _, now = held(tuned)
    (part,) = now.parts
    assert part.knob == Config(channels_last=True) and part.low <= part.ratio <= part.high
    if part.low <= 1:
        assert now.at_batch.config == now.baseline.config or "set back" not in done.stdout
    shown = advisor(tuned, "show", record.id, **at(tuned))
    assert "contributes" in shown.stdout


def test_a_record_that_no_longer_holds_is_stale_until_it_is_tuned_again(tuned: Path) -> None:
    record = advise(tuned, {"channels_last": True}, 1e6)
    done = advisor(tuned, "verify", record.id, "--budget", "2s", **at(tuned))
    assert done.returncode == 1 and "marked stale" in done.stdout, done.stdout + done.stderr
    assert "stale" in advisor(tuned, "show", **at(tuned)).stdout
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        advice = package.lookup(
            str(tuned / "model.py"), shape=(4, 3, 8, 8), device="cpu", cache=str(tuned / "cache")
        )
    assert advice.status == "stale" and "1000000.00x" in str(seen[0].message)
    done = advisor(tuned, "tune", "model.py", "--shape", SHAPE, *QUICK, "--no-compile", **at(tuned))
    assert "marked stale" in done.stderr and "Already tuned" not in done.stdout
    assert held(tuned)[1].stale == ""


def test_a_record_that_holds_says_so(tuned: Path) -> None:
    _, record = held(tuned)
    changed = advise(tuned, {}, 1.0)
    done = advisor(tuned, "verify", changed.id, "--budget", "2s", "--json", **at(tuned))
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["holds"] and found["now"]["ratio"] == 1.0
    done = advisor(tuned, "explain", record.id, "--budget", "2s", **at(tuned))
    assert done.returncode == 0
    assert "Nothing to explain" in done.stdout or record.input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explain", "ffffffffffff"), "no such record"),
        (("explain", "KEY", "--plot", "why.txt"), "ends in .png or .svg"),
        (("explain", "KEY", "--plot", "missing/why.png"), "there is no folder 'missing'"),
        (("explain", "KEY", "--target", "other.py"), "has changed since"),
        (("verify", "KEY", "--target", "nowhere.py"), "nowhere.py"),
        (("verify", "KEY", "--budget", "soon"), "expected a time"),
    ],
)
def test_wrong_input_is_one_line(tuned: Path, arguments: tuple[str, ...], said: str) -> None:
    (tuned / "other.py").write_text(MODEL.replace("width=8", "width=9"))
    _, record = held(tuned)
    given = [record.id if word == "KEY" else word for word in arguments]
    done = advisor(tuned, *given, **at(tuned))
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


def test_a_moved_target_is_named(tuned: Path, tmp_path: Path) -> None:
    _, record = held(tuned)
    done = advisor(tmp_path, "verify", record.id, **at(tuned))
    assert done.returncode == 2 and "give --target PATH" in done.stderr


def test_parts_are_shown_in_words() -> None:
    from advisor.report import part_name

    part = Part(knob=Config(precision="bf16"), ratio=1.9, low=1.8, high=2.0)
    assert part_name(part) == "bf16"
