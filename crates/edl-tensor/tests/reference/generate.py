# SPDX-License-Identifier: Apache-2.0
"""Computes the weights of Keras for fixed gradients, for the optimizer tests.

Run once by hand, with the packages pinned in requirements.txt:

    python generate.py

It writes one JSON file per optimizer to its own folder. Each contains cases: the optimizer as an
`OptimizerSpec`, the gradients of every step, and the weights of Keras after every step, in single
precision (Keras's default) and in double precision (the exact formula).
"""

import json
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_X64"] = "1"

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

HERE = Path(__file__).parent
N_WEIGHTS = 7
N_STEPS = 12


def adam(beta_1, beta_2, epsilon, amsgrad):
    return keras.optimizers.Adam, dict(
        beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, amsgrad=amsgrad
    )


def adamw(beta_1, beta_2, epsilon):
    return keras.optimizers.AdamW, dict(beta_1=beta_1, beta_2=beta_2, epsilon=epsilon)


def momentum(momentum, nesterov):
    return keras.optimizers.SGD, dict(momentum=momentum, nesterov=nesterov)


def adagrad(initial_accumulator, epsilon):
    return keras.optimizers.Adagrad, dict(
        initial_accumulator_value=initial_accumulator, epsilon=epsilon
    )


def rms_prop(rho, epsilon, momentum):
    return keras.optimizers.RMSprop, dict(rho=rho, epsilon=epsilon, momentum=momentum)


def ftrl(learning_rate_power, l1, l2, initial_accumulator):
    return keras.optimizers.Ftrl, dict(
        learning_rate_power=learning_rate_power,
        l1_regularization_strength=l1,
        l2_regularization_strength=l2,
        initial_accumulator_value=initial_accumulator,
    )


MAKERS = {
    "momentum": momentum,
    "adam": adam,
    "adam_w": adamw,
    "adagrad": adagrad,
    "rms_prop": rms_prop,
    "ftrl": ftrl,
}

SCHEDULES = keras.optimizers.schedules


def schedule(spec, rate):
    """The Keras schedule that is equivalent to ours."""
    if spec == "constant":
        return rate
    ((kind, numbers),) = spec.items()
    if kind == "steps":
        # Keras changes the rate after a boundary, ours at it.
        bounds = [step - 1 for step in numbers["steps"]]
        values = [rate * numbers["factor"] ** i for i in range(len(bounds) + 1)]
        return SCHEDULES.PiecewiseConstantDecay(bounds, values)
    if kind == "exponential":
        return SCHEDULES.ExponentialDecay(rate, numbers["every"], numbers["factor"])
    if kind == "cosine":
        assert numbers["warmup"] == 0, "Keras starts its warm-up at zero"
        return SCHEDULES.CosineDecay(rate, numbers["total"], alpha=numbers["floor"])
    if kind == "linear":
        assert numbers["warmup"] == 0, "Keras has no linear warm-up of this kind"
        return SCHEDULES.PolynomialDecay(rate, numbers["total"], 0.0, power=1.0)
    raise ValueError(kind)


def make(spec):
    """The Keras optimizer for an `OptimizerSpec`, and the L2 penalty for its loss."""
    kind, rate = spec["kind"], schedule(spec["schedule"], spec["learning_rate"])
    decay = spec["weight_decay"]
    if kind == "sgd":
        return keras.optimizers.SGD(rate), decay
    ((name, numbers),) = kind.items()
    cls, arguments = MAKERS[name](**numbers)
    if name == "adam_w":
        return cls(rate, weight_decay=decay, **arguments), 0.0
    return cls(rate, **arguments), decay


def loss(weights, gradient, l2):
    """A loss with the given gradient and an L2 penalty."""
    return (weights * gradient).sum() + 0.5 * l2 * (weights * weights).sum()


def run(spec, start, gradients, dtype):
    """The weights after every step."""
    keras.config.set_floatx(dtype)
    optimizer, l2 = make(spec)
    weights = keras.Variable(np.array(start, dtype), dtype=dtype)
    optimizer.build([weights])
    after = []
    for gradient in gradients:
        gradient = jax.grad(loss)(weights.value, np.array(gradient, dtype), l2)
        optimizer.apply_gradients([(gradient, weights)])
        after.append([float(number) for number in np.asarray(weights.value)])
    return after


