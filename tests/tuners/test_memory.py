"""What a config will need of memory, from what others took."""

from __future__ import annotations

import math

from advisor.cache.config import Config
from advisor.cache.record import Measurement, Trial
from advisor.tuners.search.memory import needed


def trial(batch: int, peak: int | None, **knobs: str | bool) -> Trial:
    ok = peak is not None
    return Trial(
        number=0,
        config=Config(knobs, batch_size=batch),
        measurement=Measurement(
            outcome="ok" if ok else "out_of_memory", samples_per_s=float(ok), peak_bytes=peak or 0
        ),
        stage="compute",
        origin="guess",
        seconds=1.0,
    )


def test_it_grows_linearly_with_the_batch() -> None:
    trials = [trial(8, 3_000, precision="bf16"), trial(32, 9_000, precision="bf16")]
    assert needed(trials, Config(precision="bf16", batch_size=64)) == 17_000
    # The optimizer's kernel takes no memory worth a word; another number format does.
    assert needed(trials, Config(precision="bf16", fused_optimizer=True, batch_size=64)) == 17_000
    assert needed(trials, Config(precision="fp16", batch_size=64)) == 0


def test_one_batch_rules_nothing_out() -> None:
    assert needed([trial(8, 3_000)], Config(batch_size=64)) == 0
    assert needed([], Config(batch_size=64)) == 0


def test_beyond_what_failed_all_fails() -> None:
    trials = [trial(64, None, fused_optimizer=False)]
    assert needed(trials, Config(batch_size=64, fused_optimizer=True)) == math.inf
    assert needed(trials, Config(batch_size=128)) == math.inf
    assert needed(trials, Config(batch_size=32)) == 0
