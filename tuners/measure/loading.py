"""Loads, checks and profiles the user's data for a workload, in the worker process."""

from __future__ import annotations

import cProfile
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, _utils, default_collate

from advisor.cache.task import DTYPES, Task
from advisor.errors import TargetError, TargetFailed
from advisor.tuners import host, worker_limits
from advisor.tuners.measure.worker.wire import DataFacts, SampleCost, SampleCosts
from advisor.tuners.target import Spec, failed, imported, parse

_LOOKED_AT = 2  # batches whose shapes must be the task's
DATASET, COLLATE, SAMPLER = "make_dataset", "make_collate", "make_sampler"
"""Functions of a data file: the first returns the dataset, the others get it as argument."""
_COLLATE = "collate"  # the collate function's name in output
_FETCH = "torch/utils/data/_utils/fetch.py"
_WRAPPERS = (  # files whose functions only pass a call on
    *("torch/utils/data/", "torch/nn/modules/module.py", "torch/utils/_contextlib.py"),
    *("torch/_compile.py", "torch/_dynamo/", "torchvision/transforms/v2/_transform.py"),
)
_SEQUENCES = ("Compose", "Sequential", "StandardTransform")  # whose members count separately
_CALLS = ("forward", "__call__", "transform", "_transform")  # shown by the name of their class
_Part = tuple[str, str]  # its name and the name of its file


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A dataset, its collate function and its sampler; None: the DataLoader's default."""

    spec: Spec
    dataset: Any
    collate: Callable[[list[Any]], Any] | None = None
    sampler: Iterable[Any] | None = None

    @property
    def iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    def loader(self, **given: Any) -> DataLoader[Any]:
        """Make the loader as a script would; `given`: DataLoader arguments, with batch_size."""
        how: dict[str, Any] = {"collate_fn": self.collate, "drop_last": True, **given}
        if isinstance(self.sampler, BatchSampler):
            del how["batch_size"], how["drop_last"]
            how["batch_sampler"] = self.sampler
        elif self.sampler is not None:
            how["sampler"] = self.sampler
        elif not self.iterable:
            how["shuffle"] = True
        return DataLoader(self.dataset, **how)


class Described(NamedTuple):
    """Data, facts about it, and its first batches, on the host."""

    data: Data
    facts: DataFacts
    batches: list[Any]


def described(task: Task, *, made_batches: bool) -> Described:
    """Load the task's data and check its batches; with `made_batches` inputs may have any form.
    Raises TargetError or TargetFailed if it gives no batches, or batches unlike the task's."""
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
        batches=_length(data.loader(batch_size=task.batch)),
    )
    return Described(data, facts, batches)


def load(task: Task) -> Data:
    """Import the data and make its dataset; raises TargetError, TargetFailed."""
    spec = parse(task.data, role="data")
    module: ModuleType | None = None
    factory: Any
    if spec.kind == "torchvision":
        factory = _torchvision(spec, task.sample)
    else:
        # If the data is in the target's own file, its module is imported already.
        there = sys.modules.get(Path(spec.place).stem)
        module = there if getattr(there, "__file__", None) == spec.place else imported(spec)
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
    makers = (getattr(module, name, None) for name in (COLLATE, SAMPLER))
    collate, sampler = (make and _called(spec, make, dataset) for make in makers)
    return Data(spec=spec, dataset=dataset, collate=collate, sampler=sampler)


def _called(spec: Spec, hook: Callable[..., Any], *given: Any, **named: Any) -> Any:
    try:
        return hook(*given, **named)
    except Exception as exc:  # the user's code may raise anything; it is reported whole
        raise failed(spec, f"{getattr(hook, '__name__', 'it')}() raised", exc) from exc


