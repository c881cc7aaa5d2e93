# SPDX-License-Identifier: Apache-2.0
"""Whether tests on Kubernetes must run, may run, or are left out: what `K8S_TESTS` says."""

from __future__ import annotations

import os

import pytest

WANTED = os.environ.get("K8S_TESTS", "")
LEFT_OUT = WANTED == "False"


def require(reason: str | None) -> None:
    """Skips the test for `reason`, if there is one, or fails where the tests must run."""
    if reason is None:
        return
    if WANTED == "True":
        pytest.fail(f"K8S_TESTS=True, but {reason}", pytrace=False)
    pytest.skip(reason)
