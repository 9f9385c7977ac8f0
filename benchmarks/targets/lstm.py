"""Two LSTM layers of 1,024 units. A step on sequences of 128 launches thousands of kernels."""

from torch import Tensor, nn


class Net(nn.Module):
    """Maps sequences (N, T, 256) to the logits of ten classes (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(256, 1024, num_layers=2, batch_first=True)
        self.head = nn.Linear(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _state = self.lstm(x)
        logits: Tensor = self.head(outputs[:, -1])
        return logits
