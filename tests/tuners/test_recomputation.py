"""Activation checkpointing of repeated blocks: the same training with less memory, or a refusal."""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from advisor.tuners.act.pilot.pilot import Pilot
from advisor.tuners.act.pilot.protocol import BlockRequest
from advisor.tuners.faults import NotRecomputable
from advisor.tuners.knobs import CHECKPOINT, OFFLOAD
from advisor.tuners.recomputation import (
    CHECKED_CALLS,
    blocks,
    recompute_in_place,
    recomputed_calls,
    replace_calls,
)
from advisor.tuners.search.space import Space
from tests.face.commands import TOO_BUSY, advisor, env_of
from tests.runs.forked import ScriptedGuide

WIDTH, COUNT = 8, 4


class Block(nn.Module):
    """A residual block with random numbers and running statistics; returns a tuple with None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, None]:
        return x + scale * self.dropout(torch.relu(self.norm(self.layer(x)))), None


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, *, shared: bool = False) -> None:
        super().__init__()
        first = block()
        self.blocks = nn.ModuleList(first if shared else block() for _ in range(COUNT))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            found = block(x)
            x = found[0] if isinstance(found, tuple) else found
        result: Tensor = self.last(x)
        return result


class Changing(Block):
    """A block that changes something in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.count = 0

    change: Callable[..., object]

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, None]:
        self.change(x)
        return super().forward(x, scale=scale)


CHANGES: Mapping[str, Callable[..., object]] = {
    "GrowsInput": lambda _block, x: x.add_(1),
    "CountsInBuffer": lambda block, _x: block.calls.add_(1),
    "ReplacesBuffer": lambda block, _x: setattr(block, "calls", block.calls + 1),
    "CountsInData": lambda block, _x: block.calls.data.add_(1),
    "CountsInPython": lambda block, _x: setattr(block, "count", block.count + 1),
    "CountsInDict": lambda block, _x: vars(block).setdefault("n", Counter()).update("n"),
    "DrawsByPython": lambda *_: random.random(),
    "DrawsByNumpy": lambda *_: numpy.random.random(312),  # as many as NumPy makes at once
    "DrawsByItsOwn": lambda block, _x: torch.rand(
        1, generator=vars(block).setdefault("own", torch.Generator())
    ),
}
CHANGING = [type(name, (Changing,), {"change": how}) for name, how in CHANGES.items()]


class CountsWithin(Block):
    """Its count is the same after a whole call, and not after one that ends early."""

    count = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, None]:
        self.count += 1
        found = super().forward(x, scale=self.count)[0]
        self.count -= 1
        return found, None


class HidesInNorm(Block):
    """Adds little to its input, and ends in a norm, whose sum and size tell nothing."""

    counts: ClassVar[list[int]] = []

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, None]:
        self.counts.append(0)
        found = x + 0.02 * torch.tanh(len(self.counts) * self.layer(x))
        return nn.functional.layer_norm(found, (WIDTH,)), None


class ScalesByCount(Block):
    counts: ClassVar[list[int]] = []

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, None]:
        self.counts.append(0)
        return super().forward(x, scale=len(self.counts))


class ChecksItself(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)[0]
        result: Tensor = self.last(x)
        return result


class Densely(Stack):
    """Its caller changes the list that a block got."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, found: list[Tensor]) -> Tensor:
            result: Tensor = self.inner(torch.stack(found).sum(0))[0]
            return result

    def __init__(self) -> None:
        super().__init__(self.Joined)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.last.weight.sum() + x]
        for block in self.blocks:
            found.append(block(found))
        result: Tensor = self.last(found[-1])
        return result


class TakesCache(Stack):
    class Cached(Block):
        def forward(self, x: Any, **_more: Any) -> tuple[Tensor, None]:
            return super().forward(x["x"])

    def __init__(self) -> None:
        super().__init__(self.Cached)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(MutableCache(x=x))  # type: ignore[arg-type]


class MutableCache(dict[str, Any]):
    """Stands for a cache that a block fills."""


def train(model: nn.Module, steps: int = 6) -> list[Tensor]:
    """Returns gradients and buffers after some steps on the same random numbers."""
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randn(4, WIDTH)).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None] + [*model.buffers()]


@contextlib.contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Counts the bytes of each tensor that is kept for backward."""
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def kept_bytes(model: nn.Module) -> int:
    """Returns the bytes of the activations that a forward pass keeps for backward."""
    with counted_bytes() as kept:
        model(torch.randn(64, WIDTH))
    return sum(kept)


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("made", [Stack, partial(Stack, shared=True), Densely])
def test_training_is_bit_identical_and_keeps_less(
    every: int, made: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    plain = made()
    recomputing = copy.deepcopy(plain)
    replace_calls(blocks(recomputing)[::every])
    blocks_found = len(set(blocks(plain)))
    assert len(recomputed_calls(recomputing)) == -(-blocks_found // every)
    assert all(map(torch.equal, train(plain), train(recomputing)))
    assert kept_bytes(recomputing) < kept_bytes(plain)


def test_copies_and_checkpoints_hold_nothing_of_advisors() -> None:
    model = Stack()
    names = set(model.state_dict())
    recompute_in_place(model)
    assert set(model.state_dict()) == names
    assert not recomputed_calls(copy.deepcopy(model))


def test_without_gradients_a_block_is_called_once() -> None:
    model = Stack()
    recompute_in_place(model)
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    assert [int(block.norm.num_batches_tracked) for block in model.blocks] == COUNT * [1]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        *((Stack(one), f"{one.__name__} changes an input or a buffer in") for one in CHANGING[:3]),
        *((Stack(one), f"{one.__name__} changes something in every call") for one in CHANGING[3:]),
        (Stack(CountsWithin), "CountsWithin changes something in every call"),
        (Stack(HidesInNorm), "HidesInNorm computes something else in a second call"),
        (Stack(ScalesByCount), "ScalesByCount computes something else in a second call"),
        (TakesCache(), "Cached gets an object of class MutableCache, which a call may change"),
        (ChecksItself(), "Block is checkpointed by the script itself"),
    ],
)
def test_block_that_computes_something_else_again_is_refused(model: Stack, reason: str) -> None:
    recompute_in_place(model)
    with pytest.raises(NotRecomputable, match=reason):
        for _ in range(CHECKED_CALLS):
            model(torch.randn(4, WIDTH) + 0)  # of which nothing is checked
            model(torch.randn(4, WIDTH) + 0).sum().backward()


