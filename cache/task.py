"""Task: what is trained and what is permitted. A new field is one row here.

A field's row says how it is written and checked, which option it is, whether a difference makes
another key, and what a lookup that leaves it out means. The command line's options, the arguments,
the key, the worker's message and the lines that are printed for copying follow from the rows.
UsageError names a value outside its domain.
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
PERMITTED = ("default", "tf32", "bf16", "fp16")
"""What a careful user accepts for training; fp32 and fp8 must be asked for."""
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8")
OPTIMIZERS = ("sgd", "adamw")
MODES = ("train", "infer")
MAPPED = ("batch", "num_workers")
"""What `--map` says that an option of a run's script sets."""
VOCABULARY = 1000
TOLERANCE = 0.02

NONE = Config()

_KEY = "advisor row"


class FieldSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one field.

    Attributes:
        kind: how it is written, checked and shown.
        help: one sentence; `switched` is that of its switches if it has an option too.
        keyword: its name in Python; default: the field's.
        option: its name on the command line; default: the keyword's; '' for none but `switches`.
        switches: options that take no value, and what each sets.
        decides: a difference makes another key, hence another record.
        asked: a lookup may ask for it. Left out, any value fits, and the default is preferred.
        is_constraint: a permission: a record of more can answer, from its trials.
        printed: part of the lines printed for copying unless it is the default.
        shown: a run's own first steps show it: not asked for and not printed for a command.
        given: by the user for a target; otherwise only a run has it.
    """

    kind: kinds.Kind[Any]
    help: str
    keyword: str = ""
    option: str = "--"
    switches: Mapping[str, Any] = {}
    decides: bool = True
    asked: bool = True
    is_constraint: bool = False
    printed: bool = True
    shown: bool = False
    given: bool = True
    switched: str = ""
    name: str = ""
    default: Any = dataclasses.MISSING


def row(kind: kinds.Kind[Any], help: str, default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """A dataclass field with its row."""
    return dataclasses.field(
        default=default, metadata={_KEY: FieldSpec(kind=kind, help=help, default=default, **more)}
    )


def seen(kind: kinds.Kind[Any], help: str, default: Any, **more: Any) -> Any:
    """A field that only a run has: its first steps show it, nobody gives it or copies it."""
    how = {"option": "", "asked": False, "printed": False, "shown": True, "given": False}
    return row(kind, help, default, **how, **more)


@functools.cache
def rows(cls: Hashable) -> dict[str, FieldSpec]:
    """The rows of a dataclass by field, in its order; fields without one are left out."""
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
    """What is trained and what is permitted.

    `shapes`: each with its batch, the largest first. Made by `Task.of`, which checks.
    """

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
    dtype: str = row(kinds.Choice(DTYPES), "Type of the input.", "float32", shown=True)
    vocab: int = row(kinds.Whole(), "Integer inputs are below this number.", VOCABULARY, shown=True)
    mode: str = row(kinds.Choice(MODES), "What a step does.", "train", shown=True)
    optimizer: str = row(
        kinds.Known(OPTIMIZERS), "The one your script trains with.", "sgd", shown=True
    )
    model_args: Config = row(  # noqa: RUF009 # a row is no default
        kinds.Arguments(),
        "Keyword argument of the model's class or function; repeat for more.",
        NONE,
        option="--model-arg",
        decides=False,
        shown=True,
    )
    data: str = row(
        kinds.Line(),
        "What it trains on, whose loader is tuned: data.py:make_dataset or torchvision:FakeData.",
        "",
        decides=False,
        asked=False,
        shown=True,
    )
    data_args: Config = row(  # noqa: RUF009 # a row is no default
        kinds.Arguments(),
        "Keyword argument of the data's class or function; repeat for more.",
        NONE,
        option="--data-arg",
        decides=False,
        asked=False,
        shown=True,
    )
    any_order: bool = row(
        kinds.Switch(),
        "Of the data: batches may come in any order, as their workers finish them.",
        False,
        option="",
        switches={"--any-order": True},
        decides=False,
        asked=False,
        shown=True,
    )
    device: str = row(
        kinds.Device(),
        "Where it runs; default: the first CUDA device, else the CPU.",
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
    deterministic: bool = row(
        kinds.Switch(),
        "Deterministic algorithms only.",
        False,
        option="",
        switches={"--deterministic": True},
    )
    max_memory: int = row(
        kinds.Bytes(), "Configs must run within this, e.g. 40GiB.", 0, is_constraint=True
    )
    batches: tuple[int, ...] | None = row(
        kinds.Numbers(),
        "Batch sizes to try beside yours; default: its doublings.",
        None,
        switches={"--fixed-batch": ()},
        switched="No other batch size than yours.",
        is_constraint=True,
        shown=True,
    )
    compile: bool = row(
        kinds.Switch(),
        "Leave torch.compile out.",
        True,
        option="",
        switches={"--no-compile": False},
    )
    step_graph: bool = row(
        kinds.Switch(),
        "Leave the CUDA graph over the whole step out.",
        True,
        option="",
        switches={"--no-step-graph": False},
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
    map: Config = row(  # noqa: RUF009 # a row is no default
        kinds.Options(MAPPED),
        f"Of a run: its option that sets {' or '.join(MAPPED)}, e.g. batch=--batch-size; repeat "
        "for more.",
        NONE,
        decides=False,
        asked=False,
        given=False,
    )

    command: tuple[str, ...] = seen(kinds.Words(), "The command that was tuned.", (), decides=False)
    processes: int = seen(kinds.Whole(), "Of one job.", 1)
    others: str = seen(
        kinds.Line(), "Other inputs of a run's model, and what else makes another job.", ""
    )
    script: str = seen(kinds.Line(), "What a run's script does itself.", "")

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
        """A task from what was given by keyword; None is as good as left out."""
        found = checked(cls, given)
        if "shapes" not in found:
            raise UsageError("shape: give your batch and the sample, e.g. 64x3x256x256")
        task = cls(target=target, **found)
        if task.map:
            raise UsageError("map: a TARGET has no options; give your command after --")
        if (task.data_args or task.any_order) and not task.data:
            which = "data args" if task.data_args else "any order"
            raise UsageError(f"{which}: of which data? give it as data, e.g. data.py:make_dataset")
        if task.data and task.mix:
            raise UsageError("data: a mix of shapes has no loader that is tuned; leave it out")
        if task.mix and task.batches:
            raise UsageError(
                "batches: a mix of shapes is tuned at the batches given; leave them out"
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
        """What everything is held against, for people."""
        return "your unmodified script" if self.command else "torch's default"

    @property
    def batch(self) -> int:
        """The user's."""
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
        """What makes another key, by field: of a single shape only the sample does."""
        found = {name: getattr(self, name) for name, one in rows(Task).items() if one.decides}
        found["shapes"] = self.mix or self.sample
        return found


