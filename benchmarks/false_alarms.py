"""Checks that the comparison with fp32 accepts correct configs and detects planted faults.

Five models run in every number format and compile mode: no comparison may fail or stay unverified.
Then faults are planted, one at a time: each must be detected. Every case adds one JSON line.

    python benchmarks/false_alarms.py out.jsonl [--only gpt2] [--seconds 120]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from advisor.cache.config import Config
from advisor.tuners.act.advice import Advice
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.decisions import POINTS
from advisor.tuners.measure.compare import References
from advisor.tuners.measure.run.recorded_state import RecordedUpdates
from advisor.tuners.measure.samples import Overflow, Sample, perturb, sampled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ("fp32", "tf32", "bf16", "fp16") if DEVICE == "cuda" else ("fp32", "bf16")
MODES = ("none", "default", "reduce-overhead") if DEVICE == "cuda" else ("none", "default")
FAULTS = {
    "layer": "the gradient of one matrix is 10% too large",
    "stale": "one matrix keeps its initial value",
    "decay": "the optimizer skips weight decay",
    "dropout": "dropout at twice its rate",
    "scale": "gradients are twice as large: a wrong loss scale",
    "overflow": "the model's output overflows in half precision",
}
BLAMES = {"decay": "optimizer", "overflow": "format"}
FP32 = Config(precision="fp32", compile="none", fused_optimizer=False)
SHOWN = ("compile", "precision")
SCALE_ATTEMPTS = 20
"""Loss scales to try: 65536, then half of the last one."""


class Encoder(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.last(self.layers(self.embedding(tokens)).mean(1))
        return logits


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.LSTM(64, width, num_layers=2, batch_first=True)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.inner(x)[0][:, -1])
        return logits


class Gpt2(nn.Module):
    """GPT-2 with random weights and its own dropout of 0.1; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        small = {} if LARGE else {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": WORDS}
        self.inner = GPT2LMHeadModel(GPT2Config(**small))

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.inner(tokens, labels=tokens).loss
        return loss


def perceptron(width: int) -> nn.Module:
    parts: list[nn.Module] = [nn.Linear(64, width)]
    for _ in range(2):
        parts += [nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width)]
    return nn.Sequential(*parts, nn.ReLU(), nn.Linear(width, 10))


