"""What several commands share: options made of field specs, and output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from advisor.cache.kinds import Choice, MultiChoice
from advisor.cache.task import FieldSpec, Task, permissions, rows
from advisor.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from advisor.cache.records import Records

DONE, FAILED, WRONG_USAGE, UNFINISHED, INTERRUPTED = 0, 1, 2, 3, 130

Command = Callable[..., None]
COMMAND = "advisor.command"
FILE = click.Path(dir_okay=False, path_type=Path)
LOADER = {
    "keep": {"ADVISOR_KEEP_LOADER": "1"},
    "override": {"ADVISOR_OVERRIDE_LOADER": "1"},
}
"""Environment variables that carry `--loader` to the pilot in a run."""


def row_options(cls: type, *, asked: bool = False) -> Callable[[Command], Command]:
    """Options for the fields of a dataclass; `asked`: only those that a lookup takes."""

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
    plain = isinstance(row.kind, Choice) and not isinstance(row.kind, MultiChoice)
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
    """Take the fields of a dataclass out of a command's options, by keyword.

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
    """A command that may take the user's own after '--', in `ctx.meta[COMMAND]`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[COMMAND] = tuple(args[at + 1 :])
        python = any(Path(word).name.startswith("python") for word in args[:at])
        with _dashes_named(ctx, args, options=python):
            return super().parse_args(ctx, args[:at])


class OfCommand(click.Command):
    """A command that takes only the user's own, after '--'."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _dashes_named(ctx, args, options=True):
            return super().parse_args(ctx, list(args))


@contextlib.contextmanager
def _dashes_named(ctx: click.Context, args: list[str], *, options: bool) -> Iterator[None]:
    """Say that '--' is missing, for extra words and, with `options`, for unknown options."""
    try:
        yield
    except click.UsageError as exc:
        # click has no class of its own for words too many.
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
    help="Where records are kept, or several URLs with commas  [default: $ADVISOR_CACHE, else "
    "pyproject.toml's, else your cache folder]",
)
map_option = _valued(rows(Task)["map"], default=False)
data_option = _valued(rows(Task)["data"], default=False)
data_args_option = _valued(rows(Task)["data_args"], default=False)
loader_option = click.option(
    "--loader",
    type=click.Choice(sorted(LOADER)),
    help="Of a run: keep the workers of its script's own DataLoader, or tune them too  "
    "[default: keep]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


def mapped(given: tuple[str, ...]) -> dict[str, Any]:
    """The values of `map_option`, by knob. Raises UsageError for a wrong one."""
    return dict(permissions({"map": given})["map"]) if given else {}


def complain(records: Records) -> None:
    """Print what could not be read of the stores."""
    for line in records.unreachable:
        click.echo(f"advisor: {line}", err=True)
    for line in records.damaged:
        click.echo(f"advisor: record {line}", err=True)


def console(**how: Any) -> Console:
    """A console; 140 columns wide if it is no terminal, so that a log gets whole lines."""
    from rich.console import Console

    console = Console(**how)
    return console if console.is_terminal else Console(width=140, **how)


def say(out: Console, *lines: str, style: str = "") -> None:
    """Print lines, whatever they contain: no markup, no folding."""
    for line in lines:
        out.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
