"""The face: what is public, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import advisor
from advisor import errors


def test_the_public_names_are_these() -> None:
    assert sorted(advisor.__all__) == [
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
    assert all(getattr(advisor, name) for name in advisor.__all__)


def test_every_error_is_public() -> None:
    """Whoever calls a public function can name what it raises; a server and a worker are called by
    none."""
    waiting, every = [errors.AdvisorError], set()
    while waiting:
        found = waiting.pop()
        if not found.__module__.startswith(("advisor.service", "advisor.jobs.worker")):
            every.add(found.__name__)
        waiting += found.__subclasses__()
    assert every <= set(advisor.__all__)


def test_import_is_light() -> None:
    code = (
        "import advisor, sys; print([m for m in ('torch', 'optuna', 'rich') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_apply_loads_nothing_that_it_does_not_need() -> None:
    code = (
        "import advisor, sys, warnings; warnings.simplefilter('ignore'); advisor.apply('x.py');"
        "print([m for m in ('optuna', 'torchvision', 'rich', 'click', 'pathspec', 'advisor.client',"
        "'advisor.jobs.code_archive', 'advisor.cache.stores.http_client') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_run_loads_nothing_of_what_is_run_or_searched() -> None:
    """It is part of every start."""
    code = (
        "import os, sys; os.execve = lambda *_: None; from advisor.cli import main; "
        "main(['run', '--', 'true']);"
        "heavy = ('torch', 'optuna', 'rich', 'numpy', 'msgpack', 'advisor.cache.records');"
        "print([m for m in heavy if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
