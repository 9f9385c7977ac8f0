"""GPT-2 medium in Lightning at a limit of GPU memory, at the batch that its batch scaler finds.

    python lightning_batch.py 24 bf16-mixed

24 is in GiB. Prints the batch, samples/s over 30 steps, and the peak.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

GIB = 2**30
WARM, STEPS = 10, 40


class Gpt2(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(n_layer=24, n_embd=1024, n_head=16)
        self.model = transformers.GPT2LMHeadModel(config)
        self.batch_size = 1
        self.began = 0.0

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(0, 50257, (4096, 1024))
        return DataLoader(TensorDataset(tokens), self.batch_size, num_workers=4, drop_last=True)

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        if index == WARM:
            torch.cuda.synchronize()
            self.began = time.perf_counter()
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def main() -> None:
    gib, precision = float(sys.argv[1]), sys.argv[2]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gib * GIB / total)
    made: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    made |= {"accelerator": "gpu", "devices": 1, "precision": precision}
    model = Gpt2()
    trainer = L.Trainer(max_steps=STEPS, **made)
    Tuner(trainer).scale_batch_size(model, mode="binsearch", max_trials=8)
    torch.cuda.reset_peak_memory_stats()
    L.Trainer(max_steps=STEPS, **made).fit(model)
    torch.cuda.synchronize()
    rate = model.batch_size * (STEPS - WARM) / (time.perf_counter() - model.began)
    peak = torch.cuda.max_memory_allocated() / GIB
    print(f"{precision}: batch {model.batch_size}, {rate:.1f} samples/s, peak {peak:.2f} GiB")


if __name__ == "__main__":
    main()
