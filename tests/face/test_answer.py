"""Which config of a record answers a request, without a store or a process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.cache.match import Query
from advisor.cache.record import Choice, Measurement, Record, Trial, Winner
from advisor.errors import NoRecord
from advisor.resolve.answer import answer, break_even, carried, is_sound, unverified
from advisor.resolve.request import Request
from tests.builders import measured as trial
from tests.builders import verified
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
    own: dict[str, Any] = {"batch": None, "use": "loop"}
    names = ("batch", "free", "use", "steps", "seconds", "fits")
    own |= {name: given.pop(name) for name in names if name in given}
    given = {"mode": "train", **given}
    return Request(target="model.py:Net", given=given, device="cuda:0", **own)


def choice(config: Config, rate: float, first_step_s: float = 0.0, peak_bytes: int = GIB) -> Choice:
    made = examples.choice(config, rate, rate / 1000.0)
    return replace(made, first_step_s=first_step_s, peak_bytes=peak_bytes)


def failed(one: Trial, outcome: str = "wrong", reason: str = "the loss differs") -> Trial:
    return replace(one, measurement=Measurement(outcome=outcome, reason=reason))


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


def served(made: Record, **asked: Any) -> Config:
    """The config that is served, without the knobs of the loader."""
    return answer(made, request(**asked)).config.without(*PINNED)


class TestRaced:
    def test_the_winner_with_the_input_knobs_and_what_other_uses_would_give(self) -> None:
        made = record(verified(BF16), flags=choice(TF32, 1250.0), loop=choice(BF16, 1500.0))
        found = answer(made, request())
        assert found.config == Config(BF16 | PINNED)
        assert found.reason == "1.50x torch's default at batch 64"
        assert found.gains == {"flags": 1.25, "pilot": 1.25, "loop": 1.5, "capture": 1.5}
        assert (found.flags, found.record, found.status) == (TF32, made, "exact")

    def test_the_default_is_called_so(self) -> None:
        found = answer(record(raced=(choice(TF32, 1001.0),)), request())
        assert found.config == Config(BASE | PINNED)
        assert found.reason == "torch's default: nothing measured is clearly faster"
        assert found.flags == BASE

    @pytest.mark.parametrize(
        "asked", [{}, {"steps": 100}, {"seconds": 60.0}, {"steps": 100, "free": True}]
    )
    def test_without_a_race_nothing_has_won(self, asked: dict[str, Any]) -> None:
        found = answer(record(), request(**asked))
        assert found.reason == "torch's default: nothing else was measured"

    @pytest.mark.parametrize(
        ("use", "config"),
        [
            ("flags", TF32),
            ("pilot", TF32),
            ("loop", BF16),
            ("capture", BASE.replace(step_graph=True)),
        ],
    )
    def test_a_use_gets_its_own_winner(self, use: str, config: Config) -> None:
        made = record(
            verified(BF16),
            flags=choice(TF32, 1250.0),
            loop=choice(BF16, 1500.0),
            capture=choice(BASE.replace(step_graph=True), 2000.0),
        )
        assert served(made, use=use) == config
        if use == "capture":
            gains = {"flags": 1.25, "pilot": 1.25, "loop": 1.5, "capture": 2.0}
            assert answer(made, request(use=use)).gains == gains

    @pytest.mark.parametrize(
        ("length", "job"), [({"steps": 900}, "900 steps"), ({"duration_s": 3600.0}, "3600 s")]
    )
    def test_the_job_that_it_was_chosen_for_is_named(
        self, length: dict[str, Any], job: str
    ) -> None:
        made = for_a_job(record(loop=choice(TF32, 1500.0)), **length)
        said = "1.50x torch's default at batch 64 in the steady state, chosen for a job of "
        assert answer(made, request()).reason == said + job

    def test_what_is_not_permitted_is_no_gain_either(self) -> None:
        made = record(
            trial(BASE, 1000.0), flags=choice(TF32, 1250.0), loop=choice(LAID, 1500.0, 2.0, 3 * GIB)
        )
        # The winner for a wider use is named whatever memory it takes.
        found = answer(made, request(use="flags", max_memory=2 * GIB))
        assert found.config == Config(TF32 | PINNED)
        assert found.gains == {"flags": 1.25, "pilot": 1.25, "loop": 1.5, "capture": 1.5}

        made = record(loop=choice(LAID, 1500.0), flags=choice(TF32, 1250.0, 2.0, 3 * GIB))
        found = answer(made, request(max_memory=2 * GIB))
        assert (found.gains, found.flags) == ({"loop": 1.5, "capture": 1.5}, BASE)

    def test_with_the_batch_free(self) -> None:
        made = record(trial(BASE.at(128), 1000.0), free=choice(TF32.at(128), 1600.0))
        found = answer(made, request(free=True))
        assert found.config == Config(TF32.at(128) | PINNED)
        assert found.reason == "1.60x torch's default at batch 64"
        assert found.gains["loop"] == 1.6
        assert served(made) == BASE


def exactly(rate: float, low: float) -> Record:
    """At batch 32 the default trains on just 1000 samples a second, TF32 on `rate`."""
    default, fast = trial(BASE.at(32), 1000.0), trial(TF32.at(32), rate)
    exact = replace(default.measurement, low=1000.0, high=1000.0)
    return record(
        replace(default, measurement=exact),
        replace(fast, measurement=replace(fast.measurement, low=low)),
    )


class TestFromTrials:
    """No race was for what is asked: each config was measured once."""

    def test_another_batch(self) -> None:
        made = record(
            trial(BASE.at(32), 800.0),
            trial(TF32.at(32), 1000.0),
            trial(LAID.at(32), 1200.0),
            trial(LAID, 9000.0),
            loop=choice(TF32, 3000.0),  # the winner of another batch
        )
        found = answer(made, request(batch=32))
        assert found.config == Config(LAID.at(32) | PINNED)
        assert found.reason == "1.50x torch's default at batch 32, each measured once"
        assert (found.gains, found.flags) == ({"loop": 1.5}, BASE.at(32))

    def test_flags_that_were_raced_serve_a_narrower_permission(self) -> None:
        made = record(
            trial(BASE, 1000.0),
            trial(TF32, 1250.0),
            flags=choice(TF32, 1250.0),
            loop=choice(LAID, 1500.0, 2.0, 3 * GIB),
        )
        found = answer(made, request(max_memory=2 * GIB))
        assert (found.flags, found.gains["flags"]) == (TF32, 1.25)

    def test_only_what_is_permitted(self) -> None:
        trials = (trial(BASE, 1000.0), trial(TF32, 1200.0), trial(LAID, 1400.0, peak_bytes=3 * GIB))
        made = record(*trials, loop=choice(LAID, 1500.0, peak_bytes=3 * GIB))
        within = answer(made, request(max_memory=2 * GIB))
        assert within.config == Config(TF32 | PINNED)
        assert within.reason == "1.20x torch's default at batch 64, each measured once"
        default = answer(made, request(max_memory=2 * GIB, precisions=("default",)))
        assert default.reason == (
            "torch's default: nothing measured beats it at batch 64 within 2 GiB"
        )
        # The limit itself is within it.
        assert served(made, max_memory=3 * GIB) == LAID
        assert served(made, precisions=("default",)) == BASE

    @pytest.mark.parametrize(
        ("rate", "low", "counts"),
        [
            (1.02 * 1.03 * 1000.0, 0.98, False),
            (1.06 * 1000.0, 0.98, True),
            (1.049 * 1000.0, 0.98, False),
            (1040.0, 1030.0 / 1040.0, False),
        ],
    )
    def test_noise_is_no_gain(self, rate: float, low: float, counts: bool) -> None:
        """The low end has to beat the default's high end by more than 3%."""
        found = answer(exactly(rate, low * rate), request(batch=32))
        assert (found.config == Config(TF32.at(32) | PINNED)) is counts
        if not counts:
            assert found.reason == "torch's default: nothing measured beats it at batch 32"
            assert not found.gains

    @pytest.mark.parametrize(
        ("checks", "config"),
        [
            ((), BASE),
            ((failed(verified(COMPILED)),), BASE),
            ((verified(COMPILED),), COMPILED),  # the comparison is of the knobs, at any batch
        ],
    )
    def test_only_what_matched_fp32(self, checks: tuple[Trial, ...], config: Config) -> None:
        trials = (trial(BASE.at(32), 800.0), trial(COMPILED.at(32), 1600.0))
        assert served(record(*trials, *checks), batch=32) == config.at(32)

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
        assert served(made, batch=32) == TF32.at(32)

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
        """On a busy host one trial can be seven times too fast."""
        held = examples.record()
        tf32 = held.baseline.config.replace(precision="tf32")
        once = (trial(held.baseline.config, 2000.0), trial(tf32, 36_000.0), verified(tf32))
        held = replace(held, raced=(examples.choice(tf32, 5000.0, 2.5),), trials=once)
        found = answer(held, request(precisions=("default", "tf32")))
        assert found.config.precision == "tf32"
        assert found.reason.startswith("2.50x torch's default at batch 64, raced")


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
        assert found.config == Config(COMPILED | PINNED)
        assert found.reason == (
            "1.98x torch's default over 100001 steps at batch 64, 32 s of first step counted (as "
            "measured; raced)"
        )
        assert found.gains == {"loop": pytest.approx(6402 / 3232)} and found.flags == BASE

    @pytest.mark.parametrize(
        ("asked", "config", "says"),
        [
            ({"steps": 100}, BASE, "torch's default: over 100 steps at batch 64 nothing pays"),
            # It takes less time from step 939 on, and a percent less from about step 960 on.
            ({"steps": 940}, BASE, "nothing pays"),
            ({"steps": 980}, COMPILED, "over 980 steps"),
            ({"seconds": 1000.0}, COMPILED, "over 1000 s at batch 64"),
            ({"seconds": 20.0}, BASE, "torch's default: over 20 s at batch 64 nothing pays"),
            ({"steps": 100_001, "compile": False}, BASE, ""),
        ],
    )
    def test_by_its_length(self, asked: dict[str, Any], config: Config, says: str) -> None:
        found = answer(self.compiled(), request(**asked))
        assert found.config == Config(config | PINNED) and says in found.reason

    def test_a_job_in_which_the_default_takes_no_step(self) -> None:
        default = choice(BASE, 1000.0, 30.0)
        made = record(flags=default, loop=choice(TF32, 2000.0, 1.0), baseline=default)
        assert answer(made, request(seconds=20.0)).gains == {"loop": float("inf")}

    def test_measured_once(self) -> None:
        made = record(
            trial(BASE, 1000.0, 2.0),
            trial(BASE.at(32), 900.0, 2.0),
            trial(LAID.at(32), 1800.0, 3.0),
            trial(TF32.at(32), 9000.0, 2.0, stage="input"),
            trial(TF32.at(32), 9000.0, 2.0, origin="reference"),
        )
        found = answer(made, request(batch=32, steps=100_000))
        assert found.config == Config(LAID.at(32) | PINNED)
        assert found.reason.endswith("(as the slowest one seen; each measured once)")
        assert found.flags == BASE.at(32)

    def test_free(self) -> None:
        made = self.compiled(free=choice(COMPILED.at(128), 4000.0, 33.0))
        made = replace(made, trials=(*made.trials, trial(BASE.at(128), 1000.0, 2.0)))
        found = answer(made, request(steps=100_001, free=True))
        assert found.config == Config(COMPILED.at(128) | PINNED)
        assert "at batch 128" in found.reason
        assert served(made, steps=100_001) == COMPILED

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

    def test_an_unverified_winner_is_served_with_its_doubt(self) -> None:
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

    def test_break_even(self) -> None:
        rows = break_even(self.compiled())
        assert [(row.steps, row.candidate.config) for row in rows] == [(1, BASE), (939, COMPILED)]
        assert [row.candidate.config for row in break_even(self.compiled(), "flags")] == [BASE]


