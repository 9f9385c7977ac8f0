"""The command line: arguments, exit codes; the only place that prints."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class
from rich.console import Console

import advisor
from advisor import api
from advisor.cache.config import Value
from advisor.cache.store import Records, open_store
from advisor.errors import AdvisorError, RecordDamaged, UsageError

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


class Shape(click.ParamType):  # type: ignore[type-arg] # generic in newer click only
    name = "BATCHxSAMPLE"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return api.parse_shape(str(value))
        except UsageError as exc:
            self.fail(str(exc).removeprefix("shape "))


class Duration(click.ParamType):  # type: ignore[type-arg] # generic in newer click only
    name = "TIME"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, int | float):
            return float(value)
        try:
            return api.parse_duration(str(value))
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
    "--cache", metavar="URL", help="Where records are kept (default: $ADVISOR_CACHE)."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


def _complete_files(_ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


@click.group(
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the fastest safe way to train a model here, by measuring, and remember it.",
)
@click.version_option(advisor.__version__, message="advisor %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(WRONG_USAGE)


@cli.command()
@click.argument("target", shell_complete=_complete_files)
@click.option(
    "--shape",
    "shapes",
    type=Shape(),
    required=True,
    multiple=True,
    metavar="BATCHxSAMPLE",
    help="Your batch and the sample: 64x3x256x256; repeat for a job of several shapes.",
)
@click.option("--dtype", default="float32", show_default=True, help="Of the input.")
@click.option("--vocab", type=int, default=1000, show_default=True, help="Bound of integer inputs.")
@click.option("--mode", type=click.Choice(["train", "infer"]), default="train", show_default=True)
@click.option(
    "--device", metavar="cuda:N|cpu", help="Default: the first CUDA device, else the CPU."
)
@click.option("--optimizer", type=click.Choice(["sgd", "adamw"]), default="sgd", show_default=True)
@click.option(
    "--model-arg",
    "model_args",
    multiple=True,
    metavar="NAME=VALUE",
    help="Keyword argument of the factory; repeat for more.",
)
@click.option(
    "--effort",
    type=click.Choice(list(api.EFFORTS)),
    default="normal",
    show_default=True,
    help="quick: nothing is compiled; exhaustive: also max-autotune and cuDNN off.",
)
@click.option(
    "--budget",
    type=Duration(),
    help="Wall time for all measuring, e.g. 90s, 1h30m  [default: 1m, 5m, 1h by effort]",
)
@click.option(
    "--steps", type=click.IntRange(min=1), help="Advice for a job of so many steps at your batch."
)
@click.option("--duration", type=Duration(), help="Advice for a job of this time, e.g. 2h.")
@click.option("--trials", type=click.IntRange(min=1), help="Search trials at most.")
@click.option(
    "--precisions",
    type=Listed("default,tf32,bf16,fp16"),
    metavar="LIST",
    help="Those permitted, of default, tf32, bf16, fp16, fp32  [default: all but fp32]",
)
@click.option("--deterministic", is_flag=True, help="Only deterministic configs.")
@click.option("--max-memory", metavar="SIZE", help="Configs must run within this, e.g. 40GiB.")
@click.option("--batches", type=Listed("16,32,64", numbers=True), help="Batch sizes to try.")
@click.option("--fixed-batch", is_flag=True, help="Try no batch size but yours.")
@click.option("--no-compile", is_flag=True, help="Leave torch.compile out.")
@click.option("--no-step-graph", is_flag=True, help="Leave the CUDA graph over the whole step out.")
@click.option("--no-verify", is_flag=True, help="Do not hold the advice against strict fp32.")
@click.option(
    "--tolerance",
    type=float,
    default=0.02,
    show_default=True,
    help="Distance from fp32's loss that is always allowed, as a fraction.",
)
@click.option("--force", is_flag=True, help="Measure again although this is tuned.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of all randomness.")
@cache_option
@json_option
@click.option("--quiet", is_flag=True, help="No progress, only the result.")
def tune(
    target: str,
    shapes: tuple[tuple[int, ...], ...],
    model_args: tuple[str, ...],
    effort: str,
    budget: float | None,
    duration: float | None,
    no_compile: bool,
    no_step_graph: bool,
    no_verify: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure TARGET and remember the fastest safe config.

    TARGET: model.py, model.py:Net, package.module:factory or torchvision:resnet50.
    """
    if options["fixed_batch"] and options["batches"]:
        raise UsageError("--fixed-batch and --batches exclude each other; give one of them")
    if duration is not None and options["steps"] is not None:
        raise UsageError("--steps and --duration exclude each other; give one of them")
    budget = api.EFFORTS[effort].budget_s if budget is None else budget
    arguments = _keywords(model_args)
    from advisor import report
    from advisor.progress import Shown

    stderr = _console(stderr=True, quiet=quiet)
    with Shown(stderr, budget_s=budget) as progress:
        found = api.tune(
            target,
            shapes,
            model_args=arguments,
            effort=effort,
            budget_s=budget,
            duration_s=duration,
            compile=not no_compile,
            step_graph=not no_step_graph,
            verify=not no_verify,
            progress=progress,
            **options,
        )
    cache = options["cache"]
    if as_json:
        status = "known" if found.known else "tuned"
        click.echo(json.dumps({"status": status, "record": report.as_data(found.record, cache)}))
        return
    out = _console()
    if found.known:
        made = report.age(found.record.provenance.created)
        old = "just now" if made == "now" else f"{made} ago"
        out.print(f"Already tuned, {old}; --force measures again.\n", highlight=False)
    else:
        out.print()
    out.print(report.verdict(found.record, out.width))
    out.print()
    for line in report.summary(found.record, cache):
        out.print(line, highlight=False, markup=False, soft_wrap=True)


