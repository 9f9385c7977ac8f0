"""A captured step trains as the step itself does, or falls back to it and says so."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from advisor.cache.config import Config
from advisor.errors import AdvisorWarning
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.step_graph import CHECKED, WARM_STEPS, StepGraph

EARLY = WARM_STEPS + CHECKED


class Net(nn.Module):
    """Convolution, batch norm (buffers), dropout (random numbers) and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        # No bias: batch norm takes it away, and the sign of its rounding error is all Adam sees.
        self.convolve = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.classify = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.convolve(x)))
        return self.classify(self.drop(x.flatten(1)))


class Training:
    """A script's own loop, with or without capturing its step."""

    def __init__(
        self,
        *,
        graph: bool = True,
        model: nn.Module | None = None,
        make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        hinder: Callable[[Tensor], Any] = lambda loss: None,
        **how: Any,
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.advice = Advice(Config(precision="default", step_graph=graph), device="cuda")
        self.model = self.advice.prepare(Net() if model is None else model)
        settings: dict[str, Any] = {
            "lr": 0.05,
            **how,
            **({"fused": True} if "fused" not in how else {}),
        }
        self.optimizer = make(self.model.parameters(), **settings)
        self.hinder = hinder
        self.step = self.advice.capture(self.train_step, next(batches(1)))

    def train_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        with self.advice.autocast():
            loss = functional.cross_entropy(self.model(x), y)
        self.hinder(loss)
        self.advice.step(loss, self.optimizer)
        return loss

    @property
    def failure(self) -> str:
        assert isinstance(self.step, StepGraph)
        return self.step.failure

    def run(self, steps: int = 16, first: int = 0) -> list[float]:
        torch.manual_seed(1 + first)
        made = self.advice.batches(batches(steps, first))
        return [float(self.step(batch).detach()) for batch in made]


def batches(count: int, first: int = 0, size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(first, first + count):
        draw = torch.Generator().manual_seed(number)
        labels = torch.randint(10, (size,), generator=draw)
        images = torch.randn(size, 1, 8, 8, generator=draw) + labels[:, None, None, None]
        yield images, labels


def same(ours: list[float], theirs: list[float]) -> bool:
    return ours == pytest.approx(theirs, rel=1e-3)


def test_without_the_knob_a_step_stays_itself() -> None:
    advice = Advice(Config(step_graph=False), device="cpu")

    def step(batch: Any) -> Any:
        return batch

    assert advice.capture(step, 1) is step


def test_a_step_that_is_not_captured_as_advised_is_named_once() -> None:
    advice = Advice(Config(step_graph=True), device="cpu")
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.warns(AdvisorWarning, match=r"advice\.capture"):
        advice.step((weight * 2).sum(), optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advice.step((weight * 2).sum(), optimizer)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "how"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.AdamW, {"lr": 1e-3, "fused": False}),
        (torch.optim.RMSprop, {"lr": 1e-3, "fused": None}),
    ],
)
def test_replays_train_as_the_step_does(make: Any, how: dict[str, Any]) -> None:
    if how.get("fused", True) is None:
        how = {"lr": how["lr"]}
        runs = [_without_fused(make, graph, how) for graph in (True, False)]
    else:
        runs = [Training(graph=graph, make=make, **how) for graph in (True, False)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [run.run(40) for run in runs]
    assert runs[0].failure == ""
    assert same(*losses)
    for ours, theirs in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    norm = runs[0].model.get_submodule("norm")
    assert int(norm.get_buffer("num_batches_tracked")) == 40
    assert [type(g["lr"]) for g in runs[0].optimizer.param_groups] == [float]


def _without_fused(make: Any, graph: bool, how: dict[str, Any]) -> Training:
    return Training(graph=graph, make=lambda weights, **_fused: make(weights, **how))


@pytest.mark.gpu
def test_a_short_last_batch_runs_between_replays() -> None:
    losses = []
    for graph in (True, False):
        training = Training(graph=graph)
        losses.append(training.run(10))
        (short,) = training.advice.batches(batches(1, 50, size=5))
        losses[-1].append(float(training.step(short).detach()))
        losses[-1] += training.run(5, first=60)
    assert same(*losses)


@pytest.mark.gpu
def test_a_schedule_of_the_learning_rate_is_followed() -> None:
    for make, how in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"lr": 1e-2})):
        losses = []
        for graph in (True, False):
            training = Training(graph=graph, make=make, **how)
            schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, gamma=0.8)
            losses.append([])
            for number in range(20):
                losses[-1] += training.run(1, first=number)
                schedule.step()
        assert same(*losses)


