"""An Accelerate loop with gradient accumulation and clipping. The model, optimizer, scheduler,
mixup and averaged weights are timm's."""

import sys

import numpy
import timm
import torch
from accelerate import Accelerator
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
numpy.random.seed(0)  # mixup uses numpy's generator
half = "bf16" if "bf16" in sys.argv[2:] else "no"
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=half)
model: nn.Module = timm.create_model(
    "resnet10t", num_classes=4, in_chans=3, channels=(8, 8, 16, 16), stem_width=8
)
averaged = ModelEmaV3(model, decay=0.9)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05)
scheduler = CosineLRScheduler(optimizer, t_initial=3, warmup_t=1)
mixup = Mixup(mixup_alpha=0.2, num_classes=4)
criterion = SoftTargetCrossEntropy()
data = TensorDataset(torch.randn(96, 3, 32, 32), torch.randint(4, (96,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            x, target = mixup(x, y)
            accelerator.backward(criterion(model(x), target))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        averaged.update(accelerator.unwrap_model(model))
    scheduler.step(epoch + 1)

weights = {f"averaged.{name}": value for name, value in averaged.module.state_dict().items()}
torch.save(accelerator.unwrap_model(model).state_dict() | weights, sys.argv[1])
accelerator.end_training()
