"""Compares configs within a run by repeating the script's calls. The run must not change."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli

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
from tests.runs.forked import COMPARE_LIMIT_S, TOLERANCE, Scaled, ScriptedGuide, left_behind

HALF: Mapping[str, Value] = {"precision": "bf16"}


class ComparingGuide(ScriptedGuide):
    """A guide that compares configs one by one, then leaves the script unmodified."""

    def __init__(self, *values_list: Mapping[str, Value], careful: bool = False) -> None:
        super().__init__(partial(comparisons, values_list))
        self.recorder = RecordedSteps(careful=careful)
        self.compiled: list[int] = []

    def next(self, result: BlockResult) -> BlockRequest:
        self.compiled.append(graphs_compiled())
        return super().next(result)


def comparisons(values_list: Sequence[Mapping[str, Value]], space: Space) -> Iterator[BlockRequest]:
    """Requests that compare each config; one with a batch is repeated at this batch instead."""
    own = Config(space.default | {"compile": "none"})
    for number, values in enumerate(values_list):
        # Later comparisons reuse the steps that the first one recorded.
        steps = 1 if number else POINTS
        replay = {"batch": int(values["batch"] or 0), "passes": 2} if "batch" in values else {}
        config = Config(own | values).without("batch")
        compare = comparison(config, own, TOLERANCE, COMPARE_LIMIT_S, **replay)
        yield BlockRequest(config=own, own=own, steps=steps, compare=compare)
    yield BlockRequest(config=own, own=own)


class Net(nn.Module):
    """Returns its loss too if it is given labels, as Hugging Face's models do.

    Args:
        inner, outer: applied to its hidden values and to its outputs.
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
        outputs = self.outer(self.last(self.dropout(hidden)))
        if labels is None:
            return outputs
        return {"loss": nn.functional.cross_entropy(outputs.float(), labels), "logits": outputs}


def train(
    net: nn.Module,
    guide: ComparingGuide | None,
    *,
    model_loss: bool = False,
    micro: int = 1,
    steps: int = 10,
    sizes: Callable[[int], tuple[int, ...]] = lambda step: (32, 5),
    scales: bool = False,
    criterion: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> None:
    """Makes a script's steps, each of `micro` micro-batches. `model_loss`: the model returns its
    loss; `sizes`: shape of the tokens by step; `scales`: the loss is changed in place."""
    PROCESS_FLAGS.release()  # flags that tests of other files have set
    pilot = None if guide is None else Pilot(guide, guide.recorder)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(micro):
            tokens = torch.randint(10, sizes(step))
            labels = torch.randint(4, tokens.shape[:1])
            if model_loss:
                loss = net(tokens, labels=labels)["loss"]
            else:
                loss = criterion(net(tokens), labels)
            if scales:
                loss *= 2
            (loss / micro).backward()
        optimizer.step()
    if pilot is not None and guide is not None:
        pilot.release()
        guide.recorder.close()
        assert left_behind() == []


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


def train_both(make: Callable[[], Net], guide: ComparingGuide, **how: Any) -> tuple[Net, Net]:
    """Trains a model while configs are compared, and a copy without a pilot. Both must end with
    bit-identical weights."""
    net, alone = make(), make()
    alone.load_state_dict(net.state_dict())
    train(alone, None, **how)
    train(net, guide, **how)
    weights = alone.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in net.state_dict().items())
    return net, alone


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(
    ("inner", "how"),
    [
        *((nn.Tanh, how) for how in ({}, {"model_loss": True}, {"micro": 3})),
        (nn.Tanh, {"model_loss": True, "scales": True}),
        (lambda: torch.jit.script(nn.Tanh()), {}),
    ],
)
def test_half_precision_passes_and_the_run_stays_bit_identical(
    inner: Callable[[], Any], how: dict[str, Any]
) -> None:
    guide = ComparingGuide(HALF, {"fused_optimizer": True})
    train_both(lambda: Net(inner=inner()), guide, **how)
    assert [one.outcome for one in guide.results] == ["ok", "ok"], guide.results


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(lambda step: (32 - 12 * (step % 3 == 2), 5), id="a short last batch"),
        pytest.param(lambda step: (8 + 3 * step, 5), id="other sizes in each step"),
    ],
)
def test_batches_of_varying_sizes_are_compared(
    sizes: Callable[[int], tuple[int, ...]], dropout: float
) -> None:
    guide = ComparingGuide(HALF, HALF | {"fused_optimizer": True})
    train(Net(dropout), guide, steps=14, sizes=sizes)
    assert [one.outcome for one in guide.results] == ["ok", "ok"], guide.results


