# SPDX-License-Identifier: Apache-2.0
"""The names of the inputs that a subclassed model takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Model = TypeVar("Model", bound=type)


def declare_model_inputs(*names: str) -> Callable[[Model], Model]:
    """Notes on a model class which inputs its `call` takes, where the signature does not say.

    >>> @declare_model_inputs("wide", "deep")
    ... class WideAndDeep:
    ...     pass
    >>> WideAndDeep._model_inputs
    ['wide', 'deep']
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError('name the inputs as strings: `@declare_model_inputs("wide", "deep")`')

    def note(model: Model) -> Model:
        model._model_inputs = list(names)
        return model

    return note
