"""Configs that replay CUDA graphs, switched in a running script; on a GPU only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advisor.cache.config import Config
from advisor.tuners.act.pilot.loop_observer import TrainedModel
from advisor.tuners.act.pilot.switch import ConfigSwitch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OWN = Config(
    precision="default", channels_last=False, fused_optimizer=False, compile="none", batch_size=8
)
REPLAYED = OWN.replace(compile="reduce-overhead")
LAID_OUT = REPLAYED.replace(precision="bf16", channels_last=True)


def switch_of(*pairs: tuple[nn.Module, torch.optim.Optimizer]) -> ConfigSwitch:
    trained = [TrainedModel(net, net) for net, _optimizer in pairs]
    optimizers = [optimizer for _net, optimizer in pairs]
    device = torch.device("cuda", 0)
    return ConfigSwitch(trained, optimizers, OWN, device, lambda _given: None)


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


def test_graphs_outlast_a_switch_and_go_where_they_are_forgotten() -> None:
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    switch = switch_of((net, optimizer))
    x = torch.randn(8, 4, 16, 16, device="cuda")

    def steps(config: Config) -> None:
        switch.set(config)
        for _ in range(5):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            switch.begin_step()
            switch.spent()

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
    switch.release()


def test_a_generator_that_is_called_between_steps() -> None:
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16)).cuda()
    critic = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    makes, tells = (torch.optim.Adam(net.parameters()) for net in (generator, critic))
    switch = switch_of((generator, makes), (critic, tells))
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
        switch.begin_step()
        switch.spent()
        if number % 4 == 0:
            with torch.no_grad():
                seen.append(generator(fixed))

    for number in range(4):
        step(number)
    for config in (REPLAYED, OWN, REPLAYED):
        switch.set(config)
        for number in range(12):
            step(number)
    assert all(bool(one.isfinite().all()) for one in seen)
    switch.release()
