"""Advice at work: every knob acts through its row, and nothing else changes."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from advisor.cache.config import Config
from advisor.tuners.act.advice import Advice
from advisor.tuners.knobs import KNOBS, Situation
from advisor.tuners.search.space import Space


@pytest.fixture(autouse=True)
def flags_as_they_were() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    Advice(
        Config(
            precision="default", cudnn_benchmark=False, cudnn_deterministic=False, threads=threads
        ),
        device="cpu",
    ).set_flags()


def train(advice: Advice, steps: int = 3) -> list[float]:
    torch.manual_seed(0)
    model = advice.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **advice.optimizer)
    data = TensorDataset(torch.randn(steps * 4, 3, 8, 8), torch.randint(0, 5, (steps * 4,)))
    losses = []
    for x, y in advice.batches(DataLoader(data, **advice.loader)):
        with advice.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        advice.step(loss, optimizer)
        losses.append(float(loss.detach()))
    return losses


def test_no_advice_changes_nothing() -> None:
    before = (
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
    )
    advice = Advice(Config(), device="cpu", batch_size=4, status="miss")
    advice.set_flags()
    assert advice.optimizer == {} and advice.loader == {"batch_size": 4}
    assert not advice.scaler.is_enabled()
    losses = train(advice)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(12, 3, 8, 8), torch.randint(0, 5, (12,))
    plain = []
    for i in range(3):
        loss = nn.functional.cross_entropy(model(x[4 * i : 4 * i + 4]), y[4 * i : 4 * i + 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(float(loss.detach()))
    assert losses == plain
    assert before == (
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
    )


def test_flags_are_set_afresh() -> None:
    Advice(Config(cudnn_benchmark=True, precision="tf32", threads=1), device="cpu").set_flags()
    assert torch.backends.cudnn.benchmark
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.get_num_threads() == 1
    Advice(Config(cudnn_benchmark=False, precision="default"), device="cpu").set_flags()
    assert not torch.backends.cudnn.benchmark
    assert not torch.backends.cuda.matmul.allow_tf32


def test_channels_last_reaches_weights_and_batches() -> None:
    advice = Advice(Config(channels_last=True), device="cpu")
    mixed = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3), nn.Linear(3, 4)])
    advice.prepare(mixed)
    assert mixed[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert mixed[1].weight.is_contiguous(memory_format=torch.channels_last_3d)
    x = advice.place(torch.randn(2, 3, 4, 5))
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert advice.place(torch.randn(2, 3)).shape == (2, 3)


def test_one_channel_is_laid_out_as_pytorch_does_it() -> None:
    # Both layouts are contiguous with one channel: only the strides tell cuDNN which is meant.
    advice = Advice(Config(channels_last=True), device="cpu")
    x, model = torch.randn(2, 1, 4, 5), nn.Conv2d(1, 4, 3)
    wanted = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert advice.place(x).stride() == x.to(memory_format=torch.channels_last).stride()
    assert advice.prepare(model).weight.stride() == wanted.weight.stride()


def test_place_keeps_the_structure() -> None:
    pair = namedtuple("pair", ["x", "y"])
    advice = Advice(Config(channels_last=True), device="cpu")
    x = torch.randn(1, 2, 3, 4)
    for tree in ((x, 1), [x, "a"], {"a": x, "b": None}, pair(x, x), (x, {"deep": [x]})):
        placed = advice.place(tree)
        assert type(placed) is type(tree) and len(placed) == len(tree)


def test_bf16_runs_under_autocast() -> None:
    advice = Advice(Config(precision="bf16", batch_size=4), device="cpu", batch_size=4)
    with advice.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert all(loss < 10 for loss in train(advice))


def test_every_knob_offers_torchs_own_behaviour_first() -> None:
    offered = Space.of(Situation(device="cuda", capability=(9, 0), batches=(64, 128))).default
    assert dict(offered) == {
        "batch_size": 64,
        "channels_last": False,
        "cudnn_benchmark": False,
        "cudnn_deterministic": False,
        "cudnn_enabled": True,
        "fused_optimizer": False,
        "precision": "default",
        "step_graph": False,
    }


@pytest.mark.parametrize(
    ("here", "knob", "values"),
    [
        (Situation(device="cuda", capability=(7, 0)), "precision", ("default", "fp16")),
        (Situation(device="cuda", capability=(9, 0), dimensions=3), "channels_last", None),
        (Situation(device="cuda", capability=(9, 0), convolves=False), "cudnn_benchmark", None),
        (
            Situation(device="cuda", capability=(9, 0), deterministic=True),
            "cudnn_benchmark",
            (False,),
        ),
        (Situation(device="cuda", deterministic=True), "cudnn_deterministic", (True,)),
        (Situation(device="cuda", full=True), "cudnn_enabled", (True, False)),
        (Situation(device="cuda", training=False), "fused_optimizer", None),
        (Situation(device="cuda"), "step_graph", (False, True)),
        (Situation(device="cuda", step_graph=False), "step_graph", None),
        (Situation(device="cuda", training=False), "step_graph", None),
        (Situation(device="cpu"), "step_graph", None),
        (Situation(device="cpu", cpu_bf16=True), "precision", ("default", "bf16")),
        (Situation(device="cpu"), "precision", ("default",)),
        (Situation(device="cpu", threads=4, cores=8), "threads", (4, 8, 2, 1)),
        (Situation(device="cpu"), "cudnn_benchmark", None),
        (
            Situation(device="cuda", capability=(9, 0), precisions=("tf32", "fp32")),
            "precision",
            ("default", "tf32", "fp32"),
        ),
    ],
)
def test_the_space_fits_the_situation(here: Situation, knob: str, values: object) -> None:
    assert Space.of(here).choices.get(knob) == values


def test_knobs_have_distinct_names_and_say_what_they_are() -> None:
    assert len({knob.name for knob in KNOBS}) == len(KNOBS)
    assert all(knob.summary for knob in KNOBS)


def test_compiling_keeps_the_names_of_the_weights() -> None:
    model = nn.Linear(3, 4)
    names = list(model.state_dict())
    prepared = Advice(Config(compile="default"), device="cpu").prepare(model)
    assert prepared is model
    assert list(prepared.state_dict()) == names
    assert model._compiled_call_impl is not None
    plain = Advice(Config(compile="none"), device="cpu").prepare(nn.Linear(3, 4))
    assert plain._compiled_call_impl is None
