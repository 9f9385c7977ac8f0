"""A whole training step, forward, loss, backward and optimizer, recorded once and replayed.

What cannot be recorded, or does not do in a replay what it does without, runs as it would have run
anyway, and says so: a replay runs kernels, and no Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from advisor.errors import AdvisorWarning
from advisor.tuners.act.agreement import apart
from advisor.tuners.act.recorder import Recorder
from advisor.tuners.act.watch import Place, Seen, Watch, drawn

WARM_STEPS = 3
"""Steps before the capture, as PyTorch's notes have it: lazy state is made in them."""
CHECKED = 3
"""Replays that are compared with the same step without a graph, each on a batch of its own."""
RECAPTURES = 8
"""Captures in a row, each undone by the very next change, after which graphs are given up."""
OTHERS = 64
"""Batches in a row that are unlike the example's, after which it is said that nothing replays."""
SMALL = 16 * 2**20
"""Bytes up to which a tensor that the step reaches, but is not known to write, is compared too."""

_MEND = (
    "let it return tensors, and look at them outside: no .item(), .cpu(), print(loss), and no "
    "decision on their values"
)

_CLEARED = object()

TrainStep = Callable[[Any], Any]


class _Rate:
    """The learning rate of a parameter group, in a tensor that a graph reads at each replay."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group
        self._value = float(group["lr"])
        self.tensor = torch.full((), self._value, device=group["params"][0].device)

    @staticmethod
    def fits(group: dict[str, Any], device: str) -> bool:
        """Whether its optimizer takes a tensor; one on the device already needs no other."""
        if not group["params"] or "lr" not in group:
            return False
        held = group["lr"]
        takes = bool(group.get("fused")) or ("capturable" in group and device == "cuda")
        return takes and not (isinstance(held, Tensor) and held.device.type == "cuda")

    def follow(self) -> None:
        """Take over what a scheduler has set."""
        value = float(self.group["lr"])
        if value != self._value:
            self._value = value
            self.tensor.fill_(value)


class _Gradient:
    """Where a recorded step leaves a weight's gradient, and how it found it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.before: Any = weight.grad
        self.after: Any = None

    def recorded(self) -> None:
        self.after = self.weight.grad
        self.weight.grad = self.before
        if self.before is not None and self.after is not self.before:
            self.before = _CLEARED  # not kept alive: it is as large as the weight

    def as_recorded(self) -> bool:
        """A step that clears gradients first does not care; others find them as they were."""
        if self.before is None:
            return self.weight.grad is None
        return self.after is not self.before or self.weight.grad is self.before


class _Moment:
    """All that a step may change, kept: tensors, gradients, Python's values, random numbers."""

    def __init__(self, tensors: list[Tensor], weights: list[Tensor], graph: StepGraph) -> None:
        self._graph = graph
        self.tensors = tensors
        self.clones = [tensor.detach().clone() for tensor in tensors]
        self._gradients = [(weight, weight.grad) for weight in weights]
        self._grads = [None if g is None else g.detach().clone() for _, g in self._gradients]
        self.random = graph.recorder.random_state()
        self.seen = graph.watch.read()

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, clone in zip(self.tensors, self.clones, strict=True):
                tensor.detach().copy_(clone)
            for (weight, gradient), held in zip(self._gradients, self._grads, strict=True):
                weight.grad = gradient
                if gradient is not None and held is not None:
                    gradient.detach().copy_(held)
        self._graph.recorder.set_random_state(self.random)
        self._graph.watch.put_back(self.seen)


