"""What the pilot and its guide exchange: plain data, sent over a socket or within the process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from advisor.cache.config import Config
from advisor.cache.domain import Bytes, Count, Span
from advisor.errors import AdvisorError

if TYPE_CHECKING:
    from advisor.tuners.act.pilot.seen import Seen


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


class Stopped(AdvisorError):
    """Why a pilot goes, or a loader gets no workers, in a person's words.

    Args:
        why: 'unclear': what trains, or where a step ends; 'over': the model that was found trains
            no more; 'brief', 'untrained': the process ends after few or no steps of an optimizer,
            and another process may train; 'unfed': the loader.
    """

    def __init__(self, why: Literal["unclear", "over", "brief", "untrained", "unfed"], said: str):
        super().__init__(said)
        self.why = why


def stopped(exc: BaseException) -> str:
    """Why, if an exception is a Stopped; else ''."""
    return exc.why if isinstance(exc, Stopped) else ""
