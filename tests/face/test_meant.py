"""Which of a target's records is meant."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from advisor.cache.config import Config
from advisor.cache.match import Query
from advisor.cache.record import Record, Target
from advisor.errors import NoRecord, TargetError
from advisor.finding.meant import Meant, matched, script, spec_of
from advisor.finding.request import Request
from advisor.tuners.target import origin_of, parse
from tests.cache import examples

QUERY = Query(environment=examples.ENVIRONMENT)
WIDE = Config(width=2)


def request(target: str | nn.Module | None = None, **given: Any) -> Request:
    return Request(
        target=target,
        given={"mode": "train", **given},
        batch=None,
        free=False,
        use="loop",
        device="cuda:0",
    )


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


class TestWanted:
    def test_of_the_very_file(self, here: Path) -> None:
        mine = record(origin=origin_of(here / "model.py"), code=parse("model.py:Net").code)
        other = record(origin="0123456789abcdef")
        assert Meant(request("model.py:Net")).wanted_of([other, mine]) == [mine]
        # A model in hand, and a script that names none, are told by more than a name.
        assert Meant(request(nn.Linear(1, 1))).wanted_of([other, mine]) == [other, mine]
        assert Meant(request()).wanted_of([other, mine]) == [other, mine]

    def test_built_with_the_arguments_given(self) -> None:
        plain, wide = record(), record(model_args=WIDE)
        assert Meant(request()).wanted_of([plain, wide]) == [plain, wide]
        assert Meant(request(model_args=WIDE)).wanted_of([plain, wide]) == [wide]
        assert Meant(request(model_args=Config())).wanted_of([plain, wide]) == [plain]


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
            match = Meant(request(target)).the_one([tuned], QUERY)
            assert (match.record is None) == (match.kind == "miss") == bool(match.differs)
            assert (match.record or match.nearest) is tuned
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
        match = Meant(request("model.py", model_args=WIDE)).the_one(
            [tuned], asking(deterministic=True)
        )
        assert [str(one) for one in match.differs] == [
            "code as tuned -> edited since",
            "model args none -> width=2",
            "deterministic False -> True",
        ]

    def test_of_another_file_comes_after_it(self, tuned: Record, here: Path) -> None:
        other = replace(tuned, target=replace(tuned.target, origin="0123456789abcdef"))
        (here / "model.py").write_text(NET.replace("0.1", "0.5"))
        for found in ([other, tuned], [tuned, other]):
            assert Meant(request("model.py")).the_one(found, QUERY).nearest is tuned

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
            assert Meant(request(target)).the_one([tuned], QUERY).record is tuned
            (copy / file).write_text(text.replace(before, after))
            match = Meant(request(target)).the_one([tuned], QUERY)
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
        match = Meant(request(target)).the_one([tuned], QUERY)
        assert [str(one) for one in match.differs] == [ANOTHER]

    def test_tuned_again_is_served(self, tuned: Record, here: Path) -> None:
        (here / "model.py").write_text(NET.replace("0.1", "0.5"))
        code = parse("model.py:build_model").code
        again = replace(tuned, target=replace(tuned.target, code=code))
        for target in ("model.py", None):
            assert Meant(request(target)).the_one([tuned, again], QUERY).record is again

    def test_a_model_in_hand_has_its_own(self, tuned: Record, here: Path) -> None:
        (here / "model.py").write_text("def model(:\n")
        assert Meant(request(nn.Linear(1, 1))).the_one([tuned], QUERY).record is tuned


class TestMatched:
    def test_as_asked(self) -> None:
        made, wider = record(precisions=("default", "tf32")), record()
        asked = asking(precisions=("default", "tf32"))
        assert matched([wider, made], asked).record is made

    @pytest.mark.parametrize(
        "narrower",
        [
            {"precisions": ("default",)},
            {"max_memory": 2**30},
            {"batches": (8,)},
            {"step_graph": False},
            {"tolerance": 0.1},
        ],
    )
    def test_a_record_that_permits_more_will_do(self, narrower: dict[str, Any]) -> None:
        made = record()
        assert matched([made], asking(**narrower)).record is made

    @pytest.mark.parametrize(
        "other", [{"compile": False}, {"deterministic": True}, {"optimizer": "adamw"}]
    )
    def test_one_for_another_task_will_not(self, other: dict[str, Any]) -> None:
        match = matched([record()], asking(**other))
        assert match.record is None
        assert [one.field for one in match.differs] == [*other]

    def test_a_miss_names_no_permission(self) -> None:
        match = matched([record()], asking(compile=False, precisions=("default",)))
        assert [one.field for one in match.differs] == ["compile"]

    def test_nothing_there(self) -> None:
        match = matched([], QUERY)
        assert (match.kind, match.record, match.nearest) == ("miss", None, None)


class TestTheOne:
    def test_the_only_one(self) -> None:
        made = record()
        assert Meant(request()).the_one([made], QUERY).record is made

    def test_of_several_targets_none_is_guessed(self) -> None:
        with pytest.raises(NoRecord) as refused:
            Meant(request()).the_one([record("a.py:Net"), record("b.py:Net")], QUERY)
        assert str(refused.value) == (
            "several records fit: a.py:Net 3x256x256 float32; b.py:Net 3x256x256 float32. Name "
            "one: apply(target, shape=..., dtype=..., model_args=...)"
        )

    def test_of_several_samples_none_is_guessed(self) -> None:
        found = [record(), record(shapes=((64, 3, 8, 8),)), record(dtype="float16")]
        with pytest.raises(NoRecord) as refused:
            Meant(request("torchvision:alexnet")).the_one(found, QUERY)
        for said in ("3x256x256 float32; ", "3x8x8 float32; ", "3x256x256 float16. Name"):
            assert f"model.py:Net {said}" in str(refused.value)
        small = asking(shapes=((8, 3, 8, 8),))
        assert Meant(request("torchvision:alexnet")).the_one(found, small).record is found[1]

    def test_the_same_at_another_batch_is_no_rival(self) -> None:
        found = [record(), record(shapes=((32, 3, 256, 256),))]
        asked = asking(shapes=((32, 3, 256, 256),))
        assert Meant(request()).the_one(found, asked).record is found[1]

    def test_a_model_in_hand_is_plain(self) -> None:
        found = [record("a.py:Net"), record("b.py:Net")]
        match = Meant(request(nn.Linear(1, 1))).the_one(found, QUERY)
        assert match.record in found

    def test_without_arguments_the_model_without_them_is_meant(self) -> None:
        plain, wide = record(), record(model_args=WIDE)
        wide = replace(wide, provenance=replace(wide.provenance, created=1.8e9))
        for found in ([plain, wide], [wide, plain]):
            assert Meant(request()).the_one(found, QUERY).record is plain
        named = request(model_args=WIDE)
        assert Meant(named).the_one([plain, wide], QUERY).record is wide

    def test_where_all_have_arguments_none_is_guessed(self) -> None:
        found = [record(model_args=WIDE), record(model_args=Config(width=4, depth=1))]
        with pytest.raises(NoRecord) as refused:
            Meant(request()).the_one(found, QUERY)
        assert "model.py:Net(width=2) 3x256x256 float32; " in str(refused.value)
        assert "model.py:Net(depth=1, width=4) 3x256x256 float32. " in str(refused.value)

    def test_only_what_fits_is_a_rival(self) -> None:
        found = [record("a.py:Net"), record("b.py:Net", deterministic=True)]
        match = Meant(request()).the_one(found, asking(deterministic=True))
        assert match.record is found[1]

    def test_a_narrower_request_has_the_same_rivals(self) -> None:
        found = [record("a.py:Net"), record("b.py:Net", max_memory=2**30)]
        with pytest.raises(NoRecord, match="several records fit"):
            Meant(request()).the_one(found, asking(max_memory=2**30))

    def test_a_miss_among_mine(self) -> None:
        match = Meant(request()).the_one([record()], asking(deterministic=True))
        assert match.record is None
        assert [str(one) for one in match.differs] == ["deterministic False -> True"]

    def test_of_another_file_of_the_name(self, here: Path) -> None:
        other = record(origin="0123456789abcdef")
        match = Meant(request("model.py:Net")).the_one([other], QUERY)
        assert (match.kind, match.record, match.nearest) == ("miss", None, other)
        assert [str(one) for one in match.differs] == [ANOTHER]

    def test_of_no_file_of_the_name(self, here: Path) -> None:
        match = Meant(request("model.py:Net")).the_one([], QUERY)
        assert (match.kind, match.record, match.nearest, match.differs) == ("miss", None, None, ())


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

    def test_its_origins_are_the_modules_beside_it(self, train: Path) -> None:
        folder = train.parent
        assert Meant(request()).origins == {
            origin_of(folder / name) for name in ("train.py", "model.py")
        }
        train.unlink()
        # Of one that is not there nothing beside it is meant.
        assert Meant(request()).origins == {origin_of(train)}

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
        assert {origin_of(one) for one in around} <= Meant(request()).origins
        monkeypatch.chdir(train.parent)
        made = parse("package.net:Net")
        one = record(made.name, origin=made.origin, code=made.code)
        assert Meant(request()).the_one([one], QUERY).record is one
        (inner.parent / "net.py").write_text("Net = 1\n")
        assert Meant(request()).the_one([one], QUERY).record is None
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
        match = Meant(request()).the_one([made], QUERY)
        imported = text.startswith("import")
        assert (match.record, match.nearest) == ((made, None) if imported else (None, None))
        assert Meant(request("model.py:Net")).the_one([made], QUERY).record is made
        monkeypatch.setitem(sys.modules, "models", SimpleNamespace(__file__=str(file)))
        assert Meant(request()).the_one([made], QUERY).record is made

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
