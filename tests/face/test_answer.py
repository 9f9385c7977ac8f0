"""Which config of a record answers what is asked, without a store or a process."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.cache.match import Query
from advisor.cache.record import Choice, Measurement, Record, Trial, Winner
from advisor.errors import NoRecord
from advisor.finding.answer import (
    Answer,
    Limits,
    akin,
    answer,
    break_even,
    carried,
    is_sound,
    unverified,
)
from advisor.finding.request import Request
from tests.cache import examples

GIB = 2**30
BASE = examples.DEFAULT.replace(compile="none")
TF32 = BASE.replace(precision="tf32")
BF16 = BASE.replace(precision="bf16")
LAID = TF32.replace(channels_last=True)
ONLY_LAID = BASE.replace(channels_last=True)
COMPILED = BASE.replace(compile="default")


def request(**given: Any) -> Request:
    """What a script asks, that captures nothing and leaves the batch to the record."""
    own = {"batch": None, "free": False, "use": "loop", "steps": 0, "seconds": 0.0}
    asked = {name: given.pop(name) for name in list(given) if name in own}
    return Request(
        target="model.py:Net",
        given={"mode": "train", **given},
        device="cuda:0",
        **{**own, **asked},  # type: ignore[arg-type]
    )


def choice(config: Config, rate: float, first_step_s: float = 0.0, peak_bytes: int = GIB) -> Choice:
    made = examples.choice(config, rate, rate / 1000.0)
    return replace(made, first_step_s=first_step_s, peak_bytes=peak_bytes)


def trial(
    config: Config,
    rate: float,
    first_step_s: float = 1.0,
    *,
    stage: str = "compute",
    origin: str = "guess",
    peak_bytes: int = GIB,
) -> Trial:
    """Measured once, to a percent."""
    return Trial(
        number=0,
        config=config,
        measurement=Measurement(
            outcome="ok",
            samples_per_s=rate,
            low=0.99 * rate,
            high=1.01 * rate,
            first_step_s=first_step_s,
            peak_bytes=peak_bytes,
        ),
        stage=stage,
        origin=origin,
        seconds=1.0,
    )


def failed(one: Trial, outcome: str = "wrong", reason: str = "the loss differs") -> Trial:
    return replace(one, measurement=Measurement(outcome=outcome, reason=reason))


def verified(config: Config) -> Trial:
    return trial(config, 0.0, 0.0, stage="numerics")


def record(
    *trials: Trial, flags: Choice | None = None, loop: Choice | None = None, **more: Any
) -> Record:
    """One whose default trains on 1000 samples a second at a batch of 64; TF32 and LAID train like
    fp32."""
    default = more.pop("baseline", choice(BASE, 1000.0, 2.0))
    free = more.pop("free", None)
    capture = more.pop("capture", None)
    loop = loop or default
    named = [("flags", flags or default), ("pilot", flags or default)]
    named += [("loop", loop), ("capture", capture or loop)]
    winners = [Winner(use=use, free=False, choice=one) for use, one in named]
    if free is not None:
        winners += [Winner(use=use, free=True, choice=free) for use in ("loop", "capture")]
    made = examples.record(trials=0)
    checked = (verified(TF32), verified(LAID), *trials)
    return replace(made, baseline=default, winners=tuple(winners), trials=checked, **more)


def for_a_job(made: Record, **length: Any) -> Record:
    return replace(made, provenance=replace(made.provenance, **length))


def of_task(made: Record, **changes: Any) -> Record:
    return replace(made, key=replace(made.key, task=replace(made.key.task, **changes)))


PINNED = Config(pin_memory=True)


class TestRaced:
    def test_the_winner_with_the_input_knobs_and_what_other_uses_would_give(self) -> None:
        made = record(verified(BF16), flags=choice(TF32, 1250.0), loop=choice(BF16, 1500.0))

        assert answer(made, request()) == Answer(
            config=Config(BF16 | PINNED),
            reason="1.50x torch's default at batch 64",
            gains={"flags": 1.25, "pilot": 1.25, "loop": 1.5, "capture": 1.5},
            flags=TF32,
        )

    def test_the_default_is_called_so(self) -> None:
        found = answer(record(raced=(choice(TF32, 1001.0),)), request())
        assert found.config == Config(BASE | PINNED)
        assert found.reason == "torch's default: nothing measured is clearly faster"
        assert found.flags == BASE

    def test_nobody_is_told_that_it_won_where_nothing_was_raced(self) -> None:
        alone = "torch's default: nothing else was measured"
        for asked in ({}, {"steps": 100}, {"seconds": 60.0}, {"steps": 100, "free": True}):
            assert answer(record(), request(**asked)).reason == alone

    def test_a_use_gets_its_own_winner(self) -> None:
        made = record(
            verified(BF16),
            flags=choice(TF32, 1250.0),
            loop=choice(BF16, 1500.0),
            capture=choice(BASE.replace(step_graph=True), 2000.0),
        )
        assert answer(made, request(use="flags")).config == Config(TF32 | PINNED)
        assert answer(made, request(use="pilot")).config == Config(TF32 | PINNED)
        assert answer(made, request(use="loop")).config == Config(BF16 | PINNED)
        captured = answer(made, request(use="capture"))
        assert captured.config == Config(BASE.replace(step_graph=True) | PINNED)
        assert captured.gains == {"flags": 1.25, "pilot": 1.25, "loop": 1.5, "capture": 2.0}

    def test_the_job_that_it_was_chosen_for_is_named(self) -> None:
        made = record(loop=choice(TF32, 1500.0))
        said = "1.50x torch's default at batch 64 in the steady state, chosen for a job of "
        assert answer(for_a_job(made, steps=900), request()).reason == said + "900 steps"
        timed = for_a_job(made, duration_s=3600.0)
        assert answer(timed, request()).reason == said + "3600 s"

    def test_what_is_not_permitted_is_no_gain_either(self) -> None:
        made = record(
            trial(BASE, 1000.0), flags=choice(TF32, 1250.0), loop=choice(LAID, 1500.0, 2.0, 3 * GIB)
        )
        # A winner for more than the script's own use is named whatever it takes.
        found = answer(made, request(use="flags", max_memory=2 * GIB))
        assert found.config == Config(TF32 | PINNED)
        assert found.gains == {"flags": 1.25, "pilot": 1.25, "loop": 1.5, "capture": 1.5}

        made = record(loop=choice(LAID, 1500.0), flags=choice(TF32, 1250.0, 2.0, 3 * GIB))
        found = answer(made, request(max_memory=2 * GIB))
        assert found.gains == {"loop": 1.5, "capture": 1.5}
        assert found.flags == BASE

    def test_with_the_batch_free(self) -> None:
        made = record(trial(BASE.at(128), 1000.0), free=choice(TF32.at(128), 1600.0))
        found = answer(made, request(free=True))
        assert found.config == Config(TF32.at(128) | PINNED)
        assert found.reason == "1.60x torch's default at batch 64"
        assert found.gains["loop"] == 1.6
        assert answer(made, request()).config == Config(BASE | PINNED)


class TestFromTrials:
    """Where the race's winner is not what is asked, each measured once."""

    def test_flags_that_were_raced_serve_a_narrower_permission(self) -> None:
        made = record(
            trial(BASE, 1000.0),
            trial(TF32, 1250.0),
            flags=choice(TF32, 1250.0),
            loop=choice(LAID, 1500.0, 2.0, 3 * GIB),
        )
        found = answer(made, request(max_memory=2 * GIB))
        assert (found.flags, found.gains["flags"]) == (TF32, 1.25)

    def test_another_batch(self) -> None:
        made = record(
            trial(BASE.at(32), 800.0),
            trial(TF32.at(32), 1000.0),
            trial(LAID.at(32), 1200.0),
            trial(LAID, 9000.0),
        )
        found = answer(made, request(batch=32))
        assert found == Answer(
            config=Config(LAID.at(32) | PINNED),
            reason="1.50x torch's default at batch 32, each measured once",
            gains={"loop": 1.5},
            flags=BASE.at(32),
        )

    def test_only_what_is_permitted(self) -> None:
        trials = (
            trial(BASE, 1000.0),
            trial(TF32, 1200.0),
            trial(LAID, 1400.0, peak_bytes=3 * GIB),
        )
        made = record(*trials, loop=choice(LAID, 1500.0, peak_bytes=3 * GIB))
        within = answer(made, request(max_memory=2 * GIB))
        assert within.config == Config(TF32 | PINNED)
        assert within.reason == "1.20x torch's default at batch 64, each measured once"
        default = answer(made, request(max_memory=2 * GIB, precisions=("default",)))
        assert default.reason == (
            "torch's default: nothing measured beats it at batch 64 within 2 GiB"
        )
        # A peak of just what is permitted is within it.
        assert answer(made, request(max_memory=3 * GIB)).config == Config(LAID | PINNED)
        assert answer(made, request(precisions=("default",))).config == Config(BASE | PINNED)

    @pytest.mark.parametrize(
        ("rate", "counts"),
        [(1.02 * 1.03 * 1000.0, False), (1.06 * 1000.0, True), (1.049 * 1000.0, False)],
    )
    def test_noise_is_no_gain(self, rate: float, counts: bool) -> None:
        """The low end has to beat the default's high end by 3%."""
        default = trial(BASE.at(32), 1000.0)
        exact = replace(default.measurement, low=1000.0, high=1000.0)
        fast = trial(TF32.at(32), rate)
        fast = replace(fast, measurement=replace(fast.measurement, low=rate * 0.98))
        made = record(replace(default, measurement=exact), fast)

        found = answer(made, request(batch=32))
        assert (found.config == Config(TF32.at(32) | PINNED)) is counts
        if not counts:
            assert found.reason == "torch's default: nothing measured beats it at batch 32"
            assert not found.gains

    def test_just_noise_is_no_gain(self) -> None:
        default = trial(BASE.at(32), 1000.0)
        exact = replace(default.measurement, low=1000.0, high=1000.0)
        fast = trial(TF32.at(32), 1040.0)
        fast = replace(fast, measurement=replace(fast.measurement, low=1.03 * 1000.0))
        made = record(replace(default, measurement=exact), fast)
        assert answer(made, request(batch=32)).config == Config(BASE.at(32) | PINNED)

    def test_what_was_not_held_against_fp32_is_not_served(self) -> None:
        trials = (trial(BASE.at(32), 800.0), trial(COMPILED.at(32), 1600.0))
        assert answer(record(*trials), request(batch=32)).config == Config(BASE.at(32) | PINNED)
        wrong = failed(verified(COMPILED))
        made = record(*trials, wrong)
        assert answer(made, request(batch=32)).config == Config(BASE.at(32) | PINNED)
        # The comparison is of the knobs, at whatever batch.
        made = record(*trials, verified(COMPILED))
        found = answer(made, request(batch=32))
        assert found.config == Config(COMPILED.at(32) | PINNED)
        assert found.reason == "2.00x torch's default at batch 32, each measured once"

    @pytest.mark.parametrize(
        "odd",
        [
            trial(LAID.at(32), 9000.0, stage="input"),
            trial(LAID.at(32), 9000.0, origin="reference"),
            failed(trial(LAID.at(32), 9000.0), "out_of_memory", "out of memory"),
            trial(LAID.at(16), 9000.0),
            trial(BASE.at(32).replace(step_graph=True), 9000.0),
        ],
    )
    def test_what_does_not_count(self, odd: Trial) -> None:
        made = record(trial(BASE.at(32), 800.0), trial(TF32.at(32), 1000.0), odd)
        assert answer(made, request(batch=32)).config == Config(TF32.at(32) | PINNED)

    @pytest.mark.parametrize(
        "trials",
        [
            (),
            (trial(TF32.at(32), 1000.0), trial(TF32.at(16), 1000.0)),
            (failed(trial(BASE.at(32), 0.0)), trial(TF32.at(32), 1000.0)),
        ],
    )
    def test_without_the_default_beside_it_there_is_none(self, trials: tuple[Trial, ...]) -> None:
        held = record(*trials)
        with pytest.raises(NoRecord) as refused:
            answer(held, request(batch=32))
        assert str(refused.value) == (
            "model.py:Net was not measured at batch 32 beside torch's default (batches at which "
            f"that was: {held.batch})"
        )

    def test_what_was_raced_counts_as_the_race_has_it(self) -> None:
        """On a busy host a trial said 18 times what the race then said 2.5 times."""
        held = examples.record()
        tf32 = held.baseline.config.replace(precision="tf32")
        raced = examples.choice(tf32, 5000.0, 2.5)
        once = (trial(held.baseline.config, 2000.0), trial(tf32, 36_000.0), verified(tf32))
        held = dataclasses.replace(held, raced=(raced,), trials=once)
        said = answer(held, request(precisions=("default", "tf32")))
        assert said.config.precision == "tf32"
        assert said.reason.startswith("2.50x torch's default at batch 64, raced")

    def test_a_batch_of_its_own_is_not_served_the_winner_of_another(self) -> None:
        made = record(trial(BASE.at(32), 800.0), loop=choice(TF32, 3000.0))
        assert answer(made, request(batch=32)).config == Config(BASE.at(32) | PINNED)


