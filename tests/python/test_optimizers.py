# SPDX-License-Identifier: Apache-2.0
"""Converts the user's optimizer to its Rust description.

The Rust tests check that these descriptions give the numbers of the library, with values from
optimizer_golden.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

from elasticdl import _optimizers, _schedules
from elasticdl._zoo import ZooError

KERAS = {"weight_decay": 0.0, "schedule": "constant", "decoupled": True, "dialect": "keras"}
TORCH = {"weight_decay": 0.0, "schedule": "constant", "decoupled": False, "dialect": "torch"}
BETAS = {"beta_1": 0.9, "beta_2": 0.999}


@pytest.fixture(scope="module")
def k():
    return pytest.importorskip("keras").optimizers


@pytest.fixture(scope="module")
def t():
    if "tensorflow" in sys.modules:
        pytest.skip("TensorFlow and the Triton of PyTorch cannot be in one process")
    return pytest.importorskip("torch").optim


@pytest.fixture
def params(t):
    import torch

    return [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]


def test_the_usual_keras_optimizers(k):
    adam = {**BETAS, "epsilon": 1e-7}
    ftrl = {"learning_rate_power": -0.5, "l1": 0.0, "l2": 0.0, "initial_accumulator": 0.1}
    ftrl = {**ftrl, "l2_shrinkage": 0.0, "beta": 0.0}
    momentum = {"momentum": 0.9, "nesterov": True, "dampening": 0.0}
    rms_prop = {"rho": 0.9, "epsilon": 1e-7, "momentum": 0.0, "centered": False}
    nesterov = k.SGD(momentum=0.9, nesterov=True)
    for optimizer, rate, kind in [
        (k.SGD(), 0.01, "sgd"),
        (nesterov, 0.01, {"momentum": momentum}),
        (k.Adam(), 0.001, {"adam": {**adam, "amsgrad": False}}),
        (k.Adagrad(), 0.001, {"adagrad": {"initial_accumulator": 0.1, "epsilon": 1e-7}}),
        (k.RMSprop(), 0.001, {"rms_prop": rms_prop}),
        (k.Ftrl(), 0.001, {"ftrl": ftrl}),
        (k.Adadelta(), 0.001, {"adadelta": {"rho": 0.95, "epsilon": 1e-7}}),
        (k.Adamax(), 0.001, {"adamax": adam}),
        (k.Nadam(), 0.001, {"nadam": {**adam, "momentum_decay": 1.0}}),
        (k.Lion(), 0.001, {"lion": {"beta_1": 0.9, "beta_2": 0.99}}),
    ]:
        expected = {"kind": kind, "learning_rate": rate, **KERAS, "clip": None}
        assert _optimizers.from_keras(optimizer) == expected
    adamw = _optimizers.from_keras(k.AdamW(0.5))
    assert adamw == {
        **{"kind": {"adam_w": adam}, "learning_rate": 0.5, **KERAS, "clip": None},
        "weight_decay": 0.004,
    }
    amsgrad = _optimizers.from_keras(k.AdamW(amsgrad=True))
    assert amsgrad["kind"] == {"adam": {**adam, "amsgrad": True}}
    assert amsgrad["decoupled"] and amsgrad["weight_decay"] == 0.004


def test_the_usual_torch_optimizers(t, params):
    adam = {**BETAS, "epsilon": 1e-8}
    momentum = {"momentum": 0.9, "nesterov": False, "dampening": 0.5}
    rms_prop = {"rho": 0.99, "epsilon": 1e-8, "momentum": 0.0, "centered": False}
    for optimizer, rate, kind in [
        (t.SGD(params), 0.001, "sgd"),
        (t.SGD(params, 0.1, 0.9, 0.5), 0.1, {"momentum": momentum}),
        (t.Adam(params), 0.001, {"adam": {**adam, "amsgrad": False}}),
        (t.Adagrad(params), 0.01, {"adagrad": {"initial_accumulator": 0.0, "epsilon": 1e-10}}),
        (t.RMSprop(params), 0.01, {"rms_prop": rms_prop}),
        (t.Adadelta(params), 1.0, {"adadelta": {"rho": 0.9, "epsilon": 1e-6}}),
        (t.Adamax(params), 0.002, {"adamax": adam}),
        (t.NAdam(params), 0.002, {"nadam": {**adam, "momentum_decay": 0.004}}),
    ]:
        expected = {"kind": kind, "learning_rate": rate, **TORCH, "clip": None}
        assert _optimizers.from_torch(optimizer) == expected
    adamw = _optimizers.from_torch(t.AdamW(params))
    assert adamw["kind"] == {"adam_w": adam}
    assert adamw["decoupled"] and adamw["weight_decay"] == 0.01
    assert _optimizers.from_torch(t.AdamW(params, amsgrad=True))["decoupled"]


def test_the_golden_values_of_the_rust_tests_are_current(k, t):
    """The values in the repository were computed with the current specs."""
    import optimizer_golden as golden

    kept = json.loads(golden.FILE.read_text())["cases"]
    start, _ = golden.numbers()
    cases = dict(golden.cases())
    assert [case["name"] for case in kept] == list(cases)
    for case in kept:
        spec, decays, _ = cases[case["name"]](start, [])
        assert near(json.loads(json.dumps(spec)), case["optimizer"]), case["name"]
        assert decays == case["decays"], case["name"]


def near(a, b):
    """Equal except for the rounding of a backend."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(near(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(near, a, b))
    return a == (pytest.approx(b, rel=1e-6, abs=1e-7) if isinstance(b, float) else b)


