"""What the public functions take: a model, what is permitted, how much is measured, and where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from advisor.cache.config import Value
from advisor.cache.settings import Cache
from advisor.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from advisor.store import Store

OnEvent = Callable[[Mapping[str, Any]], None]
"""Called with what a tuning reports, one dictionary an event; see `advisor.tune`."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model with all that says how it is trained; a lookup accepts any value of what is None.

    Attributes:
        target: model.py, model.py:Net, package.module:factory, torchvision:NAME, or, in a lookup,
            the model itself; None in a lookup for the running script's.
        dtype: of the input, default 'float32'. `vocab` bounds integer inputs.
        mode: 'train', the default, or 'infer'.
        device: 'cuda:0' or 'cpu'; default: this rank's CUDA device, else the CPU.
        optimizer: 'sgd' or 'adamw', for mode 'train'.
        args: keyword arguments of the model's class or function.
        data: what it trains on, as data.py:make_dataset, package.module:function or
            torchvision:FakeData: its loader is tuned too. `data_args`: its keyword arguments.
        any_order: whether batches of the data may come as their workers finish them.
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
        """The model that a public function was given."""
        return target if isinstance(target, Model) else cls(target)

    @property
    def given(self) -> dict[str, Any]:
        """What is not None, by the keyword of its field in a Task."""
        found = _given(self)
        found.pop("target", None)
        args = found.pop("args", None)
        return found if args is None else found | {"model_args": args}


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """What a tuning may change. A lookup takes only configs that keep to it.

    Attributes:
        precisions: default: 'default', 'tf32', 'bf16' and 'fp16'; also 'fp8' and 'fp32'.
        deterministic: only deterministic algorithms.
        max_memory: bytes, or '40GiB': peak memory of the device.
        batches: batch sizes to try beside yours, [] for none; default: its doublings.
        compile: whether torch.compile may be used, default True.
        step_graph: whether one CUDA graph over the whole step may be used, default True; only
            scripts that use `advice.capture` can.
        tolerance: distance from strict fp32's loss curve that is always allowed, as a fraction of
            the loss, default 0.02; 0 leaves the comparison out.
        map: of a command: its options that set the batch or the loader's workers, as
            {"batch": "--batch-size", "num_workers": "--workers"}.

    A command shows its batch sizes and its graphs itself: it takes neither `batches` nor
    `step_graph`.
    """

    precisions: Sequence[str] | str | None = None
    deterministic: bool | None = None
    max_memory: int | str | None = None
    batches: Sequence[int] | None = None
    compile: bool | None = None
    step_graph: bool | None = None
    tolerance: float | None = None
    map: Mapping[str, str] | None = None

    @property
    def given(self) -> dict[str, Any]:
        """What is not None, by the keyword of its field in a Task."""
        return _given(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much is measured, and for a job of which length.

    Attributes:
        effort: 'quick' (a minute; compiles only what takes seconds), 'normal' (five, the default)
            or 'exhaustive' (an hour; also what takes minutes, as max-autotune).
        time: wall seconds of all measuring, or '5m'; default: the effort's. It begins once the
            command, or the model in its worker, has made its first steps.
        trials: configs visited at most.
        length: of the job that the advice is for: its steps at your batch, as 500, or its time, as
            '2h'. What is paid before the first step is counted in. Default: the steady state.
        seed: of all randomness, default 0.
        force: measure again although it is tuned.
    """

    effort: str | None = None
    time: float | str | None = None
    trials: int | None = None
    length: int | str | None = None
    seed: int | None = None
    force: bool | None = None

    @property
    def given(self) -> dict[str, Any]:
        """What is not None, by the keyword of its field in a Plan."""
        found = _given(self)
        if "time" in found:
            found["budget"] = found.pop("time")
        return found | length_given(found.pop("length", None))


def length_given(length: int | str | None) -> dict[str, Any]:
    """The length of a job by the keyword of its field in a Plan: a text is a time."""
    if length is None:
        return {}
    return {"duration" if isinstance(length, str) else "steps": length}


def split(what: str | Model | Sequence[str] | None) -> tuple[Model, tuple[str, ...]]:
    """The model that is named, and (); or one that is not, and the words of the command.

    Raises:
        UsageError: it is neither a target's name nor a list of words.
    """
    if what is None or isinstance(what, str | Model):
        model = Model.of(what)
        if not isinstance(model.target, str | None):
            raise UsageError(f"target {model.target!r}: expected its name, as model.py:Net")
        return model, ()
    words = tuple(what) if isinstance(what, Sequence) else ()
    if not words or not all(isinstance(word, str) for word in words):
        raise UsageError(f"{what!r}: expected a target, or a command as ['python', 'train.py']")
    return Model(), words


def check_type(name: str, value: object, cls: type[Permit] | type[Budget]) -> None:
    """Raise UsageError if an argument is no object of its class."""
    if not isinstance(value, cls):
        raise UsageError(f"{name} {value!r}: expected advisor.{cls.__name__}(...)")


def urls_of(store: Store | Cache) -> Cache:
    """The URLs of the stores that a public function was given."""
    from advisor.store import Store

    return (store.urls or None) if isinstance(store, Store) else store


def _given(one: Any) -> dict[str, Any]:
    fields = (field.name for field in dataclasses.fields(one))
    return {name: value for name in fields if (value := getattr(one, name)) is not None}
