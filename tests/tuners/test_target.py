"""Target strings: loading the model, its fingerprint and its source."""

from __future__ import annotations

import ast
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from advisor.cache.config import Config
from advisor.errors import AdvisorError, TargetError, TargetFailed
from advisor.tuners import fingerprint, source
from advisor.tuners.target import build, load, parse
from tests import forks

HEAD = "import torch\nfrom torch import nn\n"
CALLABLES = ("model", "build_model", "get_model")
NET = "class Net(nn.Module):\n    def __init__(self, width=3):\n        super().__init__()\n"
NET += "        self.fc = nn.Linear(4, width)\n    def forward(self, x): return self.fc(x)\n"


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(HEAD + text)
    return str(path)


def loaded(target: str, **arguments: int) -> nn.Module:
    return build(load(parse(target), Config(arguments)))


BLOCK = "class Block(nn.Module):\n    def __init__(self, a): super().__init__()\n"


@pytest.mark.parametrize(
    ("text", "arguments", "width"),
    [
        (BLOCK + NET, {}, 3),  # the one class that builds without arguments
        (NET, {"width": 9}, 9),
        *((NET + f"def {name}(): return Net(7)\n", {}, 7) for name in CALLABLES),
        (NET + "model = Net(5)\n", {}, 5),
    ],
)
def test_models_are_built(tmp_path: Path, text: str, arguments: dict[str, int], width: int) -> None:
    target = load(parse(write(tmp_path, text)), Config(arguments))
    assert target.spec.name.startswith("mine.py:")
    assert build(target) is not build(target)
    assert build(target).fc.out_features == width  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (NET + "class Other(Net): pass\n", TargetError, r"mine\.py:Net, mine\.py:Other"),
        ("x = 1\n", TargetError, r"it defines no nn\.Module class that builds without"),
        ("def model(): raise ValueError('no')\n", TargetFailed, "no"),
        ("def model(): return 3\n", TargetFailed, "int"),
        ("raise SystemExit(0)\n", AdvisorError, "__main__"),
    ],
)
def test_invalid_files_are_refused(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        loaded(write(tmp_path, text))


def test_torchvision_model_is_built() -> None:
    model = loaded("torchvision:squeezenet1_1", num_classes=5)
    assert type(model).__name__ == "SqueezeNet"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nope.py", "no file"),
        ("nothing", "expected"),
        ("a b:c", "expected"),
        ("torchvision:resnet5000", "did you mean .*resnet50"),
        ("no.such:thing", "'no.such:thing': there is no module 'no'"),
        ("torchvision:", "expected"),
    ],
)
def test_invalid_target_string_is_refused(target: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        loaded(target)


def test_failed_import_shows_only_the_users_frames(tmp_path: Path) -> None:
    path = write(tmp_path, "def inner():\n    return 1 / 0\ninner()\n")
    with pytest.raises(TargetFailed, match="ZeroDivisionError") as caught:
        loaded(path)
    assert "inner()" in caught.value.details
    assert "importlib" not in caught.value.details and "target.py" not in caught.value.details


def test_fingerprint_depends_on_the_architecture_and_not_on_the_weights() -> None:
    def net(width: int = 3, bias: bool = True, stride: int = 1) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, width, 3, bias=bias, stride=stride), nn.ReLU())

    same = fingerprint.of_model(net())
    assert same == fingerprint.of_model(net())
    assert same == fingerprint.of_model(nn.DataParallel(net()))
    patched = net()
    patched.forward = lambda x: x  # type: ignore[method-assign]
    for other in (net(width=4), net(bias=False), net(stride=2), net().half(), patched):
        assert fingerprint.of_model(other) != same


CODE = '''
RATE = 0.1

def mixed(x):
    return x * 2

class Base(nn.Module):
    def half(self, x):
        return x / 2

class Net(Base):
    """What it is."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor):
        # why
        y = mixed(self.fc(x))
        return self.half(nn.functional.dropout(y, RATE))

def make_batch(batch_size, device):
    return torch.randn(batch_size, 4), None

def loss(output, target):
    return scaled(output).mean()

def scaled(output):
    return output * RATE
'''


def digest(folder: Path, text: str, name: str) -> str:
    return fingerprint.of_model(loaded(write(folder, text, name) + ":Net"))


