"""When a target counts as already tuned, depending on its options and its code.

Most tests measure nothing. They count the searches that tuning would have run.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import advisor as package
from advisor.cache.config import Config
from advisor.cache.task import Task
from advisor.tuners.measure.runner import Block
from tests.cache import examples
from tests.face.commands import MODEL, SHAPE, Done, advisor, run_json
from tests.face.unmeasured import FakeWorker, fake_worker

TUNE = ("tune", "model.py", "--shape", SHAPE, "--device", "cpu")
HOOKS = """
def make_batch(batch_size, device):
    x = torch.randn(batch_size, 3, 8, 8, device=device)
    return x, torch.zeros(batch_size, dtype=torch.long)

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""
WITH_DROPOUT = MODEL.replace(
    "        self.head =", "        self.dropout = nn.Dropout(0.1)\n        self.head ="
).replace("self.head(self.conv(x)", "self.head(self.dropout(self.conv(x))")


def tune(folder: Path, *options: str, code: int = 0) -> Done:
    done = advisor(folder, *TUNE, *options)
    assert done.returncode == code, done.stderr
    return done


def tune_status(folder: Path, *options: str) -> tuple[str, str]:
    """(Status, record id) as printed by `advisor tune --json`."""
    result = run_json(folder, *TUNE, *options)
    return result["status"], result["record"]["id"]


def lookup(name: str = "model.py:Net", **arguments: Any) -> package.Advice:
    return package.lookup(package.Model(name, device="cpu"), shape=SHAPE, **arguments)


def lookup_status(name: str = "model.py:Net") -> tuple[str, str | None]:
    """(Status, record id) of a strict lookup."""
    advice = lookup(name, strict=True)
    return advice.status, advice.record and advice.record.id


OPTION_SETS = (
    *("", "--no-compile", "--no-step-graph", "--batches 2", "--batches 2,8", "--fixed-batch"),
    *("--tolerance 0.5", "--tolerance 0.4", "--no-verify", "--max-memory 1TiB"),
    *("--max-memory 2TiB", "--precisions default", "--precisions default,bf16", "--deterministic"),
    *("--optimizer adamw", "--mode infer", "--dtype float64", "--dtype float16", "--dtype int64"),
    *("--dtype int64 --vocab 50", "--dtype int64 --vocab 60"),
)


def test_each_set_of_options_has_its_own_record(here: Path, searched: list[Task]) -> None:
    (here / "model.py").write_text(MODEL.replace("self.conv(x)", "self.conv(x.float())"))
    results = {options: tune_status(here, *options.split()) for options in OPTION_SETS}
    assert {status for status, _id in results.values()} == {"tuned"}
    assert len(set(results.values())) == len(results)
    for options, (_status, id) in results.items():
        assert tune_status(here, *options.split()) == ("known", id), options
    # --vocab has no effect on inputs that are not integers.
    assert tune_status(here, "--vocab", "50") == ("known", results[""][1])
    assert advisor(here, *TUNE).stdout.startswith("Already tuned, ")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("--budget 5s", "--budget 5s", ""),
        ("--budget 5s", "", "already tuned with --budget 5s; continuing with 300s"),
        ("", "--budget 60s", ""),
        ("--effort quick", "", "already tuned with --effort quick; continuing with --effort nor"),
        ("--effort exhaustive", "", ""),
        ("--steps 300", "--steps 300", ""),
        ("--steps 300", "", "already tuned for a job of another length; choosing again"),
        ("--duration 1h", "--duration 2h", "already tuned for a job of another length"),
    ],
)
def test_a_larger_request_continues_and_a_smaller_one_does_not(
    here: Path, searched: list[Task], first: str, second: str, message: str
) -> None:
    _, id = tune_status(here, *first.split())
    done = tune(here, *second.split())
    assert message in done.stderr and ("Already tuned" in done.stdout) == (not message)
    assert len(searched) == 1 + bool(message)
    assert tune_status(here, *second.split()) == ("known", id)


FEW_KNOBS = ("--fixed-batch", "--no-verify", "--precisions", "default")


