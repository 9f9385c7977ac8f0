"""The model takes only keyword arguments, one of them a dict, and returns a dict. A step gathers
gradients of four batches. The script also saves a moving average of the model."""

import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def text() -> dict[str, Tensor | dict[str, Tensor]]:
    length = torch.randint(4, 11, ())
    extra = {"positions": torch.arange(10), "length": length}
    return {
        "input_ids": torch.randint(50, (10,)),
        "mask": torch.arange(10) < length,
        "extra": extra,
    }


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
dataset = [text() for _ in range(64)]
model = Classifier()
averaged = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
for _ in range(2):
    for i, batch in enumerate(DataLoader(dataset, batch_size=4, shuffle=True), 1):
        output = model(**batch, labels=batch["input_ids"][:, 0] % 2)
        (output["loss"] / 4).backward()
        if i % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for slow, fast in zip(averaged.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
    print(f"loss {output['loss'].item():.4f}")

state = nn.ModuleDict({"trained": model, "averaged": averaged}).state_dict()
torch.save(state, sys.argv[1])
