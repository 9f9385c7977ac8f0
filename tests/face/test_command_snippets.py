"""Every printed command and line of code works if it is copied literally."""

from __future__ import annotations

import re
import shlex
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import advisor as package
from advisor.cache.records import Records
from advisor.cache.task import Task
from advisor.open_store import open_records
from advisor.tuners import environment
from tests.builders import lookup_arguments, net_of
from tests.face.commands import MODEL, SHAPE, advisor, run_json, run_script
from tests.face.test_apply import set_main_script

ARGS_MODEL = MODEL.replace("width=8)", "width=8, name='', scale=1.0, bias=True, extra=None)")
TEXT_MODEL = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(128, 3))
"""
ODD = "it's a model $HOME.py"

ARGUMENTS = (
    *("--model-arg", "width=4", "--model-arg", 'name=it\'s "so" a b', "--model-arg", "scale=0.5"),
    *("--model-arg", "bias=false", "--model-arg", "extra=none"),
)
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "in a subfolder": ("examples/x.py:Net", ()),
    "a blank and a quote": (ODD, ()),
    "arguments": ("argued.py:Net", ARGUMENTS),
    "words": ("words.py", ("--dtype", "int64", "--vocab", "50", "--shape", "4x16")),
    "a mix": ("model.py", ("--shape", "2x3x10x10", "--shape", "6x3x6x6", "--shape", "4x3x8x8")),
} | {
    options: ("model.py", tuple(options.split()))
    for options in (
        *("", "--optimizer adamw", "--mode infer", "--precisions default,bf16"),
        *("--max-memory 1.5GiB", "--max-memory 1234567891", "--tolerance 0.05", "--no-verify"),
        *("--no-compile --no-step-graph", "--deterministic", "--batches 2,16", "--fixed-batch"),
        *("--steps 500 --effort quick", "--duration 2h"),
    )
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searched: list[Task]) -> Path:
    (tmp_path / "examples").mkdir()
    tuned = MODEL.replace("nn.Linear(width, 4)", "nn.Linear(width, 5)")
    files = {"argued.py": ARGS_MODEL, "words.py": TEXT_MODEL, "tuned.py": tuned}
    for name, source in (files | dict.fromkeys(("model.py", "examples/x.py", ODD), MODEL)).items():
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    set_main_script(monkeypatch, tmp_path / "train.py")
    return tmp_path


def tune(folder: Path, target: str, options: tuple[str, ...]) -> Any:
    """Tune a target and return its record as JSON."""
    shape = () if "--shape" in options else ("--shape", SHAPE)
    return run_json(folder, "tune", target, *shape, *options)["record"]


def paste(line: str) -> Any:
    """Run a printed line as a script does and return its advice. Sets no flags."""
    unset = SimpleNamespace(apply=package.lookup, Model=package.Model, Permit=package.Permit)
    scope: dict[str, Any] = {"advisor": unset}
    exec(line.strip(), scope)
    return scope["advice"]


def run_line(folder: Path, line: str) -> Any:
    """Run a printed command as a shell does and return its JSON output."""
    name, *words = shlex.split(line)
    assert name == "advisor"
    return run_json(folder, *words)


def command_in(message: str) -> str:
    """The command at the end of a message."""
    match = re.search(r"advisor (?:tune|sync) .*?(?=\. Training goes on|$)", message, re.MULTILINE)
    assert match, message
    return match[0]


def miss_message(target: str, **arguments: Any) -> str:
    with warnings.catch_warnings(record=True, action="always") as caught:
        advice = package.lookup(**lookup_arguments(target, **arguments))
    assert advice.status == "miss"
    return str(caught[-1].message)


@pytest.mark.parametrize(("target", "options"), CASES.values(), ids=CASES)
def test_the_line_and_the_command_of_a_record_work(
    here: Path, searched: list[Task], target: str, options: tuple[str, ...]
) -> None:
    """The line for a script, and the command that tunes a stale record again."""
    tune(here, "model.py", ("--max-memory", "3GiB"))  # another record of a similar target
    record = tune(here, target, options)
    shown = advisor(here, "show", record["id"]).stdout
    (line,) = (line for line in shown.splitlines() if "advisor.apply(" in line)
    assert line.strip() == record["script"]
    advice = paste(line)
    assert (advice.status, advice.record.id) == ("exact", record["id"])
    mark_stale(open_records(None), record["id"])
    with pytest.warns(package.AdvisorWarning) as caught:
        assert paste(record["script"]).status == "stale"
    again = run_line(here, command_in(str(caught[0].message)))
    assert (again["status"], again["record"]["id"]) == ("tuned", record["id"])
    _other, first, second = searched
    assert second == replace(first, target=second.target)
    # The second command may also name the class, which is known by then.
    assert second.target.partition(":")[0] == target.partition(":")[0]


def mark_stale(records: Records, name: str) -> None:
    """Mark a record as stale."""
    (record,) = (one for one in records.all() if one.id == name)
    records.put(replace(record, stale="it is slower", revised=time.time()), revises=record)


def test_the_script_line_works_elsewhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed by a server's worker, which keeps the record in its own folder."""
    stores = ("--cache", "dir:scratch", "--for", "https://advisor.example")
    done = advisor(here, "tune", "examples/x.py", "--shape", SHAPE, *stores)
    assert "In your script, with ADVISOR_CACHE=https://advisor.example\n" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if "advisor.apply(" in line)
    assert "scratch" not in done.stdout and "cache=" not in line
    monkeypatch.setenv("ADVISOR_CACHE", f"dir:{here}/scratch")
    copy = here / "elsewhere"
    copy.mkdir()
    (here / "examples" / "x.py").rename(copy / "x.py")
    monkeypatch.chdir(copy)
    assert paste(line).status == "exact"


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("model.py", {}),
        ("examples/x.py:Net", {"optimizer": "adamw", "deterministic": True}),
        (ODD, {"precisions": ["default", "bf16"], "max_memory": "2GiB"}),
        ("model.py:Net", {"batches": [2], "compile": False, "step_graph": False, "tolerance": 0}),
        ("argued.py:Net", {"model_args": {"name": 'it\'s "so"', "scale": 0.5, "bias": False}}),
        ("words.py", {"shape": "4x16", "dtype": "int64", "vocab": 50}),
        ("model.py", {"mode": "infer", "batch": 32}),
        ("model.py", {"shape": [(4, 3, 8, 8), (2, 3, 6, 6)]}),
        ("tuned.py:Net", {"shape": (4, 3, 9, 9)}),
    ],
)
def test_the_command_of_a_miss_works(here: Path, target: str, options: dict[str, Any]) -> None:
    """If the target has a record, the command keeps its options, except those asked for."""
    tune(here, "tuned.py:Net", ("--optimizer", "adamw", "--max-memory", "1GiB"))
    options = {"shape": (4, 3, 8, 8), **options}
    command = command_in(miss_message(target, **options))
    assert ("--optimizer adamw" in command) == ("optimizer" in options or target == "tuned.py:Net")
    result = run_line(here, command)
    assert result["status"] == "tuned"
    # After tuning, the record has the class of the file.
    advice = package.lookup(**lookup_arguments(target, strict=True, **options))
    assert (advice.status, advice.record.id) == ("exact", result["record"]["id"])  # type: ignore[union-attr]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("source", "command"),
    [
        ("import advisor\nfrom examples.x import Net", "examples/x.py:Net"),
        (f"import advisor\n{MODEL}\nif __name__ == '__main__':", "train.py:Net"),
    ],
    ids=["a module", "the script, if importing it does not train"],
)
def test_the_command_for_a_model_object_works(here: Path, source: str, command: str) -> None:
    own = "    " * source.endswith(":")
    call = f"{own}advisor.lookup(advisor.Model(Net(), device='cpu'), shape=(4, 3, 8, 8))\n"
    ran = run_script(here, f"{source}\n{call}")
    line = command_in(ran.stderr.splitlines()[0])
    assert line == f"advisor tune {command} --shape 4x3x8x8"
    # Net has constructor arguments, whose values cannot be seen.
    assert "; run, with --model-arg for its constructor arguments: advisor tune" in ran.stderr
    result = run_line(here, line)
    if not own:
        model = package.Model(net_of(command), device="cpu")
        advice = package.lookup(model, shape=(4, 3, 8, 8))
        assert advice.record is not None and advice.record.id == result["record"]["id"]


