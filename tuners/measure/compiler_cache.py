"""Where Inductor keeps what it compiles."""

from __future__ import annotations

import getpass
import os
import re
import tempfile


def inductor_folder() -> str:
    """Inductor's own choice, as in torch._inductor.runtime.cache_dir_utils, which takes seconds to
    import."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    safe = re.sub(r'[\\/:*?"<>|]', "_", user)
    return f"{tempfile.gettempdir()}/torchinductor_{safe}"
