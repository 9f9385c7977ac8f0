"""A training step that is captured on a device and replayed: the batch that it reads, the
optimizers that it steps, and the state that it leaves behind."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from advisor.tuners.act.capture.object_graph import ObjectGraph, Values
from advisor.tuners.act.pilot.loop_observer import RngState


class Recorder:
    """Captures a step in one CUDA graph, after some steps on a side stream:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs."""

    device = "cuda"

    @contextmanager
    def side_stream(self) -> Iterator[list[str]]:
        """Context manager: runs steps on a side stream, before a capture or to compare with one.
        Yields a list, which at the end holds the lines of code that waited for the device."""
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side), _noticing_waits() as waits:
                yield waits
        finally:
            torch.cuda.current_stream().wait_stream(side)

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture `step`, which changes no existing tensor. Returns a function that replays it, and
        its output, which each replay overwrites. A failed capture leaves nothing behind."""
        graph = torch.cuda.CUDAGraph()
        side = _side_stream(torch.cuda.current_device())
        try:
            # thread_local: the thread that pins a DataLoader's memory goes on during the capture.
            with (
                _without_collection(),
                torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
            ):
                output = step()
        except BaseException:
            # A failed capture leaves PyTorch's generator in capture mode; one that works ends it.
            here = torch.zeros(1, device="cuda")
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                here.add_(1)
            raise
        return graph.replay, output


RECORDERS: dict[str, Callable[[], Recorder]] = {"cuda": Recorder}
"""By device type; on other devices a step is never captured."""


class Buffers:
    """Memory for one batch like the example, at fixed addresses."""

    def __init__(self, example: Any) -> None:
        leaves, self._tree = _flatten(example)
        self._held = [torch.empty_like(x) if _dense(x) else x for x in leaves]

    def leaves(self, batch: Any) -> list[Any] | None:
        """The leaves of a batch; None if the batch is not like the example."""
        leaves, tree = _flatten(batch)
        return leaves if tree == self._tree and all(map(_alike, leaves, self._held)) else None

    def fill(self, leaves: list[Any]) -> None:
        for buffer, leaf in zip(self._held, leaves, strict=True):
            if _dense(buffer):
                buffer.copy_(leaf, non_blocking=True)

    def batch(self) -> Any:
        return tree_unflatten(self._held, self._tree)


def _flatten(batch: Any) -> tuple[list[Any], Any]:
    # A DataLoader yields lists where datasets hold tuples; both are accepted.
    return tree_flatten(list(batch) if type(batch) is tuple else batch)


