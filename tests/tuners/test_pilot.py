"""The pilot's parts: what trains, what a step is, what is set and set back."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from advisor.cache.config import Config
from advisor.errors import AdvisorWarning
from advisor.resolve.record_guide import RecordGuide
from advisor.resolve.request import Request
from advisor.tuners import compiling
from advisor.tuners.act import hooks
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.compiled import graphs_compiled, recompile_limit
from advisor.tuners.act.hooks import Patch
from advisor.tuners.act.pilot.loop_observer import LoopObserver, TrainedModel, batch_of, inputs_of
from advisor.tuners.act.pilot.pilot import IN_THREADS, Pilot
from advisor.tuners.act.pilot.protocol import BlockRequest, BlockResult
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.act.pilot.switch import ConfigSwitch
from advisor.tuners.act.pilot.trees import map_tensors
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.faults import Stopped, stopped
from advisor.tuners.knobs import LoaderFacts
from advisor.tuners.search.space import Space
from tests.builders import Net, space, trained
from tests.runs.forked import Looks, left_behind

OWN = Config(
    precision="default", channels_last=False, fused_optimizer=False, compile="none", batch_size=4
)


SWITCHES: list[ConfigSwitch] = []


def switch_of(*given: TrainedModel | torch.optim.Optimizer, device: str = "cpu") -> ConfigSwitch:
    trained = [one for one in given if isinstance(one, TrainedModel)]
    optimizers = [one for one in given if isinstance(one, torch.optim.Optimizer)]
    place = torch.device(device)
    SWITCHES.append(ConfigSwitch(trained, optimizers, OWN, place, lambda _given: None))
    return SWITCHES[-1]


def switched(net: nn.Module, **how: Any) -> tuple[torch.optim.Optimizer, ConfigSwitch]:
    optimizer = torch.optim.SGD(net.parameters(), **{"lr": 0.1, **how})
    return optimizer, switch_of(TrainedModel(net, net), optimizer)


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    PROCESS_FLAGS.release()  # what tests of other files have left
    yield
    while SWITCHES:
        SWITCHES.pop().release()


Flown = tuple[Net, torch.optim.Optimizer, ConfigSwitch]


@pytest.fixture
def flown() -> Flown:
    torch.manual_seed(0)
    net = Net()
    optimizer, switch = switched(net, momentum=0.9)
    trained(net, 1, optimizer)
    return net, optimizer, switch


def test_a_config_acts_and_leaves_nothing(flown: Flown) -> None:
    net, optimizer, switch = flown
    strides = [p.stride() for p in net.parameters()]
    group = dict(optimizer.param_groups[0])
    there = OWN.replace(precision="bf16", channels_last=True)
    switch.set(there)
    trained(net, 1, optimizer)
    assert net.dtypes[-1] == torch.bfloat16
    layout = torch.channels_last
    assert net.conv.weight.is_contiguous(memory_format=layout)
    momentum = optimizer.state[net.conv.weight]["momentum_buffer"]
    assert momentum.stride() == net.conv.weight.stride()
    assert "_compiled_call_impl" not in vars(copy.deepcopy(net))
    with torch.no_grad():  # evaluation runs unmodified
        net(IMAGES[0])
    net.eval()(IMAGES[0])
    assert net.train().dtypes[-2:] == [torch.float32] * 2
    switch.set(OWN)
    trained(net, 1, optimizer)
    assert net.dtypes[-1] == torch.float32
    assert [p.stride() for p in net.parameters()] == strides
    assert {n: v for n, v in optimizer.param_groups[0].items() if n != "params"} == {
        n: v for n, v in group.items() if n != "params"
    }
    switch.release()
    assert "_compiled_call_impl" not in vars(net)
    assert not PROCESS_FLAGS.config


@pytest.mark.parametrize("own", [{}, {"fused": True}, {"foreach": True}])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_checkpoints(kind: type[torch.optim.Adam | torch.optim.SGD], own: dict[str, bool]) -> None:
    net = Net()
    optimizer = kind(net.parameters(), lr=0.1, **own)
    trained(net, 1, optimizer)
    plain = optimizer.state_dict()
    switch = switch_of(TrainedModel(net, net, ()), optimizer)
    switch.set(OWN.replace(fused_optimizer=True))
    trained(net, 1, optimizer)
    saved = optimizer.state_dict()
    assert optimizer.param_groups[0]["fused"] is True
    assert saved["param_groups"] == plain["param_groups"]
    assert {i: set(kept) for i, kept in saved["state"].items()} == {
        i: set(kept) for i, kept in plain["state"].items()
    }
    other = Net()
    later = kind(other.parameters(), lr=0.1, **own)
    later.load_state_dict(copy.deepcopy(saved))
    trained(other, 1, later)
    assert later.param_groups[0]["fused"] == plain["param_groups"][0]["fused"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})
    assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == [0.1, 0.5]
    switch.release()
    assert not optimizer._optimizer_state_dict_post_hooks


def test_a_step_on_the_device_is_saved_on_the_host() -> None:
    """What is saved is a copy: the optimizer goes on with what it has."""
    with FakeTensorMode():
        net = nn.Linear(2, 1, device="cuda")
        optimizer = torch.optim.Adam(net.parameters())
        optimizer.state[net.weight] = {"step": torch.ones((), device="cuda")}
        switch_of(TrainedModel(net, net, ()), optimizer)
        assert not optimizer.state_dict()["state"][0]["step"].is_cuda
        assert optimizer.state[net.weight]["step"].is_cuda


@torch._dynamo.config.patch({recompile_limit(): 9})
def test_a_compilation_that_is_given_up_is_noticed(flown: Flown) -> None:
    _net, _optimizer, switch = flown

    @torch.compile(backend="eager", dynamic=False)
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    def varied() -> None:
        with torch._dynamo.config.patch({recompile_limit(): 1}):
            for size in (2, 3):
                doubled(torch.ones(size))

    switch.set(OWN.replace(compile="default"))
    assert not switch.fell_back and getattr(torch._dynamo.config, recompile_limit()) == 64
    varied()
    assert switch.fell_back
    switch.set(OWN)
    assert not switch.fell_back
    switch.release()
    assert getattr(torch._dynamo.config, recompile_limit()) == 9


def in_half(switch: ConfigSwitch) -> list[Exception]:
    """What is charged to bf16 from here on."""
    switch.set(OWN.replace(precision="bf16"), (charged := list[Exception]()).append)
    return charged


def test_what_the_script_raises_is_its_own_and_the_advice_stays(flown: Flown) -> None:
    net, _optimizer, switch = flown
    charged, batch = in_half(switch), torch.randn(4, 3, 8, 8)

    def refuses(*_: object) -> None:
        raise ValueError("bad batch")

    hook = net.conv.register_forward_pre_hook(refuses)
    with pytest.raises(ValueError, match="bad batch") as caught:
        net(batch)
    (note,) = caught.value.__notes__
    assert "raised in a second call" in note
    hook.remove()
    net(batch)
    assert net.dtypes[-1] == torch.bfloat16 and not charged


def test_a_checkpoint_that_stops_early_is_no_failure_of_the_advice(flown: Flown) -> None:
    """PyTorch raises in the second call, once it has what it needs."""
    net, _optimizer, switch = flown
    charged = in_half(switch)
    net.dtypes.clear()
    checkpoint(net, torch.randn(4, 3, 8, 8), use_reentrant=False).sum().backward()
    assert net.dtypes == [torch.bfloat16] and not charged


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_that_are_exchanged_are_the_models_own(hooked: bool) -> None:
    """Also of a model that is prepared once it is wrapped."""
    net = Net()
    other, parallel = copy.deepcopy(net), nn.parallel.DistributedDataParallel(net)
    if hooked:
        parallel.register_comm_hook(None, default_hooks.allreduce_hook)

    def assert_same_gradients() -> None:
        batch = torch.randn(4, 3, 8, 8)
        for model in (parallel, other):
            model.zero_grad()
            model(batch).square().mean().backward()
        for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    switch = switch_of(TrainedModel(parallel, net, ()))
    for channels_last in (False, True, False):
        switch.set(OWN.replace(channels_last=channels_last))
        for _ in range(3):  # the buckets are made anew after the first
            assert_same_gradients()
        laid_out = net.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert laid_out == (channels_last and not hooked)
    switch.release()
    advice = Advice(Config(channels_last=True), device="cpu")
    with pytest.warns(AdvisorWarning, match="before") if hooked else nullcontext():
        assert advice.prepare(parallel) is parallel
    assert_same_gradients()


@dataclass(frozen=True)
class Output:
    features: Tensor
    more: dict[str, Tensor]


class Loose:
    """Knows itself."""

    def __init__(self, features: Tensor, more: dict[str, Tensor]) -> None:
        self.features, self.more, self.itself = features, more, self


@dataclass(slots=True)
class Slotted:
    features: Tensor
    more: dict[str, Tensor]
    never: int = dataclasses.field(init=False)


class Table(dict[str, Any]):
    """As libraries' outputs: its items are its attributes."""

    def __init__(self, features: Any = None, more: Any = None) -> None:
        super().__init__(features=features, more=more)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


