"""What would feed a step that waits for its loader, each with what it would give.

All of it changes the user's code, so it is said and not done. Computed from what a sample costs a
worker, by part: a part is told by its name, as libraries and most people call it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from advisor.cache.shown import size
from advisor.report.text import rate
from advisor.tuners import host

if TYPE_CHECKING:
    from advisor.tuners.measure.worker.wire import SampleCost, SampleCosts

DECODES = r"decode|loader$|imread|[Ii]mage\.?open|(read|load|open)_?([Ii]mage|img)"
READS = r"read_file|read_bytes|^open$|\.read$"
DRAWS = r"^Random|[Jj]itter|[Aa]ug"
"""What makes another each time, so that it cannot be kept."""
CONVERTS = r"^(ToDtype|ToTensor|ToImage|PILToTensor|ConvertImageDtype|Normalize)$"
RESIZES = r"Resize|[Cc]rop"
COLLATES = r"^collate$"
LEAST = 0.05
"""Of what a sample costs: what saves less is no help."""
FLOAT_BYTES = 4
"""Of a float32, for each that uint8 takes."""


@dataclass(frozen=True, slots=True)
class Saving:
    """What a change saves: a share of the parts that are called so.

    Attributes:
        how: the change.
        parts: pairs of a pattern of names and the share of their time that is saved; None: all.
        none: why there is nothing to gain where no part is called so.
        on_gpu: it needs one.
    """

    how: str
    parts: tuple[tuple[str, float], ...] | None
    none: str = ""
    on_gpu: bool = False


SAVINGS = (
    Saving(
        "uint8 to the device, normalised there (torchvision.transforms.v2 works on it)",
        ((CONVERTS, 1.0), (COLLATES, 1 - 1 / FLOAT_BYTES)),
        "no part of a sample is known to convert it",
        on_gpu=True,
    ),
    Saving(
        'decoding on the GPU (torchcodec, torchvision.io.decode_jpeg(device="cuda"))',
        ((DECODES, 1.0),),
        "no part of a sample is known to decode",
        on_gpu=True,
    ),
    Saving(
        "files of half the height and width",
        ((DECODES, 0.75), (RESIZES, 0.75)),
        "no part of a sample is known to decode",
    ),
    Saving(
        "FFCV, which keeps samples decoded and of one size, and batches without copies",
        ((DECODES, 1.0), (READS, 1.0), (COLLATES, 1.0)),
        "no part of a sample is known to read or decode",
    ),
    Saving("DALI, which does all of it on the GPU beside the step", None, on_gpu=True),
    Saving(
        "WebDataset, which reads samples in a row from few large files",
        ((READS, 1.0),),
        "no part of a sample is known to read files",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feeding:
    """How a step is fed now.

    Attributes:
        costs: of a sample, of a worker.
        takes: samples/s of the step alone.
        gives: of the loader.
        on_gpu: whether the step is.
    """

    costs: SampleCosts
    takes: float
    gives: float
    on_gpu: bool

    def without(self, saved_s: float) -> float:
        """Samples/s at most, were a sample to cost so much less: by what the loader gives now, as
        workers that share cores give less each than one alone."""
        left_s = self.costs.seconds - saved_s
        return min(self.takes, self.gives * self.costs.seconds / left_s) if left_s else self.takes


def narrower(costs: SampleCosts, numbers: int) -> Iterator[str]:
    """What a batch of so many float32 numbers takes to hand over and to copy, and what it would as
    uint8; nothing where no part of a sample is known to convert it."""
    if _called(costs.parts, CONVERTS):
        yield (
            f"each batch is {size(numbers * FLOAT_BYTES)} of float32 to hand over and copy; as "
            f"uint8, normalised on the device, it is {size(numbers)}"
        )


def lines(feeding: Feeding) -> Iterator[str]:
    """A line each: what to do, and what it would give or why nothing."""
    yield from (_line(feeding, one) for one in SAVINGS if feeding.on_gpu or not one.on_gpu)
    yield from _kept(feeding)


def _line(feeding: Feeding, saving: Saving) -> str:
    costs = feeding.costs
    if saving.parts is None:
        return f"{saving.how}: {rate(feeding.takes)} samples/s at most"
    found = [
        (one.part, share * one.seconds)
        for pattern, share in saving.parts
        for one in _called(costs.parts, pattern)
    ]
    named = [part for part, _ in found if not re.search(COLLATES, part)]
    saved_s = sum(spent_s for _, spent_s in found)
    if not named:
        return f"{saving.how}: nothing to gain, {saving.none}"
    if saved_s < LEAST * costs.seconds:
        return f"{saving.how}: nothing to gain, {saved_s / costs.seconds:.1%} of a sample's cost"
    return f"{saving.how}: {rate(feeding.without(saved_s))} samples/s at most"


def _called(parts: Sequence[SampleCost], pattern: str) -> list[SampleCost]:
    return [one for one in parts if re.search(pattern, one.part)]


def _kept(feeding: Feeding) -> Iterator[str]:
    """Of each dear part that makes the same each time: what it makes, kept in memory."""
    costs, free = feeding.costs, host.free_bytes()
    draws = _called(costs.parts, DRAWS)
    dear = [
        (one, saved_s)
        for one in costs.parts
        if not re.search(COLLATES, one.part)
        and one.seconds >= LEAST * costs.seconds
        and (saved_s := _saved_s(costs, one, draws))
    ]
    if draws and not dear:
        yield (
            f"samples kept in memory: nothing to gain, {draws[0].part} makes another each time, "
            "and nothing dear comes before it"
        )
    for one, saved_s in dear:
        what = f"what {one.part} makes, kept in memory"
        gives = f"{rate(feeding.without(saved_s))} samples/s at most"
        if not one.made_bytes or not costs.samples:
            yield f"{what}: {gives}; its size is not known"
            continue
        whole = one.made_bytes * costs.samples
        room = "" if whole <= free else f", of which {size(free)} is free here"
        yield f"{what}: {gives}, in {size(whole)} for {costs.samples:,} samples{room}"


def _saved_s(costs: SampleCosts, kept: SampleCost, draws: Sequence[SampleCost]) -> float:
    """Seconds of a sample that are saved where what a part makes is kept: its own, and those of the
    parts before it. 0 where it makes nothing, or another each time."""
    if not any(one.place for one in costs.parts):
        # Which part comes after one that draws is not known; decoding comes before.
        return kept.seconds if not draws or re.search(DECODES, kept.part) else 0.0
    first = min((one.place for one in draws if one.place), default=kept.place + 1)
    if not kept.place or kept.place >= first:
        return 0.0
    return sum(one.seconds for one in costs.parts if 0 < one.place <= kept.place)