def test_a_tuning_without_a_race_is_unfinished(here: Path) -> None:
    """The same command continues, with a new budget each time, until a race was run."""
    words, as_job = (*FEW_KNOBS, "--effort", "quick"), ("--json", "--for", "https://x")
    with fake_worker({("channels_last", True): 2.0}, step_s=0.1):
        first = tune(here, *words, "--budget", "3s")
        assert "trial 1:" not in first.stderr, "the budget suffices for the default only"
        assert "not measured for want of time: channels_last; --budget 10s" in first.stdout
        assert first.stdout.splitlines()[-1] == (
            "Not tuned yet: the same command continues. Give a larger --budget."
        )
        assert "Already tuned" not in first.stdout and "In your script" not in first.stdout
        assert "nothing else raced" in " ".join(advisor(here, "show").stdout.split())
        assert "torch's default: nothing else was measured" in lookup(strict=True).served.reason
        again = tune(here, *words, "--budget", "3s", *as_job, code=3)
        assert json.loads(again.stdout)["status"] == "unfinished"
        assert "continuing an earlier tuning, which measured 1 config\n" in again.stderr
        assert tune_status(here, *words, "--budget", "10s")[0] == "tuned"
        assert tune(here, *words, "--budget", "3s").stdout.startswith("Already tuned, ")
    assert len(run_json(here, "show")["records"]) == 1


class Interrupting(FakeWorker):
    """Simulates Ctrl-C while the first config is compiled."""

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        if config["compile"] != "none":
            raise KeyboardInterrupt
        return super().block(config, steps, warm=warm, deadline_s=deadline_s)


def test_an_interrupted_tuning_keeps_its_best_and_resumes(here: Path) -> None:
    words = (*FEW_KNOBS, "--budget", "90s")
    gains = {("compile", "default"): 2.0, ("channels_last", True): 1.5}
    message = "Interrupted: the best config so far is kept; the same command continues."
    with fake_worker(gains, kind=Interrupting):
        assert message in tune(here, *words, code=130).stdout
    best = lookup(strict=True)
    with fake_worker(gains, load=busy_host):
        assert "the earlier record stays in use" in tune(here, *words, "--force").stdout
    assert lookup(strict=True).record == best.record
    with fake_worker(gains):
        again = tune(here, *words)
        assert "tuned until it was cut short; continuing with --effort normal" in again.stderr
        assert "continuing an earlier tuning" in again.stderr
        final = lookup(strict=True)
        assert best.config["channels_last"] and best.config["compile"] == "none"
        assert final.config["channels_last"] and final.config["compile"] != "none"
        assert tune(here, *words).stdout.startswith("Already tuned, ")


def busy_host(seconds: float) -> float:
    """Other jobs run at times: a step then takes three times as long."""
    return 3.0 if int(seconds / 2) % 2 else 1.0


@pytest.mark.parametrize(
    ("fault", "options", "code"),
    [
        ({"kind": Interrupting}, (), 130),
        ({"load": busy_host}, (), 0),
        ({"step_s": 0.1}, ("--budget", "3s"), 0),
    ],
    ids=["interrupted", "doubtful", "nothing raced"],
)
def test_an_uncertain_tuning_keeps_the_clear_record(
    here: Path, fault: dict[str, Any], options: tuple[str, ...], code: int
) -> None:
    verified = [word for word in FEW_KNOBS if word != "--no-verify"]
    words, gains = (*verified, "--budget", "90s"), {("channels_last", True): 1.5}
    with fake_worker(gains):
        tune(here, *words)
    clear = lookup(strict=True).record
    with fake_worker(gains, **fault):
        again = tune(here, *words, *options, "--force", code=code)
    line = "or was too noisy to tell: the earlier record stays in use, and is shown here."
    assert line in again.stdout and "best so far is kept" not in again.stdout
    assert lookup(strict=True).record == clear
    with fake_worker({}):  # a quiet host, on which nothing gains
        assert "stays in use" not in tune(here, *words, "--force").stdout
    assert lookup(strict=True).record != clear