def _dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _alike(a: Any, b: Any) -> bool:
    if _dense(a) and _dense(b):
        return (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
    try:
        return a is b or bool(type(a) is type(b) and a == b)
    except (RuntimeError, ValueError, TypeError):  # arrays, and objects with their own `__eq__`
        return False


class Optimizers:
    """The torch.optim optimizers that a training step calls."""

    def __init__(self, device: str) -> None:
        self._on_cuda = device == "cuda"
        self._met: dict[int, torch.optim.Optimizer] = {}
        # By the group's id: the group, its learning rate, and the tensor that each replay reads.
        self.rates: dict[int, tuple[dict[str, Any], float, Tensor]] = {}
        self._homes: dict[int, tuple[dict[str, Any], torch.device]] = {}
        self._hooks: list[Any] = []

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._met.values())

    @contextmanager
    def counting(self) -> Iterator[list[int]]:
        found: list[int] = []

        def see(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            self._met[id(optimizer)] = optimizer
            found.append(id(optimizer))

        hook = register_optimizer_step_pre_hook(see)
        try:
            yield found
        finally:
            hook.remove()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self for group in optimizer.param_groups]

    def weights(self) -> list[Tensor]:
        return [weight for group in self._groups() for weight in group["params"]]

    def state(self) -> list[Tensor]:
        states = (state for optimizer in self for state in optimizer.state.values())
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def begin(self) -> None:
        for optimizer in self:
            known = len(self._homes)
            for weight, state in optimizer.state.items():
                step = state.get("step")
                if isinstance(step, Tensor) and step.device != weight.device:
                    self._homes[id(state)] = state, step.device
                    state["step"] = step.to(weight.device)
            if len(self._homes) > known:
                self._hooks.append(optimizer.register_state_dict_post_hook(self._saved))
        self.rates = {}
        for group in self._groups():
            rate, weights = group.get("lr"), group["params"]
            reads = group.get("fused") or (self._on_cuda and "capturable" in group)
            if reads and weights and rate is not None and not getattr(rate, "is_cuda", False):
                tensor = torch.tensor(float(rate), device=weights[0].device)
                self.rates[id(group)] = group, float(rate), tensor

    def _saved(self, _optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        """A state_dict with step counters on the script's device: an optimizer that loads them on a
        GPU waits for the GPU at every step."""
        states = dict(saved["state"])
        for at, state in states.items():
            if id(state) in self._homes:
                states[at] = {**state, "step": state["step"].to(self._homes[id(state)][1])}
        return {**saved, "state": states}

    def follow_rates(self) -> None:
        """Copy learning rates that the script has changed to the tensors that replays read."""
        for group, known, tensor in [*self.rates.values()]:
            if (rate := float(group["lr"])) != known:
                self.rates[id(group)] = group, rate, tensor
                tensor.fill_(rate)

    def end(self) -> None:
        """Move step counters back to their own device, and stop following learning rates."""
        for state, home in self._homes.values():
            state["step"] = state["step"].to(home)
        for hook in self._hooks:
            hook.remove()
        self.rates, self._homes, self._hooks = {}, {}, []

    @contextmanager
    def capturable(self) -> Iterator[None]:
        """Context manager: sets `capturable`, and learning rates as tensors on the device."""
        groups = self._groups()
        names = ("lr", "capturable")
        own = [{name: held for name, held in group.items() if name in names} for group in groups]
        for group in groups:
            if "capturable" in group and self._on_cuda:
                group["capturable"] = True
            if id(group) in self.rates:
                group["lr"] = self.rates[id(group)][2]
        try:
            yield
        finally:
            for group, values in zip(groups, own, strict=True):
                group.update(values)


class Gradient(NamedTuple):
    """A weight's gradient before a captured step, None if the step clears it, and after."""

    weight: Tensor
    before: Tensor | None
    after: Tensor | None
    clears: bool


class CapturedGraph:
    """Replays a captured step, and undoes the capture's changes of gradients and Python values.
    `recording`: from `Recorder.record`. `gradients`, `before`: gradients, and values of `objects`,
    before the capture. `followed`: ids of parameter groups whose learning rate replays read."""

    def __init__(
        self,
        recording: tuple[Callable[[], None], Any],
        buffers: Buffers,
        gradients: list[tuple[Tensor, Tensor | None]],
        objects: ObjectGraph,
        before: Values,
        followed: Collection[int],
    ) -> None:
        self._replay, output = recording
        self._buffers = buffers
        self.gradients = []
        for weight, found in gradients:
            left, weight.grad = weight.grad, found
            clears = found is not None and left is not found
            # A cleared gradient is not kept alive: it is as large as the weight.
            self.gradients.append(Gradient(weight, None if clears else found, left, clears))
        self.attached = False  # whether the weights have the gradients that a replay writes
        replaced = objects.replaced(before)
        self._replaced = [(holder, name) for holder, name, _new in replaced]
        held = tree_map_only(Tensor, Tensor.detach, (output, [new for *_, new in replaced]))
        self._output, self._tree = tree_flatten(held)
        self._alive = before  # the graph still reads tensors that were replaced
        self.objects = objects
        objects.watch(before, followed)
        objects.restore(before)

    def changed(self) -> str:
        """The name of a value that the script has changed since the capture; '' if none."""
        # If the step clears its gradients, earlier gradients do not matter.
        if not all(one.clears or one.weight.grad is one.before for one in self.gradients):
            return "which gradients there are before a step"
        return self.objects.changed()

    def replaced(self) -> list[Any]:
        return [holder.read()[name] for holder, name in self._replaced]

    def replay(self, leaves: list[Any]) -> Any:
        """Replay the step on a batch. Returns a copy of its output: the next replay overwrites the
        graph's own, and a script may keep its losses."""
        # Allocate first: after the step, an allocation that fails could not be undone.
        copies = [torch.empty_like(x) if isinstance(x, Tensor) else x for x in self._output]
        self._buffers.fill(leaves)
        self._replay()
        for copy, left in zip(copies, self._output, strict=True):
            if isinstance(copy, Tensor):
                copy.copy_(left)
        output, new = tree_unflatten(copies, self._tree)
        for weight, before, after, clears in self.gradients:
            if not self.attached or (before is None and not clears):
                weight.grad = after
        self.attached = True
        for (holder, name), value in zip(self._replaced, new, strict=True):
            holder.write(name, value)
        return output


class StateSnapshot:
    """All that a step may change: tensors, gradients, Python's values, random numbers."""

    def __init__(self, tensors: list[Tensor], weights: list[Tensor], objects: ObjectGraph) -> None:
        self._objects, self._random = objects, RngState()
        self._gradients = [(weight, weight.grad) for weight in weights]
        self._written = [*tensors, *(g for _, g in self._gradients if g is not None)]
        self._clones = [tensor.detach().clone() for tensor in self._written]
        self.tensors, self.clones = tensors, self._clones[: len(tensors)]
        self.values = objects.read()

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, clone in zip(self._written, self._clones, strict=True):
                tensor.detach().copy_(clone)
        for weight, gradient in self._gradients:
            weight.grad = gradient
        self._random.restore()
        self._objects.restore(self.values)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Context manager: keeps the garbage collector from freeing another CUDA graph, which would
    break a capture (reset in PyTorch's CUDAGraph.cpp). PyTorch does not collect before."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@cache
def _side_stream(_device: int) -> torch.cuda.Stream:
    # One stream for all graphs: cuBLAS keeps tens of MiB for each stream that it was ever used on.
    return torch.cuda.Stream()


@contextmanager
def _noticing_waits() -> Iterator[list[str]]:
    """Context manager: yields a list of lines that wait for the device, filled at the end."""
    found: list[str] = []
    held = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True, action="always") as caught:
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
            at = warning.filename, warning.lineno
            warnings.warn_explicit(warning.message, warning.category, *at)
