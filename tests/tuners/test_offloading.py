"""What is kept for backward lies on the host: the same training, and a refusal to fill the host."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from advisor.tuners import host, offloading
from advisor.tuners.act.pilot.script_facts import _bytes
from advisor.tuners.faults import NotRecomputable
from advisor.tuners.offloading import (
    EXTRA_TIME,
    HostMemory,
    copy_to,
    host_buffer,
    offload_in_place,
    plain_call,
)
from advisor.tuners.recomputation import recompute_in_place
from tests.tuners.test_recomputation import Block, Stack, counted_bytes, train


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "LEAST_BYTES", 1)


class Copies(Stack):
    """Keeps an expanded tensor, and changes what it has kept before."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x[:1].expand_as(x) * x.exp()
        return super().forward(wide)


class ChecksBelow(Stack):
    """Checkpoints a part of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(checkpoint(torch.exp, x, use_reentrant=False))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("made", [Stack, Copies, ChecksBelow])
def test_training_is_bit_identical_and_keeps_only_weights(made: type[Stack], blocks: bool) -> None:
    torch.manual_seed(0)
    plain = made()
    offloaded = copy.deepcopy(plain)
    if blocks:
        recompute_in_place(offloaded)
    call = offload_in_place(offloaded)
    assert all(map(torch.equal, train(plain), train(offloaded)))
    with counted_bytes() as kept:
        offloaded(torch.randn(4, 8))  # the inner hooks act alone
    assert not kept and call.most_bytes > 0
    assert plain_call(call) == offloaded._call_impl


def test_full_host_keeps_activations_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_bytes", lambda: 2 * 3 * 1024)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(offloading, "HOST_MEMORY", memory := HostMemory())
    model = Stack()
    call = offload_in_place(model)
    for _ in range(3):  # what a step held is free again in the next
        model(torch.randn(4, 8)).sum().backward()
        assert 0 < call.most_bytes <= memory.most_held <= 1024
        assert memory.held == 0


def test_without_page_locked_memory_tensors_stay_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> Tensor:
        raise RuntimeError("no page-locked memory is left")

    monkeypatch.setattr(offloading, "HOST_MEMORY", memory := HostMemory())
    monkeypatch.setattr(offloading, "host_buffer", fails)
    model = Stack()
    call = offload_in_place(model)
    model(torch.randn(4, 8)).sum().backward()
    assert memory.most_held == memory.held == call.most_bytes == 0


def test_buffers_stay_for_the_next_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def buffer(nbytes: int, device: torch.device) -> Tensor:
        made.append(nbytes)
        return host_buffer(nbytes, device)

    monkeypatch.setattr(offloading, "host_buffer", buffer)
    monkeypatch.setattr(host, "free_bytes", lambda: 2 * 1000)
    memory, cpu = HostMemory(), torch.device("cpu")

    def step(*sizes: int) -> list[bool]:
        made.clear()
        taken = [memory.take(size, cpu) for size in sizes]
        for one in taken:
            if one is not None:
                memory.give_back(one, 0)
        return [one is not None for one in taken]

    assert all(step(400, 100, 400)) and made == [400, 100, 400]
    assert all(step(400, 400, 100)) and not made
    assert all(step(200, 50)) and not made  # a larger one will do, not one of any size
    assert all(step(60, 800)) and made == [800]  # for which the others make room
    assert step(900, 200) == [True, False]
    assert memory.held == 0 and memory.most_held == 900


def test_locked_pages_are_not_copied_by_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: dict[int, int] = {}

    class MadeUpCuda:
        def cudaHostRegister(self, at: int, nbytes: int, _flags: int) -> int:
            locked[at] = nbytes
            return len(locked) - 1  # the second one fails

        def cudaHostUnregister(self, at: int) -> None:
            del locked[at]

    monkeypatch.setattr(torch.cuda, "cudart", MadeUpCuda)
    buffer = host_buffer(2**20, torch.device("cuda"))
    assert locked == {buffer.data_ptr(): 2**20}
    (flags,) = (
        lines[lines.index("VmFlags:") :].split("\n")[0].split()
        for lines in Path("/proc/self/smaps").read_text().split(f"{buffer.data_ptr():x}-")[1:]
    )
    assert "dc" in flags  # do not copy
    with pytest.raises(RuntimeError, match="cudaHostRegister failed with code 1"):
        host_buffer(100, torch.device("cuda"))
    locked.popitem()
    kept = copy_to(buffer, torch.arange(6.0).view(2, 3).T)
    del buffer
    assert locked and kept.stride() == (1, 3)  # as long as a copy is there
    del kept
    assert not locked


class Scaled(Block):
    """Its backward needs no input, which a script may therefore change."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, None]:
        return torch.relu(self.norm(self.layer(2 * x))), None


class AddsInPlace(Stack):
    def __init__(self) -> None:
        super().__init__(Scaled)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for block in self.blocks:
            x += 0.1 * block(x)[0]
        result: Tensor = self.last(x)
        return result


@pytest.mark.parametrize("least", [1, 2**20])
def test_input_that_changes_before_backward_is_copied_or_refused(
    monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr(offloading, "LEAST_BYTES", least)
    torch.manual_seed(0)
    plain = AddsInPlace()
    offloaded = copy.deepcopy(plain)
    recompute_in_place(offloaded)
    offload_in_place(offloaded)
    if least == 1:
        assert all(map(torch.equal, train(plain), train(offloaded)))
    else:
        with pytest.raises(NotRecomputable, match="was changed in place"):
            train(offloaded)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_stay() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(torch.eye(4).to_sparse_csr(), self.layer(x))

    model = Sparse()
    offload_in_place(model)
    model(torch.randn(4, 4)).sum().backward()
    assert model.layer.weight.grad is not None
    # They have no storage of their own, as sharded ones; shared ones count once.
    assert _bytes(2 * [torch.eye(4).to_sparse_csr()], torch.device("cpu")) == 64


def test_second_derivatives_go_through_the_host() -> None:
    x = torch.randn(3, requires_grad=True)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    found = []
    for _ in range(2):
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        found += [*torch.autograd.grad(slope.square().sum(), list(model.parameters())[:1])]
        offload_in_place(model)
    assert torch.equal(*found)


def test_time_of_copies_and_of_second_calls_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EXTRA_TIME, "counts", True)
    EXTRA_TIME.take()  # that of other tests
    model = Stack()
    model(torch.randn(4, 8)).sum().backward()
    assert EXTRA_TIME.take() == 0
    recompute_in_place(model)
    model(torch.randn(4, 8)).sum().backward()
    assert EXTRA_TIME.take() > 0
    assert EXTRA_TIME.take() == 0
