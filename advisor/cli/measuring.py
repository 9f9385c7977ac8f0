"""Commands that measure: tune, fit, check, compare, explain, verify."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from advisor.arguments import Model, progress_of
from advisor.cache.codec import to_plain
from advisor.cache.kinds import ByteSize
from advisor.cache.record import Record
from advisor.cache.shown import size, speedup, times
from advisor.cache.task import Task, permissions
from advisor.cli import options
from advisor.cli.options import DONE, FAILED, OrCommand, Output, Parts, json_or_text, option, warn
from advisor.errors import UsageError
from advisor.report import cost, feeding, memory, sections
from advisor.report.document import as_data
from advisor.report.progress import Shown
from advisor.report.text import ago, rate, spread
from advisor.resolve.answer import advises
from advisor.tuners.act.pilot.protocol import KEEP_CHECKPOINTS
from advisor.tuners.search.plan import CHECK, EXPLAIN, VERIFY, Plan

if TYPE_CHECKING:
    from advisor.tuning import Tuned


_progress_options = options.option_group(
    options.cache,
    option("--quiet", "No progress, only the result."),
    options.loader,
    option("--show-output", "For a run: show its output, on stderr."),
    option(
        "--keep-checkpoints",
        "For a run: write checkpoints where the script says, not to a scratch folder.",
    ),
    options.events_option,
)


def _budget_option(default: str) -> options.Decorator:
    text = "Wall time of all measuring; the first start is not counted."
    return option("--budget TIME", f"{text}  [default: {default}]", default=default)


@click.command(cls=OrCommand)
@options.target_argument
@options.row_options(Task)
@options.row_options(Plan)
@_progress_options
@option(
    "--for URL",
    "Print commands for another machine, where the record will be in this store.",
    "url",
    default="",
)
@json_or_text
def tune(
    target: str | None, command: tuple[str, ...], cache: str | None, url: str, **given: Any
) -> Parts:
    """Find the fastest safe config for your run, or for a model.

    \b
    advisor tune -- python train.py --epochs 100
    advisor tune model.py --shape 64x3x256x256

    For a run, type your command after --. advisor starts it once, switches configs between its
    steps, on its own data, and then ends it.

    TARGET is a model on its own, trained on made-up data: model.py, model.py:Net,
    package.module:factory or torchvision:resnet50.
    """
    plan, asked = Plan.of(options.collected(Plan, given)), options.collected(Task, given)
    for name in ("show_output", "loader", "keep_checkpoints"):
        if target and given[name]:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} is for a command after --, not for a TARGET")
    if url and "://" not in url and not url.startswith(("/", "~", "dir:/", "disk:/")):
        raise UsageError(
            f"--for {url!r}: expected a store's URL, as https://advisor.example, or the absolute "
            "path of a folder"
        )
    task = Task.of(target, asked) if target else None
    permitted = permissions(asked) if task is None else {}
    # Import torch only now: it takes seconds, and wrong options are already refused.
    from advisor.tuning import tuned
    from advisor.workload import AnyWorkload, RunWorkload, TargetWorkload

    progress, show = _progress(plan, given)
    workload: AnyWorkload = (
        RunWorkload(command, permitted, show=show) if task is None else TargetWorkload(task)
    )
    found = tuned(workload, plan, cache=cache, progress=progress)
    yield from _result(found, plan, command, cache, url)
    # Only a server's worker, which uses --for, must know that the tuning is unfinished.
    code = options.UNFINISHED if url and not found.finished else DONE
    code = options.INTERRUPTED if found.interrupted else code
    document = _tuning(found, cache, progress, code)
    yield Output(lambda: document, code)


@click.command(cls=OrCommand, options_metavar="[OPTIONS] -- COMMAND")
@option("--memory SIZE", "Memory of the GPU that may be used, e.g. 24GiB; default: all.")
@option(
    "--max-slowdown RATIO",
    "Exit with 1 if the fastest config that fits is more than this many times slower than your "
    "script would be with enough memory (estimated).",
    type=click.FloatRange(1.0, 1e6),
)
@option("--batch", "free: the largest and the fastest batch, too.", type=click.Choice(["free"]))
@options.row_options(Task, "precisions", "deterministic", "compile", "tolerance", "allow", "map")
@options.row_options(Plan)
@_progress_options
@json_or_text
def fit(
    command: tuple[str, ...], cache: str | None, max_slowdown: float | None, **given: Any
) -> Parts:
    """Find the fastest way to train a script that runs out of GPU memory.

    \b
    advisor fit -- python train.py --batch-size 64
    advisor fit --memory 24GiB -- python train.py --batch-size 64

    As advisor tune, and if the unmodified script does not fit, advisor starts it with the least
    memory, and looks for the fastest config that fits at your batch. It checkpoints blocks that
    repeat, and keeps activations on the host. advisor run then uses the config.
    """
    plan, asked = Plan.of(options.collected(Plan, given)), options.collected(Task, given)
    if (limit := given.pop("memory")) is not None:
        asked["max_memory"] = ByteSize().checked("memory", limit)
    permitted = permissions(asked)
    from advisor.tuning import tuned
    from advisor.workload import RunWorkload

    progress, show = _progress(plan, given)
    workload = RunWorkload(command, permitted, show=show, limited=not given["batch"])
    workload.frees_batch = bool(given["batch"])
    found = tuned(workload, plan, cache=cache, progress=progress)
    record, slower = found.record, memory.slowdown(found.record)
    yield from _result(found, plan, command, cache, "")
    code = options.INTERRUPTED if found.interrupted else DONE
    if max_slowdown is not None and slower > max_slowdown:
        warn(
            f"the advice is {slower:.2f}x slower than your script would be with enough memory, "
            f"more than --max-slowdown {max_slowdown:g}; a smaller batch may be faster"
        )
        code = code or FAILED
    document, slowed = _tuning(found, cache, progress, code), slower or None
    batches = memory.batches(record)
    yield Output(lambda: {"slowdown": slowed, "batches": batches, **document}, code)


@click.command(cls=OrCommand, options_metavar="[OPTIONS] -- COMMAND")
@_budget_option(CHECK)
@_progress_options
@json_or_text
def check(command: tuple[str, ...], cache: str | None, budget: str, **given: Any) -> Parts:
    """Find what is wrong with your script's own settings.

    \b
    advisor check -- python train.py

    Compares what your script itself does (autocast, torch.compile, channels_last, a fused
    optimizer) with strict fp32, on its own batches, and measures what each setting gains or costs.

    Exit code 0: nothing wrong was found, or it could not be compared. 1: something is wrong; each
    fault is one line.
    """
    plan = Plan.of({"budget": budget})
    from advisor.checking import checked_run

    progress, show = _progress(plan, given)
    found = checked_run(command, plan, cache, progress, show)
    if found.steps_per_s:
        yield f"your unmodified script makes {rate(found.steps_per_s)} steps/s"
    for name, ratio in found.without.items():
        gain = speedup(1 / ratio.mean, 1 / ratio.high, 1 / max(ratio.low, 1e-9))
        yield f"speed with its own {name}, over that without: {gain}"
    yield from (f"its own {name} is not timed: {why}" for name, why in found.failed.items())
    if found.untimed:
        yield f"not timed: {found.untimed}"
    done = "compared with strict fp32" if found.compared else "not compared with strict fp32"
    yield f"{done}: {found.numerics}"
    yield from (f"wrong: {fault}" for fault in found.faults)
    yield from ["nothing wrong was found"] * (found.compared and not found.faults)
    document = asdict(found)
    document["without"] = {
        name: _ratio(one.mean, one.low, one.high) if math.isfinite(one.high) else None
        for name, one in found.without.items()
    }
    yield Output(lambda: document, code=FAILED if found.faults else DONE)


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
    from advisor.two_commands import Side, compare_commands, worktree_of

    progress = Shown(options.console(stderr=True), budget_s=seconds)
    with contextlib.ExitStack() as held:
        # Otherwise a cancelled CI job would leave its worktree behind.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
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
    if ref is None and places and len(places) % 2 == 0:
        raise UsageError("expected one '--' between the commands, or as many within each as well")
    middle = places[len(places) // 2] if places else 0
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


def _tuning(found: Tuned, cache: str | None, progress: Shown, code: int) -> dict[str, Any]:
    """Report the end of a tuning as an event. Returns its document."""
    status = "tuned" if found.finished else "unfinished"
    status = "known" if found.known or found.earlier else status
    record = as_data(found.record, cache, finished=found.finished)
    about = {"exit_code": code, "status": status, "record": record["id"]}
    progress.events({"event": "result", **about, "advice": record["advice"]})
    return {"status": status, "remarks": list(found.remarks), "record": record}


def _progress(plan: Plan, given: Mapping[str, Any]) -> tuple[Shown, Callable[[str], None] | None]:
    """The progress of a tuning, and where the command's output goes. Sets variables on which the
    started command and the lines to copy depend."""
    os.environ.update(options.LOADER.get(given["loader"], {}))
    os.environ.update({KEEP_CHECKPOINTS: "1"} if given["keep_checkpoints"] else {})
    shown_on = options.console(stderr=True, quiet=given["quiet"])
    events = options.event_writer(given["events"])
    progress = Shown(shown_on, budget_s=plan.seconds, events=events)
    if (tasks := os.environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
        progress.warning(
            f"srun starts {tasks} advisors, and each tunes by itself; to tune one job of {tasks} "
            "processes, start one: advisor tune -- srun python train.py"
        )
    return progress, progress.loud if given["show_output"] else None


def _fits(record: Record) -> Parts:
    """What fits into the memory, and where the memory goes."""
    if not memory.saves(record):
        peak = record.memory.get("peak")
        if record.key.task.max_memory and type(peak) is int:
            yield f"Your unmodified script fits: its peak is {size(peak)}."
    for section in memory.sections(record):
        if memory.saves(record) or section.name == "batches":
            yield from section.text()


def _result(
    found: Tuned, plan: Plan, command: tuple[str, ...], cache: str | None, url: str
) -> Parts:
    record = found.record
    yield from _fits(record)
    if found.known:
        yield f"Already tuned, {ago(record.provenance.created)}; --force measures again."
    if found.earlier:  # what follows is of that record, and not of this tuning
        yield from ("", *found.remarks)
    yield ""
    yield sections.verdict(record)
    yield from ("", *sections.summary(record), *(() if found.earlier else found.remarks))
    for section in cost.sections(record, plan.price):
        yield from section.text()
    if found.interrupted and not found.earlier:
        yield "Interrupted: the best config so far is kept; the same command continues."
    if found.finished and (advises(record) or not found.interrupted):
        yield from sections.use(record, cache, command=command, url=url).text()
    elif not found.interrupted:
        mend = "a larger --budget" if plan.trials is None else "no --trials"
        yield f"\nNot tuned yet: the same command continues. Give {mend}."


def _again_options(budget: str) -> options.Decorator:
    return options.option_group(
        _budget_option(budget),
        option(
            "--target TARGET",
            "The target to run  [default: the record's own file, if it is under this folder]",
        ),
        options.map_option,
        options.events_option,
        options.cache,
    )


def _again(command: tuple[str, ...], model: Model, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a command line as arguments of `explain` and `verify`."""
    if command and (model.target or model.data):
        raise UsageError("give either --target and --data, or your command after --")
    write = options.event_writer(given["events"])

    def told(event: Mapping[str, Any]) -> None:
        warn(event["text"])
        write(event)

    return {
        "what": command or model,
        "map": given["map"] or None,
        "budget": given["budget"],
        "store": given["cache"],
        "on_event": told,
    }


