# SPDX-License-Identifier: Apache-2.0
"""A real node: separate namespaces with containerd, a kubelet and kube-proxy.

The first process holds the namespaces open: when it dies, all processes of the node die with it, as
on a machine that loses power. The node's disk is its folder, which survives.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from . import cgroup, image, keys, network, node_config
from .api import Api
from .daemon import Daemons, Process
from .place import Place
from .size import GPU, Size
from .waiting import Failure

INIT = Path(__file__).with_name("node_init.sh")
PROBE_IMAGE = "elasticdl-probe:test"
BOOT_LIMIT = 30
READY_LIMIT = 120


@dataclass(frozen=True)
class Node:
    """Node `index` (from 1) of `count`."""

    place: Place
    programs: Path
    daemons: Daemons
    index: int
    count: int
    size: Size

    @property
    def name(self) -> str:
        return name(self.index)

    @property
    def address(self) -> str:
        return self.place.node_address(self.index)

    @property
    def folder(self) -> Path:
        return self.place.folder / self.name

    def boot(self) -> None:
        """Starts the node until images can be loaded."""
        cgroup.make(f"{self.place.cgroup}/{self.name}")
        self._write_settings()
        self.daemons.start(
            self.name,
            "unshare",
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--propagation",
            "private",
            INIT,
            self.name,
            self.folder,
            self.programs / "probe",
        )
        self.daemons.until(f"{self.name} boots", self.name, self._booted, BOOT_LIMIT)
        network.connect(self.place, self.index, self.count, self._init().pid)
        self._start("containerd", "containerd", "--config", self.folder / "containerd.toml")
        self.daemons.until(
            f"{self.name} runs containerd",
            self._daemon("containerd"),
            lambda: self._containerd("version").returncode == 0,
            BOOT_LIMIT,
        )

    def join(self) -> None:
        """Joins the cluster, whose API server must be running."""
        config = keys.kubeconfig(self.place, self.name)
        self._start(
            "kubelet",
            self.programs / "kubelet",
            f"--config={self.folder / 'kubelet.json'}",
            f"--kubeconfig={config}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
        )
        self._start(
            "kube-proxy", self.programs / "kube-proxy", f"--config={self.folder / 'proxy.json'}"
        )

    def await_ready(self, api: Api, since: datetime) -> None:
        """Waits until the node has reported after `since` that it is ready."""

        def ready() -> bool:
            condition = api.condition(self.name)
            return condition.get("status") == "True" and condition["lastHeartbeatTime"] > timestamp(
                since
            )

        self.daemons.until(f"{self.name} is ready", self._daemon("kubelet"), ready, READY_LIMIT)
        if self.size.gpus:
            self._advertise_gpus(api)

    def crash(self) -> None:
        """Kills every process of the node at once."""
        network.disconnect(self.place, self.index)
        if holder := self.daemons.find(self.name):
            # Its child is the first process of the node; the parent exits when the child does.
            for init in holder.children():
                init.kill()
            holder.kill()
        for program in ("containerd", "kubelet", "kube-proxy", "accelerator"):
            self.daemons.stop(self._daemon(program))
        self.daemons.stop(self.name)

    def reboot(self, api: Api) -> None:
        """Restarts it; a running node is crashed first."""
        self.crash()
        since = now()
        self.boot()
        self.join()
        self.await_ready(api, since)

    def load(self, tar: Path) -> None:
        """Loads the images in `tar` on the node."""
        with open(tar, "rb") as images:
            done = self._containerd("--namespace", "k8s.io", "images", "import", "-", stdin=images)
        if done.returncode != 0:
            raise Failure(f"`{tar}` cannot be loaded into {self.name}: {done.stderr.strip()}")

    def _advertise_gpus(self, api: Api) -> None:
        """Advertises GPUs. A kubelet forgets its plugins when it starts, so this comes later."""
        wanted = str(self.size.gpus)

        def advertised() -> bool:
            found = api.get(f"/api/v1/nodes/{self.name}") or {}
            return found.get("status", {}).get("allocatable", {}).get(GPU) == wanted

        plugins = "/var/lib/kubelet/device-plugins"
        self._start("accelerator", self.programs / "accelerator", plugins, GPU, wanted)
        self.daemons.until(
            f"{self.name} advertises its GPUs", self._daemon("accelerator"), advertised, BOOT_LIMIT
        )

    def _write_settings(self) -> None:
        (self.folder / "network").mkdir(parents=True, exist_ok=True)
        settings = {
            "kubelet.json": node_config.kubelet(
                self.place, self.name, self.address, self.folder, self.size
            ),
            "proxy.json": node_config.proxy(self.place, self.name, self.address),
            "network/pods.conflist": node_config.pod_network(self.place, self.index),
        }
        for file, content in settings.items():
            (self.folder / file).write_text(json.dumps(content))
        (self.folder / "resolv.conf").touch()
        sandbox = image.DEFAULT_PREFIX + PROBE_IMAGE
        toml = node_config.containerd(self.folder, sandbox)
        (self.folder / "containerd.toml").write_text(toml)

    def _booted(self) -> bool:
        holder = self.daemons.find(self.name)
        first = holder.children() if holder else []
        # The script has executed the probe, so all files of the node are in place.
        return any(each.program() == "probe" for each in first)

    def _init(self) -> Process:
        holder = self.daemons.find(self.name)
        first = holder.children() if holder else []
        if not first:
            raise Failure(f"{self.name} is not running")
        return first[0]

    def _inside(self) -> list[str]:
        return [
            "nsenter",
            "--target",
            str(self._init().pid),
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--",
        ]

    def _daemon(self, program: str) -> str:
        return f"{self.name}-{program}"

    def _start(self, program: str, *command: str | Path) -> None:
        self.daemons.start(self._daemon(program), *self._inside(), *command)

    def _containerd(self, *arguments: str, stdin=subprocess.DEVNULL):
        return subprocess.run(
            [*self._inside(), "ctr", *arguments],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=READY_LIMIT,
            check=False,
        )


def name(index: int) -> str:
    return f"node-{index}"


def now() -> datetime:
    return datetime.now(timezone.utc)


def timestamp(moment: datetime) -> str:
    """A time in the API server's format; these strings sort by time."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def write_probe_image(programs: Path, out: Path) -> None:
    """Writes the image of the probe, which also holds the namespaces of pods open."""
    files = [image.File("probe", source=programs / "probe")]
    image.write(out, PROBE_IMAGE, files, entrypoint=["/probe"], command=["hold"])
