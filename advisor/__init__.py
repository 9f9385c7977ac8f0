"""Find the fastest safe way to train a model on this GPU once; start every later run with it.

    advisor.tune("model.py:Net", shape=(64, 3, 256, 256))  # or tune(["python", "train.py"])
    advice = advisor.apply("model.py:Net", shape=(64, 3, 256, 256))

See `apply` for the rest of the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from advisor.arguments import Budget, Model, Permit
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
    from advisor.frameworks.tables import accelerate, hf, lightning
    from advisor.resolve.inside import release
    from advisor.resolve.lookups import apply, lookup
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
    "accelerate",
    "apply",
    "explain",
    "hf",
    "lightning",
    "lookup",
    "release",
    "tune",
    "verify",
]

_HOMES = {
    "Advice": "advisor.tuners.act.advice",
    "Budget": "advisor.arguments",
    "Model": "advisor.arguments",
    "Permit": "advisor.arguments",
    "Store": "advisor.store",
    "accelerate": "advisor.frameworks.tables",
    "apply": "advisor.resolve.lookups",
    "explain": "advisor.verification",
    "hf": "advisor.frameworks.tables",
    "lightning": "advisor.frameworks.tables",
    "lookup": "advisor.resolve.lookups",
    "release": "advisor.resolve.inside",
    "tune": "advisor.tuning",
    "verify": "advisor.verification",
}

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
    return getattr(importlib.import_module(_HOMES.get(name, "advisor.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
