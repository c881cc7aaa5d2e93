# SPDX-License-Identifier: Apache-2.0
"""Maps words to their index in a vocabulary."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from elasticdl.preprocessing import _kinds
from elasticdl.preprocessing._layer import Textual
from elasticdl.preprocessing.hashing import hash_bins


@keras.saving.register_keras_serializable("elasticdl")
class IndexLookup(Textual):
    """Maps words to their index in `vocabulary`; others share `num_oov_tokens` ids after it.

    `vocabulary` is a list of strings or integers, or the path of a file with one word per line.
    The file is read once, by the constructor: a saved model contains the words, not the path.

    >>> np.asarray(IndexLookup(["A", "B"])(np.array([["A"], ["B"], ["D"]]))).tolist()
    [[0], [1], [2]]
    """

    def __init__(
        self, vocabulary: str | os.PathLike | Sequence[Any], num_oov_tokens: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if num_oov_tokens < 1:
            raise ValueError(f"`num_oov_tokens` must be at least 1, not {num_oov_tokens}")
        self.vocabulary = read_vocabulary(vocabulary)
        self.num_oov_tokens = num_oov_tokens
        self._is_text = isinstance(self.vocabulary[0], str)
        self._places = {word: place for place, word in enumerate(self._keys())}
        if len(self._places) < len(self.vocabulary):
            raise ValueError(f"the vocabulary contains `{_first_double(self.vocabulary)}` twice")
        self._table = self._make_table()

    def vocab_size(self) -> int:
        """Returns the number of ids: the words and the out-of-vocabulary ids."""
        return len(self.vocabulary) + self.num_oov_tokens

    def on_tensorflow(self, tf: Any, values: Any) -> Any:
        self._check(values)
        return self._table.lookup(values if self._is_text else tf.cast(values, tf.int64))

    def on_numpy(self, values: np.ndarray) -> np.ndarray:
        self._check(values)
        words = _kinds.to_bytes(values) if self._is_text else values.ravel().tolist()
        ids = np.array([self._places.get(word, -1) for word in words], np.int64)
        ids = ids.reshape(values.shape)
        unknown = ids < 0
        ids[unknown] = len(self.vocabulary) + hash_bins(values[unknown], self.num_oov_tokens)
        return ids

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocabulary": self.vocabulary,
            "num_oov_tokens": self.num_oov_tokens,
        }

    def _keys(self) -> list[Any]:
        return [word.encode() for word in self.vocabulary] if self._is_text else self.vocabulary

    def _make_table(self) -> Any:
        tf = _kinds.tensorflow()
        if tf is None:
            return None
        with tf.init_scope():
            keys = tf.constant(self._keys(), tf.string if self._is_text else tf.int64)
            places = tf.range(len(self.vocabulary), dtype=tf.int64)
            words = tf.lookup.KeyValueTensorInitializer(keys, places)
            return tf.lookup.StaticVocabularyTable(words, self.num_oov_tokens)

    def _check(self, values: Any) -> None:
        if self._is_text and not _kinds.is_text(values):
            raise TypeError("`IndexLookup` with a vocabulary of strings needs strings, not numbers")
        if not self._is_text and not _kinds.is_integer(values):
            raise TypeError("`IndexLookup` with a vocabulary of integers needs integers")


def read_vocabulary(vocabulary: str | os.PathLike | Sequence[Any]) -> list[Any]:
    """Returns the words of a list, or of a file with one word per line."""
    if isinstance(vocabulary, (str, os.PathLike)):
        with open(vocabulary, encoding="utf-8") as file:
            words: list[Any] = file.read().splitlines()
    else:
        words = [word.decode() if isinstance(word, bytes) else word for word in vocabulary]
    if not words:
        raise ValueError("the vocabulary is empty: it needs at least one word")
    if isinstance(words[0], str):
        same = all(isinstance(word, str) for word in words)
    else:
        same = all(isinstance(word, (int, np.integer)) for word in words)
        words = [int(word) for word in words] if same else words
    if not same:
        raise TypeError("a vocabulary must be a list of strings or a list of integers, not a mix")
    return words


def _first_double(words: Sequence[Any]) -> Any:
    seen: set[Any] = set()
    return next(word for word in words if word in seen or seen.add(word))
