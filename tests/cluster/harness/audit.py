# SPDX-License-Identifier: Apache-2.0
"""Reads the API server's audit log: who sent which requests, and whether they were allowed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Request:
    """One kind of request, in the terms of a Role."""

    verb: str
    group: str
    resource: str
    allowed: bool


def requests(log: Path, user: str) -> set[Request]:
    """The requests of `user` so far; a pod's user is `system:serviceaccount:NAMESPACE:NAME`."""
    found = set()
    for line in log.read_text().splitlines(keepends=True):
        # The last line may be incomplete.
        if not line.endswith("\n"):
            break
        # Most lines are from other users, and a shared cluster has many.
        if user not in line:
            continue
        event = json.loads(line)
        asker = event.get("impersonatedUser") or event["user"]
        if asker.get("username") == user and "objectRef" in event:
            found.add(_request(event))
    return found


def _request(event: dict) -> Request:
    target = event["objectRef"]
    parts = [target.get("resource", ""), target.get("subresource", "")]
    resource = "/".join(filter(None, parts))
    decision = event.get("annotations", {}).get("authorization.k8s.io/decision")
    return Request(event["verb"], target.get("apiGroup", ""), resource, decision == "allow")
