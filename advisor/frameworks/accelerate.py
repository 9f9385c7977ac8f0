"""Accelerate: arguments of its Accelerator."""

from __future__ import annotations

from typing import Any

from advisor.cache.config import BATCH, Value
from advisor.frameworks import python, rows
from advisor.frameworks.words import NOTHING, Framework, Made, Scene, Words


def arguments(target: Any = None, **asked: Any) -> dict[str, Any]:
    """Keyword arguments for Accelerator, and the process-wide switches set.

        accelerator = Accelerator(**advisor.accelerate.arguments("model.py:Net"))

    The config is the best that was measured of those that they can express whole. Takes what
    `advisor.lookup` takes, but `capture` and `batch="free"`, as the loader is the script's own;
    without a fitting record they are none, and one AdvisorWarning says why.

    Raises:
        UsageError: accelerate is not installed.
    """
    from advisor.frameworks.following import arguments

    return arguments(FRAMEWORK, target, asked)


def _precision(value: Value, scene: Scene) -> Words:
    said = Words(settings={"mixed_precision": value}) if value in ("bf16", "fp16") else NOTHING
    return said + rows.precision(value, scene) + rows.tf32_put_back(value, scene)


def _compile(value: Value, scene: Scene) -> Words | None:
    if value == "blocks":
        return None  # its own regional compilation compiles the rest in pieces, too
    if value == "none":
        return NOTHING
    if value == "cudagraphs":
        return Words(settings={"dynamo_backend": value})
    right = rows.compiled_right(scene)
    if value == "default":
        return Words(settings={"dynamo_backend": "inductor"}) + right
    plugin = Made(
        module="accelerate.utils",
        name="TorchDynamoPlugin",
        keywords={"backend": "inductor", "mode": value},
    )
    return Words(settings={"dynamo_plugin": plugin}) + right


def _itself(scene: Scene, words: Words) -> list[str]:
    if scene.device != "cuda" or not rows.compiled(scene) or "mixed_precision" in words.settings:
        return []
    return ["switches TF32 on as the Accelerator is made, where it compiles in float32"]


FRAMEWORK = Framework(
    title="accelerate.Accelerator",
    rows={
        **rows.SCRIPT,
        "precision": _precision,
        BATCH: rows.batch("gradient_accumulation_steps"),
        "compile": _compile,
    },
    devices={"cuda": {}, "cpu": {"cpu": True}},
    itself=_itself,
    write=python.writer("Accelerator(**arguments)"),
)
