"""A captured step trains as the step itself does, or falls back to it and says so."""

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

EARLY = 2 * CHECKED
on_gpu = functools.partial(pytest.param, marks=pytest.mark.gpu)
everywhere = pytest.mark.parametrize("where", ["cpu", on_gpu("cuda")])


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> AtenRecorder:
    """What captures on a CPU here; a CUDA graph does on CUDA."""
    made = AtenRecorder()
    monkeypatch.setitem(RECORDERS, "cpu", lambda: made)
    return made


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
        where: str = "cpu",
        *,
        graph: bool = True,
        pin_memory: bool = False,
        make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        hinder: Callable[[Tensor], Any] = lambda loss: None,
        scale: float = 0.0,
        **how: Any,
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        config = Config(step_graph=graph, pin_memory=pin_memory)
        config = config.replace(precision="fp16" if scale else "default")
        self.advice = Advice(config, device=where)
        if scale:
            self.advice.scaler = torch.amp.GradScaler(where, init_scale=scale, growth_interval=7)
        self.model = self.advice.prepare(Net())
        settings = {"lr": 0.05, "fused": True, **how}
        given = {name: value for name, value in settings.items() if value is not None}
        self.optimizer = make(self.model.parameters(), **given)
        self.hinder = hinder
        self.step: Any = self.advice.capture(self.train_step, next(batches(1)))

    def train_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        with self.advice.autocast():
            loss = functional.cross_entropy(self.model(x), y)
        self.hinder(loss)
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


def same(ours: list[float], theirs: list[float]) -> bool:
    return ours == pytest.approx(theirs, rel=1e-3)


def test_a_step_that_is_not_captured_as_advised_is_named_once() -> None:
    advice = Advice(Config(step_graph=True), device="cpu")
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.warns(AdvisorWarning, match=r"advice\.capture"):
        advice.step((weight * 2).sum(), optimizer)
    advice.step((weight * 2).sum(), optimizer)


@everywhere
@pytest.mark.parametrize(
    ("make", "how"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
        (torch.optim.SGD, {"weight_decay": 0.1, "fused": None}),
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.RMSprop, {"lr": 1e-3, "fused": None}),  # made capturable on a GPU
    ],
)
def test_replays_train_as_the_step_does(where: str, make: Any, how: dict[str, Any]) -> None:
    runs = [Training(where, graph=graph, make=make, **how) for graph in (True, False)]
    losses = [run.run(24) for run in runs]
    assert runs[0].failure == ""
    assert same(*losses)
    for ours, theirs in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    norm = runs[0].model.get_submodule("norm")
    assert int(norm.get_buffer("num_batches_tracked")) == 24
    assert [type(g["lr"]) for g in runs[0].optimizer.param_groups] == [float]


@everywhere
@pytest.mark.parametrize("scale", [2.0**16, 2.0**36], ids=["as it is", "skipping at first"])
@pytest.mark.parametrize(
    ("make", "how"),
    [(torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), (torch.optim.AdamW, {"lr": 1e-3})],
)
def test_scaled_replays(where: str, make: Any, how: dict[str, Any], scale: float) -> None:
    runs = [Training(where, graph=graph, make=make, scale=scale, **how) for graph in (True, False)]
    losses = [run.run(24) for run in runs]
    assert runs[0].failure == ""
    assert losses[0] == pytest.approx(losses[1], rel=2e-3 if where == "cpu" else 2e-2)
    scales = [run.advice.scaler.get_scale() for run in runs]
    assert scales[0] == scales[1] != scale
    # The script's factor is the graph's, too.
    runs[0].advice.scaler.set_growth_factor(4.0)
    assert "GradScaler" in runs[0].step._captured.objects.changed()


def own_scaler(where: str, *, update: bool = True, fails: Callable[[], bool] = bool) -> Any:
    """A step with the script's own scaler, which it may not update, and may fail before it does."""
    torch.manual_seed(0)
    advice = Advice(Config(precision="fp16", step_graph=True), device=where)
    model = advice.prepare(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **advice.optimizer)
    scaler = torch.amp.GradScaler(where)

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


