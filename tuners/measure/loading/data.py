"""What a workload trains on: the dataset, with the collate function and sampler of its file.

Imported and made in the worker process alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from advisor.cache.task import Task
from advisor.errors import TargetError
from advisor.tuners.target import Spec, failed, imported, parse

DATASET, COLLATE, SAMPLER = "make_dataset", "make_collate", "make_sampler"
"""What a data's file defines: the dataset and, called with it, a collate function and a sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A dataset, and how its samples come to a batch; None: as a DataLoader does by itself."""

    spec: Spec
    dataset: Any
    collate: Callable[[list[Any]], Any] | None = None
    sampler: Iterable[Any] | None = None

    @property
    def iterable(self) -> bool:
        """Whether it is read in its own order, as a stream."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def samples(self) -> int:
        """In an epoch; 0 where that is not known."""
        return _length(lambda: self.dataset)

    def batches(self, size: int) -> int:
        """In an epoch; 0 where that is not known."""
        return _length(lambda: self.loader(batch_size=size))

    def loader(self, **given: Any) -> DataLoader[Any]:
        """As a script makes it; `given`: a DataLoader's keyword arguments, with batch_size."""
        how: dict[str, Any] = {"collate_fn": self.collate, "drop_last": True, **given}
        if isinstance(self.sampler, BatchSampler):
            del how["batch_size"], how["drop_last"]
            how["batch_sampler"] = self.sampler
        elif self.sampler is not None:
            how["sampler"] = self.sampler
        elif not self.iterable:
            how["shuffle"] = True
        return DataLoader(self.dataset, **how)


def load(task: Task) -> Data:
    """Import the data and make its dataset.

    Raises:
        TargetError: there is no such function or class, or it makes no dataset.
        TargetFailed: the user's code raised.
    """
    spec, module = parse(task.data, role="data"), None
    if spec.kind == "torchvision":
        factory = _torchvision(spec, task.sample)
    else:
        module = _module(spec)
        name = spec.attribute or DATASET
        factory = getattr(module, name, None)
        if not callable(factory):
            raise TargetError(
                f"data {spec.name!r}: {Path(spec.place).name} has no function or class {name!r}; "
                f"define {DATASET}(), which returns the dataset, or name another"
            )
    dataset = _called(spec, factory, **task.data_args)
    if not hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        raise TargetError(
            f"data {spec.name!r}: it made {type(dataset).__name__}, which is no dataset: it has no "
            "__getitem__, and is no torch.utils.data.IterableDataset"
        )
    hooks = (getattr(module, name, None) for name in (COLLATE, SAMPLER))
    collate, sampler = (hook and _called(spec, hook, dataset) for hook in hooks)
    return Data(spec=spec, dataset=dataset, collate=collate, sampler=sampler)


def _module(spec: Spec) -> ModuleType:
    """The module; of data in the target's own file the one that is already imported."""
    there = sys.modules.get(Path(spec.place).stem)
    if there is not None and getattr(there, "__file__", None) == spec.place:
        return there
    return imported(spec)


def _called(spec: Spec, hook: Callable[..., Any], *given: Any, **named: Any) -> Any:
    try:
        return hook(*given, **named)
    except Exception as exc:  # the user's code may raise anything; it is reported whole
        raise failed(spec, f"{getattr(hook, '__name__', 'it')}() raised", exc) from exc


def _length(sized: Callable[[], Any]) -> int:
    try:
        return len(sized())
    except (TypeError, NotImplementedError):
        return 0


def _torchvision(spec: Spec, sample: tuple[int, ...]) -> Callable[..., Any]:
    """One of torchvision's datasets; images get a random crop and flip to the sample's shape, and
    become normalised float32."""
    import torch
    from torchvision import datasets
    from torchvision.transforms import v2

    kind = getattr(datasets, spec.attribute, None)
    if not isinstance(kind, type):
        raise TargetError(f"data {spec.name!r}: torchvision.datasets has no {spec.attribute!r}")
    usual: dict[str, Any] = {}
    if len(sample) == 3:
        usual["transform"] = v2.Compose(
            [
                v2.RandomResizedCrop(sample[1:], antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )
    if "image_size" in inspect.signature(kind).parameters:
        usual["image_size"] = sample
    return lambda **arguments: kind(**{**usual, **arguments})
