"""apply() and lookup() in a training script: what they serve, when, and what they print."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import advisor
from advisor.cache.config import Config
from advisor.cache.record import Record
from advisor.cache.records import Records
from advisor.cache.stores import open_stores
from advisor.cache.task import Task
from advisor.resolve.lookups import broadcast_from_rank0
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.act.ranks import Group
from advisor.tuners.environment import own_threads
from advisor.tuners.knobs import KNOBS, TORCH
from tests.builders import lookup_arguments, measured, net_of, record_here, verified
from tests.cache import examples
from tests.face.commands import run_script

THREADS = own_threads()
OTHER = THREADS + 1
DEFAULT = Config(
    precision="default",
    channels_last=False,
    cudnn_deterministic=False,
    batch_size=4,
    threads=THREADS,
)
FAST = DEFAULT.replace(precision="bf16", channels_last=True, threads=OTHER)
FLAGS_ONLY = DEFAULT.replace(threads=OTHER)
"""The part of FAST that a script can use if it only calls apply()."""
WIDE = FAST.at(16)
GIB = 2**30
NET = advisor.Model("model.py:Net", device="cpu")


def store_record(**changes: Any) -> Record:
    """Store a record of model.py:Net at 4x3x8x8 on this CPU, with parts of its key changed."""
    fast = replace(examples.choice(FAST, 150.0, 1.5), peak_bytes=2 * GIB)
    flags_only, wide = examples.choice(FLAGS_ONLY, 110.0, 1.1), examples.choice(WIDE, 400.0, 4.0)
    trials = (
        measured(DEFAULT, 100.0),
        measured(FAST, 150.0, peak_bytes=2 * GIB),
        measured(DEFAULT.replace(channels_last=True), 120.0),
        verified(DEFAULT.replace(channels_last=True)),
        measured(WIDE, 400.0, peak_bytes=8 * GIB),
        measured(DEFAULT.at(8), 150.0),
        measured(FAST.at(8), 300.0, peak_bytes=4 * GIB),
        measured(DEFAULT.at(16), 151.0),
        verified(FAST),
    )
    winners = examples.winners(flags_only, fast, free_loop=wide, free_capture=wide)
    record = record_here(examples.choice(DEFAULT, 100.0), winners, trials, **changes)
    Records(open_stores()).put(record)
    return record


@pytest.fixture
def record(here: Path) -> Record:
    return store_record()


def set_main_script(patch: pytest.MonkeyPatch, file: Path) -> None:
    """Make `file` the main script of this process."""
    file.touch()
    patch.setattr(sys.modules["__main__"], "__file__", str(file), raising=False)


def lookup_net(**arguments: Any) -> advisor.Advice:
    """The advice for model.py:Net on the CPU."""
    return advisor.lookup(NET, **arguments)


def lookup_warning(**arguments: Any) -> tuple[advisor.Advice, str]:
    """The advice of a lookup on the CPU, and the message of its only warning."""
    with pytest.warns(advisor.AdvisorWarning) as caught:
        advice = advisor.lookup(**lookup_arguments(device="cpu", **arguments))
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning names another line than the user's"
    return advice, str(caught[0].message)


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ({"target": "model.py:Net", "shape": "4x3x8x8"}, FAST),
        ({"dtype": torch.float32, "optimizer": "sgd", "model_args": {}}, FAST),
        ({"precisions": "bf16", "device": torch.device("cpu")}, FAST),
        ({"shape": torch.Size([4, 3, 8, 8])}, FAST),
        ({}, FAST),
        ({"batch": "free"}, WIDE),
        ({"target": "model.py:Net", "batch": 16}, WIDE),
        ({"shape": (8, 3, 8, 8)}, FAST.at(8)),
        ({"max_memory": "1GiB"}, DEFAULT.replace(channels_last=True)),
    ],
)
def test_lookup_serves_the_best_config_for_a_request(
    record: Record, here: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, config: Config
) -> None:
    set_main_script(monkeypatch, here / "train.py")
    monkeypatch.setenv("WORLD_SIZE", "")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")  # the file is found beside the script
    advice = advisor.lookup(
        **lookup_arguments(**{"target": "model.py", "device": "cpu", "strict": True} | arguments)
    )
    assert (advice.status, advice.config, advice.record) == ("exact", config, record)
    assert advice.batch_size == advice.loader["batch_size"] == config["batch_size"]
    if config == FAST:
        assert advice.served.flags == FLAGS_ONLY
        assert "1.50x" in advice.served.reason and "not in force yet" in advice.reason


@pytest.mark.parametrize("status", ["exact", "miss", "disabled"])
def test_every_knob_can_be_read_by_its_name(
    record: Record, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """Knobs that the served config does not have read as torch's default."""
    if status == "disabled":
        monkeypatch.setenv("ADVISOR_DISABLE", "1")
    with warnings.catch_warnings(action="ignore" if status == "miss" else "error"):
        advice = advisor.apply(NET, shape=(4, 3, 9 if status == "miss" else 8, 8))
    assert (advice.status, advice.batch_size) == (status, 4)
    if status == "disabled":
        assert advice.config == Config() and torch.get_num_threads() == THREADS
    for knob in KNOBS:
        assert getattr(advice.config, knob.name) == advice.config.get(knob.name, knob.default)
    with pytest.raises(AttributeError, match="config has no 'thread'"):
        advice.config.thread  # noqa: B018
    copied = pickle.loads(pickle.dumps(advice.config))
    assert copied == advice.config and copied.step_graph is False


