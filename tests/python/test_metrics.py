# SPDX-License-Identifier: Apache-2.0
"""Metrics merged from two batches must equal those of Keras for both at once."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest

from elasticdl import _metrics
from elasticdl._zoo import ZooError

RNG = np.random.default_rng(7)
N = 200
BINARY = (RNG.random(N) < 0.4).astype("int64")
# Scores that correlate with the labels, so no metric is trivial.
SCORES = np.clip(0.3 * BINARY + 0.7 * RNG.random(N), 0, 1).astype("float32")[:, None]
CLASSES = RNG.integers(0, 5, N)
ODDS = (RNG.normal(size=(N, 5)) + 2 * np.eye(5)[CLASSES]).astype("float32")


def value(kind: str, sums: list[float]) -> float:
    """Merges sums like crates/edl-core/src/metric.rs."""
    if kind != "auc":
        ratio = sums[0] / sums[1]
        return math.sqrt(ratio) if kind == "root_ratio" else ratio
    negatives, positives = np.split(np.array(sums), 2)
    below = np.concatenate([[0], np.cumsum(negatives)[:-1]])
    return float((positives * (below + negatives / 2)).sum() / positives.sum() / negatives.sum())


def measured(metric, labels, predictions) -> float:
    metrics = {"it": metric}
    cuts = [(0, 120), (120, N)]
    parts = [_metrics.sums(metrics, labels[a:b], predictions[a:b], b - a)["it"] for a, b in cuts]
    total = [sum(both) for both in zip(*parts)]
    return value(_metrics.describe(metrics)[0]["kind"], total)


@pytest.mark.parametrize(
    "make",
    [
        keras.metrics.BinaryAccuracy,
        keras.metrics.Precision,
        keras.metrics.Recall,
        lambda: keras.metrics.Precision(thresholds=0.7),
        keras.metrics.MeanSquaredError,
        keras.metrics.RootMeanSquaredError,
        keras.metrics.BinaryCrossentropy,
    ],
)
def test_binary_metrics_equal_keras(make):
    whole = make()
    whole.update_state(BINARY[:, None], SCORES)
    assert measured(make(), BINARY[:, None], SCORES) == pytest.approx(float(whole.result()), 1e-5)


@pytest.mark.parametrize(
    "make",
    [
        keras.metrics.SparseCategoricalAccuracy,
        lambda: keras.metrics.SparseTopKCategoricalAccuracy(k=2),
        lambda: keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
    ],
)
def test_class_metrics_equal_keras(make):
    whole = make()
    whole.update_state(CLASSES, ODDS)
    assert measured(make(), CLASSES, ODDS) == pytest.approx(float(whole.result()), 1e-5)


@pytest.mark.parametrize("from_logits", [False, True])
def test_auc_equals_keras(from_logits):
    scores = np.log(SCORES / (1 - SCORES + 1e-6) + 1e-6) if from_logits else SCORES
    whole = keras.metrics.AUC(num_thresholds=4097, from_logits=from_logits)
    whole.update_state(BINARY[:, None], scores)
    found = measured(keras.metrics.AUC(from_logits=from_logits), BINARY, scores)
    assert found == pytest.approx(float(whole.result()), abs=1e-4)


def test_a_function_returns_one_number_per_record_or_their_mean():
    def per_record(labels, predictions):
        return np.argmax(predictions, 1) == labels

    def mean(labels, predictions):
        return np.mean(per_record(labels, predictions))

    expected = np.mean(per_record(CLASSES, ODDS))
    assert measured(per_record, CLASSES, ODDS) == pytest.approx(expected)
    assert measured(mean, CLASSES, ODDS) == pytest.approx(expected)


def test_the_loss_is_last_and_names_determine_which_direction_is_better():
    metrics = {"accuracy": np.equal, "mean_error": np.subtract, "auc": keras.metrics.AUC()}
    assert _metrics.describe(metrics) == [
        {"name": "accuracy", "kind": "ratio", "more_is_better": True},
        {"name": "mean_error", "kind": "ratio", "more_is_better": False},
        {"name": "auc", "kind": "auc", "more_is_better": True},
        {"name": "loss", "kind": "ratio", "more_is_better": False},
    ]
    assert _metrics.describe(None) == [_metrics.describe(metrics)[-1]]
    assert _metrics.sums(None, None, None, 4, loss=0.5) == {"loss": [2.0, 4.0]}


def test_keras_determines_which_direction_is_better():
    metrics = {"a": keras.metrics.MeanSquaredError(), "b": keras.metrics.BinaryAccuracy()}
    assert [entry["more_is_better"] for entry in _metrics.describe(metrics)] == [False, True, False]


def test_metrics_of_several_outputs_are_named_after_them():
    metrics = {"left": {"hit": np.equal}, "right": {"hit": np.equal}}
    outputs = {"left": np.array([1, 0]), "right": np.array([1, 1])}
    assert _metrics.sums(metrics, np.array([1, 1]), outputs, 2) == {
        "left_hit": [1.0, 2.0],
        "right_hit": [2.0, 2.0],
    }
    labels = {"left": np.array([1, 0]), "right": np.array([0, 0])}
    assert _metrics.sums(metrics, labels, outputs, 2)["right_hit"] == [0.0, 2.0]


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ([1], "must return a dict of metrics, not list"),
        ({"f1": keras.metrics.F1Score()}, "`f1` is a Keras F1Score, which cannot be merged"),
        ({"pr": keras.metrics.AUC(curve="PR")}, "`pr` is an AUC other than"),
        ({"p": keras.metrics.Precision(thresholds=[0.1, 0.5])}, "`p` has 2 thresholds"),
        ({"a": keras.metrics.AUC}, "`a` of `eval_metrics_fn` is the class AUC; use"),
        ({"a": "accuracy"}, "`a` of `eval_metrics_fn` is str; use a function"),
        ({"loss": np.equal}, "defines a metric `loss`"),
        ({"a": {"b": np.equal}, "a_b": np.equal}, "more than one metric named `a_b`"),
    ],
)
def test_an_unsupported_metric_is_refused_with_the_supported_ones(metrics, text):
    with pytest.raises(ZooError, match=text):
        _metrics.describe(metrics)


def test_a_metric_of_the_wrong_shape_is_refused():
    with pytest.raises(ZooError, match=r"`it` returned values of shape \[3\] for 2 records"):
        _metrics.sums({"it": lambda labels, predictions: np.zeros(3)}, BINARY[:2], SCORES[:2], 2)
    with pytest.raises(ZooError, match="got 4 predictions for 2 labels"):
        _metrics.sums({"it": keras.metrics.AUC()}, BINARY[:2], SCORES[:4], 2)
    with pytest.raises(ZooError, match="output `left`, but the model has a single output"):
        _metrics.sums({"left": {"it": np.equal}}, BINARY[:2], SCORES[:2], 2)