@pytest.mark.e2e
def test_no_command_is_printed_if_its_target_or_shape_is_unknown(here: Path) -> None:
    """The message says in words what to run instead."""
    (here / "wanting.py").write_text(MODEL.replace("width=8", "width"))
    inside = "".join(f"    {line}\n" for line in MODEL.splitlines())
    (here / "factory.py").write_text(f"def make():\n{inside}    return Net\n")
    ran = run_script(
        here,
        "import warnings; warnings.simplefilter('always')\n"
        "import advisor, factory, wanting\n"
        "from torch import nn\n"
        f"{MODEL}\n"
        "for model in wanting.Net(3), factory.make()(), nn.Linear(3, 3), Net():\n"
        "    advisor.lookup(advisor.Model(model, device='cpu'), shape=(4, 3))\n",
    )
    messages = re.findall("AdvisorWarning: (.*)", ran.stderr)
    assert len(messages) == 4, ran.stderr
    for line in messages:
        assert "; run advisor tune on your model, named as file.py:Class. Training" in line
    shapeless = miss_message("model.py:Net")
    assert "; run advisor tune on model.py:Net, with your batch and one sample as" in shapeless
    for line in (*messages, shapeless):
        assert "TARGET" not in line and "BATCH" not in line and "run: " not in line


def test_the_command_names_a_device_that_is_not_the_default(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "default_device", lambda: "cuda:0")
    message = miss_message("model.py", shape=(4, 3, 8, 8), device="cpu")
    assert command_in(message) == "advisor tune model.py --shape 4x3x8x8 --device cpu"


@pytest.mark.parametrize("stores", ["dir:else where", "dir:else where,dir:there"])
def test_the_command_names_a_store_that_is_not_the_default(here: Path, stores: str) -> None:
    """For a miss and for a stale record."""
    cache = stores.split(",")
    command = command_in(miss_message("model.py", shape=(4, 3, 8, 8), cache=cache))
    record = run_line(here, command)["record"]
    advice = package.lookup("model.py", shape=(4, 3, 8, 8), strict=True, store=cache[0])
    assert advice.record is not None and advice.record.id == record["id"]
    assert paste(record["script"]).record.id == record["id"]
    assert open_records(None).all() == []
    mark_stale(open_records(cache[0]), record["id"])
    with pytest.warns(package.AdvisorWarning) as caught:
        assert package.lookup("model.py:Net", store=cache).status == "stale"
    assert run_line(here, command_in(str(caught[0].message)))["status"] == "tuned"
    assert [one.stale for one in open_records(cache[0]).all()] == [""]


def test_the_command_for_edited_code_tunes_it(here: Path, searched: list[Task]) -> None:
    record = tune(here, ODD, ("--optimizer", "adamw"))
    (here / ODD).write_text(MODEL.replace(".mean((2, 3))", ".amax((2, 3))"))
    done = advisor(here, "verify", record["id"])
    assert done.returncode == 2 and "has changed since" in done.stderr
    again = run_line(here, command_in(done.stderr.strip()))
    assert again["status"] == "tuned" and again["record"]["id"] != record["id"]
