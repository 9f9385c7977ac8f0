"""Facts about torch, cached on disk for commands that need nothing else of it: importing it takes
seconds. They hold for one torch, one host, and the same environment variables.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import platform
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("MKL_NUM_THREADS", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA"),
)
"""They change what torch says."""
MOST = 16
"""Environments that are kept: the newest."""

_read: dict[str, Any] = {}
"""What this process has read of torch, by name."""


def fact(name: str, read: Callable[[], Any]) -> Any:
    """The plain data that `read` returns; the cached one if torch is not imported."""
    if "torch" not in sys.modules and name in (kept := _kept().get(_state(), {})):
        return kept[name]
    _read[name] = read()
    return _read[name]


def version(name: str) -> str:
    """Version of 'torch', or of the 'cuda' or 'hip' that it is built with; '' for none."""
    return str(_versions().get("__version__" if name == "torch" else name) or "")


def keep() -> None:
    """Write what this process has read to the cache, if it is new."""
    before = _kept()
    state = _state() if _read else ""
    now = {**before.get(state, {}), **_read}
    if not _read or now == before.get(state):
        return
    states = {**{one: facts for one, facts in before.items() if one != state}, state: now}
    file = _file()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(json.dumps(dict(list(states.items())[-MOST:])))
        new.replace(file)


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
    """The torch that would be imported here, the host, and the variables that it reads."""
    with contextlib.suppress(OSError):
        changed = _version_file().stat().st_mtime_ns
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        variables = [os.environ.get(name) for name in _VARIABLES]
        return json.dumps([str(_version_file()), changed, platform.node(), cores, variables])
    return ""


def _version_file() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("torch is not installed")
    return Path(spec.submodule_search_locations[0]) / "version.py"


@functools.cache
def _versions() -> dict[str, Any]:
    return runpy.run_path(str(_version_file()))
