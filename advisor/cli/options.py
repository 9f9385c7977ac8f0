"""Shared by several commands: options made from field specs, and output."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from advisor.cache.kinds import SingleChoice
from advisor.cache.task import FieldSpec, Task, rows
from advisor.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from advisor.cache.records import Records

DONE, FAILED, WRONG_USAGE, UNFINISHED, INTERRUPTED = 0, 1, 2, 3, 130
LOADER = {
    "keep": {"ADVISOR_KEEP_LOADER": "1"},
    "override": {"ADVISOR_OVERRIDE_LOADER": "1"},
}
"""Environment variables that carry `--loader` to the pilot in a run."""

Command = Callable[..., None]
Decorator = Callable[[Command], Command]


class Number(click.IntRange):
    """A whole number, which click's errors call 'number'."""

    name = "number"


class NewFile(click.Path):
    """A file to write. An unwritable file is refused before anything is measured."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        try:
            if str(path) != "-" and not path.exists():
                tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as exc:
            self.fail(f"{str(path)!r}: cannot be written: {exc.strerror}", param, ctx)
        return path


NEW_FILE = NewFile(dir_okay=False, writable=True, path_type=Path, allow_dash=True)


def option(usage: str, help: str, name: str = "", **more: Any) -> Decorator:
    """A click option. `usage`: as '--events FILE', or '--quiet' for a switch; `name`: of its
    parameter, if it is not the option's."""
    flag, _, metavar = usage.partition(" ")
    names = (flag, name) if name else (flag,)
    # An option with a value needs None, not False: click would make the value optional.
    more["is_flag"] = (not metavar and "type" not in more) or None
    return click.option(*names, metavar=metavar or None, help=help, **more)


def option_group(*options: Decorator) -> Decorator:
    """Several options as one decorator, listed in their order."""
    return lambda command: functools.reduce(lambda made, one: one(made), options[::-1], command)


def row_options(cls: type, *fields: str, asked: bool = False) -> Decorator:
    """Decorator: adds the options of a dataclass's fields.

    Args:
        fields: only these; default: all.
        asked: only those of a lookup, which have no defaults.
    """
    chosen = (row for name, row in rows(cls).items() if name in (fields or rows(cls)))
    return option_group(
        *(one for row in chosen if row.asked or not asked for one in _options(row, not asked))
    )


def _options(row: FieldSpec, default: bool) -> Iterator[Decorator]:
    """Generator: yields the option of a field, and its switches."""
    if row.option:
        one_of = isinstance(row.kind, SingleChoice)
        has_default = default and row.default and not row.kind.repeats
        shown = f"  [default: {row.kind.texts(row.default)[0]}]" if has_default else ""
        yield option(
            row.option if one_of else f"{row.option} {row.kind.metavar}",
            row.help + shown,
            row.keyword,
            type=click.Choice(row.kind.names) if one_of else str,  # type: ignore[attr-defined]
            multiple=row.kind.repeats,
        )
    for switch in row.switches:
        yield option(switch, row.switched or row.help)


