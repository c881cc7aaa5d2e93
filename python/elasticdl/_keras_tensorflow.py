# SPDX-License-Identifier: Apache-2.0
"""Keeps Keras from importing TensorFlow on other backends, if nothing else does.

If TensorFlow is installed, Keras imports it to set its seed and to look for its types in the config
of a model. This takes seconds, and there is nothing to seed or to find if nothing has imported it.
Parts of Keras that compute with TensorFlow, such as its preprocessing of text, still import it.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
from keras.src.saving import serialization_lib
from keras.src.utils import rng_utils


class _IfImported:
    """Stands in for Keras' lazy module of TensorFlow."""

    def __init__(self, lazy: Any) -> None:
        self._lazy = lazy

    @property
    def available(self) -> bool:
        return "tensorflow" in sys.modules and self._lazy.available

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lazy, name)


def leave_unimported() -> None:
    """From now on, Keras only seeds TensorFlow and looks for its types if it is imported."""
    if keras.backend.backend() == "tensorflow":
        return
    for module in (rng_utils, serialization_lib):
        if not isinstance(module.tf, _IfImported):
            module.tf = _IfImported(module.tf)
