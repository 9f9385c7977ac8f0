"""Runs training scripts in forks of a process that has imported torch, which saves time."""

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
COMPARE_LIMIT_S = 60.0


def space_of(seen: ScriptFacts) -> Space:
    """Returns what may be tuned in a script on this CPU."""
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
            wrapped=seen.wrapped,
            sharded=seen.sharded,
            own=seen.own,
            kept=seen.kept,
        )
    )


class Scaled(torch.autograd.Function):
    """A view whose gradient is `by` times as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.by, None


class Looks:
    """A guide that keeps the script's facts and changes nothing. It fails if the script fails."""

    def saves_memory(self, device: str) -> tuple[str, ...]:
        return ()

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


class ScriptedGuide(Looks):
    """A guide that sends the given requests in turn. The last one stays in force.

    Attributes:
        results: one per finished request.
    """

    def __init__(self, requests: Callable[[Space], Iterator[BlockRequest]]) -> None:
        self._given, self.results = requests, list[BlockResult]()

    def begin(self, seen: ScriptFacts) -> BlockRequest:
        super().begin(seen)  # keeps the facts, which the requests may need
        self._requests = self._given(space_of(seen))
        return next(self._requests)

    def next(self, result: BlockResult) -> BlockRequest:
        self.results.append(result)
        return next(self._requests)


def alternate_configs(values: Mapping[str, Value], space: Space) -> Iterator[BlockRequest]:
    """Yields requests that alternate between the given values and the script's own config.

    Values that change no numbers are followed by a comparison of bf16 with fp32 instead.
    """
    own = space.default
    config = own.replace(**{name: v for name, v in values.items() if space.offers(name, v)})
    changed = BlockRequest(config=config, steps=2, own=own)
    yield changed
    if values.keys() <= set(knobs.INPUT_PIPELINE):
        compare = comparison(config.replace(precision="bf16"), own, TOLERANCE, COMPARE_LIMIT_S)
        yield BlockRequest(config=own, steps=1, compare=compare)
    else:
        yield from (BlockRequest(config=own, steps=2), changed, BlockRequest(config=own, steps=2))
    yield BlockRequest(config=config)


def left_behind() -> list[str]:
    """Returns the names of the pilot's hooks and patches that are still installed."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    gc.collect()  # what earlier tests left, which hooks weakly
    tables = {
        "forward pre-hooks": module._global_forward_pre_hooks,
        "forward hooks": module._global_forward_hooks,
        "their keywords": module._global_forward_hooks_with_kwargs,
        "optimizer hooks": optimizer._global_optimizer_post_hooks,
    }
    hooks = [name for name, table in tables.items() if table]
    dataloader = torch.utils.data.dataloader
    patched: tuple[Any, ...] = (
        dataloader._BaseDataLoaderIter.__next__,
        dataloader.DataLoader.__iter__,
        Tensor.backward,
        torch.autograd.backward,
    )
    # A wrapper has the name of the function that it wraps.
    return hooks + [one.__name__ for one in patched if hasattr(one, "__wrapped__")]


@dataclass(frozen=True)
class Variant:
    """One run of a script: its config values (None: no pilot), its arguments, and `saves`, the file
    to which it saves its weights ('' if that is its first argument)."""

    values: Mapping[str, Value] | None = None
    arguments: tuple[str, ...] = ()
    saves: str = ""


def train_variants(
    script: Path, folder: Path, *variants: Variant, libraries: tuple[str, ...] = ()
) -> list[tuple[Weights, ScriptFacts | None]]:
    """Returns the weights that a script saves, and the facts that the pilot saw, per variant."""
    assert forks.call(_train_variants, libraries, str(script), folder, variants).wait(240) == 0
    results = []
    for number in range(len(variants)):
        file = folder / f"{number}.seen"
        seen = msgpack.unpackb(file.read_bytes()) if file.exists() else None
        weights: Weights = torch.load(folder / f"{number}.pt")
        results.append((weights, seen and from_plain(ScriptFacts, seen)))
    return results


def _train_variants(
    libraries: Sequence[str], script: str, folder: Path, variants: Sequence[Variant]
) -> None:
    for library in libraries:
        importlib.import_module(library)
    gc.freeze()  # garbage collection in the forks skips what is frozen
    for number, one in enumerate(variants):
        out = str(folder / f"{number}.pt")
        process = get_context("fork").Process(target=_train, args=(script, out, one))
        process.start()
        process.join(120)
        assert process.exitcode == 0, (one, process.exitcode)


def _train(script: str, out: str, variant: Variant) -> None:
    os.chdir(Path(out).parent)
    torch.set_num_threads(1)
    guide = ScriptedGuide(partial(alternate_configs, variant.values or {}))
    pilot = None if variant.values is None else Pilot(guide, RecordedSteps())
    sys.argv = [script, *([] if variant.saves else [out]), *variant.arguments]
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
