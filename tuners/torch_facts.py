"""What only torch knows of itself and of this host, kept for commands that need nothing else of it:
importing it takes seconds.

What was read with one torch, on one host, under the same variables, is the same the next time.
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
    "ATEN_CPU_CAPABILITY",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
)
"""By which torch's facts change."""
MOST = 16
"""States of an environment that are kept: the newest."""

_read: dict[str, Any] = {}
"""What this process has read of torch, by name."""


def fact(name: str, read: Callable[[], Any]) -> Any:
    """What `read` gives of torch: plain data. Where torch is not imported, what it gave before."""
    if "torch" not in sys.modules and name in (kept := _kept().get(_state(), {})):
        return kept[name]
    _read[name] = read()
    return _read[name]


def version(name: str) -> str:
    """Of 'torch', or of the 'cuda' or 'hip' that it is built with; '' for none."""
    attribute = "__version__" if name == "torch" else name
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "version"):
        return str(getattr(torch.version, attribute, None) or "")
    return str(_versions().get(attribute) or "")


def keep() -> None:
    """Keep what this process has read, if there is anything new in it."""
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
        changed = _version_file().stat()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        variables = [os.environ.get(name) for name in _VARIABLES]
        parts = [str(_version_file()), changed.st_mtime_ns, platform.node(), cores, variables]
        return json.dumps(parts)
    return ""


def _version_file() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("torch is not installed")
    return Path(spec.submodule_search_locations[0]) / "version.py"


@functools.cache
def _versions() -> dict[str, Any]:
    return runpy.run_path(str(_version_file()))
