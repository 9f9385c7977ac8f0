"""GPT-2 small: a decoder of 12 layers, 768 wide, for sequences of up to 1024 tokens.

    advisor tune examples/gpt2.py:GPT2 --shape 8x1024 --dtype int64 --vocab 50304

After Radford et al., Language Models are Unsupervised Multitask Learners, 2019. The vocabulary of
50257 is rounded up to a multiple of 64, which is faster on tensor cores.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 50304, 1024, 768, 12, 12


class Block(nn.Module):
    """Causal attention and an MLP; maps (N, T, WIDTH) to (N, T, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (N, HEADS, T, WIDTH / HEADS)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT2(nn.Module):
    """Maps tokens (N, T) to the logits of the next tokens (N, T, VOCABULARY)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


def make_batch(batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns random tokens, and the tokens that follow them."""
    tokens = torch.randint(VOCABULARY, (batch_size, LENGTH + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns the mean cross entropy over all positions."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