@click.command(cls=OrCommand)
@click.argument("key", required=False)
@options.row_options(Task, "data", "data_args")
@_again_options(EXPLAIN)
@json_or_text
def explain(key: str | None, command: tuple[str, ...], **given: Any) -> Parts:
    """Measure what each knob of the record KEY's advice contributes.

    Knobs that contribute nothing leave the advice. For the record of a run, give its command as
    you would type it: advisor explain KEY -- python train.py. With --data, advisor also says what
    limits the training, and what a sample costs.

    Without KEY, advisor explain -- python train.py names what slows your script down and no setting
    can fix, with its lines and the most that each gains.
    """
    if key is None:
        yield from _limits(command, given)
        return
    from advisor import verification

    data = given["data"] or ""
    model = Model(given["target"], data=data or None, data_args=given["data_args"] or None)
    found = verification.explain(key, **_again(command, model, given))
    record, costs = found.record, found.costs
    yield from feeding.explained(record, costs, data)
    if record.parts:
        shown = sections.parts(record)
        yield from (f"{shown.caption}:", shown)
        if found.dropped:
            yield f"\nRemoved, as the advice is no slower without: {', '.join(found.dropped)}"
        yield from (f"\n{line}" for line in sections.caveats_of(record))
    else:
        yield f"Nothing to explain: the advice is {record.key.task.baseline}."
    about = {"dropped": list(found.dropped), "costs": to_plain(costs) if costs else None}
    yield Output(lambda: {**about, "record": as_data(record, given["cache"])})


