"""Two LSTM layers of 1,024 units over sequences of 128: a step launches thousands of kernels."""

from torch import Tensor, nn


class Net(nn.Module):
    """Classifies sequences of 256 features."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(256, 1024, num_layers=2, batch_first=True)
        self.head = nn.Linear(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        found, _state = self.lstm(x)
        logits: Tensor = self.head(found[:, -1])
        return logits
