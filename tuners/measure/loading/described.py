"""Loads the first batches of a dataset: whether it can be tuned, and how it may be loaded."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import _utils

from advisor.cache.task import DTYPES, Task
from advisor.errors import TargetError, TargetFailed
from advisor.tuners import host
from advisor.tuners.measure.loading.data import COLLATE, Data, load
from advisor.tuners.measure.worker.wire import DataFacts
from advisor.tuners.target import failed

LOOKED_AT = 2
"""Batches whose shapes must be the task's."""


class Described(NamedTuple):
    """The data, what is known of it, and its first batches, on the host."""

    data: Data
    facts: DataFacts
    batches: list[Any]


def described(task: Task, *, made_batches: bool) -> Described:
    """Load the task's data.

    Args:
        made_batches: whether the target's file makes batches itself, of whatever form.

    Raises:
        TargetError, TargetFailed: it gives no batches, or others than are tuned.
    """
    before = set(host.held_open())
    data = load(task)
    held = sorted(set(host.held_open()) - before)
    batches = _first(data, task.batch)
    for batch in batches:
        _check(data.spec.name, task, batch, made_batches=made_batches)
    tensors = [one for one in tree_leaves(batches[0]) if isinstance(one, Tensor)]
    by_name = torch.multiprocessing.get_sharing_strategy() == "file_system"
    facts = DataFacts(
        name=data.spec.name,
        batch_bytes=sum(one.nbytes for one in tensors),
        tensors=0 if by_name else len(tensors),
        shared_out=not data.iterable or _asks_its_worker(data),
        held_open=tuple(held),
        batches=data.batches(task.batch),
    )
    return Described(data, facts, batches)


def _first(data: Data, batch: int) -> list[Any]:
    name, short = data.spec.name, f"and a batch of --shape has {batch:,}"
    try:
        found = list(itertools.islice(data.loader(batch_size=batch), LOOKED_AT))
    except Exception as exc:  # the user's code may raise anything; it is reported whole
        # A sampler refuses an empty dataset.
        if hasattr(data.dataset, "__len__") and not (data.samples or data.iterable):
            raise TargetError(f"data {name!r}: it holds 0 samples, {short}") from exc
        if "equal size" in str(exc) and data.collate is None:
            said = str(exc).splitlines()[0]
            raise TargetFailed(
                f"data {name!r}: its samples are not alike, so that they make no batch ({said}); "
                f"define {COLLATE}(dataset) in its file, which returns a collate function, or "
                "bring them to one size"
            ) from exc
        raise failed(data.spec, "loading a batch raised", exc) from exc
    if not found:
        there = f"it holds {data.samples:,} samples" if data.samples else "it ends before"
        raise TargetError(f"data {name!r}: {there}, {short}")
    return found


def _check(name: str, task: Task, batch: Any, *, made_batches: bool) -> None:
    several = isinstance(batch, tuple | list)
    if not several or len(batch) != 2:
        given = type(batch).__name__ + (f" of {len(batch)}" if several else "")
        raise TargetError(
            f"data {name!r}: a batch must be (inputs, target), and it gives {given}; "
            f"define {COLLATE}(dataset) in its file"
        )
    if made_batches:
        return
    inputs = batch[0]
    if not isinstance(inputs, Tensor):
        raise TargetError(
            f"data {name!r}: inputs of a batch are a {type(inputs).__name__}, and without a "
            "make_batch in the target's file the model is called with one tensor"
        )
    shape, wanted = ("x".join(map(str, one)) for one in (inputs.shape, task.shapes[0]))
    dtype = str(inputs.dtype).removeprefix("torch.")
    if (shape, dtype) == (wanted, task.dtype):
        return
    options = [f"--shape {shape}"] if shape != wanted else []
    options += [f"--dtype {dtype}"] if dtype != task.dtype else []
    remedy = f"give {' '.join(options)}, or have the data give what --shape says"
    if dtype not in DTYPES:
        remedy = f"have the data give {task.dtype}"
    elif inputs.dim() == 2 and dtype == task.dtype:
        # One length for each sample, as of text; an image's channels do not vary.
        remedy += "; where lengths vary tune your run: advisor tune -- COMMAND"
    raise TargetError(
        f"data {name!r}: gives batches of {shape} {dtype}, and --shape says {wanted} {task.dtype}; "
        f"{remedy}"
    )


class _WorkerInfo:
    """What `get_worker_info` returns to a dataset; notes whether anything of it is read."""

    def __init__(self, dataset: Any) -> None:
        self._known = {"id": 0, "num_workers": 1, "seed": 0, "dataset": dataset}
        self.read = False

    def __getattr__(self, name: str) -> Any:
        self.read = True
        return self._known[name]


def _asks_its_worker(data: Data) -> bool:
    """Whether an IterableDataset looks which worker it is in: else each would read all of it."""
    worker: Any = _utils.worker
    info = _WorkerInfo(data.dataset)
    worker._worker_info = info
    try:
        next(iter(data.dataset), None)
    except Exception:  # of the user's own code, which may want more of it: it has asked
        return True
    finally:
        worker._worker_info = None
    return info.read
