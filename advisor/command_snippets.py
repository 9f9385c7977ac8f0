"""Commands and script lines to copy; they work in the folder where they are printed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.arguments import Permit
from advisor.cache import settings
from advisor.cache.config import BATCH
from advisor.cache.kinds import quoted
from advisor.cache.match import Difference, compare
from advisor.cache.record import EFFORTS, PILOT, Record, Target
from advisor.cache.stores import open_stores
from advisor.cache.task import Task, changed, rows, shell
from advisor.errors import UsageError
from advisor.open_store import Cache
from advisor.tuners import environment
from advisor.tuners.fingerprint import is_library, unwrapped
from advisor.tuners.knobs import INPUT_PIPELINE, KNOBS, WORKERS
from advisor.tuners.search.plan import Plan
from advisor.tuners.target import Spec, origin_of, parse

if TYPE_CHECKING:
    from torch import nn

    from advisor.resolve.request import Request

_PERMITTED = [field.name for field in dataclasses.fields(Permit)]
MAX_DEPTH, MAX_FOLDERS = 3, 500  # limits of the search for a target's file below the current folder


def script_line(
    record: Record, cache: Cache = None, *, free: bool = False, command: Sequence[str] = ()
) -> str:
    """The line that applies a record in a script, or to a run.

    Args:
        cache: the record's store, as the `store` argument of `lookup`.
        free: use a run's best config with the batch free.
        command: print this command in place of the record's.
    """
    task = local_task(record)
    if command:
        task = dataclasses.replace(task, command=tuple(command))
    return _line(record, task, cache, free=free)


def line_anywhere(record: Record) -> str:
    """As `script_line`, but for any folder. The reader's ADVISOR_CACHE must name the store."""
    device = "cpu" if record.key.environment.device.kind == "cpu" else ""
    task = dataclasses.replace(record.key.task, target=record.target.name, device=device)
    return _line(record, task)


def _line(record: Record, task: Task, cache: Cache = None, *, free: bool = False) -> str:
    if task.command:
        options = [*_mapped(record, free=free), *_loader(record), *_cache(cache)]
        return _shell_line("run", *options, run=task.command)
    target = quoted(task.target)
    given = {row.keyword: row.kind.literal(held) for row, held in changed(task) if row.asked}
    shape = [f"shape={given.pop('shape')}"] if "shape" in given else []
    permitted = [f"{name}={given.pop(name)}" for name in _PERMITTED if name in given]
    of_model = [f"{name.removeprefix('model_')}={value}" for name, value in given.items()]
    words = [f"advisor.Model({', '.join([target, *of_model])})" if of_model else target, *shape]
    if permitted:
        words.append(f"permit=advisor.Permit({', '.join(permitted)})")
    if stores := _other_stores(cache):
        words.append(f"store={quoted(stores[0]) if len(stores) == 1 else list(stores)}")
    return f"advice = advisor.apply({', '.join(words)})"


def _shell_line(*words: str, run: Sequence[str] = ()) -> str:
    return shlex.join(["advisor", *words, *(["--", *run] if run else [])])


def _mapped(record: Record, *, free: bool = False) -> list[str]:
    """The --map options for the knobs that the advice sets through options of the command."""
    changes = record.winner(PILOT, free=free).config.changed(record.baseline.config)
    names = {*changes, BATCH} if free else {*changes}
    wanted = {knob.mapped for knob in KNOBS if knob.name in names}
    options = record.key.task.map.only(*wanted)
    return [word for name, option in options.items() for word in ("--map", f"{name}={option}")]


def _loader(record: Record) -> list[str]:
    """--loader override, if the advice changes the workers that the script sets itself."""
    default = record.baseline.config
    changes = record.winner(PILOT).config.changed(default).only(*INPUT_PIPELINE)
    own = default.get(WORKERS) or settings.is_on("ADVISOR_OVERRIDE_LOADER")
    overrides = changes and own and WORKERS not in record.key.task.map
    return ["--loader", "override"] if overrides else []


def _other_stores(cache: Cache) -> tuple[str, ...]:
    """The URLs of `cache` without passwords; () if these are the default stores."""
    if cache is None:
        return ()
    urls, default = (tuple(store.url for store in open_stores(one)) for one in (cache, None))
    return urls if urls != default else ()


def _cache(cache: Cache) -> list[str]:
    stores = _other_stores(cache)
    return ["--cache", ",".join(stores)] if stores else []


def tune_again(record: Record, cache: Cache = None) -> str:
    made = record.provenance
    effort = made.effort if made.effort in EFFORTS else "normal"
    plan = Plan(effort=effort, steps=made.steps or None, duration_s=made.duration_s or None)
    force = ["--force"] if record.stale else []
    return _tune(local_task(record), [*shell(plan), *force, *_cache(cache)])


def about(command: str, record: Record, cache: Cache = None) -> str:
    """A command line for a record, such as 'advisor explain ae1bff61eea5@64'."""
    options = [*_mapped(record), *_cache(cache)]
    return _shell_line(command, record.id, *options, run=record.key.task.command)