def case(name, kind, rate, schedule="constant", decay=0.0):
    rng = np.random.default_rng(len(name))
    start = rng.uniform(-1, 1, N_WEIGHTS).astype("float32")
    gradients = rng.normal(0, 1, (N_STEPS, N_WEIGHTS)).astype("float32")
    # Rows that are not in a batch have no gradient; formulas must handle zeros.
    gradients[:, 0] = 0.0
    gradients[3] = 0.0
    spec = dict(kind=kind, learning_rate=rate, schedule=schedule, weight_decay=decay)
    start, gradients = start.tolist(), gradients.tolist()
    return dict(
        name=name,
        optimizer=spec,
        start=start,
        gradients=gradients,
        single=run(spec, start, gradients, "float32"),
        double=run(spec, start, gradients, "float64"),
    )


def adam_kind(amsgrad=False, **numbers):
    return {"adam": dict(beta_1=0.9, beta_2=0.999, epsilon=1e-7, amsgrad=amsgrad) | numbers}


def files():
    adamw_kind = {"adam_w": dict(beta_1=0.9, beta_2=0.999, epsilon=1e-7)}
    heavy = {"momentum": dict(momentum=0.9, nesterov=False)}
    nesterov = {"momentum": dict(momentum=0.9, nesterov=True)}
    adagrad = {"adagrad": dict(initial_accumulator=0.1, epsilon=1e-7)}
    rms = {"rms_prop": dict(rho=0.9, epsilon=1e-7, momentum=0.0)}
    rms_momentum = {"rms_prop": dict(rho=0.9, epsilon=1e-7, momentum=0.5)}
    ftrl = dict(learning_rate_power=-0.5, l1=0.0, l2=0.0, initial_accumulator=0.1)
    steps = {"steps": dict(steps=[3, 7], factor=0.1)}
    exponential = {"exponential": dict(every=5, factor=0.5)}
    cosine = {"cosine": dict(warmup=0, total=10, floor=0.1)}
    linear = {"linear": dict(warmup=0, total=20)}
    return {
        "sgd": [
            case("plain", "sgd", 0.1),
            case("decay", "sgd", 0.1, decay=0.01),
            case("steps", "sgd", 0.1, schedule=steps),
            case("exponential", "sgd", 0.1, schedule=exponential),
            case("cosine", "sgd", 0.1, schedule=cosine),
            case("linear", "sgd", 0.1, schedule=linear),
        ],
        "momentum": [
            case("plain", heavy, 0.05),
            case("decay", heavy, 0.05, decay=0.01),
            case("nesterov", nesterov, 0.05),
            case("nesterov, decay and schedule", nesterov, 0.05, schedule=cosine, decay=0.01),
        ],
        "adam": [
            case("plain", adam_kind(), 0.01),
            case("other numbers", adam_kind(beta_1=0.8, beta_2=0.95, epsilon=1e-3), 0.01),
            case("decay", adam_kind(), 0.01, decay=0.1),
            case("schedule", adam_kind(), 0.01, schedule=exponential),
            case("amsgrad", adam_kind(amsgrad=True), 0.01),
            case("amsgrad and decay", adam_kind(amsgrad=True, beta_2=0.5), 0.01, decay=0.1),
        ],
        "adam_w": [
            case("plain", adamw_kind, 0.01),
            case("decay", adamw_kind, 0.01, decay=0.1),
            case("decay and schedule", adamw_kind, 0.01, schedule=steps, decay=0.1),
        ],
        "adagrad": [
            case("plain", adagrad, 0.1),
            case("decay", adagrad, 0.1, decay=0.1),
            case("schedule", adagrad, 0.1, schedule=linear),
        ],
        "rms_prop": [
            case("plain", rms, 0.01),
            case("decay", rms, 0.01, decay=0.1),
            case("momentum", rms_momentum, 0.01),
            case("momentum and schedule", rms_momentum, 0.01, schedule=exponential),
        ],
        "ftrl": [
            case("plain", {"ftrl": ftrl}, 0.1),
            case("l1 and l2", {"ftrl": ftrl | dict(l1=0.05, l2=0.1)}, 0.1),
            case("other power", {"ftrl": ftrl | dict(learning_rate_power=-0.7)}, 0.1),
            case("decay and schedule", {"ftrl": ftrl}, 0.1, schedule=cosine, decay=0.1),
        ],
    }


def main():
    for name, cases in files().items():
        lines = ",\n".join(json.dumps(case) for case in cases)
        text = f'{{"keras": "{keras.__version__}", "cases": [\n{lines}\n]}}\n'
        (HERE / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
