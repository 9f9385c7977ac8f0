"""Whether something is tuned already: asked of all that narrows or widens a task, and of its code.

Nothing is measured here; what would have been is counted.
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
from tests.face.commands import MODEL, SHAPE, Done, advisor, printed
from tests.face.unmeasured import Worker, made_up

TUNE = ("tune", "model.py", "--shape", SHAPE, "--device", "cpu")
HOOKS = """
def make_batch(batch_size, device):
    x = torch.randn(batch_size, 3, 8, 8, device=device)
    return x, torch.zeros(batch_size, dtype=torch.long)

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""
DROPPING = MODEL.replace(
    "        self.head =", "        self.dropout = nn.Dropout(0.1)\n        self.head ="
).replace("self.head(self.conv(x)", "self.head(self.dropout(self.conv(x))")


def tune(folder: Path, *options: str, code: int = 0) -> Done:
    done = advisor(folder, *TUNE, *options)
    assert done.returncode == code, done.stderr
    return done


def tuned(folder: Path, *options: str) -> tuple[str, str]:
    """(Status, id) of what `advisor tune` found."""
    found = printed(folder, *TUNE, *options)
    return found["status"], found["record"]["id"]


def lookup(name: str = "model.py:Net", **asked: Any) -> package.Advice:
    return package.lookup(package.Model(name, device="cpu"), shape=SHAPE, **asked)


def served(name: str = "model.py:Net") -> tuple[str, str | None]:
    """(Status, id) of what a script is served."""
    advice = lookup(name, strict=True)
    return advice.status, advice.record and advice.record.id


OTHERS = (
    *("", "--no-compile", "--no-step-graph", "--batches 2", "--batches 2,8", "--fixed-batch"),
    *("--tolerance 0.5", "--tolerance 0.4", "--no-verify", "--max-memory 1TiB"),
    *("--max-memory 2TiB", "--precisions default", "--precisions default,bf16", "--deterministic"),
    *("--optimizer adamw", "--mode infer", "--dtype float64", "--dtype float16", "--dtype int64"),
    *("--dtype int64 --vocab 50", "--dtype int64 --vocab 60"),
)


def test_another_permission_is_not_tuned_already(here: Path, unmeasured: list[Task]) -> None:
    (here / "model.py").write_text(MODEL.replace("self.conv(x)", "self.conv(x.float())"))
    found = {one: tuned(here, *one.split()) for one in OTHERS}
    assert {status for status, _id in found.values()} == {"tuned"}
    assert len(set(found.values())) == len(found)
    for one, (_status, id) in found.items():
        assert tuned(here, *one.split()) == ("known", id), one
    # A bound for integers says nothing of other inputs.
    assert tuned(here, "--vocab", "50") == ("known", found[""][1])
    assert advisor(here, *TUNE).stdout.startswith("Already tuned, ")


