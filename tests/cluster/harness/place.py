# SPDX-License-Identifier: Apache-2.0
"""The folder, names and addresses of one cluster.

Every cluster on the machine has a number, and everything that could collide derives from it:
the loopback address `127.N.0.1` of its control plane (so it can use the usual ports), the bridge
`edlN`, and the network `10.N.0.0/16` behind it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .waiting import Failure

# Possible numbers of clusters; these networks are rarely used.
NUMBERS = range(160, 192)
ETCD_PORT = 2379
API_PORT = 6443


def root() -> Path:
    """The parent folder of all clusters of this user."""
    return Path(os.environ.get("ELASTICDL_CLUSTERS", f"/tmp/elasticdl-clusters-{os.getuid()}"))


def folder_of(name: str) -> Path:
    """A cluster's folder. `down` removes it, so the name must be valid, and not a path."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise Failure(
            f"`{name}` is not a valid cluster name: use lowercase letters, digits and `-`"
        )
    return root() / name


@dataclass(frozen=True)
class Place:
    """The resources of one cluster on the machine."""

    name: str
    number: int
    has_bridge: bool

    @property
    def folder(self) -> Path:
        return folder_of(self.name)

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    @property
    def loopback(self) -> str:
        return f"127.{self.number}.0.1"

    @property
    def bridge(self) -> str:
        return f"edl{self.number}"

    @property
    def cgroup(self) -> str:
        return f"elasticdl-{self.number}"

    @property
    def host(self) -> str:
        """The address of the API server and of DNS; only nodes can reach it."""
        return f"10.{self.number}.0.1" if self.has_bridge else self.loopback

    @property
    def server(self) -> str:
        return f"https://{self.host}:{API_PORT}"

    @property
    def pods(self) -> str:
        return f"10.{self.number}.0.0/17"

    @property
    def services(self) -> str:
        return f"10.{self.number}.128.0/20"

    @property
    def kubernetes_service(self) -> str:
        """The API server's address for pods, by convention the first service address."""
        return f"10.{self.number}.128.1"

    def node_address(self, index: int) -> str:
        return f"10.{self.number}.0.{10 + index}"

    def node_pods(self, index: int) -> str:
        return f"10.{self.number}.{index}.0/24"

    def link(self, index: int | str) -> str:
        """The machine's end of the link to a node; `*` matches any node."""
        return f"{self.bridge}n{index}"


def claim(name: str, has_bridge: bool) -> Place:
    """Creates the folder of a new cluster, and gives it an unused number."""
    root().mkdir(mode=0o755, parents=True, exist_ok=True)
    if root().stat().st_uid != os.getuid():
        raise Failure(f"`{root()}` belongs to another user; set ELASTICDL_CLUSTERS")
    try:
        folder_of(name).mkdir()
    except FileExistsError:
        raise Failure(f"cluster `{name}` is already running, or was not removed") from None
    (root() / ".numbers").mkdir(exist_ok=True)
    for number in NUMBERS:
        place = Place(name, number, has_bridge)
        try:
            (root() / ".numbers" / str(number)).symlink_to(name)
        except FileExistsError:
            continue
        if _unused(place):
            return place
        release(place)
    folder_of(name).rmdir()
    raise Failure(f"all {len(NUMBERS)} cluster numbers are in use")


def release(place: Place) -> None:
    """Releases the number; everything else must have been removed."""
    mark = root() / ".numbers" / str(place.number)
    with contextlib.suppress(FileNotFoundError, OSError):
        if os.readlink(mark) == place.name:
            mark.unlink()


def number_of(name: str) -> int | None:
    """Finds a cluster's number, even if its start was killed before anything was written."""
    return next((number for number, holder in _holders().items() if holder == name), None)


def names() -> list[str]:
    """The clusters of this user that are running or were not removed."""
    folders = {each.name for each in root().glob("[!.]*")}
    return sorted(folders | set(_holders().values()))


def _holders() -> dict[int, str]:
    """The numbers in use, and their clusters; others may change at the same time."""
    found = {}
    for mark in (root() / ".numbers").glob("*"):
        with contextlib.suppress(FileNotFoundError):
            found[int(mark.name)] = os.readlink(mark)
    return found


def _unused(place: Place) -> bool:
    """Whether no other user's cluster and no network of the machine uses these addresses."""
    with socket.socket() as probe:
        try:
            probe.bind((place.loopback, ETCD_PORT))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    if not place.has_bridge:
        return True
    listed = subprocess.run(
        ["ip", "-4", "route", "show", "root", f"10.{place.number}.0.0/16"],
        capture_output=True,
        text=True,
        check=True,
    )
    return not listed.stdout.strip()
