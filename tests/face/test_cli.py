"""The commands, in processes of their own, on the CPU."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console

from advisor import __version__
from advisor.cache.codec import to_plain
from advisor.cache.config import Config
from advisor.cache.name import Name
from advisor.cache.records import Records
from advisor.cache.stores import open_store
from advisor.cli import cli
from advisor.command_snippets import local_target
from advisor.open_store import open_records
from advisor.report import tables
from advisor.tuners.environment import detect
from advisor.tuners.measure.runner import Compared
from advisor.tuners.measure.worker import parent
from advisor.tuners.target import origin_of
from tests.cache import examples
from tests.face.commands import (
    MODEL,
    SHAPE,
    advisor,
    offer_bf16,
    own,
    take_over,
)
from tests.face.unmeasured import Worker, made_up

TUNE = ("tune", "model.py", "--shape", SHAPE, "--device", "cpu", "--effort", "quick")
NOISY = "import sys\nprint('the model says hello')\nprint('and goodbye', file=sys.stderr)\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.py, its store with one record of made-up speed, and what tuning it
    printed."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "model.py").write_text(NOISY + MODEL)
    with made_up({("channels_last", True): 2.0}):
        done = advisor(folder, *TUNE, "--trials", "5", "--json", **own(folder))
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


def test_json_is_one_document_and_progress_is_lines(project: Path, first: dict[str, Any]) -> None:
    assert first["id"].endswith("@4") and 1 <= first["provenance"]["trials"] <= 5
    assert {one["config"]["batch_size"] for one in first["trials"]} <= {4, 8, 16}
    shown = (project / "stderr").read_text()
    assert "trial 0:  torch's default  " in shown
    assert "\x1b" not in shown and "hello" not in shown and "goodbye" not in shown


@pytest.mark.parametrize("gain", [0.6, 1.0])
def test_what_gains_nothing_was_tuned_all_the_same(tmp_path: Path, gain: float) -> None:
    """However far behind all else is, there is nothing to measure again."""
    (tmp_path / "model.py").write_text(MODEL)
    few = ("--fixed-batch", "--no-compile", "--budget", "60s")
    with made_up({("channels_last", True): gain}):
        done = advisor(tmp_path, *TUNE, *few)
        assert done.returncode == 0, done.stderr
        assert "Nothing measured is clearly faster at your batch" in done.stdout
        assert "Nothing measured clearly gains on this machine; train as usual." in done.stdout
        assert advisor(tmp_path, *TUNE, *few).stdout.startswith("Already tuned, ")


def test_events_are_a_line_for_each_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_bf16(monkeypatch)
    (tmp_path / "model.py").write_text(MODEL)
    events = tmp_path / "events"
    events.write_text("of another day\n")
    options = ("--budget", "60s", "--trials", "3", "--fixed-batch", "--events", str(events))
    with made_up({("precision", "bf16"): 1.5}):
        done = advisor(tmp_path, *TUNE, *options, "--json")
    assert done.returncode == 0, done.stderr
    before, *lines = events.read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert before == "of another day" and len(found) == 3
    told = {"number", "what", "batch", "samples_per_s", "ratio", "outcome", "origin"}
    assert all(set(one) == told and one["outcome"] == "" for one in found)
    assert [found[0][name] for name in ("number", "batch", "ratio")] == [0, 4, 1.0]
    half = next(one for one in found if "bf16" in one["what"])
    assert half["ratio"] == pytest.approx(1.5, rel=0.1)
    trials = [t for t in json.loads(done.stdout)["record"]["trials"] if t["stage"] == "compute"]
    visits = [(one["number"], one["measurement"]["samples_per_s"]) for one in trials]
    assert [(one["number"], one["samples_per_s"]) for one in found] == visits


def test_show(tuned: Path, first: dict[str, Any]) -> None:
    key, elsewhere = first["id"], examples.record()
    Records(open_store()).put(elsewhere)
    listed = advisor(tuned, "show").stdout
    assert all(word in listed for word in (key, "model.py:Net", "3x8x8", "fresh", "now"))
    assert all(word in listed for word in (elsewhere.id, "NVIDIA H200", "3x256x256"))
    whole = advisor(tuned, "show", key[:5]).stdout
    said = ("torch default", "samples/s", "first step", "advisor.apply(")
    assert all(word in whole for word in said)
    more = {"signed": True, "artifacts": [], "store": open_store().url}
    assert json.loads(advisor(tuned, "show", key, "--json").stdout) == first | more
    rows = json.loads(advisor(tuned, "show", "--json").stdout)
    assert [(row["id"], row["stale"]) for row in rows["records"]] == [(key, []), (elsewhere.id, [])]
    assert rows["damaged"] == []


def test_a_list_walks_the_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each record: of 200 records each looked into 500 folders."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "model.py").write_text("class Net: ...")
    monkeypatch.chdir(tmp_path)
    looks, glob = list[str](), Path.glob
    monkeypatch.setattr(Path, "glob", lambda top, one: looks.append(one) or glob(top, one))
    one = examples.record()
    near = replace(one.target, origin=origin_of(tmp_path / "below" / "model.py"))
    found = [local_target(one), local_target(replace(one, target=near)), local_target(one)]
    assert found == ["model.py:Net", "below/model.py:Net", "model.py:Net"]
    assert len(looks) == len(set(looks))


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
    """Nothing is left that the next tuning would go on from."""
    store = open_store(str(own_surroundings))
    store.put(Name.of(examples.record(), b"").text, b"\xc1 is no msgpack")
    assert list(store.studies.glob("*.journal"))
    gone = advisor(tuned, "forget", first["id"][:6], "--json")
    removed = {"forgotten": [first["id"]], "damaged": 0}
    assert json.loads(gone.stdout) == removed and not list(store.studies.glob("*.journal"))
    listed = advisor(tuned, "show")
    assert (listed.stdout, listed.returncode) == ("No record can be read\n", 1)
    assert advisor(tuned, "show", "--json").returncode == 1
    unreadable = examples.record().id
    assert unreadable in listed.stderr
    said = f"forgetting {unreadable} an unreadable record (1 version)\n"
    assert advisor(tuned, "forget", "--all").stdout == said and store.keys() == []


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
    listed = set(re.findall(r"^  ([a-z]+) ", asked.stdout, re.MULTILINE))
    assert listed == set(cli.list_commands(click.Context(cli)))


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
        _ADVISOR_COMPLETE="bash_complete",
        COMP_WORDS=typed,
        COMP_CWORD=words,
    ).stdout
    assert said.splitlines() == [offered]
    for shell in ("bash", "zsh", "fish"):
        made = advisor(tmp_path, "completion", shell)
        assert made.returncode == 0 and f"_ADVISOR_COMPLETE={shell}_complete" in made.stdout


REAL = parent.Worker


class Comparing(Worker):
    """Of made-up speed, and compared with fp32 in a real worker."""

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        with REAL(self._job, deadline_s=240) as real:
            return real.compare(config, deadline_s=240)


def test_a_sabotaged_model_keeps_torchs_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is fast and wrong under bf16 becomes no advice, and a line says why."""
    offer_bf16(monkeypatch)
    (tmp_path / "model.py").write_text(
        MODEL.replace(
            "    def forward(self, x):\n",
            "    def forward(self, x):\n"
            "        if torch.is_autocast_enabled('cpu'):\n"
            "            return self.head(self.conv(x).mean((2, 3))) * -3\n",
        )
    )
    options = ("--precisions", "bf16", "--fixed-batch", "--no-compile", "--budget", "60s")
    fast = {("precision", "bf16"): 2.0}
    with made_up(fast, kind=Comparing):
        done = advisor(tmp_path, *TUNE, *options)
    assert done.returncode == 0, done.stderr
    (record,) = open_records(None).all()
    assert {one.choice.config["precision"] for one in record.winners} == {"default"}
    struck = [one for one in record.trials if one.stage == "numerics"]
    assert {one.measurement.outcome for one in struck} == {"wrong"}
    (remark,) = [line for line in done.stdout.splitlines() if ", not advised: " in line]
    assert "bf16: 2.0" in remark and remark.endswith("it does not train like fp32")
    assert f"bf16: wrong result, {struck[0].measurement.reason}" in done.stdout

    with made_up(fast):
        unchecked = advisor(tmp_path, *TUNE, *options, "--no-verify", "--json")
    record_id = json.loads(unchecked.stdout)["record"]["id"]
    shown = advisor(tmp_path, "show", record_id)
    assert "bf16; not verified against fp32: left out" in shown.stdout
