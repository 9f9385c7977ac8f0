"""One graph over the step of several ranks: what one cannot do none does, and none hangs."""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from advisor.cache.config import Config
from advisor.errors import AdvisorWarning
from advisor.tuners.act import buckets
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.capture import step_graph, unison
from advisor.tuners.act.capture.recorder import RECORDERS
from advisor.tuners.act.capture.step_graph import CHECKED, WARM_STEPS_PARALLEL, StepGraph
from advisor.tuners.act.capture.unison import Unison
from advisor.tuners.act.ranks import Group
from tests.runs.forked import FORKS
from tests.tuners.aten_recorder import AtenRecorder

EARLY = WARM_STEPS_PARALLEL + CHECKED
STEPS = EARLY + 8
WAIT_S = 120.0


class Full(AtenRecorder):
    """Has no memory to record."""

    def record(self, step: Callable[[], Any]) -> Any:
        super().record(step)
        raise torch.OutOfMemoryError("out of memory")


class Crowded(AtenRecorder):
    """Has no memory for the step that a replay is compared with."""

    def beside(self) -> Any:
        if self.replays:
            raise torch.OutOfMemoryError("out of memory")
        return super().beside()


RECORDERS_OF = {"full": Full, "breaks": Crowded}
"""Of rank 1, by how it is to go."""


class Settings:
    """That the step reads."""

    def __init__(self) -> None:
        self.scale = 1.0


def train(how: str, graph: bool, rank: int, folder: Path, where: str) -> None:
    """A rank's script; what came of it is in a file of its number."""
    device, backend = where, "gloo"
    if where == "cuda":
        device, backend = f"cuda:{rank}", "nccl"
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store-{graph}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2)
    second = rank == 1
    recorder = RECORDERS_OF.get(how, AtenRecorder)() if second else AtenRecorder()
    RECORDERS["cpu"] = lambda: recorder
    if how == "by the store":
        unison.SHARED = Path("/nowhere")
    if how == "absent":
        unison.AGREE_S = 2.0
    if how == "breaks":
        step_graph.ENDS_S, step_graph.ENDS_STEPS = 2.0, 0
    torch.manual_seed(0)
    settings = Settings()
    advice = Advice(Config(precision="default", step_graph=graph), device=device)
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model = DistributedDataParallel(
        advice.prepare(layers),
        gradient_as_bucket_view=how == "views",
        find_unused_parameters=how == "unused",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)

    def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = functional.cross_entropy(model(batch[0]), batch[1]) * settings.scale
        if how == "looks" and second:
            loss.item()
        advice.step(loss, optimizer)
        return loss

    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step: Callable[[Any], Any] = train_step
        if how != "absent" or not second:
            step = advice.capture(train_step, batch_of(0, rank))
        for number in range(STEPS):
            odd = how == "odd" and second and number in (3, EARLY + 2, STEPS - 2)
            if how == "changed" and second and number == EARLY + 2:
                settings.scale = 0.5
            if how == "crowded" and second and number == WARM_STEPS_PARALLEL:
                recorder.exhausted = True
            batch = advice.place(batch_of(number, rank, 5 if odd else 16))
            losses.append(float(step(batch).detach()))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    said = [str(one.message) for one in caught if issubclass(one.category, AdvisorWarning)]
    found = {
        "losses": losses,
        "weights": weights.tolist(),
        "failure": step.failure if isinstance(step, StepGraph) else "",
        "warnings": len(said),
        "kept": isinstance(step, StepGraph) and step._recorded is not None,
        "recordings": recorder.recordings,
    }
    (folder / f"{graph}-{rank}").write_text(json.dumps(found))
    dist.barrier()
    ends = dist.destroy_process_group
    dist.destroy_process_group()
    if isinstance(step, StepGraph):  # NCCL would wait for a graph
        assert step.failure and step._recorded is None
        assert (ends is dist.destroy_process_group) == (how == "absent")
    os._exit(0)  # gloo's own end is now and then one by SIGABRT


def batch_of(number: int, rank: int, size: int = 16) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * number + rank)
    labels = torch.randint(3, (size,), generator=draw)
    return torch.randn(size, 6, generator=draw) + labels[:, None], labels


