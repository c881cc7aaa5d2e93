# SPDX-License-Identifier: Apache-2.0
"""Computes the weights of Keras and PyTorch for fixed gradients, for the optimizer tests.

Run by hand, with both libraries installed, when a case is added:

    PYTHONPATH=python python tests/python/optimizer_golden.py

It writes crates/edl-tensor/tests/reference/libraries.json: the gradients of every step, and for
each case the library's optimizer as `elasticdl._optimizers` describes it to Rust, with the weights
of the library after some of the steps: in single precision, and in double precision, which is the
exact formula (for example, Keras rounds 1 - 0.999 to single precision).
There are two parameters, to test clipping by parameter and weights without decay.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "1")

import keras
import numpy as np
import torch

from elasticdl import _optimizers

FILE = Path(__file__).parents[2] / "crates/edl-tensor/tests/reference/libraries.json"
N_STEPS = 50
# Steps after which the weights are saved. Earlier errors show in later weights.
KEPT = [1, 2, 5, 12, 25, 50]
SHAPES = [3, 2]

K, S = keras.optimizers, keras.optimizers.schedules
T, L = torch.optim, torch.optim.lr_scheduler


def numbers():
    """Initial weights and gradients; one weight never has a gradient, one step has none at all."""
    rng = np.random.default_rng(5)
    n_weights = sum(SHAPES)
    start = rng.uniform(-1, 1, n_weights).astype("float32")
    gradients = rng.normal(0, 1, (N_STEPS, n_weights)).astype("float32")
    gradients[:, 1] = 0.0
    gradients[7] = 0.0
    return start, gradients


def split(flat):
    return np.split(flat, np.cumsum(SHAPES)[:-1])


class Halving(S.LearningRateSchedule):
    """A custom schedule that uses `if`."""

    def __call__(self, step):
        return 0.1 if int(step) < 20 else 0.05

    def get_config(self):
        return {}


class Root(S.LearningRateSchedule):
    """A custom schedule that also accepts many steps at once."""

    def __call__(self, step):
        return 0.1 / keras.ops.sqrt(keras.ops.cast(step, keras.config.floatx()) + 1.0)

    def get_config(self):
        return {}


def keras_cases():
    """Functions that create Keras optimizers, by name."""
    halves = S.ExponentialDecay(0.05, 10, 0.5)
    # Backends differ by one step if a restart is exactly at a step.
    restarts = S.CosineDecayRestarts(0.1, 8, t_mul=1.7, m_mul=0.8, alpha=0.1)
    yield "sgd", lambda: K.SGD(0.1)
    yield "sgd, decay and schedule", lambda: K.SGD(halves, weight_decay=0.1)
    yield "momentum", lambda: K.SGD(0.05, momentum=0.9)
    yield "momentum, schedule", lambda: K.SGD(halves, momentum=0.9, weight_decay=0.1)
    yield "nesterov", lambda: K.SGD(halves, momentum=0.9, nesterov=True, weight_decay=0.1)
    yield "adam", lambda: K.Adam(0.01)
    yield "adam, numbers", lambda: K.Adam(halves, 0.8, 0.95, 1e-3, weight_decay=0.1)
    yield "amsgrad", lambda: K.Adam(halves, beta_2=0.9, amsgrad=True, weight_decay=0.1)
    yield "adamw", lambda: K.AdamW(0.01)
    yield "adamw, schedule", lambda: K.AdamW(halves, weight_decay=0.1)
    yield "adamw, amsgrad", lambda: K.AdamW(halves, beta_2=0.9, amsgrad=True, weight_decay=0.1)
    yield "adagrad", lambda: K.Adagrad(0.1)
    yield "adagrad, numbers", lambda: K.Adagrad(halves, 0.5, 1e-3, weight_decay=0.1)
    yield "rmsprop", lambda: K.RMSprop(0.01)
    yield "rmsprop, momentum", lambda: K.RMSprop(halves, momentum=0.5, weight_decay=0.1)
    yield "rmsprop, centered", lambda: K.RMSprop(0.01, centered=True, epsilon=1e-3)
    yield (
        "rmsprop, both",
        lambda: K.RMSprop(halves, 0.8, 0.5, 1e-3, centered=True, weight_decay=0.1),
    )
    yield "ftrl", lambda: K.Ftrl(0.1)
    yield "ftrl, numbers", lambda: K.Ftrl(halves, -0.7, 0.2, 0.05, 0.1, 0.01, 0.3, weight_decay=0.1)
    yield "adadelta", lambda: K.Adadelta(1.0)
    yield "adadelta, numbers", lambda: K.Adadelta(halves, 0.9, 1e-3, weight_decay=0.1)
    yield "adamax", lambda: K.Adamax(0.01)
    yield "adamax, numbers", lambda: K.Adamax(halves, 0.8, 0.95, 1e-3, weight_decay=0.1)
    yield "nadam", lambda: K.Nadam(0.01)
    yield "nadam, numbers", lambda: K.Nadam(halves, 0.8, 0.95, 1e-3, weight_decay=0.1)
    yield "lion", lambda: K.Lion(0.01)
    yield "lion, numbers", lambda: K.Lion(halves, 0.8, 0.95, weight_decay=0.1)
    yield "excluded from decay", no_decay_of_second(lambda: K.AdamW(0.05, weight_decay=0.1))
    yield "clipnorm", lambda: K.SGD(0.1, clipnorm=1.5)
    yield "global_clipnorm", lambda: K.Adam(0.01, global_clipnorm=1.5)
    yield "clipvalue", lambda: K.SGD(0.1, clipvalue=0.5)
    for name, schedule in {
        "exponential": S.ExponentialDecay(0.1, 7, 0.7),
        "exponential, staircase": S.ExponentialDecay(0.1, 7, 0.7, staircase=True),
        "piecewise": S.PiecewiseConstantDecay([5, 20, 30], [0.1, 0.2, 0.05, 0.01]),
        "polynomial": S.PolynomialDecay(0.1, 30, 0.01, power=2.0),
        "polynomial, cycle": S.PolynomialDecay(0.1, 9, 0.01, power=0.5, cycle=True),
        "cosine": S.CosineDecay(0.1, 30, alpha=0.1),
        "cosine, warm-up": S.CosineDecay(0.02, 30, 0.1, warmup_target=0.1, warmup_steps=10),
        "cosine, warm-up from zero": S.CosineDecay(0.0, 60, warmup_target=0.1, warmup_steps=5),
        "restarts": restarts,
        "inverse": S.InverseTimeDecay(0.1, 7, 0.7),
        "inverse, staircase": S.InverseTimeDecay(0.1, 7, 0.7, staircase=True),
        "by if": Halving(),
        "by root": Root(),
    }.items():
        yield f"schedule: {name}", lambda schedule=schedule: K.SGD(schedule)


def no_decay_of_second(make):
    def made():
        optimizer = make()
        optimizer.exclude_from_weight_decay(var_names=["second"])
        return optimizer

    return made


def run_keras(make, start, gradients, dtype="float32"):
    keras.config.set_floatx(dtype)
    start, gradients = start.astype(dtype), [gradient.astype(dtype) for gradient in gradients]
    names = ["first", "second"]
    variables = [keras.Variable(part, name=name) for part, name in zip(split(start), names)]
    optimizer = make()
    spec = _optimizers.from_keras(optimizer, N_STEPS)
    decays = [_optimizers.decayed(optimizer, variable) for variable in variables]
    optimizer.build(variables)
    after = []
    for gradient in gradients:
        parts = [keras.ops.convert_to_tensor(part) for part in split(gradient)]
        optimizer.apply(parts, variables)
        after.append(np.concatenate([keras.ops.convert_to_numpy(v.value) for v in variables]))
    return spec, decays, after


def torch_cases():
    """Functions that create PyTorch optimizers and schedulers, by name."""

    def halves(optimizer):
        return L.StepLR(optimizer, 10, 0.5)

    decay = {"weight_decay": 0.1}
    betas = {"betas": (0.8, 0.95), "eps": 1e-3}
    damped = {"momentum": 0.9, "dampening": 0.3}
    yield "sgd", lambda p: T.SGD(p, 0.1), None
    yield "sgd, decay and schedule", lambda p: T.SGD(p, 0.1, **decay), halves
    yield "momentum", lambda p: T.SGD(p, 0.05, momentum=0.9), None
    yield "momentum, schedule", lambda p: T.SGD(p, 0.05, momentum=0.9, **decay), halves
    yield "momentum, dampening", lambda p: T.SGD(p, 0.05, **damped, **decay), halves
    yield "nesterov", lambda p: T.SGD(p, 0.05, momentum=0.9, nesterov=True, **decay), halves
    yield "adam", lambda p: T.Adam(p, 0.01), None
    yield "adam, numbers", lambda p: T.Adam(p, 0.01, **betas, **decay), halves
    yield "amsgrad", lambda p: T.Adam(p, 0.01, **betas, **decay, amsgrad=True), halves
    yield "adam, decoupled", lambda p: T.Adam(p, 0.01, **decay, decoupled_weight_decay=True), None
    yield "adamw", lambda p: T.AdamW(p, 0.01), None
    yield "adamw, numbers", lambda p: T.AdamW(p, 0.01, **betas, **decay), halves
    yield "adamw, amsgrad", lambda p: T.AdamW(p, 0.01, **betas, **decay, amsgrad=True), halves
    yield "adagrad", lambda p: T.Adagrad(p, 0.1), None
    yield "adagrad, decays", lambda p: T.Adagrad(p, 0.1, 0.05, 0.1), None
    yield "adagrad, numbers", lambda p: T.Adagrad(p, 0.1, 0.05, 0.1, 0.5, 1e-3), halves
    yield "rmsprop", lambda p: T.RMSprop(p, 0.01), None
    yield "rmsprop, momentum", lambda p: T.RMSprop(p, 0.01, momentum=0.5, **decay), halves
    yield "rmsprop, centered", lambda p: T.RMSprop(p, 0.01, 0.9, 1e-3, centered=True), None
    yield (
        "rmsprop, both",
        lambda p: T.RMSprop(p, 0.01, 0.8, 1e-3, 0.1, 0.5, centered=True),
        halves,
    )
    yield "adadelta", lambda p: T.Adadelta(p), None
    yield "adadelta, numbers", lambda p: T.Adadelta(p, 0.5, 0.8, 1e-3, 0.1), halves
    yield "adamax", lambda p: T.Adamax(p, 0.01), None
    yield "adamax, numbers", lambda p: T.Adamax(p, 0.01, **betas, **decay), halves
    yield "nadam", lambda p: T.NAdam(p), None
    yield "nadam, numbers", lambda p: T.NAdam(p, 0.01, **betas, **decay), halves
    yield (
        "nadam, decoupled",
        lambda p: T.NAdam(p, 0.01, momentum_decay=0.1, **decay, decoupled_weight_decay=True),
        None,
    )
    yield (
        "two groups",
        lambda p: T.AdamW(
            [{"params": p[:1]}, {"params": p[1:], "weight_decay": 0.0}], 0.05, **betas
        ),
        None,
    )
    cycle = {"total_steps": N_STEPS, "base_momentum": 0.6, "max_momentum": 0.95}
    for name, make in {
        "momentum": lambda p: T.SGD(p, 0.05, momentum=0.9, nesterov=True, **decay),
        "adam": lambda p: T.Adam(p, 0.01, **betas),
        "adamw": lambda p: T.AdamW(p, 0.01, **betas, **decay),
        "adamax": lambda p: T.Adamax(p, 0.01, **betas),
        "rmsprop": lambda p: T.RMSprop(p, 0.01, momentum=0.5, **decay),
    }.items():
        yield f"one cycle of momentum: {name}", make, lambda o: L.OneCycleLR(o, 0.02, **cycle)
    for name, schedule in {
        "step": lambda o: L.StepLR(o, 7, 0.7),
        "multi-step": lambda o: L.MultiStepLR(o, [5, 20, 20, 30], 0.7),
        "exponential": lambda o: L.ExponentialLR(o, 0.97),
        "cosine": lambda o: L.CosineAnnealingLR(o, 15, 0.01),
        "linear": lambda o: L.LinearLR(o, total_iters=20),
        "polynomial": lambda o: L.PolynomialLR(o, 30, 2.0),
        "lambda": lambda o: L.LambdaLR(o, lambda step: 1 / (1 + step)),
        "one cycle": lambda o: L.OneCycleLR(o, 0.2, total_steps=N_STEPS, cycle_momentum=False),
        "warm-up, then cosine": lambda o: L.SequentialLR(
            o, [L.LinearLR(o, 0.1, total_iters=10), L.CosineAnnealingLR(o, 40)], [10]
        ),
    }.items():
        yield f"schedule: {name}", lambda p: T.SGD(p, 0.1), schedule


def run_torch(make, scheduled, start, gradients, dtype="float32"):
    start, gradients = start.astype(dtype), [gradient.astype(dtype) for gradient in gradients]
    parameters = [torch.nn.Parameter(torch.from_numpy(part.copy())) for part in split(start)]
    optimizer = make(parameters)
    schedule = scheduled and scheduled(optimizer)
    spec = _optimizers.from_torch(optimizer, schedule, N_STEPS)
    decays = [_optimizers.decayed(optimizer, parameter) for parameter in parameters]
    after = []
    for gradient in gradients:
        for parameter, part in zip(parameters, split(gradient)):
            parameter.grad = torch.from_numpy(part.copy())
        optimizer.step()
        if schedule:
            schedule.step()
        after.append(np.concatenate([parameter.detach().numpy() for parameter in parameters]))
    return spec, decays, after


def cases():
    """Names, and functions that run a case with a given precision."""
    for name, make in keras_cases():
        yield f"keras {name}", functools.partial(run_keras, make)
    for name, make, schedule in torch_cases():
        yield f"torch {name}", functools.partial(run_torch, make, schedule)


def rounded(weights):
    return [float(f"{weight:.9g}") for weight in weights]


def main():
    start, gradients = numbers()
    lines = []
    for name, run in cases():
        spec, decays, single = run(start, gradients)
        *_, double = run(start, gradients, "float64")
        kept = {
            precision: [rounded(after[step - 1]) for step in KEPT]
            for precision, after in [("single", single), ("double", double)]
        }
        lines.append(json.dumps({"name": name, "optimizer": spec, "decays": decays, **kept}))
    head = {
        "keras": keras.__version__,
        "torch": torch.__version__,
        "shapes": SHAPES,
        "start": rounded(start),
        "kept": KEPT,
    }
    rows = ",\n".join(json.dumps(rounded(gradient)) for gradient in gradients)
    text = ",\n".join(lines)
    head = json.dumps(head)[:-1]
    FILE.write_text(f'{head},\n"gradients": [\n{rows}\n],\n"cases": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