def _tune(task: Task, more: Sequence[str]) -> str:
    target = [] if task.command else [task.target]
    return _shell_line("tune", *target, *shell(task), *more, run=task.command)


def tune_first(request: Request, near: Record | None) -> str:
    """The remedy for a miss: 'run: advisor tune ...', where the nearest record fills in what the
    request leaves open; or a sentence that says what the command still needs."""
    nearest = {} if near is None else {name: getattr(local_task(near), name) for name in rows(Task)}
    given = {**nearest, **request.given, "device": _named(request.device)}
    target, unless, shapes = given.pop("target", ""), "", given.pop("shapes", ())
    if isinstance(request.target, str):
        target = request.target
    elif request.given.get("command"):
        target = shlex.join(request.given["command"])
    elif not target and request.target is not None:
        target, unless = _class_of(request.target, given.get("model_args", {}))
    if shapes and request.batch and len(shapes) == 1:
        shapes = ((request.batch, *shapes[0][1:]),)
    if target and shapes:
        words = _tune(Task(target=target, shapes=shapes, **given), _cache(request.cache))
        return f"run{unless}: {words}"
    needed = [f"on {shlex.quote(target)}" if target else "on your model, named as file.py:Class"]
    if not shapes:
        needed.append("with your batch and one sample as --shape, such as 64x3x256x256")
    return f"run advisor tune {', '.join(needed)}"


def _class_of(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """(Target such as 'nets/model.py:Net', remark about missing arguments or ''). The target is ''
    if the class is in no file of this project, or does not take `arguments`."""
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
        return "", ""  # importing this script would train
    with contextlib.suppress(OSError, ValueError):
        file = file.relative_to(Path.cwd())
    open_ = taken.parameters and not arguments
    return f"{file}:{name}", ", with --model-arg for its constructor arguments" if open_ else ""


def local_task(record: Record) -> Task:
    """A record's task, with its target and device named as on this machine."""
    device = _named(record.key.environment.device.kind)
    return dataclasses.replace(record.key.task, target=local_target(record), device=device)


def _named(device: str) -> str:
    """'cpu' if the device is a CPU and not this machine's default; else ''."""
    return "cpu" if device == "cpu" and environment.default_device() != "cpu" else ""


def local_target(record: Record) -> str:
    """A record's target, as a path from the current folder: its own file in or below that folder,
    else a copy of the file in it; the recorded name if there is neither."""
    name, origin = record.target.name, record.target.origin
    file, colon, attribute = name.partition(":")
    if not origin or not file.endswith(".py"):
        return name
    near = [Path(record.key.task.target.partition(".py")[0] + ".py"), Path(file)]
    near = [one for one in near if one.is_file()]
    own = (one for one in itertools.chain(near, _below(file)) if origin_of(one) == origin)
    copies = (one for one in near if is_copy(parse(str(one)), record.target))
    path = next(itertools.chain(own, copies), None)
    return name if path is None else f"{path}{colon}{attribute}"


def is_copy(spec: Spec, target: Target) -> bool:
    """Whether a file has the name and the code of a target that was tuned in another folder."""
    name, _, attribute = target.name.rpartition(":")
    if not spec.file or not target.code or spec.name not in (target.name, name):
        return False
    return not dataclasses.replace(spec, attribute=attribute).edited(target.code)


def _below(file: str) -> Iterator[Path]:
    """Yields the files of this name in folders below the current one."""
    with contextlib.suppress(OSError):  # the current folder may have been removed
        yield from (one / file for one in _folders(Path.cwd()) if (one / file).is_file())


@functools.lru_cache(maxsize=1)
def _folders(top: Path) -> tuple[Path, ...]:
    """Folders below `top`, relative to it, without hidden ones. Cached: a list of records looks for
    them once."""
    levels = (top.glob("[!.]*/" * depth) for depth in range(1, MAX_DEPTH + 1))
    found = itertools.islice(itertools.chain.from_iterable(levels), MAX_FOLDERS)
    return tuple(one.relative_to(top) for one in found)


def device_for(record: Record) -> str:
    """This machine's device for the record: 'cpu' if the record is of a CPU, else the default."""
    is_cpu = record.key.environment.device.kind == "cpu"
    return "cpu" if is_cpu else environment.default_device()


def staleness(record: Record) -> list[Difference]:
    """Changes since the record was measured, including those of its target's code if the file is
    found (modules are not searched). [] for a record of another device."""
    found, now = [], environment.detect(device_for(record))
    if now.device != record.key.environment.device:
        return []
    text = local_target(record)
    if text.partition(":")[0].endswith(".py"):
        with contextlib.suppress(UsageError):
            spec = parse(text)
            edited = spec.edited(record.target.code)
            if spec.origin == record.target.origin and edited:
                found.append(Difference(field="code", wanted=edited, found="as tuned"))
    here = dataclasses.replace(record.key, environment=now)
    return [*found, *compare(here, record.key)[1]]
