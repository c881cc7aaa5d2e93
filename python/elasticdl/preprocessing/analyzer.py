# SPDX-License-Identifier: Apache-2.0
"""Statistics of features that an analysis step left in the environment, or a default.

The variable of feature `age` and statistic `min` is `_age_min`; the other statistics are `max`,
`avg`, `stddev`, `boundaries` (numbers with commas between), `distinct_count` and `vocab` (a path).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any


def get_min(feature_name: str, default_value: float) -> float:
    """The least value of a feature.

    >>> get_min("age", 17.0)
    17.0
    """
    return _read(feature_name, "min", float, default_value)


def get_max(feature_name: str, default_value: float) -> float:
    """The greatest value of a feature.

    >>> get_max("age", 90.0)
    90.0
    """
    return _read(feature_name, "max", float, default_value)


def get_avg(feature_name: str, default_value: float) -> float:
    """The mean of a feature.

    >>> get_avg("age", 38.6)
    38.6
    """
    return _read(feature_name, "avg", float, default_value)


def get_stddev(feature_name: str, default_value: float) -> float:
    """The standard deviation of a feature.

    >>> get_stddev("age", 13.6)
    13.6
    """
    return _read(feature_name, "stddev", float, default_value)


def get_bucket_boundaries(feature_name: str, default_value: Sequence[float]) -> Sequence[float]:
    """The boundaries between a feature's buckets, in rising order and each once.

    >>> get_bucket_boundaries("age", [18, 65])
    [18, 65]
    """
    return _read(feature_name, "boundaries", _boundaries, default_value)


def get_distinct_count(feature_name: str, default_value: int) -> int:
    """How many different values a feature has.

    >>> get_distinct_count("city", 400)
    400
    """
    return _read(feature_name, "distinct_count", int, default_value)


def get_vocabulary(feature_name: str, default_value: str | Sequence[str]) -> str | Sequence[str]:
    """The path of a feature's vocabulary, or the default: what `IndexLookup` takes.

    >>> get_vocabulary("city", ["Oslo", "Lima"])
    ['Oslo', 'Lima']
    """
    return _read(feature_name, "vocab", str, default_value)


def _boundaries(text: str) -> list[float]:
    return sorted({float(part) for part in text.split(",")})


def _read(feature: str, statistic: str, parse: Callable[[str], Any], default: Any) -> Any:
    name = f"_{feature}_{statistic}"
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"cannot read the environment variable `{name}`: `{text}`") from error
