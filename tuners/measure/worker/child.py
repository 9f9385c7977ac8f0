"""What the worker process does: it answers requests over its pipe."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config
from advisor.errors import TargetError, TargetFailed
from advisor.tuners.measure.place import ConfigFailed
from advisor.tuners.measure.worker.bench import Bench
from advisor.tuners.measure.worker.description import describe, recognise
from advisor.tuners.measure.worker.wire import Job, receive, send

Plain = dict[str, Any]
UNANSWERED = ("forget",)
"""Requests without a reply."""


class Answers:
    """What a worker does for each message, by its `do`."""

    def __init__(self) -> None:
        self._bench: Bench | None = None

    def answer(self, message: Plain) -> Plain:
        """Raises: TargetError, TargetFailed: as `Bench` and `describe`."""
        what = message.pop("do")
        if what == "load":
            self._bench = Bench(from_plain(Job, message["job"]))
            recognise(self._bench.job, self._bench.loaded)
            _settle()
            return {}
        assert self._bench is not None
        answer: Callable[..., Plain] = getattr(self, f"_{what}")
        try:
            reply = answer(self._bench, **message)
        except ConfigFailed as failed:
            reply = {"outcome": failed.outcome, "reason": str(failed)}
        return reply | {"healthy": self._bench.healthy}

    def _describe(self, bench: Bench) -> Plain:
        facts = describe(bench)
        bench.release()
        _settle()
        return {"facts": to_plain(facts)}

    def _describe_data(self, bench: Bench) -> Plain:
        return {"facts": to_plain(bench.data.facts)}

    def _costs(self, bench: Bench, *, seconds: float) -> Plain:
        return {"costs": to_plain(bench.costs(seconds))}

    def _block(self, bench: Bench, *, config: Plain, steps: int, warm: int) -> Plain:
        return {"block": to_plain(bench.block(Config(config), steps, warm))}

    def _loader_rate(self, bench: Bench, *, config: Plain, seconds: float) -> Plain:
        return {"rate": bench.loader_rate(Config(config), seconds)}

    def _compare(
        self, bench: Bench, *, config: Plain, fp32: Plain, plain: Plain, **limits: float
    ) -> Plain:
        found = bench.compare(Config(config), Config(fp32), Config(plain), **limits)
        return {"compared": to_plain(found)}

    def _forget(self, bench: Bench, *, config: Plain) -> Plain:
        bench.forget(Config(config))
        return {}

    def _save(self, bench: Bench, *, config: Plain, file: str) -> Plain:
        bench.save(Config(config), Path(file))
        return {"saved": True}


def _settle() -> None:
    """Leave what is there out of later collections: going through torch's modules takes 0.4 s."""
    gc.freeze()
    gc.enable()


def main() -> int:
    """Answer until the tuning process is gone."""
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)
    warnings.simplefilter("ignore")  # the user's own run shows them; a trial would repeat them
    # Advice says at exit what a script has not used of it; its last words are to be the user's.
    logging.getLogger("advisor").setLevel(logging.CRITICAL)
    atexit.register(gc.unfreeze)  # nanobind tells of all that is still there at the end
    # Pickle would name it where it writes what is compiled, and no script has such a module.
    sys.modules.pop("__mp_main__", None)
    answers = Answers()
    send(pipe, {"ready": True})
    while True:
        try:
            message = receive(pipe)
        except EOFError:
            return 0
        answered = message["do"] not in UNANSWERED
        if answered:
            send(pipe, {"heard": True})
        try:
            reply = answers.answer(message)
        except (TargetError, TargetFailed) as exc:
            reply = {"error": type(exc).__name__, "message": str(exc), "details": exc.details}
        if answered:
            send(pipe, reply)
