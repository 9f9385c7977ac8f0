"""How much memory a config will need, from what others took."""

from __future__ import annotations

import math
from collections.abc import Sequence

from advisor.cache.config import Config, Value
from advisor.cache.record import Trial
from advisor.tuners.knobs import KNOBS


def needed(trials: Sequence[Trial], config: Config) -> float:
    """Bytes that a config needs at least; infinite where the same or less has run out of memory.

    Peak bytes grow linearly with the batch: what is kept for the backward pass, over weights and
    optimizer state. A line through the smallest and the largest batch of configs that differ in
    nothing that matters to memory; through one batch alone only what scales down is known, and
    nothing is ruled out. 0 where nothing is known.
    """
    # What decides what is kept for the backward pass; other knobs hardly matter.
    names = [knob.name for knob in KNOBS if knob.memory and knob.name in config]
    kept = _values(config, names)
    alike = [t for t in trials if t.stage == "compute" and _values(t.config, names) == kept]
    failed = [t for t in alike if t.measurement.outcome == "out_of_memory"]
    if any(t.config.batch <= config.batch for t in failed):
        return math.inf
    peaks: dict[int, int] = {}
    for trial in alike:
        peak, size = trial.measurement.peak_bytes, trial.config.batch
        if trial.measurement.ok and peak > 0:
            peaks[size] = min(peak, peaks.get(size, peak))
    if len(peaks) < 2:
        return 0.0
    low, high = min(peaks), max(peaks)
    slope = max(0.0, (peaks[high] - peaks[low]) / (high - low))
    return peaks[low] + slope * (config.batch - low)


def _values(config: Config, names: Sequence[str]) -> list[tuple[type, Value]]:
    return [(type(value), value) for value in map(config.get, names)]
