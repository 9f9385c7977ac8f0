"""Tests apply() without a target, which applies the record of the run itself, and release()."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

import advisor
from advisor.bootstrap import LazyGuide
from advisor.cache.artifacts import Purpose
from advisor.cache.config import Config, Value
from advisor.cache.key import Key
from advisor.cache.record import Record, Target
from advisor.open_store import open_records
from advisor.resolve import lookups
from advisor.resolve.failures import Failures
from advisor.resolve.online import OnlineTuner, own_command
from advisor.resolve.record_guide import RecordGuide
from advisor.resolve.request import Request
from advisor.tuners.act import advice_usage
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.act.pilot.pilot import UNADVISED, ActivePilot
from advisor.tuners.act.pilot.protocol import BlockRequest
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.act.ranks import Group
from advisor.tuners.environment import detect, tools
from advisor.tuners.knobs import TORCH, Advised
from advisor.tuners.tf32 import describe
from tests import forks
from tests.builders import Net, trained
from tests.cache.examples import choice, record, trial, winners
from tests.face.commands import LINEAR
from tests.runs.forked import Looks, left_behind, space_of
from tests.tuners import test_gate as gated
from tests.tuners.test_gate import EPOCH, FULL, SHORT, Backend, backend

__all__ = ["backend"]  # a fixture
SCRIPT = f"""
import sys

import advisor

advice = advisor.apply(strict="strict" in sys.argv)

