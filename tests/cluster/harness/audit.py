# SPDX-License-Identifier: Apache-2.0
"""Reads the API server's audit log: who asked for what, and whether it was allowed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Request:
    """One kind of request, in the words of a Role."""

    verb: str
    group: str
    resource: str
    allowed: bool


def requests(log: Path, user: str) -> set[Request]:
    """What `user` asked for so far; `system:serviceaccount:NAMESPACE:NAME` is a pod's user."""
    found = set()
    for line in log.read_text().splitlines(keepends=True):
        # The last line may be half written.
        if not line.endswith("\n"):
            break
        # Most lines are others', and a shared cluster has many.
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
