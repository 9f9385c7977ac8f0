"""Task: what is trained and what is permitted. A new field is one row here.

The options of the command line, the arguments, the key, the worker's message and the commands
printed for copying follow from the rows. UsageError names a value outside its domain.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from advisor.cache import kinds
from advisor.cache.config import Config
from advisor.errors import UsageError

PRECISIONS = ("default", "tf32", "bf16", "fp16", "fp8", "fp32")
PERMITTED = ("default", "tf32", "bf16", "fp16")  # fp32 and fp8 must be asked for
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8")
OPTIMIZERS = ("sgd", "adamw")
MODES = ("train", "infer")
OFFLOADED = "activations on the host"  # in `script`, if the unmodified script runs out of memory
MAPPED = ("batch", "num_workers")  # knobs that `--map` assigns to a script's options
VOCABULARY = 1000
TOLERANCE = 0.02

NO_ARGUMENTS = Config()

_KEY = "advisor row"


class FieldSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The row of one field.

    Attributes:
        help: its help text; `switched`: the help text of its switches, if it has an option too.
        keyword: its name in Python; default: the field's.
        option: its name on the command line; default: from the keyword; '' for no option.
        switches: options without a value, with the value of the field that each sets.
        decides: a difference makes another key, hence another record. `added`: after the first
            version; left out of the digest at its default, so that older keys stay the same.
        asked: a lookup may ask for it. Left out, any value fits, and the default is preferred.
        is_constraint: a permission: a record that permits more can answer, from its trials.
        printed: part of the commands printed for copying, unless it is the default.
        shown: read from a run's first steps, so a command neither takes nor prints it.
    """

    kind: kinds.Kind[Any]
    help: str
    keyword: str = ""
    option: str = "--"
    switches: Mapping[str, Any] = {}
    decides: bool = True
    added: bool = False
    asked: bool = True
    is_constraint: bool = False
    printed: bool = True
    shown: bool = False
    switched: str = ""
    name: str = ""
    default: Any = dataclasses.MISSING


