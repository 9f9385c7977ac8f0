"""Writes the figures of an advised run into the experiment tracker that the script has open."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from advisor.cache.config import Config
from advisor.cache.record import PILOT, Record
from advisor.cost import mfu
from advisor.resolve.lookups import tell
from advisor.tuners.knobs import described

TIMED = 50  # steps that are timed for the figures, after as many others under the advice
TRACKER_WAIT_S = 1.0  # seconds that the script waits; a slower tracker goes on in its thread
Figures = Mapping[str, str | float]
SINKS: list[Callable[[Figures], object]] = []  # get the figures of this process's run, once


def expect(tracker: str) -> None:
    """Have the run's figures written into a tracker. A line says if the run ends without any."""

    def report() -> None:
        if SINKS:
            tell(f"--log {tracker}: the run ended before its speed was known; nothing is written")

    SINKS.append(lambda found: write(found, tracker))
    atexit.register(report)


def figures(config: Config, own: Config, rate: float, record: Record | None) -> Figures:
    """`rate`: samples/s of a run under a config of a record; `own`: the script's own config."""
    found: dict[str, str | float] = {"advisor/samples_per_s": rate}
    found["advisor/config"] = described(config, own, nothing="unmodified")
    if record is not None:
        chosen, found["advisor/record"] = record.winner(PILOT), record.id
        if chosen.config.changed(record.baseline.config) == config.changed(own):
            found["advisor/speedup"] = chosen.speedup
        found |= {"advisor/mfu": share} if (share := mfu(record, config, rate)) else {}
    return found


def _open_run(tracker: str) -> tuple[Callable[..., object], Callable[..., object]] | None:
    """What writes a text, and what writes a number, by its name into a tracker's open run; None
    without one. Only trackers that the script has imported are looked at."""
    module: Any = sys.modules.get(tracker)
    if tracker == "wandb" and module and (run := module.run):
        # Not `log`, which would count as one of the script's steps.
        configure = functools.partial(run.config.update, allow_val_change=True)
        return lambda name, text: configure({name: text}), run.summary.__setitem__
    if tracker == "mlflow" and module and (run := module.active_run()):
        client, id = module.MlflowClient(), run.info.run_id  # a resumed run's parameters are fixed
        return functools.partial(client.set_tag, id), functools.partial(client.log_metric, id)
    writers = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
    kinds = tuple(sys.modules[one].SummaryWriter for one in writers if one in sys.modules)
    if tracker == "tensorboard" and kinds:
        made = (one for one in gc.get_objects() if issubclass(type(one), kinds))
        opened = [one for one in made if one.all_writers]  # a closed one would begin another file
        for one in sorted(opened, key=lambda one: str(one.file_writer.get_logdir())):
            return one.add_text, one.add_scalar
    return None


def write(found: Figures, *trackers: str) -> None:
    """Write figures into the open runs of these trackers. A line says if one fails, or if a single
    one has no open run."""

    def write_one(tracker: str, puts: tuple[Callable[..., object], ...]) -> None:
        try:
            for name, value in found.items():
                puts[not isinstance(value, str)](name, value)
        except Exception as exc:  # of any kind: a run is worth more than its tracker
            tell(f"--log {tracker}: {type(exc).__name__}: {exc}; the run goes on")

    for tracker in trackers:
        puts = None
        with contextlib.suppress(Exception):
            puts = _open_run(tracker)
        if puts is not None:
            thread = threading.Thread(target=write_one, args=[tracker, puts], daemon=True)
            thread.start()
            thread.join(TRACKER_WAIT_S)
        elif not trackers[1:]:
            there = tracker in sys.modules or importlib.util.find_spec(tracker) is not None
            why = "the script has no open run" if there else "not installed where the script runs"
            tell(f"--log {tracker}: {why}; nothing is written")
