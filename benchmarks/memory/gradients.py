"""Whether checkpointed blocks train alike on a GPU: what is refused, and how gradients differ.

    python gradients.py

Each model trains five steps on random inputs, in fp32, in bf16 with channels_last, and in fp16. The
difference of two plain runs shows what the GPU's own kernels change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from advisor.tuners.faults import NotRecomputable
from advisor.tuners.recomputation import blocks, recompute_in_place

Made = tuple[nn.Module, Callable[[], Tensor]]
FORMATS = ((None, False), (torch.bfloat16, True), (torch.float16, False))


def of_images(library: str, name: str) -> Made:
    if library == "timm":
        import timm

        model = timm.create_model(name, num_classes=10)
    else:
        import torchvision

        model = torchvision.models.get_model(name, num_classes=10)
    return model, lambda: torch.randn(16, 3, 224, 224, device="cuda")


def of_text(kind: str) -> Made:
    import transformers

    small = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1000}
    model = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=6)),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=6)),
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_hidden_layers=6, num_attention_heads=8, **small)
        ),
    }[kind]()
    return model, lambda: torch.randint(0, 1000, (4, 256), device="cuda")


VISION = "resnet50 resnet152 vit_b_16 convnext_tiny swin_t efficientnet_b0 densenet121"
TIMM = "vit_small_patch16_224 regnety_016 mixer_s16_224"
MODELS: dict[str, Callable[[], Made]] = {
    **{name: partial(of_images, "torchvision", name) for name in VISION.split()},
    **{f"timm {name}": partial(of_images, "timm", name) for name in TIMM.split()},
    **{name: partial(of_text, name) for name in ("gpt2", "bert", "llama")},
}


def gradients(model: nn.Module, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        output = model(x)
    getattr(output, "logits", output).float().square().mean().backward()
    return torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])


def compare(make: Callable[[], Made], dtype: torch.dtype | None, last: bool) -> str:
    torch.manual_seed(0)
    plain, batch = make()
    plain = plain.cuda().train()
    if last and batch().dim() == 4:
        plain = plain.to(memory_format=torch.channels_last)
    other = copy.deepcopy(plain)
    recompute_in_place(other)
    worst = noise = 0.0
    for _ in range(5):
        x = batch()
        found = [gradients(one, x, dtype) for one in (plain, other, plain)]
        worst = max(worst, float((found[1] - found[0]).norm() / found[0].norm()))
        noise = max(noise, float((found[2] - found[0]).norm() / found[0].norm()))
    return f"{len(blocks(plain))} blocks, differs by {worst:.2e}, two plain runs by {noise:.2e}"


def main() -> None:
    for name, make in MODELS.items():
        for dtype, last in FORMATS:
            try:
                said = compare(make, dtype, last)
            except NotRecomputable as exc:
                said = f"refused: {exc}"
            print(f"{name}, {dtype or 'fp32'}: {said}", flush=True)


if __name__ == "__main__":
    main()
