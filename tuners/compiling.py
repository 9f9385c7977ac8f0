"""Calls torch.compile on a model or its repeated blocks, and avoids known faults of Inductor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from advisor.tuners.torch_facts import torch

BLOCKS = "blocks"
"""Mode "default" for each block that a model repeats: one compilation for all of them
(https://docs.pytorch.org/tutorials/recipes/regional_compilation.html)."""
MIN_BLOCKS = 4
"""Least number of equal blocks in one container that count as repeated."""

# Inductor computes wrong gradients, which a comparison of a few batches of one shape may miss.
# LayerNorms whose scales and shifts are parts of one parameter get no gradients, until 2.15.0:
# https://github.com/pytorch/pytorch/issues/193061, fixed by pull request 193103.
# In 2.10 also, in bf16, the bias of a convolution whose output gets a broadcast per-channel
# addition: https://github.com/pytorch/pytorch/issues/190796.
_SINCE, _MENDED = "2.10.dev0", "2.15"
_OPTIONS = {"triton.mix_order_reduction": False}
# Compiled code then draws the same random numbers as eager code. Otherwise the gradients of
# EfficientNetV2-S, which skips blocks at random, need 1,464 draws to be known within 10%.
_SAME_DRAWS = {"fallback_random": True}


def compile_in_place(model: torch.nn.Module, mode: str, **how: Any) -> None:
    """Compile a model in place, replacing an earlier compilation. `mode`: a mode of torch.compile,
    the backend 'cudagraphs', or BLOCKS. `how`: more arguments of torch.compile."""
    _compile_whole_under_ddp()
    if mode == "cudagraphs":
        _compile(model, backend="cudagraphs")
    elif mode == BLOCKS:
        for block in repeated(model):
            _compile(block, **_by_inductor("default"))
    else:
        _compile(model, **_by_inductor(mode), **how)


def _compile(model: torch.nn.Module, **how: Any) -> None:
    # Not torch.compile(model): it changes the names in state_dict(). Not model.compile(): timm's
    # task overrides it, and torch 2.11 compiles no forward() of its own, such as nn.Sequential's.
    call: Callable[..., Any] = model._call_impl
    if hasattr(model, "set_modules_to_forward_prefetch"):  # FSDP2: its hooks are not compiled
        found = _around(model, torch.compile(model.forward, **how))
    elif str(getattr(type(model).forward, "__module__", "")).startswith("torch.nn."):
        found = torch.compile(lambda *args, **kw: call(*args, **kw), **how)
    else:
        found = torch.compile(call, **how)
    vars(model)["_compiled_call_impl"] = found  # a wrapper's own __setattr__ may set it elsewhere


def _around(model: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A module's call, with its hooks, around another `forward`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        vars(model)["forward"] = forward
        try:
            return model._call_impl(*args, **kwargs)
        finally:
            vars(model).pop("forward", None)

    return call


def _by_inductor(mode: str) -> dict[str, Any]:
    """Arguments of torch.compile: a mode as options, because it takes only one of the two."""
    return {"options": torch._inductor.list_mode_options(mode) | avoided() | _SAME_DRAWS}


def avoiding(version: str) -> dict[str, bool]:
    """Inductor's options that avoid the faults of a torch release or pre-release."""
    found = torch.torch_version.TorchVersion(version)
    return dict(_OPTIONS) if _SINCE <= found < _MENDED else {}


def avoided() -> dict[str, bool]:
    """`avoiding` for the loaded torch, without options that its Inductor does not know."""
    wanted = avoiding(torch.__version__)
    known = torch._inductor.list_options() if wanted else []
    return {name: value for name, value in wanted.items() if name in known}


def apply_workarounds() -> None:
    """Set these options for the whole process, because a framework may call torch.compile."""
    _compile_whole_under_ddp()
    for name, value in (avoided() | _SAME_DRAWS).items():
        setattr(torch._inductor.config, name, value)


def _compile_whole_under_ddp() -> None:
    """Split no model into DDP's buckets: with CUDA graphs GPT-2's gradients were wrong (torch 2.11;
    benchmarks/results/ranks.md), and compiling took three times as long."""
    torch._dynamo.config.optimize_ddp = False


def repeated(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost repeated modules; none if they are less than half of the model's modules."""
    found = list(_repeated(model))
    within = sum(1 for block in found for _ in block.modules())
    return found if 2 * within >= sum(1 for _ in model.modules()) else []


def _repeated(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    kinds: dict[Hashable, list[torch.nn.Module]] = defaultdict(list)
    if isinstance(module, torch.nn.Sequential | torch.nn.ModuleList | torch.nn.ModuleDict):
        for block in module.children():
            if any(True for _ in block.children()):  # single layers fuse nothing
                kinds[_kind(block)].append(block)
    alike = [block for blocks in kinds.values() if len(blocks) >= MIN_BLOCKS for block in blocks]
    yield from alike
    for child in module.children():
        if child not in alike:
            yield from _repeated(child)


def _kind(block: torch.nn.Module) -> Hashable:
    """What torch.compile guards on: the code, and float attributes such as rates of stochastic
    depth. Integers are left out: a layer's index is mostly read in inference only."""
    from advisor.tuners.fingerprint import of_model  # here: a server needs no parsers

    held = (value for module in block.modules() for value in vars(module).values())
    return of_model(block), tuple(value for value in held if type(value) is float)