class TestOverAJob:
    """1000 samples a second are 0.064 s a step; the default's first one takes 2 s."""

    def compiled(self, first_step_s: float = 32.0, **more: Any) -> Record:
        return record(
            trial(BASE, 1000.0, 2.0),
            trial(COMPILED, 2000.0, first_step_s),
            verified(COMPILED),
            loop=choice(COMPILED, 2000.0, first_step_s),
            **more,
        )

    def test_a_long_one_pays_for_compilation(self) -> None:
        found = answer(self.compiled(), request(steps=100_001))
        # 2 + 6400 s against 32 + 3200 s.
        assert found == Answer(
            config=Config(COMPILED | PINNED),
            reason="1.98x torch's default over 100001 steps at batch 64, 32 s of first step "
            "counted (as measured; raced)",
            gains={"loop": pytest.approx(6402 / 3232)},
            flags=BASE,
        )

    def test_a_short_one_does_not(self) -> None:
        found = answer(self.compiled(), request(steps=100))
        assert found == Answer(
            config=Config(BASE | PINNED),
            reason="torch's default: over 100 steps at batch 64 nothing pays",
        )

    @pytest.mark.parametrize(("steps", "pays"), [(940, False), (980, True)])
    def test_a_percent_at_least(self, steps: int, pays: bool) -> None:
        """From step 939 on it takes less time, and from step 960 or so a percent less."""
        found = answer(self.compiled(), request(steps=steps))
        assert (found.config == Config(COMPILED | PINNED)) is pays

    def test_by_the_clock(self) -> None:
        found = answer(self.compiled(), request(seconds=1000.0))
        assert found.config == Config(COMPILED | PINNED)
        assert "over 1000 s at batch 64" in found.reason
        short = answer(self.compiled(), request(seconds=20.0))
        assert short.reason == "torch's default: over 20 s at batch 64 nothing pays"

    def test_a_job_in_which_the_default_takes_no_step(self) -> None:
        default = choice(BASE, 1000.0, 30.0)
        made = record(flags=default, loop=choice(TF32, 2000.0, 1.0), baseline=default)
        assert answer(made, request(seconds=20.0)).gains == {"loop": float("inf")}

    def test_measured_once(self) -> None:
        made = record(
            trial(BASE, 1000.0, 2.0),
            trial(BASE.at(32), 900.0, 2.0),
            trial(LAID.at(32), 1800.0, 3.0),
        )
        found = answer(made, request(batch=32, steps=100_000))
        assert found.config == Config(LAID.at(32) | PINNED)
        assert found.reason.endswith("(as the slowest one seen; each measured once)")
        assert found.flags == BASE.at(32)

    def test_only_what_is_permitted(self) -> None:
        found = answer(self.compiled(), request(steps=100_001, compile=False))
        assert found.config == Config(BASE | PINNED)

    def test_free(self) -> None:
        made = self.compiled(free=choice(COMPILED.at(128), 4000.0, 33.0))
        made = replace(made, trials=(*made.trials, trial(BASE.at(128), 1000.0, 2.0)))
        found = answer(made, request(steps=100_001, free=True))
        assert found.config == Config(COMPILED.at(128) | PINNED)
        assert "at batch 128" in found.reason
        assert answer(made, request(steps=100_001)).config == Config(COMPILED | PINNED)

    def test_where_first_steps_are_not_known(self) -> None:
        made = record(verified(BF16), loop=choice(BF16, 1500.0))
        made = replace(made, baseline=choice(BASE, 1000.0, 0.0))
        winners = tuple(
            replace(one, choice=replace(one.choice, first_step_s=0.0)) for one in made.winners
        )
        found = answer(replace(made, winners=winners), request(steps=100))
        assert found.config == Config(BF16 | PINNED)
        assert found.reason == (
            "1.50x torch's default at batch 64; its first steps are not known, so the job's "
            "length is not counted"
        )

    def test_a_winner_that_was_not_verified_is_served_and_said(self) -> None:
        made = record(
            trial(BASE, 1000.0, 2.0),
            trial(COMPILED, 2000.0, 3.0),
            trial(BF16, 9000.0, 3.0),
            loop=choice(COMPILED, 2000.0, 3.0),
        )
        found = answer(made, request(steps=100_000))
        assert found.config == Config(COMPILED | PINNED)
        assert found.reason.endswith(found.doubt)
        assert found.doubt == "; not verified against fp32: there was no time"

    def test_what_nobody_may_be_served_is_not_counted(self) -> None:
        made = record(
            trial(BASE.at(32), 1000.0, 2.0),
            trial(LAID.at(32), 9000.0, 2.0, origin="reference"),
            trial(TF32.at(32), 9000.0, 2.0, stage="input"),
        )
        found = answer(made, request(batch=32, steps=100_000))
        assert found.config == Config(BASE.at(32) | PINNED)

    def test_break_even(self) -> None:
        rows = break_even(self.compiled())
        assert [row.candidate.config for row in rows] == [BASE, COMPILED]
        assert [row.steps for row in rows] == [1, 939]
        assert [row.candidate.config for row in break_even(self.compiled(), "flags")] == [BASE]


