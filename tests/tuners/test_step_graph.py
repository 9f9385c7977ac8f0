"""A captured step trains like the eager step, or falls back to it with a warning."""

from __future__ import annotations

import copy
import functools
import math
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from advisor.cache.config import Config
from advisor.errors import AdvisorWarning
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.capture import step_graph
from advisor.tuners.act.capture.captured_graph import RECORDERS, Optimizers
from advisor.tuners.act.capture.object_graph import ObjectGraph
from advisor.tuners.act.capture.step_graph import CHECKED, IN_A_ROW, StepGraph
from tests.tuners.aten_recorder import AtenRecorder

FIRST_REPLAY = 2 * CHECKED
on_gpu = functools.partial(pytest.param, marks=pytest.mark.gpu)
on_each_device = pytest.mark.parametrize("device", ["cpu", on_gpu("cuda")])


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> AtenRecorder:
    """The recorder that stands in for CUDA graphs on a CPU."""
    made = AtenRecorder()
    monkeypatch.setitem(RECORDERS, "cpu", lambda: made)
    return made


class Net(nn.Module):
    """Convolution, batch norm (buffers), dropout (random numbers) and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        # No bias: batch norm cancels it, so its gradient is rounding noise, which Adam amplifies.
        self.convolve = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.classify = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.convolve(x)))
        return self.classify(self.drop(x.flatten(1)))


class Training:
    """A training loop. `graph`: capture its step; `disturb`: called in the step with the loss."""

    def __init__(
        self,
        device: str = "cpu",
        *,
        graph: bool = True,
        pin_memory: bool = False,
        make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        disturb: Callable[[Tensor], Any] = lambda loss: None,
        scale: float = 0.0,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        config = Config(step_graph=graph, pin_memory=pin_memory)
        config = config.replace(precision="fp16" if scale else "default")
        self.advice = Advice(config, device=device)
        if scale:
            self.advice.scaler = torch.amp.GradScaler(device, init_scale=scale, growth_interval=7)
        self.model = self.advice.prepare(Net())
        settings = {"lr": 0.05, "fused": True, **options}
        passed = {name: value for name, value in settings.items() if value is not None}
        self.optimizer = make(self.model.parameters(), **passed)
        self.disturb = disturb
        self.step: Any = self.advice.capture(self.train_step, next(batches(1)))

    def train_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        with self.advice.autocast():
            loss = functional.cross_entropy(self.model(x), y)
        self.disturb(loss)
        self.advice.step(loss, self.optimizer)
        return loss

    @property
    def failure(self) -> str:
        return str(self.step.failure)

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


def losses_agree(ours: list[float], theirs: list[float]) -> bool:
    return ours == pytest.approx(theirs, rel=1e-3)


def test_missing_capture_call_warns_once() -> None:
    advice = Advice(Config(step_graph=True), device="cpu")
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.warns(AdvisorWarning, match=r"advice\.capture"):
        advice.step((weight * 2).sum(), optimizer)
    advice.step((weight * 2).sum(), optimizer)


@on_each_device
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
        (torch.optim.SGD, {"weight_decay": 0.1, "fused": None}),
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.RMSprop, {"lr": 1e-3, "fused": None}),  # set capturable on a GPU
    ],
)
def test_replays_train_like_the_eager_step(device: str, make: Any, options: dict[str, Any]) -> None:
    runs = [Training(device, graph=graph, make=make, **options) for graph in (True, False)]
    losses = [run.run(24) for run in runs]
    assert runs[0].failure == ""
    assert losses_agree(*losses)
    for ours, theirs in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    norm = runs[0].model.get_submodule("norm")
    assert int(norm.get_buffer("num_batches_tracked")) == 24
    assert [type(g["lr"]) for g in runs[0].optimizer.param_groups] == [float]


@on_each_device
@pytest.mark.parametrize("scale", [2.0**16, 2.0**36], ids=["no overflow", "skips first steps"])
@pytest.mark.parametrize(
    ("make", "options"),
    [(torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), (torch.optim.AdamW, {"lr": 1e-3})],
)
def test_replays_with_grad_scaler_match_eager_steps(
    device: str, make: Any, options: dict[str, Any], scale: float
) -> None:
    runs = [
        Training(device, graph=graph, make=make, scale=scale, **options) for graph in (True, False)
    ]
    losses = [run.run(24) for run in runs]
    assert runs[0].failure == ""
    assert losses[0] == pytest.approx(losses[1], rel=2e-3 if device == "cpu" else 2e-2)
    scales = [run.advice.scaler.get_scale() for run in runs]
    assert scales[0] == scales[1] != scale
    # The graph depends on the growth factor too.
    runs[0].advice.scaler.set_growth_factor(4.0)
    assert "GradScaler" in runs[0].step._captured.objects.changed()


def own_scaler(device: str, *, update: bool = True, fails: Callable[[], bool] = bool) -> Any:
    """A captured step with the script's own scaler. `fails`: whether it raises before update()."""
    torch.manual_seed(0)
    advice = Advice(Config(precision="fp16", step_graph=True), device=device)
    model = advice.prepare(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **advice.optimizer)
    scaler = torch.amp.GradScaler(device)

    def train(batch: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        with advice.autocast():
            loss = functional.cross_entropy(model(batch[0]), batch[1])
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        if fails():
            raise RuntimeError("no memory, or whatever else")
        if update:
            scaler.update()
        return loss

    return advice.capture(train, advice.place(next(batches(1)))), advice, scaler


@on_each_device
def test_step_with_the_scripts_own_scaler_is_captured(device: str) -> None:
    step, advice, _scaler = own_scaler(device)
    losses = [float(step(batch).detach()) for batch in advice.batches(batches(30))]
    assert step.failure == "" and step.ready and losses[-1] < losses[0]


def test_updating_the_scaler_outside_the_step_warns() -> None:
    step, advice, scaler = own_scaler("cpu", update=False)
    with pytest.warns(AdvisorWarning, match="call update in the step too"):
        for batch in advice.batches(batches(FIRST_REPLAY + 2)):
            step(batch)
            scaler.update()


def test_failed_capture_leaves_the_scaler_usable(recorder: AtenRecorder) -> None:
    step, advice, _scaler = own_scaler("cpu", fails=lambda: recorder.recordings > 0)
    *before, captured, after = advice.batches(batches(CHECKED + 2))
    for batch in before:
        step(batch)
    with pytest.warns(AdvisorWarning, match="whatever else"):
        step(captured)  # this restores `recordings` too
    step(after)


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": True}, {"dampening": 0.1}, {"dampening": 0.1, "maximize": True}]
)
def test_first_step_skipped_by_the_scaler_creates_no_momentum(options: dict[str, Any]) -> None:
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        advice = Advice(Config(precision="fp16", step_graph=True), device="cpu")
        weights = [nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(3))]
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=fused, **options)
        advice._uncaptured = False  # suppress its warning
        for number in range(6):
            factor = math.inf if number in (0, 1, 3) else 1.0 + number
            advice.step(sum((w * w).sum() for w in weights) * factor, optimizer)  # type: ignore[arg-type]
        results.append(
            torch.cat([*weights, *(optimizer.state[w]["momentum_buffer"] for w in weights)])
        )
    torch.testing.assert_close(*results)
    assert results[0].isfinite().all()


