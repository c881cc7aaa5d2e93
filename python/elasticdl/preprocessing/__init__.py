# SPDX-License-Identifier: Apache-2.0
"""Keras layers that convert raw features to numbers and ids.

Dense input works on every Keras backend. On TensorFlow, ragged and sparse tensors work, too, and
the output has the same kind as the input. On other backends, a numpy array gives a numpy array, and
a backend tensor gives a backend tensor; strings are always numpy arrays.
A negative id means "no id".

>>> import numpy as np
>>> from elasticdl.preprocessing import ConcatenateWithOffset, Discretization, Hashing
>>> age = Discretization(bins=[18, 65])(np.array([[17.0], [42.0]], "float32"))
>>> city = Hashing(num_bins=10)(np.array([["Oslo"], ["Lima"]]))
>>> np.asarray(ConcatenateWithOffset(offsets=[0, 3])([age, city])).tolist()
[[0, 11], [1, 5]]
"""

try:
    import keras as _keras  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise  # Keras is installed, but its backend is not; the original message says so.
    raise ImportError(
        "`elasticdl.preprocessing` needs Keras: run `pip install elasticdl[keras]`"
    ) from error

from elasticdl.preprocessing.analyzer import (
    get_avg,
    get_bucket_boundaries,
    get_distinct_count,
    get_max,
    get_min,
    get_stddev,
    get_vocabulary,
)
from elasticdl.preprocessing.concatenate_with_offset import ConcatenateWithOffset
from elasticdl.preprocessing.discretization import Discretization
from elasticdl.preprocessing.hashing import Hashing
from elasticdl.preprocessing.index_lookup import IndexLookup
from elasticdl.preprocessing.log_round import LogRound
from elasticdl.preprocessing.model_inputs import declare_model_inputs
from elasticdl.preprocessing.normalizer import Normalizer
from elasticdl.preprocessing.round_identity import RoundIdentity
from elasticdl.preprocessing.sparse_embedding import SparseEmbedding
from elasticdl.preprocessing.to_number import ToNumber
from elasticdl.preprocessing.to_ragged import ToRagged
from elasticdl.preprocessing.to_sparse import ToSparse

__all__ = [
    "ConcatenateWithOffset",
    "Discretization",
    "Hashing",
    "IndexLookup",
    "LogRound",
    "Normalizer",
    "RoundIdentity",
    "SparseEmbedding",
    "ToNumber",
    "ToRagged",
    "ToSparse",
    "declare_model_inputs",
    "get_avg",
    "get_bucket_boundaries",
    "get_distinct_count",
    "get_max",
    "get_min",
    "get_stddev",
    "get_vocabulary",
]
