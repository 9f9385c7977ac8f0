"""Which config of a record answers a request, without a store or a process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from advisor.cache.config import Config
from advisor.cache.record import Choice, Measurement, Record, Trial
from advisor.errors import NoRecord
from advisor.resolve.answer import answer, break_even, unverified
from advisor.resolve.request import Request
from advisor.tuners.search.plan import Plan
from tests.builders import measured as trial
from tests.builders import verified
from tests.cache import examples

GIB = 2**30
SMALL: dict[str, Any] = {"max_memory": 2 * GIB}
PLAIN: dict[str, Any] = {"precisions": ("default",)}
BASE = examples.DEFAULT.replace(compile="none")
TF32 = BASE.replace(precision="tf32")
BF16 = BASE.replace(precision="bf16")
TF32_NHWC = TF32.replace(channels_last=True)
NHWC = BASE.replace(channels_last=True)
COMPILED = BASE.replace(compile="default")


def request(**given: Any) -> Request:
    """A request of a script that captures no step and gives no batch."""
    own = {name: given.pop(name) for name in ("batch", "free", "use") if name in given}
    plan = Plan(steps=given.pop("steps", None), duration_s=given.pop("seconds", None))
    given = {"mode": "train", **given}
    return Request(target="model.py:Net", given=given, device="cuda:0", plan=plan, **own)


def choice(config: Config, rate: float, first_step_s: float = 0.0, peak_bytes: int = GIB) -> Choice:
    made = examples.choice(config, rate, rate / 1000.0)
    return replace(made, first_step_s=first_step_s, peak_bytes=peak_bytes)


def failed(one: Trial, outcome: str = "wrong", reason: str = "the loss differs") -> Trial:
    return replace(one, measurement=Measurement(outcome=outcome, reason=reason))


def record(
    *trials: Trial, flags: Choice | None = None, loop: Choice | None = None, **more: Any
) -> Record:
    """A record whose default trains 1000 samples/s at a batch of 64. TF32 and TF32_NHWC have
    passed the comparison with fp32."""
    default = more.pop("baseline", choice(BASE, 1000.0, 2.0))
    others = {name: more.pop(name) for name in ("capture", "free_loop") if name in more}
    winners = examples.winners(flags or default, loop or default, **others)
    made = examples.record(trials=0)
    checked = (verified(TF32), verified(TF32_NHWC), *trials)
    return replace(made, baseline=default, winners=winners, trials=checked, **more)


def for_a_job(made: Record, **length: Any) -> Record:
    return replace(made, provenance=replace(made.provenance, **length))


PINNED = Config(pin_memory=True)
GRAPHED = BASE.replace(step_graph=True)
RACED = record(
    verified(BF16),
    flags=choice(TF32, 1250.0),
    loop=choice(BF16, 1500.0),
    capture=choice(GRAPHED, 2000.0),
)
BOTH = (trial(BASE.at(32), 800.0), trial(COMPILED.at(32), 1600.0))
LIMITED = record(
    trial(BASE, 1000.0),
    trial(TF32, 1200.0),
    trial(TF32_NHWC, 1400.0, peak_bytes=3 * GIB),
    loop=choice(TF32_NHWC, 1500.0, peak_bytes=3 * GIB),
)
ONCE = (trial(BASE, 1000.0, 2.0), trial(TF32, 1900.0, 2.0))
FREE = record(trial(BASE.at(128), 1000.0), free_loop=choice(TF32.at(128), 1600.0))


def compiled(first_step_s: float = 32.0, **more: Any) -> Record:
    """At 1000 samples/s a step takes 0.064 s. The default's first step takes 2 s."""
    return record(
        trial(BASE, 1000.0, 2.0),
        trial(COMPILED, 2000.0, first_step_s),
        verified(COMPILED),
        loop=choice(COMPILED, 2000.0, first_step_s),
        **more,
    )


def compiled_free() -> Record:
    made = compiled(free_loop=choice(COMPILED.at(128), 4000.0, 33.0))
    return replace(made, trials=(*made.trials, trial(BASE.at(128), 1000.0, 2.0)))


