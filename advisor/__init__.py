"""Find the fastest safe way to train a model on this GPU once; start every later run with it.

    advisor.tune("model.py:Net", shape=(64, 3, 256, 256))  # or tune(["python", "train.py"])
    advice = advisor.apply("model.py:Net", shape=(64, 3, 256, 256))

See `apply` for the rest of the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from advisor.arguments import Budget, Model, Permit
    from advisor.checking import check
    from advisor.errors import (
        AdvisorError,
        AdvisorWarning,
        Busy,
        NoRecord,
        RanksDiffer,
        RecordDamaged,
        RecordNewer,
        StoreDamaged,
        StoreError,
        TargetError,
        TargetFailed,
        Unauthorized,
        UsageError,
        WorkerError,
    )
    from advisor.resolve.lookups import apply, lookup
    from advisor.resolve.online import release
    from advisor.store import Store
    from advisor.tuners.act.advice import Advice
    from advisor.tuning import tune
    from advisor.verification import explain, verify

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "AdvisorError",
    "AdvisorWarning",
    "Budget",
    "Busy",
    "Model",
    "NoRecord",
    "Permit",
    "RanksDiffer",
    "RecordDamaged",
    "RecordNewer",
    "Store",
    "StoreDamaged",
    "StoreError",
    "TargetError",
    "TargetFailed",
    "Unauthorized",
    "UsageError",
    "WorkerError",
    "__version__",
    "apply",
    "check",
    "explain",
    "lookup",
    "release",
    "tune",
    "verify",
]

_HOMES = {
    "advisor.arguments": ("Budget", "Model", "Permit"),
    "advisor.checking": ("check",),
    "advisor.resolve.online": ("release",),
    "advisor.resolve.lookups": ("apply", "lookup"),
    "advisor.store": ("Store",),
    "advisor.tuners.act.advice": ("Advice",),
    "advisor.tuning": ("tune",),
    "advisor.verification": ("explain", "verify"),
}
"""Public names by module; all other public names are in `advisor.errors`."""

_OF_SCRIPTS = ("Advice", "apply", "lookup", "release")
"""Names whose modules need torch: torch is imported before them."""


def __getattr__(name: str) -> Any:
    # Lazy: `import advisor` costs milliseconds, and torch is loaded when something needs it.
    import importlib

    if name not in __all__:
        raise AttributeError(f"module 'advisor' has no attribute {name!r}")
    if name in _OF_SCRIPTS:
        # Import torch first: it may attach a pilot, which must not find advisor half imported.
        importlib.import_module("torch")
    home = next((one for one, names in _HOMES.items() if name in names), "advisor.errors")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
