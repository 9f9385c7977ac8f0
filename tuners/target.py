"""Turns a target string into a model's factory.

`parse` reads the string and the file system only; `load` imports the user's code, in a worker.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from advisor.cache.config import Config
from advisor.cache.key import fingerprint
from advisor.errors import TargetError, TargetFailed
from advisor.tuners import source
from advisor.tuners.faults import where
from advisor.tuners.fingerprint import is_library
from advisor.tuners.torch_facts import torch

HOOKS = ("make_batch", "loss")  # functions that a target's file may define besides the model
EDITED = "edited since"
NAMED = ("model", "build_model", "get_model")
_FORMS = {
    "target": ("model.py", "model.py:Net", "package.module:factory", "torchvision:resnet50"),
    "data": ("data.py", "data.py:make_dataset", "package.module:factory", "torchvision:FakeData"),
}
"""Examples by role; the last one is torchvision's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    kind: str  # 'file', 'module' or 'torchvision'
    place: str  # absolute path, module name, or ''
    attribute: str  # '' if the file's only model is meant
    file: str = ""  # absolute path of the user's own source; '' if a library's, or not found
    role: str = "target"  # 'target' or 'data', in messages

    @property
    def name(self) -> str:
        """The target's name in records: a file without its folder, so that a project can move."""
        if self.kind == "file":
            return Path(self.place).name + (f":{self.attribute}" if self.attribute else "")
        return f"{self.place or 'torchvision'}:{self.attribute}"

    @property
    def origin(self) -> str:
        return origin_of(Path(self.file)) if self.file else ""

    @property
    def code(self) -> str:
        """Digest of the code that decides the model and its hooks; '' if there is no file.
        Raises TargetError if the file cannot be read."""
        return source.digest(Path(self.file), (self.attribute, *HOOKS)) if self.file else ""

    def edited(self, code: str) -> str:
        """How the code differs from the code with this digest, in words; '' if it does not."""
        try:
            return "" if self.code == code else EDITED
        except TargetError as exc:
            return f"not known, {exc}"


def origin_of(path: Path) -> str:
    """A path in records: a digest, because a path names people and machines."""
    return fingerprint(str(path.resolve()))[:16]


def parse(text: str, *, base: Path | None = None, role: str = "target") -> Spec:
    """Parse a target string; a relative path starts from `base` (default: the current folder).
    Raises TargetError if the string has no known form, or there is no such file."""
    refused = f"{role} {text!r}:"
    forms = f"{', '.join(_FORMS[role][:-1])} or {_FORMS[role][-1]}"
    if text.startswith("torchvision:"):
        name = text.removeprefix("torchvision:")
        if not name.isidentifier():
            raise TargetError(f"{refused} expected torchvision:NAME, e.g. {_FORMS[role][-1]}")
        return Spec(kind="torchvision", place="", attribute=name, role=role)
    place, colon, attribute = text.rpartition(":")
    if not colon or (not place.endswith(".py") and text.endswith(".py")):
        place, attribute = text, ""
    if place.endswith(".py"):
        if attribute and not attribute.isidentifier():
            raise TargetError(f"{refused} {attribute!r} is not a name; write {place}:Net")
        try:
            path = Path(base or "", Path(place).expanduser()).absolute()
        except (OSError, RuntimeError) as exc:  # the current folder is gone, or no such user's home
            raise TargetError(f"{refused} cannot be found ({exc}); give its whole path") from exc
        if not path.is_file():
            raise TargetError(f"{refused} there is no file {path}; expected {forms}")
        place = str(path.resolve())
        return Spec(kind="file", place=place, attribute=attribute, file=place, role=role)
    if not attribute or not all(part.isidentifier() for part in place.split(".")):
        raise TargetError(f"{refused} expected {forms}")
    return Spec(kind="module", place=place, attribute=attribute, file=_source_of(place), role=role)


