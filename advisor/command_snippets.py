"""Lines to copy into a shell or a script: they work where they were printed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
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
from advisor.open_store import Cache

if TYPE_CHECKING:
    from torch import nn

    from advisor.resolve.request import Request
    from advisor.tuners.target import Spec

_PERMITTED = [field.name for field in dataclasses.fields(Permit)]
MAX_DEPTH, MAX_FOLDERS = 3, 500
"""Folders below this one in which a target's file is looked for."""


def script_line(
    record: Record, cache: Cache = None, *, free: bool = False, command: Sequence[str] = ()
) -> str:
    """The line that applies a record in a script, or to a run.

    Args:
        cache: the store of the record, as `lookup` takes it.
        free: of a run, with the batch free.
        command: another run than the record's.
    """
    task = here(record)
    if command:
        task = dataclasses.replace(task, command=tuple(command))
    return _line(record, task, _other_stores(cache), free=free)


def line_anywhere(record: Record) -> str:
    """As `script_line`, for a reader in any folder whose ADVISOR_CACHE names the store."""
    device = "cpu" if record.key.environment.device.kind == "cpu" else ""
    task = dataclasses.replace(record.key.task, target=record.target.name, device=device)
    return _line(record, task, ())


def _line(record: Record, task: Task, stores: Sequence[str], *, free: bool = False) -> str:
    if task.command:
        options = [*_mapped(record, free=free), *_loader(record), *_cache(stores)]
        return _shell_line("run", *options, run=task.command)
    target, given = _quoted(task.target), dict(said.split("=", 1) for said in python(task))
    shape = [f"shape={given.pop('shape')}"] if "shape" in given else []
    permitted = [f"{name}={given.pop(name)}" for name in _PERMITTED if name in given]
    of_model = [f"{name.removeprefix('model_')}={value}" for name, value in given.items()]
    words = [f"advisor.Model({', '.join([target, *of_model])})" if of_model else target, *shape]
    if permitted:
        words.append(f"permit=advisor.Permit({', '.join(permitted)})")
    if stores:
        words.append(f"store={_quoted(stores[0]) if len(stores) == 1 else list(stores)}")
    return f"advice = advisor.apply({', '.join(words)})"


def _shell_line(*words: str, run: Sequence[str] = ()) -> str:
    return shlex.join(["advisor", *words, *(["--", *run] if run else [])])


def _mapped(record: Record, *, free: bool = False) -> list[str]:
    """--map, for the options of the run that the advice sets."""
    from advisor.tuners.knobs import KNOBS

    changed = record.winner(PILOT, free=free).config.changed(record.baseline.config)
    wanted = {
        knob.mapped for knob in KNOBS if knob.name in changed or (free and knob.name == BATCH)
    }
    options = record.key.task.map.only(*wanted)
    return [word for name, option in options.items() for word in ("--map", f"{name}={option}")]


def _loader(record: Record) -> list[str]:
    """--loader override, if the advice changes the workers that the script sets itself."""
    from advisor.tuners.knobs import INPUT_PIPELINE, WORKERS

    default = record.baseline.config
    changes = record.winner(PILOT).config.changed(default).only(*INPUT_PIPELINE)
    own = default.get(WORKERS) or settings.overrides_loader()
    return (
        ["--loader", "override"] if changes and own and WORKERS not in record.key.task.map else []
    )


def _quoted(text: str) -> str:
    return f'"{text}"' if text.isprintable() and not set(text) & {'"', "\\"} else repr(text)


def _other_stores(cache: Cache) -> tuple[str, ...]:
    """The URLs of some stores, without passwords; () for the default ones."""
    if cache is None:
        return ()
    urls, default = (tuple(store.url for store in open_stores(one)) for one in (cache, None))
    return urls if urls != default else ()


def _cache(stores: Sequence[str]) -> list[str]:
    return ["--cache", ",".join(stores)] if stores else []


def tune_again(record: Record, cache: Cache = None) -> str:
    """The command that measures a record again."""
    from advisor.tuners.search.plan import Plan

    made = record.provenance
    plan = Plan(steps=made.steps or None, duration_s=made.duration_s or None)
    if made.effort in EFFORTS:
        plan = dataclasses.replace(plan, effort=made.effort)
    force = ["--force"] if record.stale else []
    return _tune(here(record), [*shell(plan), *force, *_cache(_other_stores(cache))])


def about(command: str, record: Record, cache: Cache = None) -> str:
    """A command on a record: 'advisor explain ae1bff61eea5@64'."""
    options = [*_mapped(record), *_cache(_other_stores(cache))]
    return _shell_line(command, record.id, *options, run=record.key.task.command)


