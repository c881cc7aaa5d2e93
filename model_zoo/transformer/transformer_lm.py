# SPDX-License-Identifier: Apache-2.0
"""A small byte-level language model in PyTorch: a decoder-only transformer.

python model_zoo/transformer/make_data.py text
elasticdl train --model_zoo=model_zoo --model_def=transformer.transformer_lm.custom_model \
    --training_data=text/train.jsonl --validation_data=text/test.jsonl

The column `tokens` has one more token than the model's input: each token predicts the next one.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Causal self-attention followed by an MLP, both with residual connections."""

    def __init__(self, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attend(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n_records, n_tokens, width = x.shape
        heads = self.query_key_value(x).view(n_records, n_tokens, 3, self.n_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(seen.transpose(1, 2).reshape(n_records, n_tokens, width))


class LanguageModel(nn.Module):
    """Predicts the logits of the next token at every position."""

    def __init__(
        self, vocabulary: int, length: int, width: int, n_layers: int, n_heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, n_heads, dropout) for _ in range(n_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        # Tie the weights of the input and output embeddings.
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.tokens(tokens) + self.places[: tokens.shape[1]])
        return self.head(self.norm(self.blocks(x)))


def custom_model(
    vocabulary: int = 256,
    length: int = 128,
    width: int = 128,
    n_layers: int = 2,
    n_heads: int = 4,
    dropout: float = 0.1,
) -> nn.Module:
    return LanguageModel(vocabulary, length, width, n_layers, n_heads, dropout)


def loss(labels, predictions):
    return functional.cross_entropy(predictions.flatten(0, 1), labels.flatten())


def optimizer(parameters, lr=1e-3):
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01)


def feed(columns, mode, metadata):
    tokens = torch.from_numpy(columns["tokens"])
    return tokens[:, :-1], tokens[:, 1:]


def entropy(labels, predictions):
    """Bits per token, one number per record."""
    nats = functional.cross_entropy(predictions.transpose(1, 2), labels, reduction="none")
    return nats.mean(1) / math.log(2)


def accuracy(labels, predictions):
    return (predictions.argmax(-1) == labels).float().mean(1)


def eval_metrics_fn():
    return {"entropy": entropy, "accuracy": accuracy}
