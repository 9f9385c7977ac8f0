"""Ordinary training scripts, run as they are: each trains, and to the same bits every time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

# What could differ from run to run: buffers and a copy of the model, two processes, workers.
TWICE = ("averaged", "distributed", "evaluation")

Weights = dict[str, Tensor]


def trained(script: Path, folder: Path, *before: str) -> Weights:
    """What `script` saves in `folder`, run there by this Python, its command behind `before`."""
    out = folder / f"{script.stem}.pt"
    launcher = TORCHRUN if script.stem == "distributed" else ()
    command = [*before, sys.executable, *launcher, str(script), str(out)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out)


def differing(one: Weights, other: Weights) -> list[str]:
    """The names of the weights that are not the same to the bit, or that only one of them has."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, list[Future[Weights]]]]:
    """The runs of each script that is asked for, two at a time: most of one is importing torch."""
    here = (item for item in request.session.items if item.path == request.path)
    with ThreadPoolExecutor(2) as pool:
        yield {
            script: [
                pool.submit(trained, script, tmp_path_factory.mktemp(script.stem))
                for _ in range(2 if script.stem in TWICE else 1)
            ]
            for script in (item.callspec.params["script"] for item in here)
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_trains_to_the_same_bits(script: Path, runs: dict[Path, list[Future[Weights]]]) -> None:
    weights, *again = [run.result() for run in runs[script]]
    assert weights
    assert all(weight.isfinite().all() for weight in weights.values())
    for other in again:
        assert differing(weights, other) == []