def row(kind: kinds.Kind[Any], help: str, default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """A dataclass field that has a row."""
    return dataclasses.field(
        default=default, metadata={_KEY: FieldSpec(kind=kind, help=help, default=default, **more)}
    )


def switch(option: str, help: str, default: bool = False, **more: Any) -> Any:
    """A boolean field, with one option that sets it to the opposite of its default."""
    sets = {option: not default}
    return row(kinds.Switch(), help, default, option="", switches=sets, **more)


def seen(kind: kinds.Kind[Any], help: str, default: Any, **more: Any) -> Any:
    """A field that only a run has: it is read from the first steps, never given or printed."""
    return row(kind, help, default, option="", asked=False, printed=False, shown=True, **more)


@functools.cache
def rows(cls: Hashable) -> dict[str, FieldSpec]:
    """The rows of a dataclass by field, in order; fields without a row are left out."""
    found = {}
    for field in dataclasses.fields(cast(Any, cls)):
        if known := field.metadata.get(_KEY):
            keyword = known.keyword or field.name
            own = "--" + keyword.replace("_", "-")
            option = own if known.option == "--" else known.option
            found[field.name] = msgspec.structs.replace(
                known, name=field.name, keyword=keyword, option=option
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained and what is permitted. `shapes`: each with its batch, the largest first."""

    target: str = row(
        kinds.Text(),
        "model.py, model.py:Net, package.module:factory or torchvision:resnet50.",
        option="",
        decides=False,
        printed=False,
    )
    shapes: tuple[tuple[int, ...], ...] = row(
        kinds.Shapes(),
        "Your batch and the sample: 64x3x256x256; repeat for a job of several shapes.",
        keyword="shape",
        shown=True,
    )
    dtype: str = row(kinds.SingleChoice(DTYPES), "Type of the input.", "float32", shown=True)
    vocab: int = row(kinds.Whole(), "Integer inputs are below this number.", VOCABULARY, shown=True)
    mode: str = row(kinds.SingleChoice(MODES), "Kind of step.", "train", shown=True)
    optimizer: str = row(
        kinds.SingleChoice(OPTIMIZERS, r"[a-z][a-z0-9_]{0,31}"),
        "Optimizer that your script trains with.",
        "sgd",
        shown=True,
    )
    model_args: Config = row(  # noqa: RUF009 # a row is no default
        kinds.Arguments(),
        "Keyword argument of the model's class or function; repeat for more.",
        NO_ARGUMENTS,
        option="--model-arg",
        decides=False,
        shown=True,
    )
    data: str = row(
        kinds.Text(0),
        "Training data, whose loader is tuned: data.py:make_dataset or torchvision:FakeData.",
        "",
        decides=False,
        asked=False,
        shown=True,
    )
    data_args: Config = row(  # noqa: RUF009 # a row is no default
        kinds.Arguments(),
        "Keyword argument of the data's class or function; repeat for more.",
        NO_ARGUMENTS,
        option="--data-arg",
        decides=False,
        asked=False,
        shown=True,
    )
    any_order: bool = switch(
        "--any-order",
        "The data's batches may come in any order, as the loader's workers finish them.",
        decides=False,
        asked=False,
        shown=True,
    )
    device: str = row(
        kinds.DeviceName(),
        "Device to run on; default: the first CUDA device, else the CPU.",
        "",
        decides=False,
        shown=True,
    )
    precisions: tuple[str, ...] = row(
        kinds.MultiChoice(PRECISIONS),
        "Number formats that are permitted; strict fp32 only if named.",
        PERMITTED,
        is_constraint=True,
    )
    deterministic: bool = switch("--deterministic", "Deterministic algorithms only.")
    max_memory: int = row(
        kinds.ByteSize(), "Most memory of a config, e.g. 40GiB.", 0, is_constraint=True
    )
    batches: tuple[int, ...] | None = row(
        kinds.Numbers(),
        "Batch sizes to try besides yours; default: its doublings.",
        None,
        switches={"--fixed-batch": ()},
        switched="Try only your own batch size.",
        is_constraint=True,
        shown=True,
    )
    compile: bool = switch("--no-compile", "Leave torch.compile out.", True)
    step_graph: bool = switch(
        "--no-step-graph",
        "Leave the CUDA graph over the whole step out.",
        True,
        is_constraint=True,
        shown=True,
    )
    tolerance: float = row(
        kinds.Fraction(),
        "Distance from strict fp32's loss that is always allowed.",
        TOLERANCE,
        switches={"--no-verify": 0.0},
        switched="Leave the comparison with strict fp32 out.",
        is_constraint=True,
    )
    allow: tuple[str, ...] = row(
        kinds.MultiChoice(("bf16-reduce",)),
        "What is tried only if allowed: bf16-reduce sums FSDP2's gradients in bf16.",
        (),
        is_constraint=True,
        added=True,
    )
    map: Config = row(  # noqa: RUF009 # a row is no default
        kinds.Options(MAPPED),
        f"Option of a run's script that sets {' or '.join(MAPPED)}, e.g. batch=--batch-size; "
        "repeat for more.",
        NO_ARGUMENTS,
        decides=False,
        asked=False,
    )

    command: tuple[str, ...] = seen(kinds.Words(), "The command that was tuned.", (), decides=False)
    processes: int = seen(kinds.Whole(), "Processes of one job.", 1)
    others: str = seen(
        kinds.Text(0), "Other inputs of a run's model, and other facts that make another job.", ""
    )
    script: str = seen(kinds.Text(0), "Settings that a run's script makes itself.", "")

    def __post_init__(self) -> None:
        for name, one in rows(Task).items():
            value = getattr(self, name)
            try:
                sound = value == one.default or one.kind.checked(name, value) == value
            except UsageError as exc:
                raise ValueError(str(exc)) from None
            if not sound:
                raise ValueError(f"{name} {value!r}: not in its own form")

    @classmethod
    def of(cls, target: str, given: Mapping[str, object]) -> Task:
        """A task from keyword arguments; None means left out."""
        found = checked(cls, given)
        if "shapes" not in found:
            raise UsageError("shape: give your batch and the sample, e.g. 64x3x256x256")
        task = cls(target=rows(Task)["target"].kind.checked("target", target), **found)
        if task.map:
            raise UsageError("map: a TARGET has no options; give your command after --")
        if (task.data_args or task.any_order) and not task.data:
            which = "data args" if task.data_args else "any order"
            raise UsageError(f"{which}: needs data too, e.g. data.py:make_dataset")
        if task.data and task.mix:
            raise UsageError("data: advisor tunes no loader for a mix of shapes; leave data out")
        if task.mix and task.batches:
            raise UsageError(
                "batches: a mix of shapes is tuned at its own batches; leave batches out"
            )
        irrelevant: dict[str, Any] = {}
        if task.mode != "train":
            irrelevant |= {"optimizer": "sgd", "tolerance": TOLERANCE}
        if not task.dtype.startswith(("int", "uint")):
            irrelevant["vocab"] = VOCABULARY
        if task.mix:
            irrelevant["batches"] = ()
        elif task.batches:
            irrelevant["batches"] = tuple(sorted({*task.batches} - {task.batch}))
        return dataclasses.replace(task, **irrelevant)

    @property
    def baseline(self) -> str:
        """The name of the baseline in messages."""
        alone = "your unmodified script" if self.command else "torch's default"
        return "your script with the least memory" if OFFLOADED in self.script else alone

    @property
    def batch(self) -> int:
        return self.shapes[0][0]

    @property
    def sample(self) -> tuple[int, ...]:
        """The shape of one input without its batch dimension; for a mix, of the largest batch."""
        return self.shapes[0][1:]

    @property
    def mix(self) -> tuple[tuple[int, ...], ...]:
        """All shapes with their batches if the inputs alternate between several, else none."""
        return self.shapes if len(self.shapes) > 1 else ()

    @property
    def inputs(self) -> str:
        """'3x224x224 float32', or the shapes of a mix: '64x3x224x224 + 17x3x224x224 float32'."""
        shapes = self.mix or (self.sample,)
        return f"{' + '.join('x'.join(map(str, shape)) for shape in shapes)} {self.dtype}"

    @property
    def decisive(self) -> dict[str, Any]:
        """The fields that make another key; of a single shape, only the sample does."""
        found = {name: getattr(self, name) for name, one in rows(Task).items() if one.decides}
        found["shapes"] = self.mix or self.sample
        return found


def checked(cls: type, given: Mapping[str, object]) -> dict[str, Any]:
    """Keyword arguments, checked and converted, by field; None is left out."""
    keywords = {one.keyword: one for one in rows(cls).values()}
    found = {}
    for keyword, value in given.items():
        if keyword not in keywords:
            raise UsageError(f"{keyword}: expected one of {', '.join(keywords)}")
        if value is not None:
            one = keywords[keyword]
            found[one.name] = one.kind.asked(keyword.replace("_", " "), value)
    return found


def permitted(task: Task) -> dict[str, Any]:
    """The permissions of a run's task, by field, as `permissions` takes them by keyword."""
    given = (one.name for one in rows(Task).values() if not one.shown and one.name != "target")
    return {name: getattr(task, name) for name in given}


def permissions(given: Mapping[str, object]) -> dict[str, Any]:
    """The fields that a user may give for a run, checked. The run itself shows the other fields."""
    found = checked(Task, given)
    for name in found:
        one = rows(Task)[name]
        if one.shown:
            said = one.option or next(iter(one.switches), one.keyword)
            raise UsageError(f"{said}: read from the run; leave it out")
    return found


def changed(value: Any) -> Iterator[tuple[FieldSpec, Any]]:
    """Yields the rows of a Task or a Plan, with values, that are printed and not the default."""
    run = bool(getattr(value, "command", ()))
    for name, one in rows(cast(Hashable, type(value))).items():
        held = getattr(value, name)
        if one.printed and held != one.default and not (run and one.shown):
            yield one, held


def shell(value: Any) -> list[str]:
    """The command line's words for the values that are not the default, not quoted."""
    return option_words(changed(value))


def option_words(given: Iterable[tuple[FieldSpec, Any]]) -> list[str]:
    words: list[str] = []
    for one, held in given:
        if switches := [name for name, sets in one.switches.items() if sets == held]:
            words.append(switches[0])
        elif one.option:
            words += [word for text in one.kind.texts(held) for word in (one.option, text)]
    return words
