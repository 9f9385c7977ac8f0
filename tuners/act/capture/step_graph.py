"""A whole training step, forward, loss, backward and optimizer, recorded once and replayed.

What cannot be recorded, or does not do in a replay what it does without, runs as it would have run
anyway, and says so: a replay runs kernels, and no Python.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map

from advisor.errors import AdvisorWarning
from advisor.tuners.act import buckets
from advisor.tuners.act.capture.agreement import apart, nudge, nudge_back
from advisor.tuners.act.capture.buffers import Buffers
from advisor.tuners.act.capture.moment import Moment
from advisor.tuners.act.capture.optimizers import Optimizers
from advisor.tuners.act.capture.reach import Reach
from advisor.tuners.act.capture.recorded import Gradient, Recorded, detached
from advisor.tuners.act.capture.recorder import Recorder
from advisor.tuners.act.capture.unison import Unison
from advisor.tuners.act.capture.watch import Seen, Watch, drawn
from advisor.tuners.act.ranks import Group

WARM_STEPS = 3
"""Steps before the capture, as PyTorch's notes have it: lazy state is made in them."""
WARM_STEPS_PARALLEL = 11
"""The same under DistributedDataParallel, whose first ten are timed (PyTorch's notes)."""
ENDS_S, ENDS_STEPS = 55.0, 30
"""A capture and its comparisons have so many seconds, or as long as so many steps take, where other
processes take part: one that is gone is not waited for longer."""
CHECKED = 3
"""Replays that are compared with the same step without a graph, each on a batch of its own."""
RECAPTURES = 8
"""Captures in a row, each undone by the very next change, after which graphs are given up."""
OTHERS = 64
"""Batches in a row that are unlike the example's, after which it is said that nothing replays."""
SMALL = 16 * 2**20
"""Bytes up to which a tensor that the step reaches, but is not known to write, is compared too."""

_ALIKE, _CHANGED, _OTHER = range(3)
"""What a rank would do at a step: replay, capture anew, or run its batch without."""

_MEND = (
    "let it return tensors, and look at them outside: no .item(), .cpu(), print(loss), and no "
    "decision on their values"
)

TrainStep = Callable[[Any], Any]