class StepGraph:
    """A training step that is replayed; called as the step itself, with one batch.

    The first WARM_STEPS calls train without a graph; the next CHECKED ones train twice from the
    same state, with it and without, and keep the latter; from then on a call copies its batch into
    the graph's buffers and replays. A batch unlike the example, as the last of an epoch or one with
    another number or name among its tensors, runs without a graph. A learning rate that the script
    changes between steps is taken over; any other change of the optimizer's settings, of which
    weights train, or of a value that the step's code reads, captures anew.

    The step's Python code runs at captures only. One that changes values in Python, as a schedule
    stepped inside or a counter, or draws Python's random numbers, is named and never replayed.

    Args:
        train_step: takes a batch; returns tensors, such as the loss, in any nesting.
        example: a batch on the device, as those to come.
        models: the modules that the step trains, for their buffers.
        recorder: what captures and replays.

    Attributes:
        failure: why it runs without a graph for good; empty while it does not.
    """

    def __init__(
        self,
        train_step: TrainStep,
        example: Any,
        models: Iterable[nn.Module],
        recorder: Recorder,
    ) -> None:
        self.recorder = recorder
        self._train_step = train_step
        self._models = tuple(models)
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        leaves, self._tree = _flatten(example)
        self._buffers = [torch.empty_like(x) if _dense(x) else x for x in leaves]
        self._warm = 0
        self._stepped: list[list[int]] = []
        self._checked = 0
        self._wasted = 0
        self._others = 0
        self._play: Callable[[], None] | None = None
        self._output: Any = None
        self._fixed: list[Any] = []
        self._rates: list[_Rate] = []
        self._gradients: list[_Gradient] = []
        self._attached = False
        self._cleared: list[_Gradient] = []
        self._kept: list[tuple[Place, Any]] = []
        self._alive: list[Any] = []
        self._written: list[Tensor] = []
        self.watch = Watch(lambda: None, (), ())
        self.failure = ""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
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
            return self._other(batch)
        self._others = 0
        if self._warm < WARM_STEPS:
            return self._warm_up(batch)
        if self._play is not None and (changed := self._changed()):
            self._play, self._wasted = None, self._wasted + 1
            if self._wasted >= RECAPTURES:
                self._give_up(f"{changed} is changed at every step")
                return self._train_step(batch)
        if self._play is None:
            if not self._capture(leaves):
                return self._train_step(batch)
            self._checked = min(self._checked, CHECKED - 1)
        elif self._checked >= CHECKED:
            self._wasted = 0
        if self._checked < CHECKED:
            return self._check(batch, leaves)
        return self._replay(leaves, batch)

    def _plainly(self, batch: Any) -> Any:
        self._attached = False
        # Detached: a loss that is held would keep nodes of its graph, and with them their stream.
        return tree_map(_detached, self._train_step(batch))

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
        if self._play is None:
            return self._plainly(batch)
        # The step may need what memory the graph holds. Buffers are small; weights are not.
        buffers = [buffer for model in self._models for buffer in model.buffers()]
        kept, random = [buffer.clone() for buffer in buffers], self.recorder.random_state()
        with self._counting() as stepped:
            try:
                return self._plainly(batch)
            except RuntimeError as exc:
                if not _no_memory(exc) or stepped:
                    raise
        self._give_up("there is no memory for it beside a batch of another shape")
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)
        self.recorder.set_random_state(random)
        return self._train_step(batch)

    @contextmanager
    def _counting(self) -> Iterator[list[int]]:
        """The optimizers that step, by id, in their order."""
        found: list[int] = []

        def see(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            self._optimizers[id(optimizer)] = optimizer
            found.append(id(optimizer))

        seen = register_optimizer_step_pre_hook(see)
        try:
            yield found
        finally:
            seen.remove()

    def _warm_up(self, batch: Any) -> Any:
        self._warm += 1
        last = self._warm == WARM_STEPS
        if last:
            self._look()
            if self.failure:
                return self._train_step(batch)
        before, luck = self.watch.read(), self._luck()
        versions = {at: _version(tensor) for at, tensor in self.watch.tensors.items()}
        with self._counting() as stepped, self.recorder.beside() as waits:
            output = self._plainly(batch)
        self._stepped.append(stepped)
        if not stepped and last:
            self._give_up("the step ran no optimizer of torch.optim")
        elif last:
            # Told beforehand: a capture that fails half-way leaves PyTorch's generator in it.
            obstacle = self._moving(before, luck) or (
                f"it waits for the device ({waits[0]}); {_MEND}" if waits else ""
            )
            if not obstacle and self._stepped[-1] != self._stepped[-2]:
                obstacle = "not every call steps the same optimizers"
            if obstacle:
                self._give_up(obstacle)
                return output
            self._written = [
                tensor
                for at, tensor in self.watch.tensors.items()
                if _version(tensor) != versions[at] or tensor.nbytes <= SMALL
            ]
            self.watch.settle(before)
        return output

    def _look(self) -> None:
        self.watch = Watch(self._train_step, self._models, self._optimizers.values())
        if not self.watch.complete:
            self._give_up("it reaches too many objects to see which of them it changes")

    def _luck(self) -> object:
        return drawn(), self.recorder.host_state()

    def _moving(self, before: Seen, luck: object) -> str:
        """What a step just now has changed that a replay would not; '' where nothing."""
        if moved := self.watch.moved(before):
            return f"it changes {moved} in Python, which a replay would not: do that outside"
        if luck != self._luck():
            return "it draws random numbers of Python, NumPy or the host, which would stand still"
        return ""

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
        found.append(torch.is_grad_enabled())
        return found

    def _changed(self) -> str:
        """What the script has changed since the capture, where the graph would not follow."""
        for rate in self._rates:
            rate.follow()
        if self._settings() != self._fixed:
            return (
                "a setting of the optimizer, other than the learning rate of a fused one, or what "
                "weights train,"
            )
        if not all(map(_Gradient.as_recorded, self._gradients)):
            return "which gradients there are before a step"
        return self.watch.differs()

    def _capture(self, leaves: list[Any]) -> bool:
        seen: Seen = []
        try:
            self._fill(leaves)
            self._count_on_device()
            self._rates = [
                _Rate(group) for group in self._groups() if _Rate.fits(group, self.recorder.device)
            ]
            self._look()
            seen = self.watch.read()
            if self.failure:
                return False
            self._fixed = self._settings()
            self._gradients = [_Gradient(weight) for weight in self._weights()]
            buffers = [(m, *b) for m in self._modules() for b in m.named_buffers(recurse=False)]
            with self._capturable():
                self._play, output = self.recorder.record(
                    lambda: self._train_step(tree_unflatten(self._buffers, self._tree))
                )
        except (RuntimeError, ValueError, TypeError) as exc:
            # What PyTorch, CUDA and the user's code raise where a step cannot be captured.
            why = _why(exc)
            if seen:
                self.watch.put_back(seen)
        else:
            return self._captured(output, seen, buffers)
        for gradient in self._gradients:
            gradient.weight.grad = gradient.before
        self._give_up(why)
        return False

    def _captured(self, output: Any, seen: Seen, buffers: list[Any]) -> bool:
        for gradient in self._gradients:
            gradient.recorded()
        self._attached = False
        self._cleared = [g for g in self._gradients if g.before is None and g.after is not None]
        replaced = [held for held in buffers if getattr(held[0], held[1]) is not held[2]]
        for module, name, tensor in replaced:
            setattr(module, name, tensor)
        if replaced:
            self._give_up(f"the buffer {replaced[0][1]!r} is replaced, not changed in place")
            return False
        own = self.watch.replaced(seen)
        self._kept = [(place, name) for place, name, _old, _new in own]
        self._output = tree_map(_detached, (output, [new for *_, new in own]))
        self._alive = seen  # a tensor that has been replaced is still read by the graph
        self.watch.settle(seen)
        self.watch.put_back(seen)
        return True

    def _modules(self) -> Iterator[nn.Module]:
        for model in self._models:
            yield from model.modules()

    def _count_on_device(self) -> None:
        for optimizer in self._optimizers.values():
            for parameter, state in optimizer.state.items():
                if "step" in state and isinstance(state["step"], Tensor):
                    state["step"] = state["step"].to(parameter.device)

    @contextmanager
    def _capturable(self) -> Iterator[None]:
        """The optimizers as a capture needs them: their learning rates on the device."""
        on_device = self.recorder.device == "cuda"
        held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for group in self._groups():
            held.append(
                (group, {name: group[name] for name in ("lr", "capturable") if name in group})
            )
            if "capturable" in group and on_device:
                group["capturable"] = True
        for rate in self._rates:
            rate.group["lr"] = rate.tensor
        try:
            yield
        finally:
            for group, values in held:
                group.update(values)

    def _fill(self, leaves: list[Any]) -> None:
        for buffer, leaf in zip(self._buffers, leaves, strict=True):
            if _dense(buffer):
                buffer.copy_(leaf, non_blocking=True)

    def _replay(self, leaves: list[Any], batch: Any) -> Any:
        """The batch trained on by the graph; where there is no memory for that, without it."""
        try:
            return self._played(leaves)
        except RuntimeError as exc:
            if not _no_memory(exc):
                raise
        self._give_up("there is no memory to replay it")
        return self._train_step(batch)

    def _played(self, leaves: list[Any]) -> Any:
        assert self._play is not None
        # Copies: the next replay writes over the graph's own, and a script may keep its losses.
        # Made before: a batch that has been trained on cannot be given up.
        output, kept = rooms = tree_map(_room, self._output)
        self._fill(leaves)
        self._play()
        tree_map(_copy, rooms, self._output)
        for gradient in self._gradients if not self._attached else self._cleared:
            gradient.weight.grad = gradient.after
        self._attached = True
        for (place, name), value in zip(self._kept, kept, strict=True):
            place.write(name, value)
        return output

    def _check(self, batch: Any, leaves: list[Any]) -> Any:
        """One step with the graph, undone, and one without; both must come to the same."""
        start: _Moment | None = None
        wrong = "there is no memory to compare a replay with the step itself"
        try:
            start = _Moment(self._state(), self._trained(), self)
            wrong = self._disagreement(start, leaves)
        except RuntimeError as exc:
            if not _no_memory(exc):
                raise
        finally:
            if start is not None:
                start.restore()
        if start is None:
            self._give_up(wrong)
            return self._train_step(batch)
        luck = self._luck()
        try:
            with self._counting() as stepped:
                output = self._plainly(batch)
        except RuntimeError as exc:
            if not _no_memory(exc):
                raise
            start.restore()
            wrong = "there is no memory for the step itself beside it"
        else:
            wrong = self._moving(start.seen, luck) or wrong
            if stepped != self._stepped[-1]:
                wrong = "not every call steps the same optimizers"
            if wrong:
                self._give_up(wrong)
            self._checked += 1
            return output
        del start
        self._give_up(wrong)
        return self._train_step(batch)

    def _disagreement(self, start: _Moment, leaves: list[Any]) -> str:
        """Where replays differ from steps, as the optimizers take them in a capture."""

        def left(returned: Any) -> list[Tensor]:
            return [*start.tensors, *_tensors(returned)]

        def replayed() -> list[Tensor]:
            start.restore()
            output = self._played(leaves)
            return left((output, [place.read()[name] for place, name in self._kept]))

        def plain(nudge: bool = False) -> list[Tensor]:
            start.restore()
            nudges = _nudge(self._weights()) if nudge else []
            for gradient in self._gradients:
                if gradient.before is not None and gradient.after is not gradient.before:
                    # A step that clears them first, as it must have, does not see this.
                    self._spoil(gradient.weight)
            with self._capturable(), self.recorder.beside():
                output = self._plainly(tree_unflatten(self._buffers, self._tree))
            _nudge_back(nudges)
            return left((output, [place.read()[name] for place, name in self._kept]))

        found = apart(replayed, plain, lambda: plain(nudge=True), start.clones)
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

    def _weights(self) -> list[Tensor]:
        return [p for g in self._groups() for p in g["params"]]

    def _trained(self) -> list[Tensor]:
        """Whatever may have a gradient."""
        held = [p for model in self._models for p in model.parameters()]
        return list({id(one): one for one in (*self._weights(), *held)}.values())

    def _state(self) -> list[Tensor]:
        """What a step changes: weights, buffers, the optimizers' own, and what else it writes."""
        found = self._trained()
        found += [buffer for model in self._models for buffer in model.buffers()]
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                found += [value for value in state.values() if isinstance(value, Tensor)]
        found += self._written
        return [one for one in {id(one): one for one in found}.values() if _fills(one)]

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self._play = self._output = None
        self._buffers, self._rates, self._gradients, self._cleared = [], [], [], []
        self._written, self._kept, self._alive = [], [], []
        self.watch = Watch(lambda: None, (), ())
        if self._warm >= WARM_STEPS:
            self.recorder.empty()
        warnings.warn(
            f"advisor: this step cannot be replayed as a CUDA graph: {reason}. Training goes on "
            "without, which is slower than the advice says",
            AdvisorWarning,
            stacklevel=4,
        )


def _flatten(batch: Any) -> tuple[list[Any], Any]:
    # A DataLoader yields lists where datasets hold tuples: one as good as the other.
    return tree_flatten(list(batch) if type(batch) is tuple else batch)


def _dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


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


def _alike(ours: Any, held: Any) -> bool:
    """Whether a graph that was captured with `held` is right for `ours`."""
    if _dense(held) and _dense(ours):
        return bool(
            ours.shape == held.shape
            and ours.dtype == held.dtype
            and ours.requires_grad == held.requires_grad
        )
    if ours is held:
        return True
    if type(ours) is not type(held):
        return False
    try:
        return bool(ours == held)
    except (RuntimeError, ValueError, TypeError):  # arrays, and what has an order of its own
        return False


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _room(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, Tensor) else value


def _copy(to: Any, source: Any) -> None:
    if isinstance(to, Tensor):
        to.copy_(source)


def _nudge(weights: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each weight by its last digit: what this does to a step, rounding may do to it."""
    nudges = []
    for weight in (w.detach() for w in weights if w.is_floating_point()):
        before = weight.clone()
        weight.mul_(1 + 2 * torch.finfo(weight.dtype).eps)
        nudges.append((weight, weight - before))
    return nudges


def _nudge_back(nudges: list[tuple[Tensor, Tensor]]) -> None:
    for weight, by in nudges:
        weight.sub_(by)


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