def precise(rate: float, low: float) -> Record:
    """At batch 32 the default trains exactly 1000 samples/s, and TF32 `rate` (at least `low`)."""

    def of(config: Config, rate: float, low: float, high: float) -> Trial:
        one = trial(config.at(32), rate)
        return replace(one, measurement=replace(one.measurement, low=low, high=high))

    return record(of(BASE, 1000.0, 1000.0, 1000.0), of(TF32, rate, low, 1.02 * rate))


def with_ignored(odd: Trial) -> Record:
    """A record with a trial that must not count."""
    return record(trial(BASE.at(32), 800.0), trial(TF32.at(32), 1000.0), odd)


STEADY: list[tuple[Record, dict[str, Any], Config, str]] = [
    (RACED, {}, BF16, "1.50x torch's default at batch 64"),
    (RACED, {"use": "flags"}, TF32, "1.25x torch's default at batch 64"),
    (RACED, {"use": "capture"}, GRAPHED, "2.00x torch's default at batch 64"),
    (record(raced=(choice(TF32, 1001.0),)), {}, BASE, "nothing measured is clearly faster"),
    # Without a race there is no winner, whatever the job's length.
    *(
        (record(), asked, BASE, "torch's default: nothing else was measured")
        for asked in ({}, {"steps": 100}, {"seconds": 60.0}, {"steps": 100, "free": True})
    ),
    *(
        (
            for_a_job(record(loop=choice(TF32, 1500.0)), **length),
            {},
            TF32,
            f"1.50x torch's default at batch 64 in the steady state, chosen for a job of {job}",
        )
        for length, job in (({"steps": 900}, "900 steps"), ({"duration_s": 3600.0}, "3600 s"))
    ),
    (FREE, {"free": True}, TF32.at(128), "1.60x torch's default at batch 64"),
    # These uses had no race: each config was measured once.
    (
        record(
            trial(BASE.at(32), 800.0),
            trial(TF32.at(32), 1000.0),
            trial(TF32_NHWC.at(32), 1200.0),
            trial(TF32_NHWC, 9000.0),
            loop=choice(TF32, 3000.0),  # the winner at another batch
        ),
        {"batch": 32},
        TF32_NHWC.at(32),
        "1.50x torch's default at batch 32, each measured once",
    ),
    (LIMITED, SMALL, TF32, "1.20x torch's default at batch 64, each measured once"),
    (LIMITED, {**SMALL, **PLAIN}, BASE, "nothing measured beats it at batch 64 within 2 GiB"),
    # The low end has to beat the default's high end by more than 3%.
    (precise(1049.0, 1028.0), {"batch": 32}, BASE.at(32), "default: nothing measured beats it"),
    (precise(1060.0, 1038.8), {"batch": 32}, TF32.at(32), "1.06x torch's default at batch 32"),
    # A comparison with fp32 holds for the same knobs at any batch.
    (record(*BOTH, failed(verified(COMPILED))), {"batch": 32}, BASE.at(32), "torch's default"),
    (record(*BOTH, verified(COMPILED)), {"batch": 32}, COMPILED.at(32), "2.00x"),
    *(
        (with_ignored(odd), {"batch": 32}, TF32.at(32), "1.25x")
        for odd in (
            trial(TF32_NHWC.at(32), 9000.0, stage="input"),
            trial(TF32_NHWC.at(32), 9000.0, origin="reference"),
            failed(trial(TF32_NHWC.at(32), 9000.0), "out_of_memory", "out of memory"),
            trial(TF32_NHWC.at(16), 9000.0),
            trial(BASE.at(32).replace(step_graph=True), 9000.0),
        )
    ),
    # On a busy host a single trial can be 7x too fast. The figures of the race count.
    (
        record(
            trial(BASE, 2000.0),
            trial(TF32, 36_000.0),
            loop=choice(BF16, 9000.0),
            raced=(choice(TF32, 2500.0),),
        ),
        {"precisions": ("default", "tf32")},
        TF32,
        "2.50x torch's default at batch 64, raced",
    ),
]
JOBS: list[tuple[Record, dict[str, Any], Config, str]] = [
    # The default takes 2 + 6400 s, COMPILED 32 + 3200 s.
    (
        compiled(),
        {"steps": 100_001},
        COMPILED,
        "1.98x torch's default over 100001 steps at batch 64, 32 s of first step counted (raced)",
    ),
    # COMPILED takes less time from step 939 on, and 1% less from about step 960 on.
    (compiled(), {"steps": 940}, BASE, "no config pays"),
    (compiled(), {"steps": 980}, COMPILED, "over 980 steps"),
    (compiled(), {"seconds": 20.0}, BASE, "torch's default: over 20 s at batch 64 no config pays"),
    (compiled(), {"steps": 100_001, "compile": False}, BASE, ""),
    (
        record(
            trial(BASE, 1000.0, 2.0),
            trial(BASE.at(32), 900.0, 2.0),
            trial(TF32_NHWC.at(32), 1800.0, 3.0),
        ),
        {"batch": 32, "steps": 100_000},
        TF32_NHWC.at(32),
        "(each measured once)",
    ),
    (compiled_free(), {"steps": 100_001, "free": True}, COMPILED.at(128), "at batch 128"),
    (compiled_free(), {"steps": 100_001}, COMPILED, "at batch 64"),
    (
        record(verified(BF16), baseline=choice(BASE, 1000.0), loop=choice(BF16, 1500.0)),
        {"steps": 100},
        BF16,
        "1.50x torch's default at batch 64; the job's length is not counted, because torch's "
        "default has no known first step",
    ),
    # If the default is not permitted, no other config replaces it as the reference.
    (
        record(
            trial(BASE, 1000.0, 2.0, peak_bytes=3 * GIB),
            trial(TF32, 1200.0, 2.0),
            baseline=choice(BASE, 1000.0, 2.0, 3 * GIB),
            flags=choice(TF32, 1200.0, 2.0),
            loop=choice(TF32_NHWC, 1800.0, 2.0),
        ),
        {"steps": 10**6, **SMALL},
        TF32_NHWC,
        "because torch's default is not among what is permitted",
    ),
    # The race found nothing faster in the steady state. A single measurement cannot overrule it.
    (record(*ONCE, raced=(choice(BASE, 1000.0, 2.0),)), {"steps": 10**6}, BASE, "no config pays"),
    (for_a_job(record(*ONCE), steps=1), {"steps": 10**6}, TF32, "measured once"),
    # An unverified winner is served with a remark. Other unverified configs are not served.
    (
        record(
            trial(BASE, 1000.0, 2.0),
            trial(COMPILED, 2000.0, 3.0),
            trial(BF16, 9000.0, 3.0),
            loop=choice(COMPILED, 2000.0, 3.0),
        ),
        {"steps": 100_000},
        COMPILED,
        "; not verified against fp32: there was no time",
    ),
]


