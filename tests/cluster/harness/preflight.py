# SPDX-License-Identifier: Apache-2.0
"""Checks whether a machine can run a cluster; returns the reason if not."""

from __future__ import annotations

import os
import shutil
import subprocess

from . import build, cgroup, node_config

NODE_PROGRAMS = ["containerd", "ctr", "runc", "ip", "iptables", "conntrack", "nsenter", "unshare"]


def why_not(nodes: int) -> str | None:
    """None if a cluster with this many real nodes can run."""
    return why_no_nodes() if nodes else why_no_control_plane()


def why_no_control_plane() -> str | None:
    """None if a control plane with simulated nodes can run."""
    if shutil.which("openssl") is None:
        return "openssl is not installed"
    if shutil.which("go") is None:
        return "no Go compiler to build the cluster's components"
    if not build.built():
        build.cache().mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(build.cache()).free < build.DISK_NEEDED:
            return f"building a cluster needs {build.DISK_NEEDED >> 30} GiB of free disk"
    return None


def why_no_nodes() -> str | None:
    """None if real nodes can run, too."""
    if reason := why_no_control_plane():
        return reason
    if os.getuid() != 0:
        return "real nodes need root"
    missing = [program for program in NODE_PROGRAMS if shutil.which(program) is None]
    if not (node_config.CNI_PROGRAMS / "bridge").exists():
        missing.append("containernetworking-plugins")
    if missing:
        return f"real nodes need {', '.join(missing)}; `make setup` installs them on Debian"
    if not any((each / "memory.limit_in_bytes").exists() for each in cgroup.hierarchies()):
        return "real nodes need cgroups v1; v2 is untested"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "ip", "link", "add", "try", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        return f"this machine does not allow namespaces or bridges: {tried.stderr.strip()}"
    return None
