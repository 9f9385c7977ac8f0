"""The commands, in processes of their own, on the CPU."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import advisor as package
from advisor import __version__
from advisor.cache.codec import to_plain
from advisor.cache.config import Config
from advisor.cache.name import Name
from advisor.cache.records import Records
from advisor.cache.stores import open_store
from advisor.cache.task import Task
from advisor.opening import open_records
from advisor.printed import script_line
from advisor.report import tables
from advisor.tuners.environment import detect
from tests.cache import examples
from tests.face.commands import (
    COMMAND,
    MODEL,
    PACE,
    SHAPE,
    advisor,
    offer_bf16,
    own,
    script,
    take_over,
)

TUNE = ("tune", "model.py", "--shape", SHAPE, "--device", "cpu", "--effort", "quick")
FIVE_TRIALS = ("--budget", "6s", "--trials", "5")
TWO_TRIALS = ("--budget", "5s", "--trials", "2")
NOISY = "import sys\nprint('the model says hello')\nprint('and goodbye', file=sys.stderr)\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.py, its store with one record, and what tuning it printed."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "model.py").write_text(NOISY + MODEL)
    done = advisor(folder, *TUNE, *FIVE_TRIALS, "--json", **own(folder))
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return folder


@pytest.fixture
def tuned(project: Path, own_surroundings: Path) -> Path:
    """The project; ADVISOR_CACHE is a copy of its store, so that a test may spoil it."""
    take_over(project)
    return project


@pytest.fixture
def first(tuned: Path) -> dict[str, Any]:
    """Its record, as tuning printed it."""
    found = json.loads((tuned / "stdout").read_text())["record"]
    assert isinstance(found, dict)
    return found


def serve(line: str) -> Any:
    """The advice of a line to paste, without touching a flag of this process."""
    call = line.strip().removeprefix("advice = ").replace("advisor.apply", "advisor.lookup")
    return eval(call, {"advisor": package})


def winner(record: dict[str, Any], use: str) -> dict[str, Any]:
    (found,) = [w["choice"] for w in record["winners"] if (w["use"], w["free"]) == (use, False)]
    assert isinstance(found, dict)
    return found


def line_to_paste(printed: str) -> str:
    (line,) = (line.strip() for line in printed.splitlines() if "advisor.apply(" in line)
    return line


def test_json_is_one_document_and_progress_is_lines(project: Path) -> None:
    found = json.loads((project / "stdout").read_text())
    assert found["status"] == "tuned"
    record = found["record"]
    assert record["id"].endswith("@4")
    assert 1 <= record["provenance"]["trials"] <= 5
    assert {t["config"]["batch_size"] for t in record["trials"]} <= {4, 8, 16}
    shown = (project / "stderr").read_text()
    assert "trial 0:  torch default  batch 4" in shown
    assert "\x1b" not in shown and "hello" not in shown and "goodbye" not in shown


def test_what_is_tuned_is_not_measured_again(tuned: Path, first: dict[str, Any]) -> None:
    again = advisor(tuned, *TUNE, "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout) == {"status": "known", "record": first}
    assert again.stderr == ""


def test_force_measures_again(tuned: Path, first: dict[str, Any]) -> None:
    """And on a terminal it shows a live table, which leaves stdout alone."""
    ours, theirs = os.openpty()
    forced = subprocess.Popen(
        [str(COMMAND), *TUNE, *TWO_TRIALS, "--force", "--json"],
        cwd=tuned,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert b"\x1b[" in shown and b"best at your batch" in shown
    found = json.loads(forced.communicate()[0])
    assert found["status"] == "tuned"
    assert found["record"]["id"] == first["id"]
    assert found["record"]["provenance"]["created"] > first["provenance"]["created"]


@pytest.mark.parametrize(
    "narrower",
    [
        ("--max-memory", "1TiB"),
        ("--precisions", "default"),
        ("--tolerance", "0.5"),
        ("--batches", "2"),
        ("--deterministic",),
        ("--optimizer", "adamw"),
    ],
)
def test_another_permission_is_another_record(
    tuned: Path, first: dict[str, Any], unmeasured: list[Task], narrower: tuple[str, ...]
) -> None:
    """Which neither is answered by the one there is, nor hides it."""
    done = advisor(tuned, *TUNE, *narrower, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["status"], found["record"]["id"] == first["id"]) == ("tuned", False)
    served = advisor(tuned, "why", "model.py", "--shape", SHAPE, "--device", "cpu", "--json")
    assert json.loads(served.stdout)["record"] == first["id"]


def test_the_line_it_prints_works_in_a_script(tuned: Path) -> None:
    told = advisor(tuned, *TUNE)
    assert told.stdout.startswith("Already tuned, ")
    assert "--force measures again" in told.stdout
    line = line_to_paste(told.stdout)
    ran = script(tuned, f"import advisor\n{line}\nprint(advice.status, advice.batch_size)\n")
    assert ran.stdout.strip() == "exact 4"
    # By chance something is a few per cent faster, which this script then does not follow.
    assert not ran.stderr or ran.stderr.startswith("advice at the end: not in force yet")


def test_the_line_of_a_store_elsewhere_names_it(
    tuned: Path, own_surroundings: Path, first: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = own_surroundings.rename(own_surroundings.with_name("elsewhere"))
    monkeypatch.chdir(own_surroundings.parent)
    shown = advisor(Path.cwd(), "show", first["id"], "--cache", "elsewhere")
    monkeypatch.chdir(tuned)
    advice = serve(line_to_paste(shown.stdout))
    assert (advice.status, advice.record.id) == ("exact", first["id"])
    assert f'cache="disk:{elsewhere}"' in shown.stdout


def test_each_record_is_found_by_its_own_line(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is tuned for the same file and shape."""
    monkeypatch.chdir(tuned)
    records = open_records(None)
    (plain,) = records.all()
    key, task = plain.key, plain.key.task
    changes: list[dict[str, Any]] = [
        {"mode": "infer"},
        {"optimizer": "adamw"},
        {"deterministic": True},
        {"precisions": ("default", "bf16")},
        {"max_memory": 2**40},
        {"compile": False},
        {"step_graph": False},
        {"batches": (2,)},
        {"tolerance": 0.5},
    ]
    others = [replace(plain, key=replace(key, task=replace(task, **one))) for one in changes]
    arguments = Config(width=9, kind="a b", bias=None)
    others.append(
        replace(
            plain,
            key=replace(key, model="f" * 64, task=replace(task, model_args=arguments)),
        )
    )
    for record in others:
        records.put(record)
    for record in others:
        advice = serve(script_line(record))
        assert (advice.status, advice.record.id) == ("exact", record.id)
    # Last, because beside it a line that names no dtype is no answer any more.
    for one in ({"dtype": "float64"}, {"dtype": "int64", "vocab": 9}):
        other = replace(plain, key=replace(key, task=replace(task, **one)))
        records.put(other)
        assert serve(script_line(other)).record.id == other.id


