"""A record as settings of a framework: a whole config is served, under names that exist there.

Tests that need a framework are skipped if it is not installed: `pip install -e .[dev]`.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from advisor.cache.config import BATCH, Config, Value
from advisor.cache.record import Record, Target
from advisor.cache.records import Records
from advisor.cache.stores import open_stores
from advisor.cache.task import Task
from advisor.errors import NoRecord
from advisor.frameworks import NAMES, tables
from advisor.frameworks.framework import Framework
from advisor.frameworks.text import Emitted, data, text
from advisor.tuners import tf32
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.environment import detect, own_threads
from advisor.tuners.knobs import BY_NAME, KNOBS, TORCH
from tests.builders import measured, verified
from tests.cache import examples
from tests.face.commands import advisor
from tests.face.test_unbreakable import flag_state

CUDA = Config(TORCH).at(64)
TF32 = CUDA.replace(precision="tf32")
BF16 = CUDA.replace(precision="bf16", channels_last=True, cudnn_benchmark=True)
COMPILED = BF16.replace(compile="reduce-overhead")
GRAPHED = BF16.replace(step_graph=True, compile="default")
SGD = examples.TASK
ADAMW = replace(SGD, optimizer="adamw")
WORDS = replace(ADAMW, shapes=((64, 128),), dtype="int64")


def record_of(
    *configs: tuple[Config, float], task: Task = SGD, base: Config = CUDA, **winners: Config
) -> Record:
    """A record with these configs and rates, all verified. `winners`: the config of each use."""
    rates = {base: 100.0, **dict(configs)}
    chosen = {
        use: examples.choice(config, rates[config], rates[config] / 100)
        for use, config in {"flags": base, "loop": base, **winners}.items()
    }
    made = examples.record(replace(examples.KEY, task=task))
    return replace(
        made,
        baseline=examples.choice(base, 100.0),
        winners=examples.winners(**chosen),
        input=Config(),
        trials=tuple(
            one
            for config, rate in rates.items()
            for one in (measured(config, rate), verified(config))
        ),
    )


def framework(name: str) -> Framework:
    table: Framework = getattr(tables, name)
    return table


def emitted(name: str, record: Record, free: bool = False) -> Emitted:
    return Emitted(framework(name), record, free=free)


def emitted_winner(name: str, config: Config, task: Task = SGD) -> Emitted:
    """The output for a record with this winner of the loop."""
    return emitted(name, record_of((config, 400.0), task=task, loop=config))


def test_a_config_is_served_whole_or_not_at_all() -> None:
    """timm's script cannot set deterministic algorithms, so the next best config is served."""
    deterministic = BF16.replace(cudnn_deterministic=True)
    record = record_of((deterministic, 400.0), (BF16, 300.0), (TF32, 200.0), loop=deterministic)
    output = emitted("timm", record)
    assert output.setup.config == BF16
    assert output.reason == "3.00x torch's default at batch 64, each measured once"
    assert "#     at your batch, 4.00x: cudnn_deterministic=True\n" in text(output)
    assert emitted("hf", record).setup.config == deterministic
    fixed = CUDA.replace(cudnn_deterministic=True)
    with pytest.raises(NoRecord, match=r"train.py has no setting for cudnn_deterministic=True"):
        emitted("timm", record_of(base=fixed, loop=fixed, flags=fixed))
    with pytest.raises(NoRecord, match="tuned for mode infer"):
        emitted("hf", record_of(task=replace(SGD, mode="infer")))


@pytest.mark.parametrize("name", NAMES)
def test_a_knob_without_a_setting_is_named_and_not_served(name: str) -> None:
    """It is named in the output, and a config that sets it is not served."""
    unknown = TF32.replace(slack=9)
    output = emitted(name, record_of((unknown, 400.0), (TF32, 200.0), task=SGD, loop=unknown))
    assert output.setup.config == TF32
    assert " has no setting for:\n#     at your batch, 4.00x: slack=9\n" in text(output)
    assert data(output)["not_expressed"] == {"at your batch": {"slack": 9}}
    assert set(framework(name).rows) <= set(BY_NAME)


def run_task(others: str, processes: int = 1) -> Task:
    return replace(SGD, command=("python", "train.py"), others=others, processes=processes)


