"""Ordinary training scripts under the pilot: as they are to the bit, or as near as bf16 is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs.forked import Weights, trained

FOLDER = Path(__file__).parent / "scripts"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.stem != "distributed")
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
