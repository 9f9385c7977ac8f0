"""A small image classifier: Lightning's Trainer with validation, or, with the word fabric, Fabric.
With the word ddp, Lightning wraps the model in DistributedDataParallel."""

import sys
import warnings

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))

    def training_step(self, batch: list[Tensor], at: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: list[Tensor], at: int) -> None:
        x, y = batch
        self.log("loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


out = sys.argv[1]
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 3, 8, 8), torch.randint(4, (96,)))
net = Net()
words, loader = sys.argv[2:], DataLoader(data, batch_size=8, shuffle=True)
half = "bf16-mixed" if "bf16" in words else "32-true"
strategy = "ddp" if "ddp" in words else "auto"
how = {"accelerator": "cpu", "devices": 1, "strategy": strategy, "precision": half}
if "fabric" in words:
    fabric = lightning.Fabric(**how)
    fabric.launch()
    model, optimizer = fabric.setup(net, net.configure_optimizers())
    for x, y in [*fabric.setup_dataloaders(loader)] * 2:
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
else:
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    how |= dict.fromkeys(names, False) | {"default_root_dir": f"{out}.folder"}
    trainer = lightning.Trainer(max_epochs=2, **how)
    trainer.fit(net, loader, DataLoader(data, batch_size=32))
torch.save(net.state_dict(), out)
