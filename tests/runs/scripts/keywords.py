"""A model that is called with keywords alone, one of them a dict, and gives back a dict."""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    def __init__(self) -> None:
        self.tokens = torch.randint(50, (64, 10))
        self.lengths = torch.randint(4, 11, (64,))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor | dict[str, Tensor]]:
        mask = torch.arange(10) < self.lengths[i]
        extra = {"positions": torch.arange(10), "length": self.lengths[i]}
        return {"input_ids": self.tokens[i], "mask": mask, "extra": extra}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(10, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(
        self, *, input_ids: Tensor, mask: Tensor, extra: dict[str, Tensor], labels: Tensor
    ) -> dict[str, Tensor]:
        x = self.tokens(input_ids) + self.positions(extra["positions"])
        x = self.layer(x, src_key_padding_mask=~mask).masked_fill(~mask.unsqueeze(2), 0)
        logits = self.head(x.sum(1) / extra["length"].unsqueeze(1))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


torch.manual_seed(0)
dataset = Texts()
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
for _ in range(2):
    for batch in DataLoader(dataset, batch_size=8, shuffle=True):
        output = model(**batch, labels=batch["input_ids"][:, 0] % 2)
        optimizer.zero_grad()
        output["loss"].backward()
        optimizer.step()
    print(f"loss {output['loss'].item():.4f}")

torch.save(model.state_dict(), sys.argv[1])
