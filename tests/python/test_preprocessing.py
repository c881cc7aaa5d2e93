# SPDX-License-Identifier: Apache-2.0
"""Preprocessing layers: all kinds of input on TensorFlow, dense input on JAX and torch."""

from __future__ import annotations

import doctest
import importlib.util
import os
import pkgutil
import random
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("ragged and sparse tensors need TensorFlow", allow_module_level=True)

import numpy as np  # noqa: E402

import preprocessing_dense as dense  # noqa: E402
from elasticdl import preprocessing as prep  # noqa: E402
from elasticdl.preprocessing._fingerprint import fingerprint64  # noqa: E402

ELSEWHERE = ("jax", "torch")


@pytest.fixture(scope="module", autouse=True)
def other_backends():
    """Runs the dense cases on the other backends while this process tests TensorFlow."""
    script = Path(__file__).with_name("preprocessing_dense.py")
    running = {}
    for backend in ELSEWHERE:
        if importlib.util.find_spec(backend) is None:
            continue
        environment = {**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        running[backend] = subprocess.Popen(
            [sys.executable, str(script)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    yield running
    for process in running.values():
        process.kill()
        process.wait()


# === Dense input on TensorFlow ===


def cases(*groups):
    return [pytest.param(*case[1:], id=case[0]) for group in groups for case in group]


@pytest.mark.parametrize(
    ("layer", "values", "expected"), cases(dense.NUMBERS, dense.STRINGS, dense.INTEGERS)
)
def test_a_dense_tensor_keeps_its_shape(layer, values, expected):
    dense.check(layer, values, expected)


@pytest.mark.parametrize(("layer", "values", "expected"), cases(dense.NUMBERS))
def test_a_numeric_layer_works_inside_a_model(layer, values, expected):
    dense.check_in_model(layer, values, expected)


def test_ids_of_several_features_are_joined():
    dense.check_join()


def test_embeddings_are_combined_and_clipped():
    dense.check_embedding()


# === Ragged and sparse input ===


@pytest.mark.parametrize(
    ("layer", "values", "expected"), cases(dense.NUMBERS, dense.STRINGS, dense.INTEGERS)
)
def test_ragged_and_sparse_tensors_stay_ragged_and_sparse(layer, values, expected):
    array = dense.as_input(values)
    flat, wanted = tf.constant(array.ravel()), np.array(expected).ravel()
    n = len(wanted)

    ragged = tf.RaggedTensor.from_row_lengths(flat, [1, 0, n - 1])
    output = layer(ragged)
    assert isinstance(output, tf.RaggedTensor)
    assert output.row_lengths().numpy().tolist() == [1, 0, n - 1]
    np.testing.assert_array_equal(output.flat_values, wanted)

    sparse = tf.SparseTensor([[place, place % 2] for place in range(n)], flat, [n + 1, 3])
    output = layer(sparse)
    assert isinstance(output, tf.SparseTensor)
    np.testing.assert_array_equal(output.indices, sparse.indices)
    np.testing.assert_array_equal(output.dense_shape, sparse.dense_shape)
    np.testing.assert_array_equal(output.values, wanted)


def test_joined_ids_are_ragged_or_sparse_as_the_inputs_are():
    left = tf.ragged.constant([[1], [], [1]], dtype=tf.int32)
    right = tf.ragged.constant([[2], [2, -1], []], dtype=tf.int64)
    layer = prep.ConcatenateWithOffset([0, 10], axis=1)
    wanted = [[1, 12], [12, -1], [1]]
    assert layer([left, right]).to_list() == wanted
    output = layer([left.to_sparse(), right.to_sparse()])
    assert isinstance(output, tf.SparseTensor)
    assert prep.ToRagged(ignore_value=-9)(output).to_list() == wanted
    assert layer([tf.constant([[5], [6], [7]]), right]).to_list() == [[5, 12], [6, 12, -1], [7]]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_sparse_embedding_equals_tensorflows_lookup(combiner, max_norm):
    layer = prep.SparseEmbedding(10, 3, combiner=combiner, max_norm=max_norm)
    ragged = tf.ragged.constant([[1, 2, 2], [], [9, -1], [0]], dtype=tf.int64)
    layer.build()
    table = layer.embeddings.value
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(table)
        lookup = tf.nn.safe_embedding_lookup_sparse
        wanted = lookup(table, ragged.to_sparse(), combiner=combiner, max_norm=max_norm)
        outputs = [layer(ragged), layer(ragged.to_sparse()), layer(ragged.to_tensor(-1))]
    slope = tf.convert_to_tensor(tape.gradient(wanted, table))
    for output in outputs:
        np.testing.assert_allclose(output, wanted, rtol=1e-6, atol=1e-8)
        own = tf.convert_to_tensor(tape.gradient(output, table))
        # Near zero, terms near one have cancelled out, and their rounding errors remain.
        np.testing.assert_allclose(own, slope, rtol=1e-5, atol=1e-6)


def test_to_ragged_splits_and_drops():
    text = tf.constant([["1,2,3"], ["4,,5"], [""]])
    assert prep.ToRagged()(text).to_list() == [[b"1", b"2", b"3"], [b"4", b"5"], []]
    assert prep.ToRagged(sep=None)(text).to_list() == [[b"1,2,3"], [b"4,,5"], []]
    assert prep.ToRagged(sep="|")(tf.constant(["a|b", ""])).to_list() == [[b"a", b"b"], []]
    assert prep.ToRagged(ignore_value="2")(text).to_list() == [
        [b"1", b"3"],
        [b"4", b"", b"5"],
        [b""],
    ]
    assert prep.ToRagged()(tf.constant([[1, 2], [-1, 4]])).to_list() == [[1, 2], [4]]
    assert prep.ToRagged()(tf.constant([[1.0], [-1.0]])).to_list() == [[1.0], []]
    assert prep.ToRagged()(tf.ragged.constant([["a,b", "c"], []])).to_list() == [
        [b"a", b"b", b"c"],
        [],
    ]
    sparse = tf.sparse.from_dense([[7, 8], [9, 0]])
    assert prep.ToRagged(ignore_value=8)(sparse).to_list() == [[7], [9]]


@pytest.mark.parametrize(
    ("values", "ignored", "kept"),
    [
        ([["A", ""], ["B", "C"]], None, [b"A", b"B", b"C"]),
        ([[12, -1], [45, 78]], None, [12, 45, 78]),
        ([[0.0, 1.5], [-1.0, 0.0]], None, [1.5, -1.0]),
        ([[1, 2], [3, 1]], 1, [2, 3]),
    ],
)
def test_to_sparse_drops(values, ignored, kept):
    layer = prep.ToSparse(ignored)
    output = layer(tf.constant(values))
    assert output.values.numpy().tolist() == kept
    assert output.dense_shape.numpy().tolist() == [2, 2]
    assert layer(tf.ragged.constant(values)).values.numpy().tolist() == kept
    assert layer(output) is output


# === Against Keras and TensorFlow ===


def test_fingerprints_are_farmhash():
    dice = random.Random(5)
    lengths = [*range(201), *range(201), *(dice.randrange(2000) for _ in range(20))]
    strings = [dice.randbytes(length) for length in lengths]
    n_bins = 2**63 - 25
    wanted = tf.strings.to_hash_bucket_fast(strings, n_bins).numpy()
    np.testing.assert_array_equal(fingerprint64(strings) % np.uint64(n_bins), wanted)


def test_hashing_equals_keras_hashing_without_salt():
    words = np.array([[f"word {n}" for n in range(50)]])
    wanted = keras.layers.Hashing(97)(words)
    np.testing.assert_array_equal(prep.Hashing(97)(words), wanted)


def test_discretization_equals_keras_discretization():
    numbers = np.random.default_rng(1).normal(size=(50, 2)).astype("float32")
    bins = [-1.5, -0.1, 0.0, 0.7]
    wanted = keras.layers.Discretization(bins)(numbers)
    np.testing.assert_array_equal(prep.Discretization(bins)(numbers), wanted)


def test_integers_are_compared_exactly():
    large = 2**53
    layer = prep.Discretization([-1e300, 0.5, large + 2, float("inf")])
    numbers = tf.constant([0, 1, large + 1, large + 2], tf.int64)
    assert layer(numbers).numpy().tolist() == [1, 2, 2, 3]


@pytest.mark.parametrize("n_oov", [1, 5])
def test_index_lookup_equals_string_lookup_with_unknown_words_last(n_oov):
    vocabulary = ["red", "green", "blue"]
    words = np.array(["blue", "red", "pink", "grey", "black"])
    theirs = keras.layers.StringLookup(vocabulary=vocabulary, num_oov_indices=n_oov)(words)
    wanted = np.where(theirs < n_oov, theirs + 3, theirs - n_oov)
    np.testing.assert_array_equal(prep.IndexLookup(vocabulary, n_oov)(words), wanted)


def test_index_lookup_equals_integer_lookup_with_unknown_numbers_last():
    numbers = np.array([30, 10, 7, 20])
    theirs = keras.layers.IntegerLookup(vocabulary=[10, 20, 30])(numbers)
    wanted = np.where(theirs < 1, 3, theirs - 1)
    np.testing.assert_array_equal(prep.IndexLookup([10, 20, 30])(numbers), wanted)


def test_normalizer_equals_keras_normalization():
    numbers = np.array([[1.0], [2.0], [4.0]], "float32")
    wanted = keras.layers.Normalization(mean=2.0, variance=9.0)(numbers)
    np.testing.assert_allclose(prep.Normalizer(2.0, 3.0)(numbers), wanted, rtol=1e-6)


# === Models, files, pipelines ===


def test_a_model_with_string_inputs_trains_and_can_be_saved_and_loaded(tmp_path):
    tags = keras.Input((1,), dtype="string", name="tags")
    age = keras.Input((1,), name="age")
    ids = prep.Hashing(20)(prep.ToRagged()(tags))
    both = prep.ConcatenateWithOffset([0, 20], axis=1)([ids, prep.Discretization([18, 65])(age)])
    vector = prep.SparseEmbedding(23, 4, combiner="sum", max_norm=3.0)(both)
    model = keras.Model([tags, age], keras.layers.Dense(1)(vector))
    batch = [tf.constant([["a,b"], [""], ["c"]]), tf.constant([[3.0], [40.0], [70.0]])]
    model.compile("sgd", "mse")
    losses = [model.train_on_batch(batch, np.array([[1.0], [2.0], [3.0]])) for _ in range(3)]
    assert losses[-1] < losses[0]
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path)
    np.testing.assert_array_equal(loaded(batch), model(batch))


def test_a_model_accepts_sparse_and_ragged_inputs():
    words = keras.Input((None,), dtype="string", ragged=True)
    numbers = keras.Input((2,), sparse=True)
    ids = prep.IndexLookup(["a", "b"])(words)
    rounded = prep.RoundIdentity(5)(numbers)
    assert ids.ragged
    assert rounded.sparse
    table = prep.SparseEmbedding(5, 2, embeddings_initializer="ones", combiner="sum")
    model = keras.Model([words, numbers], [table(ids), table(rounded)])
    sparse = tf.SparseTensor([[0, 1], [1, 0], [1, 1]], [1.2, 2.0, 3.0], [2, 2])
    counts = model([tf.ragged.constant([["a", "b", "z"], []]), sparse])
    assert [one.numpy()[:, 0].tolist() for one in counts] == [[3.0, 0.0], [1.0, 2.0]]


def test_to_sparse_and_to_number_work_in_a_model():
    text = keras.Input((2,), dtype="string")
    numbers = prep.ToNumber("int64", default_value=-1)(text)
    sparse = prep.ToSparse()(numbers)
    assert sparse.sparse
    vector = prep.SparseEmbedding(9, 1, embeddings_initializer="ones", combiner="sum")(sparse)
    output = keras.Model(text, vector)(tf.constant([["1", "8"], ["", "3"]]))
    assert output.numpy().tolist() == [[2.0], [1.0]]


def test_layers_work_in_a_dataset():
    hashing, ragged = prep.Hashing(9), prep.ToRagged()
    lookup = prep.IndexLookup(["a", "b"])
    data = tf.data.Dataset.from_tensor_slices([["a,b"], ["c"]]).batch(2)
    rows = next(iter(data.map(lambda text: (hashing(text), lookup(ragged(text))))))
    assert rows[1].to_list() == [[0, 1], [2]]
    np.testing.assert_array_equal(rows[0], hashing(np.array([["a,b"], ["c"]])))


def test_a_vocabulary_file_is_read_once_and_saved_as_words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("A\nB\n", encoding="utf-8")
    layer = prep.IndexLookup(str(path))
    path.unlink()
    assert dense.reload(layer).get_config()["vocabulary"] == ["A", "B"]
    assert layer.vocab_size() == 3


@pytest.mark.parametrize(
    "layer",
    [
        prep.ConcatenateWithOffset([0, 3], axis=1),
        prep.SparseEmbedding(3, 2, "zeros", combiner="sqrtn", max_norm=2.0),
        prep.ToRagged(sep="|", ignore_value="none"),
        prep.ToSparse(ignore_value=7),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_loaded_layer_has_the_same_settings(layer):
    assert dense.reload(layer).get_config() == layer.get_config()


# === Errors ===


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: prep.Discretization([]), "non-empty and in ascending order"),
        (lambda: prep.Discretization([2, 1]), "non-empty and in ascending order"),
        (lambda: prep.Hashing(0), "`num_bins` must be at least 1, not 0"),
        (lambda: prep.IndexLookup([]), "the vocabulary is empty"),
        (lambda: prep.IndexLookup(["a", "b", "a"]), "contains `a` twice"),
        (lambda: prep.IndexLookup(["a"], 0), "`num_oov_tokens` must be at least 1"),
        (lambda: prep.LogRound(3, base=1), "`base` must be greater than 1"),
        (lambda: prep.Normalizer(1, 0), "`divisor` must not be 0"),
        (lambda: prep.RoundIdentity(0), "`num_buckets` must be at least 1"),
        (lambda: prep.SparseEmbedding(3, 2, combiner="max"), "one of mean, sqrtn, sum, not `max`"),
        (lambda: prep.SparseEmbedding(3, 2, max_norm=0), "`max_norm` must be greater than 0"),
        (lambda: prep.ToNumber("bool"), "one of int32, int64, float32, float64, not bool"),
        (lambda: prep.ToNumber("int32", 0.5), "`default_value` 0.5 is not of type int32"),
        (lambda: prep.ToRagged(sep=""), "`sep` must not be"),
        (
            lambda: prep.ConcatenateWithOffset([0, 1])([np.array([[1]])]),
            "a list of 2 inputs, got 1",
        ),
        (lambda: prep.ToRagged()(np.zeros((1, 1, 1))), "input of rank 1 or 2, not 3"),
        (lambda: prep.declare_model_inputs(), "input names must be strings"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    ("layer", "values", "text"),
    [
        (prep.Hashing(3), [1.5], "strings or integers, not `float32`: round the numbers"),
        (prep.Normalizer(0, 1), ["1"], "`Normalizer` needs numbers, not strings: use `ToNumber`"),
        (prep.ToNumber("int32"), [1], "`ToNumber` needs strings, not `int32`"),
        (prep.IndexLookup(["a"]), [1], "needs strings, not numbers"),
        (prep.IndexLookup([1]), ["a"], "needs integers"),
    ],
)
def test_a_wrong_type_is_refused_in_one_line(layer, values, text):
    with pytest.raises(TypeError, match=text):
        layer(tf.constant(values))


def test_an_array_of_strings_must_contain_only_strings():
    with pytest.raises(TypeError, match="must contain `str` or `bytes`, not `None`"):
        prep.Hashing(3).on_numpy(np.array(["a", None], object))


def test_numpy_numbers_are_parsed_as_strictly_as_in_tensorflow():
    layer = prep.ToNumber("int32")
    for text in ("1.5", "1_000", "x", str(2**31), " "):
        with pytest.raises(ValueError, match=f"cannot parse `{text}` as int32"):
            layer.on_numpy(np.array([text]))
        with pytest.raises(tf.errors.InvalidArgumentError):
            layer(tf.constant([text]))


def test_a_missing_keras_is_reported_with_the_solution(tmp_path):
    (tmp_path / "keras.py").write_text("raise ModuleNotFoundError('no keras', name='keras')")
    search = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    answer = subprocess.run(
        [sys.executable, "-c", "import elasticdl.preprocessing"],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pip install elasticdl[keras]" in answer.stderr.splitlines()[-1]


# === Statistics of the analysis step, and other tests ===


def test_statistics_come_from_the_environment_or_have_defaults(monkeypatch):
    assert prep.get_max("age", 90) == 90
    for name, text in {
        "min": "1",
        "max": "99.5",
        "avg": "38",
        "stddev": "2.5",
        "boundaries": "65,18,18",
        "distinct_count": "73",
        "vocab": "/data/age.txt",
    }.items():
        monkeypatch.setenv(f"_age_{name}", text)
    assert prep.get_min("age", 0) == 1.0
    assert prep.get_max("age", 0) == 99.5
    assert prep.get_avg("age", 0) == 38.0
    assert prep.get_stddev("age", 0) == 2.5
    assert prep.get_bucket_boundaries("age", []) == [18.0, 65.0]
    assert prep.get_distinct_count("age", 0) == 73
    assert prep.get_vocabulary("age", ["a"]) == "/data/age.txt"
    monkeypatch.setenv("_age_min", "young")
    with pytest.raises(ValueError, match="environment variable `_age_min`: `young`"):
        prep.get_min("age", 0)


def test_examples_in_the_documentation_are_correct():
    names = [f"{prep.__name__}.{one.name}" for one in pkgutil.iter_modules(prep.__path__)]
    for name in [prep.__name__, "elasticdl.feature_column", *names]:
        result = doctest.testmod(importlib.import_module(name))
        assert result.failed == 0, name


@pytest.mark.parametrize("backend", ELSEWHERE)
def test_dense_input_works_on_other_backends(other_backends, backend):
    if backend not in other_backends:
        pytest.skip(f"{backend} is not installed")
    process = other_backends[backend]
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
