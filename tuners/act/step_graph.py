"""One CUDA graph over a whole training step: forward, loss, backward and optimizer.

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs says what a capture needs: some
steps before it on another stream, buffers that stay where they are, and nothing that waits for the
device or decides on its values. What cannot be captured, or does not do in a replay what it does
without, runs as it would have run anyway.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from advisor.errors import AdvisorWarning

WARM_STEPS = 3
"""Steps before the capture, as the documentation has it: lazy state is made in them."""
CHECKED = 3
"""Replays that are compared with the same step without a graph, each on a batch of its own."""
LOSS_TOLERANCE = 0.01
"""Relative L2 distance of what the step returns, from the same state: only atomics may differ."""
UPDATE_TOLERANCE = 0.5
"""The same of what it did to the weights: 1 is no likeness at all. Wide, because Adam's first
updates are the signs of gradients, and where those are rounding errors the signs are chance."""
RECAPTURES = 8
"""Captures in a row, each undone by the very next change, after which graphs are given up."""

_MEND = (
    "let it return tensors, and look at them outside: no .item(), .cpu(), print(loss), and no "
    "decision on their values"
)

TrainStep = Callable[[Any], Any]


class _Rate:
    """The learning rate of a parameter group, in a tensor that a graph reads at each replay."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group
        self._value = float(group["lr"])
        self.tensor = torch.full((), self._value, device=group["params"][0].device)

    @staticmethod
    def fits(group: dict[str, Any]) -> bool:
        """Whether its optimizer takes a tensor; one on the device already needs no other."""
        held = group["lr"]
        return ("capturable" in group or bool(group.get("fused"))) and not (
            isinstance(held, Tensor) and held.is_cuda
        )

    def follow(self) -> None:
        """Take over what a scheduler has set."""
        value = float(self.group["lr"])
        if value != self._value:
            self._value = value
            self.tensor.fill_(value)


