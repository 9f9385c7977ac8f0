"""What a sample costs a loader's worker, by part: cProfile of the dataset and the collate function.

cProfile makes many small functions look slow: it gives shares, and a run without it the time.
"""

from __future__ import annotations

import cProfile
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, default_collate

from advisor.tuners.measure.loading.data import Data
from advisor.tuners.measure.worker.wire import Cost, Costs

COLLATE = "collate"
_FETCH = "torch/utils/data/_utils/fetch.py"
_WRAPPERS = (
    *("torch/utils/data/", "torch/nn/modules/module.py", "torch/utils/_contextlib.py"),
    *("torch/_compile.py", "torch/_dynamo/", "torchvision/transforms/v2/_transform.py"),
)
"""Files whose functions only pass a call on."""
_SEQUENCES = ("Compose", "Sequential", "StandardTransform")
"""Classes whose members are parts of their own."""
_CALLS = ("forward", "__call__", "transform", "_transform")
"""Methods that are shown by the name of their class."""
Part = tuple[str, str]
"""Its name and the name of its file."""


def costs(data: Data, batch: int, seconds: float) -> Costs:
    """What a sample costs a worker, by what `__getitem__` (or `__iter__`) calls, each transform by
    itself, its own code, and the collate function."""
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
        made = _made(loader(1), {part for part, _ in spent})
    finally:
        torch.set_num_threads(threads)
    whole_s, order = sum(spent.values()), [*made]
    parts = (
        Cost(
            part=part,
            file=file,
            seconds=sample_s * took_s / whole_s,
            made_bytes=made.get(part, 0),
            place=order.index(part) + 1 if file and part in made else 0,
        )
        for (part, file), took_s in sorted(spent.items(), key=lambda one: -one[1])
    )
    return Costs(parts=tuple(parts), samples=data.samples)


def _batch_s(loader: DataLoader[Any], seconds: float) -> float:
    began, batches = time.perf_counter(), 0
    for _ in loader:
        batches += 1
        if time.perf_counter() - began >= seconds:
            break
    return (time.perf_counter() - began) / max(1, batches)


def _spent(entries: Mapping[Any, Any], collate: CodeType) -> dict[Part, float]:
    if collate not in entries:
        raise RuntimeError("its epoch is too short to tell what a sample costs")
    found: dict[Part, float] = defaultdict(float, {(COLLATE, ""): entries[collate].totaltime})
    fetch = next(
        code for code in entries if code.co_filename.endswith(_FETCH) and code.co_name == "fetch"
    )
    for sample, _ in _called(entries, fetch):
        if sample is not collate:
            name, file = _part(sample)
            found[f"{name} itself", file] += entries[sample].inlinetime
            for code, took_s in _called(entries, sample):
                found[_part(code)] += took_s
    return found


def _called(
    entries: Mapping[Any, Any], caller: CodeType, share: float = 1.0, seen: tuple[Any, ...] = ()
) -> Iterator[tuple[CodeType, float]]:
    """What a function calls, and for how long; looks through what only passes a call on."""
    for call in entries[caller].calls or ():
        if not _passes_on(call.code):
            yield call.code, share * call.totaltime
        elif call.code not in seen:
            part = share * call.totaltime / (entries[call.code].totaltime or 1.0)
            yield from _called(entries, call.code, part, (*seen, call.code))


def _passes_on(code: CodeType) -> bool:
    owner = code.co_qualname.rpartition(".")[0].rpartition(".")[2]
    return owner in _SEQUENCES or any(part in code.co_filename for part in _WRAPPERS)


def _part(code: CodeType) -> Part:
    owner, _, name = code.co_qualname.rpartition("<locals>.")[2].rpartition(".")
    shown = owner if owner and name in _CALLS else f"{owner}.{name}".lstrip(".")
    return shown, Path(code.co_filename).name


def _made(loader: DataLoader[Any], parts: set[str]) -> dict[str, int]:
    """Bytes that each part returns for a sample, in the order in which they first return."""
    found: dict[str, int] = {}

    def look(frame: FrameType, event: str, returned: Any) -> None:
        if event == "return" and (part := _part(frame.f_code)[0]) in parts:
            found[part] = max(found.get(part, 0), sum(map(_bytes, tree_leaves(returned))))

    outside = sys.getprofile()
    sys.setprofile(look)
    try:
        next(iter(loader))
    finally:
        sys.setprofile(outside)
    return found


def _bytes(value: Any) -> int:
    if isinstance(value, bytes | bytearray):
        return len(value)
    if hasattr(value, "getbands"):  # an image of PIL
        return len(value.getbands()) * int(value.width) * int(value.height)
    found = getattr(value, "nbytes", 0)
    return found if isinstance(found, int) else 0
