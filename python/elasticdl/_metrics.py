# SPDX-License-Identifier: Apache-2.0
"""Turns the metrics of `eval_metrics_fn` into sums that can be added over batches.

Works for every framework: a metric is a plain function or a Keras metric. Keras is used only if
the user's module has imported it. No state is kept between batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from elasticdl._zoo import ZooError

# The same as on the Rust side; the error of the area stays below 1e-4 on real data.
AUC_BUCKETS = 4096

LOSS = "loss"

SUPPORTED = (
    "a function of (labels, predictions) that returns one number per record or their mean, a Keras "
    "metric that is a mean (accuracies, errors, losses), RootMeanSquaredError, Precision, Recall, "
    "and AUC (ROC)"
)

# If the name of a plain function's metric contains one of these, lower is better.
_LESS_IS_BETTER = ("loss", "error", "entropy", "perplexity", "mse", "mae", "mape", "msle", "rmse")


class Measure(NamedTuple):
    """One entry of `eval_metrics_fn`, flattened."""

    name: str
    output: str | None
    kind: str
    more_is_better: bool
    # Maps the labels, predictions and number of records of a batch to its sums.
    sums: Callable[[Any, Any, int], list[float]]


def describe(metrics: Mapping | None) -> list[dict]:
    """Returns the entries of the model's spec: the user's metrics in order, then the loss."""
    measures = flatten(metrics)
    entries = [(m.name, m.kind, m.more_is_better) for m in measures] + [(LOSS, "ratio", False)]
    return [{"name": n, "kind": kind, "more_is_better": more} for n, kind, more in entries]


def sums(
    metrics: Mapping | None, labels: Any, predictions: Any, n: int, loss: float | None = None
) -> dict[str, list[float]]:
    """Returns the sums of each metric and of the mean `loss` over a batch of `n` records."""
    found = {}
    for measure in flatten(metrics):
        own_labels, own_predictions = labels, predictions
        if measure.output is not None:
            own_predictions = _pick(predictions, measure.output, measure.name)
            if isinstance(labels, Mapping):
                own_labels = _pick(labels, measure.output, measure.name)
        found[measure.name] = measure.sums(own_labels, own_predictions, n)
    if loss is not None:
        found[LOSS] = [float(loss) * n, float(n)]
    return found


def flatten(metrics: Mapping | None) -> list[Measure]:
    """Returns the metrics in order; those of `{output: {name: …}}` are named `output_name`."""
    if metrics is None:
        return []
    if not isinstance(metrics, Mapping):
        raise ZooError(
            f"`eval_metrics_fn` must return a dict of metrics, not {_kind_of(metrics)}; for "
            "example {'accuracy': function}"
        )
    measures = []
    for name, metric in metrics.items():
        if isinstance(metric, Mapping):
            for inner, one in metric.items():
                measures.append(_measure(f"{name}_{inner}", str(name), one))
        else:
            measures.append(_measure(str(name), None, metric))
    _refuse_repeated_names([measure.name for measure in measures])
    return measures


def to_numpy(values: Any) -> np.ndarray:
    """Converts a tensor of any framework to a numpy array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    return np.asarray(values)


def _refuse_repeated_names(names: list[str]) -> None:
    repeated = {name for name in names if names.count(name) > 1}
    if LOSS in names:
        raise ZooError(
            f"`eval_metrics_fn` defines a metric `{LOSS}`, a name that is reserved for the model's "
            "loss; use another name"
        )
    if repeated:
        raise ZooError(
            f"`eval_metrics_fn` has more than one metric named `{min(repeated)}`; use unique names"
        )


def _measure(name: str, output: str | None, metric: Any) -> Measure:
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(metric, keras.metrics.Metric):
        return _of_keras(keras, name, output, metric)
    if not callable(metric) or isinstance(metric, type):
        raise ZooError(
            f"the metric `{name}` of `eval_metrics_fn` is {_kind_of(metric)}; use {SUPPORTED}"
        )
    more_is_better = not any(word in name.lower() for word in _LESS_IS_BETTER)
    return Measure(name, output, "ratio", more_is_better, _of_function(name, metric))


