"""advisor compare: which of two commands, or of two states of the code, trains faster."""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path

import click

from advisor.cli import options
from advisor.cli.options import DONE, FAILED, OrCommand, Output, Parts, json_or_text, option, warn
from advisor.errors import UsageError
from advisor.tuners.search.plan import Plan


@click.command(cls=OrCommand, options_metavar="[OPTIONS] -- COMMAND [-- COMMAND]")
@option("--ref REF", "Compare this branch, tag or commit with the code as it stands.")
@option("--budget TIME", "Wall time of all measuring.  [default: 60s]", default="60s")
@option("--fail-slower PERCENT", "Exit with 1 if B is slower than A by more than this, e.g. 3%.")
@option("--markdown FILE", "Write the result as Markdown; - is stdout.", type=options.NEW_FILE)
@options.cache
@json_or_text
def compare(
    command: tuple[str, ...],
    ref: str | None,
    budget: str,
    fail_slower: str | None,
    markdown: Path | None,
    cache: str | None,
) -> Parts:
    """Compare the speed and the losses of two commands that train.

    \b
    advisor compare -- python train.py --a -- python train.py --b
    advisor compare --ref main -- python train.py

    Both train in turn, so that drift of the machine does not count. The verdict is about B, the
    second: faster, slower, same within 1%, or could not tell. With --ref, A runs in a temporary
    worktree of REF, and B in this folder as it stands.
    """
    commands, seconds = _split(command, ref), Plan.of({"budget": budget}).seconds
    most = _percent(fail_slower) if fail_slower is not None else 0.0
    from advisor.report import compared
    from advisor.report.progress import Shown
    from advisor.two_commands import Side, compare_commands
    from advisor.worktree import worktree_of

    progress = Shown(options.console(stderr=True), budget_s=seconds)
    with contextlib.ExitStack() as held:
        # Otherwise a cancelled CI job would leave its worktree behind.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        sides = Side("A", commands[0]), Side("B", commands[1])
        if ref is not None:
            sides, said = held.enter_context(worktree_of(ref, commands[0]))
            progress.notice(said)
        found = compare_commands(sides, budget_s=seconds, cache=cache, progress=progress)
    turns, note, code = found.turns, "", DONE
    if most:
        code = FAILED if turns.verdict == "slower" and 1 / turns.ratio.mean > 1 + most else DONE
        note = f"B is {'' if code else 'not found '}slower by more than --fail-slower {fail_slower}"
        warn(note)
    yield compared.table(found)
    yield from compared.lines(found)
    if markdown is not None:
        with click.open_file(str(markdown), "w") as file:
            file.write(compared.markdown(found, note))
    yield Output(lambda: compared.as_plain(found), code=code)


def _split(words: tuple[str, ...], ref: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The two commands: each may have '--' itself, as often as the other."""
    places = [at for at, word in enumerate(words) if word == "--"]
    middle = places[len(places) // 2] if len(places) % 2 else 0
    first, second = (words, words) if ref is not None else (words[:middle], words[middle + 1 :])
    if not first or not second:
        example = "advisor compare -- python a.py -- python b.py"
        raise UsageError(f"give two commands, each after --, as in: {example}; or one and --ref")
    return first, second


def _percent(text: str) -> float:
    """3% or 3 as 0.03."""
    found = re.fullmatch(r"(\d{1,3}(?:\.\d+)?) ?%?", text.strip())
    if found is None or float(found[1]) < 1:
        raise UsageError(f"fail-slower {text!r}: expected a percentage from 1% to 999%, as 3%")
    return float(found[1]) / 100
