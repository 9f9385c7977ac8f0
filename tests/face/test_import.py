"""The public names of the package, and the modules that importing it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import advisor
from advisor import errors

PUBLIC = """
    Advice AdvisorError AdvisorWarning Budget Busy Model NoRecord Permit RanksDiffer RecordDamaged
    RecordNewer Store StoreDamaged StoreError TargetError TargetFailed Unauthorized UsageError
    WorkerError __version__ apply check explain lookup release tune verify
"""


def test_the_public_names_are_locked() -> None:
    assert sorted(advisor.__all__) == PUBLIC.split()
    assert all(getattr(advisor, name) for name in advisor.__all__)


def test_every_error_is_public() -> None:
    """No public function raises the errors of the server and of its jobs."""
    waiting, names = [errors.AdvisorError], set()
    while waiting:
        error = waiting.pop()
        if not error.__module__.startswith(("advisor.service", "advisor.jobs")):
            names.add(error.__name__)
        waiting += error.__subclasses__()
    assert names <= set(advisor.__all__)


def apply_code(store: str) -> str:
    """Code that looks a target up in a store. The server `silent` never answers."""
    return (
        "import advisor, socket, warnings; warnings.simplefilter('ignore'); "
        "silent = socket.create_server(('127.0.0.1', 0)); "
        f"advisor.apply(advisor.__file__, store={store})"
    )


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import advisor", "torch optuna rich"),
        # Every start with `advisor run` executes this.
        (
            "import os; os.execve = lambda *_: None; from advisor.cli import main; "
            "main(['run', '--', 'true'])",
            "torch optuna rich numpy msgpack advisor.cache.records",
        ),
        (
            apply_code("None"),
            "optuna torchvision rich click pathspec advisor.client advisor.jobs.code_archive "
            "advisor.cache.stores.http_client",
        ),
        (apply_code("f'http://127.0.0.1:{silent.getsockname()[1]}'"), "urllib3"),
        (apply_code("'redis://127.0.0.1:1'"), "redis"),
    ],
    ids=["import", "run", "apply", "server", "redis that is down"],
)
def test_modules_that_are_not_needed_are_not_imported(code: str, heavy: str) -> None:
    code += f"; import sys; print([one for one in {heavy.split()} if one in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