def _tune(task: Task, more: Sequence[str]) -> str:
    target = [] if task.command else [task.target]
    return _shell_line("tune", *target, *shell(task), *more, run=task.command)


def tune_first(request: Request, near: Record | None) -> str:
    """The end of a miss: 'run: ' and a command with all that was asked for, else as in the nearest
    record; or in words what such a command needs."""
    target, unless, given = _needed(request, near)
    if target and given["shapes"]:
        more = _cache(_other_stores(request.cache))
        return f"run{unless}: {_tune(_task(request, target, given), more)}"
    needed = [f"on {shlex.quote(target)}" if target else "on your model, named as file.py:Class"]
    if not given["shapes"]:
        needed.append("with your batch and one sample as --shape, such as 64x3x256x256")
    return f"run advisor tune {', '.join(needed)}"


def task_first(request: Request, near: Record | None) -> Task | None:
    """What that command would tune; None if something of it is not known."""
    target, unless, given = _needed(request, near)
    known = target and given["shapes"] and not unless
    return _task(request, target, given) if known else None


def _task(request: Request, target: str, given: Mapping[str, Any]) -> Task:
    return Task(**{**given, "target": target, "device": _named(request.device)})


def _needed(request: Request, near: Record | None) -> tuple[str, str, dict[str, Any]]:
    """The target, '' if it has no name; what may be missing from it; the fields of a task."""
    nearest = {} if near is None else {name: getattr(here(near), name) for name in rows(Task)}
    given = {**nearest, **request.given}
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
    """'nets/model.py:Net', or '' if no file of this project has the model's class, or it does not
    take these arguments; and what may be missing."""
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


def here(record: Record) -> Task:
    """A record's task, with its target and device as they are named here."""
    device = _named(record.key.environment.device.kind)
    return dataclasses.replace(record.key.task, target=reach(record), device=device)


def _named(device: str) -> str:
    """'cpu' on a machine whose default is another device."""
    from advisor.tuners.environment import default_device

    return "cpu" if device == "cpu" and default_device() != "cpu" else ""


def reach(record: Record) -> str:
    """The name of a record's target from here: its own file in or below this folder, else a copy of
    it in this folder."""
    from advisor.tuners.target import origin_of, parse

    name, origin = record.target.name, record.target.origin
    file, colon, attribute = name.partition(":")
    if not origin or not file.endswith(".py"):
        return name
    near = [Path(record.key.task.target.partition(".py")[0] + ".py"), Path(file)]
    files = (path for path in itertools.chain(near, _below(file)) if path.is_file())
    path = next((one for one in files if origin_of(one) == origin), None)
    if path is None:
        specs = ((one, parse(str(one))) for one in near if one.is_file())
        path = next((one for one, spec in specs if is_copy(spec, record.target)), None)
    return name if path is None else f"{path}{colon}{attribute}"


def is_copy(spec: Spec, target: Target) -> bool:
    """Whether a file has the name and the code of a target that was tuned in another folder."""
    name, _, attribute = target.name.rpartition(":")
    if not spec.file or not target.code or spec.name not in (target.name, name):
        return False
    return not dataclasses.replace(spec, attribute=attribute).edited(target.code)


def _below(file: str) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (folder / file for folder in _folders_below(Path.cwd()))


@functools.lru_cache(maxsize=1)
def _folders_below(top: Path) -> tuple[Path, ...]:
    """Folders below one, relative to it, walked once for all records of a list."""
    found = []
    for seen, (folder, below, _files) in enumerate(os.walk(top)):
        place = Path(folder).relative_to(top)
        below[:] = [name for name in sorted(below) if not name.startswith(".")]
        if len(place.parts) >= MAX_DEPTH or seen >= MAX_FOLDERS:
            below.clear()
        if place.parts:
            found.append(place)
    return tuple(found)


def staleness(record: Record) -> tuple[Difference, ...]:
    """What has changed since a record of this machine's device was measured."""
    from advisor.tuners.environment import default_device, detect

    device = record.key.environment.device
    now = detect("cpu" if device.kind == "cpu" else default_device())
    if now.device != device:
        return ()
    differs = compare(dataclasses.replace(record.key, environment=now), record.key)[1]
    return (*_edited(record), *differs)


def _edited(record: Record) -> Iterator[Difference]:
    """The target's code, if its file is near and has changed; modules are not looked for."""
    from advisor.tuners.target import parse

    text = reach(record)
    if text.partition(":")[0].endswith(".py"):
        with contextlib.suppress(UsageError):
            spec = parse(text)
            edited = spec.edited(record.target.code)
            if spec.origin == record.target.origin and edited:
                yield Difference(field="code", wanted=edited, found="as tuned")