def test_clipping_is_converted(k):
    assert _optimizers.from_keras(k.SGD(clipnorm=2))["clip"] == {"norm": 2.0}
    assert _optimizers.from_keras(k.SGD(global_clipnorm=2))["clip"] == {"global_norm": 2.0}
    assert _optimizers.from_keras(k.SGD(clipvalue=0.5))["clip"] == {"value": 0.5}


def test_an_unsupported_optimizer_is_an_error_that_lists_the_supported_ones(k, t, params):
    with pytest.raises(ZooError) as keras_error:
        _optimizers.from_keras(k.Adafactor())
    assert "Adafactor` is not supported" in str(keras_error.value)
    assert "Adadelta, Adagrad, Adam, AdamW, Adamax, Ftrl, Lion, Nadam" in str(keras_error.value)
    with pytest.raises(ZooError) as torch_error:
        _optimizers.from_torch(t.LBFGS(params))
    assert str(torch_error.value) == (
        "the optimizer `torch.optim.lbfgs.LBFGS` is not supported; choose one of Adadelta, "
        "Adagrad, Adam, AdamW, Adamax, NAdam, RMSprop, SGD from torch"
    )


def test_a_custom_class_is_not_mistaken_for_its_parent(k):
    class Adam(k.Adam):
        def update_step(self, gradient, variable, learning_rate):
            raise NotImplementedError

    with pytest.raises(ZooError, match="is not supported; choose one of"):
        _optimizers.from_keras(Adam())


def test_unsupported_options_are_refused_by_name(k, t, params):
    for options in [
        {"use_ema": True},
        {"loss_scale_factor": 2.0},
        {"gradient_accumulation_steps": 2},
    ]:
        (name,) = options
        with pytest.raises(ZooError, match=f"`{name}=.*` of the optimizer `Adam` is not supported"):
            _optimizers.from_keras(k.Adam(**options))
    for name in ["maximize", "differentiable"]:
        with pytest.raises(ZooError, match=f"`{name}=True` of the optimizer `SGD`"):
            _optimizers.from_torch(t.SGD(params, 0.1, **{name: True}))


def test_keras_variables_can_be_excluded_from_weight_decay(k):
    import keras

    bias, kernel = keras.Variable([0.0], name="bias"), keras.Variable([0.0], name="kernel")
    optimizer = k.AdamW()
    assert _optimizers.decayed(optimizer, bias)
    optimizer = k.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    assert not _optimizers.decayed(optimizer, bias)
    assert _optimizers.decayed(optimizer, kernel)


def test_torch_groups_may_differ_in_whether_weights_decay(t, params):
    first, second = params
    groups = [{"params": [first]}, {"params": [second], "weight_decay": 0.0}]
    optimizer = t.AdamW(groups, weight_decay=0.1)
    assert _optimizers.from_torch(optimizer)["weight_decay"] == 0.1
    assert [_optimizers.decayed(optimizer, param) for param in params] == [True, False]
    plain = t.SGD([first], 0.1)
    assert _optimizers.decayed(plain, first), "a job's --weight_decay applies to it"
    assert _optimizers.holds(plain, first) and not _optimizers.holds(plain, second)