def test_other_weights_in_the_second_call_are_refused() -> None:
    model = Stack()
    recompute_in_place(model)
    weights = {name: weight + 0.1 for name, weight in model.named_parameters()}
    loss = torch.func.functional_call(model, weights, torch.randn(4, WIDTH)).sum()
    with pytest.raises(NotRecomputable, match="has other weights in a second call"):
        loss.backward()


@pytest.mark.parametrize("how", ["a gradient penalty", "evaluation before backward"])
def test_blocks_are_recomputed_as_they_were_called(how: str) -> None:
    torch.manual_seed(0)
    plain, x = Stack(), torch.randn(4, WIDTH, requires_grad=True)
    recomputing = copy.deepcopy(plain)
    recompute_in_place(recomputing)
    found = []
    for model in (plain, recomputing):
        torch.manual_seed(1)
        loss = model(x).sum()
        if evaluates := how.startswith("evaluation"):
            model.eval()
        else:  # goes back through gradients
            loss = torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        loss.backward()
        assert {module.training for module in model.modules()} == {not evaluates}
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert found[0] and all(map(torch.equal, *found))


def test_repeated_blocks_are_found() -> None:
    def sequence(count: int) -> nn.Sequential:
        return nn.Sequential(*(Block() for _ in range(count)))

    assert len(blocks(Stack())) == COUNT
    assert len(blocks(nn.Sequential(sequence(1), nn.Linear(2, 2), sequence(2)))) == 3
    assert [len(blocks(sequence(count))) for count in (2, 3)] == [0, 3]
    assert blocks(nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))) == []  # keep only inputs
    unet = nn.Module()
    unet.down1, unet.down2, unet.down3 = (Block() for _ in range(3))
    assert len(blocks(unet)) == 3  # attributes in a row, as many U-Nets have them
    layers = nn.Module()
    layers.one, layers.two, layers.three = (sequence(3) for _ in range(3))
    assert len(blocks(layers)) == 9  # the blocks of each, as in a ResNet
    inplace = nn.Sequential(*(nn.Sequential(nn.ReLU(inplace=True), nn.Tanh()) for _ in range(3)))
    assert not blocks(inplace)  # would change its input twice
    hooked = Stack()
    hooked.blocks[1].register_forward_hook(lambda *_: None)  # would run twice
    assert blocks(hooked) == [hooked.blocks[0], *hooked.blocks[2:]]
    assert blocks(torch.compile(Stack())) == []  # type: ignore[arg-type] # stays a module
    compiled = Stack()
    compiled.blocks[0].compile()
    assert blocks(compiled) == [*compiled.blocks[1:]]


def test_layers_of_transformers_train_without_their_cache() -> None:
    transformers = pytest.importorskip("transformers")
    size = {"n_layer": 3, "n_embd": 16, "n_head": 2, "vocab_size": 32}
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)).train()
    recomputing = copy.deepcopy(plain)
    recompute_in_place(recomputing)
    tokens, found = torch.randint(0, 32, (2, 6)), []
    for model in (plain, recomputing):
        torch.manual_seed(1)
        with counted_bytes() as kept:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found.append(([weight.grad for weight in model.parameters()], sum(kept)))
    (theirs, most), (ours, fewer) = found
    assert all(map(torch.equal, theirs, ours)) and fewer < most / 2


class SavingGuide(ScriptedGuide):
    def saves_memory(self, device: str) -> tuple[str, ...]:
        return CHECKPOINT, OFFLOAD


