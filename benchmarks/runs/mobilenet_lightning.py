"""MobileNetV3-Large with Lightning, batch 64.

python benchmarks/runs/mobilenet_lightning.py
"""

from typing import Any

import lightning
import torch
import torchvision
from job import Hand, Pictures, Speed, normalized, options
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self, hand: Hand) -> None:
        super().__init__()
        self.hand = hand
        self.net = hand.prepare(torchvision.models.mobilenet_v3_large(weights=None))

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        pictures, labels = self.hand.to_layout(normalized(batch[0])), batch[1]
        return functional.cross_entropy(self.net(pictures), labels)

    def configure_optimizers(self) -> dict[str, Any]:
        fused = True if self.hand.fused else None
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, fused=fused)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1_000_000)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Count(lightning.Callback):
    """Counts the steps and prints the loss."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed

    def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_batch: Any) -> None:
        self.speed.step(outputs["loss"])


def main() -> None:
    args = options(__doc__, batch_size=64, size=224)
    lightning.seed_everything(0)
    args.by_hand.set_flags()
    loader = DataLoader(
        Pictures(args.size),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available(),
        drop_last=True,
    )
    trainer = lightning.Trainer(
        max_steps=args.steps,
        devices=1,
        precision="bf16-mixed" if args.by_hand.bf16 else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Count(Speed(args.steps, args.batch_size))],
    )
    trainer.fit(Classifier(args.by_hand), loader)


if __name__ == "__main__":
    main()