def test_show(tuned: Path, first: dict[str, Any]) -> None:
    key, elsewhere = first["id"], examples.record()
    Records(open_store()).put(elsewhere)
    listed = advisor(tuned, "show")
    assert listed.returncode == 0
    assert all(word in listed.stdout for word in (key, "model.py:Net", "3x8x8", "fresh", "now"))
    assert all(word in listed.stdout for word in (elsewhere.id, "NVIDIA H200", "3x256x256"))
    whole = advisor(tuned, "show", key[:5])
    assert all(
        word in whole.stdout
        for word in ("torch default", "samples/s", "first step", "advisor.apply(")
    )
    assert json.loads(advisor(tuned, "show", key, "--json").stdout) == first | {
        "signed": True,
        "artifacts": [],
    }
    rows = json.loads(advisor(tuned, "show", "--json").stdout)
    assert [(row["id"], row["stale"]) for row in rows["records"]] == [(key, []), (elsewhere.id, [])]
    assert rows["damaged"] == []


def test_a_narrow_terminal_shows_the_config_whole() -> None:
    fast = examples.DEFAULT.replace(precision="bf16", channels_last=True)
    record = examples.record()
    loop = examples.choice(fast, 2800.0, 1.4)
    winners = [replace(one, choice=loop) if one.use == "loop" else one for one in record.winners]
    record = replace(record, winners=tuple(winners))
    shown = {}
    for width in (80, 140):
        out = io.StringIO()
        Console(width=width, file=out).print(tables.verdict(record))
        shown[width] = out.getvalue()
        assert "channels_last, bf16" in shown[width] and "1.40x (1.37-1.43)" in shown[width]
    assert "turns" in shown[140] and "turns" not in shown[80]


def test_forget(tuned: Path, own_surroundings: Path, first: dict[str, Any]) -> None:
    key = first["id"]
    store = open_store(str(own_surroundings))
    store.put(Name.of(examples.record(), b"").text, b"\xc1 is no msgpack")
    assert list(store.studies.glob("*.journal"))
    gone = advisor(tuned, "forget", key[:6], "--json")
    assert json.loads(gone.stdout) == {"forgotten": [key], "damaged": 0, "artifacts_bytes": 0}
    # Nothing is left that the next tuning would go on from.
    assert list(store.studies.glob("*.journal")) == []
    assert advisor(tuned, "forget", key).returncode == 2
    listed = advisor(tuned, "show")
    assert "Nothing is tuned yet" in listed.stdout
    assert examples.record().id in listed.stderr  # which one cannot be read
    all_of_it = advisor(tuned, "forget", "--all")
    assert all_of_it.stdout == (
        f"forgetting {examples.record().id} an unreadable record (1 version)\n"
    )
    assert store.keys() == []


