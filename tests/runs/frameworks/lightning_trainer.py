"""Lightning's Trainer: a small image classifier with validation."""

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
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    precision="bf16-mixed" if "bf16" in sys.argv[2:] else "32-true",
    default_root_dir=f"{out}.folder",
)
loader = DataLoader(data, batch_size=8, shuffle=True)
trainer.fit(net, loader, DataLoader(data, batch_size=32))
torch.save(net.state_dict(), out)
