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
from advisor.resolve.target_resolver import TargetResolver, script, spec_of
from advisor.tuners.target import origin_of, parse
from tests.cache import examples

QUERY = Query(environment=examples.ENVIRONMENT)
WIDE = Config(width=2)


def request(target: str | nn.Module | None = None, **given: Any) -> Request:
    given = {"mode": "train", **given}
    return Request(target=target, given=given, batch=None, use="loop", device="cuda:0")


def meant(
    found: list[Record], target: str | nn.Module | None = None, query: Query = QUERY, **given: Any
) -> Match:
    """The match among some records, as a request for this target means it."""
    return TargetResolver(request(target, **given)).match(found, query)


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
        resolver = TargetResolver(request(target))
        assert resolver.differences(mine) == ()
        assert (resolver.differences(other) == ()) is fits


@pytest.mark.parametrize(
    ("given", "fits"), [({}, "pw"), ({"model_args": WIDE}, "w"), ({"model_args": Config()}, "p")]
)
def test_the_arguments_that_it_is_built_with(given: dict[str, Any], fits: str) -> None:
    resolver = TargetResolver(request(**given))
    made = {"p": record(), "w": record(model_args=WIDE)}
    assert "".join(k for k, one in made.items() if not resolver.differences(one)) == fits


NET = """
import torch
from parts import Block
from torch import nn

WIDTH = 64
LR = 0.1

def scaled(x):
    return x * WIDTH

class Data:
    size = 10

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.block = Block()

    def forward(self, x):
        return self.drop(scaled(self.block(x)))

def build_model():
    return Net()

def make_batch(batch_size, device):
    return torch.randn(batch_size, 4, device=device), None

def loss(output, target):
    return output.mean()

def main(lr=LR):
    train(Net(), lr, Data())

if __name__ == "__main__":
    main()
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
        ("file", "before", "after"),
        [
            ("model.py", "scaled(self.block(x))", "scaled(self.block(x) + 1)"),
            ("model.py", "Dropout(0.1)", "Dropout(0.5)"),
            ("model.py", "torch.randn(", "torch.rand("),
            ("model.py", "output.mean()", "output.sum()"),
            ("model.py", "WIDTH = 64", "WIDTH = 32"),
            ("model.py", "return x * WIDTH", "return x + WIDTH"),
            ("model.py", "return Net()", "return Net().half()"),
            ("model.py", "from parts import Block", "from torch.nn import Identity as Block"),
            ("model.py", "def main(", "Net.forward = scaled\ndef main("),
            ("model.py", "def main(", "torch.set_default_dtype(torch.float64)\ndef main("),
            ("model.py", "def loss(", "def no_loss("),
            ("parts.py", "nn.Linear", "nn.Bilinear"),
        ],
    )
    def test_that_changed_is_a_miss(
        self, tuned: Record, here: Path, file: str, before: str, after: str
    ) -> None:
        text = (here / file).read_text()
        assert before in text and self.says(tuned) == []
        (here / file).write_text(text.replace(before, after))
        assert self.says(tuned) == ["code as tuned -> edited since"]
        (here / file).write_text(text)
        assert self.says(tuned) == []

    @pytest.mark.parametrize(
        ("file", "before", "after"),
        [
            ("model.py", "import torch\n", '"""A net."""\n\n# Why.\nimport torch\n'),
            ("model.py", "    def forward", '    """Says."""\n\n    def forward'),
            ("model.py", "x * WIDTH", "(\n        x\n        * WIDTH  # wide\n    )"),
            ("model.py", "0.1)", "1e-1)"),
            ("model.py", "train(Net(), lr, Data())", "train(Net(), 2 * lr, Data())"),
            ("model.py", "    main()\n", "    main(0.3)\n    print('done')\n"),
            ("model.py", "LR = 0.1", "LR = 0.2"),
            ("model.py", "size = 10", "size = 20"),
            ("parts.py", "return x + 1", "return x + 2"),
        ],
    )
    def test_of_the_rest_of_the_script_does_not_count(
        self, tuned: Record, here: Path, file: str, before: str, after: str
    ) -> None:
        text = (here / file).read_text()
        assert before in text
        (here / file).write_text(text.replace(before, after))
        assert self.says(tuned) == []

    def test_that_cannot_be_read_is_not_known(self, tuned: Record, here: Path) -> None:
        (here / "model.py").write_text("def model(:\n")
        fault = "code as tuned -> not known, model.py cannot be read: SyntaxError"
        assert self.says(tuned) == [fault]
        # Nor is that of which a record says nothing.
        (here / "model.py").write_text(NET)
        assert self.says(replace(tuned, target=replace(tuned.target, code="")))

    def test_what_else_differs_is_said_too(self, tuned: Record, here: Path) -> None:
        (here / "model.py").write_text(NET.replace("0.1", "0.5"))
        match = meant([tuned], "model.py", asking(deterministic=True), model_args=WIDE)
        assert [str(one) for one in match.differs] == [
            "code as tuned -> edited since",
            "model args none -> width=2",
            "deterministic False -> True",
        ]

    def test_of_another_file_comes_after_it(self, tuned: Record, here: Path) -> None:
        other = replace(tuned, target=replace(tuned.target, origin="0123456789abcdef"))
        (here / "model.py").write_text(NET.replace("0.1", "0.5"))
        for found in ([other, tuned], [tuned, other]):
            assert meant(found, "model.py").record is tuned

    @pytest.mark.parametrize(
        ("file", "before", "after"),
        [
            ("model.py", "Dropout(0.1)", "Dropout(0.5)"),
            ("parts.py", "nn.Linear", "nn.Bilinear"),
            ("parts.py", PARTS, ""),
        ],
    )
    def test_in_another_folder_is_meant_while_it_is_the_same(
        self,
        tuned: Record,
        here: Path,
        monkeypatch: pytest.MonkeyPatch,
        file: str,
        before: str,
        after: str,
    ) -> None:
        copy = here / "copy"
        copy.mkdir()
        for name in ("model.py", "parts.py"):
            (here / name).rename(copy / name)
        monkeypatch.chdir(copy)
        text = (copy / file).read_text()
        for target in ("model.py:build_model", "model.py"):
            assert meant([tuned], target).record is tuned
            (copy / file).write_text(text.replace(before, after))
            match = meant([tuned], target)
            assert [str(one) for one in match.differs] == [ANOTHER]
            (copy / file).write_text(text)

    @pytest.mark.parametrize(
        "target", ["other.py:build_model", "other.py", "model.py:Net", "copy.model:build_model"]
    )
    def test_in_another_folder_is_not_meant_by_another_name(
        self, tuned: Record, here: Path, monkeypatch: pytest.MonkeyPatch, target: str
    ) -> None:
        copy = here / "copy"
        copy.mkdir()
        (here / "parts.py").rename(copy / "parts.py")
        (here / "model.py").rename(copy / "model.py")
        (copy / "other.py").write_text(NET)
        if "copy." not in target:
            monkeypatch.chdir(copy)
        match = meant([tuned], target)
        assert [str(one) for one in match.differs] == [ANOTHER]

    def test_tuned_again_is_served(self, tuned: Record, here: Path) -> None:
        (here / "model.py").write_text(NET.replace("0.1", "0.5"))
        code = parse("model.py:build_model").code
        again = replace(tuned, target=replace(tuned.target, code=code))
        for target in ("model.py", None):
            assert meant([tuned, again], target).record is again

    def test_a_model_in_hand_has_its_own(self, tuned: Record, here: Path) -> None:
        (here / "model.py").write_text("def model(:\n")
        assert meant([tuned], nn.Linear(1, 1)).record is tuned


GUESSED = "several records fit: {}. Name one: apply(target, shape=..., dtype=..., model_args=...)"


class TestSeveral:
    @pytest.mark.parametrize(
        ("found", "given", "listed"),
        [
            (
                [record("a.py:Net"), record("b.py:Net")],
                {},
                "a.py:Net 3x256x256 float32; b.py:Net 3x256x256 float32",
            ),
            (
                [record(), record(shapes=((64, 3, 8, 8),)), record(dtype="float16")],
                {},
                "model.py:Net 3x256x256 float32; model.py:Net 3x8x8 float32; model.py:Net "
                "3x256x256 float16",
            ),
            (
                [record(model_args=WIDE), record(model_args=Config(width=4, depth=1))],
                {},
                "model.py:Net(width=2) 3x256x256 float32; model.py:Net(depth=1, width=4) 3x256x256 "
                "float32",
            ),
            (
                [record("a.py:Net"), record("b.py:Net", max_memory=2**30)],
                {"max_memory": 2**30},
                "a.py:Net 3x256x256 float32; b.py:Net 3x256x256 float32",
            ),
        ],
        ids=["targets", "samples", "arguments", "a narrower request"],
    )
    def test_none_is_guessed(self, found: list[Record], given: dict[str, Any], listed: str) -> None:
        with pytest.raises(NoRecord) as refused:
            meant(found, None, asking(**given))
        assert str(refused.value) == GUESSED.format(listed)

    @pytest.mark.parametrize(
        ("found", "target", "given"),
        [
            ([record()], None, {}),
            (
                [record(), record(dtype="float16"), record(shapes=((64, 3, 8, 8),))],
                "torchvision:alexnet",
                {"shapes": ((8, 3, 8, 8),)},
            ),
            # The same at another batch is no rival.
            (
                [record(), record(shapes=((32, 3, 256, 256),))],
                None,
                {"shapes": ((32, 3, 256, 256),)},
            ),
            # Only what fits is a rival.
            (
                [record("a.py:Net"), record("b.py:Net", deterministic=True)],
                None,
                {"deterministic": True},
            ),
            ([record("b.py:Net"), record("a.py:Net")], nn.Linear(1, 1), {}),
        ],
    )
    def test_the_last_is_meant(
        self, found: list[Record], target: Any, given: dict[str, Any]
    ) -> None:
        match = meant(found, target, asking(**given))
        assert match.fits and (match.record is found[-1] or target is not None)

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

    def test_the_running_one(self, train: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert script() == train
        monkeypatch.chdir(train.parent)
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__="train.py"))
        assert script() == train
        for main in (SimpleNamespace(), SimpleNamespace(__file__=None)):
            monkeypatch.setitem(sys.modules, "__main__", main)
            assert script() == Path("(no script)")
        monkeypatch.delitem(sys.modules, "__main__")
        assert script() == Path("(no script)")

    @staticmethod
    def origins() -> frozenset[str]:
        """The files that a lookup without a target asks for."""
        return TargetResolver(request()).sought(QUERY).origins or frozenset()

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

    def test_a_file_nowhere(self, train: Path, here: Path) -> None:
        with pytest.raises(TargetError) as refused:
            spec_of("none.py:Net")
        assert f"there is no file {here / 'none.py'}" in str(refused.value)
