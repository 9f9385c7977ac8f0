"""Which of a target's records are meant."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from advisor.cache.config import Config
from advisor.cache.match import Match, Query
from advisor.cache.reader import RecordFilter
from advisor.cache.record import Record, Target
from advisor.errors import NoRecord, TargetError
from advisor.resolve.request import Request
from advisor.resolve.target_resolver import TargetResolver, spec_of
from advisor.tuners.target import parse
from tests.cache import examples

QUERY = Query(environment=examples.ENVIRONMENT)
WIDE = Config(width=2)
SMALL = ((32, 3, 256, 256),)


def meant(
    found: list[Record], target: str | nn.Module = "model.py", query: Query = QUERY, **given: Any
) -> Match:
    """The match among some records, as a request for this target means it."""
    request = Request(target=target, given={"mode": "train", **given})
    return TargetResolver(request, query).match(found)


def record(name: str = "model.py:Net", origin: str = "", code: str = "", **task: Any) -> Record:
    made = examples.record(trials=0)
    task = {"model_args": Config(), **task}
    return replace(
        made,
        target=Target(name=name, origin=origin, code=code),
        key=replace(made.key, task=replace(made.key.task, **task)),
    )


def mine(name: str = "Net", **task: Any) -> Record:
    """A record of the current folder's model.py."""
    spec = parse(f"model.py:{name}")
    return record(spec.name, origin=spec.origin, code=spec.code, **task)


def asking(**given: Any) -> Query:
    return replace(QUERY, given=given)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model's file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").touch()
    return tmp_path


def test_a_name_means_the_very_file(here: Path) -> None:
    other = record(origin="0123456789abcdef")
    for target, fits in (("model.py:Net", False), (nn.Linear(1, 1), True)):
        assert meant([mine()], target).fits and meant([other], target).fits is fits


NET = """
from parts import Block
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.block = nn.Dropout(0.1), Block()

def build_model():
    return Net()

def loss(output, target):
    return output.mean()

if __name__ == "__main__":
    train(Net(), lr=0.1)
"""
ANOTHER = "file another of this name -> this one"
PARTS = "from torch import nn\nclass Block(nn.Linear): pass\ndef metric(x): return x + 1\n"


class TestCode:
    """What is served by a name is what was tuned, as far as its code says."""

    @pytest.fixture
    def tuned(self, here: Path) -> Record:
        """A record of NET's factory."""
        (here / "parts.py").write_text(PARTS)
        (here / "model.py").write_text(NET)
        return mine("build_model")

    @staticmethod
    def says(tuned: Record) -> list[str]:
        """What differs, by each way of naming it; where all agree, once."""
        said = []
        for target in ("model.py:build_model", "model.py"):
            match = meant([tuned], target)
            assert match.record is tuned and match.fits == (not match.differs)
            said.append([str(one) for one in match.differs])
        assert said[0] == said[1]
        return said[0]

    @pytest.mark.parametrize(
        ("file", "before", "after", "counts"),
        [
            ("model.py", "out(0.1", "out(0.5", True),
            ("model.py", "output.mean()", "output.sum()", True),
            ("parts.py", "nn.Linear", "nn.Bilinear", True),
            ("model.py", "lr=0.1", "lr=0.2", False),
            ("parts.py", "return x + 1", "return x + 2", False),
        ],
    )
    def test_that_changed_is_a_miss_if_it_decides_the_model(
        self, tuned: Record, here: Path, file: str, before: str, after: str, counts: bool
    ) -> None:
        """Which code decides: tests/tuners/test_target.py."""
        text = (here / file).read_text()
        assert before in text and self.says(tuned) == []
        (here / file).write_text(text.replace(before, after))
        assert self.says(tuned) == ["code as tuned -> edited since"] * counts

    def test_that_cannot_be_read_is_not_known(self, tuned: Record, here: Path) -> None:
        (here / "model.py").write_text("def model(:\n")
        fault = "code as tuned -> not known, model.py cannot be read: SyntaxError"
        assert self.says(tuned) == [fault]
        # Nor is that of which a record says nothing.
        (here / "model.py").write_text(NET)
        assert self.says(replace(tuned, target=replace(tuned.target, code="")))

    def test_what_else_differs_is_said_too(self, tuned: Record, here: Path) -> None:
        (here / "model.py").write_text(NET.replace("out(0.1", "out(0.5"))
        match = meant([tuned], "model.py", asking(deterministic=True), model_args=WIDE)
        assert [str(one) for one in match.differs] == [
            "code as tuned -> edited since",
            "model args none -> width=2",
            "deterministic False -> True",
        ]

    def test_of_another_file_comes_after_it(self, tuned: Record, here: Path) -> None:
        other = replace(tuned, target=replace(tuned.target, origin="0123456789abcdef"))
        (here / "model.py").write_text(NET.replace("out(0.1", "out(0.5"))
        for found in ([other, tuned], [tuned, other]):
            assert meant(found, "model.py").record is tuned

    @pytest.mark.parametrize("target", ["model.py:build_model", "model.py", "model.py:Net", "b.py"])
    def test_in_another_folder_its_name_is_meant_while_the_code_is_the_same(
        self, tuned: Record, here: Path, monkeypatch: pytest.MonkeyPatch, target: str
    ) -> None:
        (copy := here / "copy").mkdir()
        for name in ("model.py", "parts.py"):
            (here / name).rename(copy / name)
        (copy / "b.py").write_text(NET)
        monkeypatch.chdir(copy)
        same = target in ("model.py:build_model", "model.py")
        for text in (NET, NET.replace("out(0.1", "out(0.5")):
            (copy / "model.py").write_text(text)
            said = [str(one) for one in meant([tuned], target).differs]
            assert said == ([] if same and text == NET else [ANOTHER])


