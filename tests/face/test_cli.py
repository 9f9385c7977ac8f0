"""The commands as a user types them, on the CPU."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import click
import pytest
from rich.console import Console

from advisor import __version__
from advisor.cache.codec import to_plain
from advisor.cache.config import Config
from advisor.cache.name import Name
from advisor.cache.records import Records
from advisor.cache.stores import open_stores
from advisor.cache.task import Task
from advisor.cli import cli
from advisor.command_snippets import local_target
from advisor.open_store import open_records
from advisor.report import sections
from advisor.tuners.environment import detect
from advisor.tuners.measure.runner import Compared
from advisor.tuners.measure.worker import parent
from advisor.tuners.target import origin_of
from tests.cache import examples
from tests.face.commands import MODEL, SHAPE, advisor, check_document, offer_bf16
from tests.face.unmeasured import FakeWorker, fake_worker

TUNE = ("tune", "model.py", "--shape", SHAPE, "--device", "cpu", "--effort", "quick")
FEW = ("--fixed-batch", "--no-compile", "--budget", "60s")


def test_a_record_is_tuned_shown_and_forgotten(
    tmp_path: Path, own_surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_bf16(monkeypatch)
    (tmp_path / "model.py").write_text(MODEL)
    events = tmp_path / "events"
    events.write_text("of another day\n")
    options = ("--budget", "60s", "--trials", "3", "--fixed-batch", "--events", str(events))
    with fake_worker({("precision", "bf16"): 1.5}):
        done = advisor(tmp_path, *TUNE, *options, "--json")
    assert done.returncode == 0 and "trial 0:  torch's default  " in done.stderr
    assert "\x1b" not in done.stderr
    first = json.loads(done.stdout)["record"]
    assert first["id"].endswith("@4")

    before, *lines = events.read_text().splitlines()
    told = [check_document("event", line) for line in lines]
    parsed = [one for one in told if one["event"] == "trial"]
    assert before == "of another day" and len(parsed) == 3
    assert all(one["outcome"] == "" for one in parsed)
    assert (told[-1]["event"], told[-1]["record"]) == ("result", first["id"])
    assert told[-1]["advice"] == first["advice"]
    assert [parsed[0][name] for name in ("number", "batch", "ratio")] == [0, 4, 1.0]
    half = next(one for one in parsed if "bf16" in one["what"])
    assert half["ratio"] == pytest.approx(1.5, rel=0.1)
    trials = [one for one in first["trials"] if one["stage"] == "compute"]
    visits = [(one["number"], one["measurement"]["samples_per_s"]) for one in trials]
    assert [(one["number"], one["samples_per_s"]) for one in parsed] == visits

    (store,), foreign = open_stores(), examples.record()
    Records(store).put(foreign)
    listed, whole = (advisor(tmp_path, "show", *key).stdout for key in ((), (first["id"][:5],)))
    words = (first["id"], "model.py:Net", "3x8x8", "fresh", "now")
    assert all(word in listed for word in (*words, foreign.id, "NVIDIA H200", "3x256x256"))
    words = ("torch default", "samples/s", "first step", "advisor.apply(")
    assert all(word in whole for word in words)
    more = {"version": 1, "signed": True, "artifacts": [], "store": store.url}
    assert json.loads(advisor(tmp_path, "show", first["id"], "--json").stdout) == first | more
    rows = json.loads(advisor(tmp_path, "show", "--json").stdout)
    shown = [(row["id"], row["stale"]) for row in rows["records"]]
    assert shown == [(first["id"], []), (foreign.id, [])] and rows["damaged"] == []

    # `forget` also removes the journal, so that the next tuning does not continue it.
    assert list(store.studies.glob("*.journal"))
    gone = advisor(tmp_path, "forget", first["id"][:6], "--json")
    assert json.loads(gone.stdout) == {"version": 1, "forgotten": [first["id"]], "damaged": 0}
    assert not list(store.studies.glob("*.journal"))


def test_records_that_cannot_be_read_are_named(tmp_path: Path, own_surroundings: Path) -> None:
    (store,), unreadable = open_stores(), examples.record()
    store.put(Name.of(unreadable, b"").text, b"\xc1 is no msgpack")
    listed = advisor(tmp_path, "show")
    assert (listed.stdout, listed.returncode) == ("No record can be read\n", 1)
    assert unreadable.id in listed.stderr and advisor(tmp_path, "show", "--json").returncode == 1
    down = advisor(tmp_path, "show", "--cache", "http://127.0.0.1:9")
    assert (down.returncode, "Connection refused" in down.stderr) == (1, True)
    about = ("env", "--device", "cpu")
    parsed = json.loads(advisor(tmp_path, *about, "--json").stdout)
    assert parsed["environment"] == to_plain(detect("cpu"))
    assert parsed["stores"][0]["url"] == f"disk:{own_surroundings}"
    printed = advisor(tmp_path, *about).stdout
    assert detect("cpu").device.name in printed and str(own_surroundings) in printed

    (own_surroundings / "records" / "cache.db").write_bytes(b"no database " * 1000)
    shown = advisor(tmp_path, "show")
    assert (shown.returncode, shown.stdout) == (1, "")
    (line,) = shown.stderr.splitlines()
    assert str(own_surroundings) in line and "damaged" in line and "`advisor tune`" in line
    parsed = json.loads(advisor(tmp_path, *about, "--json").stdout)
    assert parsed["stores"][0]["health"].startswith("damaged: ")


@pytest.mark.parametrize("gain", [0.6, 1.0])
def test_a_model_without_a_gain_counts_as_tuned(tmp_path: Path, gain: float) -> None:
    """It is not measured again, even if all other configs are much slower."""
    (tmp_path / "model.py").write_text(MODEL)
    with fake_worker({("channels_last", True): gain}):
        done = advisor(tmp_path, *TUNE, *FEW)
        assert done.returncode == 0, done.stderr
        assert "Nothing measured is clearly faster at your batch" in done.stdout
        assert "Nothing measured clearly gains on this machine; train as usual." in done.stdout
        assert advisor(tmp_path, *TUNE, *FEW).stdout.startswith("Already tuned, ")


def test_targets_are_found_in_one_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not walk the folder for each record, which is slow with many folders."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "model.py").write_text("class Net: ...")
    monkeypatch.chdir(tmp_path)
    patterns, glob = list[str](), Path.glob
    monkeypatch.setattr(Path, "glob", lambda top, one: patterns.append(one) or glob(top, one))
    one = examples.record()
    near = replace(one.target, origin=origin_of(tmp_path / "below" / "model.py"))
    targets = [local_target(one), local_target(replace(one, target=near)), local_target(one)]
    assert targets == ["model.py:Net", "below/model.py:Net", "model.py:Net"]
    assert len(patterns) == len(set(patterns))


def test_a_narrow_terminal_shows_the_whole_config() -> None:
    loop = examples.choice(examples.DEFAULT.replace(precision="bf16", channels_last=True), 9.0, 1.4)
    made = examples.record()
    record = replace(made, winners=examples.winners(made.baseline, loop))
    for width in (80, 140):
        out = io.StringIO()
        Console(width=width, file=out).print(sections.verdict(record))
        shown = out.getvalue()
        assert "channels_last, bf16" in shown and "1.40x (1.37-1.43)" in shown
        assert ("turns" in shown) == (width == 140)


def test_version_and_help_are_printed(tmp_path: Path) -> None:
    assert advisor(tmp_path, "--version").stdout.strip() == f"advisor {__version__}"
    helped = advisor(tmp_path, "--help")
    assert helped.returncode == 0
    bare = advisor(tmp_path)
    assert (bare.returncode, bare.stdout, bare.stderr) == (2, "", helped.stdout)
    listed = set(re.findall(r"^  ([a-z]+) ", helped.stdout, re.MULTILINE))
    assert listed == set(cli.list_commands(click.Context(cli)))


def test_completion_offers_commands_files_and_options(tmp_path: Path) -> None:
    for typed, offered in (
        ("advisor tu", "plain,tune"),
        ("advisor tune mod", "file,mod"),
        ("advisor tune --op", "plain,--optimizer"),
    ):
        words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
        printed = advisor(tmp_path, _ADVISOR_COMPLETE="bash_complete", **words).stdout
        assert printed.splitlines() == [offered]
    for shell in ("bash", "zsh", "fish"):
        made = advisor(tmp_path, "completion", shell)
        assert made.returncode == 0 and f"_ADVISOR_COMPLETE={shell}_complete" in made.stdout


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("train", "it needs a GPU of compute capability 8.9 or more"),
        ("infer", "it is for training"),
    ],
)
def test_tune_says_why_fp8_is_not_tried(
    here: Path, searched: list[Task], mode: str, why: str
) -> None:
    done = advisor(here, *TUNE, "--mode", mode, "--precisions", "default,fp8")
    assert f"fp8 is not tried: {why}" in done.stderr
    assert "fp8 is not tried" not in advisor(here, *TUNE, "--mode", mode).stderr


REAL_WORKER = parent.Worker


class Comparing(FakeWorker):
    """A worker of made-up speed that compares with fp32 in a real worker."""

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        with REAL_WORKER(self._job, deadline_s=240) as real:
            return real.compare(config, deadline_s=240)


def test_a_config_with_wrong_results_is_not_advised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 is fast but wrong: it is not advised, and a line says why."""
    offer_bf16(monkeypatch)
    wrong = "x.neg() if torch.is_autocast_enabled('cpu') else x"
    (tmp_path / "model.py").write_text(MODEL.replace("self.conv(x)", f"self.conv({wrong})"))
    options = (*FEW, "--precisions", "bf16")
    fast = {("precision", "bf16"): 2.0}
    with fake_worker(fast, kind=Comparing):
        done = advisor(tmp_path, *TUNE, *options)
    assert done.returncode == 0, done.stderr
    (record,) = open_records(None).all()
    assert {one.choice.config["precision"] for one in record.winners} == {"default"}
    compared = [one for one in record.trials if one.stage == "numerics"]
    rejected = [one for one in compared if one.config["precision"] == "bf16"]
    assert {one.measurement.outcome for one in rejected} == {"wrong"}
    assert {one.measurement.outcome for one in compared if one not in rejected} == {"ok"}
    (remark,) = [line for line in done.stdout.splitlines() if ", not advised: " in line]
    assert "bf16: 2.0" in remark and remark.endswith("it does not train like fp32")
    assert f"bf16: wrong result, {rejected[0].measurement.reason}" in done.stdout

    with fake_worker(fast):
        unchecked = advisor(tmp_path, *TUNE, *options, "--no-verify", "--json")
    record_id = json.loads(unchecked.stdout)["record"]["id"]
    shown = advisor(tmp_path, "show", record_id)
    assert "bf16; not verified against fp32: left out" in shown.stdout
