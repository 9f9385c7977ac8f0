"""The frameworks that advisor knows.

A row's lines of Python do what the knob itself does (`tuners.knobs`); tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from advisor.cache.config import BATCH
from advisor.frameworks.framework import Added, Framework, KnobRow, ObjectSetting, Setup
from advisor.tuners.compiling import avoiding

_MATMUL, _CUDNN = "torch.backends.cuda.matmul.allow_tf32", "torch.backends.cudnn.allow_tf32"


def _keyword(where: str, name: str) -> KnobRow:
    """A row that adds the keyword `name` to a field of a Setup."""
    return lambda _setup, value: {where: {name: value}}


_setting, _argument = partial(_keyword, "settings"), partial(_keyword, "loader")


def _flags(*lines: str) -> KnobRow:
    """A row that adds lines, with the value in place of {}."""
    return lambda _setup, value: {"flags": [line.format(value) for line in lines]}


def _precision(
    half: Mapping[str, Mapping[str, object]], *, sets_tf32: bool = False, switch: str = ""
) -> KnobRow:
    """`half`: settings for bf16 and fp16; `sets_tf32`: whether compiling turns TF32 on; `switch`:
    the setting for TF32. It sets only torch's new flags, so lines of Python set the old ones."""

    def row(setup: Setup, value: str) -> Added | None:
        if value == "fp8":
            return None  # advisor chooses the layers
        settings = half.get(value, {})
        resets = sets_tf32 and setup.config.get("compile", "none") != "none"
        if setup.environment.device.kind != "cuda" or (value == "default" and not resets):
            return {"settings": settings}
        # In half precision, operations that stay in float32 use TF32.
        on = value not in ("default", "fp32")
        return {
            "settings": {**settings, switch: on} if switch else settings,
            "flags": [f"{_MATMUL} = {on}", f"{_CUDNN} = {value != 'fp32'}"],
            "after": [f"{_MATMUL} = False"] if resets and not on else [],
        }

    return row


def _compile(of_mode: Callable[[str, str], Added], *, avoids: bool = True) -> KnobRow:
    """`of_mode`: what torch.compile's 'mode', or its 'backend' cudagraphs, needs; `avoids`: add
    lines that switch off known faults of inductor in the torch that measured."""

    def row(setup: Setup, value: str) -> Added | None:
        if value == "blocks":
            return None  # Accelerate's own regional compilation compiles the rest in pieces, too
        version = setup.environment.software.torch
        faults = avoiding(version) if avoids and value != "cudagraphs" else {}
        flags = [f"torch._inductor.config.{name} = {it}" for name, it in faults.items()]
        splits = avoids and setup.task.processes > 1
        flags += ["torch._dynamo.config.optimize_ddp = False"] * splits
        return {**of_mode("backend" if value == "cudagraphs" else "mode", value), "flags": flags}

    return row


def _batch(accumulation: str, size: str = "") -> KnobRow:
    """`accumulation`: the name of the setting for gradient accumulation; `size`: that for the batch
    size, '' if the user makes the DataLoader."""

    def row(setup: Setup, _value: int) -> Added | None:
        if setup.accumulation is None:
            return None
        samples, calls = setup.accumulation
        if not samples:
            return {}  # the run's own batch size is not known
        settings = {accumulation: calls} if calls > 1 else {}
        if size:
            return {"settings": {size: samples} | settings}
        return {"settings": settings, "loader": {"batch_size": samples}}

    return row


def _channels_last(setup: Setup, _value: bool) -> Added:
    # Only the weights: the first layer converts its input.
    layout = "channels_last_3d" if len(setup.task.sample) == 4 else "channels_last"
    return {"model": [f"model = model.to(memory_format=torch.{layout})"]}


_DETERMINISTIC = (
    'os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")',
    "torch.use_deterministic_algorithms(True)",
    "torch.backends.cudnn.deterministic = True",
)
_SCRIPT: Mapping[str, KnobRow] = {
    "channels_last": _channels_last,
    "cudnn_benchmark": _flags("torch.backends.cudnn.benchmark = True"),
    "cudnn_deterministic": _flags(*_DETERMINISTIC),
    "fused_optimizer": _keyword("optimizer", "fused"),
    "threads": _flags("torch.set_num_threads({})"),
    "sharing": _flags("torch.multiprocessing.set_sharing_strategy({!r})"),
}
"""Rows of a framework that leaves these knobs to the script."""
_LOADER = {
    name: _argument(name)
    for name in ("num_workers", "prefetch_factor", "in_order", "persistent_workers", "pin_memory")
}
"""Rows of a framework whose script makes the DataLoader."""


def _by_accelerate(_name: str, mode: str) -> Added:
    if mode in ("cudagraphs", "default"):
        return {"settings": {"dynamo_backend": mode.replace("default", "inductor")}}
    how = {"backend": "inductor", "mode": mode}
    plugin = ObjectSetting("accelerate.utils", "TorchDynamoPlugin", how)
    return {"settings": {"dynamo_plugin": plugin}}


accelerate = Framework(
    title="accelerate.Accelerator",
    call="Accelerator(**arguments)",
    rows={
        **_SCRIPT,
        **_LOADER,
        "precision": _precision(
            {name: {"mixed_precision": name} for name in ("bf16", "fp16")}, sets_tf32=True
        ),
        BATCH: _batch("gradient_accumulation_steps"),
        "compile": _compile(_by_accelerate),
    },
    devices={"cuda": {}, "cpu": {"cpu": True}},
    differs=("precision",),
)