@pytest.mark.parametrize(("made", "asked", "config", "says"), STEADY + JOBS)
def test_best_config_served(made: Record, asked: dict[str, Any], config: Config, says: str) -> None:
    served = answer(made, request(**asked))
    assert served.config == Config(config | PINNED)
    assert says in served.reason and served.record is made


@pytest.mark.parametrize(
    ("made", "asked", "gains", "flags"),
    [
        (RACED, {}, {"flags": 1.25, "pilot": 1.25, "loop": 1.5, "capture": 2.0}, TF32),
        # Gains of wider uses are shown whatever their memory, those of narrower uses are not.
        (
            record(flags=choice(TF32, 1250.0), loop=choice(TF32_NHWC, 1500.0, 2.0, 3 * GIB)),
            {"use": "flags", **SMALL},
            {"flags": 1.25, "pilot": 1.25, "loop": 1.5, "capture": 1.5},
            TF32,
        ),
        (
            record(flags=choice(TF32, 1250.0, 2.0, 3 * GIB), loop=choice(TF32_NHWC, 1500.0)),
            SMALL,
            {"loop": 1.5, "capture": 1.5},
            BASE,
        ),
        # Raced flags also serve a narrower permission. At another batch no flags were raced.
        (
            record(
                trial(BASE, 1000.0),
                trial(TF32, 1250.0),
                flags=choice(TF32, 1250.0),
                loop=choice(TF32_NHWC, 1500.0, 2.0, 3 * GIB),
            ),
            SMALL,
            {"flags": 1.25, "loop": 1.25},
            TF32,
        ),
        (precise(1250.0, 1240.0), {"batch": 32}, {"loop": 1.25}, BASE.at(32)),
        (compiled(), {"steps": 100_001}, {"loop": pytest.approx(6402 / 3232)}, BASE),
        # The default completes no step in this job.
        (
            record(
                flags=choice(BASE, 1000.0, 30.0),
                loop=choice(TF32, 2000.0, 1.0),
                baseline=choice(BASE, 1000.0, 30.0),
            ),
            {"seconds": 20.0},
            {"loop": float("inf")},
            BASE,
        ),
    ],
)
def test_answer_names_the_gains_of_other_uses(
    made: Record, asked: dict[str, Any], gains: dict[str, float], flags: Config
) -> None:
    served = answer(made, request(**asked))
    assert (served.gains, served.flags, served.status) == (gains, flags, "exact")