@everywhere
def test_the_scaler_may_be_the_script_s_own(where: str) -> None:
    step, advice, _scaler = own_scaler(where)
    losses = [float(step(batch).detach()) for batch in advice.batches(batches(30))]
    assert step.failure == "" and step.ready and losses[-1] < losses[0]


def test_a_scaler_that_is_updated_outside_is_named() -> None:
    step, advice, scaler = own_scaler("cpu", update=False)
    with pytest.warns(AdvisorWarning, match="call update in the step too"):
        for batch in advice.batches(batches(EARLY + 2)):
            step(batch)
            scaler.update()


def test_a_scaled_step_that_fails_within_a_capture_is_forgotten(recorder: AtenRecorder) -> None:
    step, advice, _scaler = own_scaler("cpu", fails=lambda: recorder.recordings > 0)
    *before, captured, after = advice.batches(batches(CHECKED + 2))
    for batch in before:
        step(batch)
    with pytest.warns(AdvisorWarning, match="whatever else"):
        step(captured)  # which puts `recordings` back as well
    step(after)


@pytest.mark.parametrize(
    "how", [{}, {"nesterov": True}, {"dampening": 0.1}, {"dampening": 0.1, "maximize": True}]
)
def test_a_first_step_that_a_scaler_skips_leaves_no_momentum(how: dict[str, Any]) -> None:
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        advice = Advice(Config(precision="fp16", step_graph=True), device="cpu")
        weights = [nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(3))]
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=fused, **how)
        advice._uncaptured = False  # nobody is to be told of it here
        for number in range(6):
            factor = math.inf if number in (0, 1, 3) else 1.0 + number
            advice.step(sum((w * w).sum() for w in weights) * factor, optimizer)  # type: ignore[arg-type]
        found.append(
            torch.cat([*weights, *(optimizer.state[w]["momentum_buffer"] for w in weights)])
        )
    torch.testing.assert_close(*found)
    assert found[0].isfinite().all()


def shorter(training: Training) -> list[float]:
    losses = training.run(10)
    (short,) = training.advice.batches(batches(1, 50, size=5))
    return [*losses, float(training.step(short).detach()), *training.run(5, first=60)]


def freezing(training: Training) -> list[float]:
    training.run(EARLY + 2)
    convolve = training.model.get_parameter("convolve.weight").requires_grad_(False)
    held = convolve.clone()
    losses = training.run(6, first=20)
    assert torch.equal(convolve, held)
    return losses


def resuming(training: Training) -> list[float]:
    training.run(12)
    saved = copy.deepcopy([training.model.state_dict(), training.optimizer.state_dict()])
    training.run(5, first=30)
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    return training.run(8, first=50)


ADAMW = {"make": torch.optim.AdamW, "lr": 1e-2}


@everywhere
@pytest.mark.parametrize(
    ("script", "how"),
    [
        (shorter, {}),
        (freezing, {}),
        (resuming, ADAMW),
    ],
)
def test_what_a_script_does_between_steps_is_followed(
    where: str, script: Callable[[Training], list[float]], how: dict[str, Any]
) -> None:
    runs = [Training(where, graph=graph, **how) for graph in (True, False)]
    losses = [script(run) for run in runs]
    assert same(*losses) and runs[0].failure == ""


HINDRANCES: list[tuple[dict[str, Any], str]] = [
    ({"hinder": lambda loss: loss.item()}, "waits for the device"),
    ({"hinder": lambda loss: print(end="") if loss > 0 else 1 / 0}, "waits for the device"),
]


