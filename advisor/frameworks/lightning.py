"""Lightning: arguments of its Trainer, and a callback for what they have no word for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from advisor.cache.config import BATCH, Value
from advisor.frameworks import python, rows
from advisor.frameworks.words import NOTHING, Framework, Scene, Words

if TYPE_CHECKING:
    from advisor.frameworks.lightning_callback import AdvisorCallback


def arguments(target: Any = None, **asked: Any) -> dict[str, Any]:
    """Keyword arguments for Trainer, and the process-wide switches set.

        trainer = Trainer(max_epochs=3, **advisor.lightning.arguments("model.py:Net"))

    The config is the best that was measured of those that they can express whole; `callback` can
    follow more. Takes what `advisor.lookup` takes, but `capture` and `batch="free"`, as the
    loader is the script's own; without a fitting record they are none, and one AdvisorWarning says
    why.
    """
    from advisor.frameworks.following import arguments

    return arguments(FRAMEWORK, target, asked)


def callback(target: Any = None, **asked: Any) -> AdvisorCallback:
    """A callback that lays out and compiles the model too, before training begins.

        advised = advisor.lightning.callback("model.py:Net", shape=(64, 3, 256, 256))
        trainer = Trainer(callbacks=[advised], **advised.arguments)

    Takes what `arguments` takes. In the LightningModule the module that was tuned is looked for,
    by its fingerprint; one AdvisorWarning says where none is.

    Raises:
        UsageError: lightning is not installed.
    """
    from advisor.errors import UsageError
    from advisor.frameworks.following import advised

    try:
        from advisor.frameworks.lightning_callback import AdvisorCallback
    except ModuleNotFoundError as exc:
        raise UsageError(
            f"{exc.name} is not installed; run: pip install 'advisor[lightning]'"
        ) from exc
    advice, settings = advised(FRAMEWORK, target, asked, on_model=True)
    return AdvisorCallback(advice, settings)


def _precision(value: Value, scene: Scene) -> Words:
    named = {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(str(value))
    said = Words(settings={"precision": named}) if named else NOTHING
    return said + rows.precision(value, scene)


def _cudnn_deterministic(value: Value, scene: Scene) -> Words:
    if not value:
        return NOTHING
    return Words(settings={"deterministic": True}) + rows.cudnn_deterministic(value, scene)


def _itself(_scene: Scene, words: Words) -> list[str]:
    return ["sets cudnn.benchmark to False"] if "deterministic" in words.settings else []


FRAMEWORK = Framework(
    title="lightning.Trainer",
    rows={
        **rows.SCRIPT,
        "precision": _precision,
        "cudnn_benchmark": rows.setting("benchmark", None, False),
        "cudnn_deterministic": _cudnn_deterministic,
        BATCH: rows.batch("accumulate_grad_batches"),
        "compile": rows.compile_in_place,
    },
    devices={"cuda": {"accelerator": "gpu"}, "cpu": {"accelerator": "cpu"}},
    itself=_itself,
    write=python.writer("Trainer(**arguments)"),
)
