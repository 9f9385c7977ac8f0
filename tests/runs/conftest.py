import os
import sys
from pathlib import Path

import pytest

from advisor.tuners.act import advice_usage


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `python` this Python, and forgets used advice, which would keep pilots away."""
    advice_usage._last.clear()
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
