"""The page for agents works as written; JSON has the documented form, also of errors and events."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path

import click
import pytest

from advisor import client
from advisor.cache import key, record, task
from advisor.cache.config import Config
from advisor.cli import cli, options
from advisor.report.document import advice_of
from advisor.tuners.measure.worker import wire
from tests.cache import examples
from tests.face.commands import COMMAND, LINEAR, PACE, TOO_BUSY, advisor, check_document, env_of
from tests.face.test_cli import FEW, TUNE
from tests.face.unmeasured import fake_worker

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
TRAINS = PACE + LINEAR.format(steps=1200) + '    keep_pace(model, 0.005)\nprint("trained")\n'


@pytest.mark.e2e
@pytest.mark.timeout(900)  # several tunings, on any host
def test_an_agent_can_follow_the_page(tmp_path: Path) -> None:
    """Its commands run in their order; then its loop, which ends by starting the command."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(COMMAND.parent), os.environ["PATH"]])
        env = os.environ | env_of(tmp_path) | {"PATH": path, "BUDGET": "6s", "BUDGET_S": "3"}
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)

    (tmp_path / "train.py").write_text(TRAINS)
    before, loop, _ = re.split("```.*\n", PAGE)
    commands = re.findall(r"(?m)^    (\S.*)$", before)
    verbs = [line.split()[1] for line in commands if line.startswith("advisor ")]
    assert verbs == ["why", "tune", "show", "run", "verify"]
    done = run("bash", "-e", "-c", "\n".join(commands))
    read = {file.stem: file.read_text().strip() for file in tmp_path.glob("*.json")}
    if "error" in json.loads(read["tune"]):
        assert re.search(TOO_BUSY, read["tune"])
        return
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert check_document("why", read["why"])["served"]["status"] == "miss"
    advice = check_document("tune", read["tune"])["record"]["advice"]
    assert check_document("show", read["record"])["advice"] == advice
    assert f"| `{check_document('verify', read['verify'])['verdict']}` |" in PAGE
    *_, last = (tmp_path / "events.jsonl").read_text().splitlines()
    assert check_document("event", last)["advice"] == advice

    done = run(sys.executable, "-c", loop)
    decided, last = done.stdout.splitlines()
    assert (done.returncode, last) == (0, "trained"), done.stderr
    assert f"| `{json.loads(decided)['next']}` |" in PAGE


def test_the_schema_has_every_command_and_every_field(tmp_path: Path) -> None:
    defined = json.loads(advisor(tmp_path, "schema", "--json").stdout)["$defs"]
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        has_json = any("--json" in one.opts for one in command.params)
        assert has_json == (name != "run"), f"{name}: every command but run has --json"
        assert not has_json or name in defined, f"add {name} to report/templates/schema.json"
        assert not has_json or f"`{name}" in PAGE.partition("## Every command")[2], name
    for name, cls in chain(*(vars(one).items() for one in (client, key, record, task, wire))):
        if name in defined:
            named = {one.name for one in fields(cls)}
            named |= {"id", "script", "advice"} if name == "Record" else set()
            assert set(defined[name]["properties"]) == named, name


def test_other_commands_print_what_the_schema_says(here: Path, searched: list[task.Task]) -> None:
    """`advisor` of the tests checks each document."""
    id = json.loads(advisor(here, *TUNE, "--json").stdout)["record"]["id"]
    lookup = " ".join(("why", *TUNE[1:6]))
    commands = "emit hf ID, report ID --html x, report ID --html -, gc, export a.pack"
    commands += ", import a.pack, import a.pack --cache dir:new, env --device cpu, completion bash"
    commands += ", show --cache pack:a.pack, forget --all"
    for words in (lookup, *commands.replace("ID", id).split(", ")):
        done = advisor(here, *words.split(), "--json")
        assert done.returncode == 0 and len(done.stdout.splitlines()) == 1, words


def test_an_error_is_a_document_too(tmp_path: Path) -> None:
    refused = advisor(tmp_path, "tune", "--json", "--budget", "soon", "--", "python", "x.py")
    error = check_document("error", refused.stdout)["error"]
    assert (error["kind"], error["exit_code"]) == ("UsageError", refused.returncode)
    assert refused.stderr == f"advisor: {error['message']}\n"
    down = advisor(tmp_path, "export", "a.pack", "--json", "--cache", "http://127.0.0.1:9")
    assert check_document("error", down.stdout)["error"]["kind"] == "StoreError"
    assert advisor(tmp_path, "run", "--", "/no/program", "--json").stdout == ""
    line = options.json_line({"high": float("inf"), "low": [float("nan")], "name": "NaN"})
    assert line == '{"version": 1, "high": null, "low": [null], "name": "NaN"}'


def test_events_go_to_stdout_or_to_a_file_and_never_stop_a_tuning(here: Path) -> None:
    refused = advisor(here, *TUNE, *FEW, "--events", "-")
    assert refused.returncode == 2 and "--events -: stdout has the result" in refused.stderr
    os.mkfifo(here / "unread")
    with fake_worker():
        done = advisor(here, *TUNE, *FEW, "--json", "--events", "-")
        unread = advisor(here, *TUNE, *FEW, "--quiet", "--force", "--events", "unread")
        tasks = advisor(here, *TUNE, *FEW, "--quiet", SLURM_STEP_NUM_TASKS="2")
    *events, last = done.stdout.splitlines()
    assert {check_document("event", line)["event"] for line in events} >= {"trial", "result"}
    assert check_document("tune", last)["status"] == "tuned"
    assert unread.returncode == 0 and unread.stderr.startswith("advisor: --events unread: ")
    assert "srun starts 2 advisors, and each tunes by itself" in tasks.stderr


FAST = examples.choice(examples.DEFAULT.replace(cudnn_benchmark=True), 2800.0, 1.4)
HALF = examples.choice(examples.DEFAULT.replace(precision="bf16"), 2800.0, 1.4)
RECORD = replace(examples.record(), trials=())
OWN = RECORD.baseline


def test_the_advice_says_what_to_do_next(monkeypatch: pytest.MonkeyPatch) -> None:
    for best, state, finished, next in (
        (FAST, "exact", False, "run"),
        (HALF, "exact", False, "run"),
        (FAST, "stale: driver 1 -> 2", False, "tune"),
        (OWN, "exact", False, "stop"),
        (OWN, "nothing else raced", False, "tune"),
        (OWN, "nothing else raced", True, "stop"),
    ):
        monkeypatch.setattr("advisor.report.document.state_of", lambda _record, state=state: state)
        made = replace(RECORD, winners=examples.winners(OWN, best), raced=(OWN,), input=Config())
        advice = advice_of(made, finished=finished)
        assert advice["next"] == next and advice["config"] == dict(best.config.changed(OWN.config))
        assert advice["numbers"] == ("not verified" if best is HALF else "same numbers")
