"""Ordinary training scripts under the pilot, and those of Hugging Face, Lightning, Accelerate and
timm: unmodified they train the same to the bit, in bf16 nearly the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from advisor.cache.config import Config
from tests import forks
from tests.runs.forked import Variant, Weights, trained, variously

FOLDER = Path(__file__).parent / "scripts"
FRAMEWORKS = Path(__file__).parent / "frameworks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
HALF = {"precision": "bf16", "channels_last": True}
FED = {"num_workers": 1}
"""Data of which nothing is drawn where it is fetched is the same from workers."""
NEAR = 0.25
"""Part of the weights by which a few steps in bf16 may move them elsewhere."""


@pytest.fixture(scope="module", params=SCRIPTS, ids=lambda path: path.stem)
def script(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def alone(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return trained(script, tmp_path_factory.mktemp(script.stem))


def differing(one: Weights, other: Weights) -> list[str]:
    """The names of the weights that are not the same to the bit, or that only one of them has."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


def distance(one: Weights, other: Weights) -> tuple[float, float]:
    """(How far weights are apart, how large those of the other are)."""
    floats = [name for name, weight in other.items() if weight.is_floating_point()]
    apart = torch.stack([(one[n] - other[n]).norm() for n in floats]).norm()
    return float(apart), float(torch.stack([other[n].norm() for n in floats]).norm())


def test_as_it_is_to_the_bit(script: Path, alone: Weights, tmp_path: Path) -> None:
    assert alone
    assert all(weight.isfinite().all() for weight in alone.values())
    assert differing(alone, trained(script, tmp_path, FED)) == []


def test_in_half_precision_it_trains_alike(script: Path, alone: Weights, tmp_path: Path) -> None:
    half = trained(script, tmp_path, HALF)
    assert half.keys() == alone.keys()
    assert [w.dtype for w in half.values()] == [w.dtype for w in alone.values()]
    apart, whole = distance(half, alone)
    assert apart <= NEAR * whole
    if script.stem not in ("own_autocast", "closure"):
        assert apart > 0


FUSED = Config(fused_optimizer=True)


@dataclass(frozen=True)
class Case:
    """A script, the library that it imports, and what is to be seen of it.

    Attributes:
        own: what it does itself; `half`: whether it can do bf16 itself.
    """

    name: str
    library: str
    shape: tuple[int, ...]
    others: str = ""
    optimizer: str = "adamw"
    own: Config = Config()  # noqa: RUF009 # immutable
    half: bool = True


QUICK = Case("accelerate_loop", "accelerate", shape=(16, 3, 8, 8), others="2 micro-batches")
LONG = [
    Case(
        "transformers_trainer",
        "transformers.trainer",
        shape=(8, 12),
        others="labels 1 int64; num_items_in_batch 1 float32; 2 micro-batches",
        own=FUSED,
    ),
    Case("lightning_trainer", "lightning", shape=(8, 3, 8, 8)),
    Case(
        "lightning_gan",
        "lightning",
        shape=(8, 10, 1, 1),
        others="adam, adam",
        optimizer="adam",
        half=False,
    ),
    Case("timm_loop", "timm", shape=(8, 3, 32, 32), half=False),
]
CASES = [QUICK, *(pytest.param(one, marks=pytest.mark.long) for one in LONG)]


@pytest.mark.parametrize("case", CASES, ids=lambda one: one.name)
def test_a_script_under_the_pilot(case: Case, tmp_path: Path) -> None:
    pytest.importorskip(case.library.partition(".")[0])
    variants = [Variant(), Variant({}), Variant(HALF)]
    if case.half:
        variants += [Variant(None, ("bf16",)), Variant(HALF, ("bf16",))]
    script = FRAMEWORKS / f"{case.name}.py"
    (alone, _), (kept, seen), (half, _), *own = variously(script, case.library, tmp_path, variants)
    # Unmodified to the bit.
    assert all(weight.isfinite().all() for weight in alone.values())
    assert differing(alone, kept) == []
    # In half precision it trains alike.
    assert {n: w.dtype for n, w in half.items()} == {n: w.dtype for n, w in alone.items()}
    apart, whole = distance(half, alone)
    assert 0 < apart <= NEAR * whole
    # What it trains is seen.
    assert seen is not None
    assert (seen.shape, seen.others, seen.optimizer) == (case.shape, case.others, case.optimizer)
    assert (seen.own, seen.processes, seen.limits) == (case.own, 1, ())
    if not own:
        return
    # Its own half precision is kept.
    (alone, _), (under, found) = own
    assert found is not None and "precision" in found.kept
    assert (found.own, found.model) == (case.own.replace(precision="bf16"), seen.model)
    assert any("bf16" in line for line in found.lines())
    apart, whole = distance(under, alone)
    assert apart <= NEAR * whole
    if not found.convolves:  # nothing that is laid out otherwise: nothing at all is set
        assert differing(under, alone) == []


LOAD = """
import sys
sys.modules["advisor"] = None  # as if it was not there
import torch
model = torch.load(sys.argv[1], weights_only=False)
assert model.training and "_compiled_call_impl" not in vars(model)
torch.save(model.state_dict(), sys.argv[2])
"""


def test_checkpoints_are_those_of_the_script(tmp_path: Path) -> None:
    script = FOLDER / "copies.py"
    read = {}
    (tmp_path / "load.py").write_text(LOAD)
    for name, values in (("alone", None), ("under", HALF)):
        trained(script, tmp_path / name, values)
        whole, weights = tmp_path / name / "copies.whole", tmp_path / f"{name}.pt"
        assert forks.run(tmp_path / "load.py", str(whole), str(weights)).returncode == 0
        read[name] = {n: (w.dtype, w.shape) for n, w in torch.load(weights).items()}
    assert read["alone"] == read["under"]
    # One that was made without loads under it.
    begun = str(tmp_path / "alone" / "copies.pt")
    variants = [Variant(None, (begun,)), Variant({}, (begun,))]
    (alone, _), (under, _) = variously(script, "torch", tmp_path, variants)
    assert differing(alone, under) == []
