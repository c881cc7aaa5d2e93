# SPDX-License-Identifier: Apache-2.0
"""Converts learning-rate schedules to `Schedule` (crates/edl-core/src/optimizer/schedule.rs).

Common schedules become formulas. Any other is evaluated for each step of the job and becomes a
table of runs. Rates are given as a base rate and factors.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any, Callable

import numpy as np

from elasticdl._zoo import ZooError

# Limits the table, which is part of the model description that every process reads.
MAX_RUNS = 1_000_000

# How often a PyTorch scheduler is stepped.
_INTERVALS = ("step", "epoch")
# Options of an optimizer that a scheduler may change.
_SCHEDULED = ("lr", "momentum", "betas")
# Schedulers that are always stepped after each batch.
_PER_STEP = ("OneCycleLR", "CyclicLR")

# Enough digits for single precision, but short.
_DIGITS = 9

Schedule = Any  # "constant", or a dict of one entry
Rated = tuple[float, Schedule]


def from_keras(learning_rate: Any, n_steps: int | None, step_dtype: str) -> Rated:
    """Returns the rate and the schedule for the learning rate of a Keras optimizer."""
    if not callable(learning_rate):
        return _shortest(learning_rate), "constant"
    known = _of_library(learning_rate, _KERAS, "keras")
    if known is not None:
        return known
    if hasattr(learning_rate, "get_config"):
        return _table(_keras_rates(learning_rate, _needed(n_steps, learning_rate), step_dtype))
    return _table(_function_rates(learning_rate, _needed(n_steps, learning_rate)))


def interval(schedule: Any, every: str | None) -> str:
    """Returns whether a PyTorch schedule counts steps or epochs: `step` or `epoch`."""
    if every is not None and every not in _INTERVALS:
        raise ZooError(f"`schedule_every` is {every!r}; use 'step' or 'epoch'")
    name = type(schedule).__name__
    if every is not None or not hasattr(schedule, "get_last_lr") or name in _PER_STEP:
        return every or "step"
    raise ZooError(
        f"the scheduler `{name}` can count steps or epochs; set `schedule_every` to 'epoch' if "
        "your script called `scheduler.step()` after each epoch, or to 'step'"
    )


def from_torch(
    group: dict[str, Any], schedule: Any, n_steps: int | None, epoch_steps: int | None = None
) -> tuple[float, Schedule, Schedule | None]:
    """Returns the rate of a PyTorch optimizer, its schedule, and that of a changing momentum.

    `group` has the optimizer's options; `lr_decay` of Adagrad is applied in addition to the
    schedule. `epoch_steps` is the number of steps per epoch for a schedule that counts epochs.
    """
    lr_decay = float(group.get("lr_decay", 0.0))
    if schedule is None:
        base = float(group.get("initial_lr", group["lr"]))
        if lr_decay:
            numbers = {"every": 1, "factor": lr_decay, "staircase": False}
            return base, {"inverse_time": numbers}, None
        return base, "constant", None
    is_plain = getattr(schedule, "last_epoch", 1) == 0 and not lr_decay and epoch_steps is None
    known = _of_library(schedule, _TORCH, "torch") if is_plain else None
    if known is not None:
        return *known, None
    rates, momenta = torch_values(schedule, _needed(n_steps, schedule), epoch_steps)
    changes = None if momenta is None else _runs(momenta, momentum(group))
    return *_table(_decayed(rates, lr_decay)), changes


def torch_values(
    schedule: Any, n_steps: int, epoch_steps: int | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the learning rate of each step, and the momentum if it changes."""
    n_values = n_steps if epoch_steps is None else -(-n_steps // epoch_steps)
    if hasattr(schedule, "get_last_lr"):
        rates, momenta = _scheduler_values(schedule, n_values)
    else:
        rates, momenta = _function_rates(schedule, n_values), None
    if epoch_steps is not None:
        rates = np.repeat(rates, epoch_steps)[:n_steps]
        momenta = None if momenta is None else np.repeat(momenta, epoch_steps)[:n_steps]
    return rates, momenta


def _of_library(schedule: Any, known: dict[str, Callable[[Any], Any]], library: str) -> Any:
    kind = type(schedule)
    read = known.get(kind.__name__)
    is_theirs = kind.__module__.partition(".")[0] == library
    return read(schedule) if read is not None and is_theirs else None


def _function_rates(schedule: Callable[[int], Any], n_values: int) -> np.ndarray:
    """Evaluates a function from the step to the rate."""
    try:
        inspect.signature(schedule).bind(0)
    except TypeError:
        raise ZooError(
            f"the learning rate is a function that does not take the step ({schedule!r}); use a "
            "number, a schedule, or a function with the step as its only argument"
        ) from None
    return np.array([float(schedule(step)) for step in range(n_values)])


def _decayed(rates: np.ndarray, lr_decay: float) -> np.ndarray:
    return rates / (1.0 + lr_decay * np.arange(len(rates)))


def _needed(n_steps: int | None, schedule: Any) -> int:
    if n_steps is None:
        name = getattr(schedule, "__name__", type(schedule).__name__)
        raise ZooError(
            f"the learning-rate schedule `{name}` is evaluated for each step before training, but "
            "the number of steps is unknown; set --num_epochs"
        )
    return max(n_steps, 1)


def _table(rates: np.ndarray) -> Rated:
    """Returns the highest rate, and runs of equal factors."""
    if not np.isfinite(rates).all():
        step = int(np.flatnonzero(~np.isfinite(rates))[0])
        raise ZooError(
            f"the learning-rate schedule is {rates[step]} at step {step}; it must be finite"
        )
    rate = _shortest(np.abs(rates).max())
    if rate == 0.0:
        return 0.0, "constant"
    starts = np.flatnonzero(np.diff(rates, prepend=np.nan) != 0.0)
    if len(starts) > MAX_RUNS:
        raise ZooError(
            f"the learning-rate schedule changes {len(starts)} times, but at most {MAX_RUNS} "
            "changes are supported; change the rate less often, for example every 100 steps"
        )
    if len(starts) == 1 and rates[0] > 0.0:
        return rate, "constant"
    return rate, _runs(rates, rate)


def _runs(values: np.ndarray, base: float) -> Schedule:
    """Returns runs of equal factors of `base`."""
    starts = np.flatnonzero(np.diff(values, prepend=np.nan) != 0.0)
    factors = [float(f"{values[start] / base:.{_DIGITS}g}") for start in starts]
    return {"table": {"starts": starts.tolist(), "factors": factors}}


def _shortest(number: Any) -> float:
    """Returns the shortest decimal representation of a single-precision number."""
    return float(str(np.float32(number)))


# Keras.


def _keras_rates(schedule: Any, n_steps: int, step_dtype: str) -> np.ndarray:
    import keras

    def rates(steps: Any) -> np.ndarray:
        steps = keras.ops.convert_to_tensor(steps, dtype=step_dtype)
        return np.asarray(keras.ops.convert_to_numpy(schedule(steps)), np.float64)

    steps = np.arange(n_steps)
    # One call for all steps is a thousand times faster, but fails if the schedule uses `if`.
    try:
        found = rates(steps)
    except Exception:
        found = np.empty(0)
    probes = np.unique(np.linspace(0, n_steps - 1, 32).astype(int))
    if found.shape == steps.shape and all(
        np.isclose(found[probe], rates(probe), rtol=1e-6, atol=0.0) for probe in probes
    ):
        return found
    return np.array([float(rates(step)) for step in steps])


def _whole(number: Any) -> int | None:
    return int(number) if float(number).is_integer() and number > 0 else None


def _keras_exponential(schedule: Any) -> Rated | None:
    return _keras_periodic("exponential", schedule)


def _keras_inverse(schedule: Any) -> Rated | None:
    return _keras_periodic("inverse_time", schedule)


def _keras_periodic(name: str, schedule: Any) -> Rated | None:
    every = _whole(schedule.decay_steps)
    if every is None:
        return None
    factor, staircase = float(schedule.decay_rate), bool(schedule.staircase)
    numbers = {"every": every, "factor": factor, "staircase": staircase}
    return float(schedule.initial_learning_rate), {name: numbers}


def _keras_piecewise(schedule: Any) -> Rated | None:
    boundaries, values = schedule.boundaries, [float(value) for value in schedule.values]
    rate = max(abs(value) for value in values)
    if rate == 0.0 or any(float(bound) != int(bound) or bound < 0 for bound in boundaries):
        return None
    # Keras changes the rate after a boundary, not at it.
    starts = [0] + [int(bound) + 1 for bound in boundaries]
    return rate, {"table": {"starts": starts, "factors": [value / rate for value in values]}}


def _keras_polynomial(schedule: Any) -> Rated | None:
    rate, total = float(schedule.initial_learning_rate), _whole(schedule.decay_steps)
    if total is None or rate == 0.0:
        return None
    numbers = {
        "start": 1.0,
        "end": float(schedule.end_learning_rate) / rate,
        "total": total,
        "power": float(schedule.power),
        "cycle": bool(schedule.cycle),
    }
    return rate, {"polynomial": numbers}


def _keras_cosine(schedule: Any) -> Rated | None:
    first, decay_steps = float(schedule.initial_learning_rate), _whole(schedule.decay_steps)
    has_warmup = schedule.warmup_target is not None
    rate = float(schedule.warmup_target) if has_warmup else first
    warmup = int(schedule.warmup_steps) if has_warmup else 0
    if decay_steps is None or rate == 0.0 or warmup != (schedule.warmup_steps or 0) * has_warmup:
        return None
    numbers = {
        "warmup": warmup,
        "total": warmup + decay_steps,
        "floor": float(schedule.alpha),
        "start": first / rate if has_warmup else None,
        "waves": False,
    }
    return rate, {"cosine": numbers}


_KERAS: dict[str, Callable[[Any], Rated | None]] = {
    "ExponentialDecay": _keras_exponential,
    "InverseTimeDecay": _keras_inverse,
    "PiecewiseConstantDecay": _keras_piecewise,
    "PolynomialDecay": _keras_polynomial,
    "CosineDecay": _keras_cosine,
}


# PyTorch.


def is_steppable(schedule: Any) -> bool:
    """Whether it is a scheduler with state that does not depend on a metric."""
    if not hasattr(schedule, "state_dict"):
        return False
    try:
        inspect.signature(schedule.step).bind()
    except TypeError:
        return False
    return True


def _scheduler_values(schedule: Any, n_values: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the rates and momenta that the scheduler sets, and restores its state."""
    if not is_steppable(schedule):
        raise ZooError(
            f"the scheduler `{type(schedule).__name__}` depends on a metric, which is not known "
            "before training; use one that depends only on the step, such as StepLR"
        )
    optimizer = schedule.optimizer
    state = copy.deepcopy(schedule.state_dict())
    options = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    rates, momenta = np.empty(n_values), np.empty(n_values)
    try:
        with warnings.catch_warnings():
            # The scheduler warns that the optimizer takes no steps.
            warnings.simplefilter("ignore")
            for step in range(n_values):
                _check_change(schedule, options)
                rates[step] = float(optimizer.param_groups[0]["lr"])
                momenta[step] = momentum(optimizer.param_groups[0])
                if step + 1 < n_values:
                    schedule.step()
    finally:
        schedule.load_state_dict(state)
        for group, option in zip(optimizer.param_groups, options):
            group.update(option)
    return rates, momenta if np.ptp(momenta) else None


def momentum(group: dict[str, Any]) -> float:
    """Returns the momentum, or the first beta, of a parameter group; 0 if it has neither."""
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


def set_momentum(group: dict[str, Any], number: float) -> None:
    """Sets the momentum, or the first beta, of a parameter group."""
    if "betas" in group:
        group["betas"] = (number, *group["betas"][1:])
    else:
        group["momentum"] = number


def _check_change(schedule: Any, options: list[dict[str, Any]]) -> None:
    """Rejects changes of more than the learning rate and the momentum of all parameters."""
    groups, name = schedule.optimizer.param_groups, type(schedule).__name__
    first = groups[0]
    for group, before in zip(groups, options):
        if group["lr"] != first["lr"] or momentum(group) != momentum(first):
            raise ZooError(
                f"the scheduler `{name}` sets different values for the optimizer's parameter "
                "groups, which is not supported; use the same for all groups"
            )
        changed = [key for key in before if key not in _SCHEDULED and group[key] != before[key]]
        is_nadam = type(schedule.optimizer).__name__ == "NAdam"
        if is_nadam and momentum(group) != momentum(before):
            changed.append("betas")
        if changed:
            raise ZooError(
                f"the scheduler `{name}` changes `{changed[0]}` of the optimizer "
                f"`{type(schedule.optimizer).__name__}`, which is not supported"
            )


def _torch_step(schedule: Any) -> Rated:
    numbers = {"every": schedule.step_size, "factor": float(schedule.gamma), "staircase": True}
    return float(schedule.base_lrs[0]), {"exponential": numbers}


def _torch_multi_step(schedule: Any) -> Rated:
    steps = sorted(int(step) for step in schedule.milestones.elements())
    numbers = {"steps": steps, "factor": float(schedule.gamma)}
    return float(schedule.base_lrs[0]), {"steps": numbers}


def _torch_exponential(schedule: Any) -> Rated:
    numbers = {"every": 1, "factor": float(schedule.gamma), "staircase": False}
    return float(schedule.base_lrs[0]), {"exponential": numbers}


def _torch_cosine(schedule: Any) -> Rated | None:
    rate, total = float(schedule.base_lrs[0]), _whole(schedule.T_max)
    if total is None or rate == 0.0:
        return None
    floor = float(schedule.eta_min) / rate
    numbers = {"warmup": 0, "total": total, "floor": floor, "start": None, "waves": True}
    return rate, {"cosine": numbers}


def _torch_linear(schedule: Any) -> Rated:
    return float(schedule.base_lrs[0]), {
        "polynomial": {
            "start": float(schedule.start_factor),
            "end": float(schedule.end_factor),
            "total": int(schedule.total_iters),
            "power": 1.0,
            "cycle": False,
        }
    }


def _torch_polynomial(schedule: Any) -> Rated:
    return float(schedule.base_lrs[0]), {
        "polynomial": {
            "start": 1.0,
            "end": 0.0,
            "total": int(schedule.total_iters),
            "power": float(schedule.power),
            "cycle": False,
        }
    }


_TORCH: dict[str, Callable[[Any], Rated | None]] = {
    "StepLR": _torch_step,
    "MultiStepLR": _torch_multi_step,
    "ExponentialLR": _torch_exponential,
    "CosineAnnealingLR": _torch_cosine,
    "LinearLR": _torch_linear,
    "PolynomialLR": _torch_polynomial,
}
