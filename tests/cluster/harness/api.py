# SPDX-License-Identifier: Apache-2.0
"""Asks a cluster's API server, quicker than kubectl starts."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from .place import Place

REQUEST_LIMIT = 5


class Api:
    """Reads as the cluster's administrator."""

    def __init__(self, place: Place) -> None:
        self.server = place.server
        self.trust = ssl.create_default_context(cafile=str(place.keys / "ca.crt"))
        self.trust.load_cert_chain(place.keys / "admin.crt", place.keys / "admin.key")
        # A proxy that the environment names must not see requests that stay on the machine.
        self.opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.trust)
        )

    def answers(self, path: str) -> bool:
        """Whether the server knows `path`, now."""
        return self._read(path) is not None

    def get(self, path: str) -> dict[str, Any] | None:
        """The object at `path`; none where there is no such object or no answer."""
        read = self._read(path)
        return None if read is None else json.loads(read)

    def _read(self, path: str) -> bytes | None:
        try:
            with self.opener.open(self.server + path, timeout=REQUEST_LIMIT) as response:
                return response.read()
        except (urllib.error.URLError, TimeoutError, ConnectionError, ssl.SSLError):
            return None

    def readiness(self) -> dict[str, dict[str, Any]]:
        """The condition `Ready` of every node; empty for one that never said anything."""
        listed = self.get("/api/v1/nodes") or {"items": []}
        return {node["metadata"]["name"]: _readiness(node) for node in listed["items"]}

    def condition(self, node: str) -> dict[str, Any]:
        """The condition `Ready` of one node; empty, too, where the server does not answer."""
        return self.readiness().get(node, {})

    def n_ready(self) -> int:
        return sum(each.get("status") == "True" for each in self.readiness().values())

    def ready(self, node: str) -> bool:
        return self.condition(node).get("status") == "True"

    def lost(self, node: str) -> bool:
        """Whether the cluster noticed that the node is silent; the server's silence is none."""
        return self.condition(node).get("status") == "Unknown"


def _readiness(node: dict[str, Any]) -> dict[str, Any]:
    conditions = node.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == "Ready"), {})
