"""What is known of torch without importing it is what torch says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from advisor.tuners import torch_facts

READ = (
    "import json, sys; from advisor.tuners import environment as e, torch_facts as f; "
    "print(json.dumps([str(e.detect('cpu')), e.own_threads(), e.default_device(), "
    "'torch' in sys.modules])); f.keep()"
)


def read(**env: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", READ], env=os.environ | env, capture_output=True, text=True
    )
    found: list[object] = json.loads(done.stdout)
    return found


def test_torch_is_imported_once_for_what_it_says_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, then = read(), read()
    assert (first[:3], first[3], then[3]) == (then[:3], True, False)
    assert str(torch.__version__) in str(then[0])
    other = read(OMP_NUM_THREADS="2")  # by which it says something else
    assert other[3] is True and other[1] != then[1]


def test_a_damaged_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "advisor").mkdir()
    (tmp_path / "advisor" / "torch.json").write_text("[1")
    assert torch_facts._kept.__wrapped__() == {}


def test_reading_commands_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    code = (
        "import sys; from advisor.cli import main; code = main(); "
        "assert 'torch' not in sys.modules and code == 0, code"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True
        )
        for words in (("why", "model.py"), ("why", "model.py"), ("show",))
    ]
    # What is read of torch the first time is kept.
    assert [one.stderr for one in said[1:] if one.returncode] == []
