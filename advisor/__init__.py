"""Find the fastest safe way to train a model on this GPU once; start every later run with it.

    advice = advisor.apply("model.py:Net", shape=(64, 3, 256, 256))

See `apply` for the rest of the loop, and `advisor tune --help` for the measuring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from advisor.finding.inside import release
    from advisor.finding.lookups import apply, lookup
    from advisor.frameworks import accelerate, hf, lightning
    from advisor.remeasuring import explain, verify
    from advisor.sharing import export, gc, import_, sync
    from advisor.tuners.act.advice import Advice
    from advisor.tuning import tune

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "AdvisorError",
    "AdvisorWarning",
    "Busy",
    "NoRecord",
    "RanksDiffer",
    "RecordDamaged",
    "RecordNewer",
    "StoreDamaged",
    "StoreError",
    "TargetError",
    "TargetFailed",
    "Unauthorized",
    "UsageError",
    "WorkerError",
    "__version__",
    "accelerate",
    "apply",
    "explain",
    "export",
    "gc",
    "hf",
    "import_",
    "lightning",
    "lookup",
    "release",
    "sync",
    "tune",
    "verify",
]

_HOMES = {
    "Advice": "advisor.tuners.act.advice",
    "apply": "advisor.finding.lookups",
    "explain": "advisor.remeasuring",
    "export": "advisor.sharing",
    "gc": "advisor.sharing",
    "import_": "advisor.sharing",
    "lookup": "advisor.finding.lookups",
    "release": "advisor.finding.inside",
    "sync": "advisor.sharing",
    "tune": "advisor.tuning",
    "verify": "advisor.remeasuring",
}

_ROOMS = ("accelerate", "hf", "lightning")
"""Of advisor.frameworks, with functions of their own."""

_OF_SCRIPTS = ("Advice", "apply", "lookup", "release")
"""What needs torch at once."""


def __getattr__(name: str) -> Any:
    # Lazy: `import advisor` costs milliseconds, and torch is loaded when something needs it.
    import importlib

    if name not in __all__:
        raise AttributeError(f"module 'advisor' has no attribute {name!r}")
    if name in _OF_SCRIPTS:
        # First of all: loading torch may bring a pilot, and that must not find half of advisor.
        importlib.import_module("torch")
    if name in _ROOMS:
        return importlib.import_module(f"advisor.frameworks.{name}")
    return getattr(importlib.import_module(_HOMES.get(name, "advisor.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