def _limits(command: tuple[str, ...], given: Mapping[str, Any]) -> Parts:
    if not command:
        raise UsageError("give a record's KEY, your command after --, or both")
    for name in ("target", "data", "data_args", "map"):
        if given[name]:
            raise UsageError(f"--{name.replace('_args', '-arg')} needs the KEY of a record")
    plan = Plan.of({"budget": given["budget"]})
    on_event = _again(command, Model(), given)["on_event"]
    from advisor.checking import limits_of

    found = limits_of(command, plan, given["cache"], progress_of(on_event))
    yield f"your unmodified script makes {rate(found.steps_per_s)} steps/s"
    if found.of_ranks:
        yield found.of_ranks
    if found.ended:
        yield f"it was observed for only {found.seconds:.0f} s: {found.ended}"
    for one in found.found:
        where = f"{place}: " if (place := sections.place(one)) else ""
        yield f"{where}{one.what}, {sections.took(one)}: without it at most {times(one.gain)}"
    if not found.found:
        yield "nothing was found that slows it down by 2% and that no setting can fix"
    document: dict[str, Any] = {
        "limits": [to_plain(one) for one in found.found],
        "of_ranks": found.of_ranks,
        "ended": found.ended,
    }
    document |= {"steps_per_s": found.steps_per_s, "observed_s": found.seconds}
    yield Output(lambda: document)


