"""The face: what is public, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import advisor
from advisor import errors

PUBLIC = """
    Advice AdvisorError AdvisorWarning Budget Busy Model NoRecord Permit RanksDiffer RecordDamaged
    RecordNewer Store StoreDamaged StoreError TargetError TargetFailed Unauthorized UsageError
    WorkerError __version__ apply explain lookup release tune verify
"""


def test_the_public_names_are_these() -> None:
    assert sorted(advisor.__all__) == PUBLIC.split()
    assert all(getattr(advisor, name) for name in advisor.__all__)


def test_every_error_is_public() -> None:
    """Whoever calls a public function can name what it raises; a server and a worker are called by
    none."""
    waiting, every = [errors.AdvisorError], set()
    while waiting:
        found = waiting.pop()
        if not found.__module__.startswith(("advisor.service", "advisor.jobs")):
            every.add(found.__name__)
        waiting += found.__subclasses__()
    assert every <= set(advisor.__all__)


def applied(store: str) -> str:
    """Code that looks a target up in a store; `silent` listens and says nothing."""
    return (
        "import advisor, socket, warnings; warnings.simplefilter('ignore'); "
        "silent = socket.create_server(('127.0.0.1', 0)); "
        f"advisor.apply(advisor.__file__, store={store})"
    )


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import advisor", "torch optuna rich"),
        # Part of every start with `advisor run`.
        (
            "import os; os.execve = lambda *_: None; from advisor.cli import main; "
            "main(['run', '--', 'true'])",
            "torch optuna rich numpy msgpack advisor.cache.records",
        ),
        (
            applied("None"),
            "optuna torchvision rich click pathspec advisor.client advisor.jobs.code_archive "
            "advisor.cache.stores.http_client",
        ),
        (applied("f'http://127.0.0.1:{silent.getsockname()[1]}'"), "urllib3"),
        (applied("'redis://127.0.0.1:1'"), "redis"),
    ],
    ids=["import", "run", "apply", "server", "redis that is down"],
)
def test_nothing_is_loaded_that_is_not_needed(code: str, heavy: str) -> None:
    code += f"; import sys; print([one for one in {heavy.split()} if one in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