@cli.command()
@click.argument("key", required=False)
@cache_option
@json_option
def show(key: str | None, cache: str | None, as_json: bool) -> None:
    """List what is tuned, or show the record KEY whole."""
    from advisor import report

    records = Records(open_store(cache))
    out = _console()
    if key is not None:
        record = records.get(key)
        if as_json:
            click.echo(json.dumps(report.as_data(record, cache)))
            return
        target = record.target
        out.print(
            f"[bold]{target.name}[/bold]  {record.key.inputs}  {record.key.mode}", highlight=False
        )
        for name, value in report.environment(record.key.environment):
            out.print(f"  {name:<16}{value}", highlight=False, markup=False)
        out.print()
        out.print(report.verdict(record, out.width))
        out.print()
        out.print(report.trials(record))
        out.print()
        if record.parts:
            out.print(report.parts(record))
            out.print()
        if paying := api.break_even(record):
            out.print(report.horizon(record, paying))
            out.print()
        for line in report.summary(record, cache):
            out.print(line, highlight=False, markup=False, soft_wrap=True)
        return
    newest_first = sorted(records.all(), key=lambda record: -record.provenance.created)
    found = [(record, api.staleness(record)) for record in newest_first]
    for damaged in records.damaged:
        click.echo(f"advisor: record {damaged}", err=True)
    if as_json:
        rows = [
            report.as_data(record, cache)
            | {"stale": [*filter(None, [record.stale]), *map(str, differs)]}
            for record, differs in found
        ]
        click.echo(json.dumps({"records": rows, "damaged": records.damaged}))
    elif not found:
        click.echo("Nothing is tuned yet; run: advisor tune model.py --shape 64x3x224x224")
    else:
        out.print(report.listing(found))


target_option = click.option(
    "--target", metavar="TARGET", help="Where its target is  [default: its name, from here]"
)


@cli.command()
@click.argument("key")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also a bar chart, as .png or .svg.",
)
@click.option(
    "--budget",
    type=Duration(),
    default=api.EXPLAIN_S,
    metavar="TIME",
    help=f"Wall time of each race  [default: {api.EXPLAIN_S:.0f}s]",
)
@target_option
@cache_option
@json_option
def explain(
    key: str,
    plot: Path | None,
    budget: float,
    target: str | None,
    cache: str | None,
    as_json: bool,
) -> None:
    """Measure what each knob of the record KEY's advice contributes.

    What contributes nothing is set back to torch's default in the advice.
    """
    from advisor import plot as charts
    from advisor import report

    if plot is not None:
        charts.check(plot)
    found = api.explain(key, target=target, budget_s=budget, cache=cache)
    if plot is not None and found.record.parts:
        charts.parts(found.record, plot)
    if as_json:
        data = report.as_data(found.record, cache)
        click.echo(json.dumps({"dropped": list(found.dropped), "record": data}))
        return
    out = _console()
    if not found.record.parts:
        out.print("Nothing to explain: the advice is torch's default.")
        return
    out.print(report.parts(found.record))
    if found.dropped:
        out.print("\nSet back to torch's default, as no slower: " + ", ".join(found.dropped))
    if plot is not None:
        out.print(f"\nchart: {plot}", highlight=False)