_VERDICTS = {
    "holds": "the record holds",
    "does not hold": "marked stale: ",
    "could not tell": "could not tell whether the record holds: ",
}


@click.command(cls=OrCommand)
@click.argument("key")
@_again_options(VERIFY)
@json_or_text
def verify(key: str, command: tuple[str, ...], target: str | None, **given: Any) -> Parts:
    """Measure again whether the record KEY still holds.

    For the record of a run, give its command as you would type it: advisor verify KEY -- python
    train.py.

    Exit code 0: the record holds. 1: it does not hold, and is marked stale; or advisor could not
    tell, and changes nothing: use a quieter machine or a larger --budget.
    """
    from advisor import verification

    found = verification.verify(key, **_again(command, Model(target), given))
    record, (default, speed) = found.record, found.samples_per_s
    then = {use: record.winner(use) for use in found.now}
    for use, now in found.now.items():
        yield f"{use:<9}tuned {spread(then[use])}  now {speedup(now.mean, now.low, now.high)}"
    yield f"samples/s tuned {record.winner(record.use).samples_per_s:,.4g}  now {speed:,.4g}"
    yield from (f"changed since: {difference}" for difference in found.differs)
    yield from (found.numerics, _VERDICTS[found.verdict] + found.reason)
    told = ("verdict", "holds", "reason", "numerics", "differs")
    document = {name: getattr(found, name) for name in told} | {
        "samples_per_s": {"default": default, record.use: speed},
        "now": {use: _ratio(one.mean, one.low, one.high) for use, one in found.now.items()},
        "then": {
            use: _ratio(one.speedup, one.speedup_low, one.speedup_high) for use, one in then.items()
        },
    }
    yield Output(lambda: document, code=DONE if found.holds else FAILED)


def _ratio(mean: float, low: float, high: float) -> dict[str, float]:
    return {"ratio": mean, "low": low, "high": high}
