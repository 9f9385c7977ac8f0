"""Advice: each knob takes effect through its table row, and nothing else changes."""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves, tree_structure
from torch.utils.data import DataLoader, TensorDataset

from advisor.cache.config import Config
from advisor.errors import AdvisorWarning
from advisor.tuners.act import advice as advice_module
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.advice_usage import AdviceUsage, Served
from advisor.tuners.act.process_flags import ProcessFlags
from advisor.tuners.act.replays import Replays
from advisor.tuners.knobs import KNOBS
from tests.cache import examples


@pytest.fixture(autouse=True)
def two_threads(flags_restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set two threads, as if by default and not by the user."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(advice_module, "log_at_exit", lambda usage: None)
    torch.set_num_threads(2)


def train(advice: Advice, steps: int = 3) -> None:
    model = advice.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **advice.optimizer)
    data = TensorDataset(torch.randn(steps * 4, 3, 8, 8), torch.randint(0, 5, (steps * 4,)))
    for x, y in advice.batches(DataLoader(data, **advice.loader)):
        with advice.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        advice.step(loss, optimizer)


def test_no_advice_changes_nothing() -> None:
    flags = [knob.flag for knob in KNOBS if knob.flag is not None]
    before = [one.now() for one in flags]
    advice = Advice(Config(), device="cpu", batch_size=4, served=Served(status="miss"))
    advice.set_flags()
    model = nn.Linear(2, 2)
    assert advice.prepare(model) is model and "_compiled_call_impl" not in vars(model)
    assert advice.optimizer == {} and advice.loader == {"batch_size": 4}
    assert next(iter(advice.batches([x := torch.ones(1)]))) is x
    with advice.autocast():
        assert not advice.scaler.is_enabled() and not torch.is_autocast_enabled("cpu")
    assert before == [one.now() for one in flags]


def test_place_keeps_the_structure() -> None:
    pair = namedtuple("pair", ["x", "y"])
    advice = Advice(Config(channels_last=True), device="cpu")
    x = torch.randn(1, 2, 3, 4)
    for tree in (x, (x, 1), [x, "a"], {"a": x, "b": None}, pair(x, x), (x, {"deep": [x]})):
        placed = advice.place(tree)
        assert type(placed) is type(tree) and tree_structure(placed) == tree_structure(tree)
        images = [leaf for leaf in tree_leaves(placed) if isinstance(leaf, Tensor)]
        laid_out = [one.is_contiguous(memory_format=torch.channels_last) for one in images]
        assert laid_out and all(laid_out)


def test_model_that_overrides_compile_is_compiled_by_torch() -> None:
    """timm's ClassificationTask overrides it: its compile() wraps the inner model, which changes
    the names in the checkpoint."""

    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net: nn.Module = nn.Linear(2, 2)

        def compile(self, **_how: object) -> None:
            self.net = nn.Sequential(self.net)

    task = Advice(Config(compile="default"), device="cpu").prepare(Task())
    assert task._compiled_call_impl is not None
    plain = Advice(Config(compile="none"), device="cpu").prepare(nn.Linear(3, 4))
    assert plain._compiled_call_impl is None
    assert set(task.state_dict()) == {"net.weight", "net.bias"}


def optimizers_of(*models: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


@pytest.mark.parametrize("precision", ["default", "fp16"])
def test_step_clears_gradients_that_another_models_step_left(precision: str) -> None:
    """In a GAN, the generator's backward pass also fills the discriminator's gradients."""
    weights = []
    for advised in (True, False):
        torch.manual_seed(1)
        generator, discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
        ours, theirs = optimizers_of(generator, discriminator)
        advice = Advice(Config(precision=precision), device="cpu")

        def step(
            loss: Tensor, optimizer: torch.optim.Optimizer, advice: Any = advised and advice
        ) -> None:
            if advice:
                return advice.step(loss, optimizer)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        draw = torch.Generator().manual_seed(2)
        for _ in range(3):
            noise, real = torch.randn(4, 2, generator=draw), torch.randn(4, 3, generator=draw)
            step(-discriminator(generator(noise)).mean(), ours)
            step(discriminator(real).square().mean(), theirs)
        weights.append([*generator.parameters(), *discriminator.parameters()])
    torch.testing.assert_close(*weights)


def train_two_steps(advice: Advice, how: str) -> None:
    model = advice.prepare(nn.Linear(2, 1))
    (optimizer,) = optimizers_of(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = advice.scaler if how == "scaler" else torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        with advice.autocast():
            loss = model(torch.ones(1, 2)).float().sum()
        if how == "step":
            advice.step(loss / 65536, optimizer)
        elif how == "plain":
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss / 65536).backward()
            scaler.step(optimizer)
            scaler.update()
        schedule.step()


@pytest.mark.parametrize("how", ["step", "scaler", "own", "plain"])
def test_fp16_without_a_scaler_warns_once_and_keeps_the_scripts_hook(how: str) -> None:
    advice = Advice(Config(precision="fp16"), device="cpu", served=Served(reason="fast"))
    advice.set_flags()
    with advice.autocast():  # installs the check for a scaler
        pass
    hooked: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: hooked.append(optimizer))
    with warnings.catch_warnings(record=True, action="always") as warned:
        train_two_steps(advice, how)
    hook.remove()
    assert ["without a scaler" in str(one.message) for one in warned] == [True] * (how == "plain")
    assert len(hooked) == 2 and (advice.reason == "fast") == (how != "plain")
    lines = [one for one in advice.report().splitlines() if one.startswith("not in effect")]
    assert any("step" in line for line in lines) == (how == "plain")