@pytest.mark.parametrize(
    ("first", "second", "said"),
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
def test_more_goes_on_and_less_does_not(
    here: Path, unmeasured: list[Task], first: str, second: str, said: str
) -> None:
    _, id = tuned(here, *first.split())
    done = tune(here, *second.split())
    assert said in done.stderr and ("Already tuned" in done.stdout) == (not said)
    assert len(unmeasured) == 1 + bool(said)
    assert tuned(here, *second.split()) == ("known", id)


ONLY = ("--fixed-batch", "--no-verify", "--precisions", "default")


def test_a_tuning_that_raced_nothing_is_not_tuned(here: Path) -> None:
    """The same command goes on, each time with a budget of its own, until something was raced."""
    only, unfinished = (*ONLY, "--effort", "quick"), ("--json", "--for", "https://x")
    with made_up({("channels_last", True): 2.0}, step_s=0.1):
        first = tune(here, *only, "--budget", "3s")
        assert "trial 1:" not in first.stderr, "the budget was meant for the default alone"
        assert "not measured for want of time: channels_last; --budget 10s" in first.stdout
        assert first.stdout.splitlines()[-1] == (
            "Not tuned yet: the same command continues. Give a larger --budget."
        )
        assert "Already tuned" not in first.stdout and "In your script" not in first.stdout
        assert "nothing else raced" in " ".join(advisor(here, "show").stdout.split())
        assert "torch's default: nothing else was measured" in lookup(strict=True).served.reason
        again = tune(here, *only, "--budget", "3s", *unfinished, code=3)
        assert json.loads(again.stdout)["status"] == "unfinished"
        assert "continuing an earlier tuning, which measured 1 config\n" in again.stderr
        assert tuned(here, *only, "--budget", "10s")[0] == "tuned"
        assert tune(here, *only, "--budget", "3s").stdout.startswith("Already tuned, ")
    assert len(printed(here, "show")["records"]) == 1


class Interrupting(Worker):
    """Ctrl-C is pressed while the first config is compiled."""

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        if config["compile"] != "none":
            raise KeyboardInterrupt
        return super().block(config, steps, warm=warm, deadline_s=deadline_s)


def test_an_interrupted_tuning_keeps_its_best_and_goes_on(here: Path) -> None:
    only = (*ONLY, "--budget", "90s")
    gains = {("compile", "default"): 2.0, ("channels_last", True): 1.5}
    kept = "Interrupted: the best config so far is kept; the same command continues."
    with made_up(gains, kind=Interrupting):
        assert kept in tune(here, *only, code=130).stdout
    best = lookup(strict=True)
    with made_up(gains, load=busy_host):
        assert "the earlier record stays in use" in tune(here, *only, "--force").stdout
    assert lookup(strict=True).record == best.record
    with made_up(gains):
        again = tune(here, *only)
        assert "tuned until it was cut short; continuing with --effort normal" in again.stderr
        assert "continuing an earlier tuning" in again.stderr
        found = lookup(strict=True)
        assert best.config["channels_last"] and best.config["compile"] == "none"
        assert found.config["channels_last"] and found.config["compile"] != "none"
        assert tune(here, *only).stdout.startswith("Already tuned, ")


def busy_host(seconds: float) -> float:
    """Other jobs come and go: a step takes up to three times as long."""
    return 3.0 if int(seconds / 2) % 2 else 1.0


@pytest.mark.parametrize(
    ("how", "options", "code"),
    [
        ({"kind": Interrupting}, (), 130),
        ({"load": busy_host}, (), 0),
        ({"step_s": 0.1}, ("--budget", "3s"), 0),
    ],
    ids=["interrupted", "doubtful", "nothing raced"],
)
def test_an_uncertain_tuning_replaces_no_clear_record(
    here: Path, how: dict[str, Any], options: tuple[str, ...], code: int
) -> None:
    only, gains = (*ONLY, "--budget", "90s"), {("channels_last", True): 1.5}
    with made_up(gains):
        tune(here, *only)
    clear = lookup(strict=True).record
    with made_up(gains, **how):
        again = tune(here, *only, *options, "--force", code=code)
    line = "or was too noisy to tell: the earlier record stays in use, and is shown here."
    assert line in again.stdout and "best so far is kept" not in again.stdout
    assert lookup(strict=True).record == clear
    with made_up({}):  # quiet, and sure that nothing gains
        assert "stays in use" not in tune(here, *only, "--force").stdout
    assert lookup(strict=True).record != clear


def test_what_counts_as_raced() -> None:
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
        # There was a race, and the other was too slow to be in it.
        (replace(alone, baseline=made.baseline), True),
        (replace(alone, baseline=made.baseline, trials=tried[:1]), False),
        # What does not run cannot be raced.
        (replace(alone, trials=(tried[0], failed)), True),
        (replace(alone, trials=(tried[0], replace(failed, origin="reference"))), False),
        # With more time it may be.
        (replace(alone, trials=(tried[0], examples.trial(1, fast, outcome="timed_out"))), False),
    ):
        assert one.compares == compares


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (MODEL, MODEL.replace(".mean((2, 3))", ".amax((2, 3))")),
        (MODEL, MODEL.replace("return self.head(", "x = x * 2\n        return self.head(")),
        (DROPPING, DROPPING.replace("0.1", "0.5")),
        (MODEL + HOOKS, (MODEL + HOOKS).replace("torch.randn(", "torch.rand(")),
        (MODEL + HOOKS, (MODEL + HOOKS).replace("(output, target)\n", "(output, target) * 2\n")),
        (MODEL, MODEL + HOOKS),
    ],
    ids=["forward", "a line more", "dropout", "make_batch", "loss", "hooks at all"],
)
def test_code_that_changed_is_another_model(
    here: Path, unmeasured: list[Task], before: str, after: str
) -> None:
    """Whatever it is called: a miss, and measured anew."""
    (here / "model.py").write_text(before)
    status, first = tuned(here)
    assert (status, tuned(here)) == ("tuned", ("known", first))
    (here / "model.py").write_text(after)
    said = "the code of model.py:Net has changed since it was tuned; run: advisor tune"
    with pytest.warns(package.AdvisorWarning, match=said) as seen:
        assert (lookup().status, len(seen)) == ("miss", 1)
    told = advisor(here, "why", "model.py:Net", "--device", "cpu").stdout
    assert f"not served  {first} model.py:Net: code as tuned -> edited since" in told
    assert "code as tuned -> edited since" in advisor(here, "show", "--json").stdout
    status, second = tuned(here)
    assert status == "tuned" and second != first
    assert served() == ("exact", second)
    (here / "model.py").write_text(before)
    assert tuned(here) == ("known", first)


