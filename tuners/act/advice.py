"""Advice: applies a config to a training loop, in a script or in the worker that measures it."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from advisor.cache.config import Config
from advisor.cache.record import Record
from advisor.errors import AdvisorWarning
from advisor.tuners import compiling, fingerprint
from advisor.tuners.act import gate, layouts, ranks
from advisor.tuners.act.advice_usage import PIECES, AdviceUsage, Served, log_at_exit
from advisor.tuners.act.applied import AppliedConfig, changed_knobs
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.act.replays import Replays
from advisor.tuners.act.scaling import MissingScaler, init_momentum
from advisor.tuners.act.trees import tensors
from advisor.tuners.decisions import LARGE_BYTES
from advisor.tuners.faults import failure
from advisor.tuners.knobs import Knob

if TYPE_CHECKING:
    from advisor.tuners.act.artifacts import Fetch


class Advice:
    """How to train. Each piece works without the others; an empty config changes nothing.

    Attributes:
        config: one value per knob; empty without advice.
        batch_size: samples per step; None if neither the script nor the record gives them.
        served: the config's origin, with `status`, `record`, `explanation`, `use` and `gains`.
        artifacts: fetches the code that is stored for the config; None if none is stored.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: str,
        batch_size: int | None = None,
        served: Served | None = None,
    ) -> None:
        self.config = config
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.served = served = served or Served()
        self.record, self.explanation = served.record, served.explanation
        self.use, self.gains = served.use, served.gains
        self.artifacts: Fetch | None = None
        self._applied = AppliedConfig(config, served.default, self.device)
        # Without values that are torch's default on every machine.
        advised = tuple((k, value) for k, value in self._applied.rows if value != k.default)
        self._usage = AdviceUsage(advised, served)
        self._used = self._usage.used
        self._compared = False
        self._uncaptured = self._applied.captured
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        has_scaler = partial(self._used.add, "step")
        self._unscaled = MissingScaler(self._models, has_scaler) if self._applied.scaled else None
        if self._applied.scaled and self._applied.optimizer():
            weakref.finalize(self, register_optimizer_step_pre_hook(init_momentum).remove)
        self._replays = Replays()
        if served.default:  # the worker that measures silences this log
            log_at_exit(self._usage)

    def __repr__(self) -> str:
        return f"Advice({self.status}, {self.config!r}, device={str(self.device)!r})"

    @property
    def status(self) -> str:
        return self._usage.served.status

    @property
    def reason(self) -> str:
        """One line: what advice was served, or why none. It claims only speed-ups in force."""
        return self._usage.reason()

    def report(self) -> str:
        """Text: which values took effect, which did not and why, and the gain of the next use."""
        self._usage.compiled = self.artifacts.said if self.artifacts is not None else ""
        return "\n".join(self._usage.lines())

    def set_flags(self) -> None:
        """Set the advised process flags, as `advisor.apply` does. Before `prepare`, set the flags
        that are best on their own. Flags that the user has set, such as OMP_NUM_THREADS, stay."""
        self._used.add("set_flags")
        if self.artifacts is not None:
            self.artifacts.begin()
        alone = self.served.flags if "prepare" not in self._used else None
        self._put(self.config if alone is None else alone)

    def _put(self, config: Config) -> None:
        """Set the flags of a config, and reset the others that this advice has set before."""
        usage, default = self._usage, self.served.default
        rows = [knob for knob in changed_knobs(config, default) if knob.flag is not None]
        own = {knob.name for knob in rows if _users(knob, default)}
        flags = Config({k.name: config[k.name] for k in rows if k.name not in own})
        PROCESS_FLAGS.release(usage.put.without(*flags))
        PROCESS_FLAGS.put(flags)
        usage.put, usage.kept = flags, own

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model on the device, in the advised memory format, compiled if advised. Warns
        if the model is not the one that was tuned; raises RanksDiffer if another rank of the
        process group has other advice."""
        if not self._compared:
            # Without the batch size, in which ranks may differ.
            self._compared = ranks.compare(self.config.knobs.digest)
        if self.record is not None and os.environ.get("RANK", "0") == "0":  # only rank 0 warns
            self._compare(model, self.record)
        self._used.add("prepare")
        if self.served.flags is not None and "set_flags" in self._used:
            self._put(self.config)
        return self.lay_out(model.to(self.device))

    def lay_out(self, model: nn.Module) -> nn.Module:
        """As `prepare`, for a model that is on its device; does not check that it was tuned."""
        applied = self._applied
        for knob, value in applied.rows:
            if value in knob.layers:
                model = knob.layers[value](model)
        for knob, value in applied.rows:
            if knob.model is None or (knob.layout is not None and not _can_lay_out(model)):
                continue
            knob.model(model, value)
            if knob.layout is not None:
                layouts.rebuild(model)
        if applied.graphs:
            self._replays.attach(model)
        if self.artifacts is not None:
            self.artifacts.begin()
        if applied.compiles:
            load = self.artifacts.load if self.artifacts is not None else lambda: None
            inference = self.record is None or self.record.key.task.mode != "train"
            gate.attach(model, sizes=not applied.any_size, inference=inference, before=load)
        self._models.add(model)
        return model

    def hand_over(self) -> None:
        """Set all flags of the config. All pieces count as used: a framework applies the rest."""
        self._used.update(PIECES)
        if self._applied.compiles:
            compiling.apply_workarounds()
        self._put(self.config)

    def _compare(self, model: nn.Module, record: Record) -> None:
        known, tuned = record.provenance, f"the one tuned as {record.target.name}"
        try:
            if fingerprint.of_model(model) == record.key.model:
                return
            modules, parameters = fingerprint.size(model)
            another = (
                f"this model is not {tuned}: {modules} modules and {parameters:,} parameters now, "
                f"{known.modules} and {known.parameters:,} then. If these are equal, its code "
                "or a hyperparameter differs. The advice may not fit; tune again"
            )
        except Exception as exc:  # lazy parameters, or the user's extra_repr() raised
            another = f"this model cannot be compared with {tuned} ({failure(exc)[1]})"
        self._usage.another = another
        warnings.warn(f"advisor: {another}", AdvisorWarning, stacklevel=3)

    @property
    def optimizer(self) -> dict[str, Any]:
        """Keyword arguments for torch.optim's SGD, Adam and AdamW."""
        self._used.add("optimizer")
        return self._applied.optimizer()

    @property
    def loader(self) -> dict[str, Any]:
        """Keyword arguments for torch.utils.data.DataLoader, batch_size among them."""
        self._used.add("loader")
        known = {} if self.batch_size is None else {"batch_size": self.batch_size}
        return self._applied.loader() | known

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager for forward pass and loss: torch.autocast, or one that does nothing."""
        if self._applied.autocast is None:
            return contextlib.nullcontext()
        self._used.add("autocast")
        if self._unscaled is not None:
            self._unscaled.watch()
        return torch.autocast(self.device.type, dtype=self._applied.autocast)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of `autocast`; None if `autocast` does nothing."""
        return self._applied.autocast

    @cached_property
    def scaler(self) -> torch.amp.GradScaler:
        """The GradScaler, enabled for fp16 only: for loops that clip or accumulate gradients."""
        return torch.amp.GradScaler(self.device.type, enabled=self._applied.scaled)

    def capture(self, train_step: Callable[[Any], Any], example_batch: Any) -> Callable[[Any], Any]:
        """Return the training step as one CUDA graph if that is advised, else `train_step` itself.

        Call the result in place of `train_step`. `StepGraph` in `tuners.act.capture.step_graph`
        documents its first calls, and when it warns once and calls `train_step` instead.

        Args:
            train_step: takes a batch; runs forward, loss and `advice.step` (or zero_grad, backward
                and optimizer step); returns tensors in any nesting, such as the loss.
            example_batch: one batch of the loader; batches of the same shapes are replayed.
        """
        self._uncaptured = False
        if not self._applied.captured:
            return train_step
        from advisor.tuners.act.capture.captured_graph import RECORDERS
        from advisor.tuners.act.capture.step_graph import StepGraph

        recorder = RECORDERS.get(self.device.type)
        if recorder is None:
            return train_step
        self._used.add("capture")
        graph = StepGraph(
            train_step,
            self.place(example_batch),
            self._models,
            recorder(),
            scaler=self.scaler if self._applied.scaled else None,
            failed=partial(setattr, self._usage, "failed"),
        )
        return train_step if graph.failure else graph

    def step(self, loss: Tensor, *optimizers: torch.optim.Optimizer) -> None:
        """Run zero_grad, backward and the optimizer step; with fp16 the loss is scaled.

        The same as `optimizer.zero_grad(); loss.backward(); optimizer.step()`: gradients from an
        earlier `backward` are dropped. Gradients of other weights accumulate, such as those of a
        discriminator when the generator trains. To accumulate over several batches, call
        `advice.scaler.scale(loss).backward()` for each, then `advice.scaler.step(optimizer)`,
        `advice.scaler.update()` and `zero_grad()`.

        Args:
            loss: a tensor with one element.
            optimizers: each makes one step on this loss.
        """
        if self._uncaptured:
            self._uncaptured = False
            warnings.warn(
                "advisor: this advice replays the whole step as one CUDA graph: put the step into "
                "a function and call step = advice.capture(function, example_batch) in its place, "
                "or training is slower than advised. To tune without step graphs: --no-step-graph",
                AdvisorWarning,
                stacklevel=2,
            )
        self._used.add("step")
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self._applied.scaled:
            self.scaler.scale(loss).backward()
            for optimizer in optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
        else:
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        if self._applied.graphs:
            self._replays.stepped(optimizers)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the loader's batches on the device, in the advised memory format. Large pinned
        batches are copied on a separate stream, during the step before."""
        self._used.add("batches")
        large: bool | None = None if self._applied.non_blocking else False
        for batch in loader:
            if large is None:
                large = sum(tensor.nbytes for tensor in tensors(batch)) >= LARGE_BYTES
            if self._applied.graphs:
                self._replays.begin()
            yield self._place_beside(batch) if large else self.place(batch)

    @cached_property
    def _copies(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def _place_beside(self, batch: Any) -> Any:
        with torch.cuda.stream(self._copies):
            placed = self.place(batch)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._copies)
        for tensor in tensors(placed):
            tensor.record_stream(current)
        return placed

    def place(self, batch: Any) -> Any:
        """Return a tensor, or a tuple, list or mapping of tensors, on the device in the advised
        memory format. Other objects are moved by their method `to` if they have one."""
        self._used.add("batches")
        # This runs at every step: tensors first, and no work for knobs that are off.
        applied = self._applied
        if isinstance(batch, Tensor):
            layout = torch.preserve_format
            for act, value in applied.layouts:
                layout = act(batch, value) or layout
            return batch.to(self.device, non_blocking=applied.non_blocking, memory_format=layout)
        kind = type(batch)
        if isinstance(batch, Mapping):
            placed = {name: self.place(part) for name, part in batch.items()}
            if not isinstance(batch, MutableMapping):
                return kind(placed)
            found = copy.copy(batch)  # its constructor may take other arguments
            found.update(placed)
            return found
        if hasattr(batch, "to"):
            return batch.to(self.device, non_blocking=applied.non_blocking)
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return kind(*map(self.place, batch))
        if isinstance(batch, list | tuple):
            return kind(self.place(part) for part in batch)
        return batch


def _can_lay_out(model: nn.Module) -> bool:
    can = layouts.can_rebuild(model)
    if not can:
        warnings.warn(
            "advisor: the weights keep their memory format: DistributedDataParallel exchanges "
            "their gradients with a hook or a static graph. Call prepare before you wrap the model",
            AdvisorWarning,
            stacklevel=4,
        )
    return can


def _users(knob: Knob, default: Config) -> bool:
    """Whether the user has set a flag, which then stays. Always False while advisor measures."""
    if knob.flag is None or knob.chosen is None or knob.name not in default:
        return False
    if knob.name in PROCESS_FLAGS.config:
        return False
    changed = knob.name in PROCESS_FLAGS.changed or knob.flag.now() != default[knob.name]
    return changed or knob.chosen()
