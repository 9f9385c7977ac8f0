"""apply() and lookup() in a training script: what is served, when, and what is said."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import advisor
from advisor.cache.config import Config
from advisor.cache.key import Key
from advisor.cache.record import Record, Target, Winner
from advisor.cache.records import Records
from advisor.cache.stores import open_store
from advisor.cache.task import Task
from advisor.tuners import fingerprint, target
from advisor.tuners.environment import detect, own_threads
from advisor.tuners.knobs import KNOBS, TORCH
from tests.builders import lookup_arguments, measured, verified
from tests.cache import examples
from tests.face.commands import MODEL, script

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
ALONE = DEFAULT.replace(threads=OTHER)
"""What a script that calls nothing but apply() can follow."""
WIDE = FAST.at(16)
GIB = 2**30


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with model.py; the process's flags are put back afterwards."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def net_of(name: str) -> nn.Module:
    return target.build(target.load(target.parse(name), Config()))


def net() -> nn.Module:
    return net_of("model.py:Net")


def remember(**changes: Any) -> Record:
    """Keep a record of model.py:Net at 4x3x8x8 on this CPU, with some of its key changed."""
    name = changes.pop("name", "model.py:Net")
    made = target.parse(name)
    task = Task.of(name, {"shape": (4, 3, 8, 8)})
    key = Key(
        environment=detect("cpu"),
        model=fingerprint.of_model(net()),
        task=task,
        threads=THREADS,
    )
    for field, value in changes.items():
        key = examples.changed(key, field.replace("__", "."), value)
    fast = replace(examples.choice(FAST, 150.0, 1.5), peak_bytes=2 * GIB)
    winners = {
        ("flags", False): examples.choice(ALONE, 110.0, 1.1),
        ("pilot", False): examples.choice(ALONE, 110.0, 1.1),
        ("loop", False): fast,
        ("capture", False): fast,
        ("loop", True): examples.choice(WIDE, 400.0, 4.0),
        ("capture", True): examples.choice(WIDE, 400.0, 4.0),
    }
    record = replace(
        examples.record(key),
        target=Target(name=made.name, origin=made.origin, code=made.code),
        baseline=examples.choice(DEFAULT, 100.0),
        winners=tuple(Winner(use=u, free=f, choice=c) for (u, f), c in winners.items()),
        input=Config(),
        trials=(
            measured(DEFAULT, 100.0),
            measured(FAST, 150.0, peak_bytes=2 * GIB),
            measured(DEFAULT.replace(channels_last=True), 120.0),
            measured(WIDE, 400.0, peak_bytes=8 * GIB),
            measured(DEFAULT.at(8), 150.0),
            measured(FAST.at(8), 300.0, peak_bytes=4 * GIB),
            measured(DEFAULT.at(16), 151.0),
            verified(FAST),
        ),
    )
    Records(open_store(None)).put(record)
    return record


@pytest.fixture
def record(here: Path) -> Record:
    return remember()


def runs_as(patch: pytest.MonkeyPatch, file: Path) -> None:
    """As if this process ran that script."""
    file.touch()
    patch.setattr(sys.modules["__main__"], "__file__", str(file), raising=False)


def look(**arguments: Any) -> advisor.Advice:
    """What lookup gives for model.py:Net on the CPU."""
    return advisor.lookup(advisor.Model("model.py:Net", device="cpu"), **arguments)


def told(**arguments: Any) -> tuple[advisor.Advice, str]:
    """What lookup gives on the CPU, and its one warning."""
    with pytest.warns(advisor.AdvisorWarning) as seen:
        advice = advisor.lookup(**lookup_arguments(device="cpu", **arguments))
    assert len(seen) == 1
    assert seen[0].filename == __file__, "the warning names another line than the user's"
    return advice, str(seen[0].message)


@pytest.mark.parametrize(
    "arguments",
    [
        {"target": "model.py"},
        {"target": "model.py:Net"},
        {"target": "model.py:Net", "shape": (4, 3, 8, 8)},
        {"target": "model.py:Net", "dtype": "float32", "optimizer": "sgd", "model_args": {}},
        {"shape": (4, 3, 8, 8)},
        {},
    ],
)
def test_found(record: Record, here: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any) -> None:
    runs_as(monkeypatch, here / "train.py")
    advice = advisor.lookup(**lookup_arguments(device="cpu", **arguments))
    assert (advice.status, advice.config, advice.served.flags) == ("exact", FAST, ALONE)
    assert advice.record is not None and advice.record.id == record.id
    assert "1.50x" in advice.served.reason and "not in force yet" in advice.reason


@pytest.mark.parametrize("status", ["exact", "miss", "disabled"])
def test_every_knob_can_be_read_by_its_name(
    record: Record, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """Whatever was served, and torch's own value where that says nothing of it."""
    if status == "disabled":
        monkeypatch.setenv("ADVISOR_DISABLE", "1")
    asked = {"mode": "infer"} if status == "miss" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", advisor.AdvisorWarning)
        advice = advisor.lookup(**lookup_arguments("model.py:Net", device="cpu", **asked))  # type: ignore[arg-type]
    assert advice.status == status
    for knob in KNOBS:
        assert getattr(advice.config, knob.name) == advice.config.get(knob.name, knob.default)
    assert advice.config.fused_optimizer is False  # no CPU has it
    assert advice.config.threads == (OTHER if status == "exact" else None)
    with pytest.raises(AttributeError, match="config has no 'thread'"):
        advice.config.thread  # noqa: B018
    copied = pickle.loads(pickle.dumps(advice.config))
    assert copied == advice.config and copied.step_graph is False