class StepGraph:
    """A training step that is replayed; called as the step itself, with one batch.

    The first WARM_STEPS calls train without a graph; the next CHECKED ones train twice from the
    same state, with it and without, and keep the latter; from then on a call copies its batch into
    the graph's buffers and replays. A batch of another shape or type than the example's, such as
    the last of an epoch, runs without a graph. A changed learning rate is taken over; any other
    change of the optimizer's settings, or of which weights train, captures anew.

    The step is to change the models, the optimizers and what it returns, nothing else, and its
    Python code runs at captures only.

    Args:
        train_step: takes a batch; returns tensors, such as the loss, in any nesting.
        example: a batch on the device, as those to come.
        models: the modules that the step trains, for their buffers.

    Attributes:
        failure: why it runs without a graph for good; empty while it does not.
    """

    def __init__(self, train_step: TrainStep, example: Any, models: Iterable[nn.Module]) -> None:
        self._train_step = train_step
        self._models = tuple(models)
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        leaves, self._tree = _flatten(example)
        self._buffers = [torch.empty_like(x) if isinstance(x, Tensor) else x for x in leaves]
        self._warm = 0
        self._checked = 0
        self._wasted = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Any = None
        self._fixed: list[Any] = []
        self._rates: list[_Rate] = []
        self.failure = ""
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            kinds = sorted({type(x).__name__ for x in leaves if not isinstance(x, Tensor)})
            self._give_up(f"the batch holds more than tensors ({', '.join(kinds)})")
        elif torch.distributed.is_available() and torch.distributed.is_initialized():
            self._give_up("gradients are exchanged with other processes")

    @property
    def ready(self) -> bool:
        """Whether the next batch is replayed, or nothing ever will be."""
        return bool(self.failure) or self._checked >= CHECKED

    def __call__(self, batch: Any) -> Any:
        if self.failure:
            return self._train_step(batch)
        leaves, tree = _flatten(batch)
        if tree != self._tree or not all(map(_alike, leaves, self._buffers)):
            return self._plainly(batch)
        if self._warm < WARM_STEPS:
            return self._warm_up(batch)
        if self._graph is not None and self._changed():
            self._graph, self._wasted = None, self._wasted + 1
            if self._wasted >= RECAPTURES:
                self._give_up(
                    "the optimizer's settings, other than the learning rate of a fused one, or the "
                    "weights that train change at every step"
                )
                return self._train_step(batch)
        if self._graph is None:
            if not self._capture(leaves):
                return self._train_step(batch)
            self._checked = min(self._checked, CHECKED - 1)
        elif self._checked >= CHECKED:
            self._wasted = 0
        if self._checked < CHECKED:
            return self._check(batch, leaves)
        return self._replay(leaves)

    def _plainly(self, batch: Any) -> Any:
        # Detached: a loss that is held would keep nodes of its graph, and with them their stream.
        return tree_map(_detached, self._train_step(batch))

    def _warm_up(self, batch: Any) -> Any:
        self._warm += 1
        seen = register_optimizer_step_pre_hook(self._see)
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side), _noticing_waits() as waits:
                output = self._plainly(batch)
        finally:
            seen.remove()
        torch.cuda.current_stream().wait_stream(side)
        if not self._optimizers:
            self._give_up("the step ran no optimizer of torch.optim")
        elif waits and self._warm == WARM_STEPS:
            # Told beforehand: a capture that fails half-way leaves PyTorch's generator in it.
            self._give_up(f"it waits for the device ({waits[0]}); {_MEND}")
        return output

    def _see(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers.values():
            yield from optimizer.param_groups

    def _settings(self) -> list[Any]:
        """All that a capture takes for given, the learning rates in `_rates` left out."""
        fluid = {id(rate.group) for rate in self._rates}
        # Loading a checkpoint replaces an optimizer's state and groups.
        found: list[Any] = [id(optimizer.state) for optimizer in self._optimizers.values()]
        for group in self._groups():
            for name, value in group.items():
                if name == "params":
                    found += [(weight.data_ptr(), weight.requires_grad) for weight in value]
                elif name != "lr" or id(group) not in fluid:
                    found.append(value.data_ptr() if isinstance(value, Tensor) else value)
        return found

    def _changed(self) -> bool:
        for rate in self._rates:
            rate.follow()
        return self._settings() != self._fixed

    def _capture(self, leaves: list[Tensor]) -> bool:
        for buffer, leaf in zip(self._buffers, leaves, strict=True):
            buffer.copy_(leaf)
        graph = torch.cuda.CUDAGraph()
        self._rates = [_Rate(group) for group in self._groups() if _Rate.fits(group)]
        self._fixed = self._settings()
        side = _side_stream(torch.cuda.current_device())
        buffers = [(m, *held) for m in self._modules() for held in m.named_buffers(recurse=False)]
        try:
            # thread_local: the thread that pins a DataLoader's memory goes on beside the capture.
            with (
                self._capturable(),
                torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
            ):
                output = self._train_step(tree_unflatten(self._buffers, self._tree))
        except (RuntimeError, ValueError, TypeError) as exc:
            # What PyTorch, CUDA and the user's code raise where a step cannot be captured.
            for optimizer in self._optimizers.values():
                optimizer.zero_grad(set_to_none=True)
            _recover()
            self._give_up(_why(exc))
            return False
        replaced = [held for held in buffers if getattr(held[0], held[1]) is not held[2]]
        for module, name, tensor in replaced:
            setattr(module, name, tensor)
        if replaced:
            self._give_up(f"the buffer {replaced[0][1]!r} is replaced, not changed in place")
            return False
        self._graph, self._output = graph, tree_map(_detached, output)
        return True

    def _modules(self) -> Iterator[nn.Module]:
        for model in self._models:
            yield from model.modules()

    @contextmanager
    def _capturable(self) -> Iterator[None]:
        """The optimizers as a capture needs them: learning rate and step count on the device."""
        for optimizer in self._optimizers.values():
            for parameter, state in optimizer.state.items():
                if "step" in state and isinstance(state["step"], Tensor):
                    state["step"] = state["step"].to(parameter.device)
        held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for group in self._groups():
            held.append(
                (group, {name: group[name] for name in ("lr", "capturable") if name in group})
            )
            if "capturable" in group:
                group["capturable"] = True
        for rate in self._rates:
            rate.group["lr"] = rate.tensor
        try:
            yield
        finally:
            for group, values in held:
                group.update(values)

    def _replay(self, leaves: list[Tensor]) -> Any:
        assert self._graph is not None
        for buffer, leaf in zip(self._buffers, leaves, strict=True):
            buffer.copy_(leaf, non_blocking=True)
        self._graph.replay()
        # Copies: the next replay writes over the graph's own, and a script may keep its losses.
        return tree_map(_copied, self._output)

    def _check(self, batch: Any, leaves: list[Tensor]) -> Any:
        """One step with the graph, undone, and one without; both must come to the same."""
        try:
            state = self._state()
            before = [tensor.clone() for tensor in state]
            generators = torch.get_rng_state(), torch.cuda.get_rng_state()
            replayed = self._replay(leaves)
            after = [tensor.clone() for tensor in self._weights()]
        except torch.OutOfMemoryError:
            self._give_up("there is no memory to compare a replay with the step itself")
            return self._plainly(batch)
        torch._foreach_copy_(state, before)
        torch.set_rng_state(generators[0])
        torch.cuda.set_rng_state(generators[1])
        start = [tensor.clone() for tensor in self._weights()]
        output = self._plainly(batch)
        said = _distance(_numbers(replayed), _numbers(output), None)
        moved = _distance(after, self._weights(), start)
        if not said <= LOSS_TOLERANCE:
            self._give_up(f"what a replay returns differs by {said:.0%} from the step itself")
        elif not moved <= UPDATE_TOLERANCE:
            self._give_up(f"a replay's weight updates differ by {moved:.0%} from the step itself")
        self._checked += 1
        return output

    def _weights(self) -> list[Tensor]:
        return [p.detach() for g in self._groups() for p in g["params"] if p.requires_grad]

    def _state(self) -> list[Tensor]:
        """What a step changes: weights, buffers, the optimizers' own."""
        found = self._weights()
        found += [buffer for model in self._models for buffer in model.buffers()]
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                found += [value for value in state.values() if isinstance(value, Tensor)]
        return found

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self._graph = self._output = None
        self._buffers, self._rates = [], []
        warnings.warn(
            f"advisor: this step cannot be replayed as a CUDA graph: {reason}. Training goes on "
            "without, which is slower than the advice says",
            AdvisorWarning,
            stacklevel=4,
        )


def _flatten(batch: Any) -> tuple[list[Any], Any]:
    # A DataLoader yields lists where datasets hold tuples: one as good as the other.
    return tree_flatten(list(batch) if type(batch) is tuple else batch)


def _alike(ours: Any, theirs: Tensor) -> bool:
    return (
        isinstance(ours, Tensor)
        and ours.shape == theirs.shape
        and ours.dtype == theirs.dtype
        and ours.requires_grad == theirs.requires_grad
    )


@cache
def _side_stream(_device: int) -> torch.cuda.Stream:
    """One for all graphs: cuBLAS keeps tens of MiB for each stream that it was ever used on."""
    return torch.cuda.Stream()


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@contextmanager
def _noticing_waits() -> Iterator[list[str]]:
    """The lines of code that make the host wait for the device, as 'train.py:12'."""
    found: list[str] = []
    held = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(held)
    for warning in caught:
        said = str(warning.message)
        if "synchronizing CUDA operation" in said:
            found.append(f"{Path(warning.filename).name}:{warning.lineno}")
        elif not said.startswith("Synchronization debug mode is a prototype"):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


def _recover() -> None:
    """A capture that succeeds ends the state in which one that failed leaves the generator."""
    here = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        here.add_(1)


def _numbers(tree: Any) -> list[Tensor]:
    return [
        leaf.detach()
        for leaf in tree_flatten(tree)[0]
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def _distance(ours: list[Tensor], theirs: list[Tensor], start: list[Tensor] | None) -> float:
    """Relative L2 distance, of the tensors or of their moves from `start`; NaN equals NaN."""
    difference = size = 0.0
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = a.double().nan_to_num(), b.double().nan_to_num()
        difference += float((a - b).square().sum())
        size += float((b - start[at].double().nan_to_num() if start else b).square().sum())
    return math.sqrt(difference / size) if size else float(difference > 0)


def _why(exc: Exception) -> str:
    said = next(iter(str(exc).strip().splitlines()), "")
    if "captur" in said.lower():
        return f"it does what a CUDA graph cannot hold ({said}); {_MEND}"
    return f"{type(exc).__name__}: {said}"[:300]