def _source_of(module: str) -> str:
    """The file of the user's own module, in the current folder or importable; '' if there is none.
    Nothing is imported: the packages of a dotted name are taken for folders."""
    folders: list[Path] = []
    with contextlib.suppress(OSError):
        folders.append(Path.cwd())
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec(module.partition(".")[0])  # without dots: no import
        inside = [] if found is None else found.submodule_search_locations or [found.origin or ""]
        folders += [Path(one).parent for one in inside]
    files = (source.module_file(folder, module) for folder in folders)
    own = (str(one.resolve()) for one in files if one is not None and not is_library(str(one)))
    return next(own, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A target ready to build. `make_batch` and `loss` are the file's optional hooks."""

    spec: Spec
    factory: Callable[[], torch.nn.Module]
    make_batch: Callable[[int, Any], tuple[Any, Any]] | None = None
    loss: Callable[[Any, Any], Any] | None = None


def load(spec: Spec, arguments: Config) -> Loaded:
    """Import the target and find its factory. Raises TargetError if there is no factory or several,
    TargetFailed if the user's code raised."""
    if spec.kind == "torchvision":
        return Loaded(spec=spec, factory=_torchvision(spec.attribute, dict(arguments)))
    module = imported(spec)
    candidates = _candidates(module, arguments)
    file, attribute = Path(spec.place).name, spec.attribute or (*candidates, "")[0]
    if not attribute:
        how = f"with {', '.join(arguments)}" if len(arguments) else "without arguments"
        raise TargetError(
            f"target {file!r}: it defines no nn.Module class that builds {how} and no "
            f"{', '.join(NAMED)}; name one as {file}:Net, with --model-arg for its arguments"
        )
    if not spec.attribute and len(candidates) > 1:
        listed = ", ".join(f"{file}:{name}" for name in candidates)
        raise TargetError(f"target {file!r}: several candidates; choose one of {listed}")
    found = getattr(module, attribute, None)
    if found is None:
        raise TargetError(
            f"target {spec.name!r}: {file} has no {attribute!r}; "
            f"it defines {', '.join(candidates) or 'no nn.Module'}"
        )
    if isinstance(found, torch.nn.Module):
        factory: Callable[[], Any] = lambda: copy.deepcopy(found)  # noqa: E731
    elif callable(found):
        factory = lambda: found(**arguments)  # noqa: E731
    else:
        raise TargetError(f"target {spec.name!r}: {attribute} is neither a callable nor a module")
    return Loaded(
        spec=dataclasses.replace(spec, attribute=attribute),
        factory=factory,
        **{hook: getattr(module, hook, None) for hook in HOOKS},
    )


def build(loaded: Loaded) -> torch.nn.Module:
    """Build a new model. Raises TargetFailed if the factory raised, or returned no nn.Module."""
    try:
        model = loaded.factory()
    except Exception as exc:  # the user's code may raise anything; it is reported whole
        raise failed(loaded.spec, "building it raised", exc) from exc
    if not isinstance(model, torch.nn.Module):
        raise TargetFailed(
            f"target {loaded.spec.name!r}: it returned {type(model).__name__}, not an nn.Module"
        )
    return model


def failed(spec: Spec, what: str, exc: BaseException) -> TargetFailed:
    """The error for an exception of the user's code: one line, and the traceback of that code."""
    said = "".join(traceback.format_exception_only(exc)).strip().splitlines()[-1]
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if not is_library(f.filename)]
    shown = ["Traceback (most recent call last):\n", *traceback.format_list(frames), said, "\n"]
    at = f" ({found})" if (found := where(exc)) else ""
    line = f"{spec.role} {spec.name!r}: {what} {said}{at}"
    return TargetFailed(line, "".join(shown) if frames else "")


def imported(spec: Spec) -> ModuleType:
    """Import the module of a target. Raises TargetError if there is no such module, TargetFailed if
    the module's code raised."""
    path, is_file = Path(spec.place), spec.kind == "file"
    # As `python model.py` does: the file's folder comes first for its own imports.
    folder = str(path.parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    whole = dataclasses.replace(spec, attribute="") if is_file else spec
    try:
        return _run_file(path) if is_file else importlib.import_module(spec.place)
    except SystemExit as exc:
        raise TargetFailed(
            f"{spec.role} {whole.name!r}: importing it called exit(); put the script part under "
            "if __name__ == '__main__':"
        ) from exc
    except Exception as exc:  # the user's code may raise anything; it is reported whole
        missing = exc.name if isinstance(exc, ModuleNotFoundError) else ""
        if missing and not is_file and spec.place.startswith(missing):
            raise TargetError(
                f"{spec.role} {spec.name!r}: there is no module {missing!r} here or installed"
            ) from exc
        raise failed(whole, "importing it raised", exc) from exc


def _run_file(path: Path) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else f"advisor_target_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception:
        del sys.modules[name]
        raise
    return module


def _candidates(module: ModuleType, arguments: Config) -> list[str]:
    named = [name for name in NAMED if callable(getattr(module, name, None))]
    return named or [
        name
        for name, found in vars(module).items()
        if isinstance(found, type)
        and issubclass(found, torch.nn.Module)
        and found.__module__ == module.__name__
        and _takes(found, arguments)
    ]


def _takes(found: Callable[..., Any], arguments: Config) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        return inspect.signature(found).bind(**arguments) is not None
    return False


def _torchvision(name: str, arguments: dict[str, Any]) -> Callable[[], torch.nn.Module]:
    from torchvision import models

    try:
        builder = models.get_model_builder(name)
    except ValueError as exc:
        import difflib

        near = ", ".join(difflib.get_close_matches(name, models.list_models(), n=3))
        hint = f"did you mean {near}?" if near else "see torchvision.models.list_models()"
        said = f"target 'torchvision:{name}': torchvision has no such model; {hint}"
        raise TargetError(said) from exc
    # Untrained: speed does not depend on the weights, and nothing is downloaded.
    weights = {"weights"} | {"weights_backbone"} & inspect.signature(builder).parameters.keys()
    return lambda: builder(**(dict.fromkeys(weights) | arguments))
