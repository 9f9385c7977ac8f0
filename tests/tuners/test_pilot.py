"""The pilot's parts: what trains, what a step is, what is set and set back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

from advisor.cache.config import Config
from advisor.tuners.act.in_force import IN_FORCE
from advisor.tuners.act.pilot import hooks
from advisor.tuners.act.pilot.crew import Crew, Trained, inputs_of, period
from advisor.tuners.act.pilot.orders import Lap, Order
from advisor.tuners.act.pilot.pilot import Pilot
from advisor.tuners.act.pilot.seen import Seen
from advisor.tuners.act.pilot.switch import Switch, seat_of
from advisor.tuners.knobs import BY_NAME, Loading, Script, Situation
from advisor.tuners.search.space import Space

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


def unexpected(exc: BaseException) -> None:
    raise AssertionError("a config failed") from exc


def switch_of(trained: Trained, optimizer: torch.optim.Optimizer) -> Switch:
    cpu = torch.device("cpu")
    return Switch([trained], [optimizer], OWN, cpu, lambda _given: None, unexpected)


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    loss = net(torch.randn(4, 3, 8, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@pytest.fixture
def flown() -> tuple[Net, torch.optim.Optimizer, Switch]:
    IN_FORCE.release()  # what tests of other files have left
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    stepped(net, optimizer)
    trained = Trained(net, net, ())
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
    found = inputs_of((torch.zeros(2, 3), [torch.zeros(2)]), {"mask": torch.zeros(2).bool()})
    assert [one.name for one in found] == ["0", "1.0", "mask"]
    assert found[0].shape == (2, 3)
    assert found[2].dtype == "bool"


def test_a_config_acts_and_leaves_nothing(
    flown: tuple[Net, torch.optim.Optimizer, Switch],
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
    assert not IN_FORCE.config


def test_evaluation_is_left_to_the_script(
    flown: tuple[Net, torch.optim.Optimizer, Switch],
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
    flown: tuple[Net, torch.optim.Optimizer, Switch], copied: Callable[[nn.Module], nn.Module]
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
    assert seat_of(net) is net
    wrapped = nn.DataParallel(net)
    assert seat_of(wrapped) is net  # on one device, or none, it copies nothing
    wrapped.device_ids = [0, 1]
    assert seat_of(wrapped) is None


def test_the_loss_that_autocast_forbids_is_outside() -> None:
    net = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(net.parameters())
    switch = switch_of(Trained(net, net, ()), optimizer)
    switch.set(OWN.replace(precision="bf16"))
    loss = functional.binary_cross_entropy(net(torch.randn(4, 3)), torch.ones(4, 1))
    loss.backward()
    assert loss.isfinite()
    switch.release()


def seen(net: nn.Module, *optimizers: torch.optim.Optimizer) -> Seen:
    """Of a script that made four steps."""
    crew = Crew()
    for _ in range(4):
        net(x := torch.randn(4, 3, 8, 8)).sum().backward()
        crew.saw_call(net, (x,), {})
        for optimizer in optimizers:
            crew.saw_step(optimizer)
    return Seen.of(crew, 4, Loading())


def space_of(one: Seen) -> Space:
    return Space.of(
        Situation(
            device="cuda",
            capability=(9, 0),
            batches=(4,),
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


def test_half_precision_is_no_choice_under_lbfgs() -> None:
    net = Net()
    one = seen(net, torch.optim.LBFGS(net.parameters()))
    assert space_of(one).choices["precision"] == ("default",)
    assert any("LBFGS" in line for line in one.lines())


def test_a_script_with_half_weights_keeps_them() -> None:
    own = BY_NAME["precision"].script
    assert own is not None
    found = own(Script(weights=[torch.zeros(1, dtype=torch.bfloat16)]))
    assert found is not None
    assert (found.value, found.stays) == ("bf16", True)
    assert own(Script(weights=[torch.zeros(1)])) is None
    found = own(Script(weights=[torch.zeros(1)], autocast=torch.float16))
    assert found is not None
    assert found.value == "fp16"


def test_a_hook_that_goes_within_a_step_disturbs_no_other() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    told: list[str] = []

    def once(_optimizer: torch.optim.Optimizer) -> None:
        told.append("ours")
        remove()

    remove = hooks.on_step(once)
    other = register_optimizer_step_post_hook(lambda *_: told.append("theirs"))
    for _ in range(3):
        stepped(net, optimizer)
    other.remove()
    assert told == ["ours", "theirs", "theirs", "theirs"]


class Refusing:
    """A guide that leaves every script alone, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def takes_over(self) -> bool:
        self.asked += 1
        return False

    def begin(self, seen: Seen) -> Order:
        raise AssertionError("it does not take over")

    def next(self, lap: Lap) -> Order:
        raise AssertionError("it does not take over")

    def failed(self, exc: BaseException) -> None:
        raise AssertionError("nothing fails") from exc

    gave_up = failed


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
