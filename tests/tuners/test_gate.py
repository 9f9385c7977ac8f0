"""Which calls of a model reach its compiled code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advisor.cache.config import Config
from advisor.tuners import compiling
from advisor.tuners.act import gate
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.act.gate import Gate, Signatures, of_any_size, signature
from advisor.tuners.act.pilot.loop_observer import TrainedModel
from advisor.tuners.act.pilot.switch import ConfigSwitch
from advisor.tuners.decisions import MIN_OBSERVED_STEPS
from tests.cache.examples import record

OWN = Config(precision="default", compile="none", dynamic_shapes=False, batch_size=8)
COMPILED = OWN.replace(compile="default")
FULL, SHORT = 8, 5

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Net(nn.Module):
    """Notes for which batches it ran as Python, which compiled code does while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.ran: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.ran.append(x.shape[0])
        return torch.tanh(self.layer(x))


class Backend:
    """Compiles nothing, and notes with how many samples each graph was made, and is called."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.called: list[int] = []

    def __call__(self, graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        number = len(self.made)
        self.made.append(next(one.shape[0] for one in reversed(inputs) if one.dim() == 2))

        def call(*args: Any) -> Any:
            self.called.append(number)
            return graph.forward(*args)

        return call


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    torch._dynamo.reset()
    found = Backend()
    monkeypatch.setattr(compiling, "_by_inductor", lambda _mode: {"backend": found})
    return found


def epoch(net: Net, optimizer: torch.optim.Optimizer, sizes: list[int]) -> None:
    net.train()
    for size in sizes:
        optimizer.zero_grad()
        net(torch.randn(size, 4)).square().sum().backward()
        optimizer.step()
    with torch.no_grad():  # as a GAN's generator, which stays in training mode
        net(torch.randn(3, 4))
    net.eval()
    with torch.no_grad():
        net(torch.randn(FULL, 4))
    net.train()


EPOCH = [FULL] * 6 + [SHORT]


def switched(net: Net, optimizer: torch.optim.Optimizer) -> ConfigSwitch:
    cpu = torch.device("cpu")
    return ConfigSwitch([TrainedModel(net, net)], [optimizer], OWN, cpu, lambda _given: None)


def test_short_batches_and_evaluation_never_reach_compiled_code(backend: Backend) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    switch = switched(net, optimizer)
    epoch(net, optimizer, EPOCH)
    switch.set(COMPILED)
    epoch(net, optimizer, EPOCH)
    compiled = graphs_compiled()
    for _ in range(2):
        net.ran.clear()
        epoch(net, optimizer, EPOCH)
        assert net.ran == [SHORT, 3, FULL]
    assert graphs_compiled() == compiled
    assert backend.made == [FULL]
    assert backend.called == [0] * 18
    switch.release()
    assert "_compiled_call_impl" not in vars(net)


@pytest.mark.parametrize(("recorded", "made"), [(True, [FULL]), (False, [FULL, 3])])
def test_the_same_in_a_loop_of_ones_own(recorded: bool, made: list[int], backend: Backend) -> None:
    """Without a record it may be inference that is measured."""
    served = Served(record=record()) if recorded else Served()
    advice = Advice(COMPILED, device="cpu", served=served)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    advice.lay_out(net)
    net.train()
    epoch(net, optimizer, EPOCH)
    compiled = graphs_compiled()
    for _ in range(2):
        epoch(net, optimizer, EPOCH)
    assert graphs_compiled() == compiled
    assert backend.made == made
    assert backend.called.count(0) == 18


def test_the_most_frequent_signature_is_compiled_first(backend: Backend) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    switch = switched(net, optimizer)
    epoch(net, optimizer, EPOCH)
    switch.set(COMPILED)
    epoch(net, optimizer, [SHORT, FULL, FULL])
    assert backend.made == [FULL]
    switch.release()


def test_a_second_signature_is_compiled_once_it_is_frequent(backend: Backend) -> None:
    """Each has code for its own size: the first is not called for any size from then on."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    switch = switched(net, optimizer)
    epoch(net, optimizer, [FULL] * 9)
    switch.set(COMPILED)
    epoch(net, optimizer, [FULL] * 9 + [SHORT] * (MIN_OBSERVED_STEPS - 1))
    assert backend.made == [FULL]
    epoch(net, optimizer, [SHORT, FULL, SHORT])
    assert backend.made == [FULL, SHORT]
    assert backend.called[-3:] == [1, 0, 1]
    switch.release()


