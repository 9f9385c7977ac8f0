"""Where in the user's own code an exception came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from advisor.tuners.faults import is_config_error, may_be_config_error, where

SOURCES = {
    "raised here": ("def step():\n    raise ValueError('bad')\nstep()\n", "train.py:2"),
    "in a library": ("import torch\n\ntorch.ones(2) @ torch.ones(3)\n", "train.py:3"),
    "in Python": ("import json\njson.loads('[')\n", "train.py:2"),
    "of wrong syntax": ("x = 1\ndef train(:\n", "train.py:2"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_innermost_line_of_the_users_own(tmp_path: Path, name: str) -> None:
    source, at = SOURCES[name]
    file = tmp_path / "train.py"
    file.write_text(source)
    with pytest.raises(Exception) as caught:
        exec(compile(source, str(file), "exec"), {})
    assert where(caught.value) == at
    assert where(ValueError("never raised")) == ""


@pytest.mark.parametrize(
    ("exc", "is_it", "may_be"),
    [
        (torch._dynamo.exc.InternalTorchDynamoError("in the compiler"), True, True),
        (torch.OutOfMemoryError("no memory left"), True, True),
        (RuntimeError("view size"), False, True),
        (NotImplementedError("on this device"), False, True),
        (ValueError("bad batch"), False, False),
        (RecursionError("a RuntimeError too"), False, False),
    ],
)
def test_what_a_config_may_be_the_cause_of(exc: Exception, is_it: bool, may_be: bool) -> None:
    assert (is_config_error(exc), may_be_config_error(exc)) == (is_it, may_be)