@pytest.mark.parametrize(
    ("trials", "config", "sound"),
    [
        ((), ONLY_LAID, True),  # which needs no comparison
        ((), BF16, False),
        ((), COMPILED, False),
        ((verified(COMPILED),), COMPILED, True),
        ((verified(COMPILED),), COMPILED.at(8), True),
        ((verified(BF16),), COMPILED, False),
        ((failed(verified(COMPILED)),), COMPILED, False),
        ((failed(verified(ONLY_LAID)),), ONLY_LAID, False),
        ((failed(verified(COMPILED)), verified(COMPILED)), COMPILED, True),  # the last one counts
        ((verified(COMPILED), failed(verified(COMPILED))), COMPILED, False),
        ((trial(COMPILED, 2000.0),), COMPILED, False),
    ],
)
def test_sound(trials: tuple[Trial, ...], config: Config, sound: bool) -> None:
    assert is_sound(record(*trials), config) is sound


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
    def test_why_there_was_no_comparison(self, changes: dict[str, Any], why: str) -> None:
        made = of_task(record(loop=choice(BF16, 1500.0)), **changes)
        doubt = f"; not verified against fp32: {why}"
        found = answer(made, request())
        assert (found.reason, found.doubt) == (f"1.50x torch's default at batch 64{doubt}", doubt)

    def test_why_it_failed(self) -> None:
        assert unverified(record(failed(verified(BF16))), BF16) == (
            "; not verified against fp32: the loss differs"
        )


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
        ("loop", {"fits": lambda _of, config: config == TF32}, TF32, GIB, True),
        ("loop", {"fits": lambda _of, config: config == TF32}, BF16, GIB, False),
    ],
)
def test_what_may_be_served(
    use: str, given: dict[str, Any], config: Config, peak_bytes: int, allowed: bool
) -> None:
    assert request(use=use, **given).allows(record(), config, peak_bytes) is allowed


