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
from advisor.cache.record import Record, Target
from advisor.errors import NoRecord, TargetError
from advisor.resolve.request import Request
from advisor.resolve.target_resolver import TargetResolver, spec_of
from advisor.tuners.target import origin_of, parse
from tests.cache import examples

QUERY = Query(environment=examples.ENVIRONMENT)
WIDE = Config(width=2)
SMALL = ((32, 3, 256, 256),)


def meant(
    found: list[Record], target: str | nn.Module | None = None, query: Query = QUERY, **given: Any
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


def asking(**given: Any) -> Query:
    return replace(QUERY, given=given)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model's file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").touch()
    return tmp_path


def test_a_name_means_the_very_file(here: Path) -> None:
    mine = record(origin=origin_of(here / "model.py"), code=parse("model.py:Net").code)
    other = record(origin="0123456789abcdef")
    for target, fits in (("model.py:Net", False), (nn.Linear(1, 1), True), (None, True)):
        assert meant([mine], target).fits and meant([other], target).fits is fits


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
    def tuned(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
        """A record of NET's factory, beside the running script."""
        monkeypatch.setitem(
            sys.modules, "__main__", SimpleNamespace(__file__=str(here / "train.py"))
        )
        (here / "train.py").write_text("from model import build_model\n")
        (here / "parts.py").write_text(PARTS)
        (here / "model.py").write_text(NET)
        spec = parse("model.py:build_model")
        return record(spec.name, origin=spec.origin, code=spec.code)

    @staticmethod
    def says(tuned: Record) -> list[str]:
        """What differs, by each way of naming it; where all agree, once."""
        said = []
        for target in ("model.py:build_model", "model.py", None):
            match = meant([tuned], target)
            assert match.record is tuned and match.fits == (not match.differs)
            said.append([str(one) for one in match.differs])
        assert said[0] == said[1] == said[2]
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


class TestSeveral:
    @pytest.mark.parametrize(
        ("found", "listed"),
        [
            ([record("a.py:Net"), record("b.py:Net")], "a.py:Net 3x256x256 float32; b.py:Net 3x"),
            (
                [record(), record(shapes=((64, 3, 8, 8),)), record(dtype="float16")],
                "Net 3x256x256 float32; model.py:Net 3x8x8 float32; model.py:Net 3x256x256 float16",
            ),
            (
                [record(model_args=WIDE), record(model_args=Config(width=4, depth=1))],
                "model.py:Net(width=2) 3x256x256 float32; model.py:Net(depth=1, width=4) 3x",
            ),
        ],
        ids=["targets", "samples", "arguments"],
    )
    def test_none_is_guessed(self, found: list[Record], listed: str) -> None:
        with pytest.raises(NoRecord, match=r"several records fit: .* Name one: apply") as refused:
            meant(found)
        assert listed in str(refused.value)

    def test_the_same_at_another_batch_or_what_does_not_fit_is_no_rival(self) -> None:
        for other, found, given in (
            (record(), record(shapes=SMALL), {"shapes": SMALL}),
            (record("a.py:Net"), record("b.py:Net", deterministic=True), {"deterministic": True}),
        ):
            match = meant([other, found], None, asking(**given))
            assert match.fits and match.record is found

    def test_without_arguments_the_model_without_them_is_meant(self) -> None:
        plain, wide = record(), record(model_args=WIDE)
        wide = replace(wide, provenance=replace(wide.provenance, created=1.8e9))
        assert meant([plain, wide]).record is meant([wide, plain]).record is plain
        assert meant([plain, wide], model_args=WIDE).record is wide

    def test_a_miss_has_the_nearest(self, here: Path) -> None:
        match = meant([record()], None, asking(deterministic=True))
        assert [str(one) for one in match.differs] == ["deterministic False -> True"]
        other = record(origin="0123456789abcdef")
        match = meant([other], "model.py:Net")
        assert (match.kind, match.record) == ("miss", other)
        assert [str(one) for one in match.differs] == [ANOTHER]
        assert meant([], "model.py:Net") == Match()


class TestScript:
    @pytest.fixture
    def train(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The running script, in a folder with a model."""
        folder = tmp_path / "project"
        folder.mkdir()
        for name in ("train.py", "model.py", "notes.txt"):
            (folder / name).touch()
        file = folder / "train.py"
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(file)))
        return file

    @staticmethod
    def origins() -> frozenset[str]:
        """The files that a lookup without a target asks for."""
        return TargetResolver(Request(), QUERY).sought().origins or frozenset()

    def test_its_origins_are_the_modules_beside_it(self, train: Path) -> None:
        folder = train.parent
        assert self.origins() == {origin_of(folder / name) for name in ("train.py", "model.py")}
        train.unlink()
        # Nothing is beside a script that does not exist.
        assert self.origins() == {origin_of(train)}

    def test_of_a_package_all_around_it(self, train: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        inner = train.parent / "package" / "inner"
        inner.mkdir(parents=True)
        for folder in (inner, inner.parent):
            (folder / "__init__.py").touch()
        (inner.parent / "net.py").touch()
        file = inner / "train.py"
        file.write_text("def main():\n    from ..net import Net\n")
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(file)))
        around = [file, inner.parent / "net.py", train.parent / "model.py"]
        assert {origin_of(one) for one in around} <= self.origins()
        monkeypatch.chdir(train.parent)
        made = parse("package.net:Net")
        one = record(made.name, origin=made.origin, code=made.code)
        assert meant([one]).record is one
        (inner.parent / "net.py").write_text("Net = 1\n")
        assert not meant([one]).fits
        assert "package" not in sys.modules

    @pytest.mark.parametrize("text", ["import model\n", "import parts\n", "", "def train(:\n"])
    def test_a_module_beside_it_is_meant_where_it_is_imported(
        self, train: Path, monkeypatch: pytest.MonkeyPatch, text: str
    ) -> None:
        train.write_text(text)
        (train.parent / "parts.py").write_text("if True:\n    from model import Net\n")
        file = train.parent / "model.py"
        monkeypatch.chdir(train.parent)
        made = record(origin=origin_of(file), code=parse("model.py:Net").code)
        match = meant([made])
        imported = text.startswith("import")
        assert match.record is (made if imported else None)
        assert meant([made], "model.py:Net").record is made
        monkeypatch.setitem(sys.modules, "models", SimpleNamespace(__file__=str(file)))
        assert meant([made]).record is made

    def test_a_file_beside_the_script(
        self, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert spec_of("model.py:Net").place == str(train.parent / "model.py")
        (tmp_path / "model.py").touch()
        assert spec_of("model.py:Net").place == str(tmp_path / "model.py")
        with pytest.raises(TargetError) as refused:
            spec_of("none.py:Net")
        assert f"there is no file {tmp_path / 'none.py'}" in str(refused.value)
