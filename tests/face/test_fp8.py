"""What is said of fp8: why it is not tried, and what a short comparison cannot show."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import advisor
from advisor.cache.task import Task
from advisor.frameworks import hf
from advisor.frameworks.words import Scene
from advisor.report import tables
from advisor.tuners import fp8
from advisor.tuners.search.plan import Progress
from tests.cache import examples
from tests.face.commands import MODEL, SHAPE


class Heard(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def notice(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("train", "it takes a GPU of compute capability 8.9 or more"),
        ("infer", "it is for training"),
    ],
)
def test_tuning_says_why_it_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: list[Task], mode: str, why: str
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    heard = Heard()
    where = {"device": "cpu", "mode": mode, "cache": str(tmp_path / "store")}
    advisor.tune("model.py", SHAPE, precisions="default,fp8", progress=heard, **where)
    assert f"fp8 is not tried: {why}" in heard.said
    heard.said.clear()
    advisor.tune("model.py", SHAPE, progress=heard, **where)
    assert not any("fp8 is not tried" in line for line in heard.said)


def test_a_record_with_it_says_its_caveat_and_is_no_frameworks() -> None:
    made = examples.record()
    assert fp8.CAVEAT not in list(tables.said(made))
    first, *others = made.winners
    config = first.choice.config.replace(precision="fp8")
    winner = dataclasses.replace(first, choice=dataclasses.replace(first.choice, config=config))
    found = dataclasses.replace(made, winners=(winner, *others))
    assert list(tables.said(found)).count(fp8.CAVEAT) == 1
    _, unsaid = hf.FRAMEWORK.say(Scene.of(found, config))
    assert unsaid["precision"] == "fp8"