def _torchvision(spec: Spec, sample: tuple[int, ...]) -> Callable[..., Any]:
    """One of torchvision's datasets; images get a random crop to the sample's shape and a flip."""
    from torchvision import datasets
    from torchvision.transforms import v2

    kind = getattr(datasets, spec.attribute, None)
    if not isinstance(kind, type):
        raise TargetError(f"data {spec.name!r}: torchvision.datasets has no {spec.attribute!r}")
    usual: dict[str, Any] = {}
    if len(sample) == 3:
        steps = [
            v2.RandomResizedCrop(sample[1:], antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
        usual["transform"] = v2.Compose(steps)
    return lambda **arguments: kind(**{**usual, **arguments})


def _first(data: Data, batch: int) -> list[Any]:
    name, short = data.spec.name, f"and a batch of --shape has {batch:,}"
    try:
        found = list(itertools.islice(data.loader(batch_size=batch), _LOOKED_AT))
    except Exception as exc:  # the user's code may raise anything; it is reported whole
        # A sampler refuses an empty dataset.
        if hasattr(data.dataset, "__len__") and not (_length(data.dataset) or data.iterable):
            raise TargetError(f"data {name!r}: it holds 0 samples, {short}") from exc
        if "equal size" in str(exc) and data.collate is None:
            said = str(exc).splitlines()[0]
            raise TargetFailed(
                f"data {name!r}: its samples are not alike, so that they make no batch ({said}); "
                f"define {COLLATE}(dataset) in its file, which returns a collate function, or "
                "give all samples one size"
            ) from exc
        raise failed(data.spec, "loading a batch raised", exc) from exc
    if not found:
        samples = _length(data.dataset)
        there = f"it holds {samples:,} samples" if samples else "it gave no batch"
        raise TargetError(f"data {name!r}: {there}, {short}")
    return found


def _check(name: str, task: Task, batch: Any, *, made_batches: bool) -> None:
    several = isinstance(batch, tuple | list)
    if not several or len(batch) != 2:
        given = type(batch).__name__ + (f" of {len(batch)}" if several else "")
        raise TargetError(
            f"data {name!r}: a batch must be (inputs, target), and it is {given}; "
            f"define {COLLATE}(dataset) in its file"
        )
    if made_batches:
        return
    inputs = batch[0]
    if not isinstance(inputs, Tensor):
        raise TargetError(
            f"data {name!r}: inputs of a batch are a {type(inputs).__name__}, and without a "
            "make_batch in the target's file they must be one tensor; define make_batch there"
        )
    shape, wanted = ("x".join(map(str, one)) for one in (inputs.shape, task.shapes[0]))
    dtype = str(inputs.dtype).removeprefix("torch.")
    if (shape, dtype) == (wanted, task.dtype):
        return
    options = [f"--shape {shape}"] if shape != wanted else []
    options += [f"--dtype {dtype}"] if dtype != task.dtype else []
    remedy = f"give {' '.join(options)}, or change the data to match --shape"
    if dtype not in DTYPES:
        remedy = f"have the data give {task.dtype}"
    elif inputs.dim() == 2 and dtype == task.dtype:
        # One length for each sample, as of text; an image's channels do not vary.
        remedy += "; where lengths vary tune your run: advisor tune -- COMMAND"
    raise TargetError(
        f"data {name!r}: gives batches of {shape} {dtype}, and --shape says {wanted} {task.dtype}; "
        f"{remedy}"
    )


def _length(sized: Any) -> int:
    """The length of a dataset or loader; 0 if unknown."""
    with suppress(TypeError, NotImplementedError):
        return len(sized)
    return 0


class _WorkerInfo:
    """The result of `get_worker_info` for a dataset; records whether the dataset reads it."""

    def __init__(self, dataset: Any) -> None:
        self._known = {"id": 0, "num_workers": 1, "seed": 0, "dataset": dataset}
        self.read = False

    def __getattr__(self, name: str) -> Any:
        self.read = True
        return self._known[name]


def _asks_its_worker(data: Data) -> bool:
    """Whether an IterableDataset reads its worker's info. If not, each worker would read it all."""
    worker: Any = _utils.worker
    info = _WorkerInfo(data.dataset)
    worker._worker_info = info
    try:
        next(iter(data.dataset), None)
    except Exception:  # the user's code may need more of the info: it has read it
        return True
    finally:
        worker._worker_info = None
    return info.read


class LoaderFeed(Iterator[Any]):
    """Yields a loader's batches, epoch after epoch, until `close`. To time it, skip `settling`
    batches, after which the workers have filled their queue, and then take whole rounds of
    `together` batches, one from each worker."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.together = max(1, loader.num_workers)
        self.settling = self.together * (loader.prefetch_factor or worker_limits.PREFETCH_FACTOR)
        self.waited_s = 0.0  # seconds waited for batches
        self._epoch: Any = None

    def __next__(self) -> Any:
        """The next batch; raises RuntimeError if an epoch has none."""
        began = time.perf_counter()
        try:
            for fresh in (self._epoch is None, True):
                if fresh:
                    self._epoch = iter(self._loader)
                with suppress(StopIteration):
                    return next(self._epoch)
            raise RuntimeError("the loader gave no batch")
        finally:
            self.waited_s += time.perf_counter() - began

    def close(self) -> None:
        """End the loader's workers."""
        epoch, self._epoch = self._epoch, None
        if epoch is not None and self._loader.num_workers:
            epoch._shutdown_workers()


def costs(data: Data, batch: int, seconds: float) -> SampleCosts:
    """Profile a worker's time for a sample: of functions that `__getitem__` (or `__iter__`) calls,
    its own code, and the collate function. cProfile gives shares; a run without it the total."""
    inner, threads = data.collate or default_collate, torch.get_num_threads()

    def collate(samples: list[Any]) -> Any:
        return inner(samples)

    def loader(size: int) -> DataLoader[Any]:
        return data.loader(batch_size=size, collate_fn=collate, num_workers=0)

    profile = cProfile.Profile(builtins=False)
    torch.set_num_threads(1)  # as a loader's worker has
    try:
        sample_s = _batch_s(loader(batch), seconds / 2) / batch
        profile.runcall(_batch_s, loader(batch), seconds / 2)
        spent = _spent({one.code: one for one in profile.getstats()}, collate.__code__)
    finally:
        torch.set_num_threads(threads)
    whole_s = sum(spent.values())
    parts = (
        SampleCost(part=part, file=file, seconds=sample_s * took_s / whole_s)
        for (part, file), took_s in sorted(spent.items(), key=lambda one: -one[1])
    )
    return SampleCosts(parts=tuple(parts))


def _batch_s(loader: DataLoader[Any], seconds: float) -> float:
    began, batches = time.perf_counter(), 0
    for _ in loader:
        batches += 1
        if time.perf_counter() - began >= seconds:
            break
    return (time.perf_counter() - began) / max(1, batches)


def _spent(entries: Mapping[Any, Any], collate: CodeType) -> dict[_Part, float]:
    if collate not in entries:
        raise RuntimeError("its epoch is too short to tell what a sample costs")
    found: dict[_Part, float] = defaultdict(float, {(_COLLATE, ""): entries[collate].totaltime})
    fetches = (code for code in entries if code.co_filename.endswith(_FETCH))
    fetch = next(code for code in fetches if code.co_name == "fetch")
    for sample, _ in _calls(entries, fetch):
        if sample is not collate:
            name, file = _part(sample)
            found[f"{name} itself", file] += entries[sample].inlinetime
            for code, took_s in _calls(entries, sample):
                found[_part(code)] += took_s
    return found


def _calls(
    entries: Mapping[Any, Any], caller: CodeType, share: float = 1.0, seen: tuple[Any, ...] = ()
) -> Iterator[tuple[CodeType, float]]:
    """Yield the functions that a function calls, with their seconds; wrappers are skipped."""
    for call in entries[caller].calls or ():
        owner = call.code.co_qualname.rpartition(".")[0].rpartition(".")[2]
        wraps = any(part in call.code.co_filename for part in _WRAPPERS)
        if not wraps and owner not in _SEQUENCES:
            yield call.code, share * call.totaltime
        elif call.code not in seen:
            part = share * call.totaltime / (entries[call.code].totaltime or 1.0)
            yield from _calls(entries, call.code, part, (*seen, call.code))


def _part(code: CodeType) -> _Part:
    owner, _, name = code.co_qualname.rpartition("<locals>.")[2].rpartition(".")
    shown = owner if owner and name in _CALLS else f"{owner}.{name}".lstrip(".")
    return shown, Path(code.co_filename).name