class TestSound:
    def test_what_nothing_needs_to_be_compared(self) -> None:
        assert is_sound(record(), ONLY_LAID)
        assert not is_sound(record(), BF16)
        assert not is_sound(record(), COMPILED)

    def test_as_the_comparison_ended(self) -> None:
        assert is_sound(record(verified(COMPILED)), COMPILED)
        assert is_sound(record(verified(COMPILED)), COMPILED.at(8))
        assert not is_sound(record(verified(BF16)), COMPILED)
        assert not is_sound(record(failed(verified(COMPILED))), COMPILED)
        # Also of what would not have needed one.
        assert not is_sound(record(failed(verified(ONLY_LAID))), ONLY_LAID)

    def test_the_last_comparison_counts(self) -> None:
        good, bad = verified(COMPILED), failed(verified(COMPILED))
        assert is_sound(record(bad, good), COMPILED)
        assert not is_sound(record(good, bad), COMPILED)

    def test_a_trial_is_no_comparison(self) -> None:
        assert not is_sound(record(trial(COMPILED, 2000.0)), COMPILED)


class TestUnverified:
    def test_nothing_to_say(self) -> None:
        assert unverified(record(), ONLY_LAID) == ""
        assert unverified(record(failed(verified(ONLY_LAID))), ONLY_LAID) == ""
        assert unverified(record(verified(BF16)), BF16) == ""

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({}, "there was no time"),
            ({"tolerance": 0.0}, "left out"),
            ({"mode": "infer"}, "inference"),
            ({"mode": "infer", "tolerance": 0.0}, "inference"),
        ],
    )
    def test_why_there_was_none(self, changes: dict[str, Any], why: str) -> None:
        made = of_task(record(loop=choice(BF16, 1500.0)), **changes)
        said = f"; not verified against fp32: {why}"
        assert unverified(made, BF16) == said
        found = answer(made, request())
        assert (found.reason, found.doubt) == (f"1.50x torch's default at batch 64{said}", said)

    def test_why_it_failed(self) -> None:
        assert unverified(record(failed(verified(BF16))), BF16) == (
            "; not verified against fp32: the loss differs"
        )


