"""The step that is measured: a target, a batch and an Advice, as a training script has them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from advisor.cache.task import Task
from advisor.errors import TargetFailed
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.capture.step_graph import StepGraph
from advisor.tuners.measure.made_up import Feed, make_batch, outputs_of, random_targets
from advisor.tuners.measure.samples import sampled
from advisor.tuners.target import Loaded, build

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, **how: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **how),
    "adamw": lambda parameters, **how: torch.optim.AdamW(parameters, lr=1e-4, **how),
}
_NO_LOSS = torch.zeros(())
PATIENCE = 100
"""Steps within which a captured step must come to its first replay."""


class _Step:
    """Forward, loss, backward and optimizer step of one batch, as a script has them.

    Attributes:
        outputs: samples of the model's, of the last step that kept them.
        keeps: whether steps keep their outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor] | None,
        advice: Advice,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._model, self._loss = model, loss or _loss
        self._advice, self._optimizer = advice, optimizer
        self.outputs: list[Tensor] = []
        self.keeps = False

    def train(self, batch: Any) -> Tensor:
        """Train on a batch; its loss."""
        assert self._optimizer is not None
        inputs, target = batch
        with self._advice.autocast():
            output = self.forward(inputs)
            loss = self._loss(output, target)
        if self.keeps:
            self._keep(output)
        self._advice.step(loss, self._optimizer)
        return loss.detach()

    def infer(self, batch: Any) -> Tensor:
        """A forward pass; there is no loss of it."""
        with torch.inference_mode(), self._advice.autocast():
            output = self.forward(batch[0])
        if self.keeps:
            self._keep(output)
        return _NO_LOSS

    def forward(self, inputs: Any) -> Any:
        """What the model makes of the inputs of a batch."""
        if isinstance(inputs, Mapping):
            return self._model(**inputs)
        if isinstance(inputs, tuple | list):
            return self._model(*inputs)
        return self._model(inputs)

    def _keep(self, output: Any) -> None:
        # In place, so that a captured step does it too.
        found = [sampled(one) for one in outputs_of(output)]
        if [one.shape for one in found] == [one.shape for one in self.outputs]:
            for held, seen in zip(self.outputs, found, strict=True):
                held.copy_(seen)
        else:
            self.outputs = found