def test_only_full_batches_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short batches run uncompiled, so they would hide faults of the compiled code."""
    repeated: list[int] = []
    draw = RecordedSteps.sample

    def sample(steps: RecordedSteps, config: Config, point: int, seed: int) -> Sample:
        drawn = draw(steps, config, point, seed)
        repeated.append(len(drawn.outputs["output 0"]))
        return drawn

    monkeypatch.setattr(RecordedSteps, "sample", sample)
    train(Net(), ComparingGuide(HALF), steps=14, sizes=lambda step: (32 - 12 * (step % 3 == 2), 5))
    assert set(repeated) == {32 * 4}


@pytest.mark.parametrize("steps", [10, POINTS + 2])  # the second run ends during the comparison
def test_the_model_is_freed_after_the_pilot_leaves(steps: int) -> None:
    net, guide = Net(), ComparingGuide(HALF)
    train(net, guide, steps=steps)
    assert bool(guide.results) == (steps == 10)
    reference = weakref.ref(net)
    del net
    gc.collect()
    assert reference() is None


def wrong_gradient(x: Tensor) -> Tensor:
    """Correct outputs, but in bf16 wrong gradients of the layers before."""
    return Scaled.apply(x, 3.0) if x.dtype == torch.bfloat16 else x  # type: ignore[no-any-return]


def wrong_outputs(x: Tensor) -> Tensor:
    return x * (1.2 if x.dtype == torch.bfloat16 else 1.0)


def raise_under_autocast(outputs: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        raise RuntimeError("no half")
    return outputs


class Penalized(Net):
    """Returns logits and a penalty, of which the script makes its loss; and half of an output."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        logits, _rest = self.outer(super().forward(tokens).repeat(1, 2)).chunk(2, 1)
        return {"loss": (self.first.weight.square().mean(), _rest), "logits": logits}

    def __call__(self, tokens: Tensor) -> Any:
        found = super().__call__(tokens)
        return found["logits"] + found["loss"][0]


class HidingLoss(Net):
    """Returns its loss in an object in which the pilot sees no tensor."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        loss = super().forward(tokens, labels)["loss"]
        return type("Hidden", (), {"__getitem__": lambda _self, _name: loss})()


@pytest.mark.parametrize(
    ("make", "outcome", "message"),
    [
        (lambda: Net(inner=wrong_gradient), "wrong", "gradient"),
        (lambda: Net(outer=wrong_outputs), "wrong", "allowed"),
        (lambda: Net(outer=raise_under_autocast), "failed", "RuntimeError: no half"),
        # A scalar output that is not the loss hides no other output.
        (lambda: Penalized(outer=wrong_gradient), "wrong", "gradient"),
        (HidingLoss, UNVERIFIED, "no gradient came back to what the model returned"),
    ],
)
def test_wrong_or_failing_config_is_reported_and_the_script_continues(
    make: Callable[[], Net], outcome: str, message: str
) -> None:
    guide = ComparingGuide(HALF)
    train(make(), guide, model_loss=make is HidingLoss, steps=8 * POINTS + 10)
    (found,) = guide.results
    assert (found.outcome, found.blames) == (outcome, "format" if outcome == "wrong" else "")
    assert message in found.reason


def penalized(outputs: Tensor, labels: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(outputs, labels)
    return loss + torch.autograd.grad(loss, outputs, create_graph=True)[0].square().sum()


def test_compiled_code_is_refused_where_gradients_have_gradients() -> None:
    guide = ComparingGuide({"compile": "default"}, HALF)
    train(Net(0.0), guide, criterion=penalized)
    assert [one.outcome for one in guide.results] == [UNVERIFIED, "ok"]
    assert "create_graph" in guide.results[0].reason


def binary(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy(outputs[:, 0], (labels > 1).float()) + 1


@pytest.mark.parametrize(
    ("outer", "criterion", "outcome"),
    [
        (torch.sigmoid, binary, "wrong"),
        (nn.Identity(), lambda outputs, labels: binary(outputs.sigmoid(), labels), "ok"),
        (torch.sigmoid, lambda p, _labels: -((1 - p + 1e-8).log() + p).mean(), "wrong"),
        (torch.sigmoid, lambda p, _labels: -Bernoulli(p).log_prob(torch.ones(1)).mean(), "wrong"),
        # Near 0, half precision is as exact as elsewhere.
        (torch.sigmoid, lambda p, _labels: -(p.clamp(1e-7, 1) + 1e-8).log().mean(), "ok"),
        (nn.Identity(), lambda x, _labels: (1 + (1 - x).exp()).log().mean(), "ok"),
        (lambda outputs: outputs.float().sigmoid(), binary, "ok"),
    ],
)
def test_probabilities_in_half_precision_are_wrong_if_the_loss_takes_their_logarithm(
    outer: Any, criterion: Any, outcome: str
) -> None:
    guide = ComparingGuide(HALF)
    train(Net(0.0, outer=outer), guide, criterion=criterion, steps=POINTS + 10)
    (found,) = guide.results
    assert found.outcome == outcome, found
    assert outcome == "ok" or "bf16 rounds to 1" in found.reason


def test_a_compiled_config_is_compared_without_recompiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_by_inductor", lambda _mode: {"backend": "eager"})
    guide = ComparingGuide({**HALF, "compile": "default"}, HALF, {**HALF, "compile": "default"})
    train(Net(), guide, steps=12)
    assert [one.outcome for one in guide.results] == ["ok"] * 3, guide.results
    assert guide.compiled[0] == guide.compiled[2]


def test_a_cache_that_only_some_configs_fill_is_no_output() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")

    class Caching(Net):
        def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
            cache = cache_utils.DynamicCache()
            if torch.is_autocast_enabled("cpu"):
                cache.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)
            return super().forward(tokens, labels) | {"past_key_values": cache}

    guide = ComparingGuide(HALF)
    train(Caching(), guide, model_loss=True)
    assert [one.outcome for one in guide.results] == ["ok"], guide.results


class Counting(Net):
    """Counts its calls in an attribute and rebinds a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        outputs = super().forward(tokens)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs * (1 + 0.01 * self.calls)


