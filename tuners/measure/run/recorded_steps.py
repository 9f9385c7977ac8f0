"""Records steps of a running script, and repeats its models' calls under any config.

Each call of the script's models in four unmodified steps is recorded: its arguments, and the
gradients of its outputs; also the weights before the first step. A pass copies these weights into
the parameters, repeats the calls of one step through a config's code, runs backward from the
recorded gradients, and restores everything.

In a job of several processes, each repeats its own calls, the reduced gradients are compared, and
all make the same passes and come to the same verdict.

A pass does not show errors that add up over many updates, in micro-batches after the eighth, or in
gradients of gradients. A loss's error is linearised, which is exact if the model returns its loss.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from advisor.cache.config import Config
from advisor.tuners.act import hooks
from advisor.tuners.act.applied import AppliedConfig
from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.act.gate import Signature, of_any_size, signature
from advisor.tuners.act.pilot.loop_observer import RngState, batch_of
from advisor.tuners.act.pilot.protocol import CompareRequest
from advisor.tuners.act.pilot.switch import ConfigSwitch, ModelCall
from advisor.tuners.act.pilot.wrappers import local
from advisor.tuners.act.ranks import Group
from advisor.tuners.act.trees import is_cache, map_tensors, mutable_class, tensors
from advisor.tuners.decisions import POINTS
from advisor.tuners.environment import allocated, synchronize, unused_bytes
from advisor.tuners.faults import failure
from advisor.tuners.knobs import AUTOCAST, FORMATS, OFFLOAD, compiles
from advisor.tuners.measure.compare import References
from advisor.tuners.measure.run.recorded_state import (
    RecordedUpdates,
    detect_changes,
    has_hooks,
    save_attributes,
)
from advisor.tuners.measure.run.script_checks import ScriptChecks
from advisor.tuners.measure.runner import UNVERIFIED, Compared
from advisor.tuners.measure.samples import (
    NamedTensors,
    Sample,
    Unsuited,
    is_perturbed,
    perturb,
    sampled,
)
from advisor.tuners.offloading import copy_to, host_buffer

_Place = tuple[dict[str, Any], str]  # where a module holds a parameter or buffer, by its name
_Pairs = list[tuple[Tensor, Tensor]]  # outputs, and their gradients
_Autocast = tuple[str, torch.dtype, bool, bool]  # the arguments of torch.autocast
_MOST_CALLS = 8  # recorded in one step, to save memory
_MOST_STEPS = 8 * POINTS  # observed until a gradient reaches a model's outputs
_MOST_RECORDED = 2 * POINTS  # steps of which POINTS must call the models alike
_SMALL = 2**16  # elements of an output that is cloned
_MOST_NODES = 1000  # of a loss's graph that are looked at
# Logarithms of 1 - p, and what is then between them and p. Autocast itself forbids the first.
_LOGS = {"BinaryCrossEntropyBackward0": "", "LogBackward0": "Rsub", "Log1PBackward0": "Neg"}
_CURVED = ("SigmoidBackward0", "SoftmaxBackward0", "ExpBackward0")
_COPIES = 3  # of the weights in memory: the recorded ones, the script's own, and gradients


@dataclass(slots=True, eq=False)
class _RecordedCall:
    """A call that the script made."""

    call: ModelCall
    given: tuple[tuple[Any, ...], dict[str, Any]]  # its arguments, cloned
    autocast: _Autocast
    needs: list[bool]  # whether each of the models' parameters required a gradient
    lost: Callable[[Exception], None]  # called if a gradient could not be recorded
    device: torch.device  # where gradients are kept
    back: list[Tensor | None] = field(default_factory=list)  # gradients of its outputs
    slope: Tensor | None = None  # the sum of these gradients times the outputs
    nodes: dict[Any, int] = field(default_factory=dict)  # outputs, by their graph's node
    scalars: set[int] = field(default_factory=set)
    probabilities: set[int] = field(default_factory=set)  # p, if the loss takes log(1 - p)
    alone: int | None = None  # the output that is the script's loss, if one is
    loss_bytes: int = 0  # that the script's loss keeps for backward, outside of the model
    twice: bool = False  # whether backward made a graph, for gradients of gradients

    def watch(self, result: Any) -> None:
        """Record the gradients of the call's outputs during backward."""
        for number, output in enumerate(_floating(result)):
            self.back.append(None)
            # A leaf, such as a weight, would keep the hook for ever.
            if output.requires_grad and output.grad_fn is not None:
                value = output.detach()  # which the script may change in place, as a loss
                value = value.clone() if output.numel() <= _SMALL else value
                output.register_hook(functools.partial(self._came, number, value))
                self.nodes[output.grad_fn] = number
                self.scalars |= {number} if output.numel() == 1 else set()

    def begins(self, loss: Any) -> None:
        """Before backward: if the script's loss is a scalar output, at most scaled, gradients of
        other outputs, such as logits, are parts of that output's own."""
        node = getattr(loss, "grad_fn", None)
        found = self._before(node)
        self.alone = found if found in self.scalars else None
        logs = ((n, _LOGS[n.name()]) for n in self._after(node) if n.name() in _LOGS)
        taken = {self._before(*log) for log in logs}
        self.probabilities |= {number for number in taken if number is not None}

    def _before(self, node: Any, needs: str = "") -> int | None:
        """The output from which a node of the loss comes, at most scaled, shifted or reshaped;
        `needs`: what a node between must be named like."""
        met = not needs
        while node is not None and node not in self.nodes and node.name() not in _CURVED:
            met = met or node.name().startswith(needs)
            before = [one for one, _ in node.next_functions if one is not None]
            node = before[0] if len(before) == 1 else None
        return self.nodes.get(node) if met else None

    def _after(self, node: Any) -> set[Any]:
        """The nodes between the outputs and a loss."""
        found, ahead = set[Any](), [node]
        while ahead and len(found) < _MOST_NODES:
            node = ahead.pop()
            if node is not None and node not in found and node not in self.nodes:
                found.add(node)
                ahead += [one for one, _ in node.next_functions]
        return found

    def _came(self, number: int, value: Tensor, gradient: Tensor | None) -> None:
        self.twice |= torch.is_grad_enabled()  # as create_graph=True sets it
        # None: of an output beside one that has a gradient.
        if gradient is None or self.alone not in (None, number):
            return
        try:
            held, came = self.back[number], gradient.detach().to(self.device, copy=True)
            self.back[number] = came if held is None else held + came
            slope = (value.float() * gradient.float()).sum()
            self.slope = slope if self.slope is None else self.slope + slope
        except Exception as exc:  # out of memory, a batched gradient: the script goes on
            self.lost(exc)


