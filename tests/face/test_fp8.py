"""What is said of fp8: why it is not tried, and what a short comparison cannot show."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import advisor
from advisor.cache.task import Task
from advisor.frameworks.tables import hf
from advisor.frameworks.words import ConfigContext
from advisor.report import tables
from advisor.tuners import fp8
from tests.cache import examples
from tests.face.commands import MODEL, SHAPE


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
    model = advisor.Model("model.py", device="cpu", mode=mode)

    def said(permit: advisor.Permit) -> list[str]:
        heard: list[str] = []
        store = advisor.Store(tmp_path / "store")
        advisor.tune(
            model,
            shape=SHAPE,
            permit=permit,
            store=store,
            on_event=lambda event: heard.append(event["text"]),
        )
        return heard

    assert f"fp8 is not tried: {why}" in said(advisor.Permit(precisions="default,fp8"))
    assert not any("fp8 is not tried" in line for line in said(advisor.Permit()))


def test_a_record_with_it_says_its_caveat_and_is_no_frameworks() -> None:
    made = examples.record()
    assert fp8.CAVEAT not in list(tables.remarks(made))
    first, *others = made.winners
    config = first.choice.config.replace(precision="fp8")
    winner = dataclasses.replace(first, choice=dataclasses.replace(first.choice, config=config))
    found = dataclasses.replace(made, winners=(winner, *others))
    assert list(tables.remarks(found)).count(fp8.CAVEAT) == 1
    assert hf.setup(ConfigContext(found, config))[1]["precision"] == "fp8"
