"""ViT-B/16 with Accelerate, batch 64, on one GPU or several.

python benchmarks/runs/vit_accelerate.py
accelerate launch --num_processes 2 benchmarks/runs/vit_accelerate.py
"""

import torch
import torchvision
from accelerate import Accelerator
from accelerate.utils import set_seed
from job import Pictures, Speed, normalized, options
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    args = options(__doc__, batch_size=64, size=224)
    hand = args.by_hand
    hand.set_flags()
    accelerator = Accelerator(mixed_precision="bf16" if hand.bf16 else None)
    set_seed(0)

    loader = DataLoader(
        Pictures(args.size),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=accelerator.device.type == "cuda",
        drop_last=True,
    )
    model = hand.prepare(torchvision.models.vit_b_16(weights=None, image_size=args.size))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, weight_decay=0.05, fused=hand.fused or None
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300 * len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    speed = Speed(args.steps, args.batch_size)
    while True:
        model.train()
        for pictures, labels in loader:
            loss = criterion(model(hand.to_layout(normalized(pictures))), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            if speed.step(loss):
                accelerator.end_training()
                return


if __name__ == "__main__":
    main()