class TestLimits:
    def test_the_records_batch_where_none_is_asked(self) -> None:
        assert Limits.of(request(), record()).batch == 64
        assert Limits.of(request(batch=32), record()).batch == 32

    @pytest.mark.parametrize(
        ("use", "given", "config", "peak_bytes", "allowed"),
        [
            ("loop", {}, BF16, 5 * GIB, True),
            ("loop", {"max_memory": 0}, BF16, 5 * GIB, True),
            ("loop", {"max_memory": 2 * GIB}, BF16, 2 * GIB, True),
            ("loop", {"max_memory": 2 * GIB}, BF16, 2 * GIB + 1, False),
            ("loop", {"precisions": ("tf32",)}, BF16, GIB, False),
            ("flags", {}, BF16, GIB, False),
            ("flags", {}, TF32, GIB, True),
            ("loop", {}, BASE.replace(step_graph=True), GIB, False),
            ("capture", {}, BASE.replace(step_graph=True), GIB, True),
        ],
    )
    def test_what_may_be_served(
        self, use: str, given: dict[str, Any], config: Config, peak_bytes: int, allowed: bool
    ) -> None:
        limits = Limits.of(request(use=use, **given), record())
        assert limits.allow(record(), config, peak_bytes) is allowed

    def test_what_a_framework_has_words_for(self) -> None:
        kept = record()
        asked = replace(request(), fits=lambda of, config: of is kept and config == TF32)
        limits = Limits.of(asked, kept)
        assert limits.allow(kept, TF32, GIB)
        assert not limits.allow(kept, BF16, GIB)

    def test_as_text(self) -> None:
        assert str(Limits.of(request(), record())) == "batch 64"
        limits = Limits.of(request(batch=8, max_memory=3 * GIB // 2), record())
        assert str(limits) == "batch 8 within 1.5 GiB"


CPU = replace(examples.DEVICE, kind="cpu", name="Xeon", capability="", multiprocessors=0)


def query(device: Any = examples.DEVICE, **given: Any) -> Query:
    environment = replace(examples.ENVIRONMENT, device=device)
    return Query(environment=environment, given=given)


class TestCarried:
    """What is followed of a record for something near."""

    def record(self, config: Config = LAID, *trials: Trial, **more: Any) -> Record:
        return record(*trials, loop=choice(config, 1500.0), **more)

    def carried(self, made: Record, asked: Request, look: Query) -> Config:
        return carried(made, asked, look).config

    def test_kind_of_device(self) -> None:
        made = record()
        assert akin(query(), made)
        assert akin(query(replace(examples.DEVICE, name="A100", memory_gib=40)), made)
        assert not akin(query(CPU), made)
        assert not akin(query(), None)

    def test_what_carries(self) -> None:
        laid = LAID.replace(cudnn_benchmark=True)
        made = self.record(laid, verified(laid))
        found = carried(made, request(batch=8), query(shapes=((8, 3, 99, 99),)))
        assert found == Answer(
            config=Config(batch_size=8, channels_last=True, pin_memory=True, precision="tf32"),
            reason="carried over, not measured: channels_last, pin_memory, tf32",
        )

    def test_what_does_not(self) -> None:
        compiled = COMPILED.replace(step_graph=True, cudnn_benchmark=True)
        made = self.record(compiled, verified(compiled), input=Config())
        found = carried(made, request(batch=8), query())
        assert found.config == Config(batch_size=8, channels_last=False, precision="default")
        assert found.reason == "carried over, not measured: nothing"

    def test_only_what_is_permitted_here(self) -> None:
        made = self.record()
        strict = self.carried(made, request(precisions=("default",)), query())
        assert "precision" not in strict and strict["channels_last"] is True
        fixed = self.record(LAID.replace(cudnn_deterministic=False))
        held = self.carried(fixed, request(deterministic=True), query())
        assert "cudnn_deterministic" not in held
        assert self.carried(fixed, request(), query())["cudnn_deterministic"] is False

    def test_only_what_the_device_offers(self) -> None:
        old = replace(examples.DEVICE, name="T4", capability="7.5", memory_gib=16)
        assert "precision" not in self.carried(self.record(), request(), query(old))

    def test_only_what_the_sample_offers(self) -> None:
        words = query(shapes=((8, 128),))
        assert "channels_last" not in self.carried(self.record(), request(), words)
        clips = query(shapes=((8, 3, 4, 16, 16),))
        assert self.carried(self.record(), request(), clips)["channels_last"] is True

    def test_only_where_it_trains(self) -> None:
        fused = LAID.replace(fused_optimizer=True)
        made = self.record(fused, verified(fused))
        assert self.carried(made, request(), query())["fused_optimizer"] is True
        assert "fused_optimizer" not in self.carried(made, request(mode="infer"), query())

    def test_what_was_not_held_against_fp32_is_left_out(self) -> None:
        laid = BF16.replace(channels_last=True)
        unchecked = self.carried(self.record(laid), request(), query())
        assert "precision" not in unchecked and unchecked["channels_last"] is True
        assert (
            self.carried(self.record(laid, verified(laid)), request(), query())["precision"]
            == "bf16"
        )

    def test_the_batch(self) -> None:
        made, same = self.record(), query(shapes=((32, 3, 256, 256),))
        assert self.carried(made, request(batch=8), same).batch == 8
        assert self.carried(made, request(), same).batch == 64
        # Nothing said of the sample: it is the record's.
        assert self.carried(made, request(), query()).batch == 64
        assert "batch_size" not in self.carried(made, request(), query(shapes=((32, 3, 64, 64),)))
        small = replace(examples.DEVICE, memory_gib=examples.DEVICE.memory_gib - 1)
        assert "batch_size" not in self.carried(made, request(), query(small))
        large = replace(examples.DEVICE, memory_gib=examples.DEVICE.memory_gib + 1)
        assert self.carried(made, request(), query(large)).batch == 64

    def test_by_use(self) -> None:
        made = record(flags=choice(TF32, 1200.0), loop=choice(LAID, 1500.0))
        assert self.carried(made, request(use="flags"), query())["channels_last"] is False
