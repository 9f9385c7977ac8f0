"""Which stored record matches a target."""

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


def match_of(
    records: list[Record], target: str | nn.Module = "model.py", query: Query = QUERY, **given: Any
) -> Match:
    """The match of a request for this target among the records."""
    request = Request(target=target, given={"mode": "train", **given})
    return TargetResolver(request, query).match(records)


def record(name: str = "model.py:Net", origin: str = "", code: str = "", **task: Any) -> Record:
    made = examples.record(trials=0)
    task = {"model_args": Config(), **task}
    return replace(
        made,
        target=Target(name=name, origin=origin, code=code),
        key=replace(made.key, task=replace(made.key.task, **task)),
    )


def local_record(name: str = "Net", **task: Any) -> Record:
    """A record of the model.py in the current folder."""
    spec = parse(f"model.py:{name}")
    return record(spec.name, origin=spec.origin, code=spec.code, **task)


def query_for(**given: Any) -> Query:
    return replace(QUERY, given=given)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an empty model.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").touch()
    return tmp_path


def test_a_name_matches_only_records_of_its_file(here: Path) -> None:
    other = record(origin="0123456789abcdef")
    for target, fits in (("model.py:Net", False), (nn.Linear(1, 1), True)):
        assert match_of([local_record()], target).fits and match_of([other], target).fits is fits


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
    """A record matches the name of its target only if the code is unchanged."""

    @pytest.fixture
    def tuned(self, here: Path) -> Record:
        """A record of build_model() in NET."""
        (here / "parts.py").write_text(PARTS)
        (here / "model.py").write_text(NET)
        return local_record("build_model")

    @staticmethod
    def differences(tuned: Record) -> list[str]:
        """The differences to the request. Both names of the target must give the same ones."""
        differences = []
        for target in ("model.py:build_model", "model.py"):
            match = match_of([tuned], target)
            assert match.record is tuned and match.fits == (not match.differs)
            differences.append([str(one) for one in match.differs])
        assert differences[0] == differences[1]
        return differences[0]

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
    def test_an_edit_is_a_miss_if_it_changes_the_model(
        self, tuned: Record, here: Path, file: str, before: str, after: str, counts: bool
    ) -> None:
        """tests/tuners/test_target.py tests which code belongs to a model."""
        text = (here / file).read_text()
        assert before in text and self.differences(tuned) == []
        (here / file).write_text(text.replace(before, after))
        assert self.differences(tuned) == ["code as tuned -> edited since"] * counts

    def test_unreadable_code_is_a_miss(self, tuned: Record, here: Path) -> None:
        (here / "model.py").write_text("def model(:\n")
        fault = "code as tuned -> not known, model.py cannot be read: SyntaxError"
        assert self.differences(tuned) == [fault]
        # A record without a hash of its code does not match, either.
        (here / "model.py").write_text(NET)
        assert self.differences(replace(tuned, target=replace(tuned.target, code="")))

    def test_other_differences_are_listed_too(self, tuned: Record, here: Path) -> None:
        (here / "model.py").write_text(NET.replace("out(0.1", "out(0.5"))
        match = match_of([tuned], "model.py", query_for(deterministic=True), model_args=WIDE)
        assert [str(one) for one in match.differs] == [
            "code as tuned -> edited since",
            "model args none -> width=2",
            "deterministic False -> True",
        ]

    def test_a_record_of_the_same_file_comes_first(self, tuned: Record, here: Path) -> None:
        other = replace(tuned, target=replace(tuned.target, origin="0123456789abcdef"))
        (here / "model.py").write_text(NET.replace("out(0.1", "out(0.5"))
        for records in ([other, tuned], [tuned, other]):
            assert match_of(records, "model.py").record is tuned

    @pytest.mark.parametrize("target", ["model.py:build_model", "model.py", "model.py:Net", "b.py"])
    def test_a_moved_file_matches_by_its_name_if_its_code_is_unchanged(
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
            differs = [str(one) for one in match_of([tuned], target).differs]
            assert differs == ([] if same and text == NET else [ANOTHER])


@pytest.mark.parametrize(
    ("tasks", "listed"),
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
def test_several_matches_are_refused(here: Path, tasks: list[dict[str, Any]], listed: str) -> None:
    with pytest.raises(NoRecord, match=r"several records fit: .* Name one: apply") as refused:
        match_of([local_record(**one) for one in tasks])
    assert listed in str(refused.value)


def test_records_of_another_batch_or_task_are_not_ambiguous(here: Path) -> None:
    for other, fitting, given in (
        (local_record(), local_record(shapes=SMALL), {"shapes": SMALL}),
        (local_record("A"), local_record("B", deterministic=True), {"deterministic": True}),
    ):
        match = match_of([other, fitting], query=query_for(**given))
        assert match.fits and match.record is fitting


def test_without_arguments_the_record_without_arguments_matches(here: Path) -> None:
    plain, wide = local_record(), local_record(model_args=WIDE)
    wide = replace(wide, provenance=replace(wide.provenance, created=1.8e9))
    assert match_of([plain, wide]).record is match_of([wide, plain]).record is plain
    assert match_of([plain, wide], model_args=WIDE).record is wide


def test_a_model_object_is_looked_up_by_its_fingerprint() -> None:
    query = replace(QUERY, model="ab" * 32)
    resolver = TargetResolver(Request(target=nn.Linear(2, 2), given={"mode": "train"}), query)
    assert resolver.sought() == RecordFilter(model="ab" * 32, query=query)


def test_a_miss_has_the_nearest_record(here: Path) -> None:
    match = match_of([local_record()], query=query_for(deterministic=True))
    assert [str(one) for one in match.differs] == ["deterministic False -> True"]
    other = record(origin="0123456789abcdef")
    match = match_of([other], "model.py:Net")
    assert (match.kind, match.record) == ("miss", other)
    assert [str(one) for one in match.differs] == [ANOTHER]
    assert match_of([], "model.py:Net") == Match()


def test_a_file_beside_the_script_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
