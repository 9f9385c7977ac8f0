"""What is known of torch without importing it is what torch says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from advisor.tuners import torch_facts
from tests import forks

READ = """
import json, sys
from advisor.tuners import environment as e, torch_facts as f
said = [str(e.detect("cpu")), e.own_threads(), e.default_device()]
print(json.dumps([*said, "torch" in sys.modules]))
f.keep()
"""


def read(folder: Path, **env: str) -> list[object]:
    (folder / "read.py").write_text(READ)
    done = forks.run(folder / "read.py", env=os.environ | env)
    return json.loads(done.stdout)


def test_facts_of_torch_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, then = read(tmp_path), read(tmp_path)
    assert (first[:3], first[3], then[3]) == (then[:3], True, False)
    assert str(torch.__version__) in str(then[0])
    other = read(tmp_path, OMP_NUM_THREADS="2")  # by which it says something else
    assert other[3] is True


def test_a_damaged_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "advisor").mkdir()
    (tmp_path / "advisor" / "torch.json").write_text("[1")
    assert torch_facts._kept.__wrapped__() == {}


def test_reading_commands_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    (tmp_path / "command.py").write_text(
        "import sys; from advisor.cli import main; code = main(); "
        "assert 'torch' not in sys.modules and code == 0, code"
    )
    # What is read of torch the first time is kept.
    forks.run(tmp_path / "command.py", "why", "model.py", cwd=tmp_path)
    for words in (("why", "model.py"), ("show",)):
        then = forks.run(tmp_path / "command.py", *words, cwd=tmp_path)
        assert then.returncode == 0, then.stderr
