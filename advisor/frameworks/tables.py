"""The frameworks that advisor knows.

A row's lines of Python do what the knob itself does (`tuners.knobs`); tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from advisor.cache.config import BATCH, Value
from advisor.frameworks.words import (
    ConfigContext,
    Framework,
    LazyObject,
    Row,
    Setup,
    installed,
    only,
)
from advisor.tuners.compiling import avoiding

if TYPE_CHECKING:
    from advisor.frameworks.lightning_callback import AdvisorCallback

_MATMUL, _CUDNN = "torch.backends.cuda.matmul.allow_tf32", "torch.backends.cudnn.allow_tf32"


def _row(*unset: Value | None, **needs: Callable[[Any], Any]) -> Row:
    """A row that computes the Setup's fields from the value; an `unset` value needs no Setup."""
    return lambda value, _context: (
        Setup() if value in unset else Setup(**{name: make(value) for name, make in needs.items()})
    )


def _setting(name: str, *unset: Value | None) -> Row:
    return _row(*unset, settings=lambda value: {name: value})


def _argument(name: str, *unset: Value | None) -> Row:
    """Like `_setting`, for an argument of the user's own DataLoader."""
    return _row(*unset, loader=lambda value: {name: value})


def _precision(
    half: Mapping[str, Mapping[str, object]], *, sets_tf32: bool = False, switch: str = ""
) -> Row:
    """`half`: settings for bf16 and fp16; `sets_tf32`: whether compiling turns TF32 on; `switch`:
    the setting for TF32. It sets only torch's new flags, so lines of Python set the old ones."""

    def row(value: Value, context: ConfigContext) -> Setup | None:
        if value == "fp8":
            return None  # advisor chooses the layers
        found = Setup(settings=half.get(str(value), {}))
        resets = sets_tf32 and context.config.get("compile", "none") != "none"
        if context.device == "cuda" and (value != "default" or resets):
            # In half precision, operations that stay in float32 use TF32.
            on = value not in ("default", "fp32")
            flags = f"{_MATMUL} = {on}", f"{_CUDNN} = {value != 'fp32'}"
            after = flags[:1] if resets and not on else ()
            found += Setup(settings={switch: on} if switch else {}, flags=flags, after=after)
        return found

    return row


def _compile(of_mode: Callable[[str], Setup], *, avoids: bool = True) -> Row:
    """`of_mode`: the Setup for a mode of torch.compile or for backend 'cudagraphs'; `avoids`: add
    lines that switch off known faults of inductor in the torch that measured."""

    def row(value: Value, context: ConfigContext) -> Setup | None:
        if value == "blocks":
            return None  # Accelerate's own regional compilation compiles the rest in pieces, too
        if value == "none":
            return Setup()
        avoided = avoiding(context.torch) if avoids and value != "cudagraphs" else {}
        flags = tuple(f"torch._inductor.config.{name} = {it}" for name, it in avoided.items())
        return of_mode(str(value)) + Setup(flags=flags)

    return row


def _batch(accumulation: str, size: str = "") -> Row:
    """`accumulation`: the name of the setting for gradient accumulation; `size`: that for the batch
    size, '' if the user makes the DataLoader."""

    def row(_value: Value, context: ConfigContext) -> Setup | None:
        if context.accumulation is None:
            return None
        samples, calls = context.accumulation
        if not samples:
            return Setup()  # the run's own batch size is not known
        settings = {accumulation: calls} if calls > 1 else {}
        if size:
            return Setup(settings={size: samples} | settings)
        return Setup(settings=settings, loader={"batch_size": samples})

    return row


def _channels_last(value: Value, context: ConfigContext) -> Setup:
    # Only the weights: the first layer converts its input.
    layout = "channels_last_3d" if len(context.task.sample) == 4 else "channels_last"
    line = f"model = model.to(memory_format=torch.{layout})"
    return Setup(model=(line,)) if value else Setup()


def _threads(value: Value, context: ConfigContext) -> Setup:
    changed = value != context.default.get("threads")
    return Setup(flags=(f"torch.set_num_threads({value})",)) if changed else Setup()


_DETERMINISTIC = (
    'os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")',
    "torch.use_deterministic_algorithms(True)",
    "torch.backends.cudnn.deterministic = True",
)
_SCRIPT: Mapping[str, Row] = {
    "channels_last": _channels_last,
    "cudnn_benchmark": _row(False, flags=lambda _on: ("torch.backends.cudnn.benchmark = True",)),
    "cudnn_deterministic": _row(False, flags=lambda _on: _DETERMINISTIC),
    "fused_optimizer": _row(False, optimizer=lambda on: {"fused": on}),
    "threads": _threads,
    "num_workers": _argument("num_workers", None, 0),
    "prefetch_factor": _argument("prefetch_factor", None, 2),
    "in_order": _argument("in_order", None, True),
    "sharing": _row(
        "file_descriptor",
        flags=lambda how: (f"torch.multiprocessing.set_sharing_strategy({how!r})",),
    ),
    "persistent_workers": _argument("persistent_workers", None, False),
    "pin_memory": _argument("pin_memory", None, False),
}
"""Rows of a framework that leaves these knobs to the script."""