@pytest.mark.parametrize(
    ("where", "how", "reason"),
    [
        *(("cpu", *one) for one in HINDRANCES),
        *(on_gpu("cuda", *one) for one in HINDRANCES),
        on_gpu("cuda", HINDRANCES[0][0], r"waits for the device \(test_step_graph"),
        on_gpu("cuda", {"hinder": lambda loss: loss.cpu()}, "waits for the device"),
        on_gpu("cuda", {"hinder": lambda loss: torch.cuda.synchronize()}, "cannot hold"),
    ],
)
def test_what_cannot_be_captured_is_named(where: str, how: dict[str, Any], reason: str) -> None:
    training = Training(where, **how)
    with pytest.warns(AdvisorWarning, match=reason) as seen:
        losses = training.run(20)
    assert len([w for w in seen if issubclass(w.category, AdvisorWarning)]) == 1
    assert training.failure and all(loss == loss for loss in losses)
    assert losses[-1] < losses[0]
    # Nothing is left of the capture: the generator draws, graphs can be made.
    assert torch.rand(1, device=where) >= 0
    again = Training(where)
    again.run(12)
    assert again.failure == ""


def pair(number: int, size: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(size, 3, generator=draw), torch.randn(size, 2, generator=draw)


class Ramp(nn.Linear):
    """Reads its settings by their names."""

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
    """Reads of another object bear its attributes' names."""

    loss = staticmethod(functional.mse_loss)
    rate = 1.0
    rare: Any = None


class Owner:
    """A trainer of one's own: its step is a method, and reads what stands beside it."""

    scale = 1.0

    def __init__(
        self,
        graph: bool = True,
        beside: tuple[Any, ...] = (),
        inside: Callable[[Owner], Any] = lambda owner: None,
    ) -> None:
        torch.manual_seed(3)
        self.model, self.part = Ramp(), Part()
        self.average = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, fused=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.rare = [torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1000)]
        self.part.rare = self.rare[0]
        self.decay = 0.5
        self.seen = 0
        self.said: list[Tensor] = []
        self.lately: deque[int] = deque(maxlen=50)
        self.total = torch.zeros(())
        self.advice = Advice(Config(step_graph=graph), device="cpu")
        self.inside = inside
        self.step: Any = self.advice.capture(self.train, (*pair(0), *beside))

    def train(self, batch: tuple[Any, ...]) -> Tensor:
        loss = self.weighed(self.model(batch[0]), batch[1])
        self.advice.step(loss, self.optimizer)
        with torch.no_grad():
            for ours, theirs in zip(
                self.average.parameters(), self.model.parameters(), strict=True
            ):
                ours.lerp_(theirs, 1 - self.decay)
        self.inside(self)
        return loss

    def weighed(self, output: Tensor, wanted: Tensor) -> Tensor:
        loss: Tensor = self.part.loss(output, wanted) * self.part.rate * self.scale
        return loss * SETTINGS["weight"]

    def run(self, steps: int = 14, between: Callable[[Owner], Any] = lambda owner: None) -> Any:
        losses = []
        for number in range(steps):
            losses.append(float(self.step(pair(number)).detach()))
            between(self)
        weights = [w.detach().clone() for m in (self.model, self.average) for w in m.parameters()]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return losses, weights, self.decay, self.seen, rates, self.total, len(self.said)


def toggle(owner: Owner) -> None:
    owner.model.train(not owner.model.training)


def weigh(owner: Owner) -> None:
    SETTINGS["weight"] *= 0.9


def slip(owner: Owner) -> None:
    owner.optimizer.param_groups[0]["weight_decay"] += 0.01


def fading(*names: str) -> Callable[[Owner], None]:
    """Lets an attribute become less, of the owner or of a part."""

    def fade(owner: Owner) -> None:
        one = functools.reduce(getattr, names[:-1], owner)
        setattr(one, names[-1], 0.9 * getattr(one, names[-1]) + 0.01)

    return fade


ANNEAL, SHRINK = fading("decay"), fading("__class__", "scale")
FADING = [fading("model", "first"), fading("model", "second"), fading("part", "rate")]