def short_batch(training: Training) -> list[float]:
    losses = training.run(10)
    (short,) = training.advice.batches(batches(1, 50, size=5))
    return [*losses, float(training.step(short).detach()), *training.run(5, first=60)]


def freeze_weight(training: Training) -> list[float]:
    training.run(FIRST_REPLAY + 2)
    convolve = training.model.get_parameter("convolve.weight").requires_grad_(False)
    before = convolve.clone()
    losses = training.run(6, first=20)
    assert torch.equal(convolve, before)
    return losses


def resume(training: Training) -> list[float]:
    training.run(12)
    saved = copy.deepcopy([training.model.state_dict(), training.optimizer.state_dict()])
    training.run(5, first=30)
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    return training.run(8, first=50)


ADAMW = {"make": torch.optim.AdamW, "lr": 1e-2}


@on_each_device
@pytest.mark.parametrize(
    ("script", "options"), [(short_batch, {}), (freeze_weight, {}), (resume, ADAMW)]
)
def test_changes_between_steps_take_effect(
    device: str, script: Callable[[Training], list[float]], options: dict[str, Any]
) -> None:
    runs = [Training(device, graph=graph, **options) for graph in (True, False)]
    losses = [script(run) for run in runs]
    assert losses_agree(*losses) and runs[0].failure == ""