@pytest.mark.gpu
def test_momentum_by_hand_captures_anew_and_at_every_step_gives_up() -> None:
    losses = []
    for graph in (True, False):
        training = Training(graph=graph, momentum=0.9)
        losses.append(training.run(EARLY + 2))
        training.optimizer.param_groups[0]["momentum"] = 0.2
        losses[-1] += training.run(6, first=100)
    assert same(*losses)
    training = Training(momentum=0.9)
    training.run(EARLY)
    with pytest.warns(AdvisorWarning, match="change at every step"):
        for number in range(12):
            training.optimizer.param_groups[0]["momentum"] = 0.9 - number / 100
            training.run(1, first=number)


@pytest.mark.gpu
def test_weights_frozen_on_the_way_stay_frozen() -> None:
    training = Training()
    training.run(EARLY + 2)
    convolve = training.model.get_parameter("convolve.weight")
    convolve.requires_grad_(False)
    held = convolve.clone()
    training.run(6, first=20)
    assert training.failure == "" and torch.equal(convolve, held)


@pytest.mark.gpu
def test_a_checkpoint_loaded_on_the_way_is_trained_on() -> None:
    losses = []
    for graph in (True, False):
        training = Training(graph=graph, make=torch.optim.AdamW, lr=1e-2)
        training.run(12)
        model, optimizer = training.model.state_dict(), training.optimizer.state_dict()
        model = {name: tensor.clone() for name, tensor in model.items()}
        optimizer["state"] = {
            at: {name: tensor.clone() for name, tensor in state.items()}
            for at, state in optimizer["state"].items()
        }
        training.run(5, first=30)
        training.model.load_state_dict(model)
        training.optimizer.load_state_dict(optimizer)
        losses.append(training.run(8, first=50))
    assert same(*losses)


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return super().forward(x - self.mean)


class Branching(Net):
    """Random depth, drawn on the host."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if random.random() < 0.5 else 3.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"hinder": lambda loss: loss.item()}, r"waits for the device \(test_step_graph"),
        ({"hinder": lambda loss: print(end="") if loss > 0 else 1 / 0}, "waits for the device"),
        ({"hinder": lambda loss: loss.cpu()}, "waits for the device"),
        ({"hinder": lambda loss: torch.cuda.synchronize()}, "cannot hold"),
        ({"model": Buffered()}, "'mean' is replaced"),
        ({"model": Branching()}, "differ"),
    ],
)
def test_what_cannot_be_captured_trains_without_and_is_named_once(
    how: dict[str, Any], reason: str
) -> None:
    training = Training(**how)
    with pytest.warns(AdvisorWarning, match=reason) as seen:
        losses = training.run(20)
    assert len([w for w in seen if issubclass(w.category, AdvisorWarning)]) == 1
    assert training.failure and all(loss == loss for loss in losses)
    assert losses[-1] < losses[0] or "model" in how
    # Nothing is left of the capture: the generator draws, graphs can be made.
    assert torch.rand(1, device="cuda") >= 0
    again = Training()
    again.run(12)
    assert again.failure == ""


@pytest.mark.gpu
def test_a_batch_with_more_than_tensors_is_refused_at_once() -> None:
    advice = Advice(Config(step_graph=True), device="cuda")
    with pytest.warns(AdvisorWarning, match="more than tensors"):
        step = advice.capture(lambda batch: batch, (torch.ones(2), "name"))
    assert step((torch.ones(1), "other"))[1] == "other"


@pytest.mark.gpu
def test_losses_that_are_kept_stay_what_they_were() -> None:
    training = Training()
    kept = [training.step(batch) for batch in training.advice.batches(batches(20))]
    assert len({float(loss) for loss in kept}) == 20


@pytest.mark.gpu
def test_a_capture_beside_pinning_workers() -> None:
    made = TensorDataset(*map(torch.cat, zip(*batches(64), strict=True)))
    training = Training()
    training.advice = Advice(
        Config(precision="default", step_graph=True, pin_memory=True), device="cuda"
    )
    loader = DataLoader(made, batch_size=16, num_workers=2, pin_memory=True)
    losses = [float(training.step(batch).detach()) for batch in training.advice.batches(loader)]
    assert isinstance(training.step, StepGraph) and training.step.ready
    assert training.failure == "" and losses[-1] < losses[0]


@pytest.mark.gpu
def test_compiled_parts_inside_a_captured_step() -> None:
    losses = []
    for graph in (True, False):
        training = Training(graph=graph)
        training.model.compile()
        losses.append(training.run(16))
        assert not graph or training.failure == ""
    assert same(*losses)
