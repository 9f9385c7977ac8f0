"""The pilot: observing the training loop, switching configs, and undoing every change."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
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
from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.act.gate import signature
from advisor.tuners.act.hooks import Patch
from advisor.tuners.act.pilot.loop_observer import LoopObserver, TrainedModel, batch_of, inputs_of
from advisor.tuners.act.pilot.pilot import IN_THREADS, Pilot
from advisor.tuners.act.pilot.protocol import BlockRequest, BlockResult
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.act.pilot.switch import ConfigSwitch
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.act.trees import map_tensors
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
    models = [one for one in given if isinstance(one, TrainedModel)]
    optimizers = [one for one in given if isinstance(one, torch.optim.Optimizer)]
    place = torch.device(device)
    SWITCHES.append(ConfigSwitch(models, optimizers, OWN, place, lambda _given: None))
    return SWITCHES[-1]


def switched(net: nn.Module, **how: Any) -> tuple[torch.optim.Optimizer, ConfigSwitch]:
    optimizer = torch.optim.SGD(net.parameters(), **{"lr": 0.1, **how})
    return optimizer, switch_of(TrainedModel(net, net, net), optimizer)


@pytest.fixture(autouse=True)
def release_switches() -> Iterator[None]:
    PROCESS_FLAGS.release()  # left by tests of other files
    yield
    while SWITCHES:
        SWITCHES.pop().release()


TrainedNet = tuple[Net, torch.optim.Optimizer, ConfigSwitch]


@pytest.fixture
def trained_net() -> TrainedNet:
    torch.manual_seed(0)
    net = Net()
    optimizer, switch = switched(net, momentum=0.9)
    trained(net, 1, optimizer)
    return net, optimizer, switch


def test_config_takes_effect_and_release_undoes_it(trained_net: TrainedNet) -> None:
    net, optimizer, switch = trained_net
    strides = [p.stride() for p in net.parameters()]
    group = dict(optimizer.param_groups[0])
    optimizer.state["steps"] = 1  # type: ignore[index] # some keep more than their weights' states
    switch.set(OWN.replace(precision="bf16", channels_last=True))
    trained(net, 1, optimizer)
    assert net.dtypes[-1] == torch.bfloat16
    layout = torch.channels_last
    assert net.conv.weight.is_contiguous(memory_format=layout)
    momentum = optimizer.state[net.conv.weight]["momentum_buffer"]
    assert momentum.stride() == net.conv.weight.stride()
    assert "_compiled_call_impl" not in vars(copy.deepcopy(net))
    copied = copy.deepcopy(vars(net))  # as by a __getstate__ of its own
    assert copied["_compiled_call_impl"] is None
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
def test_state_dict_hides_the_fused_optimizer(kind: Any, own: dict[str, bool]) -> None:
    net = Net()
    optimizer = kind(net.parameters(), lr=0.1, **own)
    trained(net, 1, optimizer)
    plain = optimizer.state_dict()
    switch = switch_of(TrainedModel(net, net, net), optimizer)
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


def test_step_counter_on_the_device_is_saved_on_the_host() -> None:
    """Only the saved copy moves; the optimizer keeps its own tensor."""
    with FakeTensorMode():
        net = nn.Linear(2, 1, device="cuda")
        optimizer = torch.optim.Adam(net.parameters())
        optimizer.state[net.weight] = {"step": torch.ones((), device="cuda")}
        switch_of(TrainedModel(net, net, net), optimizer)
        assert not optimizer.state_dict()["state"][0]["step"].is_cuda
        assert optimizer.state[net.weight]["step"].is_cuda


@torch._dynamo.config.patch(recompile_limit=9)
def test_hitting_the_recompile_limit_is_reported(trained_net: TrainedNet) -> None:
    _net, _optimizer, switch = trained_net

    @torch.compile(backend="eager", dynamic=False)
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    switch.set(OWN.replace(compile="default"))
    assert not switch.fell_back and torch._dynamo.config.recompile_limit == 64
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (2, 3):
            doubled(torch.ones(size))
    assert switch.fell_back
    switch.set(OWN)
    assert not switch.fell_back
    switch.release()
    assert torch._dynamo.config.recompile_limit == 9


def switch_to_bf16(switch: ConfigSwitch) -> list[Exception]:
    """Switch to bf16. Return a list that collects the errors blamed on it."""
    switch.set(OWN.replace(precision="bf16"), (errors := list[Exception]()).append)
    return errors


def test_exception_of_the_script_is_not_blamed_on_the_config(trained_net: TrainedNet) -> None:
    net, _optimizer, switch = trained_net
    errors, batch = switch_to_bf16(switch), torch.randn(4, 3, 8, 8)

    def refuses(*_: object) -> None:
        raise ValueError("bad batch")

    hook = net.conv.register_forward_pre_hook(refuses)
    with pytest.raises(ValueError, match="bad batch") as caught:
        net(batch)
    (note,) = caught.value.__notes__
    assert "raised in a second call" in note
    hook.remove()
    net(batch)
    assert net.dtypes[-1] == torch.bfloat16 and not errors


def test_call_that_fails_in_channels_last_is_repeated_in_the_scripts_layout() -> None:
    class Flattens(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).view(len(x), -1)

    net, errors = Flattens(), list[Exception]()
    optimizer, switch = switched(net)
    switch.set(OWN.replace(channels_last=True), errors.append)
    trained(net, 1, optimizer)
    assert "view size is not compatible" in str(errors)
    assert net.conv.weight.is_contiguous() and net.conv.weight.grad is not None

    hook = net.conv.register_forward_pre_hook(lambda *_: net.missing)
    switch.set(OWN)
    switch.set(OWN.replace(channels_last=True), errors.append)
    with pytest.raises(AttributeError):
        net(torch.randn(4, 3, 8, 8))
    assert not net.conv.weight.is_contiguous(), "the script's own error changes nothing"
    hook.remove()


def test_early_stop_of_checkpointing_is_not_blamed_on_the_config(trained_net: TrainedNet) -> None:
    """PyTorch ends the recomputation with an exception once it has all tensors."""
    net, _optimizer, switch = trained_net
    errors = switch_to_bf16(switch)
    net.dtypes.clear()
    checkpoint(net, torch.randn(4, 3, 8, 8), use_reentrant=False).sum().backward()
    assert net.dtypes == [torch.bfloat16] and not errors


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("hooked", [False, True])
def test_ddp_gradients_equal_those_of_the_unwrapped_model(hooked: bool) -> None:
    """Also if Advice prepares the model after DDP has wrapped it."""
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

    switch = switch_of(TrainedModel(parallel, net, parallel))
    for channels_last in (False, True, False):
        switch.set(OWN.replace(channels_last=channels_last))
        for _ in range(3):  # DDP rebuilds its buckets after the first
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


class SelfReferencing:
    """An output with a reference cycle."""

    def __init__(self, features: Tensor, more: dict[str, Tensor]) -> None:
        self.features, self.more, self.itself = features, more, self


@dataclass(slots=True)
class Slotted:
    features: Tensor
    more: dict[str, Tensor]
    unset: int = dataclasses.field(init=False)


class AttributeDict(dict[str, Any]):
    """A dict whose items are attributes too, like the model outputs of libraries."""

    def __init__(self, features: Any = None, more: Any = None) -> None:
        super().__init__(features=features, more=more)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


@pytest.mark.parametrize("kind", [Output, SelfReferencing, Slotted, AttributeDict])
def test_output_keeps_its_type_and_fp32_under_bf16(kind: type[Any]) -> None:
    net = Net()
    forward = lambda x: kind(net.conv(x), {"mean": net.conv(x).mean((2, 3))})  # noqa: E731
    net.forward = forward  # type: ignore[method-assign]
    _optimizer, switch = switched(net)
    switch.set(OWN.replace(precision="bf16", channels_last=True))
    output = net(torch.randn(4, 3, 8, 8))
    assert not torch.is_autocast_enabled("cpu")  # some losses are forbidden under autocast
    assert type(output) is kind and map_tensors(lambda tensor: tensor, output) is output
    assert (output.features.dtype, output.more["mean"].dtype) == (torch.float32, torch.float32)
    output.features.view(4, -1).sum().backward()


# torch.compile reads .grad; its own suppression of the warning has no effect here.
ignores_grad_warning = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Block(nn.Module):
    def __init__(self, ran: list[str]) -> None:
        super().__init__()
        self.inner, self.ran = nn.Linear(8, 8), ran

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.ran.append("eager")
        return x + torch.tanh(self.inner(x))


class BlockStack(nn.Module):
    """Lists in `ran` the blocks that ran as Python; a compiled block does not."""

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


@ignores_grad_warning
@pytest.mark.parametrize("in_backward", [False, True])
def test_repeated_blocks_compile_for_training(
    in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_by_inductor", lambda _mode: {"backend": "eager"})
    net = BlockStack(in_backward=in_backward)
    _optimizer, switch = switched(net)
    x = torch.randn(3, 8, requires_grad=True)  # like the output of an earlier layer
    plain = torch.autograd.grad(net(x).sum(), net.parameters())

    def eager_blocks(*, backward: bool = True) -> int:
        """Return the number of blocks that ran as Python."""
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
        assert eager_blocks() == 0 and graphs_compiled() - before == 1
        net.eval()
        assert eager_blocks(backward=False) == 4
        net.train()
        assert eager_blocks() == 0
        switch.set(OWN)
        assert eager_blocks() == (8 if in_backward else 4)
    switch.set(OWN.replace(compile="blocks"))
    switch.release()
    assert all("_compiled_call_impl" not in vars(module) for module in net.modules())


@ignores_grad_warning
@pytest.mark.parametrize("when", ["compiled", "called"])
def test_failing_compiled_blocks_fall_back_to_eager(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, errors = BlockStack(), list[Exception]()
    _optimizer, switch = switched(net)

    def fail(*_: object) -> None:
        raise RuntimeError("a wrong kernel")

    def backend(*_: object) -> Callable[..., None] | None:
        return fail if when == "called" else fail()

    monkeypatch.setattr(compiling, "_by_inductor", lambda _mode: {"backend": backend})
    switch.set(OWN.replace(compile="blocks"), errors.append)
    for _ in range(2):
        net(torch.randn(3, 8))
        assert net.ran == ["eager"] * 4
        switch.drop_config()
        net.ran.clear()
    assert len(errors) == 1 and "a wrong kernel" in str(errors[0])
    assert all("_compiled_call_impl" not in vars(block) for block in net.blocks)


IMAGES = (torch.zeros(4, 3, 8, 8),) * 4
TOKENS = (torch.zeros(4, dtype=torch.int64),) * 4


def facts_of(
    net: nn.Module, optimizer: torch.optim.Optimizer, inputs: Sequence[Tensor] = IMAGES
) -> ScriptFacts:
    """Return the facts of a script that made one step per input."""
    observer = LoopObserver()
    for x in inputs:
        x = x.to(net.weight.dtype) if isinstance(net, nn.Conv2d) else x
        net(x).sum().backward()
        observer.on_call(net, (x,), {"mask": x > 0}, net)
        observer.on_step(optimizer)
    return ScriptFacts.of(observer, LoaderFacts())


CONVOLUTION = functools.partial(nn.Conv2d, 3, 4, 3)
FUSED = functools.partial(torch.optim.AdamW, fused=True)
SPARSE = functools.partial(nn.Embedding, 4, 2, sparse=True)


class Strict(nn.Conv2d):
    def __getattr__(self, name: str) -> Any:
        made = len(self._parameters) > 1  # then, other names are a KeyError
        return self._parameters[name] if made else super().__getattr__(name)


def channels_last_conv() -> nn.Module:
    return CONVOLUTION().to(memory_format=torch.channels_last)


def compiled() -> nn.Module:
    return torch.compile(CONVOLUTION(), backend="eager")  # type: ignore[return-value]


def space_of(script: ScriptFacts) -> Space:
    facts = {"repeats": script.repeats, "own": script.own, "kept": script.kept}
    return space(batches=(4,), **facts)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(
    ("make", "optimizer", "knob", "choices", "message"),
    [
        # No fp16 and no captured step: both need changes in the script.
        (CONVOLUTION, torch.optim.SGD, "precision", ("default", "tf32", "bf16"), ""),
        (lambda: Strict(3, 4, 3), torch.optim.SGD, "step_graph", (False,), ""),
        (lambda: torch.jit.script(CONVOLUTION()), torch.optim.SGD, "step_graph", (False,), ""),
        (channels_last_conv, torch.optim.SGD, "channels_last", (True,), "channels_last"),
        (CONVOLUTION, FUSED, "fused_optimizer", (True,), "fused"),
        (lambda: CONVOLUTION().bfloat16(), torch.optim.SGD, "precision", ("bf16",), "bf16"),
        (compiled, torch.optim.SGD, "compile", ("default",), "your script already: torch.compile"),
        (CONVOLUTION, torch.optim.LBFGS, "precision", ("default",), "LBFGS"),
        (SPARSE, torch.optim.SGD, "fused_optimizer", (False,), "a gradient is sparse"),
    ],
)
def test_settings_of_the_script_itself_are_kept(
    make: Callable[[], nn.Module], optimizer: Any, knob: str, choices: Any, message: str
) -> None:
    net = make()
    facts = facts_of(net, optimizer(net.parameters()), TOKENS if make is SPARSE else IMAGES)
    assert space_of(facts).choices.get(knob) == choices
    assert any(message in line for line in facts.lines()) or not message


def test_sparse_gradients_use_no_fused_kernels() -> None:
    optimizer, switch = switched(net := SPARSE())
    net(TOKENS[0]).sum().backward()
    switch.set(OWN.replace(fused_optimizer=True))
    optimizer.step()
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("alias", ["no", "view", "data", "shared"])
def test_aliased_weight_keeps_its_storage(alias: str) -> None:
    """Otherwise a flat buffer, or other processes of a Hogwild job, would see an old copy."""
    net = CONVOLUTION()
    flat = torch.zeros(2 * net.weight.numel())
    if alias == "view":
        net.weight.data = flat[: net.weight.numel()].view_as(net.weight)
    elif alias == "shared":
        net.share_memory()
    kept = net.weight.data if alias == "data" else None
    _optimizer, switch = switched(net)
    switch.set(OWN.replace(channels_last=True))
    with torch.no_grad():
        net.weight.fill_(2.0)
    assert net.weight.is_contiguous() is (alias != "no")
    assert kept is None or torch.equal(kept, net.weight)
    assert alias != "view" or flat.sum() == 2 * net.weight.numel()


def test_data_parallel_script_gets_the_advice_to_use_ddp() -> None:
    net = Net()
    wrapped = nn.DataParallel(net)
    wrapped.device_ids = [0, 1]
    observer = LoopObserver()
    observer.called[wrapped] = TrainedModel(wrapped, net, wrapped)
    observer.on_autocast(nn.Linear(2, 2, device="meta"))  # the meta device has no autocast
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        observer.on_step(optimizer)
    facts = ScriptFacts.of(observer, LoaderFacts(workers=4, pinned=True))
    already, line = facts.lines()
    assert already == "your script already: 4 loader workers, pin_memory"
    assert line.endswith("under torchrun and DistributedDataParallel is faster, and tuned whole")
    assert {"channels_last", "compile", "fused_optimizer"} <= set(facts.kept)


def test_first_length_does_not_change_the_facts_of_varying_inputs() -> None:
    net = nn.Embedding(9, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def facts(*lengths: int) -> ScriptFacts:
        inputs = [torch.zeros(4, length, dtype=torch.int64) for length in lengths]
        return facts_of(net, optimizer, inputs)

    one, other, fixed = facts(5, 5, 7, 5), facts(8, 6, 6, 6), facts(5, 5, 5, 5)
    assert (one.shape, one.others, one.varies) == (other.shape, other.others, True)
    assert (fixed.shape, fixed.varies) == ((4, 5), False)
    assert "compile" in space_of(fixed).choices
    assert "dynamic_shapes" not in space_of(fixed).choices


@pytest.mark.parametrize(("micro", "actions"), [(1, [0, 3, 1, 2, 5]), (4, [0] * 5), (1, [9] * 5)])
def test_actions_of_an_rl_agent_do_not_count_as_its_batch(micro: int, actions: list[int]) -> None:
    """Actions are calls with gradients, in random number between two steps."""
    net, observer = nn.Linear(4, 2), LoopObserver()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in actions:
        for samples in [1] * number + [128] * micro:
            observer.on_call(net, (torch.zeros(samples, 4),), {}, net)
        observer.on_step(optimizer)
    facts = ScriptFacts.of(observer, LoaderFacts())
    task = facts.task(["train.py"], {})
    assert task.shapes == ((128 * micro, 4),)
    assert ("micro" in task.others) == (micro > 1)


@pytest.mark.parametrize("inputs", [{"ids": 0}, {"labels": 0, "ids": 7}, {"labels": 0, "users": 0}])
def test_task_shape_comes_from_the_first_input_with_two_dimensions(inputs: dict[str, int]) -> None:
    net, observer = nn.Embedding(9, 4), LoopObserver()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = {k: torch.zeros((4, n) if n else (4,), dtype=torch.int64) for k, n in inputs.items()}
    for _ in range(4):
        observer.on_call(net, (), batch, net)
        observer.on_step(optimizer)
    task = ScriptFacts.of(observer, LoaderFacts()).task(["train.py"], {})
    assert task.shapes == ((4, max(*inputs.values(), 1)),)
    assert task.others.count("1 int64") == len(inputs) - 1


class DecliningGuide(Looks):
    """A guide that takes over no script; it counts the requests and keeps the error."""

    def __init__(self) -> None:
        self.asked, self.error, self.reason = 0, "", ""

    def takes_over(self) -> bool:
        self.asked += 1
        return False

    def failed(self, exc: BaseException) -> None:
        self.error, self.reason = str(exc), stopped(exc)


@pytest.mark.parametrize("reentrant", [False, True])
def test_submodules_are_not_observed_as_models(reentrant: bool) -> None:
    """Also in the recomputation of a checkpoint, and after a call that raised."""
    net = BlockStack(in_backward=True, reentrant=reentrant)
    observer = LoopObserver()
    calls = hooks.CallHooks(observer.on_call, observer.on_autocast)
    for _ in range(2):
        with pytest.raises(StopIteration):
            net(x=torch.ones(2, 8), stops=True)
        net(x=torch.ones(2, 8, requires_grad=True)).sum().backward()
    calls.remove()
    (model,) = observer.called.values()
    assert model.outer is net
    assert model.samples == 4
    assert [one.name for one in model.inputs] == ["x"]


def test_losses_and_calls_in_loader_workers_are_not_observed_as_models() -> None:
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
    ("compiled", "asked", "message"),
    [
        ("function", False, "use torch.compile(model) instead"),
        ("layer", True, ""),
        ("before", False, "calls model.compile(); use torch.compile(model)"),
        ("after", True, ""),
    ],
)
def test_compiled_code_is_not_compiled_again(compiled: str, asked: bool, message: str) -> None:
    """The pilot observes a model with a compiled call only if model.compile() came later."""
    if compiled != "function" and torch.__version__ < (2, 14):
        pytest.skip("torch 2.11 compiles no forward() of its own layers by their compile()")
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net = nn.Sequential(inner, nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.compiler.reset()
    if compiled in ("layer", "before"):
        (inner if compiled == "layer" else net).compile(backend="eager")
    call = torch.compile(lambda x: net(x), backend="eager") if compiled == "function" else net
    before, guide = graphs_compiled(), DecliningGuide()
    pilot = Pilot(guide)
    if compiled == "after":
        net.compile(backend="eager")
    for _ in range(8):
        optimizer.zero_grad()
        call(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    pilot.release()
    assert (guide.asked, graphs_compiled() - before, left_behind()) == (asked, 1, [])
    assert bool(guide.error) == bool(message) and message in guide.error


def test_failing_pilot_reports_and_unhooks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tuning process would wait half an hour for its first message."""
    monkeypatch.setattr(LoopObserver, "on_call", None)
    Pilot(guide := DecliningGuide())
    for _ in range(2):  # the next call of any module removes the last hook
        nn.Linear(2, 2)(torch.ones(2))
    assert guide.error.startswith("the pilot failed: TypeError: 'NoneType' object is not callable")
    # No warning under `advisor run`: `python -W error` would make it fatal.
    stop = Stopped(guide.reason, guide.error)  # type: ignore[arg-type]
    RecordGuide(["train.py"], Request()).failed(stop)
    assert left_behind() == []


