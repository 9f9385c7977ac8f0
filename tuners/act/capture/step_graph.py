"""A whole training step, forward, loss, backward and optimizer, captured once and replayed."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from advisor.errors import AdvisorWarning
from advisor.tuners.act.capture.agreement import compare_outputs, nudge
from advisor.tuners.act.capture.captured_graph import (
    Buffers,
    CapturedGraph,
    StateSnapshot,
    detached,
)
from advisor.tuners.act.capture.object_graph import ObjectGraph, Values
from advisor.tuners.act.capture.optimizers import Optimizers
from advisor.tuners.act.capture.recorder import Recorder
from advisor.tuners.decisions import CHECKED, CHECKED_AGAIN, IN_A_ROW, LARGE

_MEND = (
    "let it return tensors, and look at them outside: no .item(), .cpu(), print(loss), and no "
    "decision on their values"
)
_OTHER_OPTIMIZERS = "not every call steps the same optimizers"

T = TypeVar("T")


class StepGraph:
    """A training step that is replayed; called as the step itself, with one batch.

    The first CHECKED calls train without a graph. The next CHECKED ones train twice from the same
    state, with it and without, and keep the latter. From then on a call copies its batch into
    the graph's buffers and replays; a batch unlike the example runs without. A learning rate that
    changes between steps is followed; another change of what the step reads captures anew. A replay
    runs kernels and no Python: a step that changes values in Python, as a schedule or a counter, or
    that cannot be captured, trains without a graph, and one warning says why.

    Args:
        train_step: takes a batch; returns tensors, such as the loss, in any nesting.
        example: a batch on the device, as those to come.
        models: the modules that the step trains, for their buffers.
        recorder: captures and replays.
        scaler: of the loss, if the step's own code does not hold it.

    Attributes:
        failure: why it runs without a graph for good; empty while it does not.
    """

    def __init__(
        self,
        train_step: Callable[[Any], Any],
        example: Any,
        models: Iterable[nn.Module],
        recorder: Recorder,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._recorder = recorder
        self._scalers = () if scaler is None else (scaler,)
        self._train_step = train_step
        self._models = tuple(models)
        self._optimizers = Optimizers(recorder.device)
        self._buffers = Buffers(example)
        self._warm = self._checked = self._wasted = self._others = self._replays = 0
        self._stepped: list[int] = []
        self._captured: CapturedGraph | None = None
        self._fixed: list[Any] = []
        self._written: list[Tensor] = []
        self._objects: ObjectGraph | None = None
        self.failure = ""
        if obstacle := _process_group():
            self._give_up(obstacle)

    @property
    def ready(self) -> bool:
        """Whether the next batch is replayed, or nothing ever will be."""
        return bool(self.failure) or self._checked >= CHECKED

    def __call__(self, batch: Any) -> Any:
        if self.failure:
            return self._train_step(batch)
        leaves = self._buffers.leaves(batch)
        if leaves is None:
            return self._other(batch)
        self._others = 0
        if self._warm < CHECKED:
            return self._warm_up(batch)
        if self._captured is not None and (changed := self._changed(self._captured)):
            self._captured, self._wasted = None, self._wasted + 1
            if self._wasted >= IN_A_ROW:
                return self._without(f"{changed} is changed at every step", batch)
        if self._captured is None:
            if why := self._capture(leaves):
                return self._without(why, batch)
            self._checked = min(self._checked, CHECKED - 1)
        # Values that are read deeper than is watched are found by comparisons, each time later.
        rarely = CHECKED_AGAIN << max(0, self._checked - CHECKED)
        if self._checked < CHECKED or self._replays >= rarely:
            return self._check(batch, leaves)
        self._wasted = 0
        self._replays += 1
        replayed = _if_memory(lambda: [self._replay(leaves)])
        return replayed[0] if replayed else self._without("there is no memory to replay it", batch)

    def _without(self, reason: str, batch: Any) -> Any:
        self._give_up(reason)
        return self._train_step(batch)

    def _plainly(self, batch: Any) -> Any:
        if self._captured is not None:
            self._captured.attached = False
        # Detached: a loss that is held would keep nodes of its graph, and with them their stream.
        return tree_map(detached, self._train_step(batch))

    def _replay(self, leaves: list[Any]) -> Any:
        assert self._captured is not None
        return self._captured.replay(lambda: self._buffers.fill(leaves))

    def _other(self, batch: Any) -> Any:
        self._others += 1
        if self._others == IN_A_ROW and not self._checked:
            warnings.warn(
                f"advisor: {IN_A_ROW} batches in a row were not like the example that "
                "advice.capture was given (other shapes, types, or values beside the tensors): "
                "nothing is replayed, and training is slower than advised. Give it a batch as "
                "those to come",
                AdvisorWarning,
                stacklevel=3,
            )
        if self._captured is None:
            return self._plainly(batch)
        # Buffers are small and are copied for a second try; weights are not.
        buffers = [buffer for model in self._models for buffer in model.buffers()]
        assert self._objects is not None
        start = StateSnapshot(buffers, [], self._recorder, self._objects)
        with self._optimizers.counting() as stepped:
            if (output := _if_memory(lambda: [self._plainly(batch)], stepped)) is not None:
                return output[0]
        start.restore()
        return self._without("there is no memory for it beside a batch of another shape", batch)

    def _warm_up(self, batch: Any) -> Any:
        self._warm += 1
        objects, drawn = self._look(), self._drawn()
        before, tensors = objects.read(), objects.tensors
        versions = [_version(tensor) for tensor in tensors]
        with self._optimizers.counting() as stepped, self._recorder.side_stream() as waits:
            output = self._plainly(batch)
        earlier, self._stepped = self._stepped, stepped
        if self._warm < CHECKED:
            return output
        # Told beforehand: a capture that fails half-way leaves PyTorch's generator in it.
        obstacle = "" if stepped else "the step ran no optimizer of torch.optim"
        obstacle = obstacle or _process_group() or self._moved(objects, before, drawn)
        if waits and not obstacle:
            obstacle = f"it waits for the device ({waits[0]}); {_MEND}"
        obstacle = obstacle or ("" if stepped == earlier else _OTHER_OPTIMIZERS)
        pairs = zip(tensors, versions, strict=True)
        self._written = [t for t, was in pairs if _version(t) != was or t.nbytes < LARGE]
        if obstacle:
            self._give_up(obstacle)
        return output

    def _look(self) -> ObjectGraph:
        also = (*self._optimizers, *self._scalers)
        self._objects = ObjectGraph(self._train_step, self._models, also)
        return self._objects

    def _drawn(self) -> object:
        """The state of the random numbers that are drawn on the host."""
        numpy = sys.modules.get("numpy")
        drawn = numpy and repr(numpy.random.get_state(legacy=False))
        return random.getstate(), drawn, self._recorder.host_state()

    def _moved(self, objects: ObjectGraph, before: Values, drawn: object) -> str:
        """What a step just now has changed that a replay would not; '' if nothing."""
        if changed := objects.changed_in_step(before):
            return f"it changes {changed} in Python, which a replay would not: do that outside"
        if not objects.between_steps:
            return "it steps by a GradScaler and leaves it as it is: call its update in the step"
        if drawn != self._drawn():
            return "it draws random numbers of Python, NumPy or the host, which would stand still"
        return ""

    def _settings(self) -> list[Any]:
        return [*self._optimizers.settings(), [w.requires_grad for w in self._trained()]]

    def _changed(self, captured: CapturedGraph) -> str:
        assert self._objects is not None
        self._optimizers.follow_rates()
        if self._settings() != self._fixed:
            return (
                "a setting of the optimizer, other than the learning rate of a fused one, or what "
                "weights train,"
            )
        if not captured.finds_gradients():
            return "which gradients there are before a step"
        return self._objects.changed()

    def _capture(self, leaves: list[Any]) -> str:
        """Why there is no graph; '' if there is, and everything else is as before."""
        before: Values = []
        gradients: list[tuple[Tensor, Tensor | None]] = []
        objects = self._objects
        try:
            self._buffers.fill(leaves)
            self._optimizers.begin()
            objects = self._look()
            before = objects.read()
            self._fixed = self._settings()
            gradients = [(weight, weight.grad) for weight in self._optimizers.weights()]
            with self._optimizers.capturable():
                recording = self._recorder.record(lambda: self._train_step(self._buffers.batch()))
        except Exception as exc:  # whatever it is, the step without a graph may not raise it
            if before and objects is not None:
                objects.restore(before)
            for weight, gradient in gradients:
                weight.grad = gradient
            return _why(exc)
        self._captured = CapturedGraph(recording, gradients, objects.replaced(before), before)
        objects.watch(before)
        objects.restore(before)
        return ""

    def _check(self, batch: Any, leaves: list[Any]) -> Any:
        """Train on a batch without the graph; before it, compare with replays and undo them."""
        objects, trained = self._objects, self._trained()
        assert objects is not None
        state = self._state(trained)
        start = _if_memory(lambda: StateSnapshot(state, trained, self._recorder, objects))
        no_memory = "there is no memory to compare a replay with the step itself"
        if start is None:
            return self._without(no_memory, batch)
        try:
            found = _if_memory(lambda: self._disagreement(start, leaves))
        finally:
            start.restore()
        drawn = self._drawn()
        with self._optimizers.counting() as stepped:
            output = _if_memory(lambda: [self._plainly(batch)])
        if output is None:
            start.restore()
            del start
            return self._without("there is no memory for the step itself beside it", batch)
        wrong = "" if stepped == self._stepped else _OTHER_OPTIMIZERS
        wrong = wrong or self._moved(objects, start.values, drawn)
        wrong = wrong or (no_memory if found is None else found)
        self._checked += 1
        self._replays = 0
        if wrong:
            self._give_up(wrong)
        return output[0]

    def _disagreement(self, start: StateSnapshot, leaves: list[Any]) -> str:
        """Where replays differ from steps, as the optimizers take them in a capture."""
        captured = self._captured
        assert captured is not None

        def left(output: Any) -> list[Tensor]:
            held = tree_flatten((output, captured.replaced()))[0]
            return [*start.tensors, *(one.detach() for one in held if isinstance(one, Tensor))]

        def replayed() -> list[Tensor]:
            start.restore()
            return left(self._replay(leaves))

        def eager(seed: int | None = None) -> list[Tensor]:
            start.restore()
            nudges = [] if seed is None else nudge(self._optimizers.weights(), seed)
            for gradient in captured.gradients:
                if gradient.weight.grad is not None and gradient.clears:
                    # A step that clears them first, as it must have, does not see this.
                    gradient.weight.grad.detach().fill_(torch.nan)
            with self._optimizers.capturable(), self._recorder.side_stream():
                output = self._plainly(self._buffers.batch())
            for weight, by in nudges:
                weight.sub_(by)
            return left(output)

        found = compare_outputs(replayed, eager, start.clones)
        if found is None:
            return ""
        at, share = found
        what = "what a replay returns"
        if at < len(start.tensors):
            named = ((*m.named_parameters(), *m.named_buffers()) for m in self._models)
            own = (name for each in named for name, one in each if one is start.tensors[at])
            what = f"what a replay does to {next(own, 'a tensor that it writes')}"
        return f"{what} differs by {share:.2g} of it from the step itself"

    def _trained(self) -> list[Tensor]:
        held = [p for model in self._models for p in model.parameters()]
        return list({id(one): one for one in (*self._optimizers.weights(), *held)}.values())

    def _state(self, trained: list[Tensor]) -> list[Tensor]:
        """What a step changes: weights, buffers, the optimizers' own, and what else it writes."""
        found = [*trained, *(b for model in self._models for b in model.buffers())]
        found += [*self._optimizers.state(), *self._written]
        return [one for one in {id(one): one for one in found}.values() if _can_be_filled(one)]

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self._captured, self._written, self._objects = None, [], None
        self._buffers = Buffers(None)
        self._optimizers.end()
        if self._warm >= CHECKED:
            torch.cuda.empty_cache()
        warnings.warn(
            f"advisor: this step cannot be replayed as a CUDA graph: {reason}. Training goes on "
            "without, which is slower than the advice says",
            AdvisorWarning,
            stacklevel=4,
        )


def _process_group() -> str:
    """Why no step is captured in a process of several; '' in one alone."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        # NCCL waits, at the end of a process group, for every graph that its work was captured in.
        return "it runs in a process group of torch.distributed, whose work no graph may hold"
    return ""


def _can_be_filled(value: Tensor) -> bool:
    if value.layout is not torch.strided or value.is_inference():
        return False
    sizes = zip(value.shape, value.stride(), strict=True)
    return not any(size > 1 and step == 0 for size, step in sizes)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _if_memory(run: Callable[[], T], past_repair: Collection[Any] = ()) -> T | None:
    """What `run` returns; None if the device has no memory for it."""
    try:
        return run()
    except RuntimeError as exc:
        if past_repair or not _no_memory(exc):
            raise
    return None


def _no_memory(exc: BaseException) -> bool:
    return isinstance(exc, torch.OutOfMemoryError) or "out of memory" in str(exc).lower()


def _why(exc: Exception) -> str:
    said = next(iter(str(exc).strip().splitlines()), "")
    if _no_memory(exc):
        return "there is no memory to capture it"
    if "captur" in said.lower():
        return f"it does what a CUDA graph cannot hold ({said}); {_MEND}"
    return f"{type(exc).__name__}: {said}"[:300]
