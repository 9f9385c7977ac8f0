"""How much is tried: about a minute of cheap knobs, five minutes, or the whole space."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """`budget_s`: wall seconds of measuring; `compiles`: torch.compile too; `full`: also what is
    known to be bad (cuDNN off) or takes minutes (max-autotune)."""

    budget_s: float
    compiles: bool
    full: bool


EFFORTS: dict[str, Effort] = {
    "quick": Effort(budget_s=60.0, compiles=False, full=False),
    "normal": Effort(budget_s=300.0, compiles=True, full=False),
    "exhaustive": Effort(budget_s=3600.0, compiles=True, full=True),
}
"""By name, the least first."""
DEFAULT = "normal"


def suffices(found: str, wanted: str) -> bool:
    """Whether one effort is at least another; one of a name not known here is not."""
    order = list(EFFORTS)
    return found in order and order.index(found) >= order.index(wanted)
