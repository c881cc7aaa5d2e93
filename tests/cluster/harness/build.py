# SPDX-License-Identifier: Apache-2.0
"""Builds the components of a cluster once, and stores them outside the clone.

The folder's name contains the hash of all sources, so it is never out of date.
The folder gets its name only when it is complete, and concurrent builds run once.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .lock import alone
from .waiting import Failure

SOURCES = Path(__file__).parents[1] / "components"
PROGRAMS = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
]
# External main packages, and the names of their programs here.
TOOLS = {"go.etcd.io/etcd/server/v3": "etcd", "sigs.k8s.io/kwok/cmd/kwok": "kwok"}
# A build on a busy machine with two cores takes half of this.
BUILD_LIMIT = 40 * 60
DISK_NEEDED = 5 << 30
# Memory that each of two compilers may use before it collects garbage.
COMPILER_MEMORY = "2GiB"


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "elasticdl"


def programs() -> Path:
    """The folder of the programs; builds them if necessary."""
    go = shutil.which("go")
    if go is None:
        raise Failure("no Go compiler to build the cluster's components")
    folder = cache() / f"cluster-{_key(go)}"
    if not folder.exists():
        with alone(folder.with_suffix(".lock"), "building the cluster's components", BUILD_LIMIT):
            if not folder.exists():
                _build(go, folder)
    # Folders that have not been used for a long time may be removed.
    os.utime(folder)
    return folder


def built() -> bool:
    """Whether the programs have been built."""
    go = shutil.which("go")
    return go is not None and (cache() / f"cluster-{_key(go)}").exists()


def _key(go: str) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([go, "version"], capture_output=True, check=True)
    digest.update(version.stdout)
    for part in sorted(SOURCES.rglob("*")):
        if part.is_file():
            digest.update(f"{part.name} {part.stat().st_size}\n".encode())
            digest.update(part.read_bytes())
    return digest.hexdigest()[:12]


def _build(go: str, folder: Path) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < DISK_NEEDED:
        raise Failure(f"building a cluster needs {DISK_NEEDED >> 30} GiB of temporary disk space")
    for abandoned in folder.parent.glob(f"{folder.name}.part-*"):
        shutil.rmtree(abandoned)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.part-") as work:
        whole = Path(work) / "programs"
        whole.mkdir()
        _compile(go, whole)
        for package, program in TOOLS.items():
            compiled = whole / _program_of(package)
            if compiled.name != program:
                compiled.rename(whole / program)
        for program in PROGRAMS:
            (whole / program).symlink_to("kubernetes")
        whole.rename(folder)


def _program_of(package: str) -> str:
    """The name that Go gives the program of a main package, without a suffix like `v3`."""
    return next(part for part in reversed(package.split("/")) if not part[1:].isdigit())


def _compile(go: str, into: Path) -> None:
    pinned = re.search(r"k8s.io/kubernetes (v\S+)", (SOURCES / "go.mod").read_text())
    assert pinned, "go.mod names the version of Kubernetes"
    version = " ".join(
        f"-X {package}.gitVersion={pinned[1]}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    )
    # Kept, so little is recompiled after a change; Go removes entries that were not used for days.
    compiler_cache = Path(os.environ.get("GOCACHE") or cache() / "cluster-compiler")
    compiler_cache.mkdir(parents=True, exist_ok=True)
    os.utime(compiler_cache)
    done = subprocess.run(
        [
            "nice",
            "-n",
            "10",
            go,
            "build",
            "-p",
            "2",
            "-trimpath",
            # No debug information, because the linker would discard it.
            "-gcflags=all=-dwarf=false",
            "-ldflags",
            f"-s -w {version}",
            "-o",
            f"{into}/",
            "./...",
            *TOOLS,
        ],
        cwd=SOURCES,
        env={
            **os.environ,
            "GOCACHE": str(compiler_cache),
            "CGO_ENABLED": "0",
            "GOFLAGS": "-buildvcs=false -mod=readonly",
            # The compiler finishes a package before garbage collection would pay off.
            "GOGC": "off",
            "GOMEMLIMIT": COMPILER_MEMORY,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_LIMIT,
        check=False,
    )
    if done.returncode != 0:
        raise Failure(f"the cluster's components cannot be built: {done.stdout.strip()[-2000:]}")