DEFAULT = Config(precision="default", channels_last=False, threads=2, cudnn_benchmark=False)


def make_advice(config: Config, **more: Any) -> Advice:
    defaults: dict[str, Any] = {
        "reason": "1.84x torch's default at batch 128",
        "default": DEFAULT,
        "gains": {"flags": 1.1, "loop": 1.84, "capture": 6.4},
    }
    return Advice(config, device="cpu", served=Served(**defaults | more))


def test_reason_claims_only_knobs_in_effect() -> None:
    advice = make_advice(DEFAULT.replace(precision="bf16", channels_last=True, threads=1))
    assert "not in force yet; 1.84x" in advice.reason
    advice.set_flags()
    assert advice.reason == (
        "1.10x in force (flags); 1.84x once the loop also calls prepare, batches, autocast"
    )
    assert "next: capture would give 6.40x instead of 1.84x" in advice.report()
    train(advice)
    assert advice.reason == "1.84x torch's default at batch 128"
    assert [line for line in advice.report().splitlines() if line.startswith("not")] == []
    assert "in effect: threads=1" in advice.report()


def test_prepare_replaces_the_flags_of_a_script_without_prepare() -> None:
    advice = make_advice(
        DEFAULT.replace(precision="bf16"),
        flags=DEFAULT.replace(precision="tf32", cudnn_benchmark=True, threads=1),
    )
    advice.set_flags()
    assert torch.backends.cudnn.benchmark and torch.get_num_threads() == 1
    advice.prepare(nn.Linear(1, 1))
    assert not torch.backends.cudnn.benchmark and torch.get_num_threads() == 2
    assert torch.backends.cuda.matmul.allow_tf32  # bf16 includes it