def ran(how: str, folder: Path, *, graph: bool = True, where: str = "cpu") -> list[int | None]:
    """Exit codes of a job's ranks."""
    ranks = [FORKS.Process(target=train, args=(how, graph, n, folder, where)) for n in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(WAIT_S)
    codes = [one.exitcode for one in ranks]
    for one in ranks:
        one.kill()
    return codes


def found_in(how: str, folder: Path, *, graph: bool = True, where: str = "cpu") -> list[Any]:
    assert ran(how, folder, graph=graph, where=where) == [0, 0]
    return [json.loads((folder / f"{graph}-{n}").read_text()) for n in range(2)]


@pytest.fixture(scope="module")
def plainly(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """What comes of a job without a graph; most train on the same."""

    @functools.cache
    def train(how: str) -> list[Any]:
        return found_in(how, tmp_path_factory.mktemp("plain"), graph=False)

    return lambda how: train(how if how in ("odd", "changed") else "alike")


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("alike", "", ""),
        ("by the store", "", ""),
        ("views", "", ""),
        ("unused", "it waits for the device", "it waits for the device"),
        ("odd", "", ""),
        ("changed", "", ""),
        ("looks", "on rank 1 it waits for the device", "it waits for the device"),
        ("full", "on rank 1 there is no memory to capture", "there is no memory to capture"),
        ("crowded", "on rank 1 there is no memory to compare", "there is no memory to compare"),
        ("absent", "not all ranks said within 2 s", ""),
    ],
)
def test_ranks_train_as_without(
    how: str,
    first: str,
    second: str,
    tmp_path: Path,
    plainly: Callable[[str], list[Any]],
) -> None:
    found = found_in(how, tmp_path)
    for ours, theirs, failure in zip(found, plainly(how), (first, second), strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
        assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-3, abs=1e-5)
        assert ours["failure"].startswith(failure) and bool(ours["failure"]) == bool(failure)
        assert ours["warnings"] == (bool(failure) or how == "absent")
        assert ours["kept"] == (not first)
        if not first:
            assert ours["recordings"] == 1 + (how == "changed")
    assert found[0]["weights"] == pytest.approx(found[1]["weights"], abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["alike", "odd", "changed", "looks", "absent"])
def test_ranks_on_gpus_train_as_without(how: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = found_in(how, tmp_path, where="cuda")
    plain = found_in(how, tmp_path, where="cuda", graph=False)
    for ours, theirs in zip(found, plain, strict=True):
        assert ours["kept"] == (how not in ("looks", "absent")), ours["failure"]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)


def test_a_rank_that_breaks_off_in_the_middle_of_a_step_ends_them_all(tmp_path: Path) -> None:
    codes = ran("breaks", tmp_path)
    assert 0 not in codes and None not in codes, codes


def waits_in_vain() -> None:
    with Unison(Group(dist.HashStore(), 0, 2)).ending(0.05):
        time.sleep(WAIT_S)


def test_a_rank_that_waits_for_one_that_is_gone_ends() -> None:
    process = FORKS.Process(target=waits_in_vain)
    process.start()
    process.join(WAIT_S / 2)
    assert process.exitcode == 1


def two_of(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[Unison]:
    """Two ranks in one process."""
    made = []
    for rank in range(2):
        monkeypatch.setattr(unison, "_made", itertools.count())
        made.append(Unison(Group(store, rank, 2)))
    return made


def test_a_rank_that_comes_late_hears_what_was_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unison, "AGREE_S", 0.05)
    early, late = two_of(dist.HashStore(), monkeypatch)
    decided = "not all ranks said within 0 s whether they can"
    assert early.agree("") == decided
    assert late.agree("") == decided


def test_what_is_said_at_steps_is_heard_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = two_of(dist.HashStore(), monkeypatch)
    said = [[0, 1, 0, 2, 0, 0, 1, 0], [0, 0, 2, 1, 0, 0, 1, 0]]

    def steps(rank: int) -> list[int]:
        ranks[rank].share()
        assert ranks[rank]._most.__name__ == "most"  # by memory
        return [ranks[rank].most(what) for what in said[rank]]

    with ThreadPoolExecutor(2) as pool:
        heard = list(pool.map(steps, range(2)))
    assert heard == [[0, 1, 2, 2, 0, 0, 1, 0]] * 2


def test_alone_it_agrees_with_itself() -> None:
    one = Unison(None)
    one.share()
    assert one.alone and one.most(2) == 2 and one.agree("why") == "why" and not one.any(False)


def gathers(weight: Tensor) -> Any:
    """What the gradient of a weight is gathered by."""
    return weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def test_what_gathers_gradients_is_made_on_the_stream_of_the_capture(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(nn.Linear(3, 2))
        weight = parallel.module.weight
        gathers(weight).metadata["by"] = "who wrapped it"
        assert "by" in gathers(weight).metadata  # the reducer keeps it
        buckets.move(parallel)
        assert "by" not in gathers(weight).metadata
        parallel(torch.ones(4, 3)).sum().backward()
        assert torch.equal(weight.grad, torch.full((2, 3), 4.0))
    finally:
        dist.destroy_process_group()