def test_env(tuned: Path, own_surroundings: Path) -> None:
    found = json.loads(advisor(tuned, "env", "--device", "cpu", "--json").stdout)
    assert found["environment"] == to_plain(detect("cpu"))
    assert found["stores"] == [{"url": f"disk:{own_surroundings}", "health": "ok: 1 record"}]
    told = advisor(tuned, "env", "--device", "cpu")
    assert detect("cpu").device.name in told.stdout
    assert str(own_surroundings) in told.stdout


def test_a_damaged_store_is_named(tuned: Path, own_surroundings: Path) -> None:
    (own_surroundings / "records" / "cache.db").write_bytes(b"no database " * 1000)
    shown = advisor(tuned, "show")
    assert (shown.returncode, shown.stdout) == (1, "")
    (line,) = shown.stderr.splitlines()
    assert str(own_surroundings) in line and "damaged" in line and "`advisor tune`" in line
    found = json.loads(advisor(tuned, "env", "--device", "cpu", "--json").stdout)
    assert found["stores"][0]["health"].startswith("damaged: ")


def test_version_and_help(tmp_path: Path) -> None:
    assert advisor(tmp_path, "--version").stdout.strip() == f"advisor {__version__}"
    asked = advisor(tmp_path, "--help")
    assert asked.returncode == 0
    unasked = advisor(tmp_path)
    assert (unasked.returncode, unasked.stdout, unasked.stderr) == (2, "", asked.stdout)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(tmp_path: Path, shell: str) -> None:
    made = advisor(tmp_path, "completion", shell)
    assert made.returncode == 0
    assert f"_ADVISOR_COMPLETE={shell}_complete" in made.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("advisor tu", "plain,tune"),
        ("advisor tune mod", "file,mod"),
        ("advisor tune --op", "plain,--optimizer"),
    ],
)
def test_completion(tmp_path: Path, typed: str, offered: str) -> None:
    words = str(len(typed.split()) - 1)
    said = advisor(
        tmp_path,
        process=typed.endswith("mod"),
        _ADVISOR_COMPLETE="bash_complete",
        COMP_WORDS=typed,
        COMP_CWORD=words,
    ).stdout
    assert said.splitlines() == [offered]


def test_python_m_is_the_same_command(tmp_path: Path) -> None:
    ran = script(
        tmp_path,
        "import subprocess, sys\n"
        "sys.exit(subprocess.call([sys.executable, '-m', 'advisor', 'show', 'abcdef']))\n",
        process=True,
    )
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == ["advisor: key 'abcdef': no such record; run: advisor show"]


def test_a_sabotaged_model_keeps_torchs_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quick under bf16, and wrong: what is fast and wrong must not become advice."""
    offer_bf16(monkeypatch)
    (tmp_path / "model.py").write_text(
        PACE
        + MODEL.replace(
            "    def forward(self, x):\n",
            "    def forward(self, x):\n"
            "        half = torch.is_autocast_enabled('cpu')\n"
            "        keep_pace(self, 0.01 if half else 0.02)\n"
            "        if half:\n"
            "            return self.head(self.conv(x).mean((2, 3))) * -3\n",
        )
    )
    options = ("--precisions", "bf16", "--fixed-batch", "--effort", "quick", "--no-compile")
    tune = ("tune", "model.py", "--shape", SHAPE, "--json")
    done = advisor(tmp_path, *tune, *options, "--budget", "16s")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)["record"]
    assert {w["choice"]["config"]["precision"] for w in record["winners"]} == {"default"}
    tried = [t for t in record["trials"] if t["config"]["precision"] == "bf16"]
    assert tried
    # On a busy host it may not have seemed faster, and then it is not compared.
    struck = [t for t in record["trials"] if t["stage"] == "numerics"]
    assert {t["measurement"]["outcome"] for t in struck} <= {"wrong"}
    assert bool(struck) == ("struck out" in done.stderr)
    unchecked = advisor(tmp_path, *tune, *options, "--budget", "10s", "--no-verify")
    record = json.loads(unchecked.stdout)["record"]
    shown = advisor(tmp_path, "show", record["id"])
    half = winner(record, "loop")["config"]["precision"] == "bf16"
    assert ("bf16; not verified against fp32: left out" in shown.stdout) == half
