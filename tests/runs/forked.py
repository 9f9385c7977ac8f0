"""Ordinary scripts run in forks of a process that has imported torch: importing is most of them."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import pickle
import runpy
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context, set_start_method
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch._dynamo  # what building an optimizer imports
import torch.utils.data
from torch import Tensor

from advisor.cache.codec import from_plain, to_plain
from advisor.cache.config import Config, Value
from advisor.tuners import knobs
from advisor.tuners.act.pilot.pilot import Pilot
from advisor.tuners.act.pilot.protocol import BlockRequest, BlockResult
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.knobs import SearchContext
from advisor.tuners.measure.run.recorded_steps import RecordedSteps
from advisor.tuners.measure.run.run import comparison
from advisor.tuners.search.space import Space
from tests import forks

Weights = dict[str, Tensor]

TOLERANCE = 0.02
COMPARES_S = 60.0
ROOT = Path(__file__).parents[2]

gc.freeze()  # no collection of a fork looks through what was imported before it
atexit.register(gc.unfreeze)  # nanobind tells of all that is still there at the end


class Called:
    """A function that is called in a fork of a process that has imported this module."""

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            pickle.dump((target, args), file)
        words = [sys.executable, "-c", CALL, file.name]
        self._fork = forks.Fork(words, env=os.environ, stdout=1, line=_line())
        self.pid = self._fork.pid
        self.kill = self._fork.kill

    def join(self, within_s: float) -> int:
        """How it ended."""
        return self._fork.wait(within_s)


CALL = """
import os, pickle, sys
with open(sys.argv[1], "rb") as file:
    target, args = pickle.load(file)
os.unlink(sys.argv[1])
target(*args)
"""
SERVE = f"""
import sys
import {__name__}
from tests import forks
forks.serve(int(sys.argv[1]))
"""


@functools.cache
def _line() -> socket.socket:
    """To a server that has imported this module, itself a fork of the one that has torch."""
    path = Path(tempfile.mkdtemp()) / "forked"
    line = socket.socket(socket.AF_UNIX)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        line.connect(str(path))
        number = listening.fileno()
        words = [sys.executable, "-c", SERVE, str(number)]
        forks.Fork(words, env=os.environ, cwd=ROOT, stdout=1, pass_fds=[number])
    shutil.rmtree(path.parent)
    return line


def space_of(seen: ScriptFacts) -> Space:
    """What may be tuned in a script on this CPU."""
    return Space.of(
        SearchContext(
            device="cpu",
            cpu_bf16=True,
            dimensions=len(seen.shape),
            convolves=seen.convolves,
            repeats=seen.repeats,
            batches=(seen.shape[0],),
            use="pilot",
            workers=seen.workers,
            own=seen.own,
            kept=seen.kept,
        )
    )


class Looks:
    """A guide that keeps what was seen, leaves the script alone, and fails with it."""

    def takes_over(self) -> bool:
        return True

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        self.seen = seen
        return BlockRequest(config=Config())

    def next(self, result: BlockResult) -> BlockRequest:
        raise AssertionError

    def failed(self, exc: BaseException) -> None:
        raise AssertionError("the script failed") from exc

    config_dropped = failed


@dataclass
class There(Looks):
    """A guide that has two steps made with some values, then two as the script is; and so on.

    Where values change no number bf16 is compared with fp32 in between, which is to leave nothing.
    """

    values: Mapping[str, Value]

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        self.seen = seen
        space = space_of(seen)
        own = space.default
        offered = {name: v for name, v in self.values.items() if space.offers(name, v)}
        there = BlockRequest(config=own.replace(**offered), steps=2, own=own)
        between = [BlockRequest(config=own, steps=2), there, BlockRequest(config=own, steps=2)]
        if self.values.keys() <= set(knobs.INPUT_PIPELINE):
            half = there.config.replace(precision="bf16")
            asked = comparison(half, own, TOLERANCE, COMPARES_S)
            between = [BlockRequest(config=own, steps=1, compare=asked)]
        self.orders = iter([*between, BlockRequest(config=there.config)])
        return there

    def next(self, result: BlockResult) -> BlockRequest:
        assert result.outcome == "ok", result.reason
        assert result.reason or result.steps == 2
        assert result.samples > 0
        return next(self.orders)


def _train(script: str, out: str, values: dict[str, Value] | None, *words: str) -> None:
    os.chdir(Path(out).parent)
    torch.set_num_threads(1)
    set_start_method("fork", force=True)  # as in a process that no server of forks has started
    guide = There(Config(values or {}))
    pilot = None if values is None else Pilot(guide, RecordedSteps())
    sys.argv = [script, out, *words]
    runpy.run_path(script, run_name="__main__")
    if pilot is not None:
        pilot.release()
        assert not left_behind(), left_behind()
        _seen_beside(out).write_bytes(msgpack.packb(to_plain(guide.seen)))


def _seen_beside(out: str) -> Path:
    return Path(out).with_suffix(".seen")


def left_behind() -> list[str]:
    """What the pilot has hooked or patched and not put back."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    tables = {
        "forward pre-hooks": module._global_forward_pre_hooks,
        "forward hooks": module._global_forward_hooks,
        "their keywords": module._global_forward_hooks_with_kwargs,
        "optimizer hooks": optimizer._global_optimizer_post_hooks,
    }
    found = [name for name, table in tables.items() if table]
    there = torch.utils.data.dataloader
    patched: tuple[Any, ...] = (
        there._BaseDataLoaderIter.__next__,
        there.DataLoader.__iter__,
        Tensor.backward,
        torch.autograd.backward,
    )
    # A wrapper bears the name of what it wraps.
    return found + [one.__name__ for one in patched if hasattr(one, "__wrapped__")]


@dataclass(frozen=True)
class Variant:
    """How a script is run: with these values or, None, by itself; with these arguments."""

    values: Mapping[str, Value] | None = None
    words: tuple[str, ...] = ()


def _one_by_one(library: str, script: str, folder: str, variants: Sequence[Variant]) -> None:
    importlib.import_module(library)
    gc.freeze()
    for number, one in enumerate(variants):
        out = str(Path(folder) / f"{number}.pt")
        values = None if one.values is None else dict(one.values)
        process = get_context("fork").Process(target=_train, args=(script, out, values, *one.words))
        process.start()
        process.join(120)
        assert process.exitcode == 0, (one, process.exitcode)


def variously(
    script: Path, library: str, folder: Path, variants: Sequence[Variant]
) -> list[tuple[Weights, ScriptFacts | None]]:
    """What a script saves under each, and what the pilot saw; its library is imported once."""
    args = (library, str(script), str(folder), tuple(variants))
    assert Called(_one_by_one, *args).join(240) == 0
    found: list[tuple[Weights, ScriptFacts | None]] = []
    for number in range(len(variants)):
        out = folder / f"{number}.pt"
        file = _seen_beside(str(out))
        seen = (
            from_plain(ScriptFacts, msgpack.unpackb(file.read_bytes())) if file.exists() else None
        )
        found.append((torch.load(out), seen))
    return found


def trained(script: Path, folder: Path, values: Mapping[str, Value] | None = None) -> Weights:
    """What a script saves: by itself, or under a pilot that switches to these values and back."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{script.stem}.pt"
    given = None if values is None else dict(values)
    assert Called(_train, str(script), str(out), given).join(120) == 0
    weights: Weights = torch.load(out)
    return weights
