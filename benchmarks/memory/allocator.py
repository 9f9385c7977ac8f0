"""Memory that PyTorch's allocator reserves, with and without expandable segments.

    python allocator.py

GPT-2 small at batch 8, with and without checkpointed blocks. All batches have length 1,024, or
their lengths vary from 200 to 1,024. Each case runs in its own process.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import torch

GIB = 2**30


def main() -> None:
    if len(sys.argv) == 1:
        for words in itertools.product("01", repeat=3):
            subprocess.run([sys.executable, __file__, *words], check=True)
        return
    import transformers

    from advisor.tuners.environment import expand_segments
    from advisor.tuners.recomputation import recompute_in_place

    expands, checkpoints, varies = (word == "1" for word in sys.argv[1:])
    device = torch.device("cuda")
    if expands:
        expand_segments(device)
    torch.manual_seed(0)
    random.seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())
    if checkpoints:
        recompute_in_place(model)
    for _ in range(30):
        length = random.randint(200, 1024) if varies else 1024
        tokens = torch.randint(0, 50257, (8, length), device=device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(
        f"expandable {expands}, checkpointed {checkpoints}, lengths vary {varies}: peak "
        f"{peak / GIB:.2f} GiB, reserved {reserved / GIB:.2f} GiB, {reserved / peak:.3f} times"
    )


if __name__ == "__main__":
    main()
