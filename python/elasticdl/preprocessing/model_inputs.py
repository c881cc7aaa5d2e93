# SPDX-License-Identifier: Apache-2.0
"""Declares the input names of a subclassed model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Model = TypeVar("Model", bound=type)


def declare_model_inputs(*names: str) -> Callable[[Model], Model]:
    """Declares the inputs of a model class if the signature of `call` does not show them.

    >>> @declare_model_inputs("wide", "deep")
    ... class WideAndDeep:
    ...     pass
    >>> WideAndDeep._model_inputs
    ['wide', 'deep']
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError('input names must be strings: `@declare_model_inputs("wide", "deep")`')

    def note(model: Model) -> Model:
        model._model_inputs = list(names)
        return model

    return note