UNCAPTURABLE: list[tuple[dict[str, Any], str]] = [
    ({"disturb": lambda loss: loss.item()}, "waits for the device"),
    ({"disturb": lambda loss: print(end="") if loss > 0 else 1 / 0}, "waits for the device"),
]


@pytest.mark.parametrize(
    ("device", "options", "reason"),
    [
        *(("cpu", *one) for one in UNCAPTURABLE),
        *(on_gpu("cuda", *one) for one in UNCAPTURABLE),
        on_gpu("cuda", UNCAPTURABLE[0][0], r"waits for the device \(test_step_graph"),
        on_gpu("cuda", {"disturb": lambda loss: loss.cpu()}, "waits for the device"),
        on_gpu("cuda", {"disturb": lambda loss: torch.cuda.synchronize()}, "cannot hold"),
    ],
)
def test_uncapturable_step_warns(device: str, options: dict[str, Any], reason: str) -> None:
    training = Training(device, **options)
    with pytest.warns(AdvisorWarning, match=reason) as warned:
        losses = training.run(20)
    assert len([w for w in warned if issubclass(w.category, AdvisorWarning)]) == 1
    assert training.failure and all(loss == loss for loss in losses)
    assert losses[-1] < losses[0]
    # After the failed capture, random numbers and new captures work.
    assert torch.rand(1, device=device) >= 0
    again = Training(device)
    again.run(12)
    assert again.failure == ""


def pair(number: int, size: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(size, 3, generator=draw), torch.randn(size, 2, generator=draw)


class DynamicScale(nn.Linear):
    """Reads its settings with getattr()."""

    first = 1.0

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.second, self.names = 1.0, ("first", "second")

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = x * getattr(self, name)
        return super().forward(x)


SETTINGS = {"weight": 1.0}


class Part:
    loss = staticmethod(functional.mse_loss)
    rate = 1.0
    rare: Any = None


class Trainer:
    """A custom trainer whose step is a method. `extra`: values after the tensors of a batch."""

    scale = 1.0

    def __init__(
        self,
        graph: bool = True,
        extra: tuple[Any, ...] = (),
        inside: Callable[[Trainer], Any] = lambda trainer: None,
    ) -> None:
        torch.manual_seed(3)
        self.model, self.part = DynamicScale(), Part()
        self.average = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, fused=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.rare = [torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1000)]
        self.part.rare = self.rare[0]
        self.decay = 0.5
        self.seen = 0
        self.losses: list[Tensor] = []
        self.recent: deque[int] = deque(maxlen=50)
        self.total = torch.zeros(())
        self.advice = Advice(Config(step_graph=graph), device="cpu")
        self.inside = inside
        self.step: Any = self.advice.capture(self.train, (*pair(0), *extra))

    def train(self, batch: tuple[Any, ...]) -> Tensor:
        loss = self.weighted_loss(self.model(batch[0]), batch[1])
        self.advice.step(loss, self.optimizer)
        with torch.no_grad():
            models = (self.average.parameters(), self.model.parameters())
            for ours, theirs in zip(*models, strict=True):
                ours.lerp_(theirs, 1 - self.decay)
        self.inside(self)
        return loss

    def weighted_loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.part.loss(output, target) * self.part.rate * self.scale
        return loss * SETTINGS["weight"]

    def run(self, steps: int = 14, between: Callable[[Trainer], Any] = lambda trainer: None) -> Any:
        losses = []
        for number in range(steps):
            losses.append(float(self.step(pair(number)).detach()))
            between(self)
        weights = [w.detach().clone() for m in (self.model, self.average) for w in m.parameters()]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return losses, weights, self.decay, self.seen, rates, self.total, len(self.losses)


