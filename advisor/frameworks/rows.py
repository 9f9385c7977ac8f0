"""Rows of any framework that leaves the script to its user: plain PyTorch beside its settings.

The lines do what the knob's own row does when it acts (`tuners.knobs`); the tests hold one against
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from advisor.cache.config import Value
from advisor.frameworks.words import NOTHING, Row, Scene, Words
from advisor.tuners.compiling import avoiding

_SWITCHES = ("torch.backends.cuda.matmul.allow_tf32", "torch.backends.cudnn.allow_tf32")


def precision(value: Value, scene: Scene) -> Words:
    """float32's switches, where they are not torch's own."""
    return NOTHING if scene.device != "cuda" or value == "default" else float32(value)


def float32(value: Value) -> Words:
    """float32's switches; half precision runs over TF32 for what it leaves in float32."""
    matmul, cudnn = {"default": (False, True), "fp32": (False, False)}.get(str(value), (True, True))
    return Words(flags=(f"{_SWITCHES[0]} = {matmul}", f"{_SWITCHES[1]} = {cudnn}"))


def tf32_put_back(value: Value, scene: Scene) -> Words:
    """Against a framework that switches TF32 on as it compiles, where it was measured without."""
    on = scene.device == "cuda" and compiled(scene) and value in ("default", "fp32")
    return Words(after=(f"{_SWITCHES[0]} = False",)) if on else NOTHING


def compiled(scene: Scene) -> bool:
    return scene.config.get("compile", "none") != "none"


def compiled_right(scene: Scene) -> Words:
    """Inductor's options that avoid what is known to be wrong in the torch of the measurement."""
    options = avoiding(scene.torch).items()
    return Words(flags=tuple(f"torch._inductor.config.{name} = {it}" for name, it in options))


def channels_last(value: Value, scene: Scene) -> Words:
    """The weights alone: the first layer lays its input out as they are."""
    if not value:
        return NOTHING
    layout = "channels_last_3d" if len(scene.task.sample) == 4 else "channels_last"
    return Words(model=(f"model = model.to(memory_format=torch.{layout})",))


def cudnn_benchmark(value: Value, _scene: Scene) -> Words:
    return Words(flags=("torch.backends.cudnn.benchmark = True",)) if value else NOTHING


def cudnn_deterministic(value: Value, _scene: Scene) -> Words:
    if not value:
        return NOTHING
    return Words(
        flags=(
            'os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")',
            "torch.use_deterministic_algorithms(True)",
            "torch.backends.cudnn.deterministic = True",
        )
    )


def threads(value: Value, scene: Scene) -> Words:
    if value == scene.default.get("threads"):
        return NOTHING
    return Words(flags=(f"torch.set_num_threads({value})",))


def compile_in_place(value: Value, scene: Scene) -> Words | None:
    if value == "blocks":
        return None
    if value == "none":
        return NOTHING
    if value == "cudagraphs":
        return Words(model=('model.compile(backend="cudagraphs")',))
    return Words(model=(f'model.compile(mode="{value}")',)) + compiled_right(scene)


def fused_optimizer(value: Value, _scene: Scene) -> Words:
    return Words(optimizer={"fused": True}) if value else NOTHING


def sharing(value: Value, _scene: Scene) -> Words:
    if value == "file_descriptor":
        return NOTHING
    return Words(flags=(f"torch.multiprocessing.set_sharing_strategy({value!r})",))


def setting(name: str, *silent: Value) -> Row:
    """Of a knob whose value is the framework's setting `name`, unless it is one of `silent`."""
    return lambda value, _scene: NOTHING if value in silent else Words(settings={name: value})


def _argument(name: str, *silent: Value) -> Row:
    """The same for an argument of the user's DataLoader."""
    return lambda value, _scene: NOTHING if value in silent else Words(loader={name: value})


def only(*sound: Value) -> Row:
    """Of a knob that a framework has no word for: these values are what it does anyway."""
    return lambda value, _scene: NOTHING if value in sound else None


def batch(accumulation: str, size: str = "") -> Callable[[Value, Scene], Words | None]:
    """The settings for the batch and for the number of batches that make one of the user's.

    Args:
        accumulation: the setting that takes that number.
        size: the one that takes the batch; '' where the DataLoader is the user's.
    """

    def row(_value: Value, scene: Scene) -> Words | None:
        if not scene.parts:
            return None
        if not scene.size:
            return NOTHING  # the run has its own, which what was seen does not tell
        parts = {accumulation: scene.accumulated} if scene.accumulated > 1 else {}
        if size:
            return Words(settings={size: scene.size, **parts})
        return Words(settings=parts, loader={"batch_size": scene.size})

    return row


LOADER: Mapping[str, Row] = {
    "num_workers": _argument("num_workers", None, 0),
    "prefetch_factor": _argument("prefetch_factor", None, 2),
    "in_order": _argument("in_order", None, True),
    "sharing": sharing,
    "persistent_workers": _argument("persistent_workers", None, False),
    "pin_memory": _argument("pin_memory", None, False),
}
"""Of the user's own DataLoader."""
SCRIPT: Mapping[str, Row] = {
    "channels_last": channels_last,
    "cudnn_benchmark": cudnn_benchmark,
    "cudnn_deterministic": cudnn_deterministic,
    "fused_optimizer": fused_optimizer,
    "threads": threads,
    **LOADER,
}
"""Of a framework that leaves all of these to the script."""