class ThreadTrainingGuide(DecliningGuide):
    """Trains another model in a second thread when the pilot begins."""

    takes_over = Looks.takes_over

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        with ThreadPoolExecutor(1) as other:
            other.submit(trained, Net()).result()
        return BlockRequest(config=OWN, own=OWN, steps=5)


def test_script_that_trains_in_several_threads_is_left_alone() -> None:
    pilot = Pilot(guide := ThreadTrainingGuide())
    trained(net := Net())
    assert (guide.error, "_compiled_call_impl" in vars(net)) == (IN_THREADS, False)
    pilot.release()
    assert left_behind() == []


class FiveStepGuide(Looks):
    """Requests blocks of five steps. `results`: the part of `done` in each block."""

    def __init__(self) -> None:
        self.done = ""  # one letter each: s for a step, e for an evaluation
        self.results: list[str] = []

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        return BlockRequest(config=OWN, own=OWN, steps=5)

    def next(self, result: BlockResult) -> BlockRequest:
        *_, last = (n for n in range(len(self.done)) if self.done[n:].count("s") > result.steps)
        self.results.append(self.done[last + 1 :])
        return BlockRequest(config=OWN, own=OWN, steps=5)


@pytest.mark.parametrize(("every", "result"), [(100, "sssss"), (7, "sssss"), (3, "ssesss")])
def test_blocks_exclude_evaluations(every: int, result: str) -> None:
    """Except if the script evaluates more often than every five steps."""
    net, guide = Net(), FiveStepGuide()
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


