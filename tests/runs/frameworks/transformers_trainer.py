"""Hugging Face's Trainer: a small BERT on random tokens, two micro-batches per step."""

import sys

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

Row = dict[str, Tensor]


class Rows(Dataset[Row]):
    def __init__(self) -> None:
        self.tokens = torch.randint(5, 100, (128, 12))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: int) -> Row:
        tokens = self.tokens[at]
        return {"input_ids": tokens, "labels": tokens[0] % 3}


out = sys.argv[1]
set_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=100,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
    )
)
arguments = TrainingArguments(
    output_dir=f"{out}.folder",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=1,
    learning_rate=1e-3,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
    bf16="bf16" in sys.argv[2:],
)
Trainer(model=model, args=arguments, train_dataset=Rows()).train()
torch.save(model.state_dict(), out)
