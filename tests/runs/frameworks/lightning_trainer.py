"""Lightning's Trainer: a net for pictures, validated between; or two optimizers stepped by hand."""

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


class Gan(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(10, 8, 4), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1)
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4), nn.Flatten()
        )

    def training_step(self, batch: list[Tensor], at: int) -> None:
        pictures = batch[0][:, :1]
        for_g, for_d = self.optimizers()
        criterion = nn.functional.binary_cross_entropy_with_logits
        real, fake = torch.ones(len(pictures), 1), torch.zeros(len(pictures), 1)
        made = self.generator(torch.randn(len(pictures), 10, 1, 1))
        loss = criterion(self.discriminator(pictures), real)
        loss = loss + criterion(self.discriminator(made.detach()), fake)
        for_d.zero_grad()
        self.manual_backward(loss)
        for_d.step()
        for_g.zero_grad()
        self.manual_backward(criterion(self.discriminator(made), real))
        for_g.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        models = (self.generator, self.discriminator)
        return [torch.optim.Adam(one.parameters(), lr=2e-3) for one in models]


out = sys.argv[1]
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 3, 8, 8), torch.randint(4, (96,)))
gan = "gan" in sys.argv[2:]
net = Gan() if gan else Net()
trainer = lightning.Trainer(
    max_epochs=1 if gan else 2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    precision="bf16-mixed" if "bf16" in sys.argv[2:] else "32-true",
    default_root_dir=f"{out}.folder",
)
validation = None if gan else DataLoader(data, batch_size=32)
trainer.fit(net, DataLoader(data, batch_size=8, shuffle=True), validation)
torch.save(net.state_dict(), out)
