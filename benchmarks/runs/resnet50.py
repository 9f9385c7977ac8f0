"""ResNet-50 as in torchvision's references: a plain training loop, on one GPU or several.

python benchmarks/runs/resnet50.py
torchrun --nproc-per-node 2 benchmarks/runs/resnet50.py
"""

import itertools
import os

import torch
import torch.distributed as dist
import torchvision
from job import Pictures, Speed, normalized, options
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler


def main() -> None:
    args = options(__doc__, batch_size=64, size=224)
    hand = args.by_hand
    hand.set_flags()
    distributed, local_rank = "LOCAL_RANK" in os.environ, int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)

    dataset = Pictures(args.size)
    sampler = DistributedSampler(dataset) if distributed else RandomSampler(dataset)
    loader = DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
        drop_last=True,
    )

    model = hand.prepare(torchvision.models.resnet50(weights=None).to(device))
    if distributed:
        device_ids = [local_rank] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=device_ids)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=hand.fused or None
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90 * len(loader))

    speed = Speed(args.steps, args.batch_size)
    for epoch in itertools.count():
        if distributed:
            sampler.set_epoch(epoch)
        model.train()
        for pictures, labels in loader:
            pictures = normalized(pictures.to(device, non_blocking=True))
            labels = labels.to(device, non_blocking=True)
            with hand.autocast(device):
                loss = criterion(model(hand.to_layout(pictures)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if speed.step(loss):
                return


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
