import os
import sys
from pathlib import Path

import pytest

from advisor.tuners import host
from advisor.tuners.act import advice_usage


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python` is the one that has torch, and no test has used advice, which keeps pilots away.
    Its scripts are forked from a process that began with another environment."""
    monkeypatch.setattr(host, "loaded_without", lambda *_: False)
    advice_usage._last.clear()
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
