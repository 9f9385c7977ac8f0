"""What the pilot and its guide exchange: plain data, sent over a socket or within the process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from advisor.cache.config import Config
from advisor.cache.domain import Bytes, Count, Span

if TYPE_CHECKING:
    from advisor.tuners.act.pilot.seen import Seen

MOST_SAID = 300  # characters of an exception's message


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A candidate to compare with strict fp32, within `left_s` seconds. `plain` has only its number
    format; `tolerance` is the fraction of fp32's loss that is always allowed."""

    fp32: Config
    plain: Config
    candidate: Config
    tolerance: Span
    left_s: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Train on with a config. The pilot asks again after `steps` steps; after 0 it never does.

    Attributes:
        warm: untimed steps before them.
        own: the script's own config; empty: the script is left alone.
        needs_room: set the config only if memory is free for it.
        compare: make this comparison, if need be on unmodified steps.
        forget: a config whose compiled code is freed first.
        found: what was measured of the last order's config, as text.
        saves: a file for the artifacts of compilation; '' for none.
    """

    config: Config
    steps: Count = 0
    warm: Count = 0
    own: Config = Config()  # noqa: RUF009 # immutable
    needs_room: bool = False
    compare: Comparison | None = None
    forget: Config | None = None
    found: str = ""
    saves: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """The timed steps of one order.

    Attributes:
        samples: of this process.
        seconds: wall clock, including the device's work; `waited_s` of them were spent on data.
        first_s: seconds of the untimed steps, if the order switched to another config.
        compiled: graphs that torch.compile made during the timed steps.
        taken: batches that came from the loader's workers.
        lent: how many more batches than before busy workers have yet to make.
        ahead: batches that workers are asked for at a time.
        outcome: 'ok', or how the config failed; the script then went on without it. For a
            comparison, its result; `blames` as in `Compared`.
    """

    steps: Count = 0
    samples: Count = 0
    seconds: Span = 0.0
    first_s: Span = 0.0
    waited_s: Span = 0.0
    peak_bytes: Bytes = 0
    compiled: Count = 0
    taken: Count = 0
    lent: Count = 0
    ahead: Count = 0
    outcome: str = "ok"
    reason: str = ""
    blames: str = ""


class Guide(Protocol):
    """Decides which config is next. All processes of a job get the same answers."""

    def takes_over(self) -> bool:
        """Whether to act on the script: not if it follows an advice by itself. Takes back flags
        that advice has set."""

    def begin(self, seen: Seen) -> Order:
        """The first order."""

    def next(self, lap: Lap) -> Order:
        """The next order, once the steps of the last are over."""

    def failed(self, exc: BaseException) -> None:
        """The script, or the pilot, ends with this."""

    def ended(self, exc: BaseException, order: Order) -> None:
        """The script has ended with this under an order's config, and it was printed."""

    def gave_up(self, exc: BaseException) -> None:
        """The config that was to stay has raised this; the script goes on without it."""

    def lost(self, exc: Exception, order: Order) -> None:
        """Backward has raised this under an order's config; the script gets it, and may end."""


class Unfed(Exception):
    """Why a loader gets no workers."""


def of_config(exc: BaseException) -> bool:
    """Whether an exception comes from a config and hardly ever from a script."""
    compiling = ("torch._dynamo", "torch._inductor")
    compiled = any(kind.__module__.startswith(compiling) for kind in type(exc).__mro__)
    return compiled or isinstance(exc, torch.OutOfMemoryError)


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
    """Whether a config may be the cause: PyTorch raises these two too, scripts mostly others."""
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
