"""A training step that is captured on a device and replayed: the batch that it reads, and the state
that it leaves behind."""

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
from torch.utils._pytree import tree_flatten, tree_unflatten

from advisor.tuners.act.capture.object_graph import ObjectGraph, Values


class Recorder:
    """Captures a step in one CUDA graph, after some steps on a side stream:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs."""

    device = "cuda"

    @contextmanager
    def side_stream(self) -> Iterator[list[str]]:
        """For steps before a capture, and those compared with it; afterwards the list holds the
        lines of code that waited for the device."""
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side), _noticing_waits() as waits:
                yield waits
        finally:
            torch.cuda.current_stream().wait_stream(side)

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Run `step` once, changing no tensor that existed; returns its replay, and its output that
        each replay writes. If it cannot be captured, nothing is left of the attempt."""
        graph = torch.cuda.CUDAGraph()
        side = _side_stream(torch.cuda.current_device())
        try:
            # thread_local: the thread that pins a DataLoader's memory goes on beside the capture.
            with (
                _without_collection(),
                torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
            ):
                output = step()
        except BaseException:
            # A capture that succeeds ends the state in which a failed one leaves the generator.
            here = torch.zeros(1, device="cuda")
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                here.add_(1)
            raise
        return graph.replay, output

    def random_state(self) -> Any:
        return torch.get_rng_state(), torch.cuda.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1])


RECORDERS: dict[str, Callable[[], Recorder]] = {"cuda": Recorder}
"""By the type of the device; on others a step is never captured."""


class Buffers:
    """Memory for one batch like the example, at fixed addresses."""

    def __init__(self, example: Any) -> None:
        leaves, self._tree = _flatten(example)
        self._held = [torch.empty_like(x) if _dense(x) else x for x in leaves]

    def leaves(self, batch: Any) -> list[Any] | None:
        """The parts of a batch; None if it is not like the example."""
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
    except (RuntimeError, ValueError, TypeError):  # arrays, and objects with a comparison of theirs
        return False


class Gradient(NamedTuple):
    """A weight's gradient before a captured step, None if the step clears it, and after."""

    weight: Tensor
    before: Tensor | None
    after: Tensor | None
    clears: bool


class CapturedGraph:
    """Replays a captured step. What the capture did to gradients and Python's values is undone.

    Args:
        recording: replays it; and what the step returned.
        buffers: the batch that it reads.
        gradients: weights, with the gradients that the step found.
        before: all objects that it found.
        followed: ids of the optimizers' groups whose learning rate it reads at each replay.
    """

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
            # One that is cleared is not kept alive: it is as large as the weight.
            self.gradients.append(Gradient(weight, None if clears else found, left, clears))
        self.attached = False  # whether the weights have the gradients that a replay writes
        replaced = objects.replaced(before)
        self._replaced = [(place, name) for place, name, _new in replaced]
        leaves, self._tree = tree_flatten((output, [new for *_, new in replaced]))
        self._output = [detached(leaf) for leaf in leaves]
        self._alive = before  # the graph still reads tensors that were replaced
        self.objects = objects
        objects.watch(before, followed)
        objects.restore(before)

    def changed(self) -> str:
        """What the script has changed that the graph takes for given; '' if nothing."""
        # A step that clears its gradients finds any.
        if not all(one.clears or one.weight.grad is one.before for one in self.gradients):
            return "which gradients there are before a step"
        return self.objects.changed()

    def replaced(self) -> list[Any]:
        """The objects that now stand where the step replaces them."""
        return [place.read()[name] for place, name in self._replaced]

    def replay(self, leaves: list[Any]) -> Any:
        """Take the step on a batch; returns a copy of its output: the next replay writes over the
        graph's own, and a script may keep its losses."""
        # Memory is taken first: a batch that has been trained on cannot be given up.
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
        for (place, name), value in zip(self._replaced, new, strict=True):
            place.write(name, value)
        return output


class StateSnapshot:
    """All that a step may change: tensors, gradients, Python's values, random numbers."""

    def __init__(
        self, tensors: list[Tensor], weights: list[Tensor], recorder: Recorder, objects: ObjectGraph
    ) -> None:
        self._recorder, self._objects = recorder, objects
        self._gradients = [(weight, weight.grad) for weight in weights]
        self._written = [*tensors, *(g for _, g in self._gradients if g is not None)]
        self._clones = [tensor.detach().clone() for tensor in self._written]
        self.tensors, self.clones = tensors, self._clones[: len(tensors)]
        self._random = recorder.random_state()
        self.values = objects.read()

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, clone in zip(self._written, self._clones, strict=True):
                tensor.detach().copy_(clone)
        for weight, gradient in self._gradients:
            weight.grad = gradient
        self._recorder.set_random_state(self._random)
        self._objects.restore(self.values)


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep the garbage collector from ending another CUDA graph, which would break a capture (reset
    in PyTorch's CUDAGraph.cpp). PyTorch no longer collects before a capture."""
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
    # One for all graphs: cuBLAS keeps tens of MiB for each stream that it was ever used on.
    return torch.cuda.Stream()


@contextmanager
def _noticing_waits() -> Iterator[list[str]]:
    """Lines of code that make the host wait for the device, as 'train.py:12'."""
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
