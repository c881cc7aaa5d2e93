# SPDX-License-Identifier: Apache-2.0
"""Whether tests on Kubernetes must run, may be skipped, or are disabled (`K8S_TESTS` and `CI`)."""

from __future__ import annotations

import os

import pytest

WANTED = os.environ.get("K8S_TESTS", "")
DISABLED = WANTED == "False"
# Why they must run.
MUST = "K8S_TESTS=True" if WANTED == "True" else "CI=true" if os.environ.get("CI") == "true" else ""


def require(reason: str | None) -> None:
    """Skips the test for `reason`, if there is one, or fails if the tests must run."""
    if reason is None:
        return
    if MUST:
        pytest.fail(f"{MUST}, but {reason}", pytrace=False)
    pytest.skip(reason)
