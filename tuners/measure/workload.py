"""The measured step, built as in a training script, and its repeats to compare with fp32."""

from __future__ import annotations

import copy
import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from advisor.cache.config import Config
from advisor.cache.task import Task
from advisor.errors import TargetError, TargetFailed
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.capture.step_graph import StepGraph
from advisor.tuners.decisions import MAX_OBSERVED_STEPS, POINTS
from advisor.tuners.measure.samples import (
    NamedTensors,
    Overflow,
    RepeatableStep,
    Sample,
    part_of,
    perturb,
    sampled,
    worst_update,
)
from advisor.tuners.target import Loaded, build, failed

OPTIMIZER_STEPS = 2  # compared ones: state kept from the first shows in the second
SCALE_STEPS = 20  # halvings of 65536, GradScaler's first scale, after which it is below 1
OPTIMIZER_FACTORIES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, **how: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **how),
    "adamw": lambda parameters, **how: torch.optim.AdamW(parameters, lr=1e-4, **how),
}


@dataclass(eq=False)
class _Step:
    """One step on a batch, as a script has it."""

    model: nn.Module
    loss: Callable[..., Tensor]
    advice: Advice
    optimizer: Any
    keeps: bool = False
    outputs: list[Tensor] = field(default_factory=list)  # the last step's, sampled, if `keeps`

    def train(self, batch: Any) -> Tensor:
        inputs, target = batch
        with self.advice.autocast():
            output = self.forward(inputs)
            loss = self.loss(output, target)
        self._keep(output)
        self.advice.step(loss, self.optimizer)
        return loss.detach()

    def infer(self, batch: Any) -> None:
        with torch.inference_mode(), self.advice.autocast():
            self._keep(self.forward(batch[0]))

    def forward(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        return self.model(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))

    def _keep(self, output: Any) -> None:
        if not self.keeps:
            return
        # In place, so that a replay updates the samples too.
        found = [sampled(one) for one in _outputs_of(output)]
        if [one.shape for one in found] == [one.shape for one in self.outputs]:
            for held, seen in zip(self.outputs, found, strict=True):
                held.copy_(seen)
        else:
            self.outputs = found


class Workload:
    """A training or inference step on one config, as a script would build it; for a mix of shapes,
    one pass through all. It cycles through `count` made-up batches of each, or those in `given`."""

    def __init__(
        self,
        loaded: Loaded,
        task: Task,
        advice: Advice,
        *,
        batch: int,
        seed: int,
        count: int = 1,
        given: Sequence[Any] = (),
    ) -> None:
        torch.manual_seed(seed)
        advice.set_flags()
        self.advice, self._loaded, self._task = advice, loaded, task
        training = task.mode == "train"
        self.model = advice.prepare(build(loaded))
        self.model.train(training)
        self.loss: Tensor | None = None
        self.plain_optimizer = OPTIMIZER_FACTORIES[task.optimizer]  # without advice
        self.optimizer = self._optimizer() if training else None
        self._own = _Step(self.model, loaded.loss or _loss, advice, self.optimizer)
        made = list(given) or self._made_batches(batch, seed + 1, count)
        self._passes = max(1, len(task.mix))
        plain = self._own.train if training else self._own.infer
        self._step = advice.capture(plain, made[0]) if training else plain
        # A replay runs no Python, so a captured step always keeps its outputs.
        self._own.keeps = isinstance(self._step, StepGraph)
        self._placed = [advice.place(one) for one in made]
        self.rewind()
        torch.manual_seed(seed + 1000)

    def _optimizer(self) -> torch.optim.Optimizer:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not parameters:
            name = self._loaded.spec.name
            raise TargetFailed(f"target {name!r}: it has no trainable parameter; use --mode infer")
        return self.plain_optimizer(parameters, **self.advice.optimizer)

    def _made_batches(self, batch: int, seed: int, count: int) -> list[tuple[Any, Any]]:
        made = []
        outputs: dict[tuple[int, ...], Any] = {}
        for number in range(count):
            # The same numbers for every config, whatever a model's dropout has drawn before.
            torch.manual_seed(seed + number)
            for shape in self._task.mix or ((batch, *self._task.sample),):
                inputs, target = _make_batch(self._loaded, self._task, shape)
                if target is None and self.optimizer is not None:
                    if shape not in outputs:
                        with torch.no_grad(), self.advice.autocast(), _plainly(self.model):
                            outputs[shape] = self._own.forward(self.advice.place(inputs))
                    torch.manual_seed(seed + number)
                    target = _random_targets(outputs[shape])
                made.append((inputs, target))
        return made

    def rewind(self, first: int = 0) -> None:
        """Go on with the batch of number `first`, and the batches after it."""
        at = first * self._passes % len(self._placed)
        self._source = self.advice.batches(cycle(self._placed[at:] + self._placed[:at]))

    def fed(self, advice: Advice, batches: Iterator[Any]) -> Workload:
        """A copy of this step with batches that another advice places; nothing is recompiled."""
        other = copy.copy(self)
        other.advice, other._source = advice, advice.batches(batches)
        return other

    def step(self) -> None:
        step: Callable[[Any], Any] = self._step
        losses: list[Tensor] = []
        for _ in range(self._passes):
            losses.append(step(next(self._source)))
            if isinstance(self._step, StepGraph) and self._step.failure:
                raise RuntimeError(f"no CUDA graph: {self._step.failure}")
        if self.optimizer is not None:
            self.loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def observed_step(self) -> list[Tensor]:
        before, self._own.keeps = self._own.keeps, True
        try:
            self.step()
        finally:
            self._own.keeps = before
        return self._own.outputs

    def start(self) -> None:
        for _ in range(MAX_OBSERVED_STEPS):
            self.step()
            if not isinstance(self._step, StepGraph) or self._step.ready:
                return
        raise RuntimeError("no CUDA graph: the batches are not alike")


