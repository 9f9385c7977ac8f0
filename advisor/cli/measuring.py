"""Commands that measure: tune, explain, verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from advisor import remeasuring, tuning
from advisor.cli.options import (
    DONE,
    FAILED,
    Duration,
    Listed,
    Shape,
    cache_option,
    complete_files,
    console,
    json_option,
    keywords,
)
from advisor.errors import UsageError
from advisor.tuners.search.effort import EFFORTS


@click.command()
@click.argument("target", shell_complete=complete_files)
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
    type=click.Choice(list(EFFORTS)),
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
    budget = EFFORTS[effort].budget_s if budget is None else budget
    arguments = keywords(model_args)
    from advisor import report
    from advisor.report.progress import Shown

    stderr = console(stderr=True, quiet=quiet)
    with Shown(stderr, budget_s=budget) as progress:
        found = tuning.tune(
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
    out = console()
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


target_option = click.option(
    "--target", metavar="TARGET", help="Where its target is  [default: its name, from here]"
)


@click.command()
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
    default=remeasuring.EXPLAIN_S,
    metavar="TIME",
    help=f"Wall time of each race  [default: {remeasuring.EXPLAIN_S:.0f}s]",
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
    found = remeasuring.explain(key, target=target, budget_s=budget, cache=cache)
    if plot is not None and found.record.parts:
        charts.parts(found.record, plot)
    if as_json:
        data = report.as_data(found.record, cache)
        click.echo(json.dumps({"dropped": list(found.dropped), "record": data}))
        return
    out = console()
    if not found.record.parts:
        out.print("Nothing to explain: the advice is torch's default.")
        return
    out.print(report.parts(found.record))
    if found.dropped:
        out.print("\nSet back to torch's default, as no slower: " + ", ".join(found.dropped))
    if plot is not None:
        out.print(f"\nchart: {plot}", highlight=False)


@click.command()
@click.argument("key")
@click.option(
    "--budget",
    type=Duration(),
    default=remeasuring.VERIFY_S,
    metavar="TIME",
    help=f"Wall time of the race  [default: {remeasuring.VERIFY_S:.0f}s]",
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
    found = remeasuring.verify(key, target=target, budget_s=budget, cache=cache)
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
