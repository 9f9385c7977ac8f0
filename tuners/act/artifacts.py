"""Saves the code that torch.compile makes in a process, and loads it in another process."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import torch

from advisor.cache.artifacts import StoredArtifacts, Tools
from advisor.cache.codec import from_plain, to_plain
from advisor.cache.shown import size
from advisor.cache.stores.filesystem import read_regular
from advisor.errors import RecordDamaged
from advisor.tuners.act.hooks import Patch
from advisor.tuners.decisions import AWAITED_S
from advisor.tuners.environment import tools

_MOST_BYTES = 2**30

_log = logging.getLogger("advisor")
_stable_keys: Patch | None = None


def save(file: Path) -> None:
    """Write the code that this process has compiled to a file; no file if there is none."""
    if "torch._dynamo" not in sys.modules:
        return
    found = torch.compiler.save_cache_artifacts()
    if found is not None:
        with contextlib.suppress(OSError):
            file.write_bytes(msgpack.packb({"tools": to_plain(tools()), "data": found[0]}))


def saved(file: Path) -> tuple[Tools, bytes] | None:
    """The tools that compiled the code in a file, and the code; None if it cannot be read."""
    try:
        data = read_regular(file, _MOST_BYTES)
        found = msgpack.unpackb(data, max_bin_len=len(data))
        return from_plain(Tools, found["tools"]), bytes(found["data"])
    except (OSError, ValueError, KeyError, TypeError, RecordDamaged):
        return None


def use_stable_keys() -> None:
    """Have PyTorch look compiled code up by the same key in every process.

    Pickle names a memory format in a key after the first module in `sys.modules` that has PyTorch
    as `torch`. Which module that is depends on the order of the script's imports.
    """
    global _stable_keys
    from torch._inductor import codecache

    pickler: Any = getattr(codecache, "FxGraphCachePickler", None)
    if pickler is None or _stable_keys is not None:
        return

    def begin(plain: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        # The pickle is only hashed, and never loaded.
        for kind in (torch.memory_format, torch.dtype):
            self.dispatch_table[kind] = lambda value: (str, (str(value),))

    _stable_keys = Patch(pickler, "__init__", begin)


def restore_keys() -> None:
    global _stable_keys
    if _stable_keys is not None:
        _stable_keys.remove()
        _stable_keys = None


class Fetch:
    """Finds a script's artifacts in a thread, and loads them in the script's own thread: PyTorch's
    modules import each other in circles, so two threads must not import them at once."""

    def __init__(self, find: Callable[[], StoredArtifacts | None]) -> None:
        self._find = find
        self._thread = threading.Thread(target=self._run, name="advisor: artifacts", daemon=True)
        self._found: StoredArtifacts | None = None
        self._failed = ""
        self._over = False
        self.said = ""  # the outcome, as text

    def begin(self) -> None:
        """Start the thread that looks for the artifacts."""
        if self._thread.ident is None:
            self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._find()
        except Exception as exc:  # whatever a store raises: training goes on
            self._failed = str(exc) or type(exc).__name__

    def load(self) -> None:
        """Load the artifacts into PyTorch, if they are found within AWAITED_S."""
        if self._over:
            return
        self._over = True
        self.begin()
        self._thread.join(AWAITED_S)
        late = f"not found within {AWAITED_S:g} s" if self._thread.is_alive() else ""
        failed = late or self._failed or self._load()
        if failed:
            prefix = "" if failed.startswith("artifacts") else "artifacts: "
            self.said = f"{prefix}{failed}; compiled anew"
            if os.environ.get("RANK", "0") == "0":  # only rank 0 warns
                _log.warning("%s", self.said)

    def _load(self) -> str:
        """Load the artifacts. Returns why that failed; '' if it did not, or there are none."""
        began, found, self._found = time.perf_counter(), self._found, None
        if found is None:
            return ""
        try:
            use_stable_keys()
            if torch.compiler.load_cache_artifacts(found.data) is None:
                return "PyTorch cannot read them"
        except Exception as exc:  # whatever PyTorch raises: training goes on
            return f"not loaded ({type(exc).__name__}: {exc})"
        took_s = time.perf_counter() - began
        self.said = f"{size(found.size)} of artifacts loaded from {found.store} in {took_s:.2g} s"
        _log.info("%s", self.said)
        return ""
