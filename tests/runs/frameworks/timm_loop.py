"""A model of timm's, with timm's optimizer, scheduler, mixup and averaged weights."""

import sys

import numpy
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
numpy.random.seed(0)  # what mixup draws from
model: nn.Module = timm.create_model(
    "resnet10t", num_classes=4, in_chans=3, channels=(8, 8, 16, 16), stem_width=8
)
averaged = ModelEmaV3(model, decay=0.9)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05)
scheduler = CosineLRScheduler(optimizer, t_initial=3, warmup_t=1)
mixup = Mixup(mixup_alpha=0.2, num_classes=4)
criterion = SoftTargetCrossEntropy()
data = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(4, (64,)))

for epoch in range(3):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        x, target = mixup(x, y)
        loss = criterion(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averaged.update(model)
    scheduler.step(epoch + 1)

weights = {f"averaged.{name}": value for name, value in averaged.module.state_dict().items()}
torch.save(model.state_dict() | weights, sys.argv[1])
