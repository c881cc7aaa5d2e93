# SPDX-License-Identifier: Apache-2.0
"""Shows what the user's `feed` returned, when a model does not fit the data of its job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Watch = Callable[[Any, Any], None]


def watched(feed: Callable[..., tuple[Any, Any]], watch: Watch) -> Callable[..., tuple[Any, Any]]:
    """Returns a `feed` that also passes its features and labels to `watch`."""

    def run(batch: Any, mode: str) -> tuple[Any, Any]:
        fed = feed(batch, mode)
        watch(*fed)
        return fed

    return run


def fed(features: Any, labels: Any) -> str:
    """Returns a sentence with the types and shapes of the features and labels."""
    parts = [f"the features {_shown(features)}"]
    if labels is not None:
        parts.append(f"the labels {_shown(labels)}")
    return f"`feed` returned {' and '.join(parts)}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shown(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_shown(one) for one in value) + ")"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return type(value).__name__
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    return f"{name} {list(shape)}"