def collected(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """Remove a dataclass's fields from a command's options. Returns them by keyword.

    Raises:
        UsageError: an option and a switch for one field are both given.
    """
    found: dict[str, Any] = {}
    for row in rows(cls).values():
        given = options.pop(row.keyword, None) if row.option else None
        if given not in (None, ()):
            found[row.keyword] = given
        for switch, value in row.switches.items():
            if options.pop(switch.strip("-").replace("-", "_"), False):
                if row.keyword in found:
                    raise UsageError(
                        f"{switch} and {row.option} exclude each other; give one of them"
                    )
                found[row.keyword] = value
    return found


class OrCommand(click.Command):
    """A click command that takes the user's command after '--', as `command`. If it has a TARGET
    argument, exactly one of the two must be given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        arguments = {one.name for one in self.params if isinstance(one, click.Argument)}
        try:
            left = super().parse_args(ctx, args[:at])
        except click.UsageError as exc:
            python = any(Path(word).name.startswith("python") for word in args)
            program = python or self.name == "run"
            # click raises a plain UsageError for extra words.
            extra = type(exc) is click.UsageError
            if "--" in args or not (extra or (program and isinstance(exc, click.NoSuchOption))):
                raise
            key = "KEY " * ("key" in arguments)
            line = f"{ctx.command_path} {key}-- python train.py"
            said = exc.format_message().rstrip(".")
            raise click.UsageError(
                f"{said}; put -- before your command, as in: {line}", ctx
            ) from exc
        command = ctx.params["command"] = (*ctx.params.get("command", ()), *args[at + 1 :])
        if self.name in ("run", "fit", "check") and not command and not ctx.resilient_parsing:
            line = f"{ctx.command_path} -- python train.py"
            raise UsageError(f"give your command after --, as in: {line}")
        both_or_none = bool(command) == bool(ctx.params.get("target"))
        if "target" in arguments and both_or_none and not ctx.resilient_parsing:
            raise UsageError("give either a TARGET and --shape, or your command after --")
        return left


target_argument = click.argument("target", required=False, type=click.Path())
cache = option(
    "--cache URL",
    "Where records are kept; several URLs with commas  [default: $ADVISOR_CACHE, else "
    "pyproject.toml's, else your cache folder]",
)
map_option = row_options(Task, "map")
loader = option(
    "--loader",
    "For a run: keep the workers of the script's DataLoader, or tune them too  [default: keep]",
    type=click.Choice(sorted(LOADER)),
)
json_option = option("--json", "One JSON document on stdout.", "as_json")
events_option = option(
    "--events FILE",
    "Append each trial, phase and notice to FILE, as a line of JSON; with --json, - is stdout.",
    type=NEW_FILE,
)
JSON_VERSION = 1
"""Of all JSON. Within a version, fields are only added; `advisor schema` describes them."""


def json_line(data: Mapping[str, Any]) -> str:
    """A document with its version, as a line of JSON; null for a number that is not finite."""
    line = json.dumps({"version": JSON_VERSION, **data})
    return json.dumps(json.loads(line, parse_constant=lambda _name: None))


def event_writer(file: Path | None) -> Callable[[Mapping[str, Any]], None]:
    """A function that appends an event to the file of --events. If it cannot be written later, a
    warning says so, and the measuring goes on. Raises UsageError for '-' without --json."""
    stdout = str(file) == "-"
    if stdout and not click.get_current_context().params["as_json"]:
        raise UsageError("--events -: stdout has the result for people; add --json, or name a file")

    def write(event: Mapping[str, Any]) -> None:
        nonlocal file
        if file is None:
            return
        # Not blocking: a pipe that nobody reads must not stop the tuning.
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        try:
            opened = nullcontext() if stdout else os.fdopen(os.open(file, how, 0o666), "w")
            with opened as where:
                click.echo(json_line({**event, "time": time.time()}), where)
        except OSError as exc:
            warn(f"--events {file}: {exc.strerror}; no more events are written")
            file = None

    return write


@dataclass(frozen=True, slots=True)
class Output:
    """The end of a command. `data`: makes the document for --json; `code`: the exit code."""

    data: Callable[[], Any]
    code: int = DONE


Parts = Iterator["str | RenderableType | Output"]  # lines and tables for people, last an Output


def json_or_text(command: Callable[..., Parts]) -> Command:
    """Add --json, and print either the text or the document of a command."""

    @json_option
    @functools.wraps(command)
    def printed(*args: Any, as_json: bool, **given: Any) -> None:
        for part in command(*args, **given):
            if isinstance(part, Output):
                if as_json:
                    click.echo(json_line(part.data()))
                click.get_current_context().exit(part.code)
            elif not as_json:
                click.echo(part) if isinstance(part, str) else console().print(part)

    return printed


def warn(text: str) -> None:
    click.echo(f"advisor: {text}", err=True)


def complain(records: Records) -> None:
    """Print which stores and records could not be read."""
    for line in [*records.unreachable, *(f"record {line}" for line in records.damaged)]:
        warn(line)


def console(**how: Any) -> Console:
    """A console; 140 columns wide if it is no terminal, so that a log gets whole lines."""
    from rich.console import Console

    console = Console(**how)
    return console if console.is_terminal else Console(width=140, **how)
