"""Lightning with two optimizers that are stepped by hand."""

import sys
import warnings

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


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
        (pictures,) = batch
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
        return [
            torch.optim.Adam(one.parameters(), lr=2e-3)
            for one in (self.generator, self.discriminator)
        ]


torch.manual_seed(0)
gan = Gan()
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(gan, DataLoader(TensorDataset(torch.rand(128, 1, 8, 8)), batch_size=8, shuffle=True))
torch.save(gan.state_dict(), sys.argv[1])