def test_a_record_compares_if_another_config_was_raced_or_none_runs() -> None:
    default, fast = examples.DEFAULT, examples.DEFAULT.replace(precision="bf16")
    made = examples.record()
    once = replace(made.baseline, rounds=made.baseline.rounds[:1])
    winners = tuple(replace(one, choice=once) for one in made.winners)
    tried = (examples.trial(0, default), examples.trial(1, fast))
    alone = replace(made, baseline=once, winners=winners, raced=(once,), trials=tried)
    failed = examples.trial(1, fast, outcome="failed")
    for one, compares in (
        (made, True),
        (alone, False),
        (replace(alone, raced=(made.baseline, examples.choice(fast))), True),
        (replace(alone, trials=tried[:1]), False),
        # A race was run. The other config was too slow to enter it.
        (replace(alone, baseline=made.baseline), True),
        (replace(alone, baseline=made.baseline, trials=tried[:1]), False),
        # A config that fails cannot be raced.
        (replace(alone, trials=(tried[0], failed)), True),
        (replace(alone, trials=(tried[0], replace(failed, origin="reference"))), False),
        # A config that timed out may be raced, given more time.
        (replace(alone, trials=(tried[0], examples.trial(1, fast, outcome="timed_out"))), False),
    ):
        assert one.compares == compares


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (MODEL, MODEL.replace(".mean((2, 3))", ".amax((2, 3))")),
        (MODEL, MODEL.replace("return self.head(", "x = x * 2\n        return self.head(")),
        (WITH_DROPOUT, WITH_DROPOUT.replace("0.1", "0.5")),
        (MODEL + HOOKS, (MODEL + HOOKS).replace("torch.randn(", "torch.rand(")),
        (MODEL + HOOKS, (MODEL + HOOKS).replace("(output, target)\n", "(output, target) * 2\n")),
        (MODEL, MODEL + HOOKS),
    ],
    ids=["forward", "new line", "dropout", "make_batch", "loss", "new hooks"],
)
def test_edited_code_is_a_miss_until_it_is_tuned(
    here: Path, searched: list[Task], before: str, after: str
) -> None:
    (here / "model.py").write_text(before)
    status, first = tune_status(here)
    assert (status, tune_status(here)) == ("tuned", ("known", first))
    (here / "model.py").write_text(after)
    message = "the code of model.py:Net has changed since it was tuned; run: advisor tune"
    with pytest.warns(package.AdvisorWarning, match=message) as caught:
        assert (lookup().status, len(caught)) == ("miss", 1)
    why = advisor(here, "why", "model.py:Net", "--device", "cpu").stdout
    assert f"not served  {first} model.py:Net: code as tuned -> edited since" in why
    assert "code as tuned -> edited since" in advisor(here, "show", "--json").stdout
    status, second = tune_status(here)
    assert status == "tuned" and second != first
    assert lookup_status() == ("exact", second)
    (here / "model.py").write_text(before)
    assert tune_status(here) == ("known", first)


def test_an_equivalent_edit_keeps_the_record(here: Path, searched: list[Task]) -> None:
    _, first = tune_status(here)
    formatted = MODEL.replace(
        "        return self.head(self.conv(x).mean((2, 3)))",
        '        """Says what it does."""\n        # and why\n'
        "        return self.head(\n            self.conv(x).mean((2, 3)),\n        )",
    )
    (here / "model.py").write_text(f"# A model.\n\n\n{formatted}")
    assert lookup_status("model.py") == ("exact", first)
    assert tune_status(here) == ("known", first)
    # A lookup by name cannot tell that the code is equivalent. `tune` builds the model.
    for text in (MODEL + "print('made')\n", MODEL, MODEL + "print('made')\n"):
        (here / "model.py").write_text(text)
        with pytest.warns(package.AdvisorWarning, match="code of model.py:Net has changed"):
            assert lookup().status == "miss"
        done = tune(here)
        assert done.stdout.startswith("Already tuned, ")
        assert "the edited code of model.py:Net computes the same" in done.stderr
        assert lookup_status() == ("exact", first)
        assert "edited" not in tune(here).stderr
    assert len(searched) == 1


def test_a_renamed_or_moved_file_keeps_the_record(
    here: Path, searched: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = tune_status(here)
    (here / "other.py").write_text(MODEL)
    assert run_json(here, "tune", "other.py", *TUNE[2:])["status"] == "known"
    for name in ("model.py:Net", "other.py:Net", "other.py"):
        assert lookup_status(name) == ("exact", first)
    assert len(run_json(here, "show")["records"]) == 1
    moved = here / "moved"
    moved.mkdir()
    shutil.move(here / "model.py", moved / "model.py")
    monkeypatch.chdir(moved)
    assert lookup_status() == ("exact", first)
    with (moved / "model.py").open("a") as file:
        file.write("print('made')\n")
    with pytest.warns(package.AdvisorWarning, match="file another of this name"):
        assert lookup().status == "miss"
    done = tune(moved)
    assert done.stdout.startswith("Already tuned, ")
    assert "now known as model.py:Net too" in done.stderr
    assert lookup_status() == ("exact", first) and len(searched) == 1


def test_a_target_and_a_command_have_separate_records(here: Path, searched: list[Task]) -> None:
    """They share a key. A second command with that key reuses the record of the first one."""
    a, b = ((sys.executable, f"{name}.py") for name in "ab")
    target = run_json(here, *TUNE)["record"]
    run = run_json(here, "tune", "--force", "--", *a)
    first = run["record"]
    assert (run["status"], first["id"]) == ("tuned", target["id"]), "they share a key"
    assert first["provenance"]["study"] != target["provenance"]["study"]
    done = advisor(here, "tune", "--json", "--", *b)
    assert json.loads(done.stdout).items() >= {"status": "known", "record": first}.items()
    assert f"tuned before as {' '.join(a)}, which trains the same" in done.stderr
    assert run_json(here, *TUNE)["record"] == target, "--force must keep the target's record"
    assert len(searched) == 2
