# SPDX-License-Identifier: Apache-2.0
"""Converts the user's optimizer to an `OptimizerSpec` (crates/edl-core/src/optimizer.rs).

Optimizers run in Rust; this module only reads their hyperparameters.
It imports Keras or PyTorch only if the user's optimizer comes from it.
"""

from __future__ import annotations

from typing import Any, Callable

from elasticdl import _schedules
from elasticdl._zoo import ZooError

Spec = dict[str, Any]


def from_keras(optimizer: Any, n_steps: int | None = None, schedule: Any = None) -> Spec:
    """Returns the spec of a Keras optimizer.

    `schedule`, a function of the step or a Keras schedule, replaces its learning rate if given.
    `n_steps` is the maximum number of steps; without it, only known formulas are supported.
    """
    kind = _kind(optimizer, _KERAS, "keras")
    _refuse(optimizer, vars(optimizer), _KERAS_REFUSED)
    learning_rate = optimizer._learning_rate if schedule is None else schedule
    dtype = optimizer.iterations.dtype
    rate, factors = _schedules.from_keras(learning_rate, n_steps, dtype)
    return {
        "kind": kind,
        "learning_rate": rate,
        "schedule": factors,
        "weight_decay": float(optimizer.weight_decay or 0.0),
        "decoupled": True,
        "dialect": "keras",
        "clip": _keras_clip(optimizer),
    }


def from_torch(
    optimizer: Any,
    schedule: Any = None,
    n_steps: int | None = None,
    epoch_steps: int | None = None,
) -> Spec:
    """Returns the spec of a PyTorch optimizer.

    `schedule` is an `LRScheduler` or a function. It counts steps, or epochs of `epoch_steps` steps.
    """
    kind = _kind(optimizer, _TORCH, "torch")
    group = _one_group(optimizer)
    _refuse(optimizer, group, _TORCH_REFUSED)
    rate, factors, changes = _schedules.from_torch(group, schedule, n_steps, epoch_steps)
    return {
        "kind": kind,
        "learning_rate": rate,
        "schedule": factors,
        **({"momentum_schedule": changes} if changes else {}),
        "weight_decay": max(float(group["weight_decay"]) for group in optimizer.param_groups),
        "decoupled": bool(group.get("decoupled_weight_decay", False)),
        "dialect": "torch",
        "clip": None,
    }


def decayed(optimizer: Any, variable: Any) -> bool:
    """Whether weight decay applies to a Keras variable or a PyTorch parameter."""
    if not hasattr(optimizer, "param_groups"):
        return bool(optimizer._use_weight_decay(variable))
    groups = optimizer.param_groups
    decays = [float(group.get("weight_decay", 0.0)) for group in groups]
    if not any(decays):
        return True
    return any(decay and _is_in(variable, group) for decay, group in zip(decays, groups))


def holds(optimizer: Any, parameter: Any) -> bool:
    """Whether a PyTorch optimizer updates the parameter."""
    return any(_is_in(parameter, group) for group in optimizer.param_groups)


def _is_in(parameter: Any, group: Spec) -> bool:
    return any(parameter is member for member in group["params"])


def _kind(optimizer: Any, kinds: dict[str, Callable[[Any], Any]], library: str) -> Any:
    kind = type(optimizer)
    # A user-defined class may do anything, regardless of its name or base classes.
    is_theirs = kind.__module__.partition(".")[0] == library
    if not is_theirs or kind.__name__ not in kinds:
        raise ZooError(
            f"the optimizer `{kind.__module__}.{kind.__qualname__}` is not supported; choose one "
            f"of {', '.join(sorted(kinds))} from {library}"
        )
    return kinds[kind.__name__](optimizer)


def _refuse(optimizer: Any, options: Spec, refused: dict[str, str]) -> None:
    for name, advice in refused.items():
        if options.get(name):
            given = f"{name}={options[name]!r}"
            raise ZooError(
                f"`{given}` of the optimizer `{type(optimizer).__name__}` is not supported; "
                f"{advice}"
            )


# Keras.

_KERAS_REFUSED = {
    "use_ema": "remove it",
    "loss_scale_factor": "remove it: gradients are single precision",
    "gradient_accumulation_steps": "remove it, and use a larger --minibatch_size",
}


def _keras_clip(optimizer: Any) -> Spec | None:
    if optimizer.clipnorm:
        return {"norm": float(optimizer.clipnorm)}
    if optimizer.global_clipnorm:
        return {"global_norm": float(optimizer.global_clipnorm)}
    if optimizer.clipvalue:
        return {"value": float(optimizer.clipvalue)}
    return None


def _numbers(optimizer: Any, *names: str) -> Spec:
    return {name: float(getattr(optimizer, name)) for name in names}


def _keras_sgd(optimizer: Any) -> Any:
    if not optimizer.momentum:
        return "sgd"
    numbers = _numbers(optimizer, "momentum")
    return {"momentum": {**numbers, "nesterov": bool(optimizer.nesterov), "dampening": 0.0}}


def _keras_adam(optimizer: Any) -> Any:
    numbers = _numbers(optimizer, "beta_1", "beta_2", "epsilon")
    return {"adam": {**numbers, "amsgrad": bool(optimizer.amsgrad)}}


