"""Tests options of a command that set knobs: `--map batch=--batch-size`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.bootstrap import INJECTED
from advisor.cache.config import Config
from advisor.cache.name import command_digest
from advisor.errors import UsageError
from advisor.resolve.commands import CommandOverrides
from advisor.tuners.measure.run.mapped_options import MappedOptions
from advisor.tuners.measure.run.run import Run
from advisor.tuners.measure.run.session import RunEnded
from advisor.tuners.measure.runner import ConfigFailed
from tests.builders import SCRIPT, MadeUpSession
from tests.face.commands import advisor
from tests.runs.forked import space_of

OWN = Config(batch_size=64, num_workers=2)
BATCH = {"batch": "--batch-size"}


@pytest.mark.parametrize(
    ("words", "processes", "expected"),
    [
        ("train.py --batch-size 64 data", 1, "train.py --batch-size 128 data"),
        ("train.py --batch-size=64", 1, "train.py --batch-size=128"),
        ("torchrun train.py --batch-size 32", 2, "torchrun train.py --batch-size 64"),
        ("train.py --batch-size 16", 1, "train.py --batch-size 32"),  # of four micro-batches
        ("train.py", 2, "train.py --batch-size 64"),
        ("train.py --batch-sizes 9", 1, "train.py --batch-sizes 9 --batch-size 128"),
        ("train.py --batch-size 1 --batch-size 64", 1, "train.py" + 2 * " --batch-size 128"),
    ],
)
def test_batch_option_scales_with_the_batch(words: str, processes: int, expected: str) -> None:
    mapped = MappedOptions(words.split(), BATCH)
    assert mapped.at(OWN.at(128), OWN, processes) == tuple(expected.split())
    assert mapped.at(OWN.replace(num_workers=8), OWN, processes) == tuple(words.split())


def test_mapped_workers_are_set_by_the_command_and_not_by_the_pilot() -> None:
    mapped = MappedOptions(("train.py",), {"num_workers": "-w"})
    config = OWN.replace(num_workers=8, precision="bf16")
    assert mapped.at(config, OWN, 4) == ("train.py", "-w", "8")
    assert mapped.within(config, OWN) == OWN.replace(precision="bf16")


def test_command_digest_ignores_numbers() -> None:
    digest = command_digest(["train.py", "--batch-size", "64", "--arch", "r50"])
    assert digest == command_digest(["train.py", "--epochs", "90", "--arch", "r50", "--lr=1e-3"])
    assert digest != command_digest(["train.py", "--batch-size", "64", "--arch", "r18"])
    assert command_digest([]) == ""


def test_mapped_option_in_the_command_must_be_a_number() -> None:
    with pytest.raises(UsageError, match="map: --batch-size 'auto' in the command: expected a"):
        MappedOptions(("train.py", "--batch-size", "auto"), BATCH)


TRAIN = ("python", "train.py", "--batch-size", "4")
MAP = ("--map", "batch=--batch-size")
QUICK = ("--effort", "quick", "--no-verify", "--precisions", "default", "--quiet")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    return tmp_path


@pytest.fixture
def faked_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces processes by a script that obeys --batch-size and ignores --workers."""

    def start(_run: Run, words: tuple[str, ...], _start_s: float) -> MadeUpSession:
        given = dict(zip(words[2::2], words[3::2], strict=True))
        if "--bs" in given:
            why = "it ended with exit code 2: train.py: error: unrecognized arguments"
            raise RunEnded("failed", f"no steps; {why}", 2, why)
        shape = (int(given.get("--batch-size", 4)), 8)
        return MadeUpSession(replace(SCRIPT, shape=shape, room=2))

    monkeypatch.setattr(Run, "_start", start)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Returns the commands that `advisor run` starts."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _path, words, _env: commands.append(words))
    return commands


@pytest.mark.usefixtures("faked_script")
def test_batch_is_tuned_by_the_scripts_own_option(folder: Path, started: list[list[str]]) -> None:
    nothing = advisor(folder, "run", *MAP, "--", "python", "-c", "print()")
    untuned = "this command was not tuned with --map batch=--batch-size; run: advisor tune --map"
    assert untuned in nothing.stderr
    plan = ("tune", *QUICK, "--budget", "20s", "--trials", "3", "--json")
    done = advisor(folder, *plan, *MAP, "--", *TRAIN)
    record = json.loads(done.stdout)["record"]
    pilot = [one for one in record["winners"] if one["use"] == "pilot"]
    won = {one["free"]: one["choice"]["batch"] for one in pilot}
    assert won[False] == 4 and won[True] > 4
    assert record["key"]["task"]["map"] == BATCH
    shown = advisor(folder, "show", record["id"]).stdout
    assert "advisor run --map batch=--batch-size -- python train.py --batch-size 4" in shown
    mapped_run = advisor(folder, "run", *MAP, "--", "python", "train.py", "--epochs", "2")
    option = f"--batch-size {won[True]}"
    assert mapped_run.stderr == f"advisor: set {option}, as record {record['id']} advises\n"
    advisor(folder, "run", "--", *TRAIN, "--epochs", "1")
    assert started == [
        ["python", "-c", "print()"],
        ["python", "train.py", "--epochs", "2", *option.split()],
        [*TRAIN, "--epochs", "1"],
    ]
    again = advisor(folder, *plan, "--", *TRAIN)
    assert json.loads(again.stdout)["status"] == "known"


def test_a_run_starts_unmodified_if_the_store_is_unreachable(
    folder: Path, started: list[list[str]]
) -> None:
    done = advisor(folder, "run", "--cache", "http://127.0.0.1:1", *MAP, "--", *TRAIN)
    assert started == [[*TRAIN]]
    assert done.stderr.startswith("advisor: cache http://127.0.0.1:1: ")
    assert done.stderr.endswith(". Its options stay as they are\n")


@pytest.mark.parametrize(
    ("batch", "message"), [(16, "has no record"), (4, "has 4 samples a step, not 16")]
)
def test_options_set_for_another_run_are_reported(batch: int, message: str) -> None:
    options = CommandOverrides(record="ae1b@4", said="--batch-size 16", batch=16, own_batch=4)
    line = f"--batch-size 16 was set as record ae1b@4 advises, and this run {message}"
    assert options.mismatch(None, batch) == line


@pytest.mark.usefixtures("faked_script")
def test_an_option_without_effect_fails_the_config() -> None:
    with Run(TRAIN, injected=INJECTED, log=Path(), options={"num_workers": "--workers"}) as run:
        run.baseline = Config(space_of(run.describe()).default | {"num_workers": 0})
        with pytest.raises(ConfigFailed, match="the script has 0 loader workers, not 1"):
            run.block(run.baseline.replace(num_workers=1), 4, deadline_s=60)
        assert run.block(run.baseline, 4, deadline_s=60).steps == 4


@pytest.mark.usefixtures("faked_script")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("batch=--bs", "map: with --bs 8 it ended with exit code 2: train.py: error: unrec"),
        ("batch=--workers", "map: with --workers 8 a step has 4 samples, not 8"),
        ("batch", "map 'batch': expected KNOB=OPTION, e.g. batch=--batch-size"),
        ("width=--width", "map 'width=--width': expected KNOB=OPTION, e.g. batch=--batch-size"),
    ],
)
def test_a_wrong_map_option_is_refused_in_one_line(folder: Path, option: str, message: str) -> None:
    done = advisor(folder, "tune", *QUICK, "--budget", "5s", "--map", option, "--", *TRAIN)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"advisor: {message}")