class RecordedSteps:
    """Compares configs with strict fp32 on recorded steps: a RepeatableStep and a StepComparer.
    `careful`, for a real run: only if all changes by a model's call can be restored."""

    def __init__(self, *, careful: bool = False) -> None:
        self._careful = careful
        self._unhook: Callable[[], None] = lambda: None
        self._checks: ScriptChecks | None = None
        self.close()

    # Methods of a StepComparer.

    def close(self) -> None:
        self._unhook()
        self._unhook = lambda: None
        if self._checks is not None:
            self._checks.close()
        self._switch: ConfigSwitch | None = None
        self._refused = ""
        # The calls of each step, and the sum of its losses; None if the script has no loss.
        self._steps: list[tuple[list[_RecordedCall], float | None]] = []
        self._calls: list[_RecordedCall] = []
        self._losses: list[Tensor] = []
        self._chosen = False  # `_steps` are the steps to repeat
        self._several = Group.current() is not None
        self._agreed = False  # all processes have chosen steps, or none compares
        self._looked = self._allocated = 0  # steps observed; bytes of the device after a call
        self._raised = self._nested = self.draws = False
        self.measured: dict[str, Any] = {}
        self._named: NamedTensors = {}
        self._modules: list[nn.Module] = []
        self._places: list[_Place] = []
        self._parameters = 0  # the number of parameters, which come first in `_places`
        self._values: list[Tensor] = []
        self._updates: RecordedUpdates | None = None
        self._references: References | None = None
        self._checks = None

    def faults(self) -> tuple[tuple[str, ...], bool]:
        checks = self._checks
        return ((), False) if checks is None else ((*checks.faults(),), checks.watches)

    @property
    def _ready(self) -> bool:
        return self._agreed if self._several else bool(self._refused) or self._chosen

    def begin(self, switch: ConfigSwitch, asked: CompareRequest) -> tuple[str, str, str] | None:
        self._asked, self._began, trained = asked, time.monotonic(), switch.trained
        if self._switch is not switch:
            self.close()
            self._switch, self._device = switch, switch.device
            switch.wrappers.shards.reshard()
            self._named = {
                (f"{number}.{name}" if len(trained) > 1 else name): parameter
                for number, one in enumerate(trained)
                for name, parameter in one.model.named_parameters()
            }
            self._modules = list({m: None for one in trained for m in one.model.modules()})
            if self._careful:
                self._refused = _why_not_repeatable(self._modules)
        if asked.checks and self._checks is None:
            names = {id(one): name for name, one in self._named.items()}
            self._checks = ScriptChecks(switch, names, self._spare())
        if not self._ready:
            switch.set(switch.own)
            self._look()
        return self._verdict() if self._ready else None

    def stepped(self) -> tuple[str, str, str] | None:
        self._unhook()
        for one in self._calls:
            one.nodes.clear()  # they hold the step's graph
        calls = [one for one in self._calls if any(g is not None for g in one.back)]
        if calls and not self._raised and not self._refused:
            loss = float(torch.stack(self._losses).sum()) if self._losses else None
            self._steps.append((calls, loss))
            if self._updates is None:
                self._updates = RecordedUpdates(self._of_switch.optimizers, self._spare())
            self._choose_steps()
        self._looked += 1
        if not self._ready and self._looked >= _MOST_STEPS:
            self._refuse("no gradient came back to what the model returned")
        self._agree()
        if not self._ready:
            self._look()
            return None
        for call in self._of_switch.calls:
            call.act = call.plain
        return self._verdict()

    def _verdict(self) -> tuple[str, str, str]:
        asked, ends, self.measured = self._asked, self._began + self._asked.left_s, {}
        if asked.passes:
            return self._replay(asked)
        if self._references is None:
            self._references = References(
                self,
                asked.fp32,
                tolerance=asked.tolerance,
                summed=self._summed if self._several else None,
            )
        found = Compared(UNVERIFIED, self._refused or self._why_not_compiled(asked.candidate))
        if not found.reason:
            with self._aside():
                found = self._references.compare(
                    asked.candidate, left_s=lambda: ends - time.monotonic()
                )
                if self._checks is not None and self._checks.unscaled:
                    self._checks.flushed = self._flushed(asked)
        if self._careful:
            torch.cuda.empty_cache()
        return found.outcome, found.reason, found.blames

    def _why_not_compiled(self, config: Config) -> str:
        """Why compiled code would fail in the script's backward; '' if it would not."""
        new = compiles(config) and not compiles(self._of_switch.own)
        twice = any(one.twice for calls, _ in self._steps for one in calls)
        return "compiled code has no gradients of gradients (create_graph)" * (new and twice)

    def _agree(self) -> None:
        """Have all processes begin to compare after the same step, or none compare."""
        if not self._several:
            return
        refused, misses, draws = self._most([bool(self._refused), not self._chosen, self.draws])
        if refused and not self._refused:
            self._refuse("another process has no steps to compare")
        self._chosen &= not misses
        self._agreed, self.draws = bool(refused) or self._chosen, bool(draws)

    def _most(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over all processes."""
        found = torch.tensor(values, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return [float(one) for one in found]

    def _summed(self, tensor: Tensor) -> Tensor:
        there = tensor.to(self._device, copy=True)
        torch.distributed.all_reduce(there)
        return there.cpu()

    # Methods of a RepeatableStep.

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        if self._of_switch.config != config:
            self._of_switch.set(config)
        self._place(point)
        if self.draws:
            torch.manual_seed(seed)
            random.seed(seed)
        self._of_switch.begin_step()
        strict = self._asked.checks and config == self._asked.fp32
        with torch.enable_grad(), _uncompiled(self._device) if strict else nullcontext():
            found = self._pass(point)
        self._put_attributes()
        return found

    def _flushed(self, asked: CompareRequest) -> tuple[float, str]:
        """The largest share of a gradient that is zero, and is not in strict fp32; its name."""
        fp32, own = (self.sample(one, 0, 0).gradients for one in (asked.fp32, asked.candidate))
        return max(
            (float(((own[name] == 0) & (one != 0)).sum() / one.count_nonzero().clamp(min=1)), name)
            for name, one in fp32.items()
        )

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        own = AppliedConfig(config, self._of_switch.own, self._device).optimizer()
        if not own or self._updates is None:
            return 0.0, ""
        names = {id(tensor): name for name, tensor in self._named.items()}
        part, name = self._updates.error(own, names)
        return (self._most([part])[0], name) if self._several else (part, name)

    def _pass(self, point: int) -> Sample:
        """Make the calls of a step, each with its backward pass before the next one."""
        calls, loss = self._steps[point % POINTS]
        outputs: NamedTensors = {}
        gradients: NamedTensors = {}
        slope = torch.zeros((), device=self._device)
        for number, kept in enumerate(calls):
            of = f" of call {number}" if len(calls) > 1 else ""
            _require(self._tensors(self._parameters), kept.needs)
            found, given, pairs = self._called(kept)
            for n in kept.probabilities:
                self._require_exact(found[n], n)
            slope += torch.stack([(o.detach().float() * g.float()).sum() for o, g in pairs]).sum()
            for n, output in enumerate(found):
                outputs[f"output {n}{of}"] = sampled(output)
            del found, output  # as the script, which keeps no logits during backward
            inputs = {f"input {n}{of}": one for n, one in enumerate(given)}
            wanted = {n: one for n, one in (self._named | inputs).items() if one.requires_grad}
            made = _backward if self._of_switch.wrappers.is_sharded else _gradients
            for name, taken in zip(wanted, made(pairs, [*wanted.values()]), strict=True):
                one = sampled(taken)
                gradients[name] = gradients[name].add_(one) if name in gradients else one
        if self._several:
            names = [name for name in gradients if name in self._named]
            reduced = self._of_switch.wrappers.reduced([gradients[name] for name in names])
            gradients |= zip(names, reduced, strict=True)
        if loss is not None:
            own = [kept.slope for kept in calls if kept.slope is not None]
            loss += float(slope - torch.stack(own).sum())
        known = None if is_perturbed(point) else loss
        return Sample(outputs=outputs, gradients=gradients, loss=known)

    def _require_exact(self, output: Tensor, number: int) -> None:
        """Raise Unsuited if a probability p, of which the loss takes log(1 - p), is in half
        precision."""
        name, own = self._of_switch.config.get(FORMATS[0]), self._of_switch.own.get(FORMATS[0])
        half = getattr(torch, AUTOCAST.get(name, ""), None)
        if half is None or (name == own and not self._asked.checks):
            return
        if bool(((output.to(half) == output) & (output >= 0) & (output <= 1)).all()):
            raise Unsuited(
                f"the loss takes log(1 - p) of output {number}, a probability p that {name} rounds "
                "to 1, where no gradient is left; have the model return logits, for "
                "BCEWithLogitsLoss"
            )

    def _called(self, kept: _RecordedCall) -> tuple[list[Tensor], list[Tensor], _Pairs]:
        """Make a call. Returns its outputs, its inputs, and pairs of an output and its gradient."""
        args, kwargs = map_tensors(_fresh, kept.given)
        # No autocast context if it changes nothing: compiled code depends on its state.
        same = kept.autocast == _autocast(self._device.type)
        with nullcontext() if same else torch.autocast(*kept.autocast):
            found = _floating(kept.call.act(*args, **kwargs))
        pairs = zip(found, kept.back, strict=True)
        back = [(o, g.to(o.device, o.dtype)) for o, g in pairs if g is not None]
        return found, _floating((args, kwargs)), back

    def _replay(self, asked: CompareRequest) -> tuple[str, str, str]:
        """Time a recorded call and its backward with another batch: see `measured`."""
        if why := self._refused or _why_not_repeatable(self._modules) or self._why_one_size():
            return "failed", why, ""
        self._values = [one.cpu() for one in self._values]  # large batches need the room
        with self._aside(on_host=True), torch.enable_grad():
            try:
                self._of_switch.set(asked.candidate)
                self._time(self._steps[0][0][0], asked.batch, asked.passes)
                return "ok", "", ""
            except Exception as exc:  # whatever the model raises at another batch
                return *failure(exc), ""

    def _time(self, kept: _RecordedCall, batch: int, passes: int) -> None:
        device, own, began = self._device, batch_of(*kept.given), 0.0
        cuda = torch.cuda if device.type == "cuda" else None

        def resized(tensor: Tensor) -> Tensor:
            if not tensor.dim() or tensor.shape[0] != own:
                return tensor
            found = torch.cat([tensor.detach()] * -(-batch // own))[:batch]
            return found.requires_grad_(tensor.requires_grad)

        given, back = map_tensors(resized, (kept.given, kept.back))
        _require(self._tensors(self._parameters), kept.needs)
        # In place of what the script's loss keeps.
        _held = torch.empty(kept.loss_bytes * batch // own, dtype=torch.uint8, device=device)
        for number in range(passes + 1):  # the first one is a warm-up
            if cuda and number == 1:
                synchronize(device)
                cuda.reset_peak_memory_stats(device)
            began = began if number > 1 else time.perf_counter()
            inputs, pairs = self._called(replace(kept, given=given, back=back))[1:]
            wanted = [x for x in (*self._tensors(self._parameters), *inputs) if x.requires_grad]
            _gradients(pairs, wanted)
        synchronize(device)
        self.measured = {"steps": passes, "seconds": time.perf_counter() - began}
        self.measured |= {"peak_bytes": cuda.max_memory_allocated(device)} if cuda else {}

    def _why_one_size(self) -> str:
        """Why the recorded call cannot have another batch; '' if it may."""
        calls = [one for step, _ in self._steps for one in step]
        inputs = (one for one in tensors(calls[0].given) if one.dim() and not one.is_nested)
        own, first = batch_of(*calls[0].given), {one.shape[0] for one in inputs}
        found = {
            "several models train together": len(self._of_switch.calls) > 1,
            "a step calls the model several times before backward": self._nested,
            "its inputs vary in size": len({signature(*one.given) for one in calls}) > 1,
            "its weights are sharded": self._of_switch.wrappers.is_sharded,
            # Such an input may hold indices into others, as the edges of a graph.
            "the first dimension of an input is not the batch": not {own} <= first <= {1, own},
        }
        return next((why for why, holds in found.items() if holds), "")

    # Recording and restoring.

    @property
    def _of_switch(self) -> ConfigSwitch:
        assert self._switch is not None, "it has begun"
        return self._switch

    def _look(self) -> None:
        """Record the calls of the step that begins; before the first step, also the weights."""
        self._calls, self._losses, self._raised = [], [], False
        try:
            if not self._values:
                parameters = _places([one._parameters for one in self._modules])
                self._parameters = len(parameters)
                self._places = parameters + _places([one._buffers for one in self._modules])
                self._values = self._copies()
        except RuntimeError as exc:  # out of memory
            self._refuse(exc)
            return
        self._unhook = hooks.on_backward(self._saw_loss)
        for call in self._of_switch.calls:
            call.act = functools.partial(self._keep, call)

    def _tensors(self, count: int | None = None) -> list[Tensor]:
        return [table[name] for table, name in self._places[:count]]

    def _spare(self) -> int | None:
        """Bytes of the GPU that may be used; None on a CPU. Configs of a script that saves memory
        need nearly all of it."""
        if self._device.type != "cuda":
            return None
        return unused_bytes(self._device) // (64 if OFFLOAD in self._of_switch.own else 1)

    def _copies(self, *, on_host: bool = False) -> list[Tensor]:
        """Copies of all weights and buffers; on the host also if the device has little memory."""
        parts, spare = [local(one) for one in self._tensors()], self._spare()
        needs = _COPIES * sum(one.nbytes for one in parts)
        on_host |= spare is not None and spare <= needs
        return [_on_host(one) if on_host else one.detach().clone() for one in parts]

    def _keep(self, call: ModelCall, *args: Any, **kwargs: Any) -> Any:
        if self._refused or len(self._calls) >= _MOST_CALLS:
            self._unhook()  # losses of calls that are not repeated do not count
            return call.plain(*args, **kwargs)
        try:
            given = map_tensors(_fresh, (args, kwargs))
        except RuntimeError as exc:  # out of memory, in the script's own call
            self._refuse(exc)
            return call.plain(*args, **kwargs)
        needs = [tensor.requires_grad for tensor in self._tensors(self._parameters)]
        kept = _RecordedCall(
            call,
            given,
            _autocast(self._device.type),
            needs,
            self._refuse,
            torch.device("cpu") if OFFLOAD in self._of_switch.own else self._device,
        )
        rng = RngState()
        changed = detect_changes(self._modules) if self._careful else None
        try:
            result = call.plain(*args, **kwargs)
        except BaseException:
            self._raised = True
            raise
        self.draws |= rng.has_advanced()
        self._nested |= bool(self._calls) and all(g is None for g in self._calls[-1].back)
        self._allocated = allocated(self._device)
        kept.watch(result)
        self._calls.append(kept)
        if changed is not None:
            if what := mutable_class((args, kwargs)):
                self._refuse(f"the model is called with a {what}, which another call might change")
            elif what := changed():
                self._refuse(f"a call of the model changes {what}, which could not be restored")
        return result

    def _choose_steps(self) -> None:
        """Choose steps of one signature: compiled code runs only inputs of frequent ones, not an
        epoch's short last batch. If every batch has another length, sizes may differ."""
        kinds: list[Signature] = [
            tuple((id(one.call), *signature(*one.given)) for one in calls)
            for calls, _ in self._steps
        ]
        if len(kinds) >= _MOST_RECORDED and Counter(kinds).most_common(1)[0][1] < POINTS:
            kinds = [tuple(map(of_any_size, one)) for one in kinds]
        kind, count = Counter(kinds).most_common(1)[0]
        if count >= POINTS:
            found = [step for step, own in zip(self._steps, kinds, strict=True) if own == kind]
            self._steps, self._chosen = found[:POINTS], True
        elif len(kinds) >= _MOST_RECORDED:
            self._refuse("its steps call the model in different ways")

    def _refuse(self, why: str | Exception) -> None:
        self._refused = why if isinstance(why, str) else failure(why)[1]
        self._calls.clear()
        self._steps.clear()

    def _saw_loss(self, loss: Any) -> None:
        if self._checks is not None:
            self._checks.saw_loss(loss)
        for call in self._calls:
            call.begins(loss)
        if self._calls:
            self._calls[-1].loss_bytes = max(0, allocated(self._device) - self._allocated)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().float())

    @contextlib.contextmanager
    def _aside(self, *, on_host: bool = False) -> Iterator[None]:
        """Context manager: restores what a call may change, `on_host` from copies on the host."""
        switch = self._of_switch
        switch.wrappers.shards.reshard()
        switch.set(switch.own)
        rng, self._put_attributes = RngState(), save_attributes(self._modules)
        tensors, values = self._tensors(), self._copies(on_host=on_host)
        needs = [tensor.requires_grad for tensor in tensors]
        aside = on_host or OFFLOAD in switch.own
        put_gradients = self._gradients_aside() if aside else lambda: None
        self._placed = -1
        try:
            yield
        finally:
            switch.set(switch.own)
            self._put_attributes()
            _copy(tensors, values)
            _require(tensors, needs)
            put_gradients()
            rng.restore()

    def _gradients_aside(self) -> Callable[[], None]:
        """Move the script's gradients to the host, because a pass makes others; not those in a
        buffer of the script's. Returns a function that moves them back."""
        own = [(one, one.grad) for one in self._tensors() if one.grad is not None]
        dense = ((one, grad) for one, grad in own if grad.layout is torch.strided)
        alone = (pair for pair in dense if pair[1].untyped_storage().nbytes() == pair[1].nbytes)
        held = [(one, _on_host(grad)) for one, grad in alone]
        for tensor, _gradient in held:
            tensor.grad = None

        def put() -> None:
            for tensor, gradient in held:
                tensor.grad = gradient.to(tensor.device)

        return put

    def _place(self, point: int) -> None:
        """Copy the recorded buffers, and the weights of a point, into the models."""
        weights = point // POINTS * 2 + is_perturbed(point)
        tensors, count = self._tensors(), self._parameters
        _copy(tensors[count:], self._values[count:])
        if weights != self._placed:
            _copy(tensors[:count], self._values[:count])
            perturb([local(one) for one in tensors[:count]], point)
            self._placed = weights


