"""`advisor explain` and `advisor verify`, on a model of made-up speed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import advisor as package
from advisor.cache.codec import decode, encode
from advisor.cache.config import Config, Value
from advisor.cache.record import LOOP, Choice, Part, Record
from advisor.cache.records import Records
from advisor.errors import WorkerError
from advisor.open_store import open_records
from advisor.persistence import measuring
from advisor.report.sections import parts as parts_table
from advisor.tuners.measure.runner import Compared
from advisor.tuners.search.plan import Clock
from advisor.tuners.search.ratio import Ratio
from advisor.verification import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    Remeasurement,
    is_idle,
    judged,
    parts_of,
)
from tests.builders import MadeUp
from tests.cache import examples
from tests.cache.examples import choice
from tests.face.commands import MODEL, SHAPE, advisor, env_of
from tests.face.unmeasured import FakeWorker, fake_worker

GAINS = {("channels_last", True): 2.0}
TUNE = ("tune", "model.py", "--shape", SHAPE, "--device", "cpu")
TRIALS = ("--budget", "10s", "--fixed-batch", "--effort", "quick")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("again")
    (folder / "model.py").write_text(MODEL)
    with fake_worker(GAINS):
        done = advisor(folder, *TUNE, *TRIALS, **env_of(folder))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(autouse=True)
def workers() -> Iterator[list[FakeWorker]]:
    with fake_worker(GAINS) as started:
        yield started


def stored() -> tuple[Records, Record]:
    records = open_records(None)
    (record,) = records.all()
    return records, record


def with_winners(record: Record, change: Callable[[Choice], Choice]) -> Record:
    """A copy of the record. `change` is applied to the choice of each winner."""
    return replace(
        record, winners=tuple(replace(one, choice=change(one.choice)) for one in record.winners)
    )


def revise(record: Record, **changes: Any) -> Record:
    """Store a changed version of the only record."""
    records, before = stored()
    changed = replace(record, revised=time.time(), **changes)
    records.put(changed, revises=before)
    assert stored()[1] == changed
    return changed


def add_to_advice(config: dict[str, Value]) -> Record:
    """Store a version of the only record whose advice also sets these knobs."""
    record = stored()[1]
    loop = record.winner(LOOP)
    choice = replace(loop, config=loop.config.replace(**config))
    advised = with_winners(record, lambda one: choice if one.config == loop.config else one)
    return revise(advised, stale="", parts=())


def test_a_busy_host_is_refused_and_the_default_has_nothing_to_explain(tuned: Path) -> None:
    records, record = stored()
    with measuring(records, ["another command"], ["cpu"]):
        for command in ("verify", "explain"):
            refused = advisor(tuned, command, record.id)
            assert refused.returncode == 1
            assert "measures on this host's CPU now; wait for it" in refused.stderr
    revise(with_winners(record, lambda _one: record.baseline), input=Config())
    done = advisor(tuned, "explain", record.id, "--budget", "3s")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Nothing to explain: the advice is torch's default.\n"


def test_explain_removes_a_knob_without_a_gain_from_the_advice(tuned: Path) -> None:
    record = add_to_advice({"precision": "bf16"})
    done = advisor(tuned, "explain", record.id, "--budget", "20s")
    assert done.returncode == 0, done.stderr
    assert "Removed, as the advice is no slower without: precision" in done.stdout
    _, now = stored()
    parts = {next(iter(part.knob)): part for part in now.parts if part.stage == "compute"}
    assert set(parts) == {"channels_last", "precision"}
    assert all(part.low <= part.ratio <= part.high for part in parts.values())
    assert parts["channels_last"].low > 1.3
    assert parts["precision"].low <= 1 or parts["precision"].ratio < 1.01
    assert now.winner(LOOP).config == record.winner(LOOP).config.replace(precision="default")
    shown = advisor(tuned, "show", record.id).stdout
    assert "not needed, removed from the advice" in shown


def test_a_record_that_no_longer_holds_is_stale_until_it_is_tuned_again(tuned: Path) -> None:
    record = stored()[1]
    with fake_worker({}, noise=1e-4):  # nothing is faster any more
        done = advisor(tuned, "verify", record.id)
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("marked stale: ") and last.endswith("it is no longer faster")
    assert "stale" in advisor(tuned, "show").stdout
    with pytest.warns(package.AdvisorWarning) as caught:
        model = package.Model(str(tuned / "model.py"), device="cpu")
        advice = package.lookup(model, shape=(4, 3, 8, 8))
    assert advice.status == "stale" and stored()[1].stale in str(caught[0].message)
    done = advisor(tuned, *TUNE, *TRIALS, "--budget", "5s")
    assert "marked stale" in done.stderr and "Already tuned" not in done.stdout
    assert stored()[1].stale == ""


@pytest.mark.parametrize(
    ("changes", "compared", "verdict"),
    [
        ({"channels_last": False, "threads": 3}, Compared("wrong", "never asked"), HOLDS),
        ({}, Compared("ok", "as fp32"), HOLDS),
        ({"precision": "bf16"}, Compared("ok", "as fp32"), HOLDS),
        ({"precision": "bf16"}, Compared("wrong", "a gradient is off", "format"), FAILS),
        ({"precision": "bf16"}, Compared("unverified", "no time was left to compare it"), HOLDS),
    ],
)
def test_verify_compares_advice_that_changes_numbers_with_fp32(
    tuned: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Value],
    compared: Compared,
    verdict: str,
) -> None:
    record = add_to_advice(changes)
    monkeypatch.setattr(FakeWorker, "compare", lambda *_args, **_options: compared)
    with fake_worker({**GAINS, ("threads", 3): 2.0}) as workers:
        done = advisor(tuned, "verify", record.id, "--json")
    result = json.loads(done.stdout)
    assert (result["verdict"], result["holds"]) == (verdict, done.returncode == 0), result
    same = "threads" in changes
    said = "not compared with fp32: the advice changes no numbers"
    assert result["numerics"].endswith(said if same else f"compared with fp32: {compared.reason}")
    assert result["now"][LOOP]["ratio"] == pytest.approx(record.winner(LOOP).speedup, rel=0.25)
    assert ("no longer trains like fp32" in stored()[1].stale) == (verdict == FAILS)
    assert (stored()[1].stale == "") == (result["reason"] == "") == (verdict == HOLDS)
    (worker,) = workers
    assert record.winner(LOOP).config in worker.blocks, "what is compared was timed"


def remeasurement(record: Record, runner: MadeUp, budget_s: float = 400.0) -> Remeasurement:
    clock = Clock(budget_s, now=runner.now)
    return Remeasurement(record, open_records(None), runner, clock)


def runner_for(record: Record, channels_last: float = 1.0, **options: Any) -> MadeUp:
    """A runner on which bf16 is twice as fast. channels_last multiplies that by its factor."""
    gains = {("precision", "bf16"): 2.0, ("channels_last", True): channels_last}
    return MadeUp(record.baseline.config, gains=gains, noise=1e-4, **options)


@pytest.mark.parametrize(
    ("channels_last", "idle"),
    [
        (1.0, ["channels_last"]),
        (1.004, ["channels_last"]),
        (1.02, []),
        (2.0, []),
        (1.0, ["channels_last", "cudnn_benchmark"]),
    ],
)
def test_idle_knobs_are_removed_without_a_new_race(channels_last: float, idle: list[str]) -> None:
    record = replace(examples.record(), input=Config())
    base, fast = record.baseline.config, record.winner(LOOP).config
    whole = fast.replace(**dict.fromkeys(idle or ["channels_last"], True))
    record = with_winners(
        record, lambda one: one if one.config == base else replace(one, config=whole)
    )
    runner = runner_for(record, channels_last)
    measured = remeasurement(record, runner)
    removed = [next(iter(part.knob)) for part in measured.parts() if is_idle(part)]
    assert sorted(removed) == idle
    raced = len(runner.blocks)
    simpler, names = measured.simplified(record, removed or ["channels_last"])
    assert sorted(names) == idle
    assert len(idle) > 1 or len(runner.blocks) == raced, "the race of all knobs had it"
    loop = simpler.winner(LOOP)
    assert loop.config == (fast if idle else whole) and loop.speedup == 1.5
    revised = replace(simpler, revised=time.time())
    assert decode(encode(revised)) == revised


def test_advice_that_fails_or_leaves_no_time_raises() -> None:
    record = replace(examples.record(), input=Config())
    failing = runner_for(record, fails={("precision", "bf16"): "failed"})
    slow = runner_for(record, step_s=1.0)
    with pytest.raises(WorkerError, match="bf16 no longer runs here: it is made"):
        remeasurement(record, failing).parts()
    with pytest.raises(WorkerError, match="no time was left to measure"):
        remeasurement(record, slow, 4.0).parts()


def test_a_config_measured_once_gives_no_contribution_of_a_knob() -> None:
    """A single measurement has no interval."""
    whole, without = Config(precision="bf16", fused_optimizer=True), Config(precision="bf16")
    knobs = {"fused_optimizer": without, "precision": Config(fused_optimizer=True)}
    assert list(parts_of({whole: [2.0], without: [1.0]}, whole, knobs, "compute")) == []
    (part,) = parts_of({whole: [2.0] * 3, without: [1.0] * 3}, whole, knobs, "compute")
    assert (part.knob, part.ratio) == (Config(fused_optimizer=True), pytest.approx(2.0))


def part(low: float, ratio: float, high: float) -> Part:
    return Part(knob=Config(precision="bf16"), ratio=ratio, low=low, high=high)


def test_an_idle_knob_is_known_and_an_inconclusive_one_shows_no_figures() -> None:
    idle, unknown = [part(0.97, 1.0, 1.03), part(1.001, 1.005, 1.009)], part(0.0, 5.0, 29348.73)
    assert all(map(is_idle, idle))
    assert not any(map(is_idle, [part(1.2, 1.3, 1.4), part(0.2, 1.1, 6.0), unknown]))
    (row,) = parts_table(replace(examples.record(), input=Config(), parts=(unknown,))).rows
    shown = " ".join(row.cells)
    assert "bf16" in shown and "could not tell" in shown
    assert not any(word in shown for word in ("by itself", "29348", "5.00"))


def test_an_inconclusive_verification_leaves_the_record_unchanged(tuned: Path) -> None:
    """The machine's speed varies so much that the interval is too wide."""
    changed = revise(stored()[1], stale="it was busy")
    with fake_worker(GAINS, noise=1.0):
        done = advisor(tuned, "verify", changed.id, "--budget", "60s")
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("could not tell whether the record holds: ")
    assert "; measure on a quieter machine, or with more than 60s" in last
    assert stored()[1] == changed