def _by_accelerate(mode: str) -> Setup:
    if mode in ("cudagraphs", "default"):
        return Setup(settings={"dynamo_backend": mode.replace("default", "inductor")})
    how = {"backend": "inductor", "mode": mode}
    return Setup(
        settings={"dynamo_plugin": LazyObject("accelerate.utils", "TorchDynamoPlugin", how)}
    )


accelerate = Framework(
    title="accelerate.Accelerator",
    call="Accelerator(**arguments)",
    rows={
        **_SCRIPT,
        "precision": _precision(
            {name: {"mixed_precision": name} for name in ("bf16", "fp16")}, sets_tf32=True
        ),
        BATCH: _batch("gradient_accumulation_steps"),
        "compile": _compile(_by_accelerate),
    },
    devices={"cuda": {}, "cpu": {"cpu": True}},
)


def _by_hf(mode: str) -> Setup:
    name = "torch_compile_backend" if mode == "cudagraphs" else "torch_compile_mode"
    return Setup(settings={"torch_compile": True, name: mode})


def _hf_optimizer(value: Value, context: ConfigContext) -> Setup | None:
    if context.task.optimizer != "adamw":  # the optimizer is the user's own
        return _SCRIPT["fused_optimizer"](value, context)
    return Setup(settings={"optim": "adamw_torch_fused" if value else "adamw_torch"})


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
        "compile": _compile(_by_hf),
        "num_workers": _setting("dataloader_num_workers"),
        "prefetch_factor": _setting("dataloader_prefetch_factor", 2),
        "in_order": only(True),
        "persistent_workers": _setting("dataloader_persistent_workers", None, False),
        "pin_memory": _row(settings=lambda on: {"dataloader_pin_memory": bool(on)}),
    },
    devices={"cuda": {}, "cpu": {"use_cpu": True}},
    makes_loader=True,
)


class _Lightning(Framework):
    def callback(self, target: Any = None, **asked: Any) -> AdvisorCallback:
        """Return a callback that also sets the model's memory format and compiles it.

            advised = advisor.lightning.callback("model.py:Net", shape=(64, 3, 256, 256))
            trainer = Trainer(callbacks=[advised], **advised.arguments)

        Takes the same as `arguments`. The callback finds the tuned module in the LightningModule by
        its fingerprint. If there is none, it warns once with AdvisorWarning.

        Raises:
            UsageError: lightning is not installed.
        """
        with installed():
            from advisor.frameworks.lightning_callback import AdvisorCallback
        return AdvisorCallback(*self._advised(target, asked, on_model=True))


def _by_lightning(mode: str) -> Setup:
    name = "backend" if mode == "cudagraphs" else "mode"
    return Setup(model=(f'model.compile({name}="{mode}")',))


lightning = _Lightning(
    title="lightning.Trainer",
    call="Trainer(**arguments)",
    rows={
        **_SCRIPT,
        "precision": _precision(
            {"bf16": {"precision": "bf16-mixed"}, "fp16": {"precision": "16-mixed"}}
        ),
        "cudnn_benchmark": _setting("benchmark", None, False),
        "cudnn_deterministic": _row(
            False, settings=lambda on: {"deterministic": on}, flags=lambda _on: _DETERMINISTIC
        ),
        BATCH: _batch("accumulate_grad_batches"),
        "compile": _compile(_by_lightning),
    },
    devices={"cuda": {"accelerator": "gpu"}, "cpu": {"accelerator": "cpu"}},
)


def _timm_precision(value: Value, _context: ConfigContext) -> Setup | None:
    if half := {"bf16": "bfloat16", "fp16": "float16"}.get(str(value)):
        return Setup(settings={"amp": True, "amp_dtype": half})
    return None if value in ("fp32", "fp8") else Setup()


def _timm_channels_last(value: Value, context: ConfigContext) -> Setup | None:
    if value and len(context.task.sample) != 3:
        return None
    return Setup(settings={"channels_last": True} if value else {})


def _by_timm(mode: str) -> Setup:
    if mode == "cudagraphs":
        return Setup(settings={"torchcompile": mode})
    return Setup(settings={"torchcompile": "inductor", "torchcompile_mode": mode})


def _of_timm(context: ConfigContext, setup: Setup) -> list[str]:
    if context.device != "cuda":
        return []
    faults = avoiding(context.torch) if "torchcompile_mode" in setup.settings else ()
    lines = [f"compiles with {name}, known to be wrong in torch {context.torch}" for name in faults]
    if not context.config.get("cudnn_benchmark"):
        lines.append("sets cudnn.benchmark to True")
    if context.config.get("precision") == "default":
        lines.append("switches TF32 on for matrix products")
    return [f"{line}; the record was measured without it" for line in lines]


timm = Framework(
    title="timm's train.py",
    call="",
    rows={
        "precision": _timm_precision,
        "channels_last": _timm_channels_last,
        "cudnn_benchmark": only(False, True),
        "cudnn_deterministic": only(False),
        BATCH: _batch("grad_accum_steps", "batch_size"),
        "fused_optimizer": _row(False, settings=lambda on: {"opt_kwargs": {"fused": on}}),
        "compile": _compile(_by_timm, avoids=False),
        "num_workers": _setting("workers"),
        "in_order": only(True),
        "sharing": only("file_descriptor"),
        "pin_memory": _setting("pin_mem", None, False),
    },
    devices={"cuda": {"device": "cuda"}, "cpu": {"device": "cpu"}},
    notes=_of_timm,
    makes_loader=True,
)
