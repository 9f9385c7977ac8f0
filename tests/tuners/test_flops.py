"""The FLOPs of a step: equal to a count by hand, and nothing of the script changes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from advisor.cache.config import Config
from advisor.tuners.act import hooks
from advisor.tuners.act.pilot import flops
from advisor.tuners.act.pilot.loop_observer import RngState, TrainedModel
from advisor.tuners.act.pilot.pilot import Pilot
from advisor.tuners.act.pilot.protocol import BlockRequest
from advisor.tuners.act.pilot.switch import ModelCall
from tests.builders import Net, trained
from tests.runs.forked import ScriptedGuide
from tests.tuners.test_pilot import OWN

N = 2.0 * 32 * 64 * 64  # FLOPs of a product of 32x64 and 64x64


def counted(model: nn.Module, *, real: bool = False, **more: bool) -> Config:
    call = ModelCall(TrainedModel(model, model, model), model)
    hooks.replace_call(model, call)
    backward, act = torch.autograd.backward, call.act
    count = flops.StepFlops([call], real=real)
    model(torch.ones(32, 64)).sum().backward(**more)
    found = count.end(1)
    assert (torch.autograd.backward, call.act) == (backward, act)
    call.leave(call.plain)
    return found


class Blocks(nn.Module):
    def __init__(self, call: Callable[..., Tensor] = lambda layer, x: layer(x)) -> None:
        super().__init__()
        self.first, self.second, self.call = nn.Linear(64, 64), nn.Linear(64, 64), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.second, self.first(x))


@torch.library.custom_op("advisor_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def refusing(layer: nn.Module, x: Tensor) -> Tensor:
    x = x * torch.rand(())
    if _get_current_dispatch_mode() is not None:
        raise ValueError("not under a mode")
    return layer(x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_products_are_counted_as_by_hand() -> None:
    """The first layer needs no gradient of its input. Checkpointing counts nothing twice."""
    whole = Config(flops=5 * N, convolved=0.0, uncounted="")
    for reentrant in (False, True):
        net = Blocks(lambda layer, x, how=reentrant: checkpoint(layer, x, use_reentrant=how))
        assert counted(net) == whole
    assert counted(Blocks(), create_graph=True) == whole
    compiled = torch.compile(Blocks(), backend="eager")
    compiled(torch.ones(32, 64)).sum().backward()
    assert counted(compiled) == whole
    assert counted(compiled, real=True) == Config(uncounted=flops._COMPILES)


def test_what_is_not_counted_is_named() -> None:
    found = counted(Blocks(lambda layer, x: x + product(x.detach(), layer.weight.detach())))
    assert found == Config(flops=2 * N, convolved=0.0, uncounted="advisor_tests.product")
    nothing = counted(nn.LayerNorm(64))
    assert nothing == Config(uncounted="no operator with a formula was seen")


def test_a_call_that_cannot_be_counted_is_repeated_as_it_was() -> None:
    net = Blocks(refusing)
    torch.manual_seed(0)
    assert str(counted(net)["uncounted"]).startswith("ValueError: not under a mode")
    after = RngState()
    torch.manual_seed(0)
    net(torch.ones(32, 64))
    assert not after.has_advanced()


def test_counting_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gradients, buffers, random numbers and hooks, against the same step without a count."""
    monkeypatch.setattr(flops, "graphs_compiled", lambda: 0)  # by other tests
    norm, attends = nn.BatchNorm1d(64), nn.TransformerEncoderLayer(64, 4, 64, dropout=0.5)
    net, start = nn.Sequential(nn.Linear(64, 64), norm, attends), RngState()
    other = copy.deepcopy(net)
    other(torch.ones(32, 64)).sum().backward()
    after = RngState()
    start.restore()
    assert counted(net, real=True)["flops"]
    assert not after.has_advanced()
    pairs = [*zip(net.buffers(), other.buffers(), strict=True)]
    pairs += [(a.grad, b.grad) for a, b in zip(net.parameters(), other.parameters(), strict=True)]
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert not any(weight._backward_hooks for weight in net.parameters())


def test_a_pilot_counts_one_step_for_one_sample() -> None:
    sizes = ((1, 1), (1, 0), (0, 0))
    asked = (BlockRequest(config=OWN, own=OWN, steps=steps, warm=warm) for steps, warm in sizes)
    guide = ScriptedGuide(lambda _space: asked)
    backward, pilot = torch.autograd.backward, Pilot(guide)
    trained(Net(), 12)
    pilot.release()
    first, second = guide.results
    by_hand = 2.0 * (2 * 4 * 6 * 6 * 3 * 9)  # forward, and the gradient of the weight
    assert first.counted == Config(flops=by_hand, convolved=by_hand, uncounted="", epoch=0)
    assert (first.samples, second.counted, first.joules) == (4, first.counted, 0.0)
    assert torch.autograd.backward is backward
