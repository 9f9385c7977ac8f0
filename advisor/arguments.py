"""Arguments of the public functions: Model, Permit, Budget, commands, stores and `on_event`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any

from advisor.cache.config import Config, Value
from advisor.cache.settings import Cache
from advisor.errors import UsageError, check_type
from advisor.store import Store
from advisor.tuners.search.plan import Progress

if TYPE_CHECKING:
    import torch
    from torch import nn

    from advisor.tuners.search.journal import JournaledTrial

OnEvent = Callable[[Mapping[str, Any]], None]
"""A function that is called with a dictionary for each event; see `advisor.tune`."""


@dataclass(frozen=True, slots=True)
class _Arguments:
    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not None, except the target, by their keyword in a Task or a Plan."""
        fields = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        length = "duration" if isinstance(fields.get("length"), str) else "steps"
        other_names = {"args": "model_args", "time": "budget", "length": length}
        return {
            other_names.get(name, name): value
            for name, value in fields.items()
            if value is not None and name != "target"
        }


@dataclass(frozen=True, slots=True)
class Model(_Arguments):
    """A model and how it is trained. A lookup accepts any value of a field that is None.

    Attributes:
        target: model.py, model.py:Net, package.module:factory or torchvision:NAME. A lookup also
            takes an nn.Module, or None for the model of the running script.
        dtype: of the input, default 'float32'. Integer inputs are below `vocab`.
        mode: 'train', the default, or 'infer'.
        device: 'cuda:0' or 'cpu'; default: this rank's CUDA device, else the CPU.
        optimizer: 'sgd' or 'adamw', for mode 'train'.
        args: keyword arguments of the model's class or function.
        data: the dataset, as data.py:make_dataset, package.module:function or
            torchvision:FakeData. Its loader is tuned too. `data_args`: its keyword arguments.
        any_order: whether batches may come in the order in which loader workers finish them.
    """

    target: str | nn.Module | None = None
    _: dataclasses.KW_ONLY
    dtype: str | torch.dtype | None = None
    vocab: int | None = None
    mode: str | None = None
    device: str | torch.device | None = None
    optimizer: str | None = None
    args: Mapping[str, Value] | None = None
    data: str | None = None
    data_args: Mapping[str, Value] | None = None
    any_order: bool | None = None

    @classmethod
    def of(cls, target: str | nn.Module | Model | None) -> Model:
        """Wrap a target in a Model, unless it is one."""
        return target if isinstance(target, Model) else cls(target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit(_Arguments):
    """What a tuning may change. A lookup serves only configs that this permits.

    Attributes:
        precisions: number formats to try, of 'default', 'tf32', 'bf16', 'fp16', 'fp8' and
            'fp32'; default: the first four.
        deterministic: only deterministic algorithms.
        max_memory: bytes, or '40GiB': peak memory of the device.
        batches: other batch sizes to try, [] for none; default: doublings of yours.
        compile: whether torch.compile may be used, default True.
        step_graph: whether one CUDA graph over the whole step may be used, default True; only
            scripts that use `advice.capture` can.
        tolerance: distance from strict fp32's loss curve that is always allowed, as a fraction of
            the loss, default 0.02; 0 skips the comparison.
        allow: what is tried only if allowed: 'bf16-reduce' sums FSDP2's gradients in bf16.
        map: for a command, its options that set the batch or the loader's workers, as
            {"batch": "--batch-size", "num_workers": "--workers"}.

    For a command, `batches` and `step_graph` are refused.
    """

    precisions: Sequence[str] | str | None = None
    deterministic: bool | None = None
    max_memory: int | str | None = None
    batches: Sequence[int] | None = None
    compile: bool | None = None
    step_graph: bool | None = None
    tolerance: float | None = None
    allow: Sequence[str] | str | None = None
    map: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(_Arguments):
    """How long a tuning measures, and the length of the job that it tunes for.

    Attributes:
        effort: 'quick' (a minute; fast compilations only), 'normal' (five minutes, the default)
            or 'exhaustive' (an hour; also slow compilations, such as max-autotune).
        time: wall seconds of all measuring, or '5m'; default: the effort's. The clock starts once
            the command, or the model in its worker, has made its first steps.
        trials: the most configs to try.
        length: length of the job that the advice is for: steps at your batch, as 500, or a time,
            as '2h', first step included. Default: the first step does not count.
        seed: seed of all randomness, default 0.
        force: measure even if a record exists.
        price: money that the command's machine costs, as '2.5/h'; shown with the result.
    """

    effort: str | None = None
    time: float | str | None = None
    trials: int | None = None
    length: int | str | None = None
    seed: int | None = None
    force: bool | None = None
    price: float | str | None = None


def split(what: str | Model | Sequence[str] | None) -> tuple[Model, tuple[str, ...]]:
    """(Model, words of the command) of the first argument of `tune`; one of them is empty. Raises
    UsageError if `what` is neither a target's name nor a list of words."""
    if what is None or isinstance(what, str | Model):
        model = Model.of(what)
        if not isinstance(model.target, str | None):
            raise UsageError(f"target {model.target!r}: expected a name, such as model.py:Net")
        return model, ()
    words = tuple(what) if isinstance(what, Sequence) else ()
    if not words or not all(isinstance(word, str) for word in words):
        raise UsageError(f"{what!r}: expected a target, or a command as ['python', 'train.py']")
    return Model(), words


def urls_of(store: Store | Cache) -> Cache:
    """The URLs of the `store` argument of a public function; None for the default stores."""
    return (store.urls or None) if isinstance(store, Store) else store


class Events(Progress):
    """Reports progress to `on_event`."""

    def __init__(self, on_event: OnEvent) -> None:
        self.events = on_event

    def visited(self, done: JournaledTrial, what: str, best: Config, left_s: float) -> None:
        self.events(trial_event(done, best, left_s))

    def phase(self, what: str) -> None:
        self.events({"event": "phase", "text": what})

    def notice(self, text: str) -> None:
        self.events({"event": "notice", "text": text})

    def warning(self, text: str) -> None:
        self.events({"event": "warning", "text": text})


def trial_event(done: JournaledTrial, best: Config, left_s: float) -> dict[str, Any]:
    """The event of a config that was measured, as `Progress.visited`."""
    trial, ratio, compared = done
    measured = trial.measurement
    return {
        "event": "trial",
        "number": trial.number,
        "config": dict(trial.config),
        "outcome": compared.outcome if compared else measured.outcome,
        "samples_per_s": measured.samples_per_s,
        "ratio": ratio.mean,
        "low": ratio.low,
        "high": ratio.high,
        "best": dict(best),
        "left_s": left_s,
    }


def progress_of(on_event: OnEvent | None) -> Progress:
    """The Progress that calls `on_event`, or a silent one for None. Raises UsageError if
    `on_event` is not callable."""
    check_type("on_event", on_event, (Callable, NoneType), "a function that takes a dictionary")
    return Events(on_event) if on_event is not None else Progress()
