"""Matrix products of large linear layers in fp8 (docs.pytorch.org/ao/stable/workflows/training)."""

from __future__ import annotations

import importlib.util

from advisor.tuners.torch_facts import torch

MIN_FEATURES = 2048  # features from which a layer gains more than casting costs (torchao's tables)
MULTIPLE = 16  # of features, which the matrix units need
CAPABILITY = (8, 9)
CAVEAT = (
    "fp8 was compared with fp32 on a few batches only. A long run may converge worse in "
    "fp8: compare its loss with that of a bf16 run, and go back to bf16 if they diverge."
)


def installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def lacking(capability: tuple[int, int], wide: int) -> str:
    """Why fp8 is not tried for a model with `wide` large linear layers; '' if it is."""
    if capability < CAPABILITY:
        return "it needs a GPU of compute capability 8.9 or more"
    if not installed():
        return "torchao is not installed: pip install 'torch-advisor[torchao]'"
    if not wide:
        sizes = f"{MIN_FEATURES} features or more on both sides, in multiples of {MULTIPLE}"
        return f"no linear layer has {sizes}"
    return ""


def gains(layer: torch.nn.Module) -> bool:
    """Whether fp8 may make a layer faster."""
    if type(layer) is not torch.nn.Linear:  # a subclass may use its weights otherwise
        return False
    sizes = (layer.in_features, layer.out_features)
    return min(sizes) >= MIN_FEATURES and not any(size % MULTIPLE for size in sizes)


def convert(model: torch.nn.Module) -> torch.nn.Module:
    """Convert a model's large linear layers to fp8 in place; names and parameters stay. Without
    CUDA, fp8 is emulated, for tests."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    device = next(model.parameters()).device
    # Padded, because the number of rows of a batch may be no multiple of 16.
    how = Float8LinearConfig(pad_inner_dim=True, emulate=device.type != "cuda")
    converted: torch.nn.Module = convert_to_float8_training(
        model, config=how, module_filter_fn=lambda layer, _name: gains(layer)
    )
    return converted