def failing(original: Callable[..., Any], good_calls: int) -> Callable[..., Any]:
    """Return a kernel that fails after `good_calls` calls."""
    left = [good_calls]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no such kernel")
        return original(*args, **kwargs)

    return kernel


@pytest.mark.parametrize("good_calls", [0, 1])
@pytest.mark.parametrize(
    ("kind", "kernel"), [(torch.optim.AdamW, "_fused_adamw_"), (torch.optim.SGD, "_fused_sgd_")]
)
def test_failed_fused_step_is_repeated_without_the_config(
    kind: type[torch.optim.Optimizer], kernel: str, good_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[list[Tensor]] = []
    for fused in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        groups = [{"params": list(part.parameters())} for part in net]
        optimizer = kind(groups, lr=0.1)  # type: ignore[call-arg]
        errors: list[Exception] = []
        switch = switch_of(TrainedModel(net, net, net), optimizer)
        for step in range(3):
            optimizer.zero_grad()
            net(torch.ones(4, 3)).square().sum().backward()
            with monkeypatch.context() as patch:
                if step == 1 and fused:
                    switch.set(OWN.replace(fused_optimizer=True), errors.append)
                    patch.setattr(torch, kernel, failing(getattr(torch, kernel), good_calls))
                optimizer.step()
        assert [str(one) for one in errors] == ["no such kernel"] * fused
        assert not optimizer.param_groups[0]["fused"]
        switch.release()
        assert "step" not in vars(optimizer)
        states = [s for state in optimizer.state.values() for s in state.values() if s is not None]
        results.append([p.detach() for p in net.parameters()] + states)
    torch.testing.assert_close(*results)


def test_scheduler_created_under_a_config_works_before_and_after_release() -> None:
    net = Net()
    optimizer, switch = switched(net)
    switch.set(OWN.replace(fused_optimizer=True))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trained(net, 1, optimizer)
    scheduler.step()
    switch.release()
    trained(net, 1, optimizer)
    scheduler.step()


def test_removing_a_patch_keeps_later_patches() -> None:
    class Owner:
        def name(self) -> str:
            return "own"

    def patch(where: Any, word: str) -> Patch:
        return Patch(where, "name", lambda plain, *args: f"{word} {plain(*args)}")

    ours, theirs = (patch(Owner, word) for word in ("ours", "theirs"))
    names = [Owner().name()]
    for one in (ours, theirs):
        one.remove()
        names.append(Owner().name())
    assert names == ["theirs ours own", "theirs own", "own"]


def test_weights_keep_one_address_per_memory_layout() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    trained(net, 1, optimizer)
    switch = switch_of(TrainedModel(net, net, net), optimizer)

    def tensors() -> list[Tensor]:
        return [net.conv.weight.detach(), optimizer.state[net.conv.weight]["exp_avg"]]

    other = OWN.replace(channels_last=True)
    addresses: list[list[int]] = []
    for config in (OWN, other) * 3:
        before = [one.clone() for one in tensors()]
        switch.set(config)
        assert all(map(torch.equal, before, tensors()))
        addresses.append([one.data_ptr() for one in tensors()])
        trained(net, 1, optimizer)
    assert addresses == addresses[:2] * 3 and addresses[0] != addresses[1]
    # load_state_dict() replaces the tensors.
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loaded = tensors()[1].clone()
    switch.set(OWN)
    assert torch.equal(loaded, tensors()[1])
    for act in (switch.set, lambda _other: switch.set(OWN), switch.forget):
        act(other)
    assert not switch._storages._kept


def test_period_of_a_gan_ends_with_the_generator_step() -> None:
    critic, generator = nn.Linear(2, 1), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, generator)]
    observer = LoopObserver()
    periods = []
    for step in range(18):
        noise = torch.zeros(3, 2)
        observer.on_call(generator, (noise,), {}, generator)
        if step == 0:  # a few sample images
            observer.on_call(generator, (torch.zeros(100, 2),), {}, generator)
        observer.on_call(critic, (noise,), {}, critic)
        observer.on_step(optimizers[step % 6 == 5])
        periods.append(observer.period())
    assert periods == [0] * 17 + [6]
    assert observer.trained()[0].batch(6) == 6 * 3
    later = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert [observer.kind(one) for one in (later, optimizers[1])] == ["similar", "known"]
    # The optimizer of a model that was never trained is a new one.
    untrained = nn.Linear(2, 1)
    observer.on_call(untrained, (noise[:, :2],), {}, untrained)
    assert observer.kind(torch.optim.SGD(untrained.parameters(), lr=0.1)) == "new"