def convolutions(width: int) -> nn.Module:
    parts: list[nn.Module] = []
    for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        parts += [nn.Conv2d(before, after, 3, padding=1, stride=2), nn.BatchNorm2d(after)]
        parts += [nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    draws: bool


LARGE = DEVICE == "cuda"
BATCH, WIDTH, SIDE, WORDS = (128, 512, 64, 50257) if LARGE else (16, 64, 16, 500)
MODELS = {
    "mlp": Model(lambda: perceptron(2 * WIDTH), lambda: torch.randn(BATCH, 64), True),
    "convnet": Model(
        lambda: convolutions(WIDTH // 8), lambda: torch.randn(BATCH, 3, SIDE, SIDE), False
    ),
    "rnn": Model(lambda: Recurrent(WIDTH), lambda: torch.randn(BATCH, 20, 64), False),
    "encoder": Model(
        lambda: Encoder(WIDTH, 6 if LARGE else 2), lambda: torch.randint(1000, (BATCH, SIDE)), False
    ),
    "gpt2": Model(Gpt2, lambda: torch.randint(WORDS, (8, 512) if LARGE else (4, 32)), True),
}


class Step:
    """A RepeatableStep: a model trained with advice, as a script would do it.

    Attributes:
        fault: key of FAULTS, planted where the model is compiled; '' for none.
        passes: number of forward and backward passes so far.
    """

    def __init__(self, model: Model) -> None:
        self.draws, self.fault, self.passes = model.draws, "", 0
        torch.manual_seed(0)
        self._first = model.make()
        self._make = model.make
        self._batches = [(model.batch().to(DEVICE), torch.randint(10, (BATCH,))) for _ in range(4)]
        self._built: dict[Config, tuple[nn.Module, Advice]] = {}
        self._initial = [p.detach().clone().to(DEVICE) for p in self._first.parameters()]

    def sample(self, config: Config, point: int, seed: int) -> Sample:
        self.passes += 1
        model, advice = self._prepared(config)
        advice.set_flags()
        compiled, half = config["compile"] != "none", config["precision"] in ("bf16", "fp16")
        fault = self.fault if compiled or (half and self.fault == "overflow") else ""
        self._set_weights(list(model.parameters()), point, stale=fault == "stale")
        dropouts = [one for one in model.modules() if isinstance(one, nn.Dropout)]
        original = [one.p for one in dropouts]
        for one in dropouts if fault == "dropout" else ():
            one.p *= 2
        scale = 65536.0 if advice.scaler.is_enabled() else 1.0
        for _ in range(SCALE_ATTEMPTS):
            sample = self._pass(model, advice, point, seed, scale, fault)
            if not advice.scaler.is_enabled() or all(
                bool(one.isfinite().all()) for one in sample.gradients.values()
            ):
                break
            scale /= 2
        else:
            raise Overflow("fp16 overflows at any loss scale")
        for one, rate in zip(dropouts, original, strict=True):
            one.p = rate
        return sample

    def _pass(
        self, model: nn.Module, advice: Advice, point: int, seed: int, scale: float, fault: str
    ) -> Sample:
        torch.manual_seed(seed)
        inputs, labels = self._batches[point % POINTS]
        torch.compiler.cudagraph_mark_step_begin()
        with advice.autocast():
            output = model(advice.place(inputs))
        output = output * 1e30 * 1e30 if fault == "overflow" else output.float()
        loss = output if not output.dim() else functional.cross_entropy(output, labels.to(DEVICE))
        weights = dict(model.named_parameters())
        computed = torch.autograd.grad(loss * scale, list(weights.values()), materialize_grads=True)
        matrices = [name for name, weight in weights.items() if weight.dim() > 1]
        factor = {"layer": {matrices[-2]: 1.1}, "scale": dict.fromkeys(weights, 2.0)}.get(fault, {})
        gradients = {
            name: sampled(one) / scale * factor.get(name, 1.0)
            for name, one in zip(weights, computed, strict=True)
        }
        return Sample(outputs={"output 0": sampled(output)}, gradients=gradients, loss=loss.item())

    def optimizer_error(self, config: Config) -> tuple[float, str]:
        if config["compile"] == "none" or self.fault != "decay":
            return 0.0, ""
        model, _advice = self._prepared(config)
        names = {id(p): name for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        return RecordedUpdates([optimizer]).error({"weight_decay": 0.0}, names)

    def _prepared(self, config: Config) -> tuple[nn.Module, Advice]:
        if config not in self._built:
            advice = Advice(config, device=DEVICE)
            model = self._make()
            model.load_state_dict(self._first.state_dict())
            self._built[config] = advice.prepare(model), advice
        return self._built[config]

    @torch.no_grad()
    def _set_weights(self, weights: list[nn.Parameter], point: int, *, stale: bool) -> None:
        for weight, initial in zip(weights, self._initial, strict=True):
            weight.copy_(initial)
        perturb(weights, point)
        if stale:
            at = [n for n, weight in enumerate(weights) if weight.dim() > 1][-2]
            weights[at].copy_(self._initial[at])


def cases(step: Step) -> Iterator[tuple[Config, str, str]]:
    """Yields the config, the fault and the expected outcome of each case."""
    for precision in FORMATS:
        for mode in MODES:
            if (precision, mode) != ("fp32", "none"):
                yield FP32.replace(precision=precision, compile=mode), "", "ok"
    for fault in FAULTS:
        if fault != "dropout" or step.draws:
            yield FP32.replace(precision=FORMATS[-1], compile="default"), fault, "wrong"


def compare(step: Step, references: References, config: Config, seconds: float) -> dict[str, Any]:
    """Compares a config with fp32. Returns the outcome, the seconds and the number of passes."""
    ends, before, began = time.monotonic() + seconds, step.passes, time.perf_counter()
    compared = references.compare(config, left_s=lambda: ends - time.monotonic())
    took_s = time.perf_counter() - began
    return {
        "outcome": compared.outcome,
        "blames": compared.blames,
        "reason": compared.reason,
        "seconds": round(took_s, 2),
        "passes": step.passes - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this, e.g. gpt2/bf16")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of each comparison")
    args = parser.parse_args()
    wrong = 0
    with args.out.open("a") as out:
        for name, model in MODELS.items():
            step = Step(model)
            references = References(step, FP32, tolerance=0.02)
            for config, fault, expected in cases(step):
                title = "/".join((name, *map(str, config.only(*SHOWN).values()), fault)).rstrip("/")
                if args.only not in title:
                    continue
                step.fault = fault
                if fault == "overflow":  # forgets that this format passed before
                    references = References(step, FP32, tolerance=0.02)
                result = compare(step, references, config, args.seconds)
                good = result["outcome"] == expected
                if expected == "wrong":
                    good &= result["blames"] == BLAMES.get(fault, "code")
                wrong += not good
                print(f"{'' if good else 'WRONG '}{title}: {result}", flush=True)
                line = {"case": title, "device": DEVICE, "right": expected, "good": good} | result
                print(json.dumps(line), file=out, flush=True)
            PROCESS_FLAGS.release()
    print(f"{wrong} cases had an unexpected outcome")


if __name__ == "__main__":
    main()
