"""A text classifier with the architecture of BERT-base, for two classes.

advisor tune benchmarks/targets/encoder.py --shape 32x128 --dtype int64 --vocab 30000
"""

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 30000, 512, 768, 12, 12


class Net(nn.Module):
    """Maps tokens (N, T) to the logits of two classes (N, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.before = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.1))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.classify = nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.before(self.tokens(tokens) + self.positions(positions))
        return self.classify(self.encoder(x)[:, 0])
