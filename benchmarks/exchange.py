"""What each setting of DistributedDataParallel and FSDP2 gains, by hand and in turn.

    torchrun --nproc-per-node 2 benchmarks/exchange.py gpt2 > exchange.jsonl
    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 benchmarks/exchange.py gpt2 llama

gpt2 and gpt2-medium: 124M and 350M parameters under DistributedDataParallel, in bf16. llama: the 1B
model of examples/train_fsdp2.py under FSDP2, in bf16 by its policy. On a CPU all are tiny, and run
with gloo. `--only` takes settings of the tables below. Uses nothing of advisor. Each setting's
steps come between those of PyTorch's own settings; prints a line of JSON for each: the median of
the ratios of their times, and the ratios.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_fsdp2.py"
TURNS, STEPS, WARM = 4, 5, 4
OF_DDP: dict[str, dict[str, Any]] = {
    "bucket_cap_mb=5": {"bucket_cap_mb": 5},
    "bucket_cap_mb=100": {"bucket_cap_mb": 100},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "broadcast_buffers off": {"broadcast_buffers": False},
    "bf16 reduce": {"hook": True},
}
OF_FSDP: dict[str, dict[str, Any]] = {
    "reshard_after_forward off": {"reshard": False},
    "prefetch 2": {"ahead": 2},
    "bf16 reduce": {"reduces": torch.bfloat16},
}
Step = Callable[[], None]
Shape = tuple[int, int]  # layers and width


def example() -> Any:
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stepper(model: nn.Module, words: int, batch: int, length: int, device: torch.device) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(words, (batch, length + 1), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1])
        logits = getattr(logits, "logits", logits)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gpt2(
    device: torch.device, size: Shape = (12, 768), *, hook: bool = False, **given: Any
) -> Step:
    import transformers

    layers, width = size if device.type == "cuda" else (2, 128)
    shape = {"n_layer": layers, "n_embd": width, "n_head": width // 64}
    config = transformers.GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(
        transformers.GPT2LMHeadModel(config).to(device), device_ids=ids, **given
    )
    if hook:
        model.register_comm_hook(None, bf16_compress_hook)
    batch, length = (12, 1024) if device.type == "cuda" else (2, 32)
    return stepper(model, config.vocab_size, batch, length, device)


def llama(
    device: torch.device,
    *,
    reshard: bool = True,
    ahead: int = 0,
    reduces: torch.dtype | None = None,
) -> Step:
    script = example()
    size = script.SIZES["1b" if device.type == "cuda" else "tiny"]
    with device:
        model = script.Llama(size)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduces or torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy)
    layers = [*model.layers]
    for at, layer in enumerate(layers if ahead else []):
        layer.set_modules_to_forward_prefetch(layers[at + 1 : at + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, at - ahead) : at][::-1])
    return stepper(model, size.words, size.batch, size.context, device)


def timed(step: Step, device: torch.device) -> float:
    """Seconds of a step of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = torch.tensor([(time.perf_counter() - began) / STEPS], device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", choices=("gpt2", "gpt2-medium", "llama"))
    parser.add_argument("--only", nargs="+", choices=[*OF_DDP, *OF_FSDP], metavar="SETTING")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    about = {"ranks": dist.get_world_size(), "p2p": os.environ.get("NCCL_P2P_DISABLE") != "1"}
    makes: dict[str, Callable[..., Step]] = {
        "gpt2": gpt2,
        "gpt2-medium": functools.partial(gpt2, size=(24, 1024)),
        "llama": llama,
    }
    for name in args.models:
        make = functools.partial(makes[name], device)
        plain = make()
        for setting, given in (OF_FSDP if name == "llama" else OF_DDP).items():
            if args.only and setting not in args.only:
                continue
            changed = make(**given)
            for step in (plain, changed):
                for _ in range(WARM):
                    step()
            ratios, own = list[float](), [timed(plain, device)]
            for _ in range(TURNS):
                other = timed(changed, device)
                own.append(timed(plain, device))
                ratios.append((own[-2] * own[-1]) ** 0.5 / other)
            line = {"model": name, "setting": setting, **about, "own_step_s": round(own[-1], 5)}
            line |= {"gain": round(statistics.median(ratios), 4)}
            if dist.get_rank() == 0:
                print(json.dumps(line | {"gains": [round(x, 4) for x in ratios]}), flush=True)
            del changed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