def case(
    then: float, now: tuple[float, float, float], verdict: str, message: str = "", **options: Any
) -> Any:
    return pytest.param(then, now, verdict, message, options)


STEADY = (1.5, 1.48, 1.52)
TEN_TIMES_SLOWER = {"rates": [200.0], "host": 10.0}


@pytest.mark.parametrize(
    ("then", "now", "verdict", "text", "options"),
    [
        case(14.31, (14.0, 13.7, 14.3), HOLDS),
        case(14.31, (20.0, 19.0, 21.0), HOLDS),
        case(14.31, (13.0, 11.0, 15.4), HOLDS),
        case(14.31, (20.0, 13.0, 30.8), HOLDS),
        case(14.31, (6.37, 0.4, 101.0), INCONCLUSIVE, "252x from end to end"),
        case(14.31, (6.37, 2.0, 20.3), INCONCLUSIVE, "10.2x from end to end"),
        case(14.31, (14.31, 9.0, 22.8), INCONCLUSIVE, "2.53x from end to end"),
        case(14.31, (6.37, 0.0, math.inf), INCONCLUSIVE, "more than 1000x from end to end"),
        case(1.02, (1.02, 0.99, 1.05), INCONCLUSIVE, "1.06x from end to end"),
        case(17.6, (8.1, 7.0, 9.4), FAILS, "8.10x (7.00-9.40) torch's default now, 17.60x when"),
        case(1.05, (1.0, 0.995, 1.005), FAILS, "it is no longer faster"),
        # A wide interval promises only its low end: 2.24x (1.54-3.25) on a busy host.
        case(2.24, (2.01, 1.99, 2.03), HOLDS, low=1.54),
        case(2.24, (1.3, 1.28, 1.32), FAILS, low=1.54),
        # A failure takes precedence over an inconclusive result.
        case(2.0, (1.2, 1.1, 1.3), FAILS, flags=(2.0, 0.5, 8.0)),
        case(2.0, (2.0, 1.9, 2.1), FAILS, "trains like fp32", wrong="no longer trains like fp32"),
        # The samples/s are compared, too.
        case(1.5, STEADY, HOLDS, rates=[1900.0, 2000.0, 1500.0]),
        case(1.5, STEADY, INCONCLUSIVE, "700 samples/s now, 2,000", rates=[600.0, 700.0, 1900.0]),
        case(1.5, STEADY, FAILS, "700 samples/s now, 2,000 when", rates=[600.0, 700.0, 800.0]),
        # A slower host is inconclusive, but it does not explain a lower speed-up.
        case(1.5, STEADY, INCONCLUSIVE, "the host is 10x slower", **TEN_TIMES_SLOWER),
        case(1.5, (1.5, 0.1, 9.0), INCONCLUSIVE, "the host is 10x slower", **TEN_TIMES_SLOWER),
        case(1.5, (1.2, 1.1, 1.3), FAILS, **TEN_TIMES_SLOWER),
    ],
)
def test_a_record_holds_fails_or_is_inconclusive(
    then: float, now: tuple[float, float, float], verdict: str, text: str, options: dict[str, Any]
) -> None:
    made = choice(speedup=then)
    made = replace(made, speedup_low=options.get("low", made.speedup_low))
    record = with_winners(examples.record(), lambda _one: made)
    ratios = {"flags": options["flags"]} if "flags" in options else {}
    result, reason = judged(
        record,
        {
            use: Ratio(mean=mean, low=low, high=high)
            for use, (mean, low, high) in {**ratios, LOOP: now}.items()
        },
        options.get("rates", [2000.0]),
        [turn / options.get("host", 1.0) for turn in record.baseline.rounds],
        options.get("wrong", ""),
    )
    assert result == verdict and text in reason
    assert (reason == "") == (verdict == HOLDS)


