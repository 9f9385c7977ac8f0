"""Tuning on a CPU beside other jobs: the record is shown as doubtful and not advised."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.cache.key import Key
from advisor.cache.record import Choice, Record
from advisor.report import sections
from advisor.report.sections import report
from advisor.resolve.answer import answer, doubtful
from advisor.tuners.decisions import LOOKS
from advisor.tuners.search.race import choice_of, choose
from advisor.tuners.search.ratio import unsteady
from advisor.tuners.search.space import Space
from tests.builders import advised, measured
from tests.cache import examples
from tests.face.test_answer import request

SPACE = Space({"channels_last": (False, True), "threads": (2, 1), "batch_size": (64,)})
OWN = SPACE.default
FAST = OWN.replace(channels_last=True)
STEADY = [1000.0, 1010.0, 990.0, 1005.0, 995.0, 1000.0, 1002.0, 998.0]
BUSY = [1000.0, 1010.0, 640.0, 630.0, 620.0, 650.0, 990.0, 1005.0]
"""Another job runs during four turns."""


def raced(own: list[float], gain: float = 1.5) -> tuple[Choice, Choice]:
    """(The baseline, a config that is `gain` times as fast in every turn, within about 1%)."""
    draw = random.Random(1)
    turns = [gain * one * math.exp(draw.gauss(0, 0.01)) for one in own]
    return choice_of(OWN, own, own, {}), choice_of(FAST, turns, own, {})


def made(own: list[float], gain: float = 1.5, key: Key = examples.KEY) -> Record:
    """A record as stored by an earlier version: the config wins even on a busy host."""
    baseline, fast = raced(own, gain)
    return replace(
        examples.record(key),
        baseline=baseline,
        winners=examples.winners(baseline, fast),
        raced=(baseline, fast),
        input=Config(),
        trials=(),
    )


@pytest.mark.parametrize(
    ("turns", "interval", "is_unsteady"),
    [
        (STEADY, 1.01, False),
        (BUSY, 1.1, True),
        (BUSY, 1.7, False),
        ([1000.0, 400.0, 1000.0], math.inf, True),
        ([100.0, *STEADY], 1.01, False),
        ([], 1.0, False),
    ],
    ids=["steady", "more than the interval", "less", "more than any", "one slow turn", "none"],
)
def test_a_baseline_is_unsteady_if_it_moves_more_than_the_interval(
    turns: list[float], interval: float, is_unsteady: bool
) -> None:
    assert unsteady(turns, interval) is is_unsteady


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
def test_noise_of_single_turns_is_not_unsteady(noise: float) -> None:
    """More noise also gives a wider interval."""
    draw = random.Random(7)

    def turns(count: int) -> list[float]:
        return [1000 * math.exp(draw.gauss(0, noise)) for _ in range(count)]

    verdicts = []
    for _ in range(200):
        own, ours = turns(LOOKS[2]), turns(LOOKS[2])
        choice = choice_of(FAST, [3 * one for one in ours], own, {})
        verdicts.append(unsteady(own, choice.speedup_high / choice.speedup_low))
    assert sum(verdicts) < (20 if noise < 0.3 else 100)  # a change of 2x always counts


@pytest.mark.parametrize(
    ("own", "threads", "winner"), [(STEADY, True, FAST), (BUSY, True, OWN), (BUSY, False, FAST)]
)
def test_a_doubtful_config_is_no_winner(own: list[float], threads: bool, winner: Config) -> None:
    """A GPU has no knob `threads`. Load slows all of its configs equally."""
    space = SPACE if threads else Space({"channels_last": (False, True), "batch_size": (64,)})
    knobs = ["channels_last", "batch_size", *["threads"] * threads]
    baseline, fast = raced(own)
    rates = {OWN.only(*knobs): list(baseline.rounds), FAST.only(*knobs): list(fast.rounds)}
    assert advised(choose(space, rates, {}), "loop") == winner.only(*knobs)


def test_a_doubtful_record_is_not_advised_and_says_so() -> None:
    sound, doubted = made(STEADY), made(BUSY)
    assert (doubtful(sound), doubtful(doubted)) == (False, True)
    assert answer(sound, request(batch=64)).config == FAST
    served = answer(doubted, request(batch=64))
    assert served.config == OWN and "the host was too busy to tell what gains" in served.reason
    assert "Doubtful" not in "\n".join(sections.remarks(sound))
    assert "Doubtful: the host was busy." in "\n".join(sections.remarks(doubted))
    assert report(doubted).headline.startswith("Doubtful, and not advised")
    assert report(sound).headline.startswith("1.5")


def test_a_race_without_a_winner_is_inconclusive_on_a_busy_host() -> None:
    doubted, quiet = made(BUSY), made(STEADY)
    tried = (measured(OWN, 100.0), measured(FAST, 150.0))  # but not raced
    noisy = replace(quiet.raced[1], speedup=4.8, speedup_low=1.1, speedup_high=21.0)
    for one, fast, remark, speedup, state in (
        (doubted, doubted.raced[1], "Could not tell what", "?", "doubtful: the host was busy"),
        (quiet, noisy, "Could not tell what gains", "?", "could not tell"),
        (quiet, made(STEADY, 1.0).raced[1], "Nothing measured clearly gains", "1.00x", "fresh"),
        (replace(quiet, trials=tried), quiet.baseline, "Could not tell", "?", "could not tell"),
    ):
        own = one.baseline
        nothing = replace(one, raced=(own, fast), winners=examples.winners(own, own))
        assert sections.nothing_to_gain(nothing).startswith(remark)
        stored: Any = SimpleNamespace(record=nothing, trusted=True)
        (row,) = sections.listing([(stored, ())]).rows
        assert row.cells[5] == speedup and str(row.cells[7]).startswith(state)