{LINEAR.format(steps=8)}
print("trained")
"""


def record_of(seen: ScriptFacts, fast: Config) -> Record:
    """Returns a verified record, as `advisor tune -- python train.py` would store it."""
    default = space_of(seen).default
    if "compile" in fast:
        default = default.replace(compile="none")
    key = Key(
        environment=detect("cpu"),
        model=seen.model,
        task=seen.task(["python", "train.py"], {}),
        libraries=seen.libraries,
        threads=seen.threads,
    )
    won, base = choice(default.replace(**fast), 3000.0, 1.5), choice(default)
    made = record(key, trials=0, input=Config())
    return replace(
        made,
        target=Target(name="python train.py", origin=""),
        baseline=base,
        winners=winners(base, won, pilot=won),
        trials=(
            trial(0, default),
            trial(1, won.config),
            replace(trial(2, won.config), stage="numerics", origin="fp32"),
        ),
        provenance=replace(
            made.provenance, modules=seen.modules, parameters=seen.parameters, study=""
        ),
    )


def facts_of(train: Callable[[], object]) -> ScriptFacts:
    """Returns the facts that a pilot sees while `train` trains."""
    guide, pilot = Looks(), ActivePilot()
    pilot.attach(guide)
    train()
    pilot.release()
    return guide.seen


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    advisor.release()
    yield
    advisor.release()
    assert left_behind() == []


@pytest.fixture
def seen() -> ScriptFacts:
    """Returns the facts that a pilot sees of a script that trains Net."""
    return facts_of(lambda: trained(Net()))


@pytest.fixture
def stored_record(seen: ScriptFacts) -> None:
    """Stores a record for Net that advises bf16 and channels_last."""
    open_records(None).put(record_of(seen, Config(precision="bf16", channels_last=True)))


@pytest.mark.usefixtures("stored_record")
def test_apply_puts_the_record_of_the_run_in_force_until_release() -> None:
    with warnings.catch_warnings(action="error"):
        advice = advisor.apply()
        assert (advice.reason, advice.status) == (lookups.AT_FIRST_STEPS, "miss")
        net = Net()
        trained(net)
    assert net.dtypes[0] == torch.float32
    assert net.dtypes[-1] == torch.bfloat16
    assert net.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert advice.report().startswith("in force: channels_last, bf16; 1.50x")
    assert advice.status == "exact"
    advisor.release()
    assert not net.conv.weight.is_contiguous(memory_format=torch.channels_last)
    trained(net, 1)
    assert net.dtypes[-1] == torch.float32


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"channels_last": True}, "channels_last; without reshard_after_forward=False, with"),
        ({}, "your unmodified script; reshard_after_forward=False: all that is advised"),
    ],
)
def test_a_setting_that_the_scripts_wrapper_does_not_permit_is_not_in_force(
    seen: ScriptFacts, more: dict[str, Value], said: str
) -> None:
    tuned = replace(seen, wrapped=("reshard_after_forward",))  # the same model under FSDP2
    open_records(None).put(record_of(tuned, Config({"reshard_after_forward": False, **more})))
    advice = advisor.apply()
    with pytest.warns(match="reshard_after_forward=False: advised, and not in force; the wrapper"):
        trained(Net())
    assert advice.report().startswith(f"in force: {said}")


def test_damaged_artifacts_are_refused_and_compiled_anew(
    seen: ScriptFacts, caplog: pytest.LogCaptureFixture
) -> None:
    made = record_of(seen, Config(compile="default"))
    records = open_records(None)
    store = records.put(made)
    purpose = Purpose.of(made, made.winner("pilot").config, detect("cpu"), tools())
    assert records.artifacts.keep(b"no pickle", purpose, store)
    (key,) = store.sizes()
    store.put(key, b"rubbish")
    with caplog.at_level("INFO", "advisor"):
        request = RecordGuide(["python", "train.py"], Request()).advice_for(seen)
    assert request is not None and request.config["compile"] == "default"
    refused = "artifacts: in an unknown format; refused; compiled anew"
    messages = [one.getMessage() for one in caplog.records]
    assert refused in messages and messages[-1].endswith(f"; {refused}")


@pytest.mark.usefixtures("stored_record")
def test_a_tuned_run_is_not_tuned_again(
    seen: ScriptFacts, capsys: pytest.CaptureFixture[str]
) -> None:
    OnlineTuner(["python", "train.py"], Request(), tune_s=9.0).begin(seen)
    output = capsys.readouterr().err
    assert output.startswith("advisor: tune: nothing is tried, because this run is tuned; "), output


@pytest.mark.usefixtures("stored_record")
def test_all_ranks_skip_a_config_that_failed_on_one_of_them(
    seen: ScriptFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the machine of that rank has stored the failure."""
    store, thread = HashStore(), threading.local()
    monkeypatch.setattr(Group, "current", lambda: Group(store, thread.rank, 2))
    monkeypatch.setattr(Failures, "of", lambda *_: "OutOfMemoryError" if thread.rank else "")
    monkeypatch.setattr(lookups, "_calls", itertools.repeat(0))  # as in new processes

    def request(rank: int) -> BlockRequest | None:
        thread.rank = rank
        return RecordGuide(["python", "train.py"], Request()).advice_for(seen)

    warned = pytest.warns(advisor.AdvisorWarning, match="failed with it .on another rank")
    with warned, ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(request, range(2))
    assert first is not None and first == second and first.config == first.own


def test_epochs_after_the_first_compile_nothing(backend: Backend) -> None:
    """Each epoch has a short last batch and an evaluation."""

    def start_training() -> tuple[gated.Net, torch.optim.Optimizer]:
        net = gated.Net()
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    seen, pilot = facts_of(lambda: gated.epoch(*start_training(), EPOCH)), ActivePilot()
    open_records(None).put(record_of(seen, Config(compile="default")))
    pilot.attach(LazyGuide({"command": ["python", "train.py"], "tune_s": 0, "options": None}))
    net, optimizer = start_training()
    gated.epoch(net, optimizer, EPOCH)
    first = graphs_compiled()
    assert backend.made == [FULL]
    for _ in range(2):
        net.ran.clear()
        gated.epoch(net, optimizer, EPOCH)
        assert net.ran == [SHORT, 3, FULL]
    assert graphs_compiled() == first
    pilot.release()


@pytest.mark.usefixtures("stored_record")
def test_every_model_of_a_cross_validation_gets_the_advice() -> None:
    """Earlier models are freed. Of models that train alternately, one keeps the advice."""
    advisor.apply()
    gone: list[weakref.ref[Any]] = []
    for _fold in range(3):
        net = Net()
        optimizer = trained(net, 24)
        assert net.dtypes[0] == torch.float32
        assert net.dtypes[-1] == torch.bfloat16
        gc.collect()
        assert [one() for one in gone] == [None] * len(gone)
        gone += map(weakref.ref, (net, optimizer))
    other = Net()
    last = trained(other, 24)
    for _ in range(2):
        trained(net, 10, optimizer)
        trained(other, 10, last)
    assert (net.dtypes[-1], other.dtypes[-1]) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("turns", [1, 6], ids=["after the first", "in turn with it"])
