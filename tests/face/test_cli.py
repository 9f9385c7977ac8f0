"""The commands, in processes of their own, on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from advisor import __version__
from advisor.cache.codec import to_plain
from advisor.cache.store import Records, open_store, record_key
from advisor.tuners.environment import detect
from tests.cache import examples
from tests.face.commands import MODEL, QUICK, SHAPE, advisor, script

TUNE = ("tune", "model.py", "--shape", SHAPE, *QUICK)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.py, its store with one record, and what tuning it printed."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "model.py").write_text(MODEL)
    done = advisor(folder, *TUNE, "--json", ADVISOR_CACHE=str(folder / "store"))
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return folder


@pytest.fixture
def tuned(project: Path, own_surroundings: Path) -> Path:
    """The project; ADVISOR_CACHE is a copy of its store, so that a test may spoil it."""
    shutil.copytree(project / "store", own_surroundings)
    return project


def test_json_is_one_document_and_progress_is_lines(project: Path) -> None:
    found = json.loads((project / "stdout").read_text())
    assert found["status"] == "tuned"
    record = found["record"]
    assert record["batch"] == 4
    assert record["provenance"]["trials"] == 5
    assert {t["config"]["batch_size"] for t in record["trials"]} <= {4, 8}
    shown = (project / "stderr").read_text()
    assert "trial 0:  torch default  batch 4" in shown
    assert "\x1b" not in shown


def test_tuned_once(tuned: Path) -> None:
    first = json.loads((tuned / "stdout").read_text())["record"]
    again = advisor(tuned, *TUNE, "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout) == {"status": "known", "record": first}
    assert "trial" not in again.stderr
    # Another batch of the same sample is another question, so it is measured.
    told = advisor(tuned, *TUNE)
    assert "--force measures again" in told.stdout
    forced = advisor(tuned, *TUNE, "--force", "--quiet", "--json")
    found = json.loads(forced.stdout)
    assert found["status"] == "tuned"
    assert found["record"]["id"] == first["id"]
    assert found["record"]["provenance"]["created"] > first["provenance"]["created"]
    assert forced.stderr == ""


def test_the_line_it_prints_works_in_a_script(tuned: Path) -> None:
    told = advisor(tuned, *TUNE)
    line = next(line for line in told.stdout.splitlines() if "advisor.apply(" in line)
    ran = script(
        tuned, f"import advisor\n{line.strip()}\nprint(advice.status, advice.batch_size)\n"
    )
    assert (ran.stdout.strip(), ran.stderr) == ("exact 4", "")


def test_show(tuned: Path) -> None:
    key = json.loads((tuned / "stdout").read_text())["record"]["id"]
    listed = advisor(tuned, "show")
    assert listed.returncode == 0
    assert all(word in listed.stdout for word in (key, "model.py:Net", "3x8x8", "fresh", "now"))
    whole = advisor(tuned, "show", key[:5])
    assert all(
        word in whole.stdout
        for word in ("torch default", "samples/s", "first step", "advisor.apply(")
    )
    data = json.loads(advisor(tuned, "show", key, "--json").stdout)
    assert data == json.loads((tuned / "stdout").read_text())["record"]
    rows = json.loads(advisor(tuned, "show", "--json").stdout)
    assert [(row["id"], row["stale"]) for row in rows["records"]] == [(key, [])]
    assert rows["damaged"] == []


def test_a_record_of_another_machine_is_shown(tuned: Path, own_surroundings: Path) -> None:
    Records(open_store(str(own_surroundings))).put(examples.record())
    listed = advisor(tuned, "show")
    assert "NVIDIA H200" in listed.stdout


def test_forget(tuned: Path, own_surroundings: Path) -> None:
    key = json.loads((tuned / "stdout").read_text())["record"]["id"]
    store = open_store(str(own_surroundings))
    store.put(record_key(examples.record()), b"\xc1 is no msgpack")
    gone = advisor(tuned, "forget", key[:6], "--json")
    assert json.loads(gone.stdout) == {"forgotten": [key], "damaged": 0}
    assert advisor(tuned, "forget", key).returncode == 2
    listed = advisor(tuned, "show")
    assert "Nothing is tuned yet" in listed.stdout
    assert examples.record().id in listed.stderr  # which one cannot be read
    all_of_it = advisor(tuned, "forget", "--all")
    assert "removed 1 unreadable" in all_of_it.stdout
    assert store.keys() == []


def test_env(tuned: Path, own_surroundings: Path) -> None:
    found = json.loads(advisor(tuned, "env", "--device", "cpu", "--json").stdout)
    assert found["environment"] == to_plain(detect("cpu"))
    assert found["store"] == {"url": f"disk:{own_surroundings}", "health": "ok"}
    told = advisor(tuned, "env", "--device", "cpu")
    assert detect("cpu").device.name in told.stdout
    assert str(own_surroundings) in told.stdout


def test_version_and_completion(tmp_path: Path) -> None:
    assert advisor(tmp_path, "--version").stdout.strip() == f"advisor {__version__}"
    assert json.loads(advisor(tmp_path, "version", "--json").stdout) == {"version": __version__}
    for shell in ("bash", "zsh", "fish"):
        made = advisor(tmp_path, "completion", shell)
        assert made.returncode == 0
        assert "_ADVISOR_COMPLETE" in made.stdout


def test_python_m_is_the_same_command(tmp_path: Path) -> None:
    ran = script(
        tmp_path,
        "import subprocess, sys\n"
        "sys.exit(subprocess.call([sys.executable, '-m', 'advisor', 'show', 'nokey']))\n",
    )
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == ["advisor: key 'nokey': no such record; run: advisor show"]
