"""Trains ordinary scripts, and scripts of Hugging Face, Lightning, Accelerate and timm, under the
pilot. Weights stay bit-identical unmodified, and close in bf16. Tunes some of them, too."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from advisor.cache.config import Config
from tests import forks
from tests.face.commands import TOO_BUSY, advisor, env_of
from tests.runs.forked import Variant, Weights, train_variants

FOLDER = Path(__file__).parent / "scripts"
HALF = {"precision": "bf16", "channels_last": True}
FED = {"num_workers": 1}
"""Workers load identical batches, because no dataset here draws random numbers."""
NEAR = 0.25  # the largest relative difference that a few steps in bf16 may make


@dataclass(frozen=True)
class Framework:
    """A script, the libraries that it imports, and the facts that the pilot must see.

    Attributes:
        own: the config that the script sets itself.
        words: the script's arguments.
    """

    script: str
    libraries: tuple[str, ...]
    seen: Mapping[str, object]
    own: Config = field(default_factory=Config)
    words: tuple[str, ...] = ()


ACCELERATE_TIMM = Framework(
    "accelerate_timm",
    ("timm", "accelerate"),
    {"shape": (16, 3, 32, 32), "others": "2 micro-batches", "optimizer": "adamw"},
)
LIGHTNING = [
    Framework(
        "lightning_trainer",
        ("lightning",),
        {"shape": (8, 3, 8, 8), "others": "", "optimizer": "adamw"},
        words=words,
    )
    for words in ((), ("ddp",), ("ddp", "fabric"))
]
TRANSFORMERS = Framework(
    "transformers_trainer",
    ("transformers.trainer",),
    {
        "shape": (8, 12),
        "others": "labels 1 int64; num_items_in_batch 1 float32; 2 micro-batches",
        "optimizer": "adamw",
    },
    own=Config(fused_optimizer=True),
)


def differing(one: Weights, other: Weights) -> list[str]:
    """Returns the names of weights that differ in any bit or that only one side has."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


def distance(one: Weights, other: Weights) -> float:
    """Returns the norm of the difference, relative to the norm of `other`."""
    floats = [name for name, weight in other.items() if weight.is_floating_point()]
    apart = torch.stack([(one[n] - other[n]).norm() for n in floats]).norm()
    return float(apart / torch.stack([other[n].norm() for n in floats]).norm())


def assert_trained_alike(alone: Weights, kept: Weights, half: Weights) -> None:
    """Bit-identical if the config changes no numbers, and close in half precision."""
    assert alone and all(weight.isfinite().all() for weight in alone.values())
    assert differing(alone, kept) == []
    assert {n: w.dtype for n, w in half.items()} == {n: w.dtype for n, w in alone.items()}
    assert distance(half, alone) <= NEAR


BIG = FOLDER.parents[2] / "benchmarks" / "user_scripts"
GAN = BIG / "dcgan.py", "--images 32 --batch-size 4 --width 8 --epochs 2", "samples/netG.pt"


@pytest.mark.parametrize(
    ("script", "words", "saves"),
    [GAN, *((path, "", "") for path in sorted(FOLDER.glob("*.py")))],
    ids=lambda one: one.stem if isinstance(one, Path) else "",
)
def test_ordinary_script_trains_alike(script: Path, words: str, saves: str, tmp_path: Path) -> None:
    variants = (Variant(values, tuple(words.split()), saves) for values in (None, FED, HALF))
    (alone, _), (fed, _), (half, _) = train_variants(script, tmp_path, *variants)
    assert_trained_alike(alone, fed, half)
    if script.stem not in ("own_autocast", "closure"):
        assert differing(half, alone)


@pytest.mark.parametrize(
    "case",
    [ACCELERATE_TIMM, *LIGHTNING, pytest.param(TRANSFORMERS, marks=pytest.mark.long)],
    ids=lambda one: "-".join((one.script, *one.words)),
)
def test_framework_script_trains_alike_and_keeps_its_bf16(case: Framework, tmp_path: Path) -> None:
    half, words = ("bf16", *case.words), case.words
    variants = [Variant(values, words) for values in (None, {}, HALF)]
    variants += [Variant(None, half), Variant(HALF, half)]
    script = FOLDER.with_name("frameworks") / f"{case.script}.py"
    (alone, _), (kept, seen), (half, _), (own_half, _), (tuned, half_facts) = train_variants(
        script, tmp_path, *variants, libraries=case.libraries
    )
    assert_trained_alike(alone, kept, half)
    assert differing(half, alone)
    assert seen is not None
    assert {name: getattr(seen, name) for name in case.seen} == case.seen
    assert (seen.own, seen.processes, seen.limits) == (case.own, 1, ())
    assert half_facts is not None and "precision" in half_facts.kept
    assert (half_facts.own, half_facts.model) == (case.own.replace(precision="bf16"), seen.model)
    assert any("bf16" in line for line in half_facts.lines())
    assert distance(tuned, own_half) <= NEAR
    if not half_facts.convolves:  # there is no layout to change, so nothing is changed
        assert differing(tuned, own_half) == []