def add_up(owner: Owner) -> None:
    owner.total = owner.total + owner.model.weight.detach().sum()


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def as_they_were() -> None:
        monkeypatch.setitem(SETTINGS, "weight", 1.0)
        monkeypatch.setattr(Owner, "scale", 1.0)

    as_they_were()
    return as_they_were


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        (lambda owner: owner.schedule.step(), "changes .*(lr|last_epoch|_step_count)"),
        # Before the rate changes, wherever the schedule is.
        (lambda owner: owner.rare[0].step(), "changes .* in Python"),
        (lambda owner: owner.part.rare.step(), "changes .* in Python"),
        (lambda owner: setattr(owner, "seen", owner.seen + 1), r"changes self\.seen in Python"),
        (ANNEAL, r"changes self\.decay in Python"),
        (toggle, "changes .*training"),
        (weigh, r"changes SETTINGS\.weight"),
        (SHRINK, r"changes self\.scale"),
        (lambda owner: owner.said.append(torch.zeros(())), r"changes self\.said"),
        (lambda owner: owner.lately.append(1), r"changes self\.lately"),
        (lambda owner: random.random(), "draws random numbers"),
        (add_up, "(the output of a replay|a replay.s change)"),
    ],
)
def test_what_a_step_changes_in_python_is_never_frozen(
    inside: Callable[[Owner], Any], reason: str, settings: Callable[[], None]
) -> None:
    settings()
    with pytest.warns(AdvisorWarning, match=reason) as said:
        ours = Owner(inside=inside).run()
    assert len(said) == 1
    settings()
    assert repr(ours) == repr(Owner(graph=False, inside=inside).run())


@pytest.mark.parametrize("between", [ANNEAL, toggle, weigh, SHRINK, slip, *FADING])
@pytest.mark.parametrize("often", [1, 5])
def test_what_a_script_changes_between_steps_is_followed_or_named(
    between: Callable[[Owner], Any], often: int, settings: Callable[[], None]
) -> None:
    ends = []
    for graph in (True, False):
        settings()
        owner, numbers = Owner(graph), iter(range(1, 100))

        def now_and_then(owner: Owner, numbers: Iterator[int] = numbers) -> None:
            if next(numbers) % often == 0:
                between(owner)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if often == 1 else "error")
            ends.append(owner.run(16, now_and_then))
        assert not graph or ("changed at every step" in owner.step.failure) is (often == 1)
    assert repr(ends[0]) == repr(ends[1])


def test_a_schedule_and_a_counter_outside_cost_no_capture(recorder: AtenRecorder) -> None:
    def outside(owner: Owner) -> None:
        owner.schedule.step()
        owner.seen += 1
        owner.said.append(owner.total)

    ends = [Owner(graph).run(16, outside) for graph in (True, False)]
    assert repr(ends[0]) == repr(ends[1])
    assert recorder.recordings == 1 and recorder.replays > 10


def test_a_deep_change_is_found_by_a_later_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "CHECKED_AGAIN", 4)
    deep, owner = {"settings": {"inner": {"weight": 1.0}}}, Owner()
    owner.model.register_forward_hook(
        lambda _net, _given, out: out * deep["settings"]["inner"]["weight"]
    )
    owner.run(EARLY + 2)
    assert owner.step.ready and not owner.step.failure
    deep["settings"]["inner"]["weight"] = 0.5
    with pytest.warns(AdvisorWarning, match="(the output of a replay|a replay.s change)"):
        owner.run(8)


@pytest.mark.parametrize("when", ["before", "later"])
def test_process_groups(when: str, request: pytest.FixtureRequest, recorder: AtenRecorder) -> None:
    """No graph may hold its work: NCCL would wait for the graph at its end."""
    owner = Owner() if when == "later" else None
    request.getfixturevalue("one_process")
    with pytest.warns(AdvisorWarning, match="process group") as said:
        (owner or Owner()).run(CHECKED + 1)
    assert len(said) == 1 and recorder.recordings == 0


def test_counters_of_steps_are_on_the_device_only_while_captured() -> None:
    """And in no checkpoint: an optimizer that loads one waits for the device at every step."""
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


@pytest.mark.parametrize("left_out", ["aten::lerp_", "aten::mul_"])
def test_a_faulty_recorder_is_caught(left_out: str, recorder: AtenRecorder) -> None:
    """An average that stands still; a weight decay of 5e-6 at each step."""

    def decay(owner: Owner) -> None:
        with torch.no_grad():
            for weight in owner.model.parameters():
                weight.mul_(1 - 5e-6)

    recorder.fault = left_out.__eq__
    with pytest.warns(AdvisorWarning, match="a replay.s change of"):
        Owner(inside=decay).run()


