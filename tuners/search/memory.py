"""How much memory a config will need, from what others took."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.cache.config import Config
from advisor.cache.record import Trial

LEAST = ("precision", "compile", "step_graph", "channels_last")
"""Knobs that change what is kept for the backward pass; others hardly matter."""


def needed(trials: Sequence[Trial], config: Config) -> float:
    """Bytes that a config needs at least; infinite where the same or less has run out of memory.

    Peak bytes grow linearly with the batch: what is kept for the backward pass, over weights and
    optimizer state. A line through the smallest and the largest batch of configs that differ in
    nothing that matters to memory; through one batch alone only what scales down is known, and
    nothing is ruled out. 0 where nothing is known.
    """
    batch = int(config["batch_size"] or 0)
    alike = [t for t in trials if t.stage == "compute" and _same(t.config, config)]
    failed = [t for t in alike if t.measurement.outcome == "out_of_memory"]
    if any(int(t.config["batch_size"] or 0) <= batch for t in failed):
        return float("inf")
    peaks: dict[int, int] = {}
    for trial in alike:
        if trial.measurement.ok and trial.measurement.peak_bytes > 0:
            size = int(trial.config["batch_size"] or 0)
            peaks[size] = min(trial.measurement.peak_bytes, peaks.get(size, 2**63))
    if len(peaks) < 2:
        return 0.0
    low, high = min(peaks), max(peaks)
    slope = max(0.0, (peaks[high] - peaks[low]) / (high - low))
    return peaks[low] + slope * (batch - low)


def _same(ours: Config, theirs: Config) -> bool:
    return all(ours.get(name) == theirs.get(name) for name in LEAST)
