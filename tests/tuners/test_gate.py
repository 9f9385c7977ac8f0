"""Which blocks of a model are compiled, and which calls use the compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from advisor.cache.config import Config
from advisor.tuners import compiling
from advisor.tuners.act import gate, hooks
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.act.pilot.loop_observer import TrainedModel
from advisor.tuners.act.pilot.switch import ConfigSwitch
from advisor.tuners.compiling import repeated
from advisor.tuners.decisions import MIN_OBSERVED_STEPS
from tests.cache.examples import record

OWN = Config(precision="default", compile="none", dynamic_shapes=False, batch_size=8)
COMPILED = OWN.replace(compile="default")
FULL, SHORT = 8, 5

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Net(nn.Module):
    """Lists in `ran` the batch sizes of calls that ran as Python instead of compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.ran: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.ran.append(x.shape[0])
        return torch.tanh(self.layer(x))


class Backend:
    """Records the batch size of each graph in `made`, and each call's graph in `called`."""

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
    one = Backend()
    monkeypatch.setattr(compiling, "_by_inductor", lambda _mode: {"backend": one})
    return one


def epoch(net: Net, optimizer: torch.optim.Optimizer, sizes: list[int]) -> None:
    net.train()
    for size in sizes:
        optimizer.zero_grad()
        net(torch.randn(size, 4)).square().sum().backward()
        optimizer.step()
    with torch.no_grad():  # like a GAN's generator, in training mode
        net(torch.randn(3, 4))
    net.eval()
    with torch.no_grad():
        net(torch.randn(FULL, 4))
    net.train()


EPOCH = [FULL] * 6 + [SHORT]
Trained = tuple[Net, torch.optim.Optimizer, ConfigSwitch]


@pytest.fixture
def trained() -> Iterator[Trained]:
    """A model, its optimizer and their ConfigSwitch."""
    net, cpu = Net(), torch.device("cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    switch = ConfigSwitch([TrainedModel(net, net, net)], [optimizer], OWN, cpu, lambda _given: None)
    yield net, optimizer, switch
    switch.release()


@pytest.mark.parametrize(("recorded", "made"), [(True, [FULL]), (False, [FULL, 3])])
def test_advice_compiles_full_batches(recorded: bool, made: list[int], backend: Backend) -> None:
    """Without a record, the job may be inference, so calls without gradients compile too."""
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


def test_frequent_second_batch_size_is_compiled(backend: Backend, trained: Trained) -> None:
    """Each size has its own code: the first graph does not become one for any size."""
    net, optimizer, switch = trained
    epoch(net, optimizer, [FULL] * 9)
    switch.set(COMPILED)
    epoch(net, optimizer, [FULL] * 9 + [SHORT] * (MIN_OBSERVED_STEPS - 1))
    assert backend.made == [FULL]
    epoch(net, optimizer, [SHORT, FULL, SHORT])
    assert backend.made == [FULL, SHORT]
    assert backend.called[-3:] == [1, 0, 1]


def test_dynamic_shapes_compile_once_for_any_size(backend: Backend, trained: Trained) -> None:
    net, optimizer, switch = trained
    epoch(net, optimizer, [8, 7, 6])
    switch.set(COMPILED.replace(dynamic_shapes=True))
    epoch(net, optimizer, [5, 4, 3, 1])
    assert len(backend.made) == 1
    assert backend.called == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_compiled_model_can_be_traced(backend: Backend) -> None:
    net = Net()
    net.compile(backend=backend)
    gate.attach(net)
    net(torch.ones(FULL, 4))
    torch.jit.trace(net, torch.ones(FULL, 4), check_trace=False)
    assert (net.ran, backend.called) == ([FULL], [0])
    hooks.replace_call(plain := nn.Identity(), backend)
    assert torch.jit.script(plain)(torch.zeros(1)) == 0


def test_checkpoint_recomputation_uses_the_same_code_as_the_forward_pass(backend: Backend) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()
            self.inner.compile(backend=backend)
            gate.attach(self.inner, sizes=True, inference=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    net = Outer()
    for size in (FULL, *(SHORT for _ in range(2 * MIN_OBSERVED_STEPS))):
        net(torch.randn(size, 4)).sum().backward()
    assert net.inner.ran == [SHORT] * 2 * (MIN_OBSERVED_STEPS - 1)


def test_forgotten_config_is_freed_and_compiled_again(backend: Backend, trained: Trained) -> None:
    net, optimizer, switch = trained
    other = COMPILED.replace(precision="bf16")
    for config in (COMPILED, other):
        switch.set(config)
        epoch(net, optimizer, [FULL] * 2)
    switch.set(other)
    switch.forget(COMPILED)
    switch.forget(OWN)  # ignored: the script's own config
    made = len(backend.made)
    epoch(net, optimizer, [FULL] * 2)
    assert len(backend.made) == made
    switch.set(COMPILED)
    epoch(net, optimizer, [FULL] * 2)
    assert len(backend.made) == made + 1
    assert backend.called[-2:] == [made, made]


class Block(nn.Module):
    def __init__(self, width: int = 8, rate: float = 0.0, index: int = 0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())
        self.rate, self.index = rate, index

    def forward(self, x: Tensor) -> Tensor:
        return x + (1 - self.rate) * self.body(x)


def make_transformer(layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(4, 16), encoder, nn.Linear(16, 4))


def stack(count: int, make: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*map(make, range(count)))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "transformer": (lambda: make_transformer(6), 6),
    "only three layers": (lambda: make_transformer(3), 0),
    # Only one of the two widths is repeated often enough.
    "two widths": (stack(8, lambda at: Block(8 if at % 3 else 16)), 5),
    "deep": (torchvision.models.resnet152, 35 + 7),
    "different rates": (stack(6, lambda at: Block(rate=at / 10)), 0),
    "numbered": (stack(6, lambda at: Block(index=at)), 6),
    "single layers": (stack(6, lambda _at: nn.Linear(4, 4)), 0),
    "nested": (stack(4, lambda _at: stack(4, lambda at: Block(index=at))()), 4),
    "lazy": (stack(4, lambda _at: nn.Sequential(nn.LazyLinear(2))), 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_repeated_blocks_are_found(name: str) -> None:
    make, count = MODELS[name]
    with torch.device("meta"):
        blocks = repeated(make())
    assert len(blocks) == count
