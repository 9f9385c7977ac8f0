"""Target strings, and what is found behind them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from advisor.cache.config import Config
from advisor.errors import AdvisorError, TargetError, TargetFailed
from advisor.tuners import fingerprint
from advisor.tuners.target import build, load, parse

HEAD = "import torch\nfrom torch import nn\n"
NET = "class Net(nn.Module):\n    def __init__(self, width=3):\n        super().__init__()\n"
NET += "        self.fc = nn.Linear(4, width)\n    def forward(self, x): return self.fc(x)\n"


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(HEAD + text)
    return str(path)


def loaded(target: str, **arguments: int) -> nn.Module:
    return build(load(parse(target), Config(arguments)))


def test_the_one_class_that_builds_without_arguments(tmp_path: Path) -> None:
    text = "class Block(nn.Module):\n    def __init__(self, a): super().__init__()\n" + NET
    found = load(parse(write(tmp_path, text)), Config())
    assert found.spec.name == "mine.py:Net"
    assert type(build(found)).__name__ == "Net"


@pytest.mark.parametrize("name", ["model", "build_model", "get_model"])
def test_a_conventional_callable_speaks_for_the_file(tmp_path: Path, name: str) -> None:
    text = NET + f"def {name}(): return Net(7)\n"
    assert loaded(write(tmp_path, text)).fc.out_features == 7  # type: ignore[union-attr]


def test_a_module_instance_is_a_target(tmp_path: Path) -> None:
    path = write(tmp_path, NET + "model = Net(5)\n")
    found = load(parse(path), Config())
    assert build(found) is not build(found)


def test_several_candidates_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path, NET + "class Other(Net): pass\n")
    with pytest.raises(TargetError, match=r"mine\.py:Net, mine\.py:Other"):
        loaded(path)


def test_arguments_reach_the_factory(tmp_path: Path) -> None:
    assert loaded(write(tmp_path, NET), width=9).fc.out_features == 9  # type: ignore[union-attr]


def test_torchvision_is_built_untrained() -> None:
    model = loaded("torchvision:squeezenet1_1", num_classes=5)
    assert type(model).__name__ == "SqueezeNet"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nope.py", "no file"),
        ("nothing", "expected"),
        ("a b:c", "expected"),
        ("torchvision:resnet5000", "resnet50"),
        ("no_such_module:f", "no module"),
        ("torchvision:", "expected"),
    ],
)
def test_wrong_strings_say_what_is_right(target: str, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        loaded(target)


def test_an_import_that_fails_shows_the_users_frames_only(tmp_path: Path) -> None:
    path = write(tmp_path, "def inner():\n    return 1 / 0\ninner()\n")
    with pytest.raises(TargetFailed, match="ZeroDivisionError") as caught:
        loaded(path)
    assert "inner()" in caught.value.details
    assert "importlib" not in caught.value.details and "target.py" not in caught.value.details


@pytest.mark.parametrize(
    "text", ["def model(): raise ValueError('no')\n", "def model(): return 3\n"]
)
def test_a_factory_that_fails(tmp_path: Path, text: str) -> None:
    with pytest.raises(TargetFailed):
        loaded(write(tmp_path, text))


def test_a_script_that_exits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdvisorError, match="__main__"):
        loaded(write(tmp_path, "raise SystemExit(0)\n"))


def test_fingerprint_is_the_architecture_and_not_the_weights() -> None:
    def net(width: int = 3, bias: bool = True, stride: int = 1) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, width, 3, bias=bias, stride=stride), nn.ReLU())

    same = fingerprint.of_model(net())
    assert same == fingerprint.of_model(net())
    assert same == fingerprint.of_model(nn.DataParallel(net()))
    for other in (net(width=4), net(bias=False), net(stride=2)):
        assert fingerprint.of_model(other) != same
    assert fingerprint.of_model(net().half()) != same
