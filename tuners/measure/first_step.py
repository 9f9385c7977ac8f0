"""Where compilers keep on disk what they made."""

from __future__ import annotations

import getpass
import os
import re
import tempfile

_UNFIT = r'[\\/:*?"<>|]'
"""In a file's name, of those of a user's."""


def empty_caches(folder: str) -> dict[str, str]:
    """Environment variables that have a process compile with empty caches, in an empty folder."""
    return {f"{name}_CACHE_DIR": f"{folder}/{name}" for name in ("TORCHINDUCTOR", "TRITON")}


def inductor_folder() -> str:
    """Where Inductor keeps what it compiles, by itself (torch._inductor.runtime.cache_dir_utils,
    which takes seconds to import)."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return f"{tempfile.gettempdir()}/torchinductor_{re.sub(_UNFIT, '_', user)}"