def test_a_model_object_finds_its_record(record: Record, here: Path) -> None:
    assert advisor.lookup(advisor.Model(net_of(), device="cpu")).config == FAST
    assert advisor.lookup(advisor.Model(nn.DataParallel(net_of()), device="cpu")).status == "exact"
    _, message = lookup_warning(target=nn.Linear(2, 2))
    assert "this Linear was not tuned" in message


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"shape": (4, 3, 9, 9)}, "shapes 3x8x8 -> 3x9x9"),
        ({"mode": "infer"}, "mode train -> infer"),
        ({"deterministic": True}, "deterministic False -> True"),
        ({"model_args": {"width": 9}}, "model.py:Net was not tuned for this"),
        ({"batch": 32}, "not measured at batch 32"),
        ({"max_memory": "100MiB"}, "not measured at batch 4 within 100 MiB"),
    ],
)
def test_a_miss_warns_and_sets_no_flags(record: Record, arguments: Any, reason: str) -> None:
    flags = (torch.get_num_threads(), torch.get_float32_matmul_precision())
    request = lookup_arguments("model.py:Net", device="cpu", **arguments)
    with pytest.warns(advisor.AdvisorWarning) as caught:
        advice = advisor.apply(**request)
    (one,) = caught
    assert one.filename == __file__ and reason in str(one.message)
    assert "run: advisor tune model.py:Net --shape" in str(one.message)
    assert (advice.status, advice.config, advice.loader.get("pin_memory")) == ("miss", TORCH, None)
    assert flags == (torch.get_num_threads(), torch.get_float32_matmul_precision())
    with pytest.raises(advisor.NoRecord):
        advisor.apply(**request | {"strict": True})