@pytest.mark.usefixtures("stored_record")
def test_a_second_model_trains_unmodified_with_one_warning(turns: int) -> None:
    advisor.apply()
    first, second, own = Net(), nn.Linear(3, 5), describe()
    kept = trained(first, 24)
    advised = describe()
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    with pytest.warns(advisor.AdvisorWarning) as caught:
        for _ in range(turns):
            trained(second, 42 // turns, optimizer, (2, 3))
            if turns > 1:
                trained(first, 1, kept)
    assert [str(one.message) for one in caught] == [
        f"advisor: {UNADVISED}. Training goes on unmodified"
    ]
    assert first.conv.weight.is_contiguous(memory_format=torch.channels_last)
    if turns == 1:
        assert describe() == own != advised  # the flags were measured on the first model
        kept.step()
        assert describe() == advised


@pytest.mark.usefixtures("stored_record")
def test_config_that_fails_in_backward_is_skipped_until_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: list[Exception] = [torch.OutOfMemoryError("no memory left"), ScriptError()]

    def fails(_gradient: Tensor) -> None:
        raise errors[-1]

    def restart() -> Net:
        advisor.release()
        advice_usage._last.clear()
        advisor.apply()
        return Net()

    monkeypatch.setattr(Net, "backward", staticmethod(fails))
    with pytest.raises(ScriptError) as own:
        trained(restart())  # the script's own exceptions are not stored
    assert "possible cause: channels_last, bf16. ADVISOR_DISABLE=1" in own.value.__notes__[0]
    errors.pop()
    net = restart()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trained(net)
    assert caught.value.__notes__ == [
        "advisor: backward raised this under advice, a possible cause: channels_last, bf16; "
        "the next start leaves it out. ADVISOR_DISABLE=1 runs the script unmodified"
    ]
    trained(net, 1)  # as a script that catches the exception
    assert net.dtypes[-1] == torch.float32
    why = "failed with it .OutOfMemoryError: no memory left.*: advisor tune --force -- python train"
    with pytest.warns(advisor.AdvisorWarning, match=why):
        trained(again := restart())
    assert set(again.dtypes) == {torch.float32}
    monkeypatch.setattr(Net, "backward", staticmethod(lambda gradient: gradient))
    records = open_records(None)
    (kept,) = records.all()
    newer = replace(kept.provenance, created=time.time() + 1)
    records.put(replace(kept, provenance=newer))
    trained(now := restart())
    assert now.dtypes[-1] == torch.bfloat16


class ScriptError(RuntimeError):
    """An exception that a script defines."""


@pytest.mark.usefixtures("stored_record")
def test_crash_under_advice_names_it_and_the_next_start_skips_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, exc, _trace: printed.append(exc))
    advisor.apply()
    trained(net := Net())
    with pytest.raises(RuntimeError, match="view size") as caught:
        net.conv.weight.view(-1)
    for own in (ValueError("the script's"), ScriptError()):
        sys.excepthook(type(own), own, None)
    with pytest.warns(advisor.AdvisorWarning) as warned:
        sys.excepthook(RuntimeError, caught.value, caught.tb)
    assert len(printed) == 3
    assert [str(one.message) for one in warned] == [
        "advisor: the script ended under advice, a possible cause: channels_last, bf16; the "
        "next start leaves it out. ADVISOR_DISABLE=1 runs the script unmodified"
    ]
    advisor.release()
    records = open_records(None)
    (kept,) = records.all()
    records.put(replace(kept, stale="it is slower now"))
    advisor.apply()
    with pytest.warns(advisor.AdvisorWarning) as warned:
        trained(net := Net())
    assert len(warned) == 1
    assert "is left out: this run failed" in str(warned[0].message)
    net.conv.weight.view(-1)