LOAD = """
import sys
sys.modules["advisor"] = None  # as if it were not installed
import torch
model = torch.load(sys.argv[1], weights_only=False)
assert model.training and "_compiled_call_impl" not in vars(model)
torch.save(model.state_dict(), sys.argv[2])
"""


def test_checkpoints_load_with_and_without_the_pilot(tmp_path: Path) -> None:
    resumed = (str(tmp_path / "0.pt"),)
    variants = [Variant(), Variant(HALF), Variant(None, resumed), Variant({}, resumed)]
    *_, (alone, _), (piloted, _) = train_variants(FOLDER / "evaluation.py", tmp_path, *variants)
    assert differing(alone, piloted) == []
    (load := tmp_path / "load.py").write_text(LOAD)
    read = []
    for whole in (tmp_path / "0.whole", tmp_path / "1.whole"):
        weights = whole.with_suffix(".weights")
        assert forks.run(load, str(whole), str(weights)).returncode == 0
        read.append({n: (w.dtype, w.shape) for n, w in torch.load(weights).items()})
    assert read[0] == read[1]


VERDICTS = (
    "Start it like this",
    "Nothing measured clearly gains on this machine; run it as usual.",
    "Could not tell what gains on this machine; run it as usual.",
    "Not tuned yet: ",
)
USER_SCRIPTS = {
    "trainer": ("--samples 80 --batch-size 4 --epochs 999", "checkpoints/last.pt"),
    "dcgan": ("--images 64 --batch-size 4 --width 8 --epochs 999", "samples/netG.pt"),
    "lstm_padded": ("--sentences 200 --batch-size 8 --longest 12 --epochs 999", "lstm.pt"),
    "autocast_workers": (
        "--pictures 80 --batch-size 4 --width 4 --workers 1 --epochs 999",
        "resnet.pt",
    ),
    "accumulate_ema": ("--batch-size 2 --length 16 --backend eager --steps 99999", "ckpt_500.pt"),
    "two_models": ("--samples 80 --batch-size 8 --epochs 999", "large.pt"),
}
"""Arguments for steps of milliseconds, and a checkpoint that the script would overwrite."""


@pytest.mark.parametrize(
    "name",
    [
        *("evaluation", "own_autocast"),
        *(pytest.param(one, marks=pytest.mark.long) for one in USER_SCRIPTS),
    ],
)
def test_tune_prints_one_verdict_and_changes_no_files(name: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    words, checkpoint = USER_SCRIPTS.get(name, ("last.pt", "last.whole"))
    for one in (checkpoint, "last.pt"):
        (work / one).parent.mkdir(parents=True, exist_ok=True)
        (work / one).write_bytes(b"of a run before")
    source = ((BIG if name in USER_SCRIPTS else FOLDER) / f"{name}.py").read_text()
    if name not in USER_SCRIPTS:
        source = source.replace("break", "continue")
        source = re.sub(r"in range\(\d\):", "in range(10**9):", source)
    (work / "train.py").write_text(source)
    before = contents(work)
    command = ("python", "train.py", *words.split())

    options = ("--effort", "quick", "--budget", "3s")
    done = advisor(work, "tune", *options, "--", *command, **env_of(tmp_path))
    assert contents(work) == before
    assert "hangs" not in done.stdout + done.stderr
    if done.returncode:  # the host was too busy to measure even the unmodified script
        assert re.search(TOO_BUSY, done.stderr), done.stderr
        return

    lines = done.stdout.splitlines()
    (verdict,) = (line for line in lines if line.startswith(VERDICTS))
    advises = verdict == VERDICTS[0]
    started = f"    advisor run -- {shlex.join(command)}"
    assert (lines[-1] == started) == advises == any("at your batch  " in one for one in lines)
    remedies = re.findall(r"--force|--budget \w+", done.stdout)
    assert len(set(remedies)) == len(remedies) <= 2, done.stdout
    if not verdict.startswith(VERDICTS[3]):
        why = advisor(work, "why", "--", *command, **env_of(tmp_path)).stdout
        assert (": unmodified" in why) != advises, why


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of each file in a folder by relative path."""
    files = (one for one in folder.rglob("*") if "__pycache__" not in one.parts)
    return {str(one.relative_to(folder)): one.read_bytes() for one in files if one.is_file()}
