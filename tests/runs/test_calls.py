"""Configs compared within a run: a script's own calls, made again; the run goes on as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advisor.cache.config import Config, Value
from advisor.tuners import compiling
from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.act.pilot.pilot import Pilot
from advisor.tuners.act.pilot.protocol import BlockRequest, BlockResult
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.decisions import POINTS
from advisor.tuners.measure.run.recorded_steps import RecordedSteps
from advisor.tuners.measure.run.run import comparison
from advisor.tuners.measure.runner import UNVERIFIED
from advisor.tuners.measure.samples import Sample
from advisor.tuners.search.space import Space
from tests.runs.forked import COMPARES_S, TOLERANCE, Ordered, left_behind

HALF: Mapping[str, Value] = {"precision": "bf16"}


class Asking(Ordered):
    """A guide that has configs compared one after the other, then leaves the script unmodified."""

    def __init__(self, *asked: Mapping[str, Value], careful: bool = False) -> None:
        super().__init__(partial(comparisons, asked))
        self.watch = RecordedSteps(careful=careful)
        self.compiled: list[int] = []

    def next(self, result: BlockResult) -> BlockRequest:
        self.compiled.append(graphs_compiled())
        return super().next(result)


def comparisons(asked: Sequence[Mapping[str, Value]], space: Space) -> Iterator[BlockRequest]:
    own = Config(space.default | {"compile": "none"})
    for number, values in enumerate(asked):
        # What the first comparison has kept serves the next ones.
        steps = 1 if number else POINTS
        compare = comparison(own.replace(**values), own, TOLERANCE, COMPARES_S)
        yield BlockRequest(config=own, own=own, steps=steps, compare=compare)
    yield BlockRequest(config=own, own=own)


class Net(nn.Module):
    """Where it is given labels it returns its loss too, as Hugging Face's models do.

    Args:
        inner, outer: what becomes of its hidden values, and of its outputs.
    """

    def __init__(
        self,
        dropout: float = 0.3,
        *,
        inner: Callable[[Tensor], Tensor] = nn.Identity(),  # noqa: B008 # has no state
        outer: Callable[[Tensor], Tensor] = nn.Identity(),  # noqa: B008
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.first, self.norm = nn.Linear(32, 64), nn.BatchNorm1d(64)
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(64, 4)
        self.inner, self.outer = inner, outer

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.inner(self.norm(self.first(self.embedding(tokens).mean(1))).relu())
        found = self.outer(self.last(self.dropout(hidden)))
        if labels is None:
            return found
        return {"loss": nn.functional.cross_entropy(found.float(), labels), "logits": found}


def trained(
    net: nn.Module,
    guide: Asking | None,
    *,
    within: bool = False,
    micro: int = 1,
    steps: int = 10,
    sizes: Callable[[int], tuple[int, ...]] = lambda step: (32, 5),
) -> None:
    """A script's steps, each of some micro-batches; `within`: the model returns its loss;
    `sizes`: of a step's tokens."""
    PROCESS_FLAGS.release()  # what tests of other files have left
    pilot = None if guide is None else Pilot(guide, guide.watch)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(micro):
            tokens = torch.randint(10, sizes(step))
            labels = torch.randint(4, tokens.shape[:1])
            if within:
                loss = net(tokens, labels=labels)["loss"]
            else:
                loss = nn.functional.cross_entropy(net(tokens), labels)
            (loss / micro).backward()
        optimizer.step()
    if pilot is not None and guide is not None:
        pilot.release()
        guide.watch.close()
        assert left_behind() == []


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


def beside_alone(make: Callable[[], Net], guide: Asking, **how: Any) -> tuple[Net, Net]:
    """A model that is trained while it is compared, and one with the same weights that trains
    alone, to the same bits."""
    net, alone = make(), make()
    alone.load_state_dict(net.state_dict())
    trained(alone, None, **how)
    trained(net, guide, **how)
    weights = alone.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in net.state_dict().items())
    return net, alone


@pytest.mark.parametrize("how", [{}, {"within": True}, {"micro": 3}])
def test_half_precision_passes_and_the_run_is_the_same_to_the_bit(how: dict[str, Any]) -> None:
    guide = Asking(HALF, {"fused_optimizer": True})
    beside_alone(Net, guide, **how)
    assert [one.outcome for one in guide.results] == ["ok", "ok"], guide.results


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(lambda step: (32 - 12 * (step % 3 == 2), 5), id="a short last batch"),
        pytest.param(lambda step: (8 + 3 * step, 5), id="other sizes in each step"),
    ],
)
def test_batches_of_other_sizes_are_compared(
    sizes: Callable[[int], tuple[int, ...]], dropout: float
) -> None:
    guide = Asking(HALF, HALF | {"fused_optimizer": True})
    trained(Net(dropout), guide, steps=14, sizes=sizes)
    assert [one.outcome for one in guide.results] == ["ok", "ok"], guide.results


