# SPDX-License-Identifier: Apache-2.0
"""A whole cluster: start it, stop it, and inject faults into its nodes."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from . import build, cgroup, control_plane, fake_nodes, keys, limits, network, place
from .api import Api
from .daemon import Daemons
from .kubectl import Kubectl
from .lock import alone
from .node import Node, name, now, write_probe_image
from .place import Place
from .size import Size
from .waiting import Failure, until

FAKE_READY_LIMIT = 60
LOAD_LIMIT = 120
# Written first, so a partial start can be removed, too.
SHAPE = "cluster.json"


@dataclass(frozen=True)
class Shape:
    """The number of nodes of a cluster, real or simulated, and their size."""

    nodes: int = 0
    fake_nodes: int = 0
    size: Size = Size()


class Cluster:
    """A running cluster."""

    def __init__(self, where: Place, shape: Shape, programs: Path) -> None:
        self.place = where
        self.shape = shape
        self.programs = programs
        self.daemons = Daemons(where.folder)
        self.kubeconfig = keys.kubeconfig(where)
        self.audit_log = control_plane.audit_log(where)
        self.kubectl = Kubectl(self.kubeconfig, programs / "kubectl")
        self.nodes = [
            Node(where, programs, self.daemons, index, shape.nodes, shape.size)
            for index in range(1, shape.nodes + 1)
        ]

    @classmethod
    def up(cls, name: str, shape: Shape) -> Cluster:
        """Starts a cluster; if that fails, removes everything."""
        programs = build.programs()
        if shape.nodes:
            # Rejects an impossible size before anything is started.
            shape.size.reserved()
        where = place.claim(name, has_bridge=shape.nodes > 0)
        cluster = cls(where, shape, programs)
        try:
            (where.folder / SHAPE).write_text(json.dumps(asdict(shape)))
            cluster._start()
        except BaseException:
            down(name)
            raise
        return cluster

    @classmethod
    def find(cls, name: str) -> Cluster:
        """A cluster that another process started."""
        number = place.number_of(name)
        try:
            shape = json.loads((place.folder_of(name) / SHAPE).read_text())
        except FileNotFoundError:
            number = None
        if number is None:
            raise Failure(f"cluster `{name}` is not running")
        shape = Shape(**{**shape, "size": Size(**shape["size"])})
        return cls(Place(name, number, shape.nodes > 0), shape, build.programs())

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes) or "none"
        raise Failure(
            f"cluster `{self.place.name}` has no real node `{name}`; its nodes are: {known}"
        )

    def load_image(self, tar: Path) -> None:
        """Loads the images in `tar` on every node."""
        with alone(self.place.folder / "images.lock", "loading an image", LOAD_LIMIT):
            self._on_all(lambda node: node.load(tar))

    def crash(self, name: str) -> None:
        self.node(name).crash()

    def reboot(self, name: str) -> None:
        self.node(name).reboot(self.api())

    def partition(self, name: str) -> None:
        network.partition(self.place, self.node(name).index)

    def heal(self, name: str) -> None:
        network.heal(self.place, self.node(name).index)

    def api(self) -> Api:
        return Api(self.place)

    def down(self) -> None:
        down(self.place.name)

    def _start(self) -> None:
        addresses = [(node.name, node.address) for node in self.nodes]
        keys.make(self.place, addresses)
        if not self.nodes:
            self._start_fake(control_plane.start(self.place, self.programs, self.daemons))
            return
        limits.lift()
        network.make_bridge(self.place)
        probe = self.place.folder / "probe.tar"
        write_probe_image(self.programs, probe)
        since = now()
        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(control_plane.start, self.place, self.programs, self.daemons)
            self._on_all(Node.boot)
            self.load_image(probe)
            api = started.result()
        control_plane.start_dns(self.place, self.programs, self.daemons)
        self._on_all(Node.join)
        self._on_all(lambda node: node.await_ready(api, since))

    def _start_fake(self, api: Api) -> None:
        names = [name(index) for index in range(1, self.shape.fake_nodes + 1)]
        fake_nodes.start(self.place, self.programs, self.daemons, names, self.shape.size)
        until(
            "the simulated nodes are ready",
            lambda: len(names) == api.n_ready(),
            FAKE_READY_LIMIT,
            lambda: self.daemons.log_tail("kwok"),
        )

    def _on_all(self, act) -> None:
        with ThreadPoolExecutor(max(1, len(self.nodes))) as pool:
            list(pool.map(act, self.nodes))


def down(name: str) -> None:
    """Stops a cluster, even a partly started one, and removes everything; can be run twice."""
    number = place.number_of(name)
    folder = place.folder_of(name)
    if number is None:
        # Its start was killed between the first two steps, or the cluster is already stopped.
        shutil.rmtree(folder, ignore_errors=True)
        return
    daemons = Daemons(folder)
    for record in daemons.names():
        # Killing the first process of a node ends the others; its parent must be able to reap it.
        if process := daemons.find(record):
            for child in process.children():
                child.kill()
    for record in daemons.names():
        daemons.stop(record)
    real = Place(name, number, has_bridge=True)
    network.remove_all(real)
    cgroup.remove(real.cgroup)
    if folder.exists():
        shutil.rmtree(folder)
    place.release(real)