def test_code_that_computes_the_same_is_the_same_model(here: Path, unmeasured: list[Task]) -> None:
    _, first = tuned(here)
    formatted = MODEL.replace(
        "        return self.head(self.conv(x).mean((2, 3)))",
        '        """Says what it does."""\n        # and why\n'
        "        return self.head(\n            self.conv(x).mean((2, 3)),\n        )",
    )
    (here / "model.py").write_text(f"# A model.\n\n\n{formatted}")
    assert served("model.py") == ("exact", first)
    assert tuned(here) == ("known", first)
    # By name it is not known to be the same; `tune` builds the model, and knows.
    for text in (MODEL + "print('made')\n", MODEL, MODEL + "print('made')\n"):
        (here / "model.py").write_text(text)
        with pytest.warns(package.AdvisorWarning, match="code of model.py:Net has changed"):
            assert lookup().status == "miss"
        done = tune(here)
        assert done.stdout.startswith("Already tuned, ")
        assert "the edited code of model.py:Net computes the same" in done.stderr
        assert served() == ("exact", first)
        assert "edited" not in tune(here).stderr
    assert len(unmeasured) == 1


def test_names_and_folders_do_not_matter(
    here: Path, unmeasured: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = tuned(here)
    (here / "other.py").write_text(MODEL)
    assert printed(here, "tune", "other.py", *TUNE[2:])["status"] == "known"
    for name in ("model.py:Net", "other.py:Net", "other.py"):
        assert served(name) == ("exact", first)
    assert len(printed(here, "show")["records"]) == 1
    moved = here / "moved"
    moved.mkdir()
    shutil.move(here / "model.py", moved / "model.py")
    monkeypatch.chdir(moved)
    assert served() == ("exact", first)
    with (moved / "model.py").open("a") as file:
        file.write("print('made')\n")
    with pytest.warns(package.AdvisorWarning, match="file another of this name"):
        assert lookup().status == "miss"
    done = tune(moved)
    assert done.stdout.startswith("Already tuned, ")
    assert "now known as model.py:Net too" in done.stderr
    assert served() == ("exact", first) and len(unmeasured) == 1


def test_what_made_up_data_gave_is_never_told_as_a_run(here: Path, unmeasured: list[Task]) -> None:
    """They have one key, and records of their own; another command of the same key has no other."""

    a, b = ((sys.executable, f"{name}.py") for name in "ab")
    made_up = printed(here, *TUNE)["record"]
    run = printed(here, "tune", "--force", "--", *a)
    first = run["record"]
    assert (run["status"], first["id"]) == ("tuned", made_up["id"]), "they share a key"
    assert first["provenance"]["study"] != made_up["provenance"]["study"]
    done = advisor(here, "tune", "--json", "--", *b)
    assert json.loads(done.stdout) == {"status": "known", "record": first}
    assert f"tuned before as {' '.join(a)}, which trains the same" in done.stderr
    assert printed(here, *TUNE)["record"] == made_up, "--force has left it"
    assert len(unmeasured) == 2