@pytest.mark.parametrize("how", ["OMP_NUM_THREADS", "set_num_threads"])
def test_threads_that_the_user_set_stay(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "set_num_threads":
        torch.set_num_threads(3)
    else:
        monkeypatch.setenv(how, "2")
    before = torch.get_num_threads()
    advice = make_advice(DEFAULT.replace(threads=1))
    advice.set_flags()
    assert torch.get_num_threads() == before
    why = "it was set before" if how == "set_num_threads" else "the environment sets it"
    assert f"not by this advice: threads={before} stays: {why}; advised is threads=1" in (
        advice.report()
    )
    assert f"threads={before} stays" in advice.reason and "in force (flags)" not in advice.reason


@pytest.mark.parametrize("later", [2, 3])
def test_knob_that_the_script_changes_later_is_not_in_effect(later: int) -> None:
    advice = make_advice(DEFAULT.replace(threads=1, precision="tf32"))
    advice.set_flags()
    advice.prepare(nn.Linear(1, 1))
    assert "in effect: threads=1" in advice.report()
    torch.set_num_threads(later)
    now = f"threads={later} now: it was set since"
    assert advice.reason == f"1.84x torch's default at batch 128; but {now}"
    assert f"not by this advice: {now}; advised is threads=1" in advice.report()
    assert "in effect: threads=1" not in advice.report() and "in effect: tf32" in advice.report()
    make_advice(DEFAULT.replace(threads=1)).set_flags()  # keeps the user's setting
    assert torch.get_num_threads() == later
    torch.set_num_threads(1)
    assert "in effect: threads=1" in advice.report()
    other = make_advice(DEFAULT.replace(threads=3))
    other.set_flags()
    assert "threads=3 now: other advice set it since" in advice.report()
    assert "in effect: threads=3" in other.report()


def test_no_speed_up_is_claimed_if_no_flag_was_set() -> None:
    """Without set_flags(), and with flags that equal torch's defaults."""
    one_thread = DEFAULT.replace(threads=1)
    unset, plain = make_advice(one_thread), make_advice(one_thread, flags=DEFAULT)
    unset.prepare(nn.Linear(1, 1))
    assert unset.reason == "not in force yet; 1.84x once the script also calls set_flags"
    plain.set_flags()
    assert plain.reason == "not in force yet; 1.84x once the loop also calls prepare"
    assert "not in effect: threads=1: advice.prepare not used" in plain.report()


def test_no_speed_up_is_claimed_for_another_model() -> None:
    record = examples.record()
    advice = make_advice(DEFAULT.replace(threads=1), record=record)
    advice.set_flags()
    with pytest.warns(AdvisorWarning, match="is not the one tuned as"):
        advice.prepare(nn.Linear(1, 1))
    known = f"no speed-up is known: this model is not the one tuned as {record.target.name}"
    assert advice.reason.startswith(known) and advice.report().splitlines()[0] == advice.reason
    assert advice.reason.endswith("; 1.84x torch's default at batch 128")


def test_release_restores_flags_except_those_changed_since() -> None:
    torch.backends.cudnn.benchmark = True
    precision = torch.get_float32_matmul_precision()
    flags = ProcessFlags()
    flags.put(Config(threads=1, cudnn_benchmark=False))
    flags.put(Config(threads=3, precision="tf32"))
    expected = Config(threads=3, cudnn_benchmark=False, precision="tf32")
    assert flags.config == expected and flags.changed == {}
    torch.backends.cudnn.benchmark = True
    assert flags.config == expected.without("cudnn_benchmark")
    assert flags.changed == {"cudnn_benchmark": True}
    flags.release(Config(threads=1))  # another config: ignored
    assert torch.get_num_threads() == 3
    flags.release()
    assert torch.get_num_threads() == 2 and torch.backends.cudnn.benchmark
    assert torch.get_float32_matmul_precision() == precision
    assert flags.config == Config() and flags.changed == {}
    flags.put(Config(threads=1))
    torch.set_num_threads(3)
    flags.release()
    assert torch.get_num_threads() == 3


HALF_USED = "2.00x; once the loop also calls batches; without effect: channels_last"


@pytest.mark.parametrize(
    ("how", "messages"),
    [
        ("all", [("INFO", "advice at the end: 2.00x")]),
        ("half", [("WARNING", f"advice at the end: {HALF_USED}")]),
        ("none", []),
    ],
)
def test_one_line_is_logged_at_exit(
    how: str,
    messages: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    usages: list[AdviceUsage] = []
    monkeypatch.setattr(advice_module, "log_at_exit", usages.append)
    default, advised = Config(channels_last=False), Config(channels_last=True)
    known = Served(reason="2.00x", default=default)
    advice = Advice(advised, device="cpu", served=known)
    if how == "none":
        Advice(default, device="cpu", served=known).set_flags()
        Advice(advised, device="cpu").set_flags()
    else:
        advice.prepare(nn.Conv2d(1, 1, 1))
    if how == "all":
        list(advice.batches([]))
    caplog.set_level("INFO")
    for one in usages:
        one.log()
    assert [(record.levelname, record.message) for record in caplog.records] == messages


class Replaying(nn.Linear):
    """Acts like a CUDA graph: each call writes its output to the same memory."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.output = torch.zeros(4, 2)
        self._compiled_call_impl = self.replay

    def replay(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            self.output.copy_(nn.functional.linear(x, self.weight, self.bias))
        return {"logits": self.output}


@pytest.mark.parametrize("grad", [True, False])
def test_kept_outputs_of_replays_are_not_overwritten(grad: bool) -> None:
    model = Replaying()
    Replays().attach(model)
    with torch.set_grad_enabled(grad):
        first, second = (model(torch.full((4, 2), float(n)))["logits"] for n in (1, 2))
    assert not torch.equal(first, second)


def test_accumulating_gradients_are_moved_out_of_a_replays_memory() -> None:
    model, replays, x = Replaying(), Replays(), torch.ones(4, 2)
    replays.attach(model)
    model.weight.grad = buffer = torch.ones(2, 2)
    model(x)
    moved = model.weight.grad
    assert moved is not buffer and torch.equal(moved, buffer)
    model(x)
    assert model.weight.grad is moved  # already moved
    # Gradients of a finished step need no copy.
    replays.stepped(optimizers_of(model))
    model(x)
    assert model.weight.grad is None
    # Gradients that the script will clear need no copy either. The bias is in no optimizer.
    dropped, kept = torch.ones(2, 2), torch.ones(2)
    model.weight.grad, model.bias.grad = dropped, kept
    replays.let_go([torch.optim.SGD([model.weight], lr=0.1)])
    model(x)
    assert model.weight.grad is dropped and model.bias.grad is not kept
    # The next batch of the same step accumulates into the gradient.
    model(x)
    assert model.weight.grad is not dropped
    torch.testing.assert_close(model.weight.grad, dropped)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["reduce-overhead", "cudagraphs"])
def test_cudagraphs_accumulate_and_evaluate_like_eager(mode: str) -> None:
    results = []
    for compile in (mode, "none"):
        torch.manual_seed(0)
        advice = Advice(Config(compile=compile), device="cuda")
        model = advice.prepare(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(12)]
        for number, x in enumerate(advice.batches(data)):
            loss = model(x).square().mean()
            losses.append(loss.detach())
            advice.scaler.scale(loss).backward()
            if number % 3 == 2:
                advice.scaler.step(optimizer)
                advice.scaler.update()
                optimizer.zero_grad(set_to_none=number % 2 == 0)
        for x in advice.batches(data):
            advice.step(model(x).square().mean(), optimizer)
        with torch.no_grad():
            losses += [model(x.cuda()) for x in data]
        results.append(torch.cat([loss.flatten() for loss in losses]))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