def test_what_differs_from_run_to_run_is_no_disagreement(recorder: AtenRecorder) -> None:
    """As atomics: sums in another order, whatever the state of the random numbers."""
    draw = torch.Generator().manual_seed(5)

    def jitter(owner: Owner) -> None:
        with torch.no_grad():
            for weight in owner.model.parameters():
                weight.add_(torch.randn(weight.shape, generator=draw), alpha=1e-3)

    Owner(inside=jitter).run()
    assert recorder.replays > 10


def test_values_beside_the_tensors(recorder: AtenRecorder) -> None:
    owner = Owner(beside=(None, "en", 1))
    for number in range(14):
        owner.step((*pair(number), None, "en", 3 if number == 9 else 1))
    assert recorder.recordings == 1 and recorder.replays == 14 - CHECKED - 1


def test_batches_that_are_never_like_the_example_are_named(recorder: AtenRecorder) -> None:
    owner = Owner()
    with pytest.warns(AdvisorWarning, match="nothing is replayed") as said:
        for number in range(IN_A_ROW + 3):
            owner.step(pair(number, size=5))
    assert len(said) == 1 and recorder.recordings == 0


@pytest.mark.parametrize(
    ("call", "forward", "size", "reason"),
    [
        (CHECKED, 1, 4, "to capture it"),
        (CHECKED, 2, 4, "to compare"),
        (CHECKED, 3, 4, "the graph and the eager step"),
        (EARLY + 2, 1, 5, "another shape"),
        (EARLY + 2, 0, 4, "to replay"),
    ],
)
def test_no_memory_neither_raises_nor_trains_a_batch_twice(
    call: int, forward: int, size: int, reason: str, recorder: AtenRecorder
) -> None:
    ends: list[Any] = []
    for graph in (True, False):
        owner, left = Owner(graph), [0]

        def run_out(*_any: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("out of memory")

        owner.model.register_forward_pre_hook(run_out)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for number in range(EARLY + 6):
                if graph and number == call:
                    left[0], recorder.exhausted = forward, forward == 0
                owner.step(pair(number, size=size if number == call else 4))
                left[0], recorder.exhausted = 0, False
        assert [reason in str(one.message) for one in said] == [True] * graph
        ends.append([w.detach().clone() for w in owner.model.parameters()])
    assert repr(ends[0]) == repr(ends[1])


@everywhere
def test_losses_that_are_kept_stay_what_they_were(where: str) -> None:
    training = Training(where)
    kept = [training.step(batch) for batch in training.advice.batches(batches(20))]
    assert len({float(loss) for loss in kept}) == 20


@pytest.mark.gpu
def test_a_capture_beside_pinning_workers() -> None:
    made = TensorDataset(*map(torch.cat, zip(*batches(64), strict=True)))
    training = Training("cuda", pin_memory=True)
    loader = DataLoader(made, batch_size=16, num_workers=2, pin_memory=True)
    losses = [float(training.step(batch).detach()) for batch in training.advice.batches(loader)]
    assert training.step.ready and training.failure == "" and losses[-1] < losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["default", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_networks_agree_with_their_replays(precision: str, make: Any) -> None:
    """Convolutions, attention, recurrence and a table of embeddings: no false alarm."""
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
        for _ in range(EARLY + 2):
            step(advice.place(draw()))
        assert isinstance(step, StepGraph) and step.failure == ""


def test_what_a_failed_attempt_has_taken_from_a_list_is_there_again() -> None:
    """It was an IndexError in the user's run."""
    queue, lately = [1, 2, 3], deque([4, 5])

    def step() -> None:
        queue.pop()
        queue.pop(0)
        lately.popleft()

    objects = ObjectGraph(step, (), ())
    before = objects.read()
    step()
    objects.restore(before)
    assert (queue, list(lately)) == ([1, 2, 3], [4, 5])
