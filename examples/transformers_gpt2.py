# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer as a job: `elasticdl run --workers 2 examples/transformers_gpt2.py`.

Only the import of `Trainer` differs from an ordinary script, and `python` runs it as one. The model
is a tiny GPT-2 with random weights that learns to count.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from elasticdl.transformers import ElasticTrainer as Trainer

N_NUMBERS = 32


def sequences(n_sequences: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up from some number."""
    rows = [(torch.arange(12) + first) % N_NUMBERS for first in range(n_sequences)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    config = GPT2Config(vocab_size=N_NUMBERS, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    args = TrainingArguments(
        output_dir="output",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=0.01,
        logging_steps=5,
        eval_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config), args, train_dataset=sequences(320), eval_dataset=sequences(32)
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