def test_what_vary_is_compiled_for_any_size_where_that_is_set(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    switch = switched(net, optimizer)
    epoch(net, optimizer, [8, 7, 6])
    switch.set(COMPILED.replace(dynamic_shapes=True))
    epoch(net, optimizer, [5, 4, 3, 1])
    assert len(backend.made) == 1
    assert backend.called == [0, 0, 0]
    switch.release()


def test_a_checkpoint_calls_again_what_it_called(backend: Backend) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()
            self.inner.compile(backend=backend)
            gate.attach(self.inner, sizes=True, inference=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return y

    net = Outer()
    for size in (FULL, *(SHORT for _ in range(2 * MIN_OBSERVED_STEPS))):
        net(torch.randn(size, 4)).sum().backward()
    assert net.inner.ran == [SHORT] * 2 * (MIN_OBSERVED_STEPS - 1)


def test_what_is_forgotten_is_freed_and_compiled_again(backend: Backend) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    switch = switched(net, optimizer)
    other = COMPILED.replace(precision="bf16")
    for config in (COMPILED, other):
        switch.set(config)
        epoch(net, optimizer, [FULL] * 2)
    switch.set(other)
    switch.forget(COMPILED)
    switch.forget(OWN)  # stays: it is the script's
    made = len(backend.made)
    epoch(net, optimizer, [FULL] * 2)
    assert len(backend.made) == made
    switch.set(COMPILED)
    epoch(net, optimizer, [FULL] * 2)
    assert len(backend.made) == made + 1
    assert backend.called[-2:] == [made, made]
    switch.release()


def test_configs_of_the_same_code_share_it(backend: Backend) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    switch = switched(net, optimizer)
    fused = COMPILED.replace(fused_optimizer=True)
    for config in (COMPILED, fused, COMPILED):
        switch.set(config)
        epoch(net, optimizer, [FULL])
    switch.set(fused)
    switch.forget(COMPILED)
    epoch(net, optimizer, [FULL])
    assert backend.made == [FULL]
    switch.release()


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (((torch.zeros(2),), {}), ((torch.ones(2),), {}), True),
        (((torch.zeros(2),), {}), ((torch.zeros(3),), {}), False),
        (((torch.zeros(2),), {}), ((torch.zeros(2).double(),), {}), False),
        (((torch.zeros(2),), {}), ((torch.zeros(2, requires_grad=True),), {}), False),
        (((1,), {}), ((2,), {}), True),
        (((True,), {}), ((False,), {}), False),
        (((None,), {}), ((1,), {}), False),
        (((), {"a": True}), ((), {"b": True}), False),
        ((([torch.zeros(2)],), {}), (((torch.zeros(2),),), {}), False),
        ((({"x": torch.zeros(2)},), {}), (({"x": torch.zeros(3)},), {}), False),
    ],
)
def test_signatures(one: Any, other: Any, alike: bool) -> None:
    assert (signature(*one) == signature(*other)) is alike


def test_sizes_that_do_not_count() -> None:
    def of(*sizes: int) -> gate.Signature:
        return of_any_size(signature((torch.zeros(sizes),), {}))

    assert of(8, 4) == of(5, 3)
    assert of(8, 4) != of(1, 4)
    assert of(8, 4) != of(8)


def test_counts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_MOST_SIGNATURES", 4)
    found = Signatures()
    for n in range(20):
        found.add((n,))
        found.add(("often",))
    assert found.frequent() == {("often",)}
    assert found.calls == 40


def test_a_copy_of_a_model_has_no_gate() -> None:
    net = Net()
    net.compile(backend="eager")
    gate.attach(net, sizes=True, inference=False)
    assert isinstance(net._compiled_call_impl, Gate)
    assert copy.deepcopy(net)._compiled_call_impl is None
