"""Wrong input gives one line with the value and the remedy, and nothing is written."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import advisor as package
from advisor.errors import UsageError
from advisor.tuners.measure.worker import parent
from tests.face.commands import MODEL, SHAPE, advisor
from tests.face.unmeasured import InProcess

FILES = {
    # Importing it creates a file, which shows that a worker was started.
    "model.py": "from pathlib import Path\nPath('imported').touch()\n" + MODEL,
    "two.py": "from torch import nn\nclass A(nn.Identity): pass\nclass B(nn.Identity): pass\n",
    "boom.py": "def helper():\n    return 1 / 0\nhelper()\n",
    "chain.py": "import broken\n",
    "broken.py": "from torch import nn\nlayer = nn.Linear('3', 4)\n",
    "leaving.py": "import sys\nsys.exit(3)\n",
    "picky.py": (
        "from torch import nn\n"
        "def make_batch(batch_size, device):\n    raise LookupError('no data here')\n"
        "model = lambda: nn.Linear(3, 4)\n"
    ),
    "data.py": "def make_dataset(length): return [0] * length\n",
    "slow.py": MODEL.replace(
        "        return", "        import time; time.sleep(0.3)\n        return"
    ),
}
TUNE = f"tune model.py --shape {SHAPE}"
SMALL = ("--shape", "4x3")
WORKER = parent.Worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (made / name).write_text(text)
    return made


@pytest.fixture(autouse=True)
def no_worker_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "Worker", InProcess)
    monkeypatch.setattr(sys, "path", [*sys.path])


def run_refused(
    folder: Path, store: Path, *arguments: str, early: bool = True, **env: str
) -> tuple[int, list[str]]:
    """Exit code and stderr lines of a command that is refused. It must write nothing else.

    `early`: it must be refused with one line, before a worker starts.
    """
    mark = folder / "imported"
    mark.unlink(missing_ok=True)
    done = advisor(folder, *arguments, **env)
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    stored = [path.name for path in store.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert not stored, "a refused command wrote to the store"
    files = {path.name for path in folder.iterdir()} - {"__pycache__", "imported"}
    assert files == set(FILES), "a refused command wrote here"
    assert not early or (len(lines) == 1 and not mark.exists()), lines
    return done.returncode, lines


# tests/cache/test_kinds.py and test_settings.py test more wrong values.
SHAPES = ("64", "64x-3x8x8", "99999999999999999999x3x8x8")
OPTIONS = [
    ("--budget soon", 2, "budget 'soon': expected a time above zero, as 90s"),
    ("--budget 1s", 2, "budget 1s: expected from 3s"),
    ("--budget 900h", 2, "to 30 days; 30s or more is sensible"),
    ("--optimizer lion", 2, "'lion' is not one of 'sgd', 'adamw'"),
    ("--steps 0", 2, "steps '0': expected a number from 1"),
    ("--steps 5 --duration 2h", 2, "steps 5 and duration 7200s: a job has one length"),
    ("--device tpu", 2, "'tpu': expected cpu, cuda or cuda:N"),
    ("--batches 8 --fixed-batch", 2, "exclude each other; give one of them"),
    ("--batches 8 --shape 6x3x6x6", 2, "leave batches out"),
    ("--model-arg novalue", 2, "expected NAME=VALUE, each name once"),
    ("--seed -1", 2, "seed '-1': expected a number from 0"),
    ("--any-order", 2, "any order: needs data too, e.g. data.py:make_dataset"),
    ("--data-arg length=5", 2, "data args: needs data too"),
    ("--cache floppy:a", 2, "'floppy:a': unknown scheme 'floppy'"),
    ("--for notaurl", 2, "--for 'notaurl': expected a store's URL, as https://"),
    ("--cache gopher://x", 2, "neither advisor nor fsspec knows 'gopher'"),
    ("--cache disk:", 2, "'disk:': names no place, expected e.g. dir:/data/advisor"),
    ("--cache model.py/sub", 1, "model.py/sub: Not a directory; point --cache or"),
    ("--events missing/e.json", 2, "'missing/e.json': cannot be written: No such file"),
    ("--frobnicate", 2, "No such option '--frobnicate'"),
    ("extra", 2, "unexpected extra argument (extra)"),
    *([] if torch.cuda.is_available() else [("--device cuda:0", 2, "'cuda:0': this ")]),
]
COMMANDS = [
    ("frob", "No such command 'frob'. (see: advisor --help)"),
    (f"why model.py --batch {'9' * 6000}", "expected a number of at least 1, or 'free'"),
    ("show abcdef", "'abcdef': no such record; run: advisor show"),
    ("a" * 5000, f"No such command '{'a' * 79}..."),
    ("jobs x", "'x' is not a valid number"),
    ("show nokey", "'nokey': expected e.g. ae1bff61eea5@64; run: advisor show"),
    ("show a b", "unexpected extra argument (b)"),
    ("forget abcdef", "'abcdef': no such record; run: advisor show"),
    ("forget abcdef@0", "'abcdef@0': no such record; run: advisor show"),
    ("forget", "name one KEY, or --all; to see the keys, run: advisor show"),
    ("forget key --all", "name one KEY, or --all"),
    ("tune", "give either a TARGET and --shape, or your command after --"),
    ("tune model.py", "shape: give your batch and the sample, e.g. 64x3x256x256"),
    ("tune --budget 10s python train.py", "your command, as in: advisor tune -- python train.py"),
    ("tune python train.py --epochs 1", "as in: advisor tune -- python train.py"),
    ("tune --data data.py -- python x.py", "--data: read from the run"),
    ("fit", "give your command after --, as in: advisor fit -- python train.py"),
    ("fit python train.py", "put -- before your command, as in: advisor fit -- python train.py"),
    ("fit --memory 0 -- python x.py", "memory '0': expected a positive size such as 40GiB"),
    ("fit --memory lots -- python x.py", "memory 'lots': expected a positive size"),
    ("fit --max-slowdown 0.5 -- python x.py", "0.5 is not in the range 1.0<=x<=1000000.0"),
    ("check", "give your command after --, as in: advisor check -- python train.py"),
    ("check --budget 1s -- python x.py", "budget 1s: expected from 3s"),
    ("check -- no-such-program", "'no-such-program': no such program"),
    ("check python x.py", "put -- before your command, as in: advisor check -- python"),
    ("explain", "give a record's KEY, your comm"),
    ("explain --map batch=--b -- x", "--map needs the KEY"),
    ("export missing/a.pack", "'missing/a.pack': cannot be written: No such file"),
    ("report key --html missing/a.html", "'missing/a.html': cannot be written"),
    ("verify key train.py", "as in: advisor verify KEY -- python train.py"),
    ("run python -c pass", "'-c'; put -- before your command, as in: advisor run -- python"),
    ("completion csh", "'csh' is not one of"),
    ("show --cache redis:localhost:1", "'redis:localhost:1': expected redis://"),
    ("run", "give your command after --, as in: advisor run -- python train.py"),
    ("run --tune soon -- python x.py", "tune 'soon': expected a time above zero, as 90s"),
    *((f"tune model.py --shape {one}", f"shape {one!r}: expected") for one in SHAPES),
]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [(f"{TUNE} {options}", code, message) for options, code, message in OPTIONS]
    + [(words, 2, message) for words, message in COMMANDS],
)
def test_wrong_options_give_one_line_before_a_worker_starts(
    folder: Path, own_surroundings: Path, words: str, code: int, message: str
) -> None:
    status, (line,) = run_refused(folder, own_surroundings, *words.split())
    assert message in line and status == code
    assert "--frobnicate" not in line or "before your command" not in line
    assert not message.startswith("shape '") or "e.g. 64x3x256x256" in line


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="in /proc even root makes no folder")
def test_a_cache_that_cannot_be_created_is_named(folder: Path, own_surroundings: Path) -> None:
    words = (*TUNE.split(), "--cache", "/proc/advisor")
    code, (line,) = run_refused(folder, own_surroundings, *words, early=False)
    assert code == 1 and line.startswith("advisor: cache /proc/advisor: ")
    assert "point --cache or ADVISOR_CACHE to another folder" in line


def test_a_cache_without_write_permission_is_named(
    folder: Path, own_surroundings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests may run as root, for whom a file mode has no effect.
    monkeypatch.setattr(os, "access", lambda path, *_: Path(path) != tmp_path)
    code, (line,) = run_refused(folder, own_surroundings, *TUNE.split(), "--cache", str(tmp_path))
    assert code == 1
    assert f"{tmp_path} cannot be written; point --cache or ADVISOR_CACHE" in line


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("nofile.py", 2, "'nofile.py': there is no file"),
        ("nofile", 2, "'nofile': expected model.py, model.py:Net, package.module:factory"),
        ("two.py", 2, "'two.py': several candidates; choose one of two.py:A, two.py:B"),
        ("leaving.py", 1, "importing it called exit(); put the script part under if __name"),
        ("model.py:Net --model-arg wodth=3", 1, "unexpected keyword argument 'wodth'"),
        ("slow.py --budget 3s", 2, "budget 3s is too small for one trial"),
        ("model.py --data none.py", 2, "data 'none.py': there is no file"),
        ("model.py --data data.py --data-arg size=2", 1, "raised TypeError"),
    ],
)
def test_a_wrong_target_gives_one_line(
    folder: Path, own_surroundings: Path, arguments: str, code: int, message: str
) -> None:
    words = ("tune", *arguments.split(), "--shape", SHAPE)
    status, lines = run_refused(folder, own_surroundings, *words, early=False)
    lines = [line for line in lines if "creating the dataset and a batch" not in line]
    assert len(lines) == 1, lines
    assert message in lines[0] and status == code


@pytest.mark.parametrize(
    ("target", "files", "message"),
    [
        ("boom.py", ["boom.py", "boom.py"], "importing it raised ZeroDivisionError: division by"),
        ("chain.py", ["chain.py", "broken.py"], "importing it raised TypeError: empty()"),
        ("picky.py", ["picky.py"], "make_batch(4, 'cpu') raised LookupError: no data here"),
    ],
)
def test_an_error_in_user_code_shows_only_frames_of_user_code(
    folder: Path, own_surroundings: Path, target: str, files: list[str], message: str
) -> None:
    code, lines = run_refused(folder, own_surroundings, "tune", target, *SMALL, early=False)
    assert code == 1
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith(f"advisor: target '{target}") and message in lines[-1]
    frames = [line.split('"')[1] for line in lines if line.startswith("  File ")]
    assert frames == [str(folder / name) for name in files]


def test_a_rejected_sample_names_the_layer(
    folder: Path, own_surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a real worker, whose errors come through its pipe."""
    monkeypatch.setattr(parent, "Worker", WORKER)
    arguments = ("tune", "model.py", "--shape", "4x1x8x8")
    code, lines = run_refused(folder, own_surroundings, *arguments, early=False)
    assert code == 2
    assert "rejects --shape 4x1x8x8 float32 at layer 'conv', Conv2d(3, 8" in lines[-1]
    assert "got 4x1x8x8" in lines[-1] and "3 channels" in lines[-1]
    assert (folder / "imported").exists()  # model.py was imported


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_and_a_closed_pipe_give_no_traceback(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m advisor"

    def shell(line: str) -> subprocess.CompletedProcess[str]:
        words = ["bash", "-c", f"{command} {line}"]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)

    full = shell("show > /dev/full")
    assert full.returncode == 1 and full.stderr == "advisor: output: No space left on device\n"
    assert shell("tune --help | head -n 1 > /dev/null").stderr == ""


