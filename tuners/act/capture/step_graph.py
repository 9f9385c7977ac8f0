"""A whole training step, forward, loss, backward and optimizer, captured once and replayed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from advisor.errors import AdvisorWarning
from advisor.tuners.act.capture.agreement import compare_outputs, nudge
from advisor.tuners.act.capture.captured_graph import (
    Buffers,
    CapturedGraph,
    Optimizers,
    Recorder,
    StateSnapshot,
)
from advisor.tuners.act.capture.object_graph import ObjectGraph, Values
from advisor.tuners.act.pilot.loop_observer import numpy_state
from advisor.tuners.decisions import CHECKED, CHECKED_AGAIN, IN_A_ROW, LARGE_BYTES
from advisor.tuners.faults import is_out_of_memory

_REMEDY = (
    "let it return tensors, and look at them outside: no .item(), .cpu(), print(loss), and no "
    "decision on their values"
)


class _NotCapturable(Exception):
    """A step cannot be replayed; `output`: its result, if it has trained on the batch."""

    def __init__(self, reason: str, *output: Any) -> None:
        super().__init__(reason)
        self.output = output


class StepGraph:
    """A training step that is replayed; call it as the step itself, with one batch.

    The first CHECKED calls train without a graph. The next CHECKED calls train twice from the same
    state, with the graph and without, and keep the result without. Later calls replay the graph;
    batches unlike the example run without it. The graph uses a changed learning rate; after another
    change of a value that it reads, the step is captured again. A replay runs kernels and no
    Python: a step that changes Python values, such as a counter, or that cannot be captured, trains
    without a graph, and one warning says why.

    Args:
        example: a batch on the device, like the later ones.
        models: the models that the step trains.
        scaler: the loss's GradScaler, if the step's own code does not refer to it.
        failed: called with the reason if the step is not replayed.
    """

    def __init__(
        self,
        train_step: Callable[[Any], Any],
        example: Any,
        models: Iterable[nn.Module],
        recorder: Recorder,
        *,
        scaler: torch.amp.GradScaler | None,
        failed: Callable[[str], None],
    ) -> None:
        self._recorder, self._failed = recorder, failed
        self._scalers = () if scaler is None else (scaler,)
        self._train_step = train_step
        self._models = tuple(models)
        self._optimizers = Optimizers(recorder.device)
        self._buffers = Buffers(example)
        self._done = 0  # steps before a capture, and comparisons after it
        self._wasted = self._others = self._replays = 0
        self._stepped: list[int] = []  # ids of the optimizers that step
        self._captured: CapturedGraph | None = None
        self._written: list[Tensor] = []
        self.failure = ""  # why the step will never be replayed
        if obstacle := _process_group():
            self._give_up(obstacle, level=4)

    @property
    def ready(self) -> bool:
        """Whether the next batch is replayed, or no batch ever will be."""
        return bool(self.failure) or self._done >= 2 * CHECKED

    def __call__(self, batch: Any) -> Any:
        if self.failure:
            return self._train_step(batch)
        try:
            return self._run(batch)
        except _NotCapturable as exc:
            reason, output = str(exc), exc.output
        self._give_up(reason)  # outside of `except`, which holds the attempt's memory
        return output[0] if output else self._train_step(batch)

    def _run(self, batch: Any) -> Any:
        leaves = self._buffers.leaves(batch)
        if leaves is None:
            return self._run_unlike(batch)
        self._others = 0
        if self._done < CHECKED:
            return self._warm_up(batch)
        self._optimizers.follow_rates()
        if self._captured is not None and (changed := self._captured.changed()):
            self._captured, self._wasted = None, self._wasted + 1
            if self._wasted >= IN_A_ROW:
                raise _NotCapturable(f"{changed} is changed at every step")
        if self._captured is None:
            self._captured = self._capture(leaves)
            self._done = min(self._done, 2 * CHECKED - 1)
        # Comparisons find changes of values that lie too deep to be watched; each comes later.
        if not self.ready or self._replays >= CHECKED_AGAIN << (self._done - 2 * CHECKED):
            return self._check(self._captured, batch, leaves)
        self._wasted = 0
        self._replays += 1
        with _memory("to replay it"):
            return self._captured.replay(leaves)

    def _run_eager(self, batch: Any) -> Any:
        if self._captured is not None:
            self._captured.attached = False
        # Detached: a loss that the script keeps would keep its autograd nodes and their stream.
        return tree_map_only(Tensor, Tensor.detach, self._train_step(batch))

    def _run_unlike(self, batch: Any) -> Any:
        self._others += 1
        if self._others == IN_A_ROW and self._done <= CHECKED:
            warnings.warn(
                f"advisor: {IN_A_ROW} batches in a row were unlike advice.capture's example (other "
                "shapes, types, or values beside the tensors): nothing is replayed, and training "
                "is slower than advised. Give advice.capture a batch like these",
                AdvisorWarning,
                stacklevel=4,
            )
        if self._captured is None:
            return self._run_eager(batch)
        # Buffers are small and are copied for a second try; weights are not.
        buffers = [buffer for model in self._models for buffer in model.buffers()]
        start = StateSnapshot(buffers, [], self._captured.objects)
        with (
            self._optimizers.counting() as stepped,
            _memory("for both the graph and a batch of another shape", start, stepped),
        ):
            return self._run_eager(batch)

    def _warm_up(self, batch: Any) -> Any:
        self._done += 1
        objects, drawn = self._read_objects(), self._host_rng_state()
        before, versions = objects.read(), [tensor._version for tensor in objects.tensors]
        with self._optimizers.counting() as stepped, self._recorder.side_stream() as waits:
            output = self._run_eager(batch)
        wrong = self._why_not_replayed(objects, before, drawn, stepped)
        if waits and not wrong:
            wrong = f"it waits for the device ({waits[0]}); {_REMEDY}"
        # Before the capture: one that fails half-way leaves PyTorch's generator in capture mode.
        if wrong and self._done == CHECKED:
            raise _NotCapturable(wrong, output)
        self._stepped = stepped
        pairs = zip(objects.tensors, versions, strict=True)
        self._written = [t for t, was in pairs if t._version != was or t.nbytes < LARGE_BYTES]
        return output

    def _read_objects(self) -> ObjectGraph:
        return ObjectGraph(self._train_step, self._models, (*self._optimizers, *self._scalers))

    def _host_rng_state(self) -> object:
        beside = self._recorder.device != "cpu"
        return random.getstate(), numpy_state(), beside and torch.get_rng_state().numpy().tobytes()

    def _why_not_replayed(
        self, objects: ObjectGraph, before: Values, drawn: object, stepped: list[int]
    ) -> str:
        """Why a replay would differ from the step that was just made; '' if it would not."""
        if not stepped:
            return "the step ran no optimizer of torch.optim"
        if obstacle := _process_group():
            return obstacle
        if changed := objects.changed_in_step(before):
            return f"it changes {changed} in Python, which a replay would not: do that outside"
        if not objects.between_steps:
            return "it calls step of a GradScaler without its update: call update in the step too"
        if drawn != self._host_rng_state():
            return "it draws random numbers on the host, which a replay would not: do that outside"
        return "" if stepped == self._stepped else "not every call steps the same optimizers"

    def _capture(self, leaves: list[Any]) -> CapturedGraph:
        before: Values = []
        gradients: list[tuple[Tensor, Tensor | None]] = []
        try:
            self._buffers.fill(leaves)
            self._optimizers.begin()
            objects = self._read_objects()
            before = objects.read()
            gradients = [(weight, weight.grad) for weight in self._optimizers.weights()]
            with self._optimizers.capturable():
                recording = self._recorder.record(lambda: self._train_step(self._buffers.batch()))
        except Exception as exc:  # of any kind: the step without a graph may work
            if before:
                objects.restore(before)
            for weight, gradient in gradients:
                weight.grad = gradient
            raise _NotCapturable(_why(exc)) from None
        followed = self._optimizers.rates
        return CapturedGraph(recording, self._buffers, gradients, objects, before, followed)

    def _check(self, captured: CapturedGraph, batch: Any, leaves: list[Any]) -> Any:
        """Compare replays with eager steps and undo both; then train without the graph."""
        with _memory("to compare a replay with the step itself"):
            start = self._snapshot(captured.objects)
            try:
                wrong = self._disagreement(captured, start, leaves)
            finally:
                start.restore()
        drawn = self._host_rng_state()
        with (
            self._optimizers.counting() as stepped,
            _memory("for both the graph and the eager step", start),
        ):
            output = self._run_eager(batch)
        self._done += 1
        self._replays = 0
        if wrong := self._why_not_replayed(captured.objects, start.values, drawn, stepped) or wrong:
            raise _NotCapturable(wrong, output)
        return output

    def _disagreement(
        self, captured: CapturedGraph, start: StateSnapshot, leaves: list[Any]
    ) -> str:
        """How replays differ from eager steps with capturable optimizers; '' if they do not."""

        def left(output: Any) -> list[Tensor]:
            held = tree_flatten((output, captured.replaced()))[0]
            return [*start.tensors, *(one.detach() for one in held if isinstance(one, Tensor))]

        def replayed() -> list[Tensor]:
            start.restore()
            return left(captured.replay(leaves))

        def eager(seed: int | None = None) -> list[Tensor]:
            start.restore()
            nudges = [] if seed is None else nudge(self._optimizers.weights(), seed)
            for gradient in captured.gradients:
                if gradient.weight.grad is not None and gradient.clears:
                    # A step that clears its gradients first, as in the capture, never reads this.
                    gradient.weight.grad.detach().fill_(torch.nan)
            with self._optimizers.capturable(), self._recorder.side_stream():
                output = self._run_eager(self._buffers.batch())
            for weight, by in nudges:
                weight.sub_(by)
            return left(output)

        found = compare_outputs(replayed, eager, start.clones)
        if found is None:
            return ""
        at, share = found
        what = "the output of a replay"
        if at < len(start.tensors):
            named = ((*m.named_parameters(), *m.named_buffers()) for m in self._models)
            own = (name for each in named for name, one in each if one is start.tensors[at])
            what = f"a replay's change of {next(own, 'a tensor that it writes')}"
        return f"{what} differs from the eager step's by {share:.2g} of the eager step's change"

    def _snapshot(self, objects: ObjectGraph) -> StateSnapshot:
        held = (p for model in self._models for p in model.parameters())
        weights = dict.fromkeys((*self._optimizers.weights(), *held))
        buffers = (b for model in self._models for b in model.buffers())
        state = dict.fromkeys((*weights, *buffers, *self._optimizers.state(), *self._written))
        tensors = [one for one in state if _can_be_filled(one)]
        return StateSnapshot(tensors, [*weights], objects)

    def _give_up(self, reason: str, level: int = 3) -> None:
        self.failure = reason
        self._failed(reason)
        self._captured, self._written, self._buffers = None, [], Buffers(None)
        self._optimizers.end()
        if self._done >= CHECKED:
            torch.cuda.empty_cache()
        warnings.warn(
            f"advisor: this step cannot be replayed as a CUDA graph: {reason}. Training goes on "
            "without, which is slower than the advice says",
            AdvisorWarning,
            stacklevel=level,
        )


def _process_group() -> str:
    """Why no step is captured in a process group; '' outside of a process group."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        # At the end of a process group, NCCL waits for every graph that holds its work.
        return "it runs in a process group of torch.distributed, whose work no graph may hold"
    return ""


def _can_be_filled(value: Tensor) -> bool:
    if value.layout is not torch.strided or value.is_inference():
        return False
    sizes = zip(value.shape, value.stride(), strict=True)
    return not any(size > 1 and step == 0 for size, step in sizes)


@contextmanager
def _memory(
    purpose: str, start: StateSnapshot | None = None, past_repair: Sized = ()
) -> Iterator[None]:
    """Context manager: if memory runs out, restores `start`, unless an optimizer has stepped."""
    try:
        yield
    except RuntimeError as exc:
        if past_repair or not is_out_of_memory(exc):
            raise
        if start is not None:
            start.restore()
        raise _NotCapturable(f"there is no memory {purpose}") from None


def _why(exc: Exception) -> str:
    said = next(iter(str(exc).strip().splitlines()), "")
    if is_out_of_memory(exc):
        return "there is no memory to capture it"
    if "captur" in said.lower():
        return f"it does what a CUDA graph cannot hold ({said}); {_REMEDY}"
    return f"{type(exc).__name__}: {said}"[:300]