def toggle_mode(trainer: Trainer) -> None:
    trainer.model.train(not trainer.model.training)


def reduce_weight(trainer: Trainer) -> None:
    SETTINGS["weight"] *= 0.9


def raise_decay(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["weight_decay"] += 0.01


def shrink(*names: str) -> Callable[[Trainer], None]:
    """Return a function that shrinks an attribute of the owner or of a part."""

    def change(trainer: Trainer) -> None:
        one = functools.reduce(getattr, names[:-1], trainer)
        setattr(one, names[-1], 0.9 * getattr(one, names[-1]) + 0.01)

    return change


DECAY, SCALE = shrink("decay"), shrink("__class__", "scale")
PARTS = [shrink("model", "first"), shrink("model", "second"), shrink("part", "rate")]


def add_up(trainer: Trainer) -> None:
    trainer.total = trainer.total + trainer.model.weight.detach().sum()


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def reset() -> None:
        monkeypatch.setitem(SETTINGS, "weight", 1.0)
        monkeypatch.setattr(Trainer, "scale", 1.0)

    reset()
    return reset


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        (lambda trainer: trainer.schedule.step(), "changes .*(lr|last_epoch|_step_count)"),
        # Detected before the learning rate changes, wherever the scheduler is stored.
        (lambda trainer: trainer.rare[0].step(), "changes .* in Python"),
        (lambda trainer: trainer.part.rare.step(), "changes .* in Python"),
        (lambda t: setattr(t, "seen", t.seen + 1), r"changes self\.seen in Python"),
        (DECAY, r"changes self\.decay in Python"),
        (toggle_mode, "changes .*training"),
        (reduce_weight, r"changes SETTINGS\.weight"),
        (SCALE, r"changes self\.scale"),
        (lambda trainer: trainer.losses.append(torch.zeros(())), r"changes self\.losses"),
        (lambda trainer: trainer.recent.append(1), r"changes self\.recent"),
        (lambda trainer: random.random(), "draws random numbers"),
        (add_up, "(the output of a replay|a replay.s change)"),
    ],
)
def test_step_that_changes_python_state_is_not_captured(
    inside: Callable[[Trainer], Any], reason: str, settings: Callable[[], None]
) -> None:
    settings()
    with pytest.warns(AdvisorWarning, match=reason) as warned:
        ours = Trainer(inside=inside).run()
    assert len(warned) == 1
    settings()
    assert repr(ours) == repr(Trainer(graph=False, inside=inside).run())


@pytest.mark.parametrize("between", [DECAY, toggle_mode, reduce_weight, SCALE, raise_decay, *PARTS])
@pytest.mark.parametrize("every", [1, 5])
def test_rare_changes_recapture_and_constant_changes_warn(
    between: Callable[[Trainer], Any], every: int, settings: Callable[[], None]
) -> None:
    ends = []
    for graph in (True, False):
        settings()
        trainer, numbers = Trainer(graph), iter(range(1, 100))

        def at_interval(trainer: Trainer, numbers: Iterator[int] = numbers) -> None:
            if next(numbers) % every == 0:
                between(trainer)

        with warnings.catch_warnings(action="ignore" if every == 1 else "error"):
            ends.append(trainer.run(16, at_interval))
        assert not graph or ("changed at every step" in trainer.step.failure) is (every == 1)
    assert repr(ends[0]) == repr(ends[1])


def test_schedule_and_counter_outside_the_step_need_no_new_capture(recorder: AtenRecorder) -> None:
    def outside(trainer: Trainer) -> None:
        trainer.schedule.step()
        trainer.seen += 1
        trainer.losses.append(trainer.total)

    ends = [Trainer(graph).run(16, outside) for graph in (True, False)]
    assert repr(ends[0]) == repr(ends[1])
    assert recorder.recordings == 1 and recorder.replays > 10


