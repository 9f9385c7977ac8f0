"""Ordinary scripts run in forks of a process that has imported torch: importing is most of them."""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgpack
import torch
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


class Ordered(Looks):
    """A guide that gives orders one after the other; the last one is to stay.

    Attributes:
        results: of the orders so far.
    """

    def __init__(self, orders: Callable[[Space], Iterator[BlockRequest]]) -> None:
        self._given, self.results = orders, list[BlockResult]()

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        self.seen, self._orders = seen, self._given(space_of(seen))
        return next(self._orders)

    def next(self, result: BlockResult) -> BlockRequest:
        self.results.append(result)
        return next(self._orders)


def there_and_back(values: Mapping[str, Value], space: Space) -> Iterator[BlockRequest]:
    """Two steps with some values, then two as the script is; and so on.

    Where values change no number bf16 is compared with fp32 in between, which is to leave nothing.
    """
    own = space.default
    config = own.replace(**{name: v for name, v in values.items() if space.offers(name, v)})
    there = BlockRequest(config=config, steps=2, own=own)
    yield there
    if values.keys() <= set(knobs.INPUT_PIPELINE):
        asked = comparison(config.replace(precision="bf16"), own, TOLERANCE, COMPARES_S)
        yield BlockRequest(config=own, steps=1, compare=asked)
    else:
        yield from (BlockRequest(config=own, steps=2), there, BlockRequest(config=own, steps=2))
    yield BlockRequest(config=config)


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
    """How a script is run: with these values or, None, by itself; with these arguments. `saves`:
    the file with its weights, '' where its first argument names one."""

    values: Mapping[str, Value] | None = None
    words: tuple[str, ...] = ()
    saves: str = ""


def trained(
    script: Path, folder: Path, *variants: Variant, libraries: tuple[str, ...] = ()
) -> list[tuple[Weights, ScriptFacts | None]]:
    """What a script saves under each, and what the pilot saw; libraries are imported once."""
    assert forks.call(_one_by_one, libraries, str(script), folder, variants).wait(240) == 0
    found = []
    for number in range(len(variants)):
        file = folder / f"{number}.seen"
        seen = msgpack.unpackb(file.read_bytes()) if file.exists() else None
        weights: Weights = torch.load(folder / f"{number}.pt")
        found.append((weights, seen and from_plain(ScriptFacts, seen)))
    return found


def _one_by_one(
    libraries: Sequence[str], script: str, folder: Path, variants: Sequence[Variant]
) -> None:
    for library in libraries:
        importlib.import_module(library)
    gc.freeze()  # no collection of a fork looks through it
    for number, one in enumerate(variants):
        out = str(folder / f"{number}.pt")
        process = get_context("fork").Process(target=_train, args=(script, out, one))
        process.start()
        process.join(120)
        assert process.exitcode == 0, (one, process.exitcode)


def _train(script: str, out: str, variant: Variant) -> None:
    os.chdir(Path(out).parent)
    torch.set_num_threads(1)
    guide = Ordered(partial(there_and_back, variant.values or {}))
    pilot = None if variant.values is None else Pilot(guide, RecordedSteps())
    sys.argv = [script, *([] if variant.saves else [out]), *variant.words]
    runpy.run_path(script, run_name="__main__")
    if variant.saves:
        Path(variant.saves).replace(out)
    if pilot is not None:
        pilot.release()
        assert not left_behind(), left_behind()
        for result in guide.results:
            assert (result.outcome, result.samples > 0) == ("ok", True), result.reason
            assert result.reason or result.steps == 2
        Path(out).with_suffix(".seen").write_bytes(msgpack.packb(to_plain(guide.seen)))