@contextmanager
def _plainly(model: nn.Module) -> Iterator[None]:
    """Context manager: calls of the model use no compiled code, whose Gate would count them, and no
    cuDNN search: cuDNN caches its result, and the first step's time must include the search."""
    compiled = {one: one._compiled_call_impl for one in model.modules()}
    cudnn, enabled = torch.backends.cudnn, torch.backends.cudnn.enabled
    try:
        for one in compiled:
            one._compiled_call_impl = None
        cudnn.enabled = enabled and not cudnn.benchmark
        yield
    finally:
        cudnn.enabled = enabled
        for one, call in compiled.items():
            one._compiled_call_impl = call


def _make_batch(loaded: Loaded, task: Task, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Inputs and their target, on the CPU; without the user's make_batch the target is None. Raises
    TargetFailed if make_batch raises, or does not fit the task."""
    hook, batch = loaded.make_batch, shape[0]
    if hook is None:
        dtype = getattr(torch, task.dtype)
        if dtype.is_floating_point:
            return torch.randn(shape).to(dtype), None
        return torch.randint(0, task.vocab, shape).to(dtype), None
    more = (shape[1:],) if len(inspect.signature(hook).parameters) > 2 else ()
    if task.mix and not more:
        raise TargetFailed(
            f"target {loaded.spec.name!r}: for several shapes make_batch must take a "
            "third parameter, the shape of a sample: make_batch(batch_size, device, shape)"
        )
    try:
        made = hook(batch, torch.device("cpu"), *more)
    except Exception as exc:  # the user's code may raise anything; it is reported whole
        raise failed(loaded.spec, f"make_batch({batch}, 'cpu') raised", exc) from exc
    if not isinstance(made, tuple) or len(made) != 2:
        raise TargetFailed(f"target {loaded.spec.name!r}: make_batch must return (inputs, target)")
    return made


def _outputs_of(output: Any) -> list[Tensor]:
    """The output tensors for a loss: `.logits` if there is one, else all floating-point tensors."""
    mapping = isinstance(output, Mapping)
    logits = output.get("logits") if mapping else getattr(output, "logits", None)
    # Inception and GoogLeNet outputs are named tuples with auxiliary heads beside the logits.
    if isinstance(logits, Tensor) and not isinstance(output, tuple):
        return [logits]
    leaves = tree_leaves(list(output.values()) if mapping else output)
    return [one for one in leaves if isinstance(one, Tensor) and one.is_floating_point()]


def _random_targets(output: Any) -> Tensor | list[Tensor]:
    """Random labels for outputs with two dimensions, else values; a list for several outputs."""
    found = [
        torch.randint(one.shape[1], one.shape[:1]) if one.dim() == 2 else torch.randn(one.shape)
        for one in _outputs_of(output)
    ]
    if not found:
        raise TargetError(
            f"the model's output ({type(output).__name__}) holds no floating-point tensor; "
            "define loss(output, target) in the target's file"
        )
    return found[0] if len(found) == 1 else found


def _loss(output: Any, target: Any) -> Tensor:
    losses = []
    targets = [target] if isinstance(target, Tensor) else list(target)
    for one, wanted in zip(_outputs_of(output), targets, strict=False):
        if one.dim() == 2 and not wanted.is_floating_point():
            losses.append(functional.cross_entropy(one, wanted).float())
        else:
            losses.append(functional.mse_loss(one, wanted.to(one.dtype)).float())
    return torch.stack(losses).sum()


def layer_that_raised(model: nn.Module, exc: BaseException) -> str:
    """As "layer 'fc', Linear(in_features=3, ...), got 64x512 float32"; '' if no layer raised."""
    names = {module: name for name, module in model.named_modules()}
    for frame, _line in reversed(list(traceback.walk_tb(exc.__traceback__))):
        if frame.f_code.co_name != "_call_impl":  # how every module is called
            continue
        module = frame.f_locals["self"]
        name = names.get(module, "?")
        got = ", ".join(
            f"{'x'.join(map(str, part.shape))} {str(part.dtype).removeprefix('torch.')}"
            for part in frame.f_locals["args"]
            if isinstance(part, Tensor)
        )
        shown = f"{type(module).__name__}({module.extra_repr()})"
        return f"layer {name!r}, {shown}, got {got}" if name else f"the model itself, got {got}"
    return ""


class RepeatableWorkload:
    """A RepeatableStep of a timed workload; `build` makes its model with the first weights."""

    def __init__(
        self, build: Callable[[], nn.Module], workload: Callable[[Config], Workload]
    ) -> None:
        self._build, self._workload = build, workload
        self.draws = False
        self._values: NamedTensors = {}

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        workload = self._workload(config)
        outputs = self._pass(workload, point, seed, anew=True)
        loss = workload.loss
        return Sample(
            outputs={
                f"output {n}" if n else "output": one.clone() for n, one in enumerate(outputs)
            },
            gradients={
                name: sampled(torch.zeros_like(weight) if weight.grad is None else weight.grad)
                for name, weight in _trained(workload)
            },
            loss=None if loss is None else float(loss),
        )

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        workload = self._workload(config)
        if workload.optimizer is None:
            return 0.0, ""
        self._set(workload, 0)
        weights = dict(_trained(workload))
        starts = {name: part_of(weight).clone() for name, weight in weights.items()}
        shadows = {name: nn.Parameter(start.clone()) for name, start in starts.items()}
        optimizer = workload.plain_optimizer(list(shadows.values()))
        for step in range(OPTIMIZER_STEPS):
            self._pass(workload, step, step)
            for name, shadow in shadows.items():
                grad = weights[name].grad
                shadow.grad = None if grad is None else part_of(grad)
            optimizer.step()
        return worst_update(
            (name, starts[name], shadow, part_of(weights[name])) for name, shadow in shadows.items()
        )

    def restore(self, workloads: Iterable[Workload]) -> None:
        """Restore the workloads' first state, and free the device memory of the comparison."""
        for workload in workloads if self._values else ():
            self._set(workload, 0)
        self._values = {}

    def _pass(
        self, workload: Workload, point: int, seed: int, *, anew: bool = False
    ) -> list[Tensor]:
        """Make a step that no GradScaler skips. Returns samples of its outputs; gradients stay."""
        scaler = workload.advice.scaler
        for _ in range(SCALE_STEPS):
            if anew:
                self._set(workload, point)
            workload.rewind(point % POINTS)
            torch.manual_seed(seed)
            scale = scaler.get_scale()
            outputs = workload.observed_step()
            if scaler.get_scale() >= scale:
                return outputs
        raise Overflow(f"the GradScaler skipped {SCALE_STEPS} steps in a row: fp16 overflows")

    @torch.no_grad()
    def _set(self, workload: Workload, point: int) -> None:
        """Set weights, buffers and optimizer state, in place: CUDA graphs read fixed addresses."""
        if not self._values:
            device = workload.advice.device
            self._values = {name: one.to(device) for name, one in self._host.items()}
        for name, tensor in _state(workload.model):
            tensor.copy_(self._values[name])
        perturb([weight for _, weight in _trained(workload)], point)
        states = workload.optimizer.state.values() if workload.optimizer is not None else ()
        for state in states:
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    @functools.cached_property
    def _host(self) -> NamedTensors:
        return {name: tensor.detach() for name, tensor in _state(self._build())}


_: Callable[..., RepeatableStep] = RepeatableWorkload


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _trained(workload: Workload) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in workload.model.named_parameters() if p.requires_grad]
