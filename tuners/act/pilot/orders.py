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
    """Train on with a config. The pilot asks again after `steps` steps; after 0 it never does."""

    config: Config
    steps: Count = 0
    warm: Count = 0  # untimed steps before them
    # The script's own; empty: it is left alone.
    own: Config = Config()  # noqa: RUF009 # immutable
    needs_room: bool = False  # set the config only if memory is free for it
    compare: Comparison | None = None  # if need be on unmodified steps
    forget: Config | None = None  # free its compiled code first
    found: str = ""  # what was measured of the last order's config
    saves: str = ""  # a file for the artifacts of compilation


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """The timed steps of one order."""

    steps: Count = 0
    samples: Count = 0  # of this process
    seconds: Span = 0.0  # wall clock, including the device's work
    first_s: Span = 0.0  # of the untimed steps, if the order switched to another config
    waited_s: Span = 0.0  # for data
    peak_bytes: Bytes = 0
    compiled: Count = 0  # graphs that torch.compile made
    taken: Count = 0  # batches that came from the loader's workers
    lent: Count = 0  # by which the steps have outrun the workers, if all of these are busy
    ahead: Count = 0  # batches that workers are asked for at a time
    outcome: str = "ok"  # or how the config failed, without which the script then went on
    reason: str = ""
    blames: str = ""  # as in `Compared`, whose result a comparison has here


class Guide(Protocol):
    """Decides which config is next; the same one in all processes of a job."""

    def takes_over(self) -> bool:
        """Whether to act on a script, which may follow advice by itself. Resets advice's flags."""

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
