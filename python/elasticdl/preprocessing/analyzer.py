# SPDX-License-Identifier: Apache-2.0
"""Reads feature statistics that an analysis step stored in environment variables.

The variable for the statistic `min` of the feature `age` is `_age_min`. The other statistics are
`max`, `avg`, `stddev`, `boundaries` (comma-separated numbers), `distinct_count` and `vocab` (a
path). If a variable is not set, the default is returned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any


def get_min(feature_name: str, default_value: float) -> float:
    """Returns the minimum of a feature.

    >>> get_min("age", 17.0)
    17.0
    """
    return _read(feature_name, "min", float, default_value)


def get_max(feature_name: str, default_value: float) -> float:
    """Returns the maximum of a feature.

    >>> get_max("age", 90.0)
    90.0
    """
    return _read(feature_name, "max", float, default_value)


def get_avg(feature_name: str, default_value: float) -> float:
    """Returns the mean of a feature.

    >>> get_avg("age", 38.6)
    38.6
    """
    return _read(feature_name, "avg", float, default_value)


def get_stddev(feature_name: str, default_value: float) -> float:
    """Returns the standard deviation of a feature.

    >>> get_stddev("age", 13.6)
    13.6
    """
    return _read(feature_name, "stddev", float, default_value)


def get_bucket_boundaries(feature_name: str, default_value: Sequence[float]) -> Sequence[float]:
    """Returns the bucket boundaries of a feature, in increasing order without duplicates.

    >>> get_bucket_boundaries("age", [18, 65])
    [18, 65]
    """
    return _read(feature_name, "boundaries", _boundaries, default_value)


def get_distinct_count(feature_name: str, default_value: int) -> int:
    """Returns the number of distinct values of a feature.

    >>> get_distinct_count("city", 400)
    400
    """
    return _read(feature_name, "distinct_count", int, default_value)


def get_vocabulary(feature_name: str, default_value: str | Sequence[str]) -> str | Sequence[str]:
    """Returns the path of a feature's vocabulary, or the default, for `IndexLookup`.

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
        raise ValueError(f"invalid value of the environment variable `{name}`: `{text}`") from error