def test_found_by_the_model_itself(record: Record) -> None:
    assert advisor.lookup(advisor.Model(net(), device="cpu")).config == FAST
    assert advisor.lookup(advisor.Model(nn.DataParallel(net()), device="cpu")).status == "exact"
    _, said = told(target=nn.Linear(2, 2))
    assert "this Linear was not tuned" in said


def test_found_beside_the_script_from_another_folder(
    record: Record, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_as(monkeypatch, here / "train.py")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert look().status == "exact"


def test_another_file_of_the_name_is_not_the_one_that_was_tuned(record: Record, here: Path) -> None:
    (here / "copy").mkdir()
    (here / "model.py").rename(here / "copy" / "model.py")
    assert advisor.lookup(advisor.Model("copy/model.py:Net", device="cpu")).status == "exact"
    with (here / "copy" / "model.py").open("a") as file:
        file.write("print('another')\n")
    advice, said = told(target="copy/model.py:Net")
    assert advice.status == "miss"
    assert "file another of this name -> this one" in said
    assert "run: advisor tune copy/model.py:Net --shape 4x3x8x8" in said
    # The model itself is what it was.
    assert (
        advisor.lookup(advisor.Model(net_of("copy/model.py:Net"), device="cpu")).status == "exact"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"shape": (4, 3, 9, 9)}, "shapes 3x8x8 -> 3x9x9"),
        ({"dtype": "float64"}, "dtype float32 -> float64"),
        ({"mode": "infer"}, "mode train -> infer"),
        ({"optimizer": "adamw"}, "optimizer sgd -> adamw"),
        ({"deterministic": True}, "deterministic False -> True"),
        ({"model_args": {"width": 9}}, "model.py:Net was not tuned for this"),
        ({"batch": 32}, "not measured at batch 32"),
        ({"max_memory": "100MiB"}, "not measured at batch 4 within 100 MiB"),
    ],
)
def test_miss(record: Record, arguments: Any, says: str) -> None:
    flags = (torch.get_num_threads(), torch.get_float32_matmul_precision())
    with pytest.warns(advisor.AdvisorWarning) as seen:
        advice = advisor.apply(**lookup_arguments("model.py:Net", device="cpu", **arguments))
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert says in str(seen[0].message)
    assert "run: advisor tune model.py:Net --shape" in str(seen[0].message)
    assert (advice.status, advice.config, advice.loader.get("pin_memory")) == (
        "miss",
        TORCH,
        None,
    )
    assert flags == (torch.get_num_threads(), torch.get_float32_matmul_precision())
    with pytest.raises(advisor.NoRecord):
        advisor.apply(**lookup_arguments("model.py:Net", device="cpu", strict=True, **arguments))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"shape": "4x3"}, "was not tuned for this"),
        ({"shape": "4by3"}, "shape '4by3': expected a batch and a sample"),
        ({"shape": 4}, "shape 4: expected a batch and a sample"),
        ({"shape": ()}, "expected a batch and a sample"),
        ({"batch": 0}, "batch 0: expected a number of at least 1, or 'free'"),
        ({"batch": "big"}, "batch 'big': expected"),
        ({"mode": "trian"}, "mode 'trian': expected one of train, infer"),
        ({"dtype": "f32"}, "dtype 'f32': expected one of float32"),
        ({"optimizer": "lion"}, "optimizer 'lion': expected one of sgd"),
        ({"precisions": ["bf17"]}, "precisions ['bf17']: expected some of default"),
        ({"max_memory": "lots"}, "max memory 'lots': expected a positive size"),
        ({"device": "tpu"}, "device 'tpu': expected cpu, cuda or cuda:N"),
        ({"target": 12}, "target 12: expected a target's name"),
        ({"target": ""}, "target '': expected model.py"),
    ],
)
def test_wrong_arguments_break_no_run(record: Record, arguments: Any, says: str) -> None:
    arguments = {"target": "model.py:Net", "device": "cpu"} | arguments
    with pytest.warns(advisor.AdvisorWarning) as seen:
        advice = advisor.apply(**lookup_arguments(**arguments))
    assert says in str(seen[0].message)
    assert (advice.status, advice.device.type, len(seen)) == ("miss", "cpu", 1)
    advice.prepare(net())
    with pytest.raises(advisor.AdvisorError):
        advisor.apply(**lookup_arguments(**arguments, strict=True))