def _of_function(name: str, function: Callable) -> Callable[[Any, Any, int], list[float]]:
    def summed(labels: Any, predictions: Any, n: int) -> list[float]:
        values = to_numpy(function(labels, predictions)).astype(np.float64)
        if values.ndim == 0:
            return [float(values) * n, float(n)]
        if values.shape[0] != n:
            raise ZooError(
                f"the metric `{name}` returned values of shape {list(values.shape)} for {n} "
                "records; return one number per record or their mean"
            )
        return [float(values.reshape(n, -1).mean(axis=1).sum()), float(n)]

    return summed


def _of_keras(keras: Any, name: str, output: str | None, metric: Any) -> Measure:
    kinds = keras.metrics
    if isinstance(metric, kinds.AUC):
        return Measure(name, output, "auc", True, _of_auc(name, metric))
    if isinstance(metric, kinds.RootMeanSquaredError):
        return Measure(name, output, "root_ratio", False, _of_state(metric, _mean))
    if isinstance(metric, (kinds.Precision, kinds.Recall)):
        if len(metric.thresholds) != 1:
            raise ZooError(
                f"the metric `{name}` has {len(metric.thresholds)} thresholds; create one "
                f"{type(metric).__name__} per threshold"
            )
        read = _precision if isinstance(metric, kinds.Precision) else _recall
        return Measure(name, output, "ratio", True, _of_state(metric, read))
    if isinstance(metric, kinds.Mean):
        # Keras itself uses `_direction` for early stopping.
        more_is_better = getattr(metric, "_direction", "up") != "down"
        return Measure(name, output, "ratio", more_is_better, _of_state(metric, _mean))
    raise ZooError(
        f"the metric `{name}` is a Keras {type(metric).__name__}, which cannot be merged across "
        f"batches; use {SUPPORTED}"
    )


def _of_state(metric: Any, read: Callable) -> Callable[[Any, Any, int], list[float]]:
    """Returns a function that computes what one batch adds to the state of the metric."""

    def summed(labels: Any, predictions: Any, _n: int) -> list[float]:
        metric.reset_state()
        metric.update_state(to_numpy(labels), to_numpy(predictions))
        return read(metric)

    return summed


def _mean(metric: Any) -> list[float]:
    return [_number(metric.total), _number(metric.count)]


def _precision(metric: Any) -> list[float]:
    hits = _number(metric.true_positives)
    return [hits, hits + _number(metric.false_positives)]


def _recall(metric: Any) -> list[float]:
    hits = _number(metric.true_positives)
    return [hits, hits + _number(metric.false_negatives)]


def _of_auc(name: str, metric: Any) -> Callable[[Any, Any, int], list[float]]:
    curve = str(getattr(metric.curve, "value", metric.curve))
    if curve.upper() != "ROC" or metric.multi_label:
        raise ZooError(
            f"the metric `{name}` is an AUC other than the area under a single ROC curve; use "
            f"{SUPPORTED}"
        )
    from_logits = getattr(metric, "_from_logits", False)

    def summed(labels: Any, predictions: Any, _n: int) -> list[float]:
        scores = to_numpy(predictions).astype(np.float64).ravel()
        truths = to_numpy(labels).ravel()
        if scores.size != truths.size:
            raise ZooError(
                f"the metric `{name}` got {scores.size} predictions for {truths.size} labels; an "
                "AUC needs one probability per label"
            )
        if from_logits:
            scores = 1.0 / (1.0 + np.exp(-scores))
        # NaN counts as 0, as in Rust, instead of invalidating the whole metric.
        scores = np.nan_to_num(scores * AUC_BUCKETS, nan=0.0)
        buckets = np.clip(scores, 0, AUC_BUCKETS - 1).astype(np.int64)
        buckets += np.where(truths > 0.5, AUC_BUCKETS, 0)
        return np.bincount(buckets, minlength=2 * AUC_BUCKETS).astype(np.float64).tolist()

    return summed


def _number(variable: Any) -> float:
    """Returns a scalar state; precision and recall have one number per threshold."""
    return float(to_numpy(variable.value).sum())


def _pick(outputs: Any, output: str, name: str) -> Any:
    if isinstance(outputs, Mapping) and output in outputs:
        return outputs[output]
    has = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else "a single output"
    raise ZooError(
        f"the metric `{name}` is for the output `{output}`, but the model has {has}; use the "
        "output names of the model"
    )


def _kind_of(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
