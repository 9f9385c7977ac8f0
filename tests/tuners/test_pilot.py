"""The pilot's parts: what trains, what a step is, what is set and set back."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from advisor.cache.config import Config
from advisor.errors import AdvisorWarning
from advisor.tuners import compiling
from advisor.tuners.act import hooks
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.act.hooks import Patch, StepHooks
from advisor.tuners.act.pilot.loop_observer import (
    LoopObserver,
    TrainedModel,
    batch_of,
    inputs_of,
    period,
)
from advisor.tuners.act.pilot.pilot import Pilot
from advisor.tuners.act.pilot.protocol import BlockRequest, BlockResult
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.act.pilot.switch import ConfigSwitch, _detach_regions, callable_module
from advisor.tuners.act.pilot.trees import map_tensors
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.faults import is_config_error, may_be_config_error
from advisor.tuners.knobs import BY_NAME, LoaderFacts, ScriptSettings, SearchContext
from advisor.tuners.search.space import Space
from tests.runs.forked import left_behind

OWN = Config(
    precision="default", channels_last=False, fused_optimizer=False, compile="none", batch_size=4
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        self.dtypes.append(out.dtype)
        return out.mean((2, 3))


class OnDevice(Tensor):
    """Of the CPU, and moved there as another device's tensor is: into a new one."""

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor).clone()