FUSED, PLAIN = BF16.replace(fused_optimizer=True), CUDA.replace(compile="default")
DETERMINISTIC = CUDA.replace(cudnn_deterministic=True)
INDUCTOR = "torch._inductor.config.triton.mix_order_reduction = False\n"
TF32_OFF = "switches TF32 on:\n#     torch.backends.cuda.matmul.allow_tf32 = False\n"
WITHOUT_IT = "; the record was measured without it."
SUM, TWO = "2 batches of 32 make one of 64", "4 batches of 8 in each of 2 processes make one of 64"


@pytest.mark.parametrize(
    ("name", "task", "config", "line"),
    [
        # transformers creates AdamW from a name. Other optimizers are the user's.
        ("hf", ADAMW, FUSED, '    "optim": "adamw_torch_fused",\n'),
        ("hf", ADAMW, BF16, '    "optim": "adamw_torch",\n'),
        ("hf", SGD, FUSED, "Add to the arguments of your optimizer: fused=True\n"),
        # The batch of a run is the one that its steps had.
        ("hf", run_task(""), TF32, '    "per_device_train_batch_size": 64,\n    "dataloader'),
        ("hf", run_task("2 micro-batches"), TF32, f"{SUM}, by gradient accumulation\n"),
        ("hf", run_task("labels 1 int64; 4 micro-batches; adamw, sgd", 2), TF32, TWO),
        ("hf", run_task("3 micro-batches"), TF32, 'arguments = {\n    "dataloader'),
        ("hf", SGD, DETERMINISTIC, "torch.use_deterministic_algorithms(True)\n"),
        ("lightning", SGD, DETERMINISTIC, '    "deterministic": True,\n'),
        ("lightning", SGD, COMPILED, "#     model = model.to(memory_format=torch.channels_last)\n"),
        ("lightning", SGD, COMPILED, '#     model.compile(mode="reduce-overhead")\n'),
        # The compiler of the torch that was measured is wrong without this line.
        ("lightning", SGD, COMPILED, INDUCTOR),
        ("hf", run_task("", 2), COMPILED, "torch._dynamo.config.optimize_ddp = False\n"),
        # TF32 stays off, even if the framework switches it on.
        ("hf", SGD, PLAIN, '    "tf32": False,\n'),
        ("hf", SGD, PLAIN, TF32_OFF),
        ("accelerate", SGD, PLAIN, TF32_OFF),
        (
            "timm",
            SGD,
            PLAIN,
            "compiles with triton.mix_order_reduction, known to be wrong in torch",
        ),
        ("timm", SGD, PLAIN, f"train.py sets cudnn.benchmark to True{WITHOUT_IT}"),
        ("timm", SGD, PLAIN, f"train.py switches TF32 on for matrix products{WITHOUT_IT}"),
    ],
)
def test_the_output_fits_the_framework(name: str, task: Task, config: Config, line: str) -> None:
    assert line in text(emitted_winner(name, config, task))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("hf", {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}),
        ("lightning", {"accumulate_grad_batches": 4}),
        ("accelerate", {"gradient_accumulation_steps": 4}),
        ("timm", {"batch_size": 16, "grad_accum_steps": 4}),
    ],
)
def test_a_smaller_batch_is_accumulated(name: str, settings: dict[str, int]) -> None:
    rates = [(TF32.at(16), 400.0), (TF32.at(24), 500.0), (TF32.at(128), 600.0), (TF32, 200.0)]
    rates += [(CUDA.at(size), 90.0) for size in (16, 24, 128)]

    def best_at(size: int, free: bool = True) -> Emitted:
        made = record_of(*rates, task=SGD, loop=TF32, free_loop=TF32.at(size))
        return emitted(name, made, free=free)

    output = best_at(16)
    assert settings.items() <= output.setup.settings.items()
    assert output.setup.loader.get(BATCH, 16) == 16
    assert "4 batches of 16 make one of 64" in text(output)
    # No gradients are accumulated at the user's batch, or at a larger one if the batch is free.
    for plain in (best_at(16, free=False), best_at(128)):
        assert 4 not in plain.setup.settings.values()
    with pytest.raises(NoRecord):  # 64 is not divisible by 24
        best_at(24)


THREADS = torch.get_num_threads()