def test_an_os_error_gives_one_line(
    folder: Path, own_surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "some/file")

    monkeypatch.setattr("advisor.cli.reading.open_records", fail)
    done = run_refused(folder, own_surroundings, "show")
    assert done == (1, ["advisor: some/file: No such file or directory"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: package.tune(["python", "x.py"], budget="15s"), r"'15s': .* advisor.Budget"),
        (lambda: package.tune(["python", "x.py"], permit="bf16"), r"'bf16': .* advisor.Permit"),
        (lambda: package.tune(["python", "x.py"], on_event=5), "on_event 5: expected a function"),
        (lambda: package.verify(5, "x"), "key 5: expected a record's, as 'ae1bff61eea5@64'"),
        (lambda: package.explain(b"ae1b"), "key b'ae1b': expected a record's"),
        (lambda: package.explain("ae1b", map=5), "map 5: expected KNOB=OPTION"),
        (lambda: package.Store().export("a.pack", only="x"), "only 'x': expected a function of a"),
        (lambda: package.Store().export(5), "path 5: expected the path of a file"),
        (lambda: package.Store().import_(5), "path 5: expected the path of a file"),
        (lambda: package.Store().sync("dir:x", only=5), "only 5: expected a function of a record"),
        (lambda: package.Store().sync(5), "cache 5: expected a folder, a store's URL, or several"),
        (lambda: package.Store(5), "cache 5: expected a folder, a store's URL, or several"),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()
