"""What several commands share: kinds of arguments, options, the terminal."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem
from rich.console import Console

from advisor.cache import arguments
from advisor.cache.config import Value
from advisor.cache.records import Records
from advisor.errors import UsageError

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


class Shape(click.ParamType):  # type: ignore[type-arg] # generic in newer click only
    name = "BATCHxSAMPLE"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return arguments.parse_shape(str(value))
        except UsageError as exc:
            self.fail(str(exc).removeprefix("shape "))


class Duration(click.ParamType):  # type: ignore[type-arg] # generic in newer click only
    name = "TIME"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, int | float):
            return float(value)
        try:
            return arguments.parse_duration(str(value))
        except UsageError as exc:
            self.fail(str(exc))


class Listed(click.ParamType):  # type: ignore[type-arg] # generic in newer click only
    """Comma-separated values."""

    def __init__(self, name: str, *, numbers: bool = False) -> None:
        self.name = name
        self._numbers = numbers

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(parts):
            self.fail(f"{value!r}: expected values with commas between, e.g. {self.name}")
        if not self._numbers:
            return tuple(parts)
        try:
            numbers = tuple(map(int, parts))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 1:
            self.fail(f"{value!r}: expected numbers of at least 1, e.g. {self.name}")
        return numbers


cache_option = click.option(
    "--cache",
    metavar="URL",
    help="Where records are kept, or several URLs with commas  [default: $ADVISOR_CACHE]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


def complain(records: Records) -> None:
    """What could not be read of the stores."""
    for line in records.unreachable:
        click.echo(f"advisor: {line}", err=True)
    for line in records.damaged:
        click.echo(f"advisor: record {line}", err=True)


def complete_files(_ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def console(**how: Any) -> Console:
    """Wide where no terminal says otherwise, so that a log or a pipe gets whole lines."""
    console = Console(**how)
    return console if console.is_terminal else Console(width=140, **how)


def keywords(pairs: tuple[str, ...]) -> dict[str, Value]:
    """--model-arg values: numbers, true, false and none as such, anything else as text."""
    found: dict[str, Value] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"model argument {pair!r}: expected NAME=VALUE, e.g. num_classes=10")
        if name in found:
            raise UsageError(f"model argument {pair!r}: {name} is given twice; give it once")
        found[name] = _value(text)
    return found


def _value(text: str) -> Value:
    known: dict[str, Value] = {"true": True, "false": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