def _keras_adamw(optimizer: Any) -> Any:
    # Weight decay is decoupled in every Keras spec; AdamW with AMSGrad has no separate name.
    if optimizer.amsgrad:
        return _keras_adam(optimizer)
    return {"adam_w": _numbers(optimizer, "beta_1", "beta_2", "epsilon")}


def _keras_adagrad(optimizer: Any) -> Any:
    first = float(optimizer.initial_accumulator_value)
    return {"adagrad": {"initial_accumulator": first, **_numbers(optimizer, "epsilon")}}


def _keras_rmsprop(optimizer: Any) -> Any:
    numbers = _numbers(optimizer, "rho", "epsilon", "momentum")
    return {"rms_prop": {**numbers, "centered": bool(optimizer.centered)}}


def _keras_ftrl(optimizer: Any) -> Any:
    return {
        "ftrl": {
            "learning_rate_power": float(optimizer.learning_rate_power),
            "l1": float(optimizer.l1_regularization_strength),
            "l2": float(optimizer.l2_regularization_strength),
            "initial_accumulator": float(optimizer.initial_accumulator_value),
            "l2_shrinkage": float(optimizer.l2_shrinkage_regularization_strength),
            "beta": float(optimizer.beta),
        }
    }


_KERAS: dict[str, Callable[[Any], Any]] = {
    "SGD": _keras_sgd,
    "Adam": _keras_adam,
    "AdamW": _keras_adamw,
    "Adagrad": _keras_adagrad,
    "RMSprop": _keras_rmsprop,
    "Ftrl": _keras_ftrl,
    "Adadelta": lambda o: {"adadelta": _numbers(o, "rho", "epsilon")},
    "Adamax": lambda o: {"adamax": _numbers(o, "beta_1", "beta_2", "epsilon")},
    "Nadam": lambda o: {
        "nadam": {**_numbers(o, "beta_1", "beta_2", "epsilon"), "momentum_decay": 1.0}
    },
    "Lion": lambda o: {"lion": _numbers(o, "beta_1", "beta_2")},
}


# PyTorch.

_TORCH_REFUSED = {
    "maximize": "remove it, and negate the loss",
    "differentiable": "remove it",
}

# Options that may differ between groups.
_OF_A_GROUP = {"params", "param_names", "weight_decay"}


def _one_group(optimizer: Any) -> Spec:
    """Returns the options of all groups, which may differ only in whether weights decay."""
    first, *others = optimizer.param_groups
    for group in others:
        for name in first.keys() - _OF_A_GROUP:
            if group.get(name) != first[name]:
                raise ZooError(
                    f"the optimizer's parameter groups differ in `{name}` ({first[name]!r} and "
                    f"{group.get(name)!r}), which is not supported; give every group the same "
                    f"`{name}`"
                )
    decays = {float(group["weight_decay"]) for group in optimizer.param_groups} - {0.0}
    if len(decays) > 1:
        text = " and ".join(str(decay) for decay in sorted(decays))
        raise ZooError(
            f"the optimizer's parameter groups have the weight decays {text}; give every group "
            "the same `weight_decay`, or 0"
        )
    return first


def _betas(group: Spec) -> Spec:
    beta_1, beta_2 = group["betas"]
    return {"beta_1": float(beta_1), "beta_2": float(beta_2), "epsilon": float(group["eps"])}


def _torch_sgd(group: Spec) -> Any:
    if not group["momentum"]:
        return "sgd"
    return {
        "momentum": {
            "momentum": float(group["momentum"]),
            "nesterov": bool(group["nesterov"]),
            "dampening": float(group["dampening"]),
        }
    }


def _torch_adam(group: Spec) -> Any:
    return {"adam": {**_betas(group), "amsgrad": bool(group["amsgrad"])}}


def _torch_adamw(group: Spec) -> Any:
    return _torch_adam(group) if group["amsgrad"] else {"adam_w": _betas(group)}


def _torch_adagrad(group: Spec) -> Any:
    first = float(group["initial_accumulator_value"])
    return {"adagrad": {"initial_accumulator": first, "epsilon": float(group["eps"])}}


def _torch_rmsprop(group: Spec) -> Any:
    return {
        "rms_prop": {
            "rho": float(group["alpha"]),
            "epsilon": float(group["eps"]),
            "momentum": float(group["momentum"]),
            "centered": bool(group["centered"]),
        }
    }


def _torch_adadelta(group: Spec) -> Any:
    return {"adadelta": {"rho": float(group["rho"]), "epsilon": float(group["eps"])}}


def _torch_nadam(group: Spec) -> Any:
    return {"nadam": {**_betas(group), "momentum_decay": float(group["momentum_decay"])}}


def _of_first_group(read: Callable[[Spec], Any]) -> Callable[[Any], Any]:
    return lambda optimizer: read(optimizer.param_groups[0])


_TORCH: dict[str, Callable[[Any], Any]] = {
    "SGD": _of_first_group(_torch_sgd),
    "Adam": _of_first_group(_torch_adam),
    "AdamW": _of_first_group(_torch_adamw),
    "Adagrad": _of_first_group(_torch_adagrad),
    "RMSprop": _of_first_group(_torch_rmsprop),
    "Adadelta": _of_first_group(_torch_adadelta),
    "Adamax": _of_first_group(lambda group: {"adamax": _betas(group)}),
    "NAdam": _of_first_group(_torch_nadam),
}
