# SPDX-License-Identifier: Apache-2.0
"""The parts of `elasticdl.keras` on the torch backend, without a job."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

keras = pytest.importorskip("keras")
torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

# TensorFlow and PyTorch cannot live in one process.
pytestmark = pytest.mark.backends("torch")
if keras.backend.backend() == "torch":
    import elasticdl.keras
    from elasticdl import ZooError, _keras_fit_torch, _trainers


X, Y = np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32")


def compiled(kind: type = keras.Model, optimizer: object = "sgd", **options: object) -> object:
    inputs = keras.Input((2,))
    model = kind(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer, "mse", **options)
    return model


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], object]:
    job = SimpleNamespace(is_leader=False, is_described=True)
    monkeypatch.setattr(_trainers, "job", lambda: job)
    monkeypatch.setattr(_trainers, "_HAS_TRAINED", False)
    return elasticdl.keras.elastic


class Own(keras.Model):
    def train_step(self, *_: object) -> dict:
        return {}


class Fit(keras.Model):
    def fit(self, *args: object) -> object:
        return super().fit(*args)


class Stream:
    pass


def loader() -> object:
    return torch.utils.data.DataLoader(list(zip(X, Y)))


REFUSED = {
    "callback": (
        {},
        lambda: (X, Y, None, 1, 0, [keras.callbacks.CSVLogger("log.csv")]),
        "the callback `CSVLogger` does not work in a job: ",
    ),
    "data": ({}, lambda: (Stream(), Y), "`fit` got a Stream, but a job assigns records by"),
    "labels": ({}, lambda: (loader(), Y), "`fit` got `y` beside a DataLoader; its batches contain"),
    "train_step": ({"kind": Own}, lambda: (X, Y), "the model `Own` overrides `train_step`"),
    "fit": ({"kind": Fit}, lambda: (X, Y), "the model `Fit` overrides `fit`"),
    "loss_scale_factor": (
        {"optimizer": keras.optimizers.SGD(loss_scale_factor=8.0)},
        lambda: (X, Y),
        "`loss_scale_factor` of the optimizer does not work in a job",
    ),
    "jit_compile": ({"jit_compile": True}, lambda: (X, Y), "jit_compile=True does not work in a"),
}


@pytest.mark.parametrize(("options", "given", "sentence"), REFUSED.values(), ids=[*REFUSED])
def test_what_a_job_cannot_follow_is_refused_by_name(
    elastic: Callable[[object], object],
    options: dict[str, object],
    given: Callable[[], tuple],
    sentence: str,
) -> None:
    model = elastic(compiled(**options))
    with pytest.raises(ZooError) as caught:
        model.fit(*given())
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("steps_per_epoch", 3), ("initial_epoch", 1), ("class_weight", {0: 2.0})]
)
def test_arguments_that_a_job_cannot_follow_are_refused(
    elastic: Callable[[object], object], name: str, value: object
) -> None:
    with pytest.raises(ZooError, match=f"^{name}=.* does not work in a job: "):
        elastic(compiled()).fit(X, Y, **{name: value})


def test_other_backends_are_refused(
    elastic: Callable[[object], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = compiled()
    monkeypatch.setattr(keras.backend, "backend", lambda: "openvino")
    with pytest.raises(ZooError, match="^Keras uses the backend `openvino`, which cannot train"):
        elastic(model)


def test_records_of_pandas_objects_are_taken_by_their_places() -> None:
    pd = pytest.importorskip("pandas")
    x, y, order = np.arange(12.0).reshape(6, 2), np.arange(6), [3, 5, 0, 4, 1, 2]
    frame, series = pd.DataFrame(x, index=order), pd.Series(y, index=order)
    records = elasticdl.keras._Records({"x": frame}, series, None, 4, False)
    found, labels = records.collate([0, 4])
    assert found["x"].tolist() == [[0, 1], [8, 9]] and labels.tolist() == [0, 4]
    rest, (_, labels, _) = records.split(0.5)
    assert len(rest) == 3 and labels.tolist() == [3, 4, 5]


class PerBatch(keras.callbacks.Callback):
    """A callback that changes with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = np.zeros(2)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.seen[0] = batch


def test_what_callbacks_hold_is_copied_when_it_can_have_changed() -> None:
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    steady, batches = keras.callbacks.EarlyStopping(), PerBatch()
    lambdas = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: None)
    steady.best_weights, lambdas.extra = [np.zeros(3)], 1
    optimizer = _keras_fit_torch._Optimizer(model)
    progress = elasticdl.keras._Progress(model, [steady, batches, lambdas], optimizer)

    def kept() -> list[dict]:
        progress.keep()
        return progress.state_dict()["callbacks"]

    first = kept()
    batches.on_train_batch_end(7)
    lambdas.extra = 2
    second = kept()
    assert second[0] is first[0], "the best weights are not copied"
    assert [one[1]["seen"]["array"][0].item() for one in (first, second)] == [0, 7]
    assert [one[2]["extra"] for one in (first, second)] == [1, 2]
    steady.best_weights = [np.ones(3)]
    progress.has_epoch_event = True
    third = kept()
    assert third[0]["best_weights"][0]["array"].tolist() == [1, 1, 1]
    assert kept()[0] is third[0]


def test_keras_only_looks_for_tensorflow_if_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from keras.src.saving import serialization_lib
    from keras.src.utils import rng_utils

    for module in (rng_utils, serialization_lib):
        assert not module.tf.available
    keras.utils.set_random_seed(1)
    assert "tensorflow" not in sys.modules
    imported = SimpleNamespace(available=True, TensorShape=int)
    monkeypatch.setitem(sys.modules, "tensorflow", imported)
    monkeypatch.setattr(rng_utils.tf, "_lazy", imported)
    assert rng_utils.tf.available and rng_utils.tf.TensorShape is int