def _hf_optimizer(setup: Setup, value: bool) -> Added | None:
    if setup.task.optimizer == "adamw":
        return {"settings": {"optim": "adamw_torch_fused" if value else "adamw_torch"}}
    return {"optimizer": {"fused": True}} if value else {}  # the user's own


def _hf_checkpointing(_setup: Setup, every: int) -> Added | None:
    how = {"use_reentrant": False}
    on = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": how}
    return {0: {}, 1: {"settings": on}}.get(every)  # it has no setting for some of the blocks


hf = Framework(
    title="transformers.TrainingArguments",
    call='TrainingArguments(output_dir="out", **arguments)',
    rows={
        **_SCRIPT,
        "precision": _precision(
            {name: {name: True} for name in ("bf16", "fp16")}, sets_tf32=True, switch="tf32"
        ),
        BATCH: _batch("gradient_accumulation_steps", "per_device_train_batch_size"),
        "fused_optimizer": _hf_optimizer,
        "compile": _compile(
            lambda name, mode: {"settings": {"torch_compile": True, f"torch_compile_{name}": mode}}
        ),
        "checkpoint_blocks": _hf_checkpointing,
        "num_workers": _setting("dataloader_num_workers"),
        "prefetch_factor": _setting("dataloader_prefetch_factor"),
        "persistent_workers": _setting("dataloader_persistent_workers"),
        "pin_memory": _setting("dataloader_pin_memory"),
    },
    devices={"cuda": {}, "cpu": {"use_cpu": True}},
    differs=("precision", "fused_optimizer", "num_workers", "pin_memory"),
)


lightning = Framework(
    title="lightning.Trainer",
    call="Trainer(**arguments)",
    rows={
        **_SCRIPT,
        **_LOADER,
        "precision": _precision(
            {"bf16": {"precision": "bf16-mixed"}, "fp16": {"precision": "16-mixed"}}
        ),
        "cudnn_benchmark": _setting("benchmark"),
        "cudnn_deterministic": lambda _setup, on: {
            "settings": {"deterministic": on},
            "flags": _DETERMINISTIC,
        },
        BATCH: _batch("accumulate_grad_batches"),
        "compile": _compile(lambda name, mode: {"model": [f'model.compile({name}="{mode}")']}),
    },
    devices={"cuda": {"accelerator": "gpu"}, "cpu": {"accelerator": "cpu"}},
)


def _timm_precision(_setup: Setup, value: str) -> Added | None:
    if half := {"bf16": "bfloat16", "fp16": "float16"}.get(value):
        return {"settings": {"amp": True, "amp_dtype": half}}
    return None if value in ("fp32", "fp8") else {}


def _by_timm(name: str, mode: str) -> Added:
    if name == "backend":
        return {"settings": {"torchcompile": mode}}
    return {"settings": {"torchcompile": "inductor", "torchcompile_mode": mode}}


def _timm_notes(setup: Setup) -> list[str]:
    if setup.environment.device.kind != "cuda":
        return []
    version = setup.environment.software.torch
    faults = avoiding(version) if "torchcompile_mode" in setup.settings else ()
    lines = [f"compiles with {name}, known to be wrong in torch {version}" for name in faults]
    if "torchcompile" in setup.settings and setup.task.processes > 1:
        lines.append("compiles the model in the buckets of DistributedDataParallel")
    if not setup.config.get("cudnn_benchmark"):
        lines.append("sets cudnn.benchmark to True")
    if setup.config.get("precision") == "default":
        lines.append("switches TF32 on for matrix products")
    return [f"{line}; the record was measured without it" for line in lines]


timm = Framework(
    title="timm's train.py",
    call="",
    rows={
        "precision": _timm_precision,
        "channels_last": lambda setup, _on: (
            {"settings": {"channels_last": True}} if len(setup.task.sample) == 3 else None
        ),
        "cudnn_benchmark": lambda _setup, _on: {},  # train.py sets it itself
        BATCH: _batch("grad_accum_steps", "batch_size"),
        "fused_optimizer": lambda _setup, on: {"settings": {"opt_kwargs": {"fused": on}}},
        "compile": _compile(_by_timm, avoids=False),
        "num_workers": _setting("workers"),
        "pin_memory": _setting("pin_mem"),
    },
    devices={"cuda": {"device": "cuda"}, "cpu": {"device": "cpu"}},
    differs=("num_workers",),
    notes=_timm_notes,
)


def _by_script(setup: Setup, mode: str) -> Added | None:
    made = _compile(lambda name, mode: {"settings": {"compile": {name: mode}}})
    return made(setup, mode) if setup.task.processes == 1 else None  # else the model in DDP


script = Framework(  # for `advisor patch`; its settings are those of report/templates/patch.txt
    title="a PyTorch script",
    call="",
    rows={
        **_SCRIPT,
        **_LOADER,
        "precision": _precision({"bf16": {"autocast": "bfloat16"}}),
        "compile": _by_script,
        "dynamic_shapes": _setting("dynamic"),
    },
    devices={"cuda": {}, "cpu": {}},
)
