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
        assert [str(one) for one in match.differs] == ["file another of this name -> this one"]

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
