"""Shared by several commands: options made from field specs, and output."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from advisor.cache.kinds import MultiChoice, SingleChoice
from advisor.cache.task import FieldSpec, Task, permissions, rows
from advisor.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from advisor.cache.records import Records

DONE, FAILED, WRONG_USAGE, UNFINISHED, INTERRUPTED = 0, 1, 2, 3, 130

Command = Callable[..., None]
FILE = click.Path(dir_okay=False, path_type=Path)


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


LOADER = {
    "keep": {"ADVISOR_KEEP_LOADER": "1"},
    "override": {"ADVISOR_OVERRIDE_LOADER": "1"},
}
"""Environment variables that carry `--loader` to the pilot in a run."""


def row_options(cls: type, *, asked: bool = False) -> Callable[[Command], Command]:
    """Decorator: adds options for a dataclass's fields; `asked`: only those of a lookup."""

    def decorate(command: Command) -> Command:
        for row in reversed(list(rows(cls).values())):
            if asked and not row.asked:
                continue
            for switch in row.switches:
                text = row.switched or row.help
                command = click.option(switch, _of(switch), is_flag=True, help=text)(command)
            if row.option:
                command = _valued(row, default=not asked)(command)
        return command

    return decorate


def _valued(row: FieldSpec, *, default: bool) -> Callable[[Command], Command]:
    plain = isinstance(row.kind, SingleChoice) and not isinstance(row.kind, MultiChoice)
    shown = ""
    if default and row.default not in (None, "", 0, ()) and not row.kind.repeats:
        shown = f"  [default: {row.kind.texts(row.default)[0]}]" if row.default else ""
    return click.option(
        row.option,
        row.keyword,
        type=click.Choice(row.kind.names) if plain else str,  # type: ignore[attr-defined]
        metavar=None if plain else row.kind.metavar,
        multiple=row.kind.repeats,
        help=row.help + shown,
    )


def _of(switch: str) -> str:
    return switch.strip("-").replace("-", "_")


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
            if options.pop(_of(switch), False):
                if row.keyword in found:
                    raise UsageError(
                        f"{switch} and {row.option} exclude each other; give one of them"
                    )
                found[row.keyword] = value
    return found


class OrCommand(click.Command):
    """A click command that also takes the user's command after '--', as `command`. If it has a
    TARGET argument, exactly one of the two must be given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        command = tuple(args[at + 1 :])
        python = any(Path(word).name.startswith("python") for word in args[:at])
        with _dashes_named(ctx, args, options=python):
            left = super().parse_args(ctx, args[:at])
        ctx.params["command"] = command
        named = (p.name for p in self.params if isinstance(p, click.Argument))
        both_or_none = bool(command) == bool(ctx.params.get("target"))
        if "target" in named and both_or_none and not ctx.resilient_parsing:
            raise UsageError("give either a TARGET and --shape, or your command after --")
        return left


class OfCommand(click.Command):
    """A click command whose only argument is the user's command, after '--'."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _dashes_named(ctx, args, options=True):
            return super().parse_args(ctx, list(args))


@contextlib.contextmanager
def _dashes_named(ctx: click.Context, args: list[str], *, options: bool) -> Iterator[None]:
    """Context manager: errors about extra words (`options`: or unknown options) ask for '--'."""
    try:
        yield
    except click.UsageError as exc:
        # click raises a plain UsageError for extra words.
        meant = type(exc) is click.UsageError or (options and type(exc) is click.NoSuchOption)
        if not meant or "--" in args:
            raise
        named = (p for p in ctx.command.params if isinstance(p, click.Argument) and p.required)
        keys = (p.human_readable_name for p in named if p.nargs == 1)
        line = " ".join([ctx.command_path, *keys, "-- python train.py"])
        said = exc.format_message().rstrip(".")
        raise click.UsageError(f"{said}; put -- before your command, as in: {line}", ctx) from exc


def together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, listed in their order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


target_argument = click.argument("target", required=False, type=click.Path())
cache_option = click.option(
    "--cache",
    metavar="URL",
    help="Where records are kept; several URLs with commas  [default: $ADVISOR_CACHE, else "
    "pyproject.toml's, else your cache folder]",
)
map_option = _valued(rows(Task)["map"], default=False)
data_option = _valued(rows(Task)["data"], default=False)
data_args_option = _valued(rows(Task)["data_args"], default=False)
loader_option = click.option(
    "--loader",
    type=click.Choice(sorted(LOADER)),
    help="For a run: keep the workers of the script's DataLoader, or tune them too  "
    "[default: keep]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a command.

    Attributes:
        data: makes the document for --json.
        text: lines and tables for people.
        code: the exit code.
    """

    data: Callable[[], Any]
    text: Iterable[str | RenderableType]
    code: int = DONE


def json_or_text(command: Callable[..., Output]) -> Command:
    """Add --json, and print what the command returns in one of the two forms."""

    @json_option
    @functools.wraps(command)
    def printed(*args: Any, as_json: bool, **given: Any) -> None:
        found = command(*args, **given)
        if as_json:
            click.echo(json.dumps(found.data()))
        else:
            for part in found.text:
                click.echo(part) if isinstance(part, str) else console().print(part)
        click.get_current_context().exit(found.code)

    return printed


def mapped(given: tuple[str, ...]) -> dict[str, Any]:
    """The values of `map_option`, by knob. Raises UsageError for a wrong value."""
    return dict(permissions({"map": given})["map"]) if given else {}


def complain(records: Records) -> None:
    """Print which stores and records could not be read."""
    for line in [*records.unreachable, *(f"record {line}" for line in records.damaged)]:
        click.echo(f"advisor: {line}", err=True)


def console(**how: Any) -> Console:
    """A console; 140 columns wide if it is no terminal, so that a log gets whole lines."""
    from rich.console import Console

    console = Console(**how)
    return console if console.is_terminal else Console(width=140, **how)