@cli.command()
@click.argument("key")
@click.option(
    "--budget",
    type=Duration(),
    default=api.VERIFY_S,
    metavar="TIME",
    help=f"Wall time of the race  [default: {api.VERIFY_S:.0f}s]",
)
@target_option
@cache_option
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    key: str,
    budget: float,
    target: str | None,
    cache: str | None,
    as_json: bool,
) -> None:
    """Measure the record KEY again: does it still hold? Exit code 1, and stale, if not."""
    found = api.verify(key, target=target, budget_s=budget, cache=cache)
    then, now = found.record.at_batch, found.now
    if as_json:
        data = {
            "holds": found.holds,
            "reason": found.reason,
            "now": {"ratio": now.mean, "low": now.low, "high": now.high},
            "then": {"ratio": then.speedup, "low": then.speedup_low, "high": then.speedup_high},
            "differs": list(found.differs),
        }
        click.echo(json.dumps(data))
    else:
        click.echo(f"tuned {then.speedup:.2f}x ({then.speedup_low:.2f}-{then.speedup_high:.2f})")
        click.echo(f"now   {now.mean:.2f}x ({now.low:.2f}-{now.high:.2f})")
        for difference in found.differs:
            click.echo(f"changed since: {difference}")
        said = "the record holds" if found.holds else f"marked stale: {found.reason}"
        click.echo(said)
    ctx.exit(DONE if found.holds else FAILED)


@cli.command()
@click.argument("key", required=False)
@click.option("--all", "everything", is_flag=True, help="Every record.")
@cache_option
@json_option
def forget(key: str | None, everything: bool, cache: str | None, as_json: bool) -> None:
    """Remove the record KEY, or all, unreadable ones included."""
    if (key is None) == (not everything):
        raise UsageError("name one KEY, or --all; to see the keys, run: advisor show")
    records = Records(open_store(cache))
    chosen = []
    damaged = 0
    try:
        chosen = records.all() if everything else [records.get(str(key))]
    except RecordDamaged:
        damaged = records.delete_damaged(str(key))
    for record in chosen:
        api.forget(records, record)
    damaged += records.delete_damaged() if everything else 0
    if as_json:
        ids = [record.id for record in chosen]
        click.echo(json.dumps({"forgotten": ids, "damaged": damaged}))
        return
    lines = [f"forgot {record.id} {record.target.name}" for record in chosen]
    if damaged:
        lines.append(f"removed {damaged} unreadable record{'s' if damaged > 1 else ''}")
    click.echo("\n".join(lines) or "nothing to forget")


@cli.command()
@click.option(
    "--device", metavar="cuda:N|cpu", help="Default: the first CUDA device, else the CPU."
)
@cache_option
@json_option
def env(device: str | None, cache: str | None, as_json: bool) -> None:
    """Show the environment as a key sees it, and the store."""
    from advisor import report
    from advisor.cache.codec import to_plain
    from advisor.tuners.environment import default_device, detect

    store = open_store(cache)
    found = detect(device or default_device())
    if as_json:
        about = {"url": store.url, "health": store.health()}
        click.echo(json.dumps({"environment": to_plain(found), "store": about}))
        return
    rows = [*report.environment(found), ("store", store.url), ("store health", store.health())]
    for name, value in rows:
        click.echo(f"{name:<16}{value}")


@cli.command()
@json_option
def version(as_json: bool) -> None:
    """Show advisor's version."""
    click.echo(json.dumps({"version": advisor.__version__}) if as_json else advisor.__version__)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
def completion(shell: str) -> None:
    """Print shell completion: eval "$(advisor completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "advisor", "_ADVISOR_COMPLETE").source())


def _console(**how: Any) -> Console:
    """Wide where no terminal says otherwise, so that a log or a pipe gets whole lines."""
    console = Console(**how)
    return console if console.is_terminal else Console(width=140, **how)


def _keywords(pairs: tuple[str, ...]) -> dict[str, Value]:
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


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    try:
        code = cli.main(arguments, prog_name="advisor", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except click.ClickException as exc:
        return _refuse(exc.format_message() + _where_to_read(exc), WRONG_USAGE)
    except UsageError as exc:
        return _refuse(str(exc), WRONG_USAGE, getattr(exc, "details", ""))
    except AdvisorError as exc:
        return _refuse(str(exc), FAILED, getattr(exc, "details", ""))
    except OSError as exc:
        if exc.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Nobody reads on, or nothing can be written: what is still held back would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED if exc.errno == errno.EPIPE else _refuse(f"output: {exc.strerror}", FAILED)
    except (KeyboardInterrupt, click.Abort):
        return _refuse("interrupted; the same command goes on from here", INTERRUPTED)


def _where_to_read(exc: click.ClickException) -> str:
    """Which help lists what is allowed, where the message does not: a wrong value's does."""
    ctx = getattr(exc, "ctx", None)
    if ctx is None or type(exc) is click.BadParameter:
        return ""
    return f" (see: {ctx.command_path} --help)"


def _refuse(message: str, code: int, details: str = "") -> int:
    if details:
        click.echo(details.rstrip(), err=True)
    click.echo("advisor: " + " ".join(message.split()), err=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