def test_only_apply_sets_flags(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    lookup_net()
    assert torch.get_num_threads() == THREADS
    advisor.apply(NET)
    assert torch.get_num_threads() == OTHER


def test_determinism_is_never_undone(record: Record) -> None:
    torch.use_deterministic_algorithms(True)
    with pytest.warns(advisor.AdvisorWarning, match="deterministic"):
        advice = advisor.apply(NET)
    assert advice.status == "miss"
    assert torch.are_deterministic_algorithms_enabled()
    deterministic = store_record(deterministic=True)
    advice = lookup_net()
    assert advice.record is not None and advice.record.id == deterministic.id
    torch.use_deterministic_algorithms(False)
    # If determinism is not requested, the record without it comes first.
    advice = lookup_net()
    assert advice.record is not None and advice.record.id == record.id


def test_only_rank_0_warns_of_a_miss(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    advice = lookup_net()
    assert (advice.status, advice.config) == ("exact", FAST)
    monkeypatch.setenv("RANK", "3")
    with warnings.catch_warnings(action="error"):
        assert advisor.lookup(advisor.Model("nothing.py:Net", device="cpu")).status == "miss"


def test_advice_is_logged_once(record: Record, here: Path) -> None:
    lookup_net()
    assert logging.getLogger("advisor").handlers == []
    source = "import advisor\nadvisor.apply(advisor.Model('model.py:Net', device='cpu'))\n"
    logs = f"import logging\nlogging.basicConfig()\n{source}"
    ran = run_script(here, logs, ADVISOR_LOG="info")
    assert ran.stderr.count(f"record {record.id} (exact)") == 1
    assert f"advisor INFO record {record.id} (exact)" in ran.stderr
    # At exit, one line names the advice that never took effect. Nothing else is printed.
    (line,) = run_script(here, source).stderr.splitlines()
    assert line.startswith("advice at the end: ") and "1.50x once" in line


def test_modules_of_the_user_may_be_named_like_ours(record: Record, here: Path) -> None:
    for name in ("cache", "tuners", "config", "record", "target"):
        (here / f"{name}.py").write_text(f"MINE = '{name}'\n")
    source = (
        "import cache, tuners, config, record, target, model, advisor\n"
        "advice = advisor.lookup(advisor.Model('model.py', device='cpu'))\n"
        "print(cache.MINE, tuners.MINE, advice.status)\n"
    )
    ran = run_script(here, source)
    assert (ran.stdout.strip(), ran.stderr) == ("cache tuners exact", "")


def test_tune_quarantines_a_damaged_store(
    record: Record, own_surroundings: Path, searched: list[Task]
) -> None:
    messages: list[str] = []
    database = own_surroundings / "records" / "cache.db"
    database.write_bytes(b"no database" * 1000)
    assert lookup_warning(target="model.py:Net")[0].config == TORCH
    with pytest.raises(advisor.StoreError):
        lookup_net(strict=True)
    result = advisor.tune(
        NET, shape=(4, 3, 8, 8), on_event=lambda event: messages.append(event["text"])
    )
    assert not result.known and len(searched) == 1
    (aside,) = own_surroundings.glob("records.damaged-*")
    assert str(aside) in messages[0]
    assert (aside / "cache.db").read_bytes().startswith(b"no database")
    advice = lookup_net()
    assert advice.record is not None and advice.record.id == result.record.id


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"), [("train_conv.py", ("--batch", "1")), ("train_mnist.py", ("--steps", "3"))]
)
def test_examples_train_without_a_record(name: str, options: tuple[str, str], here: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / name
    ran = subprocess.run(
        [sys.executable, str(example), *options], capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("AdvisorWarning") == 1 and "advisor tune" in ran.stderr


def test_every_rank_gets_the_advice_of_rank_0(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, store = lookup_net().served, dict[str, bytes]()
    group = SimpleNamespace(rank=0, store=SimpleNamespace(set=store.__setitem__))
    group.get = lambda _key, _seconds: next(iter(store.values()))
    monkeypatch.setattr(Group, "current", lambda: group)
    assert broadcast_from_rank0(lambda: served) is served
    group.rank = 1
    reason = f"{served.reason}; decided by rank 0"
    same = replace(served, explanation=None, reason=reason, record=record)
    assert broadcast_from_rank0(lambda: Served()) == same
    store |= dict.fromkeys(store, b"\xc1")
    with pytest.raises(advisor.NoRecord, match="rank 0's message cannot be read"):
        broadcast_from_rank0(lambda: served)
