"""The user's command as a process, with a pilot inside; and a script that runs already."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path

from advisor.errors import UsageError
from advisor.tuners.act.pilot.variables import ADDRESS, SECRET, bringing, noted
from advisor.tuners.measure.run.guarded import Guarded, inductor_folder, measurable
from advisor.tuners.scratch import Scratch

SHOWN_S, MOST_SHOWN = 0.2, 2**16  # between two looks at a shown log; characters at a time
CONTAINED = {
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_TRACKING_URI": "sqlite:///{}/mlflow.db",
    "TRACKIO_DIR": "{}/trackio",
    "TENSORBOARD_LOGGING_DIR": "{}/tensorboard",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "DISABLE_KUBEFLOW_INTEGRATION": "TRUE",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Have libraries report to nobody, or to a folder, {}, that is removed. Nothing stops what a script
saves or pushes itself, nor the loggers of Lightning."""


class Command(Guarded):
    """One start of a command, whose Python looks into the folder `injected` first, for the pilot.

    Raises:
        UsageError: as `measurable`; the temporary folder's name is too long for a socket.
    """

    def __init__(self, words: Sequence[str], *, injected: Path, log: Path) -> None:
        path = measurable(words)
        self._folder = Scratch()
        secret = secrets.token_bytes(32)
        self._address = str(self._folder.path / "pilot")
        try:
            self._listener = Listener(self._address, "AF_UNIX", backlog=64, authkey=secret)
        except OSError as exc:
            self._folder.remove()
            why = f"no socket at {self._address} ({exc}): set TMPDIR to a shorter path"
            raise UsageError(why) from exc
        scratch = self._folder.path / "tmp"
        scratch.mkdir()
        environment = {
            **os.environ,
            # Collect garbage before each CUDA graph capture (torch.compiler.config): a graph that
            # is freed meanwhile breaks the capture.
            "TORCH_CUDAGRAPH_GC": "1",
            **{name: value.format(scratch) for name, value in CONTAINED.items()},
            # Not in the scratch folder: the next start loads what this one compiles.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            or inductor_folder(),
            "TMPDIR": str(scratch),
            **bringing(injected),
            ADDRESS: self._address,
            SECRET: secret.hex(),
        }
        super().__init__([path, *words[1:]], log=log, environment=environment)

    @property
    def note(self) -> str | None:
        """Why a process failed before its first steps, or ''; None if none has loaded torch."""
        return noted(self._address)

    def accepted(self, seconds: float) -> Connection | None:
        """The next pilot's connection, if one comes within so long."""
        listening = self._listener._listener._socket  # type: ignore[attr-defined] # to wait for one
        if wait([listening], seconds):
            # A process may be gone before it has said anything.
            with contextlib.suppress(OSError, EOFError, AuthenticationError):
                return self._listener.accept()
        return None

    def whole(self) -> None:
        """All processes of the job are there; others that train go on unmeasured."""
        self._listener.close()

    def end(self) -> None:
        super().end()
        with contextlib.suppress(OSError):
            self._listener.close()
        self._folder.remove()


class AttachedScript:
    """A script that started this process, and ends with it; in the place of a Command."""

    ended, note = False, ""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening

    def accepted(self, seconds: float) -> Connection | None:
        if not wait([self._listening], seconds):
            return None
        return Connection(self._listening.accept()[0].detach())

    def whole(self) -> None:
        pass

    def obituary(self) -> tuple[int, str]:
        return 1, ""

    def end(self) -> None:
        """The script is left alone."""
        self._listening.close()


@contextlib.contextmanager
def shown(log: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Show what is written to a log meanwhile, from another thread."""
    over = threading.Event()

    def follow() -> None:
        with log.open(errors="replace") as file:
            last = False
            while not last:
                last = over.wait(SHOWN_S)
                while said := file.read(MOST_SHOWN):
                    show(said)

    log.touch()
    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
