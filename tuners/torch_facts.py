"""A stand-in for torch, because importing torch takes seconds, and facts about torch that are
cached on disk. A fact holds for one torch, one host, and the same environment variables.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.cache.stores.filesystem import write_whole
from advisor.tuners import host

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()

_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("MKL_NUM_THREADS", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA"),
)
"""Environment variables that change facts about torch."""
_MAX_ENVIRONMENTS = 16  # the newest environments are kept
_read: dict[str, Any] = {}  # facts that this process has read, by name


def fact(name: str, read: Callable[[], Any]) -> Any:
    """The plain data that `read` returns, or its cached value if torch is not imported."""
    if "torch" not in sys.modules and name in (kept := _kept().get(_state(), {})):
        return kept[name]
    _read[name] = read()
    return _read[name]


def keep() -> None:
    """Write the facts that this process has read to the cache, if they are new."""
    if not _read:
        return
    states, state = dict(_kept()), _state()
    before = states.pop(state, {})
    states[state] = before | _read
    if states[state] != before:
        newest = dict(list(states.items())[-_MAX_ENVIRONMENTS:])
        with contextlib.suppress(OSError):
            write_whole(_file(), json.dumps(newest).encode())


def _file() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("advisor", appauthor=False)) / "torch.json"


@functools.cache
def _kept() -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError, RuntimeError):
        return {}
    plain = isinstance(found, dict) and all(isinstance(one, dict) for one in found.values())
    return found if plain else {}


def _state() -> str:
    """The cache's key: the torch that would be imported, the host, and _VARIABLES."""
    spec = importlib.util.find_spec("torch")
    with contextlib.suppress(OSError):
        if spec is not None and spec.origin:
            file = Path(spec.origin).with_name("version.py")
            torch_here = [str(file), file.stat().st_mtime_ns]
            variables = [os.environ.get(name) for name in _VARIABLES]
            return json.dumps([*torch_here, platform.node(), host.affinity(), variables])
    return ""
