"""torchtitan 0.3: its configs are Python, a function that returns a Trainer.Config."""

from __future__ import annotations

from advisor.cache.config import BATCH, Value
from advisor.frameworks import python, rows
from advisor.frameworks.words import NOTHING, Framework, Scene, Words


def _precision(value: Value, scene: Scene) -> Words | None:
    if value == "fp16":
        return None
    dtype = "bfloat16" if value == "bf16" else "float32"
    said = Words(settings={"training.mixed_precision_param": dtype})
    return said + rows.precision(value, scene)


def _cudnn_deterministic(value: Value, _scene: Scene) -> Words:
    return Words(settings={"debug.deterministic": True}) if value else NOTHING


def _batch(_value: Value, scene: Scene) -> Words | None:
    """Of samples that are one row of tokens."""
    if len(scene.task.sample) != 1 or not scene.parts:
        return None
    told: dict[str, object] = {"training.seq_len": scene.task.sample[0]}
    if scene.size:
        told["training.local_batch_size"] = scene.size
        if scene.accumulated > 1:
            told["training.global_batch_size"] = scene.accumulated * scene.size
    return Words(settings=told)


def _fused_optimizer(value: Value, _scene: Scene) -> Words:
    return Words(settings={"optimizer.implementation": "fused" if value else "foreach"})


def _compile(value: Value, scene: Scene) -> Words | None:
    # It compiles block by block, whatever it is told.
    backends = {"default": "inductor", "blocks": "inductor", "cudagraphs": "cudagraphs"}
    backend = backends.get(str(value))
    if backend is None:
        return NOTHING if value == "none" else None
    said = Words(
        settings={
            "compile.enable": True,
            "compile.components": ["model"],
            "compile.backend": backend,
        }
    )
    return said + rows.compiled_right(scene) if backend == "inductor" else said


def _itself(scene: Scene, words: Words) -> list[str]:
    said = ["replays forward and backward as a CUDA graph, unless training.disable_cuda_graphs"]
    if rows.compiled(scene) and scene.config["compile"] != "blocks":
        said.append("compiles block by block, not the model as one")
    if "training.global_batch_size" in words.settings:
        said.append("counts global_batch_size over all ranks; this is of one")
    return said


def _write(words: Words) -> str:
    lines = [f"    config.{name} = {python.literal(v)}\n" for name, v in words.settings.items()]
    head = python.imports(words) + "".join(f"{line}\n" for line in words.flags)
    function = ["def advised(config):\n", *lines, "    return config\n"]
    use = "\n\n# Return advised(config) from the function that --config names.\n"
    return head + ("\n\n" if head else "") + "".join(function) + use


FRAMEWORK = Framework(
    title="torchtitan's Trainer.Config",
    rows={
        "precision": _precision,
        "channels_last": rows.only(False),
        "cudnn_benchmark": rows.cudnn_benchmark,
        "cudnn_deterministic": _cudnn_deterministic,
        BATCH: _batch,
        "fused_optimizer": _fused_optimizer,
        "compile": _compile,
        "pin_memory": rows.only(False),
    },
    devices={"cuda": {}},
    itself=_itself,
    write=_write,
    loads=True,
)
