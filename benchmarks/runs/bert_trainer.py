"""BERT-base, 32 texts of 128 tokens, with Hugging Face's Trainer, whose AdamW is fused.

python benchmarks/runs/bert_trainer.py
"""

import tempfile
from typing import Any

import torch
from job import Speed, options
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Texts(Dataset):
    """Random tokens of two classes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": torch.randint(30_000, (self.length,)),
            "attention_mask": torch.ones(self.length, dtype=torch.long),
            "labels": torch.tensor(index % 2),
        }


class Count(TrainerCallback):
    """Counts the steps. The Trainer prints the loss itself."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed

    def on_step_end(self, *_args: Any, **_more: Any) -> None:
        self.speed.step()


def main() -> None:
    args = options(__doc__, batch_size=32, size=128)
    hand = args.by_hand
    hand.set_flags()
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=args.batch_size,
            max_steps=args.steps,
            learning_rate=5e-5,
            warmup_steps=100,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=args.workers,
            bf16=hand.bf16,
            tf32=True if hand.tf32 else None,
            torch_compile_mode=hand.compiled or None,
        )
        trainer = Trainer(
            model=BertForSequenceClassification(BertConfig(num_labels=2)),
            args=training,
            train_dataset=Texts(args.size),
            callbacks=[Count(Speed(args.steps, training.train_batch_size))],
        )
        trainer.train()


if __name__ == "__main__":
    main()
