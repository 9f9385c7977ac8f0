"""Folders for what is written for now: gone with their process, and never while it lives."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from advisor.tuners import scratch
from advisor.tuners.measure.run.guarded_process import inductor_folder
from advisor.tuners.scratch import ScratchFolder
from tests import forks

LEFT = """
import os
from advisor.tuners.scratch import ScratchFolder
made = ScratchFolder()
(made.path / "deep").mkdir()
(made.path / "deep" / "file").touch()
(made.path / "link").symlink_to("..")
print(made.path, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_left_is_swept_and_nothing_else(root: Path) -> None:
    (root / "leave.py").write_text(LEFT)
    done = forks.run(root / "leave.py", env=os.environ | {"TMPDIR": str(root)})
    (root / "leave.py").unlink()
    gone = Path(done.stdout.strip())
    assert gone.parent == root and (gone / "deep" / "file").exists()
    (mine := root / "advisor-work").mkdir()
    (mine / "notes").touch()
    (root / f"{scratch.FOLDER_PREFIX}link").symlink_to(mine)
    with ScratchFolder() as living:
        (living / "file").touch()
        scratch.sweep(root)
        left_there = {one.name for one in root.iterdir()}
        assert left_there == {mine.name, f"{scratch.FOLDER_PREFIX}link", living.name}
        assert (living / "file").exists() and (mine / "notes").exists()
    assert not living.exists()
    made = ScratchFolder()
    made.remove()
    made.remove()
    assert not made.path.exists()


def test_what_is_compiled_lies_where_the_users_runs_find_it() -> None:
    """A worker's temporary folder is its own, in which Inductor would keep it."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert inductor_folder() == default_cache_dir()