def test_steps_of_one_signature_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short batch runs no compiled code, so that it would hide a fault of that code."""
    repeated: list[int] = []
    draw = RecordedSteps.sample

    def sample(steps: RecordedSteps, config: Config, point: int, seed: int) -> Sample:
        found = draw(steps, config, point, seed)
        repeated.append(len(found.outputs["output 0"]))
        return found

    monkeypatch.setattr(RecordedSteps, "sample", sample)
    trained(Net(), Asking(HALF), steps=14, sizes=lambda step: (32 - 12 * (step % 3 == 2), 5))
    assert set(repeated) == {32 * 4}


@pytest.mark.parametrize("steps", [10, POINTS + 2])  # or it leaves in the middle
def test_nothing_of_the_model_or_its_optimizer_stays_alive(steps: int) -> None:
    net, guide = Net(), Asking(HALF)
    trained(net, guide, steps=steps)
    assert bool(guide.results) == (steps == 10)
    there = weakref.ref(net)
    del net
    gc.collect()
    assert there() is None


class _Off(torch.autograd.Function):
    """What it is given; in bf16 with a gradient that is off by as much as `by`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by if x.dtype == torch.bfloat16 else 0.0
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * (1 + ctx.by), None


def failing(found: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        raise RuntimeError("no half")
    return found


@pytest.mark.parametrize(
    ("how", "outcome", "said"),
    [
        # Right outputs, and wrong gradients of what comes before.
        ({"inner": lambda hidden: _Off.apply(hidden, 2.0)}, "wrong", "gradient"),
        (
            {"outer": lambda found: found * (1.2 if found.dtype == torch.bfloat16 else 1.0)},
            "wrong",
            "allowed",
        ),
        ({"outer": failing}, "failed", "RuntimeError: no half"),
    ],
)
def test_what_is_wrong_is_found_and_the_script_goes_on(
    how: dict[str, Any], outcome: str, said: str
) -> None:
    guide = Asking(HALF)
    trained(Net(**how), guide)
    assert guide.results[0].outcome == outcome, guide.results
    assert said in guide.results[0].reason
    assert guide.results[0].blames == ("format" if outcome == "wrong" else "")


def test_what_was_compiled_is_compared_without_compiling_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "_by_inductor", lambda _mode: {"backend": "eager"})
    guide = Asking({**HALF, "compile": "default"}, HALF, {**HALF, "compile": "default"})
    trained(Net(), guide, steps=12)
    assert [one.outcome for one in guide.results] == ["ok"] * 3, guide.results
    assert guide.compiled[0] == guide.compiled[2]


class Hiding(Net):
    """Returns its loss where nobody sees it."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        loss = super().forward(tokens, labels)["loss"]
        return type("Hidden", (), {"__getitem__": lambda _self, _name: loss})()


def test_of_a_model_without_gradients_of_outputs_no_end_of_steps_is_looked_at() -> None:
    guide = Asking(HALF)
    trained(Hiding(), guide, within=True, steps=8 * POINTS + 10)
    assert guide.results[0].outcome == UNVERIFIED
    assert guide.results[0].reason == "no gradient came back to what the model returned"


class Counting(Net):
    """Keeps what it came to in an attribute, and rebinds a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        found = super().forward(tokens)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * found.detach().mean(0)
        return found * (1 + 0.01 * self.calls)


class Collecting(Net):
    """Keeps what it came to in a list, or what else it is given."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        found = super().forward(tokens)
        if isinstance(self.kept, list):
            self.kept.append(found.detach())
        elif isinstance(self.kept, torch.Generator):
            found = found + torch.randn(4, generator=self.kept)
        else:
            self.kept += found.detach().mean(0)
        return found


def test_where_a_run_counts_what_calls_leave_behind_is_put_back() -> None:
    guide = Asking(HALF, careful=True)
    net, alone = beside_alone(Counting, guide)
    assert guide.results[0].outcome == "ok", guide.results
    assert vars(net)["calls"] == vars(alone)["calls"] == 10


@pytest.mark.parametrize(
    "kept", [list, lambda: torch.zeros(4), lambda: torch.Generator().manual_seed(3)]
)
def test_where_a_run_counts_a_model_that_changes_more_is_not_called_again(kept: Any) -> None:
    guide = Asking(HALF, careful=True)
    net, _ = beside_alone(lambda: Collecting(kept()), guide)
    assert guide.results[0].outcome == UNVERIFIED
    assert "changes Collecting.kept, which could not be restored" in guide.results[0].reason
    assert not isinstance(found := vars(net)["kept"], list) or len(found) == 10


def test_where_a_run_counts_hooks_of_the_script_do_not_run_again() -> None:
    net, guide, seen = Net(), Asking(HALF, careful=True), []
    net.first.register_forward_hook(lambda _module, _args, found: seen.append(found.shape))
    trained(net, guide)
    assert guide.results[0].outcome == UNVERIFIED and "hooks" in guide.results[0].reason
    assert len(seen) == 10


def test_memory_that_is_full_within_the_scripts_own_step_costs_the_comparison_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("full")

    guide = Asking(HALF)
    monkeypatch.setattr("advisor.tuners.measure.run.recorded_steps._fresh", full)
    beside_alone(Net, guide)
    assert guide.results[0].outcome == UNVERIFIED and "full" in guide.results[0].reason