def _reset_flags() -> None:
    PROCESS_FLAGS.release()
    for knob in KNOBS:
        if knob.flag is not None and knob.default is not None:
            knob.flag.set(knob.default)
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def reset_flags_afterwards() -> Iterator[None]:
    yield
    _reset_flags()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("precision", one) for one in ("default", "tf32", "fp32", "bf16", "fp16")),
        *(("cudnn_benchmark", one) for one in (False, True)),
        *(("cudnn_deterministic", one) for one in (False, True)),
        ("threads", 2),
    ],
)
def test_the_lines_set_the_same_flags_as_the_knob(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Value
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    flag = BY_NAME[name].flag
    setup = tables.accelerate.setup(record_of(), CUDA.replace(**{name: value}))
    assert flag is not None
    flag.set(value)
    wanted = flag_state()
    _reset_flags()
    exec("\n".join(setup.flags), {"torch": torch, "os": os})
    assert flag_state() == wanted


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="lacks options in lines for torch 2.11")
@pytest.mark.parametrize("value", ["default", "tf32", "fp32", "bf16"])
def test_the_tf32_switch_of_transformers_agrees_with_the_lines(value: str) -> None:
    """It sets only the new flags. If the old flags differ, reading them raises."""
    utils = pytest.importorskip("transformers.utils.import_utils")
    setup = emitted_winner("hf", CUDA.replace(precision=value, compile="default")).setup
    flag = BY_NAME["precision"].flag
    assert flag is not None
    flag.set(value)
    wanted = tf32.describe()
    _reset_flags()
    try:
        exec("\n".join(setup.flags), {"torch": torch})
        utils.enable_tf32.__wrapped__(setup.settings["tf32"])
        if setup.after:  # as Accelerate does when it compiles in float32
            torch.backends.cuda.matmul.allow_tf32 = True
        exec("\n".join(setup.after), {"torch": torch})
        assert tf32.describe() == wanted
        assert torch.backends.cudnn.allow_tf32 is ("conv=tf32" in wanted)
    finally:
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]


def test_the_printed_yaml_can_be_parsed() -> None:
    yaml = pytest.importorskip("yaml")
    fused = COMPILED.replace(fused_optimizer=True, pin_memory=True)
    amp = {"amp": True, "amp_dtype": "bfloat16", "channels_last": True, "pin_mem": True}
    compiled = {"torchcompile": "inductor", "torchcompile_mode": "reduce-overhead"}
    others = {"device": "cuda", "batch_size": 64, "opt_kwargs": {"fused": True}}
    assert yaml.safe_load(text(emitted_winner("timm", fused))) == {**amp, **compiled, **others}


def test_the_example_in_the_documentation_is_up_to_date() -> None:
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    record = record_of((GRAPHED, 500.0), (BF16, 300.0), loop=BF16, capture=GRAPHED)
    printed = text(emitted("hf", record)).replace(record.id, "0a20b631573e@64")
    assert textwrap.indent(printed, "    ") in page
    evil = replace(record, target=Target(name="x\nimport os\x1b[2J", origin=""))
    lines = text(emitted("hf", evil)).splitlines()
    assert not any("\x1b" in line or line.startswith("import os") for line in lines)


def every_setting(name: str) -> dict[str, set[Any]]:
    """Every setting that may be printed for a framework, with its text and number values."""
    values: dict[str, set[Any]] = {}
    for task, of_cpu in itertools.product((SGD, ADAMW, WORDS), (False, True)):
        record = on_cpu() if of_cpu else record_of(task=task)
        for knob, compiled in itertools.product(KNOBS, ("none", "default")):
            for value in (16, 64) if isinstance(knob.domain, range) else knob.domain:
                config = CUDA.replace(compile=compiled).replace(**{knob.name: value})
                setup = framework(name).setup(record, config)
                for setting, choice in setup.settings.items():
                    plain = isinstance(choice, str | int | float)
                    values.setdefault(setting, set()).update([choice] if plain else [])
    return values