class Workload:
    """One training or inference step on one config, built as a script would build it."""

    def __init__(self, loaded: Loaded, task: Task, advice: Advice, feed: Feed) -> None:
        """A step is a pass through the shapes of the task's mix, where there are any."""
        torch.manual_seed(feed.seed)
        advice.set_flags()
        self.advice = advice
        self._loaded, self._task = loaded, task
        training = task.mode == "train"
        self.model = advice.prepare(build(loaded))
        self.model.train(training)
        self.loss: Tensor | None = None
        self._plain_optimizer = OPTIMIZERS[task.optimizer]
        self.optimizer = self._optimizer() if training else None
        self._own = _Step(self.model, loaded.loss, advice, self.optimizer)
        made = self._made_batches(feed)
        self._passes = max(1, len(task.mix))
        plain = self._own.train if training else self._own.infer
        self._step = advice.capture(plain, made[0]) if training else plain
        # A replay runs no Python, so that a captured step keeps its outputs always.
        self._own.keeps = isinstance(self._step, StepGraph)
        self._placed = [advice.place(one) for one in made]
        self.rewind()
        torch.manual_seed(feed.seed + 1000)

    def _optimizer(self) -> torch.optim.Optimizer:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not parameters:
            name = self._loaded.spec.name
            raise TargetFailed(f"target {name!r}: it has no trainable parameter; use --mode infer")
        return self._plain_optimizer(parameters, **self.advice.optimizer)

    def _made_batches(self, feed: Feed) -> list[tuple[Any, Any]]:
        if feed.given:
            return list(feed.given)
        made = []
        outputs: dict[tuple[int, ...], Any] = {}
        for number in range(feed.count):
            # The same numbers for every config, whatever a model's dropout has drawn before.
            torch.manual_seed(feed.seed + 1 + number)
            for shape in self._task.mix or ((feed.batch, *self._task.sample),):
                inputs, target = make_batch(self._loaded, self._task, shape)
                if target is None and self.optimizer is not None:
                    if shape not in outputs:
                        outputs[shape] = self._output(inputs)
                    torch.manual_seed(feed.seed + 1 + number)
                    # A list where there are several outputs: a `loss` gets a tensor for a tensor.
                    target = random_targets(outputs[shape])
                made.append((inputs, target))
        return made

    def _output(self, inputs: Any) -> Any:
        """What the model makes of inputs, without compiling: it is no part of a step."""
        with torch.no_grad(), self.advice.autocast(), _uncompiled(self.model), _unchosen():
            return self._own.forward(self.advice.place(inputs))

    def rewind(self, first: int = 0) -> None:
        """Go on with the batch of this number, and from there in their order."""
        at = first * self._passes % len(self._placed)
        self._source = self.advice.batches(cycle(self._placed[at:] + self._placed[:at]))

    def plain_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer without advice, for other parameters."""
        return self._plain_optimizer(parameters)

    def feed(self, batches: Iterator[Any]) -> None:
        """Take the batches of the next steps from here, until `rewind`."""
        self._source = self.advice.batches(batches)

    def under(self, advice: Advice) -> Workload:
        """The same model and optimizer, whose batches another advice places: nothing is compiled
        again."""
        other = copy.copy(self)
        other.advice = advice
        return other

    def step(self) -> None:
        """One step, exactly as in a script: batch, autocast, forward, loss, advice.step.

        Raises:
            RuntimeError: it was to be captured as a CUDA graph and cannot be.
        """
        losses = [self._one_step(next(self._source)) for _ in range(self._passes)]
        if self.optimizer is not None:
            self.loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _one_step(self, batch: Any) -> Tensor:
        loss: Tensor = self._step(batch)
        if isinstance(self._step, StepGraph) and self._step.failure:
            raise RuntimeError(f"no CUDA graph: {self._step.failure}")
        return loss

    def observed_step(self) -> list[Tensor]:
        """Take a step; samples of the model's outputs in it, which the next one writes over."""
        before, self._own.keeps = self._own.keeps, True
        try:
            self.step()
        finally:
            self._own.keeps = before
        return self._own.outputs

    def start(self) -> None:
        """The first step, and those before the first that a captured step replays.

        Raises:
            RuntimeError: it is never replayed, or as `step`.
        """
        self.step()
        for _ in range(PATIENCE):
            if not isinstance(self._step, StepGraph) or self._step.ready:
                return
            self.step()
        raise RuntimeError("no CUDA graph: the batches are not alike")


@contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Without what was compiled in the place of a model, which counts what it is called with."""
    compiled = {one: one._compiled_call_impl for one in model.modules()}
    for one in compiled:
        one._compiled_call_impl = None
    try:
        yield
    finally:
        for one, call in compiled.items():
            one._compiled_call_impl = call


@contextmanager
def _unchosen() -> Iterator[None]:
    """Without cuDNN where it searches: a process keeps what it chose first, which is to be what the
    first step finds, in seconds of its own."""
    cudnn = torch.backends.cudnn
    enabled = cudnn.enabled
    cudnn.enabled = enabled and not cudnn.benchmark
    try:
        yield
    finally:
        cudnn.enabled = enabled


def _loss(output: Any, target: Any) -> Tensor:
    targets = [target] if isinstance(target, Tensor) else list(target)
    parts = [
        _one_loss(tensor, wanted)
        for tensor, wanted in zip(outputs_of(output), targets, strict=False)
    ]
    return torch.stack([part.float() for part in parts]).sum()


def _one_loss(output: Tensor, target: Tensor) -> Tensor:
    if output.dim() == 2 and not target.is_floating_point():
        return functional.cross_entropy(output, target)
    return functional.mse_loss(output, target.to(output.dtype))


class Layers:
    """While active, knows which layer of a model is running: for 'which layer rejected it'."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._stack: list[tuple[str, nn.Module, str]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Layers:
        before = nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = nn.modules.module.register_module_forward_hook(self._leave)
        self._handles = [before, after]
        return self

    def __exit__(self, *_exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        got = ", ".join(
            f"{'x'.join(map(str, part.shape))} {str(part.dtype).removeprefix('torch.')}"
            for part in inputs
            if isinstance(part, Tensor)
        )
        self._stack.append((self._names.get(module, "?"), module, got))

    def _leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._stack.pop()

    def innermost(self) -> str:
        """'layer fc, Linear(in_features=3, ...), got 64x512 float32', or '' outside any."""
        if not self._stack:
            return ""
        name, module, got = self._stack[-1]
        shown = f"{type(module).__name__}({module.extra_repr()})"
        return f"layer {name!r}, {shown}, got {got}" if name else f"the model itself, got {got}"
