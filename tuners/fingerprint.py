"""What a model is, without its weights: the part of a key that says 'the same model'."""

from __future__ import annotations

import re

from torch import nn

from advisor.cache.key import fingerprint

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def of_model(model: nn.Module) -> str:
    """Digest of the module tree, class names, hyperparameters, and parameter and buffer types.

    Weights do not count, nor does the file a class comes from: the same class in a training
    script and in the tuned file gives the same digest.
    """
    model = unwrapped(model)
    modules = [
        # extra_repr() is where a module states its hyperparameters; addresses differ by run.
        [name, type(module).__qualname__, _ADDRESS.sub("0x", module.extra_repr())]
        for name, module in model.named_modules()
    ]
    tensors = [
        [name, list(tensor.shape), str(tensor.dtype)]
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
    ]
    return fingerprint([modules, tensors])


def family(model: nn.Module) -> str:
    """12 hex characters over the kinds of modules that a model is built of: ResNet-18's and
    ResNet-50's are the same."""
    model = unwrapped(model)
    leaves = {type(m).__qualname__ for m in model.modules() if not any(True for _ in m.children())}
    return fingerprint([type(model).__qualname__, sorted(leaves)])[:12]


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile and (Distributed)DataParallel wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(
            model, nn.DataParallel | nn.parallel.DistributedDataParallel
        ):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def size(model: nn.Module) -> tuple[int, int]:
    """(modules, parameters): enough to tell a person how a model has changed."""
    model = unwrapped(model)
    return (
        sum(1 for _ in model.modules()),
        sum(parameter.numel() for parameter in model.parameters()),
    )