def test_torch_groups_that_differ_otherwise_are_refused(t, params):
    first, second = params
    for option in [{"lr": 0.5}, {"betas": (0.5, 0.9)}, {"weight_decay": 0.5}]:
        (name,) = option
        groups = [{"params": [first]}, {"params": [second], **option}]
        with pytest.raises(ZooError, match=f"give every group the same `{name}`"):
            _optimizers.from_torch(t.AdamW(groups, weight_decay=0.1))


def test_a_function_of_the_step_is_converted_to_a_table(k, t, params):
    expected = {"table": {"starts": [0, 3], "factors": [1.0, 0.1]}}
    by_step = lambda step: 0.5 if step < 3 else 0.05  # noqa: E731
    for spec in [
        _optimizers.from_keras(k.SGD(), 6, by_step),
        _optimizers.from_torch(t.SGD(params), by_step, 6),
    ]:
        assert (spec["learning_rate"], spec["schedule"]) == (0.5, expected)
    constant = _optimizers.from_keras(k.SGD(), 6, lambda step: 0.5)
    assert (constant["learning_rate"], constant["schedule"]) == (0.5, "constant")


def test_a_torch_scheduler_is_not_changed(t, params):
    optimizer = t.SGD(params, 0.1)
    schedule = t.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=9)
    before = optimizer.param_groups[0].copy(), dict(schedule.state_dict())
    spec = _optimizers.from_torch(optimizer, schedule, 9)
    assert len(spec["schedule"]["table"]["factors"]) == 9
    assert (optimizer.param_groups[0], dict(schedule.state_dict())) == before


def test_a_scheduler_may_change_the_momentum(t, params):
    optimizer = t.SGD(params, 0.1, momentum=0.9)
    schedule = t.lr_scheduler.CyclicLR(
        optimizer, 0.1, 0.2, step_size_up=2, base_momentum=0.4, max_momentum=0.8
    )
    spec = _optimizers.from_torch(optimizer, schedule, 5)
    assert spec["kind"]["momentum"]["momentum"] == 0.8
    factors = spec["momentum_schedule"]["table"]["factors"]
    assert factors == pytest.approx([1.0, 0.75, 0.5, 0.75, 1.0])
    assert "momentum_schedule" not in _optimizers.from_torch(optimizer, None, 5)


def test_schedulers_that_cannot_be_honoured_are_refused_and_left_as_they_were(t, params):
    optimizer = t.NAdam(params, 0.1)
    schedule = t.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    before = optimizer.param_groups[0].copy()
    with pytest.raises(ZooError, match="`OneCycleLR` changes `betas` of the optimizer `NAdam`"):
        _optimizers.from_torch(optimizer, schedule, 9)
    assert optimizer.param_groups[0] == before
    optimizer = t.SGD([{"params": params[:1]}, {"params": params[1:]}], 0.1)
    factors = [lambda step: 1.0, lambda step: 0.5**step]
    schedule = t.lr_scheduler.LambdaLR(optimizer, factors)
    with pytest.raises(ZooError, match="`LambdaLR` sets different values"):
        _optimizers.from_torch(optimizer, schedule, 9)


def test_unpredictable_schedules_are_refused(k, t, params):
    with pytest.raises(ZooError, match="set --num_epochs"):
        _optimizers.from_keras(k.SGD(), None, lambda step: 0.5)
    with pytest.raises(ZooError, match="does not take the step"):
        _optimizers.from_keras(k.SGD(lambda: 0.5), 5)
    with pytest.raises(ZooError, match="is nan at step 2"):
        _optimizers.from_keras(k.SGD(), 5, lambda step: float("nan") if step == 2 else 1.0)
    plateau = t.lr_scheduler.ReduceLROnPlateau(t.SGD(params, 0.1))
    with pytest.raises(ZooError, match="depends on a metric"):
        _optimizers.from_torch(plateau.optimizer, plateau, 5)


def test_a_table_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(_schedules, "MAX_RUNS", 3)
    with pytest.raises(ZooError, match="changes 4 times, but at most 3 changes are supported"):
        _schedules._table(np.array([4.0, 3.0, 2.0, 1.0]))