def test_the_settings_exist_in_the_frameworks() -> None:
    for name in ("transformers", "lightning", "accelerate"):
        pytest.importorskip(name)
    optim = pytest.importorskip("timm.optim")
    from accelerate import Accelerator
    from accelerate.utils import DynamoBackend, PrecisionType
    from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT_STR
    from lightning.pytorch import Trainer
    from transformers import TrainingArguments
    from transformers.training_args import OptimizerNames

    hf, lightning, accelerate = map(every_setting, ("hf", "lightning", "accelerate"))
    for settings, some, known in (
        (hf, {"bf16", "fp16", "tf32", "optim", "torch_compile_backend"}, TrainingArguments),
        (lightning, {"precision", "benchmark", "deterministic"}, Trainer.__init__),
        (accelerate, {"mixed_precision", "dynamo_backend", "dynamo_plugin"}, Accelerator.__init__),
    ):
        assert some <= set(settings) <= set(inspect.signature(known).parameters)
    assert hf["optim"] <= {one.value for one in OptimizerNames}
    modes = set(BY_NAME["compile"].domain) - {"none", "cudagraphs", "blocks"}
    assert hf["torch_compile_mode"] == modes
    assert lightning["precision"] <= set(typing.get_args(_PRECISION_INPUT_STR))
    assert accelerate["mixed_precision"] <= {one.value for one in PrecisionType}
    backends = {one.value for one in DynamoBackend}
    assert {one.upper() for one in accelerate["dynamo_backend"]} <= backends
    for name in ("sgd", "adamw"):
        made = optim.create_optimizer_v2(nn.Linear(2, 2), opt=name, lr=0.1, fused=True)
        assert made.defaults["fused"] is True


def on_cpu(*, compile: str = "none") -> Record:
    """A record of this machine's CPU."""
    base = Config(
        {name: value for name, value in TORCH.items() if not name.startswith("cudnn")},
        threads=own_threads(),
    ).at(64)
    best = base.replace(precision="bf16", channels_last=True, compile=compile)
    made = record_of((best, 300.0), base=base, loop=best, flags=base)
    return replace(made, key=replace(made.key, environment=detect("cpu")))


def arguments_of(name: str, compile: str = "default") -> dict[str, Any]:
    """The arguments that the printed Python code defines."""
    scope: dict[str, Any] = {}
    exec(text(emitted(name, on_cpu(compile=compile))), scope)
    arguments: dict[str, Any] = scope["arguments"]
    return arguments


@pytest.mark.filterwarnings("ignore")  # of the frameworks
def test_training_arguments_and_a_trainer_accept_the_output(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made = transformers.TrainingArguments(output_dir=str(tmp_path), **arguments_of("hf"))
    assert (made.bf16, made.per_device_train_batch_size, made.use_cpu) == (True, 64, True)
    assert (made.torch_compile_mode, made.dataloader_pin_memory) == ("default", False)
    trainer = pytest.importorskip("lightning").Trainer(
        logger=False, default_root_dir=tmp_path, **arguments_of("lightning")
    )
    assert trainer.precision == "bf16-mixed"


@pytest.mark.filterwarnings("ignore")  # of the framework
@pytest.mark.parametrize("mode", ["none", "reduce-overhead"])
def test_an_accelerator_accepts_the_output(mode: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    try:
        made = accelerate.Accelerator(**arguments_of("accelerate", mode))
        plugin, compiles = made.state.dynamo_plugin, mode != "none"
        assert (made.mixed_precision, plugin.backend.value, plugin.mode) == (
            *("bf16", "INDUCTOR" if compiles else "NO", mode if compiles else "default"),
        )
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_emit_prints_settings_or_one_error_line(here: Path) -> None:
    small, own = BF16.at(16), CUDA.at(16)
    record = record_of((BF16, 400.0), (small, 500.0), (own, 90.0), loop=BF16, free_loop=small)
    Records(open_stores()).put(record)
    done = advisor(here, "emit", "lightning", record.id)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == text(emitted("lightning", record))
    assert "#     model = model.to(memory_format=torch.channels_last)\n" in done.stdout
    parsed = json.loads(advisor(here, "emit", "hf", record.id, "--batch", "free", "--json").stdout)
    settings = parsed["settings"]
    assert settings["per_device_train_batch_size"] == 16
    assert settings["gradient_accumulation_steps"] == 4

    for words, code, message in (
        (("keras", record.id), 2, "'keras' is not one of"),
        (("hf", "ffff"), 2, "ffff"),
        (("hf", record.id, "--batch", "0"), 2, "--batch '0': expected a number"),
        (("hf", record.id, "--batch", "7"), 1, "was not measured at batch 7"),
    ):
        done = advisor(here, "emit", *words)
        assert (done.returncode, done.stdout) == (code, "")
        assert message in done.stderr and len(done.stderr.splitlines()) == 1
