"""What a pilot is told, and what it tells: plain data, over a local socket or within a process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from advisor.cache.config import Config
from advisor.cache.domain import Bytes, Count, Span

if TYPE_CHECKING:
    from advisor.tuners.act.pilot.seen import Seen

MOST_SAID = 300
"""Characters of what an exception says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is to be compared: a config with strict fp32.

    Attributes:
        plain: the candidate's number format, and nothing else of it.
        tolerance: fraction of fp32's loss that is always allowed.
        left_s: seconds that it may take.
    """

    fp32: Config
    plain: Config
    candidate: Config
    tolerance: Span
    left_s: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Train on with a config; after `steps` the pilot asks again, after 0 never.

    Attributes:
        warm: untimed steps before them.
        own: the config that the script itself has; empty: it is left alone.
        careful: the run must not end because of the config; see `Lap.outcome`.
        needs_room: the config is set only where memory is free for it: the run is a real one.
        compare: compare this, on steps that the script makes unmodified where any are needed.
        forget: a config whose compiled code is freed first.
        found: of the last order, what was measured of its config, for people.
        saves: a file for the artifacts of what is compiled; '' for none.
    """

    config: Config
    steps: Count = 0
    warm: Count = 0
    own: Config = Config()  # noqa: RUF009 # immutable
    careful: bool = False
    needs_room: bool = False
    compare: Comparison | None = None
    forget: Config | None = None
    found: str = ""
    saves: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a loader's workers have to do at a moment: `busy` ones have a batch in hand; as many as
    are `queued` were asked for, and wait until one of them is free."""

    busy: Count = 0
    queued: Count = 0

    def __add__(self, other: Load) -> Load:
        return Load(busy=self.busy + other.busy, queued=self.queued + other.queued)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What a loader's workers did for a lap: it has `taken` so many batches from them, who had
    `before` to do when it began and `after` when it ended."""

    taken: Count = 0
    before: Load = Load()
    after: Load = Load()

    @property
    def lent(self) -> int:
        """Batches that were taken and not made meanwhile, by workers who were all busy; below 0
        where some that were lent before were made."""
        return self.after.queued - self.before.queued


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """The timed steps of one order.

    Attributes:
        samples: of this process.
        seconds: by the wall clock, the device's work included; `waited_s` of them for data.
        first_s: of the untimed steps before them, where the order switched to another config.
        compiled: graphs that torch.compile made within the timed steps.
        outcome: of a careful order's config; where it is not 'ok' the script has gone on as it was,
            and `reason` says why. Of a comparison, how that ended; `blames` as in `Compared`.
        graphs: whether CUDA graphs were the reason.
    """

    steps: Count
    samples: Count
    seconds: Span
    first_s: Span
    waited_s: Span
    peak_bytes: Bytes
    compiled: Count = 0
    feed: Feed = Feed()
    outcome: str = "ok"
    reason: str = ""
    blames: str = ""
    graphs: bool = False


class Guide(Protocol):
    """Whoever knows which config is next; every process of a job asks, and hears the same."""

    def takes_over(self) -> bool:
        """Whether it is to act, once it is known what trains and before the script is looked at:
        not where the script follows an advice by itself. Flags that advice has set are taken
        back, so that the script is seen as it is."""

    def begin(self, seen: Seen) -> Order:
        """The first order, to a script of which this was seen."""

    def next(self, lap: Lap) -> Order:
        """The next one, once the steps of the last are over."""

    def failed(self, exc: BaseException) -> None:
        """The script, or the pilot, ends with this."""

    def ended(self, exc: BaseException, order: Order) -> None:
        """The script has ended of this, which was printed; an order's config was in force."""

    def gave_up(self, exc: BaseException) -> None:
        """The config that was to stay has raised this; the script goes on as it is."""

    def lost(self, exc: Exception, order: Order) -> None:
        """A careful order's config was in force when backward raised this. No step is made again:
        it is the script's now, which is as it was, and most likely ends of it."""


class Unfed(Exception):
    """A loader that feeds the steps is not given its workers, which says why."""


def of_config(exc: BaseException) -> bool:
    """Whether an exception is one that a config raises, and hardly a script by itself."""
    compiling = ("torch._dynamo", "torch._inductor")
    compiled = any(kind.__module__.startswith(compiling) for kind in type(exc).__mro__)
    return compiled or isinstance(exc, torch.OutOfMemoryError)


GRAPHS = ("cudagraph", "cuda graph", "overwritten by a subsequent run", "captur")
"""In what is raised because of CUDA graphs."""


def of_graphs(exc: BaseException | str) -> bool:
    """Whether CUDA graphs are why something was raised."""
    return any(word in str(exc).lower() for word in GRAPHS)


OUT_OF_MEMORY = re.compile(
    r"out of memory|(cudnn|cublas|cusolver)_status_alloc_failed|can(not|'t) allocate memory"
    r"|not enough memory|there is no memory|std::bad_alloc"
)
"""How cuDNN, cuBLAS, the driver, the CPU and a captured step say it; PyTorch's own has a type."""


def of_memory(exc: BaseException) -> bool:
    """Whether memory is what was missing."""
    if isinstance(exc, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and bool(OUT_OF_MEMORY.search(str(exc).lower()))


def plausible(exc: BaseException) -> bool:
    """Whether a config may be why: also of what PyTorch raises where it cannot do something. What
    a script raises by itself is most often of another class."""
    return of_config(exc) or type(exc) in (RuntimeError, NotImplementedError)


def told(exc: BaseException) -> tuple[str, str]:
    """(Outcome, reason) of what a config, or a script, raised."""
    first, *more = str(exc).strip().splitlines() or [""]
    if more and first.endswith(":"):  # it ends with another's traceback, whose last line tells
        first += f" ... {more[-1].strip()}"
    outcome = "out_of_memory" if of_memory(exc) else "failed"
    if isinstance(exc, Unfed):  # whose words are a person's
        return outcome, first[:MOST_SAID]
    return outcome, f"{type(exc).__name__}: {first}"[:MOST_SAID]
