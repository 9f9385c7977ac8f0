"""Every way to save memory, set by hand in a plain loop under a limit of GPU memory.

    python by_hand.py gpt2-medium 24 --results by_hand.jsonl

24 is in GiB; 0: no limit, and nothing saves memory.

Uses nothing of advisor: torch.utils.checkpoint for one block in 1, 2 or 4, PyTorch's save_on_cpu,
bf16 autocast, torch.compile, fused AdamW, and channels_last with cudnn.benchmark for images.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

GIB = 2**30
WARM, TIMED = 4, 6
# (one of how many blocks is checkpointed, what is compiled, save_on_cpu, bf16)
EAGER, WHOLE, UNMODIFIED = (0, "", False, True), (0, "model", False, True), (0, "", False, False)
WAYS = [
    EAGER,
    WHOLE,
    *((every, "blocks", False, True) for every in (0, 4, 2, 1)),
    *((every, "", False, True) for every in (4, 2, 1)),
    (1, "", True, True),
    (1, "", False, False),
]


def gpt2(
    layers: int, width: int, heads: int
) -> tuple[nn.Module, nn.ModuleList, Callable[..., Any]]:
    import transformers

    config = transformers.GPT2Config(n_layer=layers, n_embd=width, n_head=heads)
    model = transformers.GPT2LMHeadModel(config).cuda().train()
    tokens = torch.randint(0, config.vocab_size, (8, 1024), device="cuda")
    return model, model.transformer.h, lambda: model(input_ids=tokens, labels=tokens).loss


def images(made: Callable[[], nn.Module], blocks: str, batch: int) -> Any:
    torch.backends.cudnn.benchmark = True
    model = made().cuda().train().to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (batch,), device="cuda")
    found = [one for name in blocks.split(",") for one in getattr(model, name)]
    return model, found, lambda: nn.functional.cross_entropy(model(x).float(), y)


def timm_model(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=10)


def resnet152() -> nn.Module:
    import torchvision

    return torchvision.models.resnet152(num_classes=10)


def unet3d() -> Any:
    from monai.losses import DiceCELoss
    from monai.networks.nets import BasicUNet

    model = BasicUNet(spatial_dims=3, in_channels=1, out_channels=2).cuda().train()
    x = torch.rand(8, 1, 160, 160, 160, device="cuda")
    y = (x > 0.9).long()
    loss_of = DiceCELoss(to_onehot_y=True, softmax=True)
    return model, list(model.children()), lambda: loss_of(model(x), y)


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2-medium": partial(gpt2, 24, 1024, 16),
    "gpt2-large": partial(gpt2, 36, 1280, 20),
    "vit-l": partial(images, partial(timm_model, "vit_large_patch16_224"), "blocks", 128),
    "resnet152": partial(images, resnet152, "layer1,layer2,layer3,layer4", 512),
    "unet3d": unet3d,
}


def measure(name: str, every: int, compiled: str, offload: bool, half: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, blocks, loss_of = MODELS[name]()
    for block in blocks if compiled == "blocks" else ():
        block.compile()
    for block in list(blocks)[::every] if every else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if compiled == "model":
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    kept = partial(save_on_cpu, pin_memory=True) if offload else contextlib.nullcontext
    times = []
    for step in range(WARM + TIMED):
        if step == WARM:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        with kept(), torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / GIB
    timed = sorted(times[WARM:])
    return {"step_s": round(timed[len(timed) // 2], 5), "peak_gib": round(peak, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("gib", type=float)
    parser.add_argument("--results", type=Path, default=Path("by_hand.jsonl"))
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for everything")
    args = parser.parse_args()
    total = torch.cuda.get_device_properties(0).total_memory
    ways = WAYS if args.gib else [UNMODIFIED, EAGER, WHOLE]
    if args.gib:
        torch.cuda.set_per_process_memory_fraction(args.gib * GIB / total)
    end = time.monotonic() + args.limit
    for every, compiled, offload, half in ways:
        line: dict[str, Any] = {"model": args.model, "gib": args.gib, "every": every}
        line |= {"compiled": compiled, "save_on_cpu": offload, "bf16": half}
        try:
            if time.monotonic() < end:
                line |= measure(args.model, every, compiled, offload, half)
            else:
                line["left_out"] = "no time is left"
        except torch.OutOfMemoryError:
            line["out_of_memory"] = True
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        with args.results.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
