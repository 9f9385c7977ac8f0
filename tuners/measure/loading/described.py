"""What of a dataset decides how it may be loaded, by what its first batches show."""

from __future__ import annotations

import itertools
from typing import Any

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
"""Batches whose shapes are held against the task's, and against one another."""


def described(task: Task, *, made_batches: bool) -> tuple[Data, DataFacts, list[Any]]:
    """The data, what is known of it, and its first batches.

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
        _check(data, task, batch, made_batches=made_batches)
    tensors = [one for one in tree_leaves(batches[0]) if isinstance(one, Tensor)]
    by_name = torch.multiprocessing.get_sharing_strategy() == "file_system"
    facts = DataFacts(
        name=data.spec.name,
        samples=data.samples,
        batch_bytes=sum(one.nbytes for one in tensors),
        tensors=0 if by_name else len(tensors),
        shared_out=not data.iterable or _asks_its_worker(data),
        held_open=tuple(held),
        batches=data.batches(task.batch),
    )
    return data, facts, batches


def _first(data: Data, batch: int) -> list[Any]:
    name = data.spec.name
    try:
        found = list(itertools.islice(data.loader(batch_size=batch), LOOKED_AT))
    except Exception as exc:  # the user's code may raise anything; it is reported whole
        if _is_empty(data):
            raise TargetError(_too_few(name, "it holds 0 samples", batch)) from exc
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
        raise TargetError(_too_few(name, there, batch))
    return found


def _is_empty(data: Data) -> bool:
    """Whether a map-style dataset, which a sampler may refuse then, says that it has none."""
    try:
        return not data.iterable and len(data.dataset) == 0
    except (TypeError, NotImplementedError):
        return False


def _too_few(name: str, there: str, batch: int) -> str:
    return f"data {name!r}: {there}, and a batch of --shape has {batch:,}"


def _check(data: Data, task: Task, batch: Any, *, made_batches: bool) -> None:
    name = data.spec.name
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TargetError(
            f"data {name!r}: a batch must be (inputs, target), and it gives "
            f"{type(batch).__name__}{_length(batch)}; define {COLLATE}(dataset) in its file"
        )
    inputs = batch[0]
    if made_batches:
        return
    if not isinstance(inputs, Tensor):
        raise TargetError(
            f"data {name!r}: inputs of a batch are a {type(inputs).__name__}, and without a "
            "make_batch in the target's file the model is called with one tensor"
        )
    found = "x".join(map(str, inputs.shape)), str(inputs.dtype).removeprefix("torch.")
    wanted = "x".join(map(str, task.shapes[0])), task.dtype
    if found != wanted:
        raise TargetError(
            f"data {name!r}: gives batches of {' '.join(found)}, and --shape says "
            f"{' '.join(wanted)}; {_remedy(task, inputs)}"
        )


def _remedy(task: Task, inputs: Tensor) -> str:
    """Of inputs that are not as --shape and --dtype say."""
    shape, dtype = tuple(inputs.shape), str(inputs.dtype).removeprefix("torch.")
    told = []
    if shape != task.shapes[0]:
        told.append(f"--shape {'x'.join(map(str, shape))}")
    if dtype != task.dtype:
        told.append(f"--dtype {dtype}" if dtype in DTYPES else "")
    varies = "; where lengths vary tune your run: advisor tune -- COMMAND"
    # One length for each sample, as of text; an image's channels do not vary.
    ends = varies if inputs.dim() == 2 and dtype == task.dtype else ""
    if not all(told):
        return f"have the data give {task.dtype}"
    return f"give {' '.join(told)}, or have the data give what --shape says{ends}"


def _length(batch: Any) -> str:
    return f" of {len(batch)}" if isinstance(batch, tuple | list) else ""


class _Asked:
    """A worker's own information, as `get_worker_info` gives it, that notes who reads it."""

    def __init__(self, dataset: Any) -> None:
        self._known = {"id": 0, "num_workers": 1, "seed": 0, "dataset": dataset}
        self.read = False

    def __getattr__(self, name: str) -> Any:
        self.read = True
        return self._known[name]


def _asks_its_worker(data: Data) -> bool:
    """Whether an IterableDataset looks which worker it is in: else each would read all of it."""
    worker: Any = _utils.worker
    asked = _Asked(data.dataset)
    worker._worker_info = asked
    try:
        next(iter(data.dataset), None)
    except Exception:  # of the user's own code, which may want more of it: it has asked
        return True
    finally:
        worker._worker_info = None
    return asked.read