def query(given: dict[str, Any] | None = None, **device: Any) -> Query:
    environment = replace(examples.ENVIRONMENT, device=replace(examples.DEVICE, **device))
    return Query(environment=environment, given=given or {})


LAID_OUT = {"channels_last": True, "precision": "tf32"}
MEMORY = examples.DEVICE.memory_gib


class TestCarried:
    """What is followed of a record for something near."""

    def test_what_carries(self) -> None:
        laid = LAID.replace(cudnn_benchmark=True)
        made = record(verified(laid), loop=choice(laid, 1500.0))
        found = carried(made, request(batch=8), query({"shapes": ((8, 3, 99, 99),)}))
        assert found.config == Config(batch_size=8, pin_memory=True, **LAID_OUT)
        assert found.reason == "carried over, not measured: channels_last, pin_memory, tf32"
        assert found.status == "nearest"

    def test_what_does_not(self) -> None:
        compiled = COMPILED.replace(step_graph=True, cudnn_benchmark=True)
        made = record(verified(compiled), loop=choice(compiled, 1500.0), input=Config())
        found = carried(made, request(batch=8), query())
        assert found.config == Config(batch_size=8, channels_last=False, precision="default")
        assert found.reason == "carried over, not measured: nothing"

    @pytest.mark.parametrize(
        ("held", "asked", "look", "name", "value"),
        [
            (LAID, {"precisions": ("default",)}, query(), "precision", None),
            (LAID, {"precisions": ("default",)}, query(), "channels_last", True),
            (LAID, {"deterministic": True}, query(), "cudnn_deterministic", None),
            (LAID, {}, query(), "cudnn_deterministic", False),
            (LAID, {}, query(name="T4", capability="7.5", memory_gib=16), "precision", None),
            (LAID, {}, query({"shapes": ((8, 128),)}), "channels_last", None),
            (LAID, {}, query({"shapes": ((8, 3, 4, 16, 16),)}), "channels_last", True),
            (LAID, {}, query(), "fused_optimizer", True),
            (LAID, {"mode": "infer"}, query(), "fused_optimizer", None),
            (LAID, {"use": "flags"}, query(), "channels_last", False),
            # The batch is the script's own, or the record's if that is safe.
            (LAID, {"batch": 8}, query(), "batch_size", 8),
            (LAID, {}, query({"shapes": ((32, 3, 256, 256),)}), "batch_size", 64),
            (LAID, {}, query(), "batch_size", 64),
            (LAID, {}, query({"shapes": ((32, 3, 64, 64),)}), "batch_size", None),
            (LAID, {}, query(memory_gib=MEMORY - 1), "batch_size", None),
            (LAID, {}, query(memory_gib=MEMORY + 1), "batch_size", 64),
        ],
    )
    def test_only_what_is_offered_here(
        self, held: Config, asked: dict[str, Any], look: Query, name: str, value: object
    ) -> None:
        held = held.replace(cudnn_deterministic=False, fused_optimizer=True)
        made = record(verified(held), flags=choice(TF32, 1200.0), loop=choice(held, 1500.0))
        assert carried(made, request(**asked), look).config.get(name) == value

    def test_what_did_not_match_fp32_is_left_out(self) -> None:
        laid = BF16.replace(channels_last=True)
        unchecked = carried(record(loop=choice(laid, 1500.0)), request(), query()).config
        assert "precision" not in unchecked and unchecked["channels_last"] is True
        checked = record(verified(laid), loop=choice(laid, 1500.0))
        assert carried(checked, request(), query()).config["precision"] == "bf16"