class StepGraph:
    """A training step that is replayed; called as the step itself, with one batch.

    The first WARM_STEPS calls train without a graph; the next CHECKED ones train twice from the
    same state, with it and without, and keep the latter; from then on a call copies its batch into
    the graph's buffers and replays. A batch unlike the example, as the last of an epoch or one with
    another number or name among its tensors, runs without a graph. A learning rate that the script
    changes between steps is taken over; any other change of the optimizer's settings, of which
    weights train, or of a value that the step's code reads, captures anew.

    Under DistributedDataParallel the exchange of gradients is in the graph, and all ranks do the
    same at every step: what any of them cannot replay none does, and what one cannot capture all
    train without. FSDP and other exchanges are trained without.

    The step's Python code runs at captures only. One that changes values in Python, as a schedule
    stepped inside or a counter, or draws Python's random numbers, is named and never replayed.

    Args:
        train_step: takes a batch; returns tensors, such as the loss, in any nesting.
        example: a batch on the device, as those to come.
        models: the modules that the step trains, for their buffers.
        recorder: what captures and replays.
        scaler: of the loss, where the step gets to it by other ways than its own code.

    Attributes:
        failure: why it runs without a graph for good; empty while it does not.
    """

    def __init__(
        self,
        train_step: TrainStep,
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
        self._warm, self._warm_steps = 0, WARM_STEPS
        self._began = self._step_s = 0.0
        self._stepped: list[list[int]] = []
        self._checked = 0
        self._wasted = 0
        self._others = 0
        self._recorded: Recorded | None = None
        self._fixed: list[Any] = []
        self._written: list[Tensor] = []
        self._watch = Watch(lambda: None, (), ())
        self.failure = ""
        self._unison = Unison(None)
        self._parallels: list[DistributedDataParallel] = []
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._join()

    @property
    def ready(self) -> bool:
        """Whether the next batch is replayed, or nothing ever will be."""
        return bool(self.failure) or self._checked >= CHECKED

    def __call__(self, batch: Any) -> Any:
        if self.failure:
            return self._train_step(batch)
        leaves = self._buffers.leaves(batch)
        recorded, changed = self._recorded, ""
        if leaves is not None and recorded is not None and self._warm >= self._warm_steps:
            changed = self._changed(recorded)
        what = self._unison.most(_OTHER if leaves is None else _CHANGED if changed else _ALIKE)
        if leaves is None or what == _OTHER:
            return self._other(batch)
        self._others = 0
        if self._warm < self._warm_steps:
            return self._warm_up(batch)
        if what == _CHANGED:
            self._recorded, self._wasted = None, self._wasted + 1
            if self._wasted >= RECAPTURES:
                self._give_up(f"{changed or 'what another rank reads'} is changed at every step")
                return self._train_step(batch)
        if self._recorded is not None and self._checked >= CHECKED:
            self._wasted = 0
            return self._replay(leaves, batch)
        with self._unison.ending(max(ENDS_S, ENDS_STEPS * self._step_s)):
            return self._on_trial(leaves, batch)

    def release(self) -> None:
        """Train without the graph from now on: what it exchanges gradients by is to be gone."""
        self.failure = self.failure or "its process group is destroyed"
        self._recorded, self._written = None, []

    def _on_trial(self, leaves: list[Any], batch: Any) -> Any:
        """A step that captures where that is not done, and is compared with its replay."""
        if self._recorded is None:
            if not self._capture(leaves):
                return self._train_step(batch)
            self._checked = min(self._checked, CHECKED - 1)
        return self._check(batch, leaves)

    def _join(self) -> None:
        """Train with the other ranks, their gradients' exchange on the stream that is captured."""
        self._unison = Unison(Group.current())
        reached = Reach(self._train_step, self._models, ())
        found = [one for module in reached.modules for one in buckets.within(module)]
        parallels = list({id(one): one for one in found}.values())
        if not parallels and self._unison.alone:
            return
        obstacle = ""
        if not parallels:
            obstacle = "it reaches no DistributedDataParallel that exchanges its gradients"
        elif not all(map(buckets.can_rebuild, parallels)):
            obstacle = "DistributedDataParallel exchanges gradients with a hook or a static graph"
        if obstacle := self._unison.agree(obstacle):
            self._give_up(obstacle)
            return
        self._unison.share()
        self._warm_steps = WARM_STEPS_PARALLEL
        self._parallels = parallels
        with self._recorder.beside():
            self._exchange_anew()
        from advisor.tuners.act.capture.outlived import release_first

        release_first(self)

    def _exchange_anew(self) -> None:
        """Of gradients, on the stream that is current: in all ranks at one step. A capture that
        broke off in an exchange is then forgotten too."""
        for parallel in self._parallels:
            buckets.move(parallel)

    def _aside(self) -> AbstractContextManager[Any]:
        """For a step without the graph, on the stream where its gradients are exchanged."""
        return self._recorder.beside() if self._parallels else contextlib.nullcontext()

    def _plainly(self, batch: Any) -> Any:
        if self._recorded is not None:
            self._recorded.attached = False
        # Detached: a loss that is held would keep nodes of its graph, and with them their stream.
        return tree_map(detached, self._train_step(batch))

    def _other(self, batch: Any) -> Any:
        """A batch that is not like the example; a graph makes room for it where it must."""
        self._others += 1
        if self._others == OTHERS and not self._checked:
            warnings.warn(
                f"advisor: {OTHERS} batches in a row were not like the example that "
                "advice.capture was given (other shapes, types, or values beside the tensors): "
                "nothing is replayed, and training is slower than advised. Give it a batch as "
                "those to come",
                AdvisorWarning,
                stacklevel=3,
            )
        if self._recorded is None:
            with self._aside():
                return self._plainly(batch)
        # The step may need what memory the graph holds. Buffers are small; weights are not.
        buffers = [buffer for model in self._models for buffer in model.buffers()]
        kept, random = [buffer.clone() for buffer in buffers], self._recorder.random_state()
        with self._optimizers.counting() as stepped:
            try:
                with self._aside():
                    return self._plainly(batch)
            except RuntimeError as exc:
                if stepped or not self._goes_on(exc):
                    raise
        self._give_up("there is no memory for it beside a batch of another shape")
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)
        self._recorder.set_random_state(random)
        return self._train_step(batch)

    def _warm_up(self, batch: Any) -> Any:
        self._warm += 1
        last = self._warm == self._warm_steps
        obstacle = self._look() if last else ""
        if self._warm == WARM_STEPS:
            self._began = time.monotonic()
        before, luck = self._watch.read(), self._luck()
        versions = {at: _version(tensor) for at, tensor in self._watch.tensors.items()}
        with self._optimizers.counting() as stepped, self._recorder.beside() as waits:
            output = self._plainly(batch)
        self._stepped.append(stepped)
        if not last:
            return output
        self._step_s = (time.monotonic() - self._began) / (self._warm + 1 - WARM_STEPS)
        if not stepped:
            obstacle = obstacle or "the step ran no optimizer of torch.optim"
        # Told beforehand: a capture that fails half-way leaves PyTorch's generator in it.
        obstacle = obstacle or self._moving(before, luck)
        if waits:
            obstacle = obstacle or f"it waits for the device ({waits[0]}); {_MEND}"
        if self._stepped[-1] != self._stepped[-2]:
            obstacle = obstacle or "not every call steps the same optimizers"
        if obstacle := self._unison.agree(obstacle):
            self._give_up(obstacle)
        else:
            self._written = [
                tensor
                for at, tensor in self._watch.tensors.items()
                if _version(tensor) != versions[at] or tensor.nbytes <= SMALL
            ]
            self._watch.settle(before)
        return output

    def _look(self) -> str:
        """Why what the step may change cannot be watched; '' where it can."""
        also = (*self._optimizers, *self._scalers)
        self._watch = Watch(self._train_step, self._models, also)
        if self._watch.complete:
            return ""
        return "it reaches too many objects to see which of them it changes"

    def _luck(self) -> object:
        return drawn(), self._recorder.host_state()

    def _moving(self, before: Seen, luck: object) -> str:
        """What a step just now has changed that a replay would not; '' where nothing."""
        if moved := self._watch.moved(before):
            return f"it changes {moved} in Python, which a replay would not: do that outside"
        if not self._watch.between_steps:
            return "it steps by a GradScaler and leaves it as it is: call its update in the step"
        if luck != self._luck():
            return "it draws random numbers of Python, NumPy or the host, which would stand still"
        return ""

    def _changed(self, recorded: Recorded) -> str:
        """What the script has changed since the capture, where the graph would not follow."""
        self._optimizers.follow_rates()
        if self._optimizers.settings() != self._fixed:
            return (
                "a setting of the optimizer, other than the learning rate of a fused one, or what "
                "weights train,"
            )
        if not all(map(Gradient.as_recorded, recorded.gradients)):
            return "which gradients there are before a step"
        return self._watch.differs()

    def _capture(self, leaves: list[Any]) -> bool:
        seen: Seen = []
        gradients: list[Gradient] = []
        try:
            self._buffers.fill(leaves)
            self._optimizers.count_on_device()
            self._optimizers.take_rates()
            why = self._look()
            seen = self._watch.read()
            self._fixed = self._optimizers.settings()
            gradients = [Gradient(weight) for weight in self._optimizers.weights()]
            buffers = [(m, *b) for m in self._modules() for b in m.named_buffers(recurse=False)]
            if not why:
                self._recorded = Recorded(self._record(), gradients)
        except (RuntimeError, ValueError, TypeError) as exc:
            # What PyTorch, CUDA and the user's code raise where a step cannot be captured.
            why = _why(exc)
            if seen:
                self._watch.put_back(seen)
            for gradient in gradients:
                gradient.weight.grad = gradient.before
        else:
            why = why or self._settled(seen, buffers)
        if why := self._unison.agree(why):
            del gradients  # they lie in the graph's memory, which is given back
            self._give_up(why)
        return not why

    def _record(self) -> tuple[Callable[[], None], Any]:
        with self._optimizers.capturable():
            return self._recorder.record(lambda: self._train_step(self._buffers.batch()))

    def _settled(self, seen: Seen, buffers: list[Any]) -> str:
        """Put everything back as it was before the capture; why a replay cannot, or ''."""
        replaced = [held for held in buffers if getattr(held[0], held[1]) is not held[2]]
        for module, name, tensor in replaced:
            setattr(module, name, tensor)
        if replaced:
            return f"the buffer {replaced[0][1]!r} is replaced, not changed in place"
        assert self._recorded is not None
        self._recorded.keep(self._watch.replaced(seen), seen)
        self._watch.settle(seen)
        self._watch.put_back(seen)
        return ""

    def _modules(self) -> Iterator[nn.Module]:
        for model in self._models:
            yield from model.modules()

    def _replay(self, leaves: list[Any], batch: Any) -> Any:
        """The batch trained on by the graph; where there is no memory for that, without it."""
        try:
            return self._played(leaves)
        except RuntimeError as exc:
            if not self._goes_on(exc):
                raise
        self._give_up("there is no memory to replay it")
        return self._train_step(batch)

    def _played(self, leaves: list[Any]) -> Any:
        assert self._recorded is not None
        return self._recorded.play(lambda: self._buffers.fill(leaves))

    def _check(self, batch: Any, leaves: list[Any]) -> Any:
        """One step with the graph, undone, and one without; both must come to the same."""
        start, wrong = self._moment()
        if wrong := self._unison.agree(wrong):
            del start
            self._give_up(wrong)
            return self._train_step(batch)
        assert start is not None
        wrong = "there is no memory to compare a replay with the step itself"
        try:
            wrong = self._disagreement(start, leaves)
        except RuntimeError as exc:
            if not self._goes_on(exc):
                raise
        finally:
            start.restore()
        luck = self._luck()
        try:
            with self._optimizers.counting() as stepped, self._aside():
                output = self._plainly(batch)
        except RuntimeError as exc:
            if not self._goes_on(exc):
                raise
            start.restore()
            wrong = "there is no memory for the step itself beside it"
        else:
            wrong = self._moving(start.seen, luck) or wrong
            if stepped != self._stepped[-1]:
                wrong = "not every call steps the same optimizers"
            if wrong := self._unison.agree(wrong):
                self._give_up(wrong)
            self._checked += 1
            return output
        del start
        self._give_up(wrong)
        return self._train_step(batch)

    def _moment(self) -> tuple[Moment | None, str]:
        """What a step changes, kept, and why it cannot be; '' where it can."""
        try:
            start = Moment(self._state(), self._trained(), self._recorder, self._watch)
            if not self._unison.alone:
                self._recorder.reserve()
        except RuntimeError as exc:
            if not _no_memory(exc):
                raise
            return None, "there is no memory to compare a replay with the step itself"
        return start, ""

    def _goes_on(self, exc: RuntimeError) -> bool:
        """Whether a step that failed can be taken anew, without the graph: in that of several ranks
        the others wait, and would take the new one's gradients for those of the old."""
        return _no_memory(exc) and self._unison.alone

    def _disagreement(self, start: Moment, leaves: list[Any]) -> str:
        """Where replays differ from steps, as the optimizers take them in a capture."""
        recorded = self._recorded
        assert recorded is not None

        def left(output: Any) -> list[Tensor]:
            return [*start.tensors, *_tensors((output, recorded.kept()))]

        def replayed() -> list[Tensor]:
            start.restore()
            return left(self._played(leaves))

        def plain(seed: int | None = None) -> list[Tensor]:
            start.restore()
            nudges = [] if seed is None else nudge(self._optimizers.weights(), seed)
            for gradient in recorded.gradients:
                if gradient.before is not None and gradient.after is not gradient.before:
                    # A step that clears them first, as it must have, does not see this.
                    self._spoil(gradient.weight)
            with self._optimizers.capturable(), self._recorder.beside():
                output = self._plainly(self._buffers.batch())
            nudge_back(nudges)
            return left(output)

        found = apart(replayed, plain, plain, start.clones, self._unison.any)
        if found is None:
            return ""
        at, share = found
        if at >= len(start.tensors):
            return f"what a replay returns differs by {share:.2g} of it from the step itself"
        called = self._called(start.tensors[at])
        return f"what a replay does to {called} differs by {share:.2g} of it from the step itself"

    @staticmethod
    def _spoil(weight: Tensor) -> None:
        if weight.grad is not None:
            weight.grad.detach().fill_(torch.nan)

    def _called(self, tensor: Tensor) -> str:
        for model in self._models:
            for name, one in (*model.named_parameters(), *model.named_buffers()):
                if one is tensor:
                    return name
        return "a tensor that it writes"

    def _trained(self) -> list[Tensor]:
        """Whatever may have a gradient."""
        held = [p for model in self._models for p in model.parameters()]
        found = (*self._optimizers.weights(), *held)
        return list({id(one): one for one in found}.values())

    def _state(self) -> list[Tensor]:
        """What a step changes: weights, buffers, the optimizers' own, and what else it writes."""
        found = self._trained()
        found += [buffer for model in self._models for buffer in model.buffers()]
        found += [*self._optimizers.state(), *self._written]
        return [one for one in {id(one): one for one in found}.values() if _fills(one)]

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self._recorded, self._written = None, []
        self._exchange_anew()
        self._buffers.drop()
        self._optimizers.drop_rates()
        self._watch = Watch(lambda: None, (), ())
        if self._warm >= self._warm_steps:
            self._recorder.empty()
        warnings.warn(
            f"advisor: this step cannot be replayed as a CUDA graph: {reason}. Training goes on "
            "without, which is slower than the advice says",
            AdvisorWarning,
            stacklevel=4,
        )


def _fills(value: Any) -> bool:
    """Whether it is a tensor that another can be copied into."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_inference()
        and not any(
            n > 1 and step == 0 for n, step in zip(value.shape, value.stride(), strict=True)
        )
    )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _no_memory(exc: BaseException) -> bool:
    return isinstance(exc, torch.OutOfMemoryError) or "out of memory" in str(exc).lower()


def _why(exc: Exception) -> str:
    said = next(iter(str(exc).strip().splitlines()), "")
    if _no_memory(exc):
        return "there is no memory to capture it"
    if "captur" in said.lower():
        return f"it does what a CUDA graph cannot hold ({said}); {_MEND}"
    return f"{type(exc).__name__}: {said}"[:300]