def test_list_of_images_is_one_input() -> None:
    sizes = ((4, 5), (4, 6))
    images = [torch.zeros(3, *size) for size in sizes]
    targets = [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (1, 2)]
    inputs = inputs_of((images, targets), {})
    assert [(one.name, one.shape) for one in inputs] == [
        ("0", (2, 3, 4, 0)),
        ("1.boxes", (2, 0, 4)),
        ("1.labels", (2, 0)),
    ]  # 0: the size differs between images
    assert batch_of((images, targets), {}) == 2
    mixed = inputs_of(([torch.zeros(2), torch.zeros(2, 3)],), {"mask": torch.zeros(2).bool()})
    assert [one.shape for one in mixed] == [(2,), (2, 3), (2,)]
    assert batch_of((), {"x": (None, torch.zeros(4, 2))}) == 4
    batch = SimpleNamespace(size=4, x=torch.zeros(4, 2))  # as DETR's NestedTensor
    assert [(one.name, one.shape) for one in inputs_of((batch,), {})] == [("0.x", (4, 2))]
    assert signature((batch,), {}) != signature((SimpleNamespace(x=torch.zeros(3, 2)),), {})


GRAPHS = OWN.replace(compile="reduce-overhead")
GRAPHS_CHANNELS_LAST = GRAPHS.replace(precision="bf16", channels_last=True)