def test_later_comparison_detects_a_deeply_nested_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "CHECKED_AGAIN", 4)
    deep, trainer = {"settings": {"inner": {"weight": 1.0}}}, Trainer()
    trainer.model.register_forward_hook(
        lambda _net, _given, out: out * deep["settings"]["inner"]["weight"]
    )
    trainer.run(FIRST_REPLAY + 2)
    assert trainer.step.ready and not trainer.step.failure
    deep["settings"]["inner"]["weight"] = 0.5
    with pytest.warns(AdvisorWarning, match="(the output of a replay|a replay.s change)"):
        trainer.run(8)


@pytest.mark.parametrize("when", ["before", "later"])
def test_no_capture_with_a_process_group(
    when: str, request: pytest.FixtureRequest, recorder: AtenRecorder
) -> None:
    """NCCL would hang at exit if a graph held its work."""
    trainer = Trainer() if when == "later" else None
    request.getfixturevalue("one_process")
    with pytest.warns(AdvisorWarning, match="process group") as warned:
        (trainer or Trainer()).run(CHECKED + 1)
    assert len(warned) == 1 and recorder.recordings == 0


def test_step_counters_are_on_the_device_only_while_captured() -> None:
    """Checkpoints keep them on the CPU: on the device, each later step would synchronize."""
    with FakeTensorMode():
        weight = nn.Parameter(torch.ones(2, device="cuda"))
        adam = torch.optim.Adam([weight])
        adam.state[weight] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(weight)}
        optimizers = Optimizers("cuda")
        optimizers._met[0] = adam
        optimizers.begin()
        assert adam.state[weight]["step"].is_cuda
        optimizers.begin()  # a second capture
        assert adam.state_dict()["state"][0]["step"].device.type == "cpu"
        assert adam.state[weight]["step"].is_cuda
        optimizers.end()
        assert adam.state[weight]["step"].device.type == "cpu"
        assert adam.state[weight]["exp_avg"].is_cuda
        assert not adam._optimizer_state_dict_post_hooks
        assert adam.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("missing", ["aten::lerp_", "aten::mul_"])
def test_replay_with_a_missing_operation_warns(missing: str, recorder: AtenRecorder) -> None:
    """Without lerp_, weights are not averaged. Without mul_, there is no weight decay of 5e-6."""

    def decay(trainer: Trainer) -> None:
        with torch.no_grad():
            for weight in trainer.model.parameters():
                weight.mul_(1 - 5e-6)

    recorder.fault = missing.__eq__
    with pytest.warns(AdvisorWarning, match="a replay.s change of"):
        Trainer(inside=decay).run()


def test_nondeterminism_of_the_step_is_tolerated(recorder: AtenRecorder) -> None:
    """Noise that no seed controls, like the summation order of atomics."""
    draw = torch.Generator().manual_seed(5)

    def jitter(trainer: Trainer) -> None:
        with torch.no_grad():
            for weight in trainer.model.parameters():
                weight.add_(torch.randn(weight.shape, generator=draw), alpha=1e-3)

    Trainer(inside=jitter).run()
    assert recorder.replays > 10


def test_step_with_another_non_tensor_value_runs_eagerly(recorder: AtenRecorder) -> None:
    trainer = Trainer(extra=(None, "en", 1))
    for number in range(14):
        trainer.step((*pair(number), None, "en", 3 if number == 9 else 1))
    assert recorder.recordings == 1 and recorder.replays == 14 - CHECKED - 1


def test_batches_that_never_match_the_example_warn(recorder: AtenRecorder) -> None:
    trainer = Trainer()
    with pytest.warns(AdvisorWarning, match="nothing is replayed") as warned:
        for number in range(IN_A_ROW + 3):
            trainer.step(pair(number, size=5))
    assert len(warned) == 1 and recorder.recordings == 0


