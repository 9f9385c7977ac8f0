"""Texts of varying length, gradient clipping, a cyclic learning rate and one that drops on a
plateau. Midway, rebuilds everything and restores it from a checkpoint."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.optim.lr_scheduler import CyclicLR, ReduceLROnPlateau
from torch.utils.data import DataLoader


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 12, padding_idx=0)
        self.recurrent = nn.GRU(12, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.tokens(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.recurrent(packed)[1][-1])


def collate(texts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.tensor([len(text) for text in texts])
    labels = torch.stack([text[0] % 2 for text in texts])
    return pad_sequence(texts, batch_first=True), lengths, labels


def build() -> tuple[nn.Module, torch.optim.Optimizer, CyclicLR, ReduceLROnPlateau]:
    model = Tagger()
    body = [*model.tokens.parameters(), *model.recurrent.parameters()]
    groups = [{"params": body}, {"params": model.head.parameters(), "lr": 0.03}]
    optimizer = torch.optim.RMSprop(groups, lr=0.01)
    cycle = CyclicLR(optimizer, 0.001, 0.02, 8, cycle_momentum=False)
    return model, optimizer, cycle, ReduceLROnPlateau(optimizer, patience=0)


torch.manual_seed(0)
texts = [torch.randint(1, 40, (int(length),)) for length in torch.randint(3, 25, (100,))]
loader = DataLoader(texts, batch_size=8, shuffle=True, collate_fn=collate)
checkpoint = Path(sys.argv[1] + ".checkpoint")
parts = model, optimizer, cycle, plateau = build()

for epoch in range(3):
    if epoch == 1:
        parts = model, optimizer, cycle, plateau = build()
        for part, state in zip(parts, torch.load(checkpoint), strict=True):
            part.load_state_dict(state)
    for tokens, lengths, labels in loader:
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(model(tokens, lengths), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        cycle.step()
    plateau.step(loss.item())
    torch.save([part.state_dict() for part in parts], checkpoint)

torch.save(model.state_dict(), sys.argv[1])