def switch_of(trained: TrainedModel, *optimizers: torch.optim.Optimizer) -> ConfigSwitch:
    cpu = torch.device("cpu")
    return ConfigSwitch([trained], optimizers, OWN, cpu, lambda _given: None)


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    loss = net(torch.randn(4, 3, 8, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@pytest.fixture
def flown() -> tuple[Net, torch.optim.Optimizer, ConfigSwitch]:
    PROCESS_FLAGS.release()  # what tests of other files have left
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    stepped(net, optimizer)
    trained = TrainedModel(net, net, ())
    return net, optimizer, switch_of(trained, optimizer)


@pytest.mark.parametrize(
    ("order", "kinds", "expected"),
    [
        ([0, 0], 1, 1),
        ([0, 1, 0, 1], 2, 2),
        ([0, 0, 0, 1, 0, 0, 0, 1], 2, 4),
        ([0, 1, 0, 1], 3, 0),
        ([0, 0, 1], 2, 0),
        ([0], 1, 0),
    ],
)
def test_the_group_of_optimizer_steps_that_repeats(
    order: list[int], kinds: int, expected: int
) -> None:
    assert period(order, kinds) == expected


def test_inputs_are_named_where_they_stand() -> None:
    found = [*inputs_of((torch.zeros(2, 3), (torch.zeros(2),)), {"mask": torch.zeros(2).bool()})]
    assert [one.name for one in found] == ["0", "1.0", "mask"]
    assert found[0].shape == (2, 3)
    assert found[2].dtype == "bool"


def test_a_config_acts_and_leaves_nothing(
    flown: tuple[Net, torch.optim.Optimizer, ConfigSwitch],
) -> None:
    net, optimizer, switch = flown
    strides = [p.stride() for p in net.parameters()]
    group = dict(optimizer.param_groups[0])
    there = OWN.replace(precision="bf16", channels_last=True)
    switch.set(there)
    loss = stepped(net, optimizer)
    assert net.dtypes[-1] == torch.bfloat16
    assert loss.dtype == torch.float32
    layout = torch.channels_last
    assert net.conv.weight.is_contiguous(memory_format=layout)
    momentum = optimizer.state[net.conv.weight]["momentum_buffer"]
    assert momentum.stride() == net.conv.weight.stride()
    switch.set(OWN)
    stepped(net, optimizer)
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
def test_a_checkpoint_is_as_the_scripts_own(
    kind: type[torch.optim.Adam | torch.optim.SGD], own: dict[str, bool]
) -> None:
    net = Net()
    optimizer = kind(net.parameters(), lr=0.1, **own)
    stepped(net, optimizer)
    plain = optimizer.state_dict()
    switch = switch_of(TrainedModel(net, net, ()), optimizer)
    switch.set(OWN.replace(fused_optimizer=True))
    stepped(net, optimizer)
    saved = optimizer.state_dict()
    assert optimizer.param_groups[0]["fused"] is True
    assert saved["param_groups"] == plain["param_groups"]
    assert {i: set(kept) for i, kept in saved["state"].items()} == {
        i: set(kept) for i, kept in plain["state"].items()
    }
    other = Net()
    later = kind(other.parameters(), lr=0.1, **own)
    later.load_state_dict(copy.deepcopy(saved))
    stepped(other, later)
    assert later.param_groups[0]["fused"] == plain["param_groups"][0]["fused"]
    switch.release()
    assert not optimizer._optimizer_state_dict_post_hooks


def test_a_step_on_the_device_is_saved_on_the_host() -> None:
    """What is saved is a copy: the optimizer goes on with what it has."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    stepped(net, optimizer)
    switch = switch_of(TrainedModel(net, net, ()), optimizer)
    for kept in optimizer.state.values():
        kept["step"] = OnDevice(kept["step"])
    saved = optimizer.state_dict()["state"]
    assert all(type(kept["step"]) is Tensor for kept in saved.values())
    assert all(isinstance(kept["step"], OnDevice) for kept in optimizer.state.values())
    switch.release()


def test_a_group_that_came_later_is_saved_too(
    flown: tuple[Net, torch.optim.Optimizer, ConfigSwitch],
) -> None:
    _net, optimizer, switch = flown
    switch.set(OWN.replace(fused_optimizer=True))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})
    assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == [0.1, 0.5]
    switch.release()


def test_a_compilation_that_is_given_up_is_noticed(
    flown: tuple[Net, torch.optim.Optimizer, ConfigSwitch],
) -> None:
    _net, _optimizer, switch = flown

    @torch.compile(backend="eager", dynamic=False)
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    def varied() -> None:
        with torch._dynamo.config.patch(recompile_limit=1):
            for size in (2, 3):
                doubled(torch.ones(size))

    switch.set(OWN.replace(compile="default"))
    assert not switch.fell_back
    varied()
    assert switch.fell_back
    switch.set(OWN)
    assert not switch.fell_back
    switch.release()


def test_what_the_script_raises_is_its_own_and_the_advice_stays(
    flown: tuple[Net, torch.optim.Optimizer, ConfigSwitch],
) -> None:
    net, _optimizer, switch = flown
    on_error: list[Exception] = []
    switch.set(OWN.replace(precision="bf16"), on_error.append)

    def refuses(*_: object) -> None:
        raise ValueError("bad batch")

    batch = torch.randn(4, 3, 8, 8)
    hook = net.conv.register_forward_pre_hook(refuses)
    with pytest.raises(ValueError, match="bad batch") as caught:
        net(batch)
    (note,) = caught.value.__notes__
    assert "raised in a second call" in note
    hook.remove()
    net(batch)
    assert net.dtypes[-1] == torch.bfloat16
    assert not on_error
    switch.release()


def test_a_checkpoint_that_stops_early_is_no_failure_of_the_advice(
    flown: tuple[Net, torch.optim.Optimizer, ConfigSwitch],
) -> None:
    """PyTorch raises in the second call, once it has what it needs."""
    net, _optimizer, switch = flown
    on_error: list[Exception] = []
    switch.set(OWN.replace(precision="bf16"), on_error.append)
    net.dtypes.clear()
    batch = torch.randn(4, 3, 8, 8)
    checkpoint(net, batch, use_reentrant=False).sum().backward()
    assert not on_error
    assert net.dtypes == [torch.bfloat16]
    switch.release()


def test_what_a_config_may_be_why_of() -> None:
    class Own(RuntimeError):
        pass

    compiling = torch._dynamo.exc.InternalTorchDynamoError("in the compiler")
    for exc in (compiling, torch.OutOfMemoryError("no memory left")):
        assert is_config_error(exc)
        assert may_be_config_error(exc)
    for exc in (RuntimeError("view size"), NotImplementedError("on this device")):
        assert not is_config_error(exc)
        assert may_be_config_error(exc)
    for exc in (ValueError("bad batch"), Own("the same")):
        assert not may_be_config_error(exc)


def test_evaluation_is_left_to_the_script(
    flown: tuple[Net, torch.optim.Optimizer, ConfigSwitch],
) -> None:
    net, _optimizer, switch = flown
    switch.set(OWN.replace(precision="bf16"))
    net.eval()
    net(torch.randn(4, 3, 8, 8))
    assert net.dtypes[-1] == torch.float32
    net.train()
    with torch.no_grad():
        net(torch.randn(4, 3, 8, 8))
    assert net.dtypes[-1] == torch.float32
    switch.release()


def _pickled(net: nn.Module) -> nn.Module:
    kept = io.BytesIO()
    torch.save(net, kept)
    kept.seek(0)
    found: nn.Module = torch.load(kept, weights_only=False)
    return found


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_copies_are_free_of_the_pilot(
    flown: tuple[Net, torch.optim.Optimizer, ConfigSwitch], copied: Callable[[nn.Module], nn.Module]
) -> None:
    net, _optimizer, switch = flown
    switch.set(OWN.replace(precision="bf16"))
    other = copied(net)
    assert "_compiled_call_impl" not in vars(other)
    other(torch.randn(4, 3, 8, 8))
    assert isinstance(other, Net)
    assert other.dtypes[-1] == torch.float32
    switch.release()


def test_where_replicas_are_made_nothing_sits_in_the_model() -> None:
    net = Net()
    assert callable_module(net) is net
    wrapped = nn.DataParallel(net)
    assert callable_module(wrapped) is net  # on one device, or none, it copies nothing
    wrapped.device_ids = [0, 1]
    assert callable_module(wrapped) is None


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A job of one process: its gradients go through buckets all the same."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_that_are_exchanged_are_the_models_own(hooked: bool) -> None:
    net = Net()
    other = copy.deepcopy(net)
    parallel = nn.parallel.DistributedDataParallel(net)
    if hooked:
        parallel.register_comm_hook(None, default_hooks.allreduce_hook)
    switch = switch_of(TrainedModel(parallel, net, ()))
    batch = torch.randn(4, 3, 8, 8)
    for channels_last in (False, True, False):
        switch.set(OWN.replace(channels_last=channels_last))
        for _ in range(3):  # the buckets are made anew after the first
            net.zero_grad()
            other.zero_grad()
            for model in (parallel, other):
                model(batch).square().mean().backward()
            for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
        laid_out = net.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert laid_out == (channels_last and not hooked)
    switch.release()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("hooked", [False, True])
def test_a_model_that_is_wrapped_already_is_prepared(hooked: bool) -> None:
    net = Net()
    other = copy.deepcopy(net)
    parallel = nn.parallel.DistributedDataParallel(net)
    if hooked:
        parallel.register_comm_hook(None, default_hooks.allreduce_hook)
    advice = Advice(Config(channels_last=True), device="cpu")
    with pytest.warns(AdvisorWarning, match="before") if hooked else nullcontext():
        model = advice.prepare(parallel)
    assert model is parallel
    batch = torch.randn(4, 3, 8, 8)
    for one in (parallel, other):
        one(batch).square().mean().backward()
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(("kept", "frees_gradients"), [(None, True), (False, False), (True, False)])
def test_whether_gradients_outlive_a_step_is_seen(kept: bool | None, frees_gradients: bool) -> None:
    net, observer = Net(), LoopObserver()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        loss = net(torch.randn(4, 3, 8, 8)).square().mean()
        if not kept:
            optimizer.zero_grad(set_to_none=kept is None)
        loss.backward()
        optimizer.step()
        observer.on_step(optimizer)
    assert observer.frees_gradients == frees_gradients


def test_the_loss_that_autocast_forbids_is_outside() -> None:
    net = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(net.parameters())
    switch = switch_of(TrainedModel(net, net, ()), optimizer)
    switch.set(OWN.replace(precision="bf16"))
    loss = functional.binary_cross_entropy(net(torch.randn(4, 3)), torch.ones(4, 1))
    loss.backward()
    assert loss.isfinite()
    switch.release()


@dataclass(frozen=True)
class Output:
    features: Tensor
    more: dict[str, Tensor]


class Loose:
    """An object of the script's own, that knows itself."""

    def __init__(self, features: Tensor, more: dict[str, Tensor]) -> None:
        self.features, self.more, self.itself = features, more, self


class Slotted:
    __slots__ = ("features", "more", "never")

    def __init__(self, features: Tensor, more: dict[str, Tensor]) -> None:
        self.features, self.more = features, more


class Table(dict[str, Any]):
    """As libraries' outputs: its items are its attributes."""

    def __init__(self, features: Any = None, more: Any = None) -> None:
        super().__init__(features=features, more=more)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.parametrize("kind", [Output, Loose, Slotted, Table])
def test_what_a_model_returns_is_as_it_always_was(kind: type[Any]) -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Any:
            features = self.conv(x)
            return kind(features, {"mean": features.mean((2, 3))})

    net = Returning()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    switch = switch_of(TrainedModel(net, net, ()), optimizer)
    switch.set(OWN.replace(precision="bf16", channels_last=True))
    found = net(torch.randn(4, 3, 8, 8))
    assert type(found) is kind
    assert (found.features.dtype, found.more["mean"].dtype) == (torch.float32, torch.float32)
    found.features.view(4, -1).sum().backward()
    switch.release()


def test_an_object_without_half_precision_in_it_is_the_models_own() -> None:
    given = {"a": Loose(torch.ones(1), {}), "kind": Loose, "net": nn.Linear(1, 1)}
    found = map_tensors(lambda tensor: tensor, given)
    assert all(found[name] is one for name, one in given.items())


@torch._dynamo.config.patch(recompile_limit=9)
def test_the_limit_of_recompilations_is_the_scripts_own_again(
    flown: tuple[Net, torch.optim.Optimizer, ConfigSwitch],
) -> None:
    _net, _optimizer, switch = flown
    switch.set(OWN.replace(compile="default"))
    assert torch._dynamo.config.recompile_limit == 64
    switch.release()
    assert torch._dynamo.config.recompile_limit == 9


# torch.compile looks for one, and hides the warning in a way that does not count here.
looks_for_gradients = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Repeating(nn.Module):
    """Notes which of its blocks run as Python; a compiled one does so while it is traced only."""

    class Block(nn.Module):
        def __init__(self, ran: list[str]) -> None:
            super().__init__()
            self.inner, self.ran = nn.Linear(8, 8), ran

        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                self.ran.append("plainly")
            return x + torch.tanh(self.inner(x))

    def __init__(self, *, in_backward: bool = False) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.blocks = nn.ModuleList(self.Block(self.ran) for _ in range(4))
        self.in_backward = in_backward
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.in_backward else block(x)
        if self.fails:
            raise ValueError("bad batch")
        return x


@pytest.fixture
def compiled_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_by_inductor", lambda _mode: {"backend": "eager"})


@looks_for_gradients
@pytest.mark.parametrize("in_backward", [False, True])
def test_repeated_blocks_are_compiled_for_training_alone(
    in_backward: bool, compiled_eagerly: None
) -> None:
    net = Repeating(in_backward=in_backward)
    switch = switch_of(TrainedModel(net, net, ()), torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.randn(3, 8)
    for _ in range(2):
        switch.set(OWN.replace(compile="blocks"))
        net(x).sum().backward()
        assert net.ran == []
        net.eval()
        net(x)
        assert net.ran == ["plainly"] * 4
        net.train()
        net.ran.clear()
        net(x).sum().backward()
        assert net.ran == []
        switch.set(OWN)
        net(x).sum().backward()
        assert net.ran == ["plainly"] * (8 if in_backward else 4)
        net.ran.clear()
    switch.set(OWN.replace(compile="blocks"))
    switch.release()
    assert all("_compiled_call_impl" not in vars(module) for module in net.modules())


@looks_for_gradients
def test_where_compiled_blocks_fail_they_are_called_as_they_are(compiled_eagerly: None) -> None:
    net = Repeating()
    switch = switch_of(TrainedModel(net, net, ()), torch.optim.SGD(net.parameters(), lr=0.1))
    on_error: list[Exception] = []
    x = torch.randn(3, 8)
    switch.set(OWN.replace(compile="blocks"), on_error.append)
    net.fails = True
    with pytest.raises(ValueError, match="bad batch"):  # the script's own: the advice stays
        net(x)
    assert net.ran == ["plainly"] * 4 and not on_error
    net.fails = False
    net.ran.clear()
    net(x)
    assert net.ran == []

    def breaks(*_: object) -> None:
        raise RuntimeError("a wrong kernel")

    for block in net.blocks:
        hooks.replace_call(block, breaks)
    switch.calls[0].regions = _detach_regions(net)
    switch.calls[0].put(True)
    net(x)
    assert net.ran == ["plainly"] * 4
    assert [str(one) for one in on_error] == ["a wrong kernel"]
    switch.drop_config()
    net.ran.clear()
    net(x)
    assert net.ran == ["plainly"] * 4
    assert all("_compiled_call_impl" not in vars(block) for block in net.blocks)
    switch.release()


@pytest.mark.parametrize("kind", [Net, Repeating])
def test_blocks_that_a_script_repeats_are_seen(kind: type[nn.Module]) -> None:
    net = kind()
    one = seen(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert space_of(one).offers("compile", "blocks") is (kind is Repeating)


def seen(net: nn.Module, *optimizers: torch.optim.Optimizer) -> ScriptFacts:
    """Of a script that made four steps."""
    observer = LoopObserver()
    for _ in range(4):
        net(x := torch.randn(4, 3, 8, 8)).sum().backward()
        observer.on_call(net, (x,), {})
        for optimizer in optimizers:
            observer.on_step(optimizer)
    return ScriptFacts.of(observer, LoaderFacts())


def space_of(one: ScriptFacts) -> Space:
    return Space.of(
        SearchContext(
            device="cuda",
            capability=(9, 0),
            batches=(4,),
            repeats=one.repeats,
            compiles=True,
            use="pilot",
            own=one.own,
            kept=one.kept,
        )
    )


def test_what_a_script_is() -> None:
    net = Net()
    one = seen(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert one.shape == (4, 3, 8, 8)
    assert one.optimizer == "sgd"
    assert not one.own
    space = space_of(one)
    # What a script must be rewritten for is not there.
    assert set(space.choices["precision"]) == {"default", "tf32", "bf16"}
    assert "step_graph" not in space.choices or space.choices["step_graph"] == (False,)
    assert not space.inputs


def test_what_a_script_does_itself_is_kept() -> None:
    net = Net().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    space = space_of(seen(net, optimizer))
    assert space.choices["channels_last"] == (True,)
    assert space.choices["fused_optimizer"] == (True,)
    assert len(space.choices["precision"]) > 1


def test_a_job_of_replicas_is_told_what_is_tuned_whole() -> None:
    net = Net()
    wrapped = nn.DataParallel(net)
    wrapped.device_ids = [0, 1]
    observer = LoopObserver()
    observer.called[wrapped] = TrainedModel(wrapped, net, ())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        observer.on_step(optimizer)
    one = ScriptFacts.of(observer, LoaderFacts())
    (line,) = one.lines()
    assert line.endswith("under torchrun and DistributedDataParallel is faster, and tuned whole")
    assert {"channels_last", "compile", "fused_optimizer"} <= set(one.kept)


def test_half_precision_is_no_choice_under_lbfgs() -> None:
    net = Net()
    one = seen(net, torch.optim.LBFGS(net.parameters()))
    assert space_of(one).choices["precision"] == ("default",)
    assert any("LBFGS" in line for line in one.lines())


def test_inputs_of_many_lengths_are_one_job_however_long_the_first_is() -> None:
    net = nn.Embedding(9, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def of(*lengths: int) -> ScriptFacts:
        observer = LoopObserver()
        for length in lengths:
            x = torch.zeros(4, length, dtype=torch.int64)
            observer.on_call(net, (x,), {"mask": x > 0})
            observer.on_step(optimizer)
        return ScriptFacts.of(observer, LoaderFacts())

    one, other, fixed = of(5, 5, 7, 5), of(8, 6, 6, 6), of(5, 5, 5, 5)
    assert (one.shape, one.others, one.varies) == (other.shape, other.others, True)
    assert (fixed.shape, fixed.varies) == ((4, 5), False)
    assert "compile" in space_of(fixed).choices
    assert "dynamic_shapes" not in space_of(fixed).choices


def test_a_script_with_half_weights_keeps_them() -> None:
    own = BY_NAME["precision"].script
    assert own is not None
    found = own(ScriptSettings(weights=[torch.zeros(1, dtype=torch.bfloat16)]))
    assert found is not None
    assert (found.value, found.locked) == ("bf16", True)
    assert own(ScriptSettings(weights=[torch.zeros(1)])) is None
    found = own(ScriptSettings(weights=[torch.zeros(1)], autocast=torch.float16))
    assert found is not None
    assert found.value == "fp16"


def test_what_comes_and_goes_within_a_step_disturbs_no_other_hook() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    told: list[str] = []
    steps = StepHooks()

    def once(_optimizer: torch.optim.Optimizer) -> None:
        told.append("ours")
        remove()
        later.append(steps.register(lambda _optimizer: told.append("the next of ours")))

    later: list[Callable[[], None]] = []
    remove = steps.register(once)
    other = register_optimizer_step_post_hook(lambda *_: told.append("theirs"))
    for _ in range(2):
        stepped(net, optimizer)
    later[0]()
    stepped(net, optimizer)
    other.remove()
    assert told == ["ours", "theirs", "the next of ours", "theirs", "theirs"]


def test_the_last_that_goes_within_a_step_takes_the_hook_with_it() -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    other = register_optimizer_step_post_hook(lambda *_: None)
    there = len(_global_optimizer_post_hooks)
    steps = StepHooks()
    remove = steps.register(lambda _optimizer: remove())
    stepped(net, optimizer)
    net(torch.ones(2, 3, 8, 8))
    assert len(_global_optimizer_post_hooks) == there
    other.remove()


class Refusing:
    """A guide that leaves every script alone, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def takes_over(self) -> bool:
        self.asked += 1
        return False

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        raise AssertionError("it does not take over")

    def next(self, result: BlockResult) -> BlockRequest:
        raise AssertionError("it does not take over")

    def failed(self, exc: BaseException) -> None:
        raise AssertionError("nothing fails") from exc

    config_dropped = failed


class Told(Refusing):
    """The same, that keeps why it was never asked."""

    said = ""

    def failed(self, exc: BaseException) -> None:
        self.said = str(exc)


class Blocks(nn.Module):
    """Recomputes its one block in backward; raises where it is asked to."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.block = nn.Linear(4, 4)

    def forward(self, *, x: Tensor, stops: bool = False) -> Tensor:
        if stops:
            raise StopIteration
        found: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_called_within_is_no_model_of_its_own(reentrant: bool) -> None:
    """Nor is what a checkpoint calls again in backward, or what comes after a call that raises."""
    net = Blocks(reentrant)
    observer = LoopObserver()
    calls = hooks.CallHooks(observer.on_call, observer.on_autocast)
    for _ in range(2):
        with pytest.raises(StopIteration):
            net(x=torch.ones(2, 4), stops=True)
        net(x=torch.ones(2, 4, requires_grad=True)).sum().backward()
    calls.remove()
    (seen,) = observer.called.values()
    assert seen.outer is net
    assert seen.samples == 4
    assert [one.name for one in seen.inputs] == ["x"]


def test_the_autocast_of_a_compiled_model_is_seen_and_no_hook_is_warned_of() -> None:
    net, observer = nn.Sequential(nn.Linear(4, 2)), LoopObserver()
    model = torch.compile(net, backend="eager")
    calls = hooks.CallHooks(observer.on_call, observer.on_autocast)
    with warnings.catch_warnings(record=True) as warned:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.ones(2, 4))
    calls.remove()
    assert observer.autocast == torch.bfloat16
    assert not [one for one in warned if "global hooks" in str(one.message)]


@pytest.mark.parametrize("what", ["function", "model"])
def test_what_a_script_compiles_is_not_compiled_again(what: str) -> None:
    """The pilot's own hooks are part of what is traced while they are there."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net = nn.Sequential(inner, nn.Linear(4, 2)) if what == "model" else inner
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    call = net
    if what == "model":
        inner.compile(backend="eager")
    else:
        call = torch.compile(lambda x: net(x), backend="eager")
    torch.compiler.reset()
    before, guide = graphs_compiled(), Told()
    pilot = Pilot(guide)
    for _ in range(8):
        optimizer.zero_grad()
        call(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert graphs_compiled() - before == 1
    assert guide.asked == (what == "model")
    assert ("compile the model instead" in guide.said) == (what == "function")
    pilot.release()
    assert left_behind() == []


def test_a_pilot_that_leaves_is_gone_at_once() -> None:
    """Also before the next call of a model, which is when its hook goes."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guide = Refusing()
    pilot = Pilot(guide)
    for _ in range(4):
        stepped(net, optimizer)
        optimizer.step()
        optimizer.step()
    pilot.release()
    assert guide.asked == 1


def test_a_pilot_that_leaves_holds_on_to_no_model() -> None:
    """As of a cross-validation, which builds the next one then."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    pilot = Pilot(Refusing())
    for _ in range(4):
        stepped(net, optimizer)
    held = [weakref.ref(one) for one in (net, optimizer)]
    del net, optimizer
    gc.collect()
    assert [one() for one in held] == [None, None]
    pilot.release()


class Lapping(Refusing):
    """Has laps of five steps made, and keeps what each has in it."""

    def __init__(self) -> None:
        self.done = ""
        self.results: list[str] = []

    def takes_over(self) -> bool:
        return True

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
        stepped(net, optimizer)
    pilot.release()
    assert len(guide.results) > 3 and set(guide.results) == {result}


class Failing:
    """Fused kernels that fail, once so many were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, works: int = 0) -> None:
        self._plain, self._left = getattr(torch, name), works
        monkeypatch.setattr(torch, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("no such kernel")
        return self._plain(*args, **kwargs)


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
        on_error: list[Exception] = []
        switch = switch_of(TrainedModel(net, net), optimizer)
        for step in range(3):
            optimizer.zero_grad()
            net(torch.ones(4, 3)).square().sum().backward()
            if step == 1 and fused:
                switch.set(OWN.replace(fused_optimizer=True), on_error.append)
                with monkeypatch.context() as patch:
                    Failing(patch, kernel, works)
                    optimizer.step()
                assert [str(one) for one in on_error] == ["no such kernel"]
                assert not optimizer.param_groups[0]["fused"]
            else:
                optimizer.step()
        switch.release()
        assert "step" not in vars(optimizer)
        states = [s for state in optimizer.state.values() for s in state.values() if s is not None]
        trained.append([p.detach() for p in net.parameters()] + states)
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other)


def test_sparse_gradients_have_no_fused_kernels() -> None:
    net = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    observer = LoopObserver()
    for _ in range(4):
        net(x := torch.zeros(4, dtype=torch.int64)).sum().backward()
        observer.on_call(net, (x,), {})
        observer.on_step(optimizer)
    assert space_of(ScriptFacts.of(observer, LoaderFacts())).choices["fused_optimizer"] == (False,)
    switch = switch_of(TrainedModel(net, net), optimizer)
    switch.set(OWN.replace(fused_optimizer=True))
    optimizer.step()
    assert not optimizer.param_groups[0]["fused"]
    switch.release()


def test_a_scheduler_that_comes_while_a_step_is_protected_works() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    switch = switch_of(TrainedModel(net, net), optimizer)
    switch.set(OWN.replace(fused_optimizer=True))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    stepped(net, optimizer)
    scheduler.step()
    switch.release()
    stepped(net, optimizer)
    scheduler.step()


def test_a_patch_leaves_what_came_later() -> None:
    class Owner:
        def name(self) -> str:
            return "own"

    def around(word: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda plain: lambda *args: f"{word} {plain(*args)}"

    own = vars(Owner)["name"]
    ours, theirs = (Patch(Owner, "name", around(word)) for word in ("ours", "theirs"))
    assert Owner().name() == "theirs ours own"
    ours.remove()
    assert Owner().name() == "theirs own"
    theirs.remove()
    assert Owner().name() == "own"
    other = Patch(Owner, "name", around("other"))
    ours.remove()
    assert Owner().name() == "other own"
    other.remove()
    assert Owner().name() == "own"
    one = Owner()
    patch = Patch(one, "name", around("its"))
    assert (one.name(), Owner().name()) == ("its own", "own")
    patch.remove()
    assert not vars(one) and own


def test_weights_keep_an_address_for_each_layout() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    stepped(net, optimizer)
    switch = switch_of(TrainedModel(net, net), optimizer)

    def addresses() -> list[int]:
        state = optimizer.state[net.conv.weight]
        return [one.data_ptr() for one in (net.conv.weight, state["exp_avg"])]

    other = OWN.replace(channels_last=True)
    found: list[list[int]] = []
    for config in (OWN, other) * 3:
        before = [net.conv.weight.detach().clone(), optimizer.state[net.conv.weight]["exp_avg"] + 0]
        switch.set(config)
        after = [net.conv.weight.detach(), optimizer.state[net.conv.weight]["exp_avg"]]
        assert all(map(torch.equal, before, after))
        found.append(addresses())
        stepped(net, optimizer)
    assert found[0::2] == [found[0]] * 3
    assert found[1::2] == [found[1]] * 3
    assert found[0] != found[1]
    # What the script loads is its own again.
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = [optimizer.state[net.conv.weight]["exp_avg"].clone()]
    switch.set(OWN)
    assert torch.equal(before[0], optimizer.state[net.conv.weight]["exp_avg"])
    switch.set(other)
    switch.set(OWN)
    switch.forget(other)
    assert not switch._storages._kept
    switch.release()


def test_the_step_of_a_critic_waits_for_its_generator() -> None:
    critic, generator = nn.Linear(2, 1), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, generator)]
    observer = LoopObserver()
    found = []
    for step in range(12):
        noise = torch.zeros(3, 2)
        observer.on_call(generator, (noise,), {})
        observer.on_call(critic, (noise,), {})
        observer.on_step(optimizers[step % 6 == 5])
        found.append(observer.period())
    assert found == [0] * 11 + [6]
    later = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert [observer.kind(one) for one in (later, optimizers[1])] == ["similar", "known"]


def test_an_optimizer_that_comes_later_has_the_script_looked_at_anew() -> None:
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    first = torch.optim.SGD(one.parameters(), lr=0.1)
    observer = LoopObserver()
    for _ in range(4):
        for net in (one, other):
            observer.on_call(net, (torch.zeros(3, 2),), {})
        observer.on_step(first)
    assert observer.period() == 1
    assert observer.kind(torch.optim.SGD(other.parameters(), lr=0.1)) == "new"


@pytest.mark.parametrize(
    ("samples", "period", "expected"),
    [
        ([64, 64, 64, 64], 1, 64),
        ([64, 64, 128, 64], 1, 64),  # a GradScaler left a step out
        ([96, 64, 64, 64], 1, 64),  # an extra call
        ([64, 64, 64, 32], 1, 64),
        ([8, 0, 8, 0], 2, 8),
        ([5, 8, 0, 8, 0], 2, 8),
        ([], 1, 0),
    ],
)
def test_the_batch_is_the_most_frequent_one(samples: list[int], period: int, expected: int) -> None:
    net = nn.Linear(2, 1)
    assert TrainedModel(net, net, steps=samples).batch(period) == expected


def test_a_list_of_images_is_one_input() -> None:
    sizes = ((4, 5), (4, 6))
    images = [torch.zeros(3, *size) for size in sizes]
    targets = [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (1, 2)]
    found = inputs_of((images, targets), {})
    assert [(one.name, one.shape) for one in found] == [
        ("0", (2, 3, 4, 0)),
        ("1.boxes", (2, 0, 4)),
        ("1.labels", (2, 0)),
    ]
    assert batch_of((images, targets), {}) == 2
    mixed = inputs_of(([torch.zeros(2), torch.zeros(2, 3)],), {})
    assert [(one.name, one.shape) for one in mixed] == [("0.0", (2,)), ("0.1", (2, 3))]
    assert batch_of((), {"x": (None, torch.zeros(4, 2))}) == 4