@pytest.mark.usefixtures("stored_record")
def test_advice_that_is_not_permitted_is_not_applied() -> None:
    advice = advisor.apply(permit=advisor.Permit(precisions=["default"]))
    trained(net := Net())
    assert "your unmodified script" in advice.report()
    assert set(net.dtypes) == {torch.float32}


@pytest.mark.usefixtures("stored_record")
def test_advice_that_the_script_applies_itself_wins() -> None:
    served = Served(default=TORCH)
    advice = Advice(Advised(Config(channels_last=True)), device="cpu", served=served)
    advisor.apply()
    advice.prepare(net := Net())
    trained(net)
    assert set(net.dtypes) == {torch.float32}
    assert left_behind() == []


@pytest.mark.usefixtures("stored_record")
def test_apply_adds_no_pilot_if_the_command_has_attached_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pilot, guide, net = ActivePilot(), Looks(), Net()
    monkeypatch.setattr("advisor.resolve.online.ACTIVE_PILOT", pilot)
    pilot.attach(guide)
    advisor.apply()
    trained(net)
    assert guide.seen.shape == (4, 3, 8, 8)
    assert set(net.dtypes) == {torch.float32}
    pilot.release()


def test_flags_set_by_advice_are_not_the_scripts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    PROCESS_FLAGS.put(Config(threads=threads + 1))
    advisor.apply()
    seen: list[ScriptFacts] = []
    begin = RecordGuide.begin
    monkeypatch.setattr(RecordGuide, "begin", lambda own, one: seen.append(one) or begin(own, one))
    with pytest.warns(advisor.AdvisorWarning, match=r"advisor tune -- \S*python"):
        trained(Net())
    assert [one.threads for one in seen] == [threads]
    # There is no record, so the flags that advice had set are in force again.
    assert torch.get_num_threads() == threads + 1
    advisor.release()
    assert torch.get_num_threads() == threads


def test_invalid_calls_attach_no_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(advisor.AdvisorWarning, match="tune"):
        advisor.apply(tune="soon")
    assert left_behind() == []
    for act in (advisor.lookup, lambda: advisor.apply(advisor.Model(mode="infer"))):
        with pytest.warns(advisor.AdvisorWarning, match="target None: give its name"):
            act()
    assert left_behind() == []
    monkeypatch.setenv("ADVISOR_DISABLE", "1")
    advisor.apply()


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return forks.run(Path("train.py"), *words, cwd=folder)


def test_where_nothing_is_known_one_warning_has_the_command(tmp_path: Path) -> None:
    done = run(tmp_path, "it's", "", "two\nlines")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("AdvisorWarning") == 1
    line = """advisor tune -- python train.py 'it'"'"'s' '' 'two?lines'"""
    assert f"; run: {line}." in done.stderr
    # The warning names the script's line, not the line of PyTorch that calls the hook.
    assert done.stderr.startswith((f"{tmp_path}/train.py:", "train.py:"))


def test_if_warnings_are_errors_one_line_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    advisor.apply()
    trained(Net())  # pytest makes warnings errors, as `python -W error` does
    output = capsys.readouterr().err
    assert output.startswith("advisor: this run was not tuned") and output.count("\n") == 1


def test_strict_ends_the_script(tmp_path: Path) -> None:
    done = run(tmp_path, "strict")
    assert done.returncode == 1
    assert "NoRecord: this run was not tuned" in done.stderr


LR = "-m package.train --lr 1"
ELASTIC = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("words", "environment", "command"),
    [
        (f"python3 {LR}", {"PATH": ""}, f"python3 {LR}"),
        # The full path, unless `python` means the same one: another one may lack torch.
        (f"{sys.executable} {LR}", {}, f"python {LR}"),
        (f"{sys.executable} {LR}", {"PATH": ""}, f"{sys.executable} {LR}"),
        ("/x/bin/python3 -u train.py", ELASTIC, "torchrun --nproc-per-node 4 train.py"),
    ],
)
def test_own_command_is_the_one_that_a_user_types(
    words: str, environment: dict[str, str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "orig_argv", words.split())
    assert own_command() == command.split()
