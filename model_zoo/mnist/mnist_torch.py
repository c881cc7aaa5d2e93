# SPDX-License-Identifier: Apache-2.0
"""Image classifier for 28×28 images in ten classes, in PyTorch: a small CNN or an MLP.

elasticdl train --model_zoo=model_zoo --model_def=mnist.mnist_torch.custom_model \
    --training_data=data/fashion_mnist/train --validation_data=data/fashion_mnist/test

`--model_params=kind=mlp` trains the MLP; `--model_params=lr=0.01` changes the learning rate.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def custom_model(kind: str = "cnn") -> nn.Module:
    if kind == "mlp":
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )
    if kind == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3),
            nn.ReLU(),
            nn.BatchNorm2d(64),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * 12 * 12, 10),
        )
    raise ValueError(f"`kind` is {kind!r}; use cnn or mlp")


def loss(labels, predictions):
    return functional.cross_entropy(predictions, labels)


def optimizer(parameters, lr=0.05):
    return torch.optim.SGD(parameters, lr=lr)


def feed(columns, mode, metadata):
    images = torch.from_numpy(columns["image"]).view(-1, 1, 28, 28).float() / 255
    return images, columns.get("label")


def eval_metrics_fn():
    return {"accuracy": lambda labels, predictions: (predictions.argmax(1) == labels).float()}