def test_file_is_parsed_once_for_all_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = "\ndef made():\n    class Inner(Net):\n        depth = {}\n    return Inner()\n"
    files = [write(tmp_path, CODE + made.format(n), f"of{n}.py") for n in (1, 2)]
    nets = [loaded(f"{file}:made") for file in files]
    parsed, plain = list[str](), ast.parse
    monkeypatch.setattr(ast, "parse", lambda text: parsed.append(text) or plain(text))
    first, second = map(fingerprint.of_model, nets)
    assert first != second
    assert sum("class Base" in text for text in parsed) == len(nets)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("        # why\n", "\n\n", True),
        ('    """What it is."""\n', "", True),
        ("x: torch.Tensor)", "x)", True),
        ("y = mixed(self.fc(x))", "y = (\n            mixed(\n  self.fc(x)))", True),
        ("RATE = 0.1\n", "RATE = 1e-1  # the same\nx = 17\n", True),
        ("def loss(", "def unused(): return 3\n\ndef loss(", True),
        ("y = mixed(self.fc(x))", "y = mixed(self.fc(x) + 1)", False),
        ("RATE))", "0.3))", False),
        ("RATE = 0.1", "RATE = 0.3", False),
        ("return x * 2", "return x * 3", False),
        ("return x / 2", "return x / 4", False),
        ("nn.functional.dropout(y, RATE)", "nn.functional.dropout(y, RATE, training=False)", False),
    ],
)
@pytest.mark.parametrize("most", [fingerprint.MOST_PIECES, 1])
def test_fingerprint_changes_with_used_code_only(
    tmp_path: Path, before: str, after: str, same: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more than `most` pieces, whole files count."""
    monkeypatch.setattr(fingerprint, "MOST_PIECES", most)
    assert before in CODE
    known = digest(tmp_path, CODE, "first.py")
    found = digest(tmp_path, CODE.replace(before, after), "other.py")
    assert (found == known) is (same and most > 1)


def test_training_script_gives_the_same_fingerprint(tmp_path: Path) -> None:
    tail = "import sys\nfrom advisor.tuners import fingerprint\n"
    tail += "batch = 64\nprint(fingerprint.of_model(Net()))\n"
    (script := tmp_path / "train.py").write_text(HEAD + CODE + tail)
    assert forks.run(script).stdout.strip() == digest(tmp_path, CODE, "mine.py")


def test_fingerprint_ignores_library_code_and_includes_project_code(tmp_path: Path) -> None:
    libraries, projects = [], []
    for number in (5, 6):
        (installed := tmp_path / "site-packages").mkdir(exist_ok=True)
        libraries.append(digest(installed, CODE.replace("* 2", f"* {number}"), f"lib{number}.py"))
        (folder := tmp_path / str(number)).mkdir()
        write(folder, f"def twice(x): return x * {number}\n", f"parts{number}.py")
        text = f"import parts{number} as parts\n" + NET.replace("self.fc(x)", "parts.twice(x)")
        projects.append(digest(folder, text, f"whole{number}.py"))
    assert libraries[0] == libraries[1] and projects[0] != projects[1]


def test_fingerprint_without_source_uses_the_bytecode(tmp_path: Path) -> None:
    def made(text: str) -> str:
        scope: dict[str, Any] = {"__name__": "nowhere"}
        exec(compile(HEAD + text, "<nowhere>", "exec"), scope)
        return fingerprint.of_model(scope["Net"]())

    assert made(CODE) == made(CODE.replace("        # why\n", "\n"))
    assert made(CODE) != made(CODE.replace("mixed(self.fc(x))", "mixed(self.fc(x) + 1)"))


class NoRepr(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def extra_repr(self) -> str:
        raise ValueError("no repr")


def test_fingerprint_of_unusual_modules_does_not_raise() -> None:
    class Meta(type):
        __hash__ = None  # type: ignore[assignment]

    class Odd(nn.Module, metaclass=Meta):
        pass

    one, other = (nn.Sequential(nn.LazyLinear(3), nn.LazyConv2d(3, 3)) for _ in range(2))
    assert fingerprint.of_model(one) == fingerprint.of_model(other)
    assert fingerprint.size(one) == (3, 0)
    same, train, off = map(fingerprint.of_model, (NoRepr(0.1), NoRepr(0.1).eval(), NoRepr(0.2)))
    assert same == train != off != fingerprint.of_model(one)
    whole = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    assert fingerprint._code([Odd]) == [whole]


def test_fingerprint_of_hooks_changes_with_their_code(tmp_path: Path) -> None:
    def hooks(before: str, after: str, text: str = CODE) -> str:
        path = write(tmp_path, text.replace(before, after), f"of{len(list(tmp_path.iterdir()))}.py")
        target = load(parse(f"{path}:Net"), Config())
        return fingerprint.of_hooks(target.make_batch, target.loss)

    same = hooks("# why", "# otherwise")
    assert same == hooks("mixed(self.fc(x))", "self.fc(x)")
    assert same != hooks("torch.randn(", "torch.rand(") != hooks("output * RATE", "output") != same
    assert hooks("", "", NET) == fingerprint.of_hooks(None, None) == ""
    losses = [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)]
    losses += [nn.functional.mse_loss, nn.functional.l1_loss]
    assert len({fingerprint.of_hooks(None, one) for one in losses}) == 4
    assert fingerprint.of_hooks(None, losses[1]) == fingerprint.of_hooks(None, losses[1])


class TestSource:
    """The hash of the code that a model uses, read without importing it."""

    @staticmethod
    def changes_code(folder: Path, before: str, after: str, file: str = "mine.py") -> bool:
        """Return whether this change of a file changes the code of the target."""
        spec, path = parse(f"{folder / 'mine.py'}:Net"), folder / file
        text = path.read_text()
        assert before in text
        first = spec.code
        path.write_text(text.replace(before, after))
        second = spec.code
        path.write_text(text)
        assert spec.code == first
        return second != first

    @pytest.mark.parametrize(
        ("text", "counts"),
        [
            ("class Other: x = 17\n", False),
            ("def f(): return 17\n", False),
            ("@torch.no_grad()\ndef f(): return 17\n", False),
            ("if '__main__' == __name__:\n    f(17)\n", False),
            ("if TYPE_CHECKING:\n    from a import A17\n", False),
            ("import a, b17\n", False),
            ("class Net(Net):\n    def f(self, x: int17): pass\n", False),
            ("MADE = {}\n@note\nclass Other: x = 17\n", True),
            ("MADE = {}\nMADE['a'] = lambda: 17\n", True),
            ("if torch.cuda.is_available():\n    SIZE = 17\n", True),
            ("try:\n    import a\nexcept ImportError:\n    a = 17\n", True),
            ("if __name__ == '__main__':\n    pass\nelse:\n    Net.a = 17\n", True),
            ("B = A = 17\nclass Net(Net): a = A\n", True),
            ("A, B = 17, 2\nclass Net(Net): a = A\n", True),
            ("A = 1\nA += 17\nclass Net(Net): a = A\n", True),
            ("A: int = 17\nclass Net(Net): a = A\n", True),
            ("async def f(): return 17\nclass Net(Net): a = f\n", True),
            ("def f(): return 17\nclass Net(Net): a = globals()['f']\n", True),
            ("def f(): return 17\nclass Net(Net): a = sys.modules[__name__]\n", True),
        ],
    )
    def test_only_relevant_statements_count(self, tmp_path: Path, text: str, counts: bool) -> None:
        write(tmp_path, NET + text)
        assert self.changes_code(tmp_path, "17", "18") is counts

    @pytest.mark.parametrize(
        ("line", "used"),
        [
            ("from parts import f", "f"),
            ("from parts import f as g", "g"),
            ("from parts import *", "f"),
            ("import parts", "parts.f"),
            ("import parts as p", "p.f"),
            ("import inner.deep", "inner.deep.f"),
            ("import inner.deep as d", "d.f"),
            ("from inner import deep", "deep.f"),
            ("from inner.deep import f", "f"),
            ("from inner import f", "f"),
            ("from inner import again", "again"),
        ],
    )
    def test_imported_project_code_counts(self, tmp_path: Path, line: str, used: str) -> None:
        (tmp_path / "inner").mkdir()
        for name in ("parts.py", "inner/deep.py"):
            (tmp_path / name).write_text("def f(x): return 2 * x\ndef g(x): return 5 * x\n")
        again = "from .deep import f\nfrom . import deep\nagain = deep.f\n"
        (tmp_path / "inner" / "__init__.py").write_text(again)
        file = "inner/deep.py" if "inner" in line else "parts.py"
        for inside in (False, True) if "*" not in line else (False,):
            head, local = ("", f"        {line}\n") if inside else (f"{line}\n", "")
            text = f"class Net:\n    def forward(self, x):\n{local}        return {used}(x)\n"
            write(tmp_path, head + text)
            assert self.changes_code(tmp_path, "2 * x", "3 * x", file)
            # If a function imports a module, the whole module counts.
            whole = "*" in line or line == "import inner.deep" or (inside and "." in used)
            assert self.changes_code(tmp_path, "5 * x", "6 * x", file) is whole

    def test_circular_imports_are_followed(self, tmp_path: Path) -> None:
        write(tmp_path, "from other import *\nimport mine\nclass Net(mine.Base): x = Net\n")
        (tmp_path / "other.py").write_text("from mine import *\nclass Base: x = 1\n")
        assert self.changes_code(tmp_path, "x = 1", "x = 2", "other.py")

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"def f(:\n", "SyntaxError"),
            (b"x = 1\0\n", "Error"),
            (b"x = '\xff'\n", "SyntaxError"),
            (b"x = " + b"(" * 5000 + b"\n", "Error"),
            (b"class Net:\n    x = 1" + b" + 1" * 50_000 + b"\n", "Error"),
            (b"#" * (source.MAX_SOURCE_BYTES + 1), f"larger than {source.MAX_SOURCE_BYTES} bytes"),
        ],
    )
    def test_unreadable_source_is_refused(self, tmp_path: Path, data: bytes, message: str) -> None:
        path = tmp_path / "mine.py"
        path.write_bytes(data)
        spec = parse(f"{path}:Net")
        with pytest.raises(TargetError, match=rf"mine\.py cannot be read: .*{message}"):
            _ = spec.code
        assert "cannot be read" in spec.edited("ab")
        # An unreadable import counts by its import line only.
        path.rename(tmp_path / "parts.py")
        write(tmp_path, "from parts import x\nclass Net: a = x\n")
        assert spec.edited(spec.code) == ""

    def test_missing_or_irregular_file_is_refused(self, tmp_path: Path) -> None:
        spec, path = parse(f"{write(tmp_path, NET)}:Net"), tmp_path / "mine.py"
        path.unlink()
        for make in (lambda: None, path.mkdir, lambda: (path.rmdir(), os.mkfifo(path))):
            make()
            with pytest.raises(TargetError, match=r"mine\.py cannot be read"):
                _ = spec.code

    def test_reading_the_source_prints_and_imports_nothing(self, tmp_path: Path) -> None:
        text = "raise SystemExit(1)\nclass Net: x = '\\d'; y = 1 is 1\n"
        assert parse(f"{write(tmp_path, text)}:Net").code


class TestModules:
    """The source file of `package.module:factory`, found without an import."""

    def test_users_module_has_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = tmp_path / "owned" / "deep"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").write_text("raise SystemExit('imported')\n")
        file = Path(write(package, NET))
        monkeypatch.chdir(tmp_path)
        here = parse("owned.deep.mine:Net")
        assert here.file == str(file)
        assert (here.origin, here.code) == (parse(f"{file}:Net").origin, parse(f"{file}:Net").code)
        monkeypatch.chdir("/")
        assert parse("owned.deep.mine:Net").file == ""
        monkeypatch.syspath_prepend(str(tmp_path))
        assert parse("owned.deep.mine:Net") == here
        assert parse("owned:Net").file == str(package.parent / "__init__.py")

    @pytest.mark.parametrize(
        "name", ["torchvision.models:resnet18", "json:loads", "sys:exit", "no_such.module:f"]
    )
    def test_library_or_missing_module_has_no_source_file(self, name: str) -> None:
        spec = parse(name)
        assert (spec.file, spec.origin, spec.code, spec.edited("")) == ("", "", "", "")