class Allocator:
    """Made-up memory: the activations that are kept for backward, at most `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self.most, self.live = most_bytes, 0

    def pack(self, tensor: Tensor) -> Kept:
        return Kept(tensor, self)

    def check(self) -> None:
        if self.live > self.most:
            raise torch.OutOfMemoryError("out of memory")


class Kept:
    def __init__(self, tensor: Tensor, allocator: Allocator) -> None:
        # Detached: a saved output that refers to its own graph would never be freed.
        self.tensor, self._allocator = tensor.detach(), allocator
        allocator.live += tensor.nbytes

    def __del__(self) -> None:
        self._allocator.live -= self.tensor.nbytes


class ChecksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, allocator: Allocator) -> Tensor:
        ctx.allocator = allocator
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.allocator.check()
        return gradients[0], None


@pytest.mark.parametrize("within", ["forward", "backward"])
def test_pilot_checkpoints_from_the_first_step_and_offers_less(within: str) -> None:
    """The baseline checkpoints every block. A config that runs out of memory costs one step."""
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    allocator = Allocator(3 * kept_bytes(model) // 4)

    class Limited(Block):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, None]:
            found = super().forward(x)[0]
            if within == "forward":
                allocator.check()
                return found, None
            return ChecksInBackward.apply(found, allocator), None

    for block in model.blocks:
        block.__class__ = Limited

    def requests(space: Space) -> Iterator[BlockRequest]:
        own = space.default
        assert space.choices["checkpoint_blocks"] == (1, 0, 2, 4)
        assert space.choices["offload"] == (True, False)
        for every in (0, 2, 1):
            config = own.replace(checkpoint_blocks=every, offload=False)
            yield BlockRequest(config=config, own=own, steps=2)
        yield BlockRequest(config=own.replace(checkpoint_blocks=2, offload=False), own=own)

    guide = SavingGuide(requests)
    pilot, checkpointed = Pilot(guide), []
    try:
        with saved_tensors_hooks(allocator.pack, lambda kept: kept.tensor):
            for _ in range(20):
                optimizer.zero_grad()
                output = model(torch.randn(64, WIDTH))  # stays until the next step
                loss = output.square().mean()
                checkpointed.append(len(recomputed_calls(model)))
                loss.backward()
                optimizer.step()
                assert allocator.live < allocator.most // 4  # a failed step's graph is freed
    finally:
        pilot.release()
    assert [one.outcome for one in guide.results] == ["out_of_memory", "ok", "ok"]
    assert checkpointed[0] == COUNT and checkpointed[-1] == COUNT // 2
    assert not recomputed_calls(model)
    assert guide.seen.script == "checkpointing of every block, activations on the host"


HEAD = """from __future__ import annotations

import os, sys

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

WIDTH, COUNT = 8, 4
"""
OUT_OF_MEMORY = """
torch.manual_seed(0)
torch.set_num_threads(1)
allocator = Allocator(int(sys.argv[1]))


class Limited(Block):
    def forward(self, x, *, scale=1.0):
        found = super().forward(x)
        allocator.check()
        return found


model = Stack(Limited)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with saved_tensors_hooks(allocator.pack, lambda kept: kept.tensor):
    for step in range(int(os.environ["STEPS"])):
        optimizer.zero_grad()
        loss = model(torch.randn(64, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item(), flush=True)
"""


def test_script_that_runs_out_of_memory_is_tuned_and_runs(tmp_path: Path) -> None:
    source = map(inspect.getsource, (Kept, Allocator, Block, Stack))
    (tmp_path / "train.py").write_text("\n".join((HEAD, *source, OUT_OF_MEMORY)))
    command = (sys.executable, "train.py", str(3 * kept_bytes(Stack()) // 4))
    env = env_of(tmp_path) | {"STEPS": "60"}
    untuned = advisor(tmp_path, "run", "--", *command, process=True, **env)
    assert untuned.returncode == 1 and "OutOfMemoryError" in untuned.stderr
    assert f"fastest way to train that fits: advisor fit -- {command[0]}" in untuned.stderr
    options = ("--effort", "quick", "--budget", "6s", "--no-compile")
    done = advisor(tmp_path, "tune", *options, "--", *command, **env | {"STEPS": str(10**9)})
    assert "your unmodified script runs out of memory" in done.stderr
    if done.returncode:  # the host was too busy to measure even the baseline
        assert re.search(TOO_BUSY, done.stderr), done.stderr
        return
    assert "least memory" in done.stdout and "run it as usual" not in done.stdout
    more = (*command[:2], str(int(command[2]) + 1))  # as another number of epochs
    tuned = advisor(tmp_path, "run", "--", *more, process=True, **env)
    command, env = (*command[:2], str(10**9)), env | {"ADVISOR_DISABLE": "1"}
    unlimited = advisor(tmp_path, "run", "--", *command, process=True, **env)
    assert tuned.returncode == unlimited.returncode == 0, tuned.stderr
    assert losses(tuned.stdout) == pytest.approx(losses(unlimited.stdout), rel=0.05)


def losses(printed: str) -> list[float]:
    _first, second, third = printed.splitlines()
    return [float(line.split()[1]) for line in (second, third)]
