# SPDX-License-Identifier: Apache-2.0
"""Moves large Keras embeddings to the parameter servers, and restores them for export.

A layer is swapped in place: its class changes and its weight is removed. This works for
functional, sequential and subclassed models, and for nested layers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from elasticdl import layers
from elasticdl._zoo import ZooError

# Tables below this many bytes are faster as dense parameters, as in the original ElasticDL.
SWAP_BYTES = 2 << 20

# Keras divides the standard deviation by this to compensate for the truncated tails.
_TRUNCATION = 0.87962566103423978

Tables = dict[str, tuple[np.ndarray, np.ndarray]]


class Swapped(keras.layers.Embedding):
    """A `keras.layers.Embedding` whose rows are on the parameter servers during training."""

    least_id = 0

    def call(self, inputs: Any) -> Any:
        ids = layers.whole(inputs)
        the_pass = layers.current()
        if the_pass is None:
            vectors = layers.no_vectors(ids, self.output_dim)
        else:
            vectors = the_pass.vectors(self, ids)
        return ops.cast(vectors, self.compute_dtype)


def swap(model: Any) -> None:
    """Swaps every large embedding whose initial values the parameter servers can generate."""
    for layer in flat_layers(model):
        if type(layer) is keras.layers.Embedding and _is_swappable(layer):
            layer._table = layer._embeddings.path
            del layer._embeddings
            layer.__class__ = Swapped


def distributed(model: Any) -> list[Any]:
    """Returns the layers whose rows are on the parameter servers, each once."""
    return [x for x in flat_layers(model) if isinstance(x, (layers.Embedding, Swapped))]


def flat_layers(model: Any) -> list[Any]:
    """Returns all layers at any depth, each once."""
    return list({id(layer): layer for layer in model._flatten_layers()}.values())


def table_spec(layer: Any) -> dict[str, Any]:
    """Returns the spec of the layer's table for the parameter servers."""
    return {"name": table_name(layer), "dim": layer.output_dim, "init": _init(layer)}


def table_name(layer: Any) -> str:
    """Returns the layer's name, or the name of the former weight of a swapped layer."""
    return layer._table if isinstance(layer, Swapped) else layer.name


@contextlib.contextmanager
def restored(model: Any, tables: Tables) -> Iterator[Any]:
    """Yields a model with the rows of `tables` that plain Keras can save and load.

    Rows that no record used keep their initial value from Keras. Layers of `elasticdl.layers`
    become plain Keras layers if Keras can rebuild the model and their `input_dim` is known.
    Otherwise they keep their rows, and loading them requires `elasticdl.layers`.
    """
    own = distributed(model)
    try:
        for layer in own:
            ids, rows = tables.get(table_name(layer), (np.zeros(0), np.zeros((0, 1))))
            if isinstance(layer, Swapped):
                _bring_back(layer, ids, rows)
            else:
                layer._local = layers.Local(ids, rows)
        yield _with_plain_layers(model)
    finally:
        for layer in own:
            if isinstance(layer, layers.Embedding):
                layer._local = None
            elif not isinstance(layer, Swapped):
                del layer._embeddings
                layer.__class__ = Swapped


def _is_swappable(layer: Any) -> bool:
    if not layer.built or layer.input_dim * layer.output_dim * 4 <= SWAP_BYTES:
        return False
    special = (layer.embeddings_regularizer, layer.embeddings_constraint, layer.lora_rank)
    if any(special) or not layer.trainable or layer.quantization_mode:
        return False
    try:
        _init(layer)
    except ZooError:
        return False
    # Do not lose rows that the user has set.
    return np.array_equal(ops.convert_to_numpy(layer._embeddings), _first_values(layer))


def _first_values(layer: Any) -> np.ndarray:
    """Recomputes the initial values of the layer; its initializer has a fixed seed."""
    shape = (layer.input_dim, layer.output_dim)
    made = layer.embeddings_initializer(shape, dtype=layer.variable_dtype)
    return np.array(ops.convert_to_numpy(made))


