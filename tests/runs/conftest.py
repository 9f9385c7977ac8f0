import os
import sys
from pathlib import Path

import pytest

from advisor.tuners import host
from advisor.tuners.act import advice_usage


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `python` this Python, and forgets used advice, which would keep pilots away. Turns off
    the check of a process's first environment, because forks have that of their server."""
    monkeypatch.setattr(host, "loaded_without", lambda *_: False)
    advice_usage._last.clear()
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