def live_cudagraphs() -> list[Any]:
    """Return all nodes of Inductor's CUDA graph trees."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(0, create_if_none_exists=False)
    waiting = [node for nodes in manager.roots.values() for node in nodes] if manager else []
    graphs = []
    while waiting:
        node = waiting.pop()
        graphs.append(node)
        waiting += [child for nodes in node.children.values() for child in nodes]
    return graphs


@pytest.mark.gpu
def test_cudagraphs_survive_a_switch_and_are_freed_by_forget() -> None:
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    switch = switch_of(TrainedModel(net, net, net), optimizer, device="cuda:0")
    x = torch.randn(8, 4, 16, 16, device="cuda")

    def steps(config: Config) -> None:
        switch.set(config)
        for _ in range(5):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            switch.begin_step(freed=True)

    for config in (OWN, GRAPHS, GRAPHS_CHANNELS_LAST, OWN):
        steps(config)
    before = set(map(id, live_cudagraphs()))
    assert before
    for config in (GRAPHS, OWN, GRAPHS_CHANNELS_LAST, GRAPHS):
        steps(config)
    assert set(map(id, live_cudagraphs())) == before
    steps(OWN)
    switch.forget(GRAPHS_CHANNELS_LAST)
    kept = set(map(id, live_cudagraphs()))
    assert kept < before
    steps(GRAPHS)
    assert set(map(id, live_cudagraphs())) == kept
    steps(GRAPHS_CHANNELS_LAST)
    assert len(live_cudagraphs()) > len(kept)


@pytest.mark.gpu
def test_evaluating_a_compiled_generator_between_steps_gives_finite_output() -> None:
    def make_net(width: int, end: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, end)).cuda()

    generator, critic = make_net(8, 16), make_net(16, 1)
    optimizers = [torch.optim.Adam(net.parameters()) for net in (generator, critic)]
    models = [TrainedModel(net, net, net) for net in (generator, critic)]
    switch = switch_of(*models, *optimizers, device="cuda:0")
    fixed = torch.randn(32, 8, device="cuda")
    outputs: list[Tensor] = []

    def step(number: int) -> None:
        critic.zero_grad()
        critic(torch.randn(32, 16, device="cuda")).mean().backward()
        fake = generator(torch.randn(32, 8, device="cuda"))
        (-critic(fake.detach()).mean()).backward()
        optimizers[1].step()
        generator.zero_grad()
        critic(fake).mean().backward()
        optimizers[0].step()
        switch.begin_step(freed=True)
        if number % 4 == 0:
            with torch.no_grad():
                outputs.append(generator(fixed))

    for config in (OWN, GRAPHS, OWN, GRAPHS):
        switch.set(config)
        for number in range(12):
            step(number)
    assert all(bool(one.isfinite().all()) for one in outputs)
