"""The worker process: answers requests over its pipe."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config
from advisor.errors import TargetError, TargetFailed
from advisor.tuners.measure.place import ConfigFailed
from advisor.tuners.measure.worker.bench import Bench
from advisor.tuners.measure.worker.description import describe, recognise
from advisor.tuners.measure.worker.wire import Facts, Job, receive, send

Plain = dict[str, Any]
UNANSWERED = ("forget",)
"""Requests without a reply."""


def load(job: Job) -> Bench:
    """A bench for the job's target.

    Raises:
        TargetError, TargetFailed: as `Bench` and `recognise`.
    """
    bench = Bench(job)
    recognise(job, bench.loaded)
    _settle()
    return bench


def _describe(bench: Bench) -> Facts:
    facts = describe(bench)
    bench.release()
    _settle()
    return facts


REQUESTS: dict[str, Callable[..., object]] = {
    "describe": _describe,
    "describe_data": lambda bench: bench.loading.facts,
    "costs": Bench.costs,
    "block": Bench.block,
    "compare": Bench.compare,
    "forget": Bench.forget,
    "save": Bench.save,
}


def _answer(bench: Bench, what: str, given: Plain) -> Plain:
    # Of all arguments configs alone are maps.
    given = {name: Config(v) if isinstance(v, dict) else v for name, v in given.items()}
    try:
        reply = {"answer": to_plain(REQUESTS[what](bench, **given))}
    except ConfigFailed as failed:
        reply = {"outcome": failed.outcome, "reason": str(failed), "graphs": failed.graphs}
    return reply | {"healthy": bench.healthy}


def _settle() -> None:
    """Leave what is there out of later collections: going through torch's modules takes 0.4 s."""
    gc.freeze()
    gc.enable()


def main() -> int:
    """Answer until the tuning process is gone."""
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)
    warnings.simplefilter("ignore")  # the user's own run shows them; a trial would repeat them
    # At exit, an Advice warns of what a script has not used; the user's last words are wanted.
    logging.getLogger("advisor").setLevel(logging.CRITICAL)
    atexit.register(gc.unfreeze)  # nanobind tells of all that is still there at the end
    # Pickle would name it where it writes what is compiled, and no script has such a module.
    sys.modules.pop("__mp_main__", None)
    bench: Bench | None = None
    send(pipe, {"ready": True})
    while True:
        try:
            message = receive(pipe)
        except EOFError:
            return 0
        what = message.pop("do")
        if what not in UNANSWERED:
            send(pipe, {"heard": True})
        try:
            if bench is None:
                bench, reply = load(from_plain(Job, message["job"])), {}
            else:
                reply = _answer(bench, what, message)
        except (TargetError, TargetFailed) as exc:
            reply = {"error": type(exc).__name__, "message": str(exc), "details": exc.details}
        if what not in UNANSWERED:
            send(pipe, reply)
