"""Wrong input: one line that names the value and the remedy, an exit code, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.face.commands import MODEL, SHAPE, advisor

FILES = {
    "model.py": MODEL,
    "empty.py": "x = 1\n",
    "two.py": ("from torch import nn\nclass A(nn.Identity): pass\nclass B(nn.Identity): pass\n"),
    "boom.py": "def helper():\n    return 1 / 0\nhelper()\n",
    "frozen.py": "from torch import nn\nmodel = lambda: nn.Flatten()\n",
    "picky.py": (
        "from torch import nn\n"
        "def make_batch(batch_size, device):\n    raise LookupError('no data here')\n"
        "model = lambda: nn.Linear(3, 4)\n"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (made / name).write_text(text)
    return made


def refused(folder: Path, store: Path, *arguments: str) -> tuple[int, list[str]]:
    done = advisor(folder, *arguments)
    assert done.stdout == ""
    assert not store.exists(), "a refused command wrote to the store"
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize("shape", ["64", "64x", "axb", "0x3x8x8", "64x-3x8x8", ""])
def test_shape(folder: Path, own_surroundings: Path, shape: str) -> None:
    code, lines = refused(folder, own_surroundings, "tune", "model.py", "--shape", shape)
    assert code == 2
    assert len(lines) == 1
    assert repr(shape) in lines[0] and "e.g. 64x3x256x256" in lines[0]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--budget soon", 2, "'soon': expected a time such as 90s"),
        ("--budget 1ms", 2, "'1ms': expected a time such as 90s"),
        ("--budget 0s", 2, "'0s': expected a time above zero"),
        ("--precisions bf17", 2, "'bf17': expected one of default, tf32"),
        ("--optimizer lion", 2, "'lion' is not one of 'sgd', 'adamw'"),
        ("--mode guess", 2, "'guess' is not one of 'train', 'infer'"),
        ("--dtype f32", 2, "'f32': expected one of float32"),
        ("--device tpu", 2, "'tpu': expected cpu, cuda or cuda:N"),
        ("--device cuda:99", 2, "'cuda:99': this process sees"),
        ("--max-memory lots", 2, "'lots': expected a positive size such as 40GiB"),
        ("--batches 0,a", 2, "'0,a': expected numbers of at least 1"),
        ("--batches 8 --fixed-batch", 2, "exclude each other"),
        ("--model-arg novalue", 2, "'novalue': expected NAME=VALUE"),
        ("--trials 0", 2, "0 is not in the range x>=1"),
        ("--vocab 0", 2, "vocab 0: expected at least 1"),
        ("--cache s3://bucket", 2, "'s3://bucket': unknown scheme 's3'"),
        ("--cache model.py", 1, "model.py: Not a directory; point --cache or ADVISOR_CACHE"),
        ("--frobnicate", 2, "No such option '--frobnicate'"),
    ],
)
def test_options(folder: Path, own_surroundings: Path, options: str, code: int, said: str) -> None:
    arguments = ("tune", "model.py", "--shape", SHAPE, *options.split())
    found, lines = refused(folder, own_surroundings, *arguments)
    assert len(lines) == 1, lines
    assert said in lines[0]
    assert found == code


@pytest.mark.parametrize(
    ("target", "shape", "code", "said"),
    [
        ("nofile.py", SHAPE, 2, "'nofile.py': there is no file"),
        ("empty.py", SHAPE, 2, "'empty.py': it defines no nn.Module class that builds without"),
        ("two.py", SHAPE, 2, "'two.py': several candidates; choose one of two.py:A, two.py:B"),
        ("two.py:C", SHAPE, 2, "'two.py:C'"),
        ("no.such:thing", SHAPE, 2, "'no.such:thing': there is no module 'no'"),
        ("torchvision:resnet9999", SHAPE, 2, "did you mean resnet"),
        ("frozen.py", "4x3", 1, "it has no trainable parameter; use --mode infer"),
    ],
)
def test_targets(
    folder: Path, own_surroundings: Path, target: str, shape: str, code: int, said: str
) -> None:
    found, lines = refused(folder, own_surroundings, "tune", target, "--shape", shape)
    assert len(lines) == 1, lines
    assert said in lines[0]
    assert found == code


def test_a_model_argument_that_is_not_taken(folder: Path, own_surroundings: Path) -> None:
    arguments = ("tune", "model.py:Net", "--shape", SHAPE, "--model-arg", "wodth=3")
    code, lines = refused(folder, own_surroundings, *arguments)
    assert code in (1, 2)
    assert "wodth" in lines[-1]


def test_a_budget_that_is_too_small(folder: Path, own_surroundings: Path) -> None:
    arguments = ("tune", "model.py", "--shape", SHAPE, "--budget", "1s")
    code, lines = refused(folder, own_surroundings, *arguments)
    assert code == 2
    assert len(lines) == 1
    assert "budget 1s is too small" in lines[0] and "give at least" in lines[0]


@pytest.mark.parametrize(
    ("target", "code", "traced", "said"),
    [
        ("boom.py", 1, "return 1 / 0", "importing it raised ZeroDivisionError"),
        ("picky.py", 1, "no data here", "make_batch(4, 'cpu') raised LookupError"),
    ],
)
def test_the_users_own_error_is_cut_to_the_users_frames(
    folder: Path, own_surroundings: Path, target: str, code: int, traced: str, said: str
) -> None:
    found, lines = refused(folder, own_surroundings, "tune", target, "--shape", "4x3")
    assert found == code
    assert said in lines[-1]
    traceback = "\n".join(lines[:-1])
    assert traced in traceback
    assert str(folder / target) in traceback
    assert "importlib" not in traceback and "tuners" not in traceback


def test_a_rejected_sample_names_the_layer(folder: Path, own_surroundings: Path) -> None:
    arguments = ("tune", "model.py", "--shape", "4x1x8x8")
    code, lines = refused(folder, own_surroundings, *arguments)
    assert code == 2
    assert "at layer 'conv', Conv2d(3, 8" in lines[-1]
    assert "got 4x1x8x8" in lines[-1] and "3 channels" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frob"], "No such command 'frob'"),
        (["show", "nokey"], "'nokey': no such record"),
        (["forget", "nokey"], "'nokey': no such record"),
        (["forget"], "name one KEY, or --all"),
        (["tune", "model.py"], "Missing option '--shape'"),
        (["completion", "csh"], "'csh' is not one of"),
        (["show", "--cache", "redis://localhost:1"], "unknown scheme 'redis'"),
    ],
)
def test_commands(folder: Path, own_surroundings: Path, arguments: list[str], said: str) -> None:
    code, lines = refused(folder, own_surroundings, *arguments)
    assert code == 2
    assert len(lines) == 1
    assert said in lines[0]
