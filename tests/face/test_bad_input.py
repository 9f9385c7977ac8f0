"""Wrong input: one line that names the value and the remedy, an exit code, nothing written."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import advisor as package
from advisor.errors import UsageError
from advisor.tuners.measure.worker import parent
from tests.face.commands import MODEL, SHAPE, advisor
from tests.face.unmeasured import InProcess

FILES = {
    # Importing it leaves a mark: what is refused early must not have started a worker.
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
TUNE = ("tune", "model.py", "--shape", SHAPE)
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


def refused(folder: Path, store: Path, *arguments: str, **env: str) -> tuple[int, list[str]]:
    """The exit code and the lines on stderr of a command that does nothing else."""
    done = advisor(folder, *arguments, **env)
    assert done.stdout == ""
    kept = [path.name for path in store.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert not kept, "a refused command wrote to the store"
    left = {path.name for path in folder.iterdir()} - {"__pycache__", "imported"}
    assert left == set(FILES), "a refused command wrote here"
    return done.returncode, done.stderr.splitlines()


def refused_early(folder: Path, store: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """The same, before a worker is started."""
    mark = folder / "imported"
    mark.unlink(missing_ok=True)
    code, lines = refused(folder, store, *arguments, **env)
    assert not mark.exists(), "a worker was started"
    assert len(lines) == 1, lines
    return code, lines[0]


@pytest.mark.parametrize(
    "shape",
    ["64", "64x", "axb", "0x3x8x8", "64x-3x8x8", "4x3.5", "", "99999999999999999999x3x8x8"],
)
def test_shape(folder: Path, own_surroundings: Path, shape: str) -> None:
    code, line = refused_early(folder, own_surroundings, "tune", "model.py", "--shape", shape)
    assert code == 2 and repr(shape) in line and "e.g. 64x3x256x256" in line


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--budget soon", 2, "budget 'soon': expected a time above zero, as 90s"),
        ("--budget 1ms", 2, "budget '1ms': expected a time above zero, as 90s"),
        ("--budget 0s", 2, "'0s': expected a time above zero"),
        ("--budget 1s", 2, "budget 1s: expected from 3s"),
        ("--budget 900h", 2, "to 30 days; give at least 30s"),
        ("--precisions bf17", 2, "'bf17': expected some of default, tf32"),
        ("--precisions bf16,", 2, "precisions 'bf16,': expected some of default, tf32"),
        ("--optimizer lion", 2, "'lion' is not one of 'sgd', 'adamw'"),
        ("--mode guess", 2, "'guess' is not one of 'train', 'infer'"),
        ("--effort wide", 2, "'wide' is not one of 'quick', 'normal', 'exhaustive'"),
        ("--steps 0", 2, "steps '0': expected a number from 1"),
        (f"--steps {'9' * 20}", 2, f"steps '{'9' * 20}': expected a number from 1"),
        ("--duration soon", 2, "duration 'soon': expected a time above zero, as 90s"),
        ("--steps 5 --duration 2h", 2, "steps 5 and duration 7200s: a job has one length"),
        ("--dtype f32", 2, "'f32' is not one of 'float32'"),
        ("--device tpu", 2, "'tpu': expected cpu, cuda or cuda:N"),
        ("--max-memory lots", 2, "'lots': expected a positive size such as 40GiB"),
        ("--max-memory -1GiB", 2, "'-1GiB': expected a positive size such as 40GiB"),
        ("--batches 0,a", 2, "batches '0,a': expected up to 64 numbers of at least 1"),
        ("--batches 8,²", 2, "batches '8,²': expected up to 64 numbers of at least 1"),
        (f"--batches {'9' * 20}", 2, "expected up to 64 numbers of at least 1"),
        ("--batches 8 --fixed-batch", 2, "exclude each other; give one of them"),
        ("--model-arg novalue", 2, "expected NAME=VALUE, each name once"),
        ("--model-arg a=1 --model-arg a=2", 2, "expected NAME=VALUE, each name once"),
        ("--model-arg a=nan", 2, "a=nan: expected a finite number"),
        (f"--model-arg width={2**70}", 2, "at most 64 bits"),
        ("--trials 0", 2, "trials '0': expected a number from 1"),
        ("--vocab 0", 2, "vocab '0': expected a number from 1"),
        ("--seed -1", 2, "seed '-1': expected a number from 0"),
        ("--any-order", 2, "any order: of which data?"),
        ("--data-arg length=5", 2, "data args: of which data?"),
        ("--cache floppy:a", 2, "'floppy:a': unknown scheme 'floppy'"),
        ("--cache disk:", 2, "'disk:': names no place, expected e.g. dir:/data/advisor"),
        ("--cache model.py/sub", 1, "model.py/sub: Not a directory; point --cache or"),
        ("--frobnicate", 2, "No such option '--frobnicate'"),
        ("extra", 2, "unexpected extra argument (extra)"),
    ],
)
def test_options(folder: Path, own_surroundings: Path, options: str, code: int, said: str) -> None:
    found, line = refused_early(folder, own_surroundings, *TUNE, *options.split())
    assert said in line and found == code
    assert "--frobnicate" not in line or "before your command" not in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_is_not_there(folder: Path, own_surroundings: Path) -> None:
    code, line = refused_early(folder, own_surroundings, *TUNE, "--device", "cuda:0")
    assert code == 2 and "'cuda:0': this " in line and "use cpu" in line
    assert not own_surroundings.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frob"], "No such command 'frob'. (see: advisor --help)"),
        (["why", "model.py", "--batch", "9" * 6000], "expected a number of at least 1, or 'free'"),
        (["show", "abcdef"], "'abcdef': no such record; run: advisor show"),
        (["show", "nokey"], "'nokey': expected one as ae1bff61eea5@64; run: advisor show"),
        (["show", "a", "b"], "unexpected extra argument (b)"),
        (["forget", "abcdef"], "'abcdef': no such record; run: advisor show"),
        (["forget", "abcdef@0"], "'abcdef@0': no such record; run: advisor show"),
        (["forget"], "name one KEY, or --all; to see the keys, run: advisor show"),
        (["forget", "key", "--all"], "name one KEY, or --all"),
        (["tune"], "give either a TARGET and --shape, or your command after --"),
        (["tune", "model.py"], "shape: give your batch and the sample, e.g. 64x3x256x256"),
        (
            ["tune", "--budget", "10s", "python", "train.py"],
            "before your command, as in: advisor tune -- python train.py",
        ),
        (["tune", "python", "train.py", "--epochs", "1"], "as in: advisor tune -- python train.py"),
        (["tune", "--data", "data.py", "--", "python", "x.py"], "--data: a run shows it itself"),
        (["verify", "key", "train.py"], "as in: advisor verify KEY -- python train.py"),
        (
            ["run", "python", "-c", "pass"],
            "'-c'; put -- before your command, as in: advisor run -- python train.py",
        ),
        (["completion", "csh"], "'csh' is not one of"),
        (["show", "--cache", "redis:localhost:1"], "'redis:localhost:1': expected redis://"),
    ],
)
def test_commands(folder: Path, own_surroundings: Path, arguments: list[str], said: str) -> None:
    code, line = refused_early(folder, own_surroundings, *arguments)
    assert code == 2 and said in line


def test_the_variable_is_checked_as_the_option_is(folder: Path, own_surroundings: Path) -> None:
    code, line = refused_early(folder, own_surroundings, "show", ADVISOR_CACHE="gopher://x")
    assert code == 2
    assert "'gopher://x'" in line and "'gopher'" in line and "ADVISOR_CACHE" in line


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="in /proc even root makes no folder")
def test_a_cache_where_nothing_can_be_made(folder: Path, own_surroundings: Path) -> None:
    code, (line,) = refused(folder, own_surroundings, *TUNE, "--cache", "/proc/advisor")
    assert code == 1 and line.startswith("advisor: cache /proc/advisor: ")
    assert "point --cache or ADVISOR_CACHE to another folder" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_without_permission(folder: Path, own_surroundings: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    code, line = refused_early(folder, own_surroundings, *TUNE, "--cache", str(tmp_path / "sub"))
    assert code == 1
    assert f"{tmp_path} cannot be written; point --cache or ADVISOR_CACHE" in line


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
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
def test_targets(
    folder: Path, own_surroundings: Path, arguments: str, code: int, said: str
) -> None:
    words = ("tune", *arguments.split(), "--shape", SHAPE)
    found, lines = refused(folder, own_surroundings, *words)
    assert len(lines) == 1, lines
    assert said in lines[0] and found == code


@pytest.mark.parametrize(
    ("target", "files", "said"),
    [
        ("boom.py", ["boom.py", "boom.py"], "importing it raised ZeroDivisionError: division by"),
        ("chain.py", ["chain.py", "broken.py"], "importing it raised TypeError: empty()"),
        ("picky.py", ["picky.py"], "make_batch(4, 'cpu') raised LookupError: no data here"),
    ],
)
def test_the_users_own_error_is_cut_to_the_users_frames(
    folder: Path, own_surroundings: Path, target: str, files: list[str], said: str
) -> None:
    code, lines = refused(folder, own_surroundings, "tune", target, "--shape", "4x3")
    assert code == 1
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith(f"advisor: target '{target}") and said in lines[-1]
    frames = [line.split('"')[1] for line in lines if line.startswith("  File ")]
    assert frames == [str(folder / name) for name in files]


def test_a_rejected_sample_names_the_layer(
    folder: Path, own_surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a real worker, whose errors come over its pipe."""
    monkeypatch.setattr(parent, "Worker", WORKER)
    (folder / "imported").unlink(missing_ok=True)
    arguments = ("tune", "model.py", "--shape", "4x1x8x8")
    code, lines = refused(folder, own_surroundings, *arguments)
    assert code == 2
    assert "rejects --shape 4x1x8x8 float32 at layer 'conv', Conv2d(3, 8" in lines[-1]
    assert "got 4x1x8x8" in lines[-1] and "3 channels" in lines[-1]
    assert (folder / "imported").exists()  # the mark that refused_early looks for


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_and_a_closed_pipe_are_no_tracebacks(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m advisor"

    def shell(line: str) -> subprocess.CompletedProcess[str]:
        words = ["bash", "-c", f"{command} {line}"]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)

    full = shell("show > /dev/full")
    assert full.returncode == 1 and full.stderr == "advisor: output: No space left on device\n"
    assert shell("tune --help | head -n 1 > /dev/null").stderr == ""


@pytest.mark.parametrize("given", [{"budget": "15s"}, {"permit": "bf16"}])
def test_an_argument_of_another_type(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(UsageError, match=rf"{name} '\w+': expected advisor\.{name.title()}\("):
        package.tune(["python", "x.py"], **given)