@pytest.mark.parametrize(
    ("found", "listed"),
    [
        (
            [{"name": "A"}, {"name": "B"}],
            "model.py:A 3x256x256 float32; model.py:B 3x256x256 float",
        ),
        (
            [{}, {"shapes": ((64, 3, 8, 8),)}, {"dtype": "float16"}],
            "Net 3x256x256 float32; model.py:Net 3x8x8 float32; model.py:Net 3x256x256 float16",
        ),
        (
            [{"model_args": WIDE}, {"model_args": Config(width=4, depth=1)}],
            "model.py:Net(width=2) 3x256x256 float32; model.py:Net(depth=1, width=4) 3x",
        ),
    ],
    ids=["targets", "samples", "arguments"],
)
def test_of_several_none_is_guessed(here: Path, found: list[dict[str, Any]], listed: str) -> None:
    with pytest.raises(NoRecord, match=r"several records fit: .* Name one: apply") as refused:
        meant([mine(**one) for one in found])
    assert listed in str(refused.value)


def test_the_same_at_another_batch_or_what_does_not_fit_is_no_rival(here: Path) -> None:
    for other, found, given in (
        (mine(), mine(shapes=SMALL), {"shapes": SMALL}),
        (mine("A"), mine("B", deterministic=True), {"deterministic": True}),
    ):
        match = meant([other, found], query=asking(**given))
        assert match.fits and match.record is found


def test_without_arguments_the_model_without_them_is_meant(here: Path) -> None:
    plain, wide = mine(), mine(model_args=WIDE)
    wide = replace(wide, provenance=replace(wide.provenance, created=1.8e9))
    assert meant([plain, wide]).record is meant([wide, plain]).record is plain
    assert meant([plain, wide], model_args=WIDE).record is wide


def test_a_model_in_hand_is_sought_by_its_fingerprint() -> None:
    query = replace(QUERY, model="ab" * 32)
    resolver = TargetResolver(Request(target=nn.Linear(2, 2), given={"mode": "train"}), query)
    assert resolver.sought() == RecordFilter(model="ab" * 32, query=query)


def test_a_miss_has_the_nearest(here: Path) -> None:
    match = meant([mine()], query=asking(deterministic=True))
    assert [str(one) for one in match.differs] == ["deterministic False -> True"]
    other = record(origin="0123456789abcdef")
    match = meant([other], "model.py:Net")
    assert (match.kind, match.record) == ("miss", other)
    assert [str(one) for one in match.differs] == [ANOTHER]
    assert meant([], "model.py:Net") == Match()


def test_a_file_beside_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "project").mkdir()
    (folder / "model.py").touch()
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(folder / "train.py")))
    monkeypatch.chdir(tmp_path)
    assert spec_of("model.py:Net").place == str(folder / "model.py")
    (tmp_path / "model.py").touch()
    assert spec_of("model.py:Net").place == str(tmp_path / "model.py")
    with pytest.raises(TargetError) as refused:
        spec_of("none.py:Net")
    assert f"there is no file {tmp_path / 'none.py'}" in str(refused.value)
