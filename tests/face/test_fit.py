"""advisor fit: the order of configs, the starts of a command, and what is printed of the memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from advisor.bootstrap import INJECTED
from advisor.cache.config import Config
from advisor.cache.record import Record, Trial
from advisor.cache.task import OFFLOADED
from advisor.errors import TargetFailed, WorkerError
from advisor.report import memory
from advisor.report.data import Table
from advisor.report.html import page
from advisor.tuners import knobs
from advisor.tuners.act.pilot.protocol import LEAST_MEMORY, MAX_MEMORY
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.measure.run.run import Run
from advisor.tuners.measure.run.session import PilotSession, RunEnded, ran_out_of_memory
from advisor.tuners.measure.runner import Block, Compared, ConfigFailed
from advisor.tuners.search.batch_sizes import BatchSizes
from advisor.tuners.search.plan import Clock
from advisor.tuners.search.race import SearchResult
from tests import builders
from tests.builders import GAINS, SCRIPT, MadeUp, MadeUpSession, advised, space
from tests.cache import examples
from tests.face.commands import MODEL, advisor
from tests.face.test_report_page import check_page
from tests.face.unmeasured import fake_search
from tests.tuners.test_order import changes, visits

SAVES = Config(checkpoint_blocks=1, offload=True)
GIB = 2**30


class Limited(MadeUp):
    """A made-up machine whose configs need memory. `most`: GiB that it has; `more`: that the
    comparison with fp32 needs besides."""

    def __init__(self, baseline: Config, most: float, more: float = 0.0) -> None:
        costs = {("checkpoint_blocks", n): 1 - 0.25 / n for n in (1, 2, 4)}
        super().__init__(baseline, gains={**GAINS, **costs, ("offload", True): 0.5})
        self.most, self.more = most, more

    def needs(self, config: Config) -> float:
        """Returns the GiB that a config needs."""
        every = int(config.get("checkpoint_blocks") or 0)
        needs = {0: 20.0, 1: 8.0, 2: 13.0, 4: 16.0}[every]
        if config["precision"] == "bf16":
            needs *= 0.75
        if config.get("compile") == "default":
            needs *= 0.6
        return min(needs, 4.0) if config.get("offload") else needs

    def _switch(self, config: Config, deadline_s: float) -> float:
        if self.needs(config) > self.most:
            raise ConfigFailed("out_of_memory", "CUDA out of memory")
        return super()._switch(config, deadline_s)

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        found = super().compare(config, deadline_s=deadline_s)
        lacks = self.needs(config) + self.more > self.most
        return Compared("out_of_memory", "CUDA out of memory") if lacks else found


def saving(**more: Any) -> Any:
    return space(own=SAVES, repeats=True, convolves=False, **more)


NOTHING = "checkpoint_blocks=0 offload=False"


@pytest.mark.parametrize(
    ("most", "first"),
    [
        (16.0, [f"{NOTHING} bf16", f"{NOTHING} default bf16"]),
        (
            12.5,
            [
                *(f"{NOTHING} bf16", "checkpoint_blocks=4 offload=False bf16"),
                "checkpoint_blocks=4 blocks offload=False bf16",
                f"{NOTHING} default bf16",
            ],
        ),
    ],
)
def test_least_effort_to_save_memory_is_tried_first(most: float, first: list[str]) -> None:
    knobs_of = saving()
    order = visits(Limited(knobs_of.default, most), knobs_of)
    seen, wanted = ([sorted(one.split()) for one in found] for found in (order, first))
    assert seen[: len(first)] == wanted


@pytest.mark.parametrize(
    ("most", "more", "budget_s"),
    [*((most, 0.0, 400.0) for most in (5.0, 7.0, 10.0, 12.5, 16.0, 40.0)), (12.5, 2.0, 20.0)],
)
def test_advice_is_the_fastest_config_that_fits(most: float, more: float, budget_s: float) -> None:
    """A config that has no memory for the comparison is passed over."""
    knobs_of = saving(compiles=not more)
    machine = Limited(knobs_of.default, most, more)
    found = advised(builders.tuned(machine, knobs_of, budget_s))
    fits = [one for one in knobs_of.configs(64) if machine.needs(one) + more <= most]
    assert found in fits
    assert machine.speedup(found) > 0.95 * max(map(machine.speedup, fits))


def test_code_for_the_whole_model_is_not_checkpointed() -> None:
    knobs_of = saving()
    assert knobs_of.holds(knobs_of.default)
    found = knobs_of.on(knobs_of.default, {"compile": "default"})
    assert found is not None and found["checkpoint_blocks"] == 0
    assert not knobs_of.holds(found.replace(checkpoint_blocks=2))
    # A CUDA graph holds its memory while another config trains.
    for mode in ("reduce-overhead", "cudagraphs"):
        assert knobs_of.on(knobs_of.default, {"compile": mode}) is None
    found = knobs_of.on(knobs_of.default, {"compile": "blocks"})
    assert found is not None and changes(found, knobs_of) == "blocks"


def test_how_a_config_saves_memory_is_said_whatever_the_baseline_does() -> None:
    own = saving().default
    assert knobs.described(own, own, nothing="same") == "same"
    every = own.replace(precision="bf16")
    assert knobs.described(every, own) == f"checkpointing of every block, {OFFLOADED}, bf16"
    half = every.replace(checkpoint_blocks=2, offload=False)
    assert knobs.described(half, own) == "checkpointing of one block in 2, bf16"
    nothing = own.replace(checkpoint_blocks=0, offload=False)
    assert knobs.described(nothing, own) == "without saving memory"
    assert knobs.described(nothing.replace(precision="bf16"), own) == "bf16, without saving memory"


# Other batches ----------------------------------------------------------------------------------


class Batches(Limited):
    """A made-up machine: a step takes 1 s and 1 GiB that no batch changes, and 40 ms beside its
    call. `told`: the outcome of a batch."""

    def __init__(self, most: float, memory: float | None = None, **told: str) -> None:
        super().__init__(saving().default, most)
        self.step_s, self.told = 1.0, told
        self.memory = int(GIB * (most if memory is None else memory))
        self.replayed: list[Config] = []

    def call_s(self, config: Config, batch: int) -> float:
        return (self._seconds(config)[0] - 0.04) * float((batch / 64) ** 0.8)

    def gib(self, config: Config, batch: float) -> float:
        return 1 + (self.needs(config) - 1) * batch / 64

    def block(self, config: Config, steps: int, *, batch: int = 0, **how: Any) -> Block:
        if not batch:
            found = super().block(config, steps, **how)
            return replace(found, peak_bytes=int(self.needs(config) * GIB))
        self.replayed.append(config)
        seconds, needs = steps * self.call_s(config, batch), self.gib(config, batch) - 0.5
        self._spend(seconds, how["deadline_s"])
        if (outcome := self.told.get(f"at_{batch}")) or needs > self.most:
            raise ConfigFailed(outcome or "out_of_memory", "it is made to fail")
        return Block(steps=steps, samples=0, seconds=seconds, peak_bytes=int(needs * GIB))


def freed(machine: Batches, more_s: float = 100.0, **seen: Any) -> SearchResult:
    """Returns the result of a search, and then of other batches in `more_s` seconds."""
    found = builders.tuned(machine, saving(), 900.0)
    run, clock = cast(Run, machine), Clock(more_s, now=machine.now)
    return BatchSizes(run, replace(SCRIPT, **seen), clock).add_to(found)


def tried(found: SearchResult) -> dict[int, Trial]:
    return {one.config.batch: one for one in found.trials if one.stage == "batch"}


@pytest.mark.parametrize("most", [5.0, 7.0, 12.5, 16.0, 40.0])
def test_largest_batch_fits_and_the_others_are_as_fast_as_they_are(most: float) -> None:
    machine = Batches(most)
    found = freed(machine, memory=Config(gradients=GIB // 4))
    (largest,) = (n for n, one in tried(found).items() if one.origin == "largest")
    (config,) = {*machine.replayed}
    assert {8, 16, 32, 64} <= {*tried(found)}
    assert machine.gib(config, largest) <= most < machine.gib(config, largest + 1.5)
    for size, one in tried(found).items():
        steps = max(1, 64 // size)  # of accumulation; between two, gradients stay
        rate = steps * size / (0.04 + steps * machine.call_s(config, size))
        assert one.measurement.samples_per_s == pytest.approx(rate, rel=0.05)
        gib = machine.gib(config, size) + 0.25 * (steps > 1)
        assert one.measurement.peak_bytes == pytest.approx(gib * GIB)


def test_a_compiled_advice_is_replaced_by_the_fastest_that_compiles_nothing() -> None:
    machine = Batches(40.0)
    found = freed(machine)
    assert advised(found)["compile"] == "default" and advised(found) in machine.forgotten
    eager = [t for t in found.trials if t.config["compile"] == "none" and t.stage != "batch"]
    best = max(eager, key=lambda one: one.measurement.samples_per_s)
    assert {*machine.replayed} == {best.config}


def test_no_more_is_said_than_was_measured() -> None:
    """Without a known memory, as on a CPU; without time; if one batch fails; in micro-batches."""
    cpu = freed(Batches(400.0, memory=0))
    assert {*tried(cpu)} == {8, 16, 32, 64, 128, 256}
    late, odd = freed(Batches(40.0), more_s=5.0), freed(Batches(40.0, at_128="failed"))
    assert 64 in tried(late) and {*tried(odd)} == {8, 16, 32, 64}
    micro = tried(freed(Batches(400.0, memory=0), others="4 micro-batches"))
    assert [*micro] == [8, 16, 32, 64, 128, 256]  # calls of 2 to 64
    assert {x.origin for one in (cpu, late, odd) for x in tried(one).values()} == {"replay"}
    none = freed(Batches(40.0, at_32="failed", at_128="failed"))
    assert none.remarks[-1] == "No other batch was measured: it is made to fail"


# The starts of a command ------------------------------------------------------------------------


class Starts(Run):
    """A command that runs out of memory unless it has `most` bytes or more; with the least memory
    it needs `least`, and at least `calls` if blocks are called twice. `counts_calls`: its blocks
    cannot be called twice; `ends`: how its later steps end."""

    def __init__(
        self,
        *,
        needs: float = 0,
        least: float = 0,
        calls: float = 0,
        limit: int = 0,
        counts_calls: bool = False,
        ends: Exception | None = None,
    ) -> None:
        super().__init__(("train",), injected=INJECTED, log=Path("log"), max_memory=limit)
        self.needs, self.least, self.calls = needs, least, calls
        self.counts_calls, self.ends = counts_calls, ends
        self.starts: list[tuple[bool, bool]] = []

    def _start(self, words: tuple[str, ...], start_s: float) -> PilotSession:
        ways = self._variables.get(LEAST_MEMORY, "").split()
        saves, limit = bool(ways), int(self._variables.get(MAX_MEMORY, 0))
        self.starts.append((saves, limit > 0))
        if self.counts_calls and "checkpoint_blocks" in ways:
            said = "it ended: NotRecomputable: checkpointing: Block changes something in every call"
            raise RunEnded("failed", "it failed", 1, said)
        needs = self.least if saves else self.needs
        needs = max(needs, self.calls) if "checkpoint_blocks" in ways else needs
        if needs > (limit or 80 * GIB):
            raise RunEnded("out_of_memory", "it failed", 1, "it ended: CUDA out of memory")
        names = ("weights", "gradients", "optimizer_state")
        parts = Config({name: GIB for name in names}, peak=int(needs))
        seen = replace(SCRIPT, own=SAVES if saves else Config(), memory=parts)
        return MadeUpSession(seen, ends=lambda _config, _made: self.ends)


@pytest.mark.parametrize(
    ("needs", "limit", "given", "starts"),
    [
        (10, 0, {}, [(False, False)]),
        (90, 0, {}, [(False, False), (True, False)]),
        (30, 24, {}, [(False, True), (True, True)]),
        (90, 0, {"counts_calls": True}, [(False, False), (True, False), (True, False)]),
        (90, 0, {"calls": 85 * GIB}, [(False, False), (True, False), (True, False)]),
    ],
)
def test_command_that_runs_out_of_memory_starts_once_more(
    needs: int, limit: int, given: dict[str, Any], starts: list[tuple[bool, bool]]
) -> None:
    """And again, without checkpointing, if its blocks cannot be called twice, or take too much."""
    run = Starts(needs=needs * GIB, least=5 * GIB, limit=limit * GIB, **given)
    seen: ScriptFacts = run.describe()
    assert run.starts == starts
    assert ("offload" in seen.own) is (len(starts) > 1)
    assert (run._variables.get(LEAST_MEMORY) == "offload") is bool(given)


@pytest.mark.parametrize(("most", "on_host"), [(10, True), (20, False)])
def test_fp32_keeps_activations_on_the_device_if_they_fit(most: int, on_host: bool) -> None:
    run = Starts(needs=90 * GIB, least=8 * GIB)
    run.baseline = run.describe().own
    run.memory = most * GIB
    own = MadeUpSession.results
    with mock.patch.object(MadeUpSession, "results", autospec=True, side_effect=own) as asked:
        assert run.compare(run.baseline.replace(precision="bf16"), deadline_s=60.0).ok
    assert asked.call_args.args[1].compare.fp32["offload"] is on_host


def test_memory_that_runs_out_after_the_first_steps_is_told_apart() -> None:
    """So that the tuning starts again with the least memory."""
    run = Starts(ends=RunEnded("out_of_memory", "CUDA out of memory"))
    run.describe()
    with pytest.raises(WorkerError, match="give it a smaller batch") as caught:
        run.block(run.baseline, 8, deadline_s=60.0)
    assert ran_out_of_memory(caught.value.__cause__)
    assert len(run.starts) == 1  # a second start would end in the same way


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (0, "nothing fits, also with the least memory: it ended: CUDA out of memory; give it a sm"),
        (3.5, "state take 3 GiB; give it a smaller batch, or a larger --memory"),
        (
            24,
            "nothing fits into 24 GiB: with the least memory it needs 30 GiB, of which weights, "
            "gradients and optimizer state take 3 GiB; by this, a batch of 2, with 2 steps of "
            "accumulation, would fit; or give a larger --memory",
        ),
        (2, "optimizer state take 3 GiB; share them among several GPUs, as with FSDP, or give a l"),
    ],
)
def test_if_nothing_fits_the_least_memory_is_said(limit: float, said: str) -> None:
    run = Starts(needs=200 * GIB, least=(30 if limit else 100) * GIB, limit=int(limit * GIB))
    with pytest.raises(TargetFailed, match=said):
        run.describe()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--memory=2GiB", "memory 2 GiB: the command trains on the CPU, whose memory advisor does"),
        ("--max-slowdown=2", "the command trains on the CPU and fits; for a faster config: "),
    ],
)
def test_command_that_trains_on_the_cpu_is_refused(tmp_path: Path, option: str, said: str) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with fake_search() as searched:
        done = advisor(tmp_path, "fit", option, "--quiet", "--", "python", "train.py")
    assert done.returncode == 2 and done.stderr.startswith(f"advisor: {said}"), done.stderr
    assert done.stderr.count("\n") == 1 and not searched


# What is printed --------------------------------------------------------------------------------


def record(**parts: Any) -> Record:
    """A record of a run that saves memory, with these parts."""
    own = examples.DEFAULT | SAVES
    quick = own.replace(checkpoint_blocks=2, offload=False, precision="bf16")
    large = quick.replace(checkpoint_blocks=0)
    key = examples.changed(examples.KEY, "command", ("python", "train.py"))
    made = examples.record(examples.changed(key, "script", f"checkpointed, {OFFLOADED}"))
    best = examples.choice(quick, 6000.0, 3.0)
    tried = (examples.trial(0, own), examples.trial(1, large, "out_of_memory"))
    return replace(
        made,
        baseline=replace(made.baseline, config=own),
        winners=examples.winners(replace(made.baseline, config=own), best, pilot=best),
        trials=(*tried, builders.measured(quick, 6000.0, peak_bytes=20 * GIB)),
        memory=Config(parts),
    )


PARTS = {
    "weights": GIB,
    "peak": 9 * GIB,
    "host": 4 * GIB,
    "blocks": 20 * GIB,
    "block": "<b>Layer</b>",
    "unmodified": 1.5,
}


def test_ladder_shows_what_fits_and_what_is_advised() -> None:
    one = record(**PARTS)
    rows = [row.cells for row in memory.ladder(one).rows]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("nothing", "bf16", "out of memory"),
        ("checkpointing of one block in 2", "bf16", "advised"),
        (f"checkpointing of every block, {OFFLOADED}", "-", ""),
    ]
    assert rows[1][2] == "20 GiB"
    assert memory.slowdown(one) == pytest.approx(0.5)
    needs, faster = memory.lines(one)
    assert needs.startswith("Your unmodified script needs about 33 GiB, of ")
    assert faster.startswith("The advice is 2.00x as fast as your script would be with enough mem")
    parsed = check_page(page(one), ("chosen", "ladder", "memory"))
    assert "<b>Layer</b>" in parsed.text and "rect" in parsed.tags
    assert "4 GiB" in parsed.text and "Ways to save memory" in parsed.text


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"weights": "x", "peak": -1, "host": None, "blocks": 2.5, "unmodified": "y"},
        {"block": "\x1b[31m" + "a" * 9999, "blocks": 2**63, "host": 0, "peak": True},
        {"unmodified": 1e308, "weights": 2**64 - 1},
    ],
)
def test_record_with_any_parts_has_a_page(parts: dict[str, Any]) -> None:
    text = page(record(**parts))
    check_page(text, ("chosen", "ladder"))
    assert "\x1b" not in text and "a" * 100 not in text


def test_other_batches_are_shown_with_the_accumulation_that_keeps_yours() -> None:
    """Within 3% of the fastest, the smallest counts, or else the user's own."""
    made = record(**PARTS)
    own, b = made.winner("pilot").config.replace(precision="tf32"), made.batch
    rates = {b // 2: 5000.0, b: 6000.0, 2 * b: 6900.0, 4 * b: 7000.0, 5 * b: 6800.0}
    trials = [builders.measured(own.at(n), rate, stage="batch") for n, rate in rates.items()]
    trials[-1] = replace(trials[-1], origin="largest")
    one = replace(made, trials=(*made.trials, *trials))
    found = next(part for part in memory.sections(one) if part.name == "batches")
    rows = [(row.cells[0], *row.cells[3:]) for row in cast(Table, found.table).rows]
    assert rows[:3] == [
        (str(b // 2), "2", ""),
        (str(b), "1", "yours"),
        (str(2 * b), "-", "fastest"),
    ]
    assert found.lines[0] == f"The largest batch that fits: about {5 * b}. The fastest: {2 * b}."
    assert "tf32, because torch.compile" in found.lines[2] and memory.batches(made) == []
    check_page(page(one), ("chosen", "ladder", "batches", "memory"))


def test_whether_sharding_is_needed_is_said() -> None:
    parts = PARTS | {"gradients": GIB, "optimizer_state": 2 * GIB}
    for whole, said in (
        (8 * GIB, "not needed: without it a GPU would hold about 13 GiB"),
        (2**40, "needed: "),
    ):
        assert f"sharding is {said}" in memory.sharding(record(**parts, unsharded=whole))
    alone = record(**parts)
    assert not memory.sharding(alone)
    two = replace(alone, key=examples.changed(alone.key, "processes", 2))
    assert "(fully_shard), each would need about 2 GiB less." in "".join(memory.lines(two))


def test_records_without_parts_say_nothing_of_memory() -> None:
    made = examples.record()
    assert not list(memory.sections(made)) and memory.slowdown(made) == 0
    assert not memory.saves(made)
