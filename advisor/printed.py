"""The lines that a person copies: they work where they were printed, quoted as they must be."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.arguments import Permit
from advisor.cache import settings
from advisor.cache.config import BATCH
from advisor.cache.match import Difference, compare
from advisor.cache.record import EFFORTS, PILOT, Record, Target
from advisor.cache.stores import open_stores
from advisor.cache.task import Task, python, rows, shell
from advisor.errors import UsageError
from advisor.opening import Cache

if TYPE_CHECKING:
    from torch import nn

    from advisor.finding.request import Request
    from advisor.tuners.target import Spec

_PERMITTED = [field.name for field in dataclasses.fields(Permit)]
DEEPEST = 3
"""Folders below this one in which a target's file is looked for."""
MOST_FOLDERS = 500


def script_line(
    record: Record, cache: Cache = None, *, free: bool = False, command: Sequence[str] = ()
) -> str:
    """The line that applies a record in a script, or to a run; `cache`: where it is, as `lookup`
    takes it; `free`: of a run, with the batch free; `command`: another one that it is for."""
    task = here(record)
    if command:
        task = dataclasses.replace(task, command=tuple(command))
    return _applies(record, task, cache, free=free)


def line_anywhere(record: Record) -> str:
    """As `script_line`, for a reader whose folder and device are not known, and whose ADVISOR_CACHE
    names where it is."""
    device = "cpu" if record.key.environment.device.kind == "cpu" else ""
    task = dataclasses.replace(record.key.task, target=record.target.name, device=device)
    return _applies(record, task, None)


def _applies(record: Record, task: Task, cache: Cache, *, free: bool = False) -> str:
    if task.command:
        words = [*_options(record, free=free), *_overriding(record), *_elsewhere(cache)]
        return shlex.join(["advisor", "run", *words, "--", *task.command])
    of_model, permitted = [], []
    shape = ""
    for said in python(task):
        name = said.partition("=")[0]
        if name == "shape":
            shape = said
        elif name in _PERMITTED:
            permitted.append(said)
        else:
            of_model.append(said.removeprefix("model_"))
    target = _python_text(task.target)
    given = [f"advisor.Model({', '.join([target, *of_model])})" if of_model else target, shape]
    if permitted:
        given.append(f"permit=advisor.Permit({', '.join(permitted)})")
    if cache is not None and _urls(cache) != _urls(None):
        urls = _urls(cache)
        given.append(f"store={_python_text(urls[0]) if len(urls) == 1 else list(urls)}")
    return f"advice = advisor.apply({', '.join(filter(None, given))})"


def _options(record: Record, *, free: bool) -> list[str]:
    """The options that name what of a run's advice is set through its command's own."""
    from advisor.tuners.knobs import KNOBS

    changed = record.winner(PILOT, free=free).config.changed(record.baseline.config)
    wanted = {
        knob.mapped for knob in KNOBS if knob.name in changed or (free and knob.name == BATCH)
    }
    options = record.key.task.map.only(*wanted)
    return [word for name, option in options.items() for word in ("--map", f"{name}={option}")]


def _overriding(record: Record) -> list[str]:
    """The option without which a script's own loader workers stay, where others are advised."""
    from advisor.tuners.knobs import INPUT_PIPELINE, WORKERS

    default = record.baseline.config
    fed = record.winner(PILOT).config.changed(default).only(*INPUT_PIPELINE)
    if not fed or not (default.get(WORKERS) or settings.overrides_loader()):
        return []
    return [] if WORKERS in record.key.task.map else ["--loader", "override"]


def _python_text(text: str) -> str:
    return f'"{text}"' if text.isprintable() and not set(text) & {'"', "\\"} else repr(text)


def _urls(cache: Cache) -> tuple[str, ...]:
    """Of the stores, without passwords."""
    return tuple(store.url for store in open_stores(cache))


def _elsewhere(cache: Cache) -> list[str]:
    """The option that names the stores, where they are not those that are meant without."""
    if cache is None or _urls(cache) == _urls(None):
        return []
    return ["--cache", ",".join(_urls(cache))]


def tune_again(record: Record, cache: Cache = None) -> str:
    """The command that measures a record again; `cache`: where it is, as `lookup` takes it."""
    from advisor.tuners.search.plan import Plan

    made = record.provenance
    plan = Plan(steps=made.steps or None, duration_s=made.duration_s or None)
    if made.effort in EFFORTS:
        plan = dataclasses.replace(plan, effort=made.effort)
    more = [*shell(plan), *(["--force"] if record.stale else []), *_elsewhere(cache)]
    return _tune(here(record), more)


def about(command: str, record: Record, cache: Cache = None) -> str:
    """The line of a command that measures a KEY again: 'advisor explain ae1bff61eea5@64'."""
    run = record.key.task.command
    words = ["advisor", command, record.id, *_options(record, free=False), *_elsewhere(cache)]
    return shlex.join([*words, *(["--", *run] if run else [])])


def tune_first(request: Request, near: Record | None) -> str:
    """What ends a miss: 'run: ', and the whole command, with all that was asked for, else as in the
    nearest record; where something of it cannot be known, in words what to give."""
    target, unless, given = _needed(request, near)
    if target and given["shapes"]:
        return f"run{unless}: {_tune(_first(request, target, given), _elsewhere(request.cache))}"
    needed = [f"on {shlex.quote(target)}" if target else "on your model, named as file.py:Class"]
    if not given["shapes"]:
        needed.append("with your batch and one sample as --shape, such as 64x3x256x256")
    return f"run advisor tune {', '.join(needed)}"