def _bring_back(layer: Any, ids: np.ndarray, rows: np.ndarray) -> None:
    layer.__class__ = keras.layers.Embedding
    layer._tracker.unlock()
    layer.built = False
    layer.build()
    layer._embeddings.assign(_filled(_first_values(layer), ids, rows))


def _filled(values: np.ndarray, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    if len(ids):
        values[np.asarray(ids, dtype="int64")] = rows
    return values


def _with_plain_layers(model: Any) -> Any:
    """Returns the model with the layers of `elasticdl.layers` replaced by plain ones."""
    own = [x for x in distributed(model) if isinstance(x, layers.Embedding)]
    can_rebuild = isinstance(model, (keras.Sequential, type(keras.Model(*_identity()))))
    if not can_rebuild or not any(layer.input_dim for layer in own):
        return model

    def plain(layer: Any) -> Any:
        is_plain = not isinstance(layer, layers.Embedding) or layer.input_dim is None
        return layer if is_plain else _plain(layer)

    return keras.models.clone_model(model, clone_function=plain, recursive=True)


def _identity() -> tuple[Any, Any]:
    only = keras.Input((1,))
    return only, only


def _plain(layer: Any) -> Any:
    """Returns an equivalent Keras layer, or a small Keras model if there is a combiner."""
    has_combiner = layer.combiner is not None
    table = keras.layers.Embedding(
        layer.input_dim,
        layer.output_dim,
        embeddings_initializer=layer.embeddings_initializer,
        mask_zero=layer.mask_zero and not has_combiner,
        name=layer.name if not has_combiner else f"{layer.name}_rows",
    )
    table.build()
    table._embeddings.assign(_filled(_first_values(table), layer._local.ids, layer._local.rows))
    if not has_combiner:
        return table
    ids = keras.Input(layer.input.shape[1:], dtype="int64", name=f"{layer.name}_ids")
    present = ops.expand_dims(ops.cast(ids >= layer.least_id, "float32"), -1)
    total = ops.sum(table(ops.maximum(ids, 0)) * present, axis=-2)
    if layer.combiner != "sum":
        count = ops.maximum(ops.sum(present, axis=-2), 1.0)
        total = total / (count if layer.combiner == "mean" else ops.sqrt(count))
    return keras.Model(ids, total, name=layer.name)


def _init(layer: Any) -> dict[str, Any]:
    """Converts the initializer to the parameter servers' format."""
    initializer = layer.embeddings_initializer
    kinds = keras.initializers
    config = initializer.get_config() if isinstance(initializer, kinds.Initializer) else {}
    if isinstance(initializer, kinds.RandomUniform):
        return {"uniform": {"low": config["minval"], "high": config["maxval"]}}
    if isinstance(initializer, (kinds.RandomNormal, kinds.TruncatedNormal)):
        word = "normal" if isinstance(initializer, kinds.RandomNormal) else "truncated_normal"
        return {word: {"mean": config["mean"], "std": config["stddev"]}}
    if isinstance(initializer, (kinds.Zeros, kinds.Ones)):
        return {"constant": 0.0 if isinstance(initializer, kinds.Zeros) else 1.0}
    if isinstance(initializer, kinds.Constant) and np.ndim(config["value"]) == 0:
        return {"constant": float(config["value"])}
    if isinstance(initializer, kinds.VarianceScaling) and layer.input_dim:
        return _scaled(initializer, layer.input_dim, layer.output_dim)
    name = getattr(initializer, "__name__", type(initializer).__name__)
    raise ZooError(
        f"the Embedding `{layer.name}` has the initializer {name}, which parameter servers do not "
        "support; use RandomUniform, RandomNormal, TruncatedNormal, Constant, Zeros or Ones"
    )


def _scaled(initializer: Any, fan_in: int, fan_out: int) -> dict[str, Any]:
    fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
    variance = initializer.scale / fans[initializer.mode]
    if initializer.distribution == "uniform":
        limit = math.sqrt(3 * variance)
        return {"uniform": {"low": -limit, "high": limit}}
    std = math.sqrt(variance)
    if initializer.distribution == "untruncated_normal":
        return {"normal": {"mean": 0.0, "std": std}}
    return {"truncated_normal": {"mean": 0.0, "std": std / _TRUNCATION}}
