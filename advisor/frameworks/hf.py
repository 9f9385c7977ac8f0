"""transformers: TrainingArguments of its Trainer."""

from __future__ import annotations

from typing import Any

from advisor.cache.config import BATCH, Value
from advisor.frameworks import python, rows
from advisor.frameworks.words import NOTHING, Framework, Scene, Words


def arguments(target: Any = None, **asked: Any) -> dict[str, Any]:
    """Keyword arguments for TrainingArguments, and the process-wide switches set.

        args = TrainingArguments(output_dir="out", **advisor.hf.arguments("model.py:Net"))

    The config is the best that was measured of those that they can express whole. Takes what
    `advisor.lookup` takes, but `capture`; as there, nothing breaks a run: without a fitting record
    they are none, and one AdvisorWarning says why. With `batch="free"` the batch that was asked
    for is kept by gradient accumulation.
    """
    from advisor.frameworks.following import arguments

    return arguments(FRAMEWORK, target, asked)


def _precision(value: Value, scene: Scene) -> Words:
    """The line above `tf32` is said too: that setting alone changes torch's new switches, and where
    the old ones say otherwise whoever reads them is refused (`tuners.tf32`)."""
    half = Words(settings={str(value): True}) if value in ("bf16", "fp16") else NOTHING
    if scene.device != "cuda" or (value == "default" and not rows.compiled(scene)):
        return half
    told = Words(settings={"tf32": value not in ("default", "fp32")})
    return half + told + rows.float32(value) + rows.tf32_put_back(value, scene)


def _compile(value: Value, scene: Scene) -> Words | None:
    if value == "blocks":
        return None
    if value == "none":
        return NOTHING
    if value == "cudagraphs":
        return Words(settings={"torch_compile": True, "torch_compile_backend": value})
    said = Words(settings={"torch_compile": True, "torch_compile_mode": value})
    return said + rows.compiled_right(scene)


def _fused_optimizer(value: Value, scene: Scene) -> Words:
    if scene.task.optimizer != "adamw":  # optim_args knows no fused: an optimizer of the user's
        return rows.fused_optimizer(value, scene)
    return Words(settings={"optim": "adamw_torch_fused" if value else "adamw_torch"})


def _itself(scene: Scene, words: Words) -> list[str]:
    said = []
    if scene.device == "cuda" and rows.compiled(scene):
        said.append("switches TF32 on where torch_compile is set and tf32 and fp16 are not")
    if scene.device == "cuda" and words.after:
        said.append("switches TF32 on as its Trainer is made, where it compiles in float32")
    if "optim" not in words.settings:
        said.append("trains with optim='adamw_torch_fused' where optim is not set")
    if "dataloader_pin_memory" not in words.settings:
        said.append("pins memory where dataloader_pin_memory is not set to False")
    return said


FRAMEWORK = Framework(
    title="transformers.TrainingArguments",
    rows={
        **rows.SCRIPT,
        "precision": _precision,
        BATCH: rows.batch("gradient_accumulation_steps", "per_device_train_batch_size"),
        "fused_optimizer": _fused_optimizer,
        "compile": _compile,
        "num_workers": rows.setting("dataloader_num_workers"),
        "prefetch_factor": rows.setting("dataloader_prefetch_factor", 2),
        "in_order": rows.only(True),
        "persistent_workers": rows.setting("dataloader_persistent_workers", None, False),
        "pin_memory": lambda value, _scene: Words(settings={"dataloader_pin_memory": bool(value)}),
    },
    devices={"cuda": {}, "cpu": {"use_cpu": True}},
    itself=_itself,
    write=python.writer('TrainingArguments(output_dir="out", **arguments)'),
    loads=True,
)