def _gradients(pairs: _Pairs, wanted: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of these tensors, from pairs of an output and its gradient."""
    outputs, back = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, wanted, back, materialize_grads=True)


def _backward(pairs: _Pairs, wanted: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """As `_gradients`, of weights that FSDP2 shards: it makes gradients in backward only. Of each
    weight, this process's part. The script's own gradients stay."""
    own = [one.grad for one in wanted]
    for one in wanted:
        one.grad = None
    outputs, back = zip(*pairs, strict=True)
    torch.autograd.backward(outputs, back)
    made = [one.grad for one in wanted]
    for one, grad in zip(wanted, own, strict=True):
        one.grad = grad
    return tuple(
        torch.zeros_like(local(one)) if grad is None else local(grad)
        for one, grad in zip(wanted, made, strict=True)
    )


@contextlib.contextmanager
def _uncompiled(device: torch.device) -> Iterator[None]:
    """Context manager: no autocast and no compiled function, wherever the script has them."""
    # Importing the compiler would take seconds.
    eager = torch.compiler.set_stance("force_eager") if graphs_compiled() else nullcontext()
    with hooks.no_autocast(device.type), eager:
        yield


def _autocast(kind: str) -> _Autocast:
    enabled, caches = torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
    return kind, torch.get_autocast_dtype(kind), enabled, caches


def _places(tables: Sequence[dict[str, Any]]) -> list[_Place]:
    found = {id(one): (table, name) for table in tables for name, one in table.items()}
    return [(table, name) for table, name in found.values() if table[name] is not None]


def _on_host(tensor: Tensor) -> Tensor:
    """A copy on the host, page-locked: passes copy it back many times."""
    with contextlib.suppress(RuntimeError):  # sparse, or too little memory can be locked
        if tensor.nbytes:
            return copy_to(host_buffer(tensor.nbytes, tensor.device), tensor.detach())
    return tensor.detach().to("cpu", copy=True)


@torch.no_grad()
def _copy(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values in place: compiled code and CUDA graphs use fixed addresses."""
    for tensor, value in zip(tensors, values, strict=True):
        local(tensor).copy_(value)


def _require(tensors: Sequence[Tensor], needs: Sequence[bool]) -> None:
    for tensor, one in zip(tensors, needs, strict=True):
        if tensor.requires_grad != one:
            tensor.requires_grad_(one)


def _why_not_repeatable(modules: Sequence[nn.Module]) -> str:
    """Why the models of a real run cannot be called again; '' if they may be."""
    if Group.current() is not None:
        return "in a job of several processes a repeated call might wait for another process"
    return "the script has hooks in its model, which would run again" if has_hooks(modules) else ""


def _floating(value: Any) -> list[Tensor]:
    """The tensors in a value, without those in a cache, which not all configs fill."""
    leaves = [leaf for leaf in tree_leaves(value, is_cache) if not is_cache(leaf)]
    return [tensor for tensor in tensors(leaves) if tensor.is_floating_point()]


def _fresh(tensor: Tensor) -> Tensor:
    """A clone with the same strides, on which compiled code depends."""
    own = tensor.detach()
    if tensor.layout == torch.strided and not tensor.is_nested and tensor.numel():
        shape, strides = tensor.shape, tensor.stride()
        extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        clone = own.as_strided((extent,), (1,)).clone().as_strided(shape, strides)
    else:
        clone = own.clone()
    return clone.requires_grad_(tensor.requires_grad)