def checked(cls: type, given: Mapping[str, object]) -> dict[str, Any]:
    """What was given by keyword, by field, in the form that the field holds; None is left out."""
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
    """What was said of a run, by field, as `permissions` takes it by keyword."""
    said = (name for name, one in rows(Task).items() if not one.shown and name != "target")
    return {name: getattr(task, name) for name in said}


def permissions(given: Mapping[str, object]) -> dict[str, Any]:
    """What a user may say of a run, by field; the rest it shows itself."""
    found = checked(Task, given)
    for name in found:
        one = rows(Task)[name]
        if one.shown:
            said = one.option or next(iter(one.switches), one.keyword)
            raise UsageError(f"{said}: a run shows it itself; leave it out")
    return found


def changed(value: Any) -> Iterator[tuple[FieldSpec, Any]]:
    """The rows of a Task or a Plan that are printed and not the default."""
    run = bool(getattr(value, "command", ()))
    for name, one in rows(cast(Hashable, type(value))).items():
        held = getattr(value, name)
        if one.printed and held != one.default and not (run and one.shown):
            yield one, held


def shell(value: Any) -> list[str]:
    """The command line's words for what is not the default, not quoted yet."""
    return option_words(changed(value))


def option_words(given: Iterable[tuple[FieldSpec, Any]]) -> list[str]:
    """The command line's words for some fields' values."""
    words: list[str] = []
    for one, held in given:
        switch = next((name for name, sets in one.switches.items() if sets == held), None)
        if switch is not None:
            words.append(switch)
        elif one.option:
            for text in one.kind.texts(held):
                words += [one.option, text]
    return words


def python(value: Any) -> list[str]:
    """The same as Python's keyword arguments, 'shape=(64, 3, 224, 224)', of what may be asked."""
    return [f"{one.keyword}={one.kind.literal(held)}" for one, held in changed(value) if one.asked]