@pytest.mark.parametrize(
    ("call", "forward", "size", "reason"),
    [
        (CHECKED, 1, 4, "to capture it"),
        (CHECKED, 2, 4, "to compare"),
        (CHECKED, 3, 4, "the graph and the eager step"),
        (FIRST_REPLAY + 2, 1, 5, "another shape"),
        (FIRST_REPLAY + 2, 0, 4, "to replay"),
    ],
)
def test_out_of_memory_neither_raises_nor_trains_a_batch_twice(
    call: int, forward: int, size: int, reason: str, recorder: AtenRecorder
) -> None:
    ends: list[Any] = []
    for graph in (True, False):
        trainer, left = Trainer(graph), [0]

        def run_out(*_any: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("out of memory")

        trainer.model.register_forward_pre_hook(run_out)
        with warnings.catch_warnings(record=True, action="always") as warned:
            for number in range(FIRST_REPLAY + 6):
                if graph and number == call:
                    left[0], recorder.exhausted = forward, forward == 0
                trainer.step(pair(number, size=size if number == call else 4))
                left[0], recorder.exhausted = 0, False
        assert [reason in str(one.message) for one in warned] == [True] * graph
        ends.append([w.detach().clone() for w in trainer.model.parameters()])
    assert repr(ends[0]) == repr(ends[1])


@on_each_device
def test_kept_losses_are_not_overwritten(device: str) -> None:
    training = Training(device)
    kept = [training.step(batch) for batch in training.advice.batches(batches(20))]
    assert len({float(loss) for loss in kept}) == 20


@pytest.mark.gpu
def test_capture_works_while_loader_workers_pin_memory() -> None:
    data = TensorDataset(*map(torch.cat, zip(*batches(64), strict=True)))
    training = Training("cuda", pin_memory=True)
    loader = DataLoader(data, batch_size=16, num_workers=2, pin_memory=True)
    losses = [float(training.step(batch).detach()) for batch in training.advice.batches(loader)]
    assert training.step.ready and training.failure == "" and losses[-1] < losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["default", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_replays_agree_for_all_kinds_of_networks(precision: str, make: Any) -> None:
    """No false alarm for convolutions, attention, recurrence and embeddings."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    kinds: list[tuple[nn.Module, Callable[[], Tensor]]] = [
        (torchvision.models.mobilenet_v3_small(), lambda: torch.randn(8, 3, 64, 64)),
        (torchvision.models.resnet18(), lambda: torch.randn(8, 3, 64, 64)),
        (
            nn.Sequential(nn.Embedding(100, 64), nn.TransformerEncoder(layer, 2)),
            lambda: torch.randint(0, 100, (8, 32)),
        ),
        (nn.LSTM(16, 32, 2, batch_first=True, dropout=0.1), lambda: torch.randn(8, 12, 16)),
    ]
    advice = Advice(Config(precision=precision, step_graph=True), device="cuda")
    advice.set_flags()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        with advice.autocast():
            output = model(x)
            loss = (output[0] if isinstance(output, tuple) else output).square().mean()
        advice.step(loss, optimizer)
        return loss

    for kind, draw in kinds:
        model = advice.prepare(kind)
        optimizer = make(model.parameters(), lr=1e-3, weight_decay=1e-4, **advice.optimizer)
        step = advice.capture(functools.partial(train, model, optimizer), draw())
        for _ in range(FIRST_REPLAY + 2):
            step(advice.place(draw()))
        assert isinstance(step, StepGraph) and step.failure == ""


def test_restore_refills_lists_that_a_failed_capture_popped() -> None:
    """Otherwise the script would raise an IndexError."""
    queue, recent = [1, 2, 3], deque([4, 5])

    def step() -> None:
        queue.pop()
        queue.pop(0)
        recent.popleft()

    objects = ObjectGraph(step, (), ())
    before = objects.read()
    step()
    objects.restore(before)
    assert (queue, list(recent)) == ([1, 2, 3], [4, 5])
