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

from advisor.cache.config import Config
from advisor.cache.task import Task
from advisor.errors import TargetError
from advisor.tuners.target import Spec, failed, imported, parse

ROLE = "data"
DATASET, COLLATE, SAMPLER = "make_dataset", "make_collate", "make_sampler"
"""What a data's file defines: the dataset; of it, where wanted, what makes a batch of samples, and
the order in which they come."""


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
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError):
            return 0

    def batches(self, size: int) -> int:
        """In an epoch; 0 where that is not known."""
        try:
            return len(self.loader(batch_size=size))
        except (TypeError, NotImplementedError):
            return 0

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
    spec, arguments = parse(task.data, role=ROLE), task.data_args
    if spec.kind == "torchvision":
        return _made(spec, _torchvision(spec, task.sample), arguments, None)
    module = _module(spec)
    name = spec.attribute or DATASET
    factory = getattr(module, name, None)
    if not callable(factory):
        raise TargetError(
            f"data {spec.name!r}: {Path(spec.place).name} has no function or class {name!r}; "
            f"define {DATASET}(), which returns the dataset, or name another"
        )
    return _made(spec, factory, arguments, module)


def _module(spec: Spec) -> ModuleType:
    """Of data that lies in the target's own file the module that is there."""
    there = sys.modules.get(Path(spec.place).stem)
    if spec.kind == "file" and getattr(there, "__file__", None) == spec.place:
        assert there is not None
        return there
    return imported(spec)


def _made(
    spec: Spec, factory: Callable[..., Any], arguments: Config, module: ModuleType | None
) -> Data:
    dataset = _called(spec, factory, **arguments)
    if not hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        raise TargetError(
            f"data {spec.name!r}: it made {type(dataset).__name__}, which is no dataset: it has no "
            "__getitem__, and is no torch.utils.data.IterableDataset"
        )
    hooks = (getattr(module, name, None) for name in (COLLATE, SAMPLER))
    collate, sampler = (hook and _called(spec, hook, dataset) for hook in hooks)
    return Data(spec=spec, dataset=dataset, collate=collate, sampler=sampler)


def _called(spec: Spec, hook: Callable[..., Any], *given: Any, **named: Any) -> Any:
    try:
        return hook(*given, **named)
    except Exception as exc:  # the user's code may raise anything; it is reported whole
        raise failed(spec, f"{getattr(hook, '__name__', 'it')}() raised", exc) from exc


def _torchvision(spec: Spec, sample: tuple[int, ...]) -> Callable[..., Any]:
    """One of torchvision's datasets, with the usual transforms to the sample where it is an image:
    a random crop and flip, float32, normalised."""
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
