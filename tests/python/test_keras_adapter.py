# SPDX-License-Identifier: Apache-2.0
"""A Keras model in the training loop must compute what plain Keras computes.

Runs on the backend in KERAS_BACKEND.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

from elasticdl._zoo import ZooError
from keras_fixture import (
    BACKEND,
    LABEL,
    Batch,
    adapter,
    by_name,
    column,
    fresh,
    mean_squares,
    plain_gradient,
)

RNG = np.random.default_rng(3)
IMAGE = column("image", "f32", 8, 8, 1)
PICTURES = Batch(image=RNG.random((24, 8, 8, 1), dtype="float32"), label=RNG.integers(0, 10, 24))
on_tensorflow = pytest.mark.backends("tensorflow")
# Backends without tf.data in `feed`.
not_on_tensorflow = pytest.mark.backends("torch", "jax")


def cross_entropy(labels, predictions):
    """One number per record."""
    return keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)


def mean_cross_entropy(labels, predictions):
    return ops.mean(cross_entropy(labels, predictions))


def functional():
    inputs = keras.Input((8, 8, 1), name="image")
    x = keras.layers.Conv2D(4, 3, activation="relu", name="conv")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Flatten()(x)
    outputs = keras.layers.Dense(10, kernel_regularizer=keras.regularizers.L2(0.1), name="out")(x)
    return keras.Model(inputs, outputs)


def sequential():
    return keras.Sequential(
        [keras.layers.Flatten(), keras.layers.BatchNormalization(), keras.layers.Dense(10)]
    )


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.stack = [keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(10)]
        self.norm = keras.layers.BatchNormalization()

    def call(self, inputs, training=False):
        x = self.norm(self.flatten(inputs), training=training)
        for layer in self.stack:
            x = layer(x)
        self.add_loss(0.01 * ops.sum(x**2))
        return x


class SharedNoise(keras.layers.Layer):
    """Noise from the generator that all layers share."""

    def call(self, inputs, training=False):
        return inputs + keras.random.normal((inputs.shape[-1],)) if training else inputs


def noisy():
    inputs = keras.Input((8, 8, 1), name="image")
    x = keras.layers.Flatten()(keras.layers.Dropout(0.3)(inputs))
    x = keras.layers.GaussianNoise(0.1)(x)
    if BACKEND != "jax":  # which must have a seed generator
        x = SharedNoise()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Dropout(0.5)(x)))


@pytest.mark.parametrize("custom_model", [functional, sequential, Subclass])
def test_loss_gradient_and_moving_averages_equal_keras(custom_model):
    mine = adapter(custom_model, [IMAGE, LABEL], loss=cross_entropy)
    assert mine.dense.flags["C_CONTIGUOUS"] and mine.dense.dtype == np.float32
    loss, rows = mine.train(PICTURES, [], seed=1)
    assert rows == []

    model = fresh(custom_model)
    features, labels = PICTURES.columns["image"], PICTURES.columns["label"]
    model(features)
    expected, gradients, changes = plain_gradient(model, mean_cross_entropy, features, labels)
    assert loss == pytest.approx(expected, rel=1e-5)
    found = by_name(mine, mine.gradient)
    assert set(found) == set(gradients) | set(changes)
    for name, value in {**gradients, **changes}.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=2e-6, err_msg=name)
    assert np.abs(found[next(n for n in found if "moving_variance" in n)]).max() > 1e-3


def test_the_spec_names_parameters_as_keras_does():
    metrics = {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
    mine = adapter(functional, [IMAGE, LABEL], eval_metrics_fn=lambda: metrics)
    params = [(param["name"], param["shape"], param["rule"]) for param in mine.spec["params"]]
    trainable = {"trainable": {"decay": True}}
    assert params[:2] == [
        ("conv/kernel", [3, 3, 1, 4], trainable),
        ("conv/bias", [4], trainable),
    ]
    assert ("norm/moving_mean", [4], "moving_average") in params
    assert mine.spec["inputs"] == [IMAGE, LABEL] and mine.spec["tables"] == []
    assert [metric["name"] for metric in mine.spec["metrics"]] == ["accuracy", "loss"]
    assert mine.spec["optimizer"]["learning_rate"] == pytest.approx(0.1)
    # The initial values depend only on the seed, and names do not depend on other models.
    again = adapter(functional, [IMAGE, LABEL])
    other = adapter(functional, [IMAGE, LABEL], job={"seed": 8})
    assert again.spec["params"] == mine.spec["params"] == other.spec["params"]
    assert np.array_equal(again.dense, mine.dense)
    assert not np.array_equal(other.dense, mine.dense)


def test_a_frozen_layer_does_not_change():
    def custom_model():
        model = functional()
        model.get_layer("conv").trainable = False
        return model

    mine = adapter(custom_model, [IMAGE, LABEL], loss=cross_entropy)
    rules = {param["name"]: param["rule"] for param in mine.spec["params"]}
    assert rules["conv/kernel"] == "moving_average"
    mine.gradient.fill(9.0)
    mine.train(PICTURES, [], seed=1)
    assert not by_name(mine, mine.gradient)["conv/kernel"].any()


def test_the_same_seed_gives_bit_identical_results():
    mine = adapter(noisy, [IMAGE, LABEL], loss=cross_entropy)

    def run(seed):
        loss, _ = mine.train(PICTURES, [], seed)
        return loss, mine.gradient.copy()

    first, gradient = run(2**63 + 5)
    other, _ = run(6)
    mine.train(PICTURES.part(0, 5), [], 1)
    mine.evaluate(PICTURES, [])
    again, same = run(2**63 + 5)
    assert first == again and np.array_equal(gradient, same)
    assert first != other
    new = adapter(noisy, [IMAGE, LABEL], loss=cross_entropy)
    assert new.train(PICTURES, [], 2**63 + 5)[0] == first
    assert np.array_equal(new.gradient, gradient)


def test_parameters_are_read_from_the_flat_vector_at_every_call():
    mine = adapter(functional, [IMAGE, LABEL], loss=cross_entropy)
    before = mine.dense.copy()
    first, _ = mine.train(PICTURES, [], 1)
    mine.dense -= 0.01 * mine.gradient
    second, _ = mine.train(PICTURES, [], 1)
    mine.dense[:] = before
    assert mine.train(PICTURES, [], 1)[0] == first
    assert second < first
    assert np.array_equal(mine.dense, before)


def test_evaluation_sums_over_batches_without_dropout():
    metrics = {
        "accuracy": lambda labels, predictions: ops.equal(
            ops.argmax(predictions, axis=1), ops.cast(labels, "int64")
        )
    }
    mine = adapter(noisy, [IMAGE, LABEL], loss=cross_entropy, eval_metrics_fn=lambda: metrics)
    loss, whole = mine.evaluate(PICTURES, [])
    parts = [mine.evaluate(PICTURES.part(0, 16), []), mine.evaluate(PICTURES.part(16, 24), [])]
    for name, sums in whole.items():
        merged = np.sum([part[1][name] for part in parts], axis=0)
        np.testing.assert_allclose(merged, sums, rtol=1e-5)
    assert whole["loss"] == pytest.approx([loss * 24, 24])
    predictions = mine.predict(Batch(image=PICTURES.columns["image"]), [])
    assert predictions.shape == (24, 10) and predictions.dtype == np.float32
    right = (predictions.argmax(1) == PICTURES.columns["label"]).sum()
    assert whole["accuracy"] == [right, 24]


def test_several_outputs_have_separate_metrics():
    def custom_model():
        inputs = keras.Input((8, 8, 1), name="image")
        flat = keras.layers.Flatten()(inputs)
        heads = [keras.layers.Dense(n, name=name)(flat) for name, n in [("a", 2), ("b", 3)]]
        return keras.Model(inputs, dict(zip("ab", heads)))

    def loss(labels, predictions):
        return ops.mean(predictions["a"] ** 2) + ops.mean(predictions["b"] ** 2)

    def metrics_fn():
        return {"b": {"size": lambda labels, predictions: ops.max(predictions, axis=1)}}

    mine = adapter(custom_model, [IMAGE, LABEL], loss=loss, eval_metrics_fn=metrics_fn)
    loss, sums = mine.evaluate(PICTURES, [])
    predictions = mine.predict(PICTURES, [])
    assert predictions.shape == (24, 5)
    assert sums["b_size"][0] == pytest.approx(predictions[:, 2:].max(1).sum(), rel=1e-4)


def test_an_export_predicts_the_same_in_plain_keras(tmp_path):
    mine = adapter(functional, [IMAGE, LABEL], loss=cross_entropy)
    trained = mine.dense + RNG.normal(0, 0.01, mine.dense.shape).astype("float32")
    mine.dense[:] = trained
    expected = mine.predict(PICTURES, [])
    mine.dense[:] = 0
    assert mine.export(str(tmp_path), trained, {}) == ["model.keras"]
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    found = ops.convert_to_numpy(loaded(PICTURES.columns["image"]))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    # Training continues after an export.
    mine.dense[:] = trained
    np.testing.assert_array_equal(mine.predict(PICTURES, []), expected)


def test_a_learning_rate_scheduler_sets_the_schedule_and_other_callbacks_are_called(tmp_path):
    class Seen(keras.callbacks.Callback):
        calls = []

        def on_train_begin(self, logs=None):
            self.calls.append("begin")

        def on_train_end(self, logs=None):
            self.calls.append(float(ops.convert_to_numpy(self.model.weights[-1])[0]))

    def callbacks():
        schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 if epoch < 2 else 0.25)
        return [schedule, Seen()]

    job = {"_n_steps": 6, "epoch_steps": 2}
    mine = adapter(functional, [IMAGE, LABEL], loss=cross_entropy, callbacks=callbacks, job=job)
    optimizer = mine.spec["optimizer"]
    assert optimizer["learning_rate"] == pytest.approx(0.5)
    assert optimizer["schedule"] == {"table": {"starts": [0, 4], "factors": [1.0, 0.5]}}
    for seed in range(2):
        mine.train(PICTURES, [], seed)
    mine.export(str(tmp_path), np.full_like(mine.dense, 4.0), {})
    assert Seen.calls == ["begin", 4.0]


def test_a_learning_rate_scheduler_may_change_the_rate_before():
    def callbacks():
        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]

    job = {"_n_steps": 3, "epoch_steps": 1}
    mine = adapter(functional, [IMAGE, LABEL], loss=cross_entropy, callbacks=callbacks, job=job)
    factors = mine.spec["optimizer"]["schedule"]["table"]["factors"]
    assert factors == pytest.approx([1.0, 0.5, 0.25])


class LogsEpochs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pass


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (lambda: keras.callbacks.EarlyStopping(), "`EarlyStopping` .* set --early_stop_patience"),
        (lambda: keras.callbacks.ModelCheckpoint("m.keras"), "`ModelCheckpoint` .* checkpoints"),
        (lambda: keras.callbacks.ReduceLROnPlateau(), "`ReduceLROnPlateau` .* schedule"),
        (lambda: keras.callbacks.CSVLogger("log.csv"), "`CSVLogger` .* metrics.jsonl"),
        (
            lambda: keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
            "`LambdaCallback` needs `on_epoch_end`",
        ),
        (LogsEpochs, "`LogsEpochs` needs `on_epoch_end`, .* only `on_train_begin`"),
        (list, "`callbacks` returned a list"),
    ],
)
def test_callbacks_that_no_worker_could_call_are_refused_by_name(callback, message):
    with pytest.raises(ZooError, match=message):
        adapter(functional, [IMAGE, LABEL], loss=cross_entropy, callbacks=lambda: [callback()])


def test_a_model_with_its_own_training_step_is_refused():
    class Own(keras.Sequential):
        def train_step(self, *args):
            raise AssertionError("never called")

    def custom_model():
        return Own([keras.layers.Input((28, 28)), keras.layers.Flatten(), keras.layers.Dense(10)])

    with pytest.raises(ZooError, match="`Own` overrides `train_step`, which the job does not call"):
        adapter(custom_model, [IMAGE, LABEL], loss=cross_entropy)


def test_columns_without_a_feed_are_the_features():
    def custom_model():
        inputs = {name: keras.Input((), name=name) for name in ("a", "b")}
        stacked = ops.stack([inputs["a"], inputs["b"]], axis=1)
        return keras.Model(inputs, keras.layers.Dense(1)(stacked))

    columns = [column("a", "f32"), column("b", "f32"), LABEL]
    mine = adapter(custom_model, columns)
    numbers = {name: RNG.random(5, dtype="float32") for name in ("a", "b")}
    loss, _ = mine.train(Batch(**numbers, label=np.arange(5)), [], 0)
    assert np.isfinite(loss) and mine.predict(Batch(**numbers), []).shape == (5, 1)


@not_on_tensorflow
def test_feed_receives_numpy_columns():
    seen = {}

    def feed(columns, mode, metadata):
        seen[mode] = sorted(columns)
        assert metadata.column_names == ["word", "label"]
        assert metadata.column_dtypes["label"] == np.int64
        lengths = np.array([[len(word)] for word in columns["word"]], dtype="float32")
        return lengths if mode == "prediction" else (lengths, columns["label"])

    def custom_model():
        return keras.Sequential([keras.layers.Dense(1)])

    mine = adapter(custom_model, [column("word", "bytes"), LABEL], feed=feed)
    words = [b"", b"a", b"bcd"]
    batch = Batch(word=words, label=np.array([0, 1, 3]))
    assert mine.evaluate(batch, [])[0] == pytest.approx(
        float(np.mean((mine.predict(Batch(word=words), [])[:, 0] - [0, 1, 3]) ** 2)), rel=1e-5
    )
    assert seen["evaluation"] == ["label", "word"] and seen["prediction"] == ["word"]


@not_on_tensorflow
def test_text_without_a_feed_is_refused():
    def custom_model():
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    mine = adapter(custom_model, [column("word", "bytes"), LABEL])
    with pytest.raises(ZooError, match="the column `word` is text.*define `feed`"):
        mine.train(Batch(word=[b"a"], label=np.array([0])), [], 0)


def records(batch) -> Batch:
    """The images as serialized examples, as in RecordIO files."""
    import tensorflow as tf

    def example(image, label):
        features = {
            "image": tf.train.Feature(float_list=tf.train.FloatList(value=image.ravel())),
            "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        }
        return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()

    return Batch(record=[example(*pair) for pair in zip(*batch.columns.values())])


def feed_examples(dataset, mode, metadata):
    import tensorflow as tf

    def parse(record):
        kinds = {"image": tf.io.FixedLenFeature([8, 8, 1], tf.float32)}
        if mode != "prediction":
            kinds["label"] = tf.io.FixedLenFeature([], tf.int64)
        parsed = tf.io.parse_single_example(record, kinds)
        return (parsed["image"], parsed["label"]) if "label" in kinds else parsed["image"]

    dataset = dataset.map(parse)
    return dataset.shuffle(1000) if mode == "training" else dataset


@on_tensorflow
@pytest.mark.parametrize("custom_model", [functional, Subclass])
def test_raw_records_are_unchanged_by_tf_data(custom_model):
    traces = []

    def feed(dataset, mode, metadata):
        traces.append(mode)
        return feed_examples(dataset, mode, metadata)

    raw = adapter(custom_model, [IMAGE, LABEL], raw=True, loss=cross_entropy, feed=feed)
    assert raw.spec["inputs"][0]["dtype"] == "record"
    decoded = adapter(custom_model, [IMAGE, LABEL], loss=cross_entropy)
    for size in (24, 7, 1, 24):
        part = PICTURES.part(0, size)
        assert raw.train(records(part), [], 4) == decoded.train(part, [], 4)
        assert np.array_equal(raw.gradient, decoded.gradient)
    np.testing.assert_array_equal(raw.predict(records(PICTURES), []), decoded.predict(PICTURES, []))
    assert sorted(traces) == ["prediction", "training"]


@on_tensorflow
def test_tf_data_receives_columns_as_dicts():
    def feed(dataset, mode, metadata):
        import tensorflow as tf

        def parse(row):
            length = tf.cast(tf.strings.length(row["word"]), tf.float32)[None]
            return (length, row["label"]) if "label" in row else length

        return dataset.map(parse)

    mine = adapter(
        lambda: keras.Sequential([keras.layers.Dense(1)]),
        [column("word", "bytes"), LABEL],
        feed=feed,
    )
    words = [b"", b"a", b"bcd"]
    loss, _ = mine.evaluate(Batch(word=words, label=np.array([0, 1, 3])), [])
    predictions = mine.predict(Batch(word=words), [])[:, 0]
    assert loss == pytest.approx(float(np.mean((predictions - [0, 1, 3]) ** 2)), rel=1e-5)


@on_tensorflow
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.repeat(2), "returned 48 records for a batch of 24 records"),
        (lambda d: d.repeat(), "records for a batch of 24 records"),
        (lambda d: d.take(5), "returned 5 records for a batch of 24 records"),
        (lambda d: d.take(1), "returned 1 record for a batch of 24 records"),
        (lambda d: d.take(0), "returned 0 records for a batch of 24 records"),
        (lambda d: d.batch(8), "returned 3 records for a batch of 24 records"),
    ],
)
def test_a_feed_that_changes_the_number_of_records_is_refused(change, text):
    def feed(dataset, mode, metadata):
        return change(feed_examples(dataset, mode, metadata))

    mine = adapter(functional, [IMAGE, LABEL], raw=True, loss=cross_entropy, feed=feed)
    with pytest.raises(ZooError, match=text):
        mine.train(records(PICTURES), [], 1)


@not_on_tensorflow
def test_a_feed_that_loses_records_is_refused():
    def feed(columns, mode, metadata):
        return columns["image"][1:], columns["label"][1:]

    mine = adapter(functional, [IMAGE, LABEL], loss=cross_entropy, feed=feed)
    with pytest.raises(ZooError, match="returned 23 records for a batch of 24 records"):
        mine.train(PICTURES, [], 1)


def test_a_feed_without_labels_is_refused_in_training():
    def feed(data, mode, metadata):
        return data.map(lambda row: row["image"]) if BACKEND == "tensorflow" else data["image"]

    mine = adapter(functional, [IMAGE, LABEL], loss=cross_entropy, feed=feed)
    with pytest.raises(ZooError, match=r"in training; it must return \(features, labels\)"):
        mine.train(PICTURES, [], 1)
    assert mine.predict(PICTURES, []).shape == (24, 10)


def test_data_without_labels_cannot_be_trained():
    mine = adapter(functional, [IMAGE], loss=cross_entropy)
    with pytest.raises(ZooError, match="no labels in training: the data has no column `label`"):
        mine.train(Batch(image=PICTURES.columns["image"]), [], 1)


def test_an_invalid_model_is_refused():
    with pytest.raises(ZooError, match="`test.custom_model` returned a Dense; it must return"):
        adapter(lambda: keras.layers.Dense(1), [IMAGE, LABEL])


def test_an_error_in_user_code_is_not_changed():
    def loss(labels, predictions):
        raise KeyError("my own")

    mine = adapter(functional, [IMAGE, LABEL], loss=loss)
    with pytest.raises(KeyError, match="my own"):
        mine.train(PICTURES, [], 1)


def test_regression_needs_only_columns():
    mine = adapter(
        lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]),
        [column("x", "f32", 3), LABEL],
        loss=mean_squares,
    )
    x = RNG.normal(size=(64, 3)).astype("float32")
    batch = Batch(x=x, label=(x @ [1, 2, 3]).astype("int64"))
    first = mine.train(batch, [], 0)[0]
    for _ in range(100):
        mine.dense -= 0.1 * mine.gradient
        last = mine.train(batch, [], 0)[0]
    assert last < 0.1 * first