def test_a_slower_host_does_not_refute_a_record_without_advice() -> None:
    record = with_winners(examples.record(), lambda _one: examples.record().baseline)
    rates = [record.baseline.samples_per_s / 9]
    assert judged(record, {}, rates, rates)[0] == INCONCLUSIVE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "ffffffffffff"), "no such record"),
        (("explain", "KEY", "--target", "other.py"), "has changed since"),
        (("verify", "KEY", "--target", "nowhere.py"), "nowhere.py"),
        (("verify", "KEY", "--budget", "soon"), "expected a time"),
    ],
)
def test_wrong_input_gives_one_line(tuned: Path, arguments: tuple[str, ...], message: str) -> None:
    (tuned / "other.py").write_text(MODEL.replace("width=8", "width=9"))
    _, record = stored()
    words = [record.id if word == "KEY" else word for word in arguments]
    done = advisor(tuned, *words)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1
    assert stored()[1] == record


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "subprocess:getoutput", "origin": ""}, "nothing imported: name it with"),
        ({"name": "this:d", "origin": ""}, "nothing imported: name it with"),
        ({"name": "torchvision:no_such_net", "origin": ""}, "no such model"),
        ({"name": "elsewhere.py:Net"}, "this folder: name it with"),
        ({"origin": "0" * 16, "code": "0" * 16}, "this folder: name it with"),
        ({"model_args": Config(command="touch ran")}, "--target"),
    ],
)
def test_code_that_only_the_record_names_is_not_run(
    tuned: Path, changes: dict[str, Any], message: str
) -> None:
    """Only a target that the user names is run, or the record's own file below this folder."""
    (tuned / "this.py").write_text("open('ran', 'w').write('ran')\n")
    record = stored()[1]
    arguments = changes.pop("model_args", Config())
    target = replace(record.target, **changes)
    task = replace(record.key.task, target=target.name, model_args=arguments)
    planted = replace_record(replace(record, target=target, key=replace(record.key, task=task)))
    done = advisor(tuned, "verify", planted.id, "--budget", "3s")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not (tuned / "ran").exists()


def replace_record(record: Record) -> Record:
    """Replace the only record by another one."""
    records, before = stored()
    records.remove(records.versions(before.key.id, before.batch))
    records.put(record)
    return record


def test_a_copied_target_is_run_if_the_user_signed_or_names_it(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a record of a job, whose worker had the code in another folder."""
    record = stored()[1]
    (tmp_path / "nets.py").write_text(MODEL)
    moved = advisor(tmp_path, "verify", record.id)
    assert moved.returncode == 2 and "name it with --target" in moved.stderr
    named = advisor(tmp_path, "verify", record.id, "--target", "nets.py")
    last = "compared with fp32: as fp32\nthe record holds\n"
    assert named.returncode == 0 and named.stdout.endswith(last)
    replace_record(replace(record, target=replace(record.target, origin="0" * 16)))
    done = advisor(tuned, "verify", record.id)
    assert done.returncode == 0 and done.stdout.endswith("the record holds\n"), done.stderr
    monkeypatch.setenv("XDG_DATA_HOME", str(tuned / "another user"))
    done = advisor(tuned, "verify", record.id, "--budget", "3s")
    assert done.returncode == 2 and "name it with --target" in done.stderr