@pytest.mark.parametrize("kind", [Output, Loose, Slotted, Table])
def test_what_a_model_returns_is_as_it_always_was(kind: type[Any]) -> None:
    net = Net()
    forward = lambda x: kind(net.conv(x), {"mean": net.conv(x).mean((2, 3))})  # noqa: E731
    net.forward = forward  # type: ignore[method-assign]
    _optimizer, switch = switched(net)
    switch.set(OWN.replace(precision="bf16", channels_last=True))
    found = net(torch.randn(4, 3, 8, 8))
    assert not torch.is_autocast_enabled("cpu")  # which forbids some losses
    assert type(found) is kind and map_tensors(lambda tensor: tensor, found) is found
    assert (found.features.dtype, found.more["mean"].dtype) == (torch.float32, torch.float32)
    found.features.view(4, -1).sum().backward()


# torch.compile looks for one, and hides the warning in a way that does not count here.
looks_for_gradients = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Block(nn.Module):
    def __init__(self, ran: list[str]) -> None:
        super().__init__()
        self.inner, self.ran = nn.Linear(8, 8), ran

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.ran.append("plainly")
        return x + torch.tanh(self.inner(x))


class Repeating(nn.Module):
    """Notes which of its blocks run as Python; a compiled one does so while it is traced only."""

    def __init__(self, *, in_backward: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.blocks = nn.ModuleList(Block(self.ran) for _ in range(4))
        self.in_backward, self.reentrant = in_backward, reentrant

    def forward(self, x: Tensor, *, stops: bool = False) -> Tensor:
        if stops:
            raise StopIteration
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.in_backward else block(x)
        return x


@looks_for_gradients
@pytest.mark.parametrize("in_backward", [False, True])
def test_repeated_blocks_compile_for_training(
    in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_by_inductor", lambda _mode: {"backend": "eager"})
    net = Repeating(in_backward=in_backward)
    _optimizer, switch = switched(net)
    x = torch.randn(3, 8, requires_grad=True)  # as what another layer returns
    plain = torch.autograd.grad(net(x).sum(), net.parameters())

    def plainly(*, backward: bool = True) -> int:
        """Blocks that run as Python in a call."""
        net.ran.clear()
        net.zero_grad()
        output = net(x).sum()
        if backward:
            output.backward()
            torch.testing.assert_close([weight.grad for weight in net.parameters()], list(plain))
        return len(net.ran)

    torch.compiler.reset()
    before = graphs_compiled()
    for _ in range(2):
        switch.set(OWN.replace(compile="blocks"))
        assert plainly() == 0 and graphs_compiled() - before == 1
        net.eval()
        assert plainly(backward=False) == 4
        net.train()
        assert plainly() == 0
        switch.set(OWN)
        assert plainly() == (8 if in_backward else 4)
    switch.set(OWN.replace(compile="blocks"))
    switch.release()
    assert all("_compiled_call_impl" not in vars(module) for module in net.modules())


@looks_for_gradients
@pytest.mark.parametrize("when", ["compiled", "called"])
def test_where_blocks_fail_they_are_called_as_they_are(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, charged = Repeating(), list[Exception]()
    _optimizer, switch = switched(net)

    def wrong(*_: object) -> None:
        raise RuntimeError("a wrong kernel")

    def backend(*_: object) -> Callable[..., None] | None:
        return wrong if when == "called" else wrong()

    monkeypatch.setattr(compiling, "_by_inductor", lambda _mode: {"backend": backend})
    switch.set(OWN.replace(compile="blocks"), charged.append)
    for _ in range(2):
        net(torch.randn(3, 8))
        assert net.ran == ["plainly"] * 4
        switch.drop_config()
        net.ran.clear()
    assert len(charged) == 1 and "a wrong kernel" in str(charged[0])
    assert all("_compiled_call_impl" not in vars(block) for block in net.blocks)


IMAGES = (torch.zeros(4, 3, 8, 8),) * 4
TOKENS = (torch.zeros(4, dtype=torch.int64),) * 4


def seen(
    net: nn.Module, optimizer: torch.optim.Optimizer, inputs: Sequence[Tensor] = IMAGES
) -> ScriptFacts:
    """Of a script that made a step with each of the inputs."""
    observer = LoopObserver()
    for x in inputs:
        x = x.to(net.weight.dtype) if isinstance(net, nn.Conv2d) else x
        net(x).sum().backward()
        observer.on_call(net, (x,), {"mask": x > 0})
        observer.on_step(optimizer)
    return ScriptFacts.of(observer, LoaderFacts())


CONVOLUTION = functools.partial(nn.Conv2d, 3, 4, 3)
FUSED = functools.partial(torch.optim.AdamW, fused=True)
SPARSE = functools.partial(nn.Embedding, 4, 2, sparse=True)


def laid_out() -> nn.Module:
    return CONVOLUTION().to(memory_format=torch.channels_last)


def compiled() -> nn.Module:
    return torch.compile(CONVOLUTION(), backend="eager")  # type: ignore[return-value]


def space_of(one: ScriptFacts) -> Space:
    facts = {"repeats": one.repeats, "own": one.own, "kept": one.kept}
    return space(batches=(4,), **facts)


@pytest.mark.parametrize(
    ("make", "optimizer", "knob", "offered", "said"),
    [
        # Neither fp16 nor a captured step, for which a script must be rewritten.
        (CONVOLUTION, torch.optim.SGD, "precision", ("default", "tf32", "bf16"), ""),
        (CONVOLUTION, torch.optim.SGD, "step_graph", (False,), ""),
        (laid_out, torch.optim.SGD, "channels_last", (True,), "channels_last"),
        (CONVOLUTION, FUSED, "fused_optimizer", (True,), "fused"),
        (lambda: CONVOLUTION().bfloat16(), torch.optim.SGD, "precision", ("bf16",), "bf16"),
        (compiled, torch.optim.SGD, "compile", ("default",), "your script already: torch.compile"),
        (CONVOLUTION, torch.optim.LBFGS, "precision", ("default",), "LBFGS"),
        (SPARSE, torch.optim.SGD, "fused_optimizer", (False,), "a gradient is sparse"),
    ],
)
def test_what_a_script_does_itself_is_kept(
    make: Callable[[], nn.Module], optimizer: Any, knob: str, offered: Any, said: str
) -> None:
    net = make()
    one = seen(net, optimizer(net.parameters()), TOKENS if make is SPARSE else IMAGES)
    assert space_of(one).choices.get(knob) == offered
    assert any(said in line for line in one.lines()) or not said


def test_sparse_gradients_are_stepped_without_fused_kernels() -> None:
    optimizer, switch = switched(net := SPARSE())
    net(TOKENS[0]).sum().backward()
    switch.set(OWN.replace(fused_optimizer=True))
    optimizer.step()
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("held", ["no", "view", "data", "shared"])
def test_a_weight_that_others_hold_keeps_its_storage(held: str) -> None:
    """Otherwise a flat buffer, or the other processes of a Hogwild job, would keep an old copy."""
    net = CONVOLUTION()
    flat = torch.zeros(2 * net.weight.numel())
    if held == "view":
        net.weight.data = flat[: net.weight.numel()].view_as(net.weight)
    elif held == "shared":
        net.share_memory()
    kept = net.weight.data if held == "data" else None
    _optimizer, switch = switched(net)
    switch.set(OWN.replace(channels_last=True))
    with torch.no_grad():
        net.weight.fill_(2.0)
    assert net.weight.is_contiguous() is (held != "no")
    assert kept is None or torch.equal(kept, net.weight)
    assert held != "view" or flat.sum() == 2 * net.weight.numel()


def test_a_job_of_replicas_is_told_what_is_tuned_whole() -> None:
    net = Net()
    wrapped = nn.DataParallel(net)
    wrapped.device_ids = [0, 1]
    observer = LoopObserver()
    observer.called[wrapped] = TrainedModel(wrapped, net, ())
    observer.on_autocast(nn.Linear(2, 2, device="meta"))  # there is no autocast for it
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        observer.on_step(optimizer)
    one = ScriptFacts.of(observer, LoaderFacts(workers=4, pinned=True))
    already, line = one.lines()
    assert already == "your script already: 4 loader workers, pin_memory"
    assert line.endswith("under torchrun and DistributedDataParallel is faster, and tuned whole")
    assert {"channels_last", "compile", "fused_optimizer"} <= set(one.kept)


def test_inputs_of_many_lengths_are_one_job_however_long_the_first_is() -> None:
    net = nn.Embedding(9, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def of(*lengths: int) -> ScriptFacts:
        inputs = [torch.zeros(4, length, dtype=torch.int64) for length in lengths]
        return seen(net, optimizer, inputs)

    one, other, fixed = of(5, 5, 7, 5), of(8, 6, 6, 6), of(5, 5, 5, 5)
    assert (one.shape, one.others, one.varies) == (other.shape, other.others, True)
    assert (fixed.shape, fixed.varies) == ((4, 5), False)
    assert "compile" in space_of(fixed).choices
    assert "dynamic_shapes" not in space_of(fixed).choices


@pytest.mark.parametrize(("micro", "actions"), [(1, [0, 3, 1, 2, 5]), (4, [0] * 5), (1, [9] * 5)])
def test_an_agents_actions_are_no_part_of_its_batch(micro: int, actions: list[int]) -> None:
    """They are calls with gradients, as many between two steps as chance will have it."""
    net, observer = nn.Linear(4, 2), LoopObserver()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in actions:
        for samples in [1] * number + [128] * micro:
            observer.on_call(net, (torch.zeros(samples, 4),), {})
        observer.on_step(optimizer)
    found = ScriptFacts.of(observer, LoaderFacts())
    task = found.task(["train.py"], {})
    assert task.shapes == ((128 * micro, 4),)
    assert ("micro" in task.others) == (micro > 1)


@pytest.mark.parametrize("inputs", [{"ids": 0}, {"labels": 0, "ids": 7}, {"labels": 0, "users": 0}])
def test_the_shape_is_of_the_first_input_that_has_two_dimensions(inputs: dict[str, int]) -> None:
    net, observer = nn.Embedding(9, 4), LoopObserver()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = {
        name: torch.zeros((4, n) if n else (4,), dtype=torch.int64) for name, n in inputs.items()
    }
    for _ in range(4):
        observer.on_call(net, (), given)
        observer.on_step(optimizer)
    task = ScriptFacts.of(observer, LoaderFacts()).task(["train.py"], {})
    assert task.shapes == ((4, max(*inputs.values(), 1)),)
    assert task.others.count("1 int64") == len(inputs) - 1


class Told(Looks):
    """A guide that leaves every script alone, counts how often it is asked, and keeps why not."""

    def __init__(self) -> None:
        self.asked, self.said, self.why = 0, "", ""

    def takes_over(self) -> bool:
        self.asked += 1
        return False

    def failed(self, exc: BaseException) -> None:
        self.said, self.why = str(exc), stopped(exc)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_called_within_is_no_model_of_its_own(reentrant: bool) -> None:
    """Nor is what a checkpoint calls again in backward, or what comes after a call that raises."""
    net = Repeating(in_backward=True, reentrant=reentrant)
    observer = LoopObserver()
    calls = hooks.CallHooks(observer.on_call, observer.on_autocast)
    for _ in range(2):
        with pytest.raises(StopIteration):
            net(x=torch.ones(2, 8), stops=True)
        net(x=torch.ones(2, 8, requires_grad=True)).sum().backward()
    calls.remove()
    (seen,) = observer.called.values()
    assert seen.outer is net
    assert seen.samples == 4
    assert [one.name for one in seen.inputs] == ["x"]


def test_a_loss_and_what_a_loaders_worker_calls_are_no_models() -> None:
    observer, net = LoopObserver(), nn.Linear(2, 2)
    calls = hooks.CallHooks(observer.on_call, observer.on_autocast)
    nn.CrossEntropyLoss()(torch.ones(2, 2), torch.ones(2, 2))
    items: Any = [torch.ones(2)]
    loader = DataLoader(
        items,
        num_workers=1,
        collate_fn=lambda batch: (net(batch[0]), len(observer.called))[1],
        multiprocessing_context="fork",
    )
    in_worker = list(loader)
    calls.remove()
    assert (in_worker, observer.called) == ([0], {})


@pytest.mark.parametrize(
    ("what", "seen", "said"),
    [
        ("function", False, "use torch.compile(model) instead"),
        ("layer", True, ""),
        ("before", False, "calls model.compile(); use torch.compile(model)"),
        ("after", True, ""),
    ],
)
def test_what_a_script_compiles_is_not_compiled_again(what: str, seen: bool, said: str) -> None:
    """The pilot's own hooks are part of what is traced; a model that compiles its own call is seen
    if the pilot was there before."""
    if what != "function" and torch.__version__ < (2, 14):
        pytest.skip("torch 2.11 compiles no forward() of its own layers by their compile()")
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net = nn.Sequential(inner, nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.compiler.reset()
    if what in ("layer", "before"):
        (inner if what == "layer" else net).compile(backend="eager")
    call = torch.compile(lambda x: net(x), backend="eager") if what == "function" else net
    before, guide = graphs_compiled(), Told()
    pilot = Pilot(guide)
    if what == "after":
        net.compile(backend="eager")
    for _ in range(8):
        optimizer.zero_grad()
        call(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    pilot.release()
    assert (guide.asked, graphs_compiled() - before, left_behind()) == (seen, 1, [])
    assert bool(guide.said) == bool(said) and said in guide.said


def test_a_pilot_that_fails_says_so_at_once_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuning process would wait half an hour for its first message."""
    monkeypatch.setattr(LoopObserver, "on_call", None)
    Pilot(guide := Told())
    for _ in range(2):  # the last hook goes with the next call of any module
        nn.Linear(2, 2)(torch.ones(2))
    assert guide.said.startswith("the pilot failed: TypeError: 'NoneType' object is not callable")
    # No warning under `advisor run`: with `python -W error` it would end the run.
    RecordGuide(["train.py"], Request()).failed(Stopped(guide.why, guide.said))  # type: ignore[arg-type]
    assert left_behind() == []


class Threaded(Told):
    """Another thread trains meanwhile."""

    takes_over = Looks.takes_over

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        with ThreadPoolExecutor(1) as other:
            other.submit(trained, Net()).result()
        return BlockRequest(config=OWN, own=OWN, steps=5)


def test_models_that_train_in_several_threads_are_left_alone() -> None:
    pilot = Pilot(guide := Threaded())
    trained(net := Net())
    assert (guide.said, "_compiled_call_impl" in vars(net)) == (IN_THREADS, False)
    pilot.release()
    assert left_behind() == []


class Lapping(Looks):
    """Has laps of five steps made, and keeps what each has in it."""

    def __init__(self) -> None:
        self.done = ""
        self.results: list[str] = []

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        return BlockRequest(config=OWN, own=OWN, steps=5)

    def next(self, result: BlockResult) -> BlockRequest:
        *_, last = (n for n in range(len(self.done)) if self.done[n:].count("s") > result.steps)
        self.results.append(self.done[last + 1 :])
        return BlockRequest(config=OWN, own=OWN, steps=5)


@pytest.mark.parametrize(("every", "result"), [(100, "sssss"), (7, "sssss"), (3, "ssesss")])
def test_an_evaluation_is_no_part_of_a_lap(every: int, result: str) -> None:
    """But for a script that evaluates all the time."""
    net, guide = Net(), Lapping()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pilot = Pilot(guide)
    for step in range(60):
        if step % every == 0:
            guide.done += "e"
            net.eval()(torch.randn(4, 3, 8, 8))
            net.train()
        guide.done += "s"
        trained(net, 1, optimizer)
    pilot.release()
    assert len(guide.results) > 3 and set(guide.results) == {result}


def failing(plain: Callable[..., Any], works: int) -> Callable[..., Any]:
    """Fused kernels that fail, once so many were called."""
    left = [works]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no such kernel")
        return plain(*args, **kwargs)

    return kernel


@pytest.mark.parametrize("works", [0, 1])
@pytest.mark.parametrize(
    ("kind", "kernel"), [(torch.optim.AdamW, "_fused_adamw_"), (torch.optim.SGD, "_fused_sgd_")]
)
def test_a_step_that_fails_under_a_config_is_made_without_it(
    kind: type[torch.optim.Optimizer], kernel: str, works: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[list[Tensor]] = []
    for fused in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        groups = [{"params": list(part.parameters())} for part in net]
        optimizer = kind(groups, lr=0.1)  # type: ignore[call-arg]
        charged: list[Exception] = []
        switch = switch_of(TrainedModel(net, net), optimizer)
        for step in range(3):
            optimizer.zero_grad()
            net(torch.ones(4, 3)).square().sum().backward()
            with monkeypatch.context() as patch:
                if step == 1 and fused:
                    switch.set(OWN.replace(fused_optimizer=True), charged.append)
                    patch.setattr(torch, kernel, failing(getattr(torch, kernel), works))
                optimizer.step()
        assert [str(one) for one in charged] == ["no such kernel"] * fused
        assert not optimizer.param_groups[0]["fused"]
        switch.release()
        assert "step" not in vars(optimizer)
        states = [s for state in optimizer.state.values() for s in state.values() if s is not None]
        trained.append([p.detach() for p in net.parameters()] + states)
    torch.testing.assert_close(*trained)


def test_a_scheduler_that_comes_while_a_step_is_protected_works() -> None:
    net = Net()
    optimizer, switch = switched(net)
    switch.set(OWN.replace(fused_optimizer=True))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trained(net, 1, optimizer)
    scheduler.step()
    switch.release()
    trained(net, 1, optimizer)
    scheduler.step()


def test_a_patch_leaves_what_came_later() -> None:
    class Owner:
        def name(self) -> str:
            return "own"

    def patch(where: Any, word: str) -> Patch:
        return Patch(where, "name", lambda plain: lambda *args: f"{word} {plain(*args)}")

    ours, theirs = (patch(Owner, word) for word in ("ours", "theirs"))
    names = [Owner().name()]
    for one in (ours, theirs):
        one.remove()
        names.append(Owner().name())
    assert names == ["theirs ours own", "theirs own", "own"]


def test_weights_keep_an_address_for_each_layout() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    trained(net, 1, optimizer)
    switch = switch_of(TrainedModel(net, net), optimizer)

    def there() -> list[Tensor]:
        return [net.conv.weight.detach(), optimizer.state[net.conv.weight]["exp_avg"]]

    other = OWN.replace(channels_last=True)
    found: list[list[int]] = []
    for config in (OWN, other) * 3:
        before = [one.clone() for one in there()]
        switch.set(config)
        assert all(map(torch.equal, before, there()))
        found.append([one.data_ptr() for one in there()])
        trained(net, 1, optimizer)
    assert found == [found[0], found[1]] * 3 and found[0] != found[1]
    # What the script loads is its own again.
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loaded = there()[1].clone()
    switch.set(OWN)
    assert torch.equal(loaded, there()[1])
    for act in (switch.set, lambda _other: switch.set(OWN), switch.forget):
        act(other)
    assert not switch._storages._kept


def test_the_step_of_a_critic_waits_for_its_generator() -> None:
    critic, generator = nn.Linear(2, 1), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, generator)]
    observer = LoopObserver()
    found = []
    for step in range(18):
        noise = torch.zeros(3, 2)
        observer.on_call(generator, (noise,), {})
        if step == 0:  # a few sample images
            observer.on_call(generator, (torch.zeros(100, 2),), {})
        observer.on_call(critic, (noise,), {})
        observer.on_step(optimizers[step % 6 == 5])
        found.append(observer.period())
    assert found == [0] * 17 + [6]
    assert observer.trained()[0].batch(6) == 6 * 3
    later = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert [observer.kind(one) for one in (later, optimizers[1])] == ["similar", "known"]
    # That of a model which none has trained has the script looked at anew.
    untrained = nn.Linear(2, 1)
    observer.on_call(untrained, (noise[:, :2],), {})
    assert observer.kind(torch.optim.SGD(untrained.parameters(), lr=0.1)) == "new"


def test_a_list_of_images_is_one_input() -> None:
    sizes = ((4, 5), (4, 6))
    images = [torch.zeros(3, *size) for size in sizes]
    targets = [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (1, 2)]
    found = inputs_of((images, targets), {})
    assert [(one.name, one.shape) for one in found] == [
        ("0", (2, 3, 4, 0)),
        ("1.boxes", (2, 0, 4)),
        ("1.labels", (2, 0)),
    ]  # 0: it differs from image to image
    assert batch_of((images, targets), {}) == 2
    mixed = inputs_of(([torch.zeros(2), torch.zeros(2, 3)],), {"mask": torch.zeros(2).bool()})
    assert [one.shape for one in mixed] == [(2,), (2, 3), (2,)]
    assert batch_of((), {"x": (None, torch.zeros(4, 2))}) == 4


REPLAYED = OWN.replace(compile="reduce-overhead")
LAID_OUT = REPLAYED.replace(precision="bf16", channels_last=True)


def recorded() -> list[Any]:
    """Every CUDA graph that there is."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(0, create_if_none_exists=False)
    waiting = [node for nodes in manager.roots.values() for node in nodes] if manager else []
    found = []
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += [child for nodes in node.children.values() for child in nodes]
    return found


@pytest.mark.gpu
def test_graphs_outlast_a_switch_and_go_where_they_are_forgotten() -> None:
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    switch = switch_of(TrainedModel(net, net), optimizer, device="cuda:0")
    x = torch.randn(8, 4, 16, 16, device="cuda")

    def steps(config: Config) -> None:
        switch.set(config)
        for _ in range(5):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            switch.begin_step(freed=True)

    for config in (OWN, REPLAYED, LAID_OUT, OWN):
        steps(config)
    before = set(map(id, recorded()))
    assert before
    for config in (REPLAYED, OWN, LAID_OUT, REPLAYED):
        steps(config)
    assert set(map(id, recorded())) == before
    steps(OWN)
    switch.forget(LAID_OUT)
    kept = set(map(id, recorded()))
    assert kept < before
    steps(REPLAYED)
    assert set(map(id, recorded())) == kept
    steps(LAID_OUT)
    assert len(recorded()) > len(kept)


@pytest.mark.gpu
def test_a_generator_that_is_called_between_steps() -> None:
    def made(width: int, end: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, end)).cuda()

    generator, critic = made(8, 16), made(16, 1)
    makes, tells = (torch.optim.Adam(net.parameters()) for net in (generator, critic))
    trained = [TrainedModel(net, net) for net in (generator, critic)]
    switch = switch_of(*trained, makes, tells, device="cuda:0")
    fixed = torch.randn(32, 8, device="cuda")
    seen: list[Tensor] = []

    def step(number: int) -> None:
        critic.zero_grad()
        critic(torch.randn(32, 16, device="cuda")).mean().backward()
        fake = generator(torch.randn(32, 8, device="cuda"))
        (-critic(fake.detach()).mean()).backward()
        tells.step()
        generator.zero_grad()
        critic(fake).mean().backward()
        makes.step()
        switch.begin_step(freed=True)
        if number % 4 == 0:
            with torch.no_grad():
                seen.append(generator(fixed))

    for config in (OWN, REPLAYED, OWN, REPLAYED):
        switch.set(config)
        for number in range(12):
            step(number)
    assert all(bool(one.isfinite().all()) for one in seen)