def task_first(request: Request, near: Record | None) -> Task | None:
    """What that command would tune; None where something of it cannot be known."""
    target, unless, given = _needed(request, near)
    whole = target and given["shapes"] and not unless
    return _first(request, target, given) if whole else None


def _first(request: Request, target: str, given: Mapping[str, Any]) -> Task:
    return Task(**{**given, "target": target, "device": _named(request.device)})


def _needed(request: Request, near: Record | None) -> tuple[str, str, dict[str, Any]]:
    """The target, '' where it has no name; what may be missing from it; the fields of a task."""
    given = {**({} if near is None else _as_dict(here(near))), **request.given}
    target, unless = given.pop("target", ""), ""
    if isinstance(request.target, str):
        target = request.target
    elif request.given.get("command"):
        target = shlex.join(request.given["command"])
    elif not target and request.target is not None:
        target, unless = _class_of(request.target, given.get("model_args", {}))
    shapes = given.setdefault("shapes", ())
    if shapes and request.batch and len(shapes) == 1:
        given["shapes"] = ((request.batch, *shapes[0][1:]),)
    return target, unless, given


def _class_of(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """'nets/model.py:Net' for a model of a class that a file of this project has and that builds
    with these arguments, as far as can be seen, else ''; and what may be missing from them."""
    from advisor.tuners.fingerprint import is_library, unwrapped

    kind = type(unwrapped(model))
    try:
        file = Path(inspect.getsourcefile(kind) or "").resolve()
        taken = inspect.signature(kind)
        taken.bind(**arguments)
    except (OSError, TypeError, ValueError):
        return "", ""
    name, module = kind.__qualname__, sys.modules.get(kind.__module__)
    if file.suffix != ".py" or is_library(str(file)) or getattr(module, name, None) is not kind:
        return "", ""
    if kind.__module__ == "__main__" and "__main__" not in file.read_text(errors="replace"):
        return "", ""  # a script that trains wherever it is imported
    with contextlib.suppress(OSError, ValueError):
        file = file.relative_to(Path.cwd())
    open_ = taken.parameters and not arguments
    return f"{file}:{name}", ", with --model-arg for what it was built with" if open_ else ""


def _as_dict(task: Task) -> dict[str, Any]:
    return {name: getattr(task, name) for name in rows(Task)}


def _tune(task: Task, more: list[str] | None = None) -> str:
    words = [*shell(task), *(more or [])]
    if task.command:
        return shlex.join(["advisor", "tune", *words, "--", *task.command])
    return shlex.join(["advisor", "tune", task.target, *words])


def here(record: Record) -> Task:
    """A record's task as it is written in this folder: where the target's file is, which device."""
    task = record.key.task
    device = _named(record.key.environment.device.kind)
    return dataclasses.replace(task, target=reach(record), device=device)


def _named(device: str) -> str:
    """'cpu', where that must be said."""
    from advisor.tuners.environment import default_device

    return "cpu" if device == "cpu" and default_device() != "cpu" else ""


def reach(record: Record) -> str:
    """How a record's target is called from here: its file where it is, if it is anywhere near; or a
    copy of it, as it was typed or in this folder."""
    from advisor.tuners.target import origin_of, parse

    name, origin = record.target.name, record.target.origin
    file, colon, attribute = name.partition(":")
    if not origin or not file.endswith(".py"):
        return name
    here = [Path(record.key.task.target.partition(".py")[0] + ".py"), Path(file)]
    found = (path for path in (*here, *_below(file)) if path.is_file())
    path = next((one for one in found if origin_of(one) == origin), None)
    if path is None:
        specs = ((one, parse(str(one))) for one in here if one.is_file())
        path = next((one for one, spec in specs if is_copy(spec, record.target)), None)
    return name if path is None else f"{path}{colon}{attribute}"


def is_copy(spec: Spec, target: Target) -> bool:
    """Whether a file has the name of what was tuned in another folder, as by a server's worker, and
    the same code now."""
    name, _, attribute = target.name.rpartition(":")
    if not spec.file or not target.code or spec.name not in (target.name, name):
        return False
    return not dataclasses.replace(spec, attribute=attribute).edited(target.code)


def _below(file: str) -> Iterator[Path]:
    """Where a file may be some folders below."""
    try:
        top = Path.cwd()
    except OSError:
        return
    for folder in _folders_below(top):
        yield folder / file


@functools.lru_cache(maxsize=1)
def _folders_below(top: Path) -> tuple[Path, ...]:
    """Some folders below one, walked once for all records of a list."""
    found = []
    for seen, (folder, below, _files) in enumerate(os.walk(top)):
        place = Path(folder).relative_to(top)
        below[:] = [name for name in sorted(below) if not name.startswith(".")]
        if len(place.parts) >= DEEPEST or seen >= MOST_FOLDERS:
            below.clear()
        if place.parts:
            found.append(place)
    return tuple(found)


def staleness(record: Record) -> tuple[Difference, ...]:
    """What has changed here since a record of this machine's device was measured."""
    from advisor.tuners.environment import default_device, detect

    device = record.key.environment.device
    now = detect("cpu" if device.kind == "cpu" else default_device())
    if now.device != device:
        return ()
    differs = compare(dataclasses.replace(record.key, environment=now), record.key)[1]
    return (*_edited(record), *differs)


def _edited(record: Record) -> Iterator[Difference]:
    """The code of its target, where that is a file near this folder and other code now."""
    from advisor.tuners.target import parse

    text = reach(record)
    if not text.partition(":")[0].endswith(".py"):
        return  # no module that a record names is looked for
    with contextlib.suppress(UsageError):
        spec = parse(text)
        if spec.origin == record.target.origin and (edited := spec.edited(record.target.code)):
            yield Difference(field="code", wanted=edited, found="as tuned")
