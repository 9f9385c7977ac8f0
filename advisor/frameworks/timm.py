"""timm: the YAML file that its train.py takes with -c; the script stays unmodified."""

from __future__ import annotations

import json

from advisor.cache.config import BATCH, Value
from advisor.frameworks import rows
from advisor.frameworks.words import NOTHING, Framework, Scene, Words
from advisor.tuners.compiling import avoiding

_AMP = {"bf16": "bfloat16", "fp16": "float16"}


def _precision(value: Value, _scene: Scene) -> Words | None:
    if value in _AMP:
        return Words(settings={"amp": True, "amp_dtype": _AMP[str(value)]})
    return None if value == "fp32" else NOTHING


def _channels_last(value: Value, scene: Scene) -> Words | None:
    if not value:
        return NOTHING
    return Words(settings={"channels_last": True}) if len(scene.task.sample) == 3 else None


def _compile(value: Value, _scene: Scene) -> Words | None:
    if value == "blocks":
        return None
    if value == "none":
        return NOTHING
    if value == "cudagraphs":
        return Words(settings={"torchcompile": value})
    return Words(settings={"torchcompile": "inductor", "torchcompile_mode": value})


def _fused_optimizer(value: Value, _scene: Scene) -> Words:
    return Words(settings={"opt_kwargs": {"fused": True}}) if value else NOTHING


def _threads(value: Value, scene: Scene) -> Words | None:
    return NOTHING if value == scene.default.get("threads") else None


def _itself(scene: Scene, words: Words) -> list[str]:
    if scene.device != "cuda":
        return []
    said = ["copies batches on a stream of its own, unless no_prefetcher"]
    if "torchcompile_mode" in words.settings:
        said += [
            f"compiles with {option}, known to be wrong in torch {scene.torch}; this was measured "
            "without"
            for option in avoiding(scene.torch)
        ]
    for name, what in (
        ("cudnn_benchmark", "sets cudnn.benchmark to True"),
        ("precision", "switches TF32 on for matrix products"),
    ):
        without = scene.config.get(name) in (False, "default")
        said.append(f"{what}{'; this was measured without' if without else ''}")
    return said


def _write(words: Words) -> str:
    # A line of JSON is a line of YAML.
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in words.settings.items()]
    return "# python train.py -c advised.yaml DATA\n" + "".join(lines)


FRAMEWORK = Framework(
    title="timm's train.py",
    rows={
        "precision": _precision,
        "channels_last": _channels_last,
        "cudnn_benchmark": rows.only(False, True),
        "cudnn_deterministic": rows.only(False),
        BATCH: rows.batch("grad_accum_steps", "batch_size"),
        "fused_optimizer": _fused_optimizer,
        "compile": _compile,
        "threads": _threads,
        "num_workers": rows.setting("workers"),
        "in_order": rows.only(True),
        "sharing": rows.only("file_descriptor"),
        "pin_memory": rows.setting("pin_mem", None, False),
    },
    devices={"cuda": {"device": "cuda"}, "cpu": {"device": "cpu"}},
    itself=_itself,
    write=_write,
    loads=True,
)