def test_an_unmeasured_default_gives_no_answer() -> None:
    made = record(failed(trial(BASE.at(32), 0.0)), trial(TF32.at(32), 1000.0))
    with pytest.raises(NoRecord) as refused:
        answer(made, request(batch=32))
    assert str(refused.value) == (
        "model.py:Net was not measured at batch 32, or torch's default was not; measured batches: "
        f"{made.batch}"
    )


def test_break_even_lists_the_best_config_by_job_length() -> None:
    rows = break_even(compiled())
    assert [(steps, config) for steps, config, _pace in rows] == [(1, BASE), (939, COMPILED)]


def test_break_even_of_a_command_ignores_its_other_trials() -> None:
    """Compiling costs 30 s and saves 32 ms a step. The other trial's 15 s would halve that."""
    trials = (trial(BASE, 1000.0, 0.064), trial(TF32, 900.0, 15.0), trial(COMPILED, 2000.0, 30.032))
    made = record(baseline=choice(BASE, 1000.0), loop=choice(COMPILED, 2000.0))
    task = replace(made.key.task, command=("python", "train.py"))
    made = replace(made, key=replace(made.key, task=task), trials=(*trials, verified(COMPILED)))
    steps = [(steps, config) for steps, config, _pace in break_even(made)]
    assert steps == [(1, BASE), (938, COMPILED)]


NO_TIME = "there was no time"


@pytest.mark.parametrize(
    ("trials", "task", "config", "why"),
    [
        ((), {}, BASE.replace(cudnn_benchmark=True), ""),  # changes no numbers
        ((), {}, BF16, NO_TIME),
        ((), {"tolerance": 0.0}, BF16, "left out"),
        ((), {"mode": "infer", "tolerance": 0.0}, COMPILED, "inference"),
        ((verified(COMPILED),), {}, COMPILED, ""),
        ((verified(COMPILED),), {}, COMPILED.at(8), ""),
        ((failed(verified(COMPILED)),), {}, COMPILED, "the loss differs"),
        ((failed(verified(NHWC)),), {}, NHWC, "the loss differs"),
        ((failed(verified(COMPILED)), verified(COMPILED)), {}, COMPILED, ""),  # last one counts
        ((verified(COMPILED), failed(verified(COMPILED))), {}, COMPILED, "the loss differs"),
    ],
)
def test_unverified_says_why_a_config_is_not_verified(
    trials: tuple[Trial, ...], task: dict[str, Any], config: Config, why: str
) -> None:
    made = record(*trials, loop=choice(config, 1500.0))
    made = replace(made, key=replace(made.key, task=replace(made.key.task, **task)))
    doubt = f"; not verified against fp32: {why}" if why else ""
    assert unverified(made, config) == doubt
    if config.batch == made.batch:
        assert answer(made, request()).doubt == doubt
