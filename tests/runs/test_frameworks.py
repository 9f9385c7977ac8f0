"""Scripts of Hugging Face, Lightning, Accelerate and timm under the pilot, and what they keep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from advisor.cache.config import Config
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from tests import forks
from tests.runs.forked import Variant, Weights, trained, variously
from tests.runs.test_scripts import FOLDER, HALF, NEAR, differing, distance

HERE = Path(__file__).parent
FUSED = Config(fused_optimizer=True)


@dataclass(frozen=True)
class Case:
    """A script, the library that it imports, and what is to be seen of it.

    Attributes:
        own: what it does itself as it is; `half` with its own bf16, None where it has none.
    """

    name: str
    library: str
    shape: tuple[int, ...]
    others: str = ""
    optimizer: str = "adamw"
    own: Config = Config()  # noqa: RUF009 # immutable
    half: bool = True


CASES = [
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
    Case("accelerate_loop", "accelerate", shape=(16, 3, 8, 8), others="2 micro-batches"),
    Case("timm_loop", "timm", shape=(8, 3, 32, 32), half=False),
]


@dataclass(frozen=True)
class Made:
    """Weights without a pilot and under one, as the script is and in bf16; what the pilot saw."""

    alone: Weights
    as_it_is: Weights
    half: Weights
    seen: ScriptFacts
    own: tuple[Weights, Weights, ScriptFacts] | None


LONG = ("lightning_gan", "timm_loop")
"""Two optimizers, and a plain loop: scripts of tests/runs/scripts have both."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(one, id=one.name, marks=[pytest.mark.long] if one.name in LONG else [])
        for one in CASES
    ],
)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def made(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Made:
    pytest.importorskip(case.library.partition(".")[0])
    variants = [Variant(), Variant({}), Variant(HALF)]
    if case.half:
        variants += [Variant(None, ("bf16",)), Variant(HALF, ("bf16",))]
    script = HERE / "frameworks" / f"{case.name}.py"
    found = variously(script, case.library, tmp_path_factory.mktemp(case.name), variants)
    weights = [one for one, _seen in found]
    seen, own = found[1][1], found[-1][1]
    assert seen is not None and own is not None
    return Made(*weights[:3], seen, (*weights[3:], own) if case.half else None)


def test_as_it_is_to_the_bit(made: Made) -> None:
    assert all(weight.isfinite().all() for weight in made.alone.values())
    assert differing(made.alone, made.as_it_is) == []


def test_in_half_precision_it_trains_alike(made: Made) -> None:
    assert made.half.keys() == made.alone.keys()
    assert [w.dtype for w in made.half.values()] == [w.dtype for w in made.alone.values()]
    apart, whole = distance(made.half, made.alone)
    assert 0 < apart <= NEAR * whole


def test_what_it_trains_is_seen(case: Case, made: Made) -> None:
    seen = made.seen
    assert (seen.shape, seen.others) == (case.shape, case.others)
    assert seen.optimizer == case.optimizer
    assert seen.own == case.own
    assert (seen.processes, seen.limits) == (1, ())


def test_its_own_half_precision_is_kept(case: Case, made: Made) -> None:
    if made.own is None:
        pytest.skip("it has none")
    alone, under_half, seen = made.own
    assert seen.own == case.own.replace(precision="bf16")
    assert "precision" in seen.kept
    assert any("bf16" in line for line in seen.lines())
    assert seen.model == made.seen.model
    apart, whole = distance(under_half, alone)
    assert apart <= NEAR * whole
    if not seen.convolves:  # nothing that is laid out otherwise: nothing at all is set
        assert differing(under_half, alone) == []


LOAD = """
import sys
sys.modules["advisor"] = None  # as if it was not there
import torch
model = torch.load(sys.argv[1], weights_only=False)
assert model.training and "_compiled_call_impl" not in vars(model)
torch.save(model.state_dict(), sys.argv[2])
"""


def test_checkpoints_are_the_same_with_and_without(tmp_path: Path) -> None:
    script = FOLDER / "copies.py"
    trained(script, tmp_path / "alone")
    trained(script, tmp_path / "under", HALF)
    read = {}
    for one in ("alone", "under"):
        whole, weights = tmp_path / one / "copies.whole", tmp_path / f"{one}.pt"
        (tmp_path / "load.py").write_text(LOAD)
        assert forks.run(tmp_path / "load.py", str(whole), str(weights)).returncode == 0
        read[one] = torch.load(weights)
    alone, under = read["alone"], read["under"]
    assert {n: (w.dtype, w.shape) for n, w in under.items()} == {
        n: (w.dtype, w.shape) for n, w in alone.items()
    }


def test_a_checkpoint_made_without_loads_under_it(tmp_path: Path) -> None:
    script = FOLDER / "copies.py"
    trained(script, tmp_path / "alone")
    begun = str(tmp_path / "alone" / "copies.pt")
    variants = [Variant(None, (begun,)), Variant({}, (begun,))]
    (alone, _), (under, _) = variously(script, "torch", tmp_path, variants)
    assert differing(alone, under) == []