class Collecting(Net):
    """Changes `kept` in each call: a list, a tensor or a random generator."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        outputs = super().forward(tokens)
        if isinstance(self.kept, list):
            self.kept.append(outputs.detach())
        elif isinstance(self.kept, torch.Generator):
            outputs = outputs + torch.randn(4, generator=self.kept)
        else:
            self.kept += outputs.detach().mean(0)
        return outputs


def test_careful_comparison_restores_attributes_and_buffers() -> None:
    guide = ComparingGuide(HALF, careful=True)
    net, alone = train_both(Counting, guide)
    assert guide.results[0].outcome == "ok", guide.results
    assert vars(net)["calls"] == vars(alone)["calls"] == 10


@pytest.mark.parametrize(
    "make_kept", [list, lambda: torch.zeros(4), lambda: torch.Generator().manual_seed(3)]
)
def test_careful_comparison_skips_a_model_that_cannot_be_restored(make_kept: Any) -> None:
    guide = ComparingGuide(HALF, careful=True)
    net, _ = train_both(lambda: Collecting(make_kept()), guide)
    assert guide.results[0].outcome == UNVERIFIED
    assert "changes Collecting.kept, which could not be restored" in guide.results[0].reason
    assert not isinstance(kept := vars(net)["kept"], list) or len(kept) == 10


def test_careful_comparison_does_not_rerun_hooks_of_the_script() -> None:
    net, guide, shapes = Net(), ComparingGuide(HALF, careful=True), []
    net.first.register_forward_hook(lambda _module, _args, outputs: shapes.append(outputs.shape))
    train(net, guide)
    assert guide.results[0].outcome == UNVERIFIED and "hooks" in guide.results[0].reason
    assert len(shapes) == 10


def test_out_of_memory_while_recording_cancels_only_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = mock.Mock(side_effect=torch.OutOfMemoryError("full"))
    guide = ComparingGuide(HALF)
    monkeypatch.setattr("advisor.tuners.measure.run.recorded_steps._fresh", full)
    train_both(Net, guide)
    assert guide.results[0].outcome == UNVERIFIED and "full" in guide.results[0].reason


@pytest.mark.parametrize("how", [{}, {"model_loss": True}, {"micro": 3, "scales": True}])
def test_a_call_is_repeated_at_other_batches_and_the_run_stays_bit_identical(
    how: dict[str, Any],
) -> None:
    sizes: list[int] = []

    def outer(outputs: Tensor) -> Tensor:
        sizes.append(len(outputs))
        if len(outputs) > 96:
            raise torch.OutOfMemoryError("full")
        return outputs

    batches = [{"batch": n} for n in (32, 16, 40, 96, 1, 64, 97)]
    guide = ComparingGuide(*batches, *(HALF | one for one in batches), HALF, {"batch": 8})
    train_both(lambda: Net(outer=outer), guide, steps=12, **how)
    # BatchNorm cannot train with one sample.
    told = [*["ok"] * 4, "failed", "ok", "out_of_memory"] * 2
    assert [one.outcome for one in guide.results] == [*told, "ok", "ok"], guide.results
    assert "Expected more than 1 value per channel" in guide.results[4].reason
    repeated = [one for one in guide.results if one.steps == 2]
    assert len(repeated) == 11 and all(one.seconds > 0 for one in repeated)
    assert [n for n, _ in groupby(sizes) if n != 32] == [16, 40, 96, 64, 97] * 2 + [8]


class Twice(Net):
    """Is called twice in a step, as a siamese network."""

    def __call__(self, tokens: Tensor) -> Any:
        return super().__call__(tokens) - super().__call__(tokens.flip(0))


class Edges(Net):
    """Takes a graph: its nodes, and pairs of them."""

    def forward(self, tokens: Tensor, edges: Tensor | None = None) -> Any:
        return super().forward(tokens)

    def __call__(self, tokens: Tensor) -> Any:
        return super().__call__(tokens, edges=torch.zeros(2, 7, dtype=torch.long))


@pytest.mark.parametrize(
    ("make", "sizes", "said"),
    [
        (Twice, lambda _step: (32, 5), "a step calls the model several times before backward"),
        (Edges, lambda _step: (32, 5), "the first dimension of an input is not the batch"),
        (Net, lambda step: (8 + step, 5), "its inputs vary in size"),
    ],
)
def test_a_call_that_can_have_no_other_batch_is_told(make: Any, sizes: Any, said: str) -> None:
    guide = ComparingGuide({"batch": 64})
    train(make(), guide, steps=14, sizes=sizes)
    assert [(one.outcome, one.reason) for one in guide.results] == [("failed", said)]
