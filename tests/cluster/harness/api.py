# SPDX-License-Identifier: Apache-2.0
"""Queries a cluster's API server, faster than kubectl."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from .place import Place

REQUEST_LIMIT = 5


class Api:
    """Reads objects as the cluster's administrator."""

    def __init__(self, place: Place) -> None:
        self.server = place.server
        self.trust = ssl.create_default_context(cafile=str(place.keys / "ca.crt"))
        self.trust.load_cert_chain(place.keys / "admin.crt", place.keys / "admin.key")
        # Requests to this machine must not go through a proxy from the environment.
        self.opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.trust)
        )

    def answers(self, path: str) -> bool:
        """Whether the server currently answers at `path`."""
        return self._read(path) is not None

    def get(self, path: str) -> dict[str, Any] | None:
        """The object at `path`; none if there is no such object or no answer."""
        read = self._read(path)
        return None if read is None else json.loads(read)

    def _read(self, path: str) -> bytes | None:
        try:
            with self.opener.open(self.server + path, timeout=REQUEST_LIMIT) as response:
                return response.read()
        except (urllib.error.URLError, TimeoutError, ConnectionError, ssl.SSLError):
            return None

    def readiness(self) -> dict[str, dict[str, Any]]:
        """The condition `Ready` of every node; empty for a node that never reported it."""
        listed = self.get("/api/v1/nodes") or {"items": []}
        return {node["metadata"]["name"]: _readiness(node) for node in listed["items"]}

    def condition(self, node: str) -> dict[str, Any]:
        """The condition `Ready` of one node; also empty if the server does not answer."""
        return self.readiness().get(node, {})

    def n_ready(self) -> int:
        return sum(each.get("status") == "True" for each in self.readiness().values())

    def ready(self, node: str) -> bool:
        return self.condition(node).get("status") == "True"

    def lost(self, node: str) -> bool:
        """Whether the cluster considers the node lost; false if the server does not answer."""
        return self.condition(node).get("status") == "Unknown"


def _readiness(node: dict[str, Any]) -> dict[str, Any]:
    conditions = node.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == "Ready"), {})