def test_arguments_as_scripts_have_them(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    for shape in ("4x3x8x8", [4, 3, 8, 8], torch.Size([4, 3, 8, 8])):
        advice = advisor.lookup(
            advisor.Model("model.py", dtype=torch.float32, device=torch.device("cpu")),
            shape=shape,
            strict=True,
        )
        assert (advice.status, advice.batch_size) == ("exact", 4)
    assert (
        advisor.lookup(
            advisor.Model("model.py", device="cpu"), permit=advisor.Permit(precisions="bf16")
        ).config
        == FAST
    )


def test_disabled(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADVISOR_DISABLE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advice = advisor.apply(advisor.Model("model.py:Net", device="cpu"), shape=(4, 3, 8, 8))
    assert (advice.status, advice.config, advice.batch_size) == ("disabled", Config(), 4)
    assert torch.get_num_threads() == THREADS


def test_apply_sets_what_lookup_leaves(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    look()
    assert torch.get_num_threads() == THREADS
    advisor.apply(advisor.Model("model.py:Net", device="cpu"))
    assert torch.get_num_threads() == OTHER


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ({"batch": "free"}, WIDE),
        ({"batch": 16}, WIDE),
        ({"batch": 8}, FAST.at(8)),
        ({"shape": (8, 3, 8, 8)}, FAST.at(8)),
        ({"max_memory": "1GiB"}, DEFAULT.replace(channels_last=True)),
        ({"max_memory": 3 * 2**30}, FAST),
        ({"precisions": ["default"]}, DEFAULT.replace(channels_last=True)),
        ({"precisions": ["default", "bf16"]}, FAST),
    ],
)
def test_answered_from_the_record(record: Record, arguments: Any, config: Config) -> None:
    advice = advisor.lookup(**lookup_arguments("model.py:Net", device="cpu", **arguments))
    assert (advice.status, advice.config) == ("exact", config)
    assert advice.batch_size == config["batch_size"]
    assert advice.loader["batch_size"] == config["batch_size"]


def test_several_that_fit_are_listed(record: Record) -> None:
    remember(shapes=(3, 16, 16))
    _, said = told(target="model.py:Net")
    assert "several records fit" in said
    assert "3x8x8" in said and "3x16x16" in said
    assert look(shape=(4, 3, 8, 8)).status == "exact"


def test_determinism_is_never_undone(record: Record) -> None:
    torch.use_deterministic_algorithms(True)
    with pytest.warns(advisor.AdvisorWarning, match="deterministic"):
        advice = advisor.apply(advisor.Model("model.py:Net", device="cpu"))
    assert advice.status == "miss"
    assert torch.are_deterministic_algorithms_enabled()
    kept = remember(deterministic=True)
    found = look()
    assert found.record is not None and found.record.id == kept.id
    torch.use_deterministic_algorithms(False)
    # Not asked for: the record without it comes first, though the other is as new.
    found = look()
    assert found.record is not None and found.record.id == record.id


def test_a_job_of_several_processes(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    advice = look()
    assert (advice.status, advice.config) == ("exact", FAST)
    assert "this job has 4" in advice.served.reason
    monkeypatch.setenv("RANK", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert advisor.lookup(advisor.Model("nothing.py:Net", device="cpu")).status == "miss"


def test_a_changed_model_is_noticed(record: Record) -> None:
    advice = look()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advice.prepare(net())
    wider = target.build(target.load(target.parse("model.py:Net"), Config(width=9)))
    with pytest.warns(advisor.AdvisorWarning, match="not the one tuned as model.py:Net") as seen:
        advice.prepare(wider)
    assert seen[0].filename == __file__


def test_log(record: Record, here: Path) -> None:
    source = "import advisor\nadvisor.apply(advisor.Model('model.py:Net', device='cpu'))\n"
    ran = script(here, source, ADVISOR_LOG="info")
    assert f"advisor INFO record {record.id} (exact)" in ran.stderr
    # What was advised and never took effect is said, once, and nothing else.
    (line,) = script(here, source).stderr.splitlines()
    assert line.startswith("advice at the end: ") and "1.50x once" in line


def test_beside_a_users_own_cache_and_tuners(record: Record, here: Path) -> None:
    for name in ("cache", "tuners", "config", "record", "target"):
        (here / f"{name}.py").write_text(f"MINE = '{name}'\n")
    source = (
        "import cache, tuners, config, record, target, model, advisor\n"
        "advice = advisor.lookup(advisor.Model(device='cpu'))\n"
        "print(cache.MINE, tuners.MINE, advice.status)\n"
    )
    ran = script(here, source, process=True)
    assert (ran.stdout.strip(), ran.stderr) == ("cache tuners exact", "")


def corrupt(store: Path) -> None:
    (store / "records" / "cache.db").write_bytes(b"no database" * 1000)


def cut(store: Path) -> None:
    path = store / "records" / "cache.db"
    path.write_bytes(path.read_bytes()[:5000])


def a_file(store: Path) -> None:
    (store / "records" / "cache.db").unlink()
    for path in (store / "records").iterdir():
        path.unlink()
    (store / "records").rmdir()
    (store / "records").write_text("")


def garbage(store: Path) -> None:
    kept = Records(open_store(str(store)))
    (name,) = kept.stores[0].keys()
    kept.stores[0].put(name, b"\x00garbage")


def contents(store: Path) -> dict[Path, bytes]:
    """Every file but the -wal and -shm that SQLite keeps for readers too."""
    return {p: p.read_bytes() for p in store.rglob("*") if p.is_file() and "-" not in p.name}


@pytest.mark.parametrize("spoil", [corrupt, cut, a_file, garbage])
def test_a_damaged_store_costs_a_warning(
    record: Record, own_surroundings: Path, spoil: Any
) -> None:
    spoil(own_surroundings)
    before = contents(own_surroundings)
    advice, _said = told(target="model.py:Net")
    assert (advice.status, advice.config) == ("miss", TORCH)
    assert contents(own_surroundings) == before
    with pytest.raises(advisor.AdvisorError):
        look(strict=True)


@pytest.mark.parametrize("url", ["floppy:bucket/x", "disk:/dev/null/x"])
def test_an_unusable_cache_costs_a_warning(
    here: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("ADVISOR_CACHE", url)
    advice, said = told(target="model.py:Net")
    assert advice.status == "miss"
    assert "ADVISOR_CACHE" in said


def test_tune_moves_a_damaged_store_aside(
    record: Record, own_surroundings: Path, unmeasured: list[Task]
) -> None:
    said: list[str] = []
    corrupt(own_surroundings)
    found = advisor.tune(
        advisor.Model("model.py:Net", device="cpu"),
        shape=(4, 3, 8, 8),
        on_event=lambda event: said.append(event["text"]),
    )
    assert not found.known and len(unmeasured) == 1
    (aside,) = own_surroundings.glob("records.damaged-*")
    assert str(aside) in said[0]
    assert (aside / "cache.db").read_bytes().startswith(b"no database")
    advice = look()
    assert advice.record is not None and advice.record.id == found.record.id


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "small"),
    [("train_conv.py", ("--batch", "1")), ("train_mnist.py", ("--steps", "3"))],
)
def test_examples_train_without_a_record(name: str, small: tuple[str, str], here: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / name
    ran = subprocess.run(
        [sys.executable, str(example), *small], capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("AdvisorWarning") == 1 and "advisor tune" in ran.stderr


def test_logging_is_left_alone(record: Record) -> None:
    look()
    assert logging.getLogger("advisor").handlers == []
