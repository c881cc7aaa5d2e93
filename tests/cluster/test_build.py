# SPDX-License-Identifier: Apache-2.0
"""Components are built once, even by concurrent callers. A fake replaces the compiler."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import wanted
from harness import build, preflight
from harness.waiting import Failure

BUILDERS = 3
# The output of the compiler.
COMPILED = ["kubernetes", "server", "kwok", "dns", "probe", "accelerator"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wanted.require(preflight.why_no_control_plane())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "elasticdl"


def test_concurrent_builds_run_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    all_asked = threading.Barrier(BUILDERS)

    def compile_once(go: str, into: Path) -> None:
        compiled.append(into)
        for program in COMPILED:
            (into / program).touch()

    def ask(_: int) -> Path:
        all_asked.wait()
        return build.programs()

    monkeypatch.setattr(build, "_compile", compile_once)
    with ThreadPoolExecutor(BUILDERS) as pool:
        folders = set(pool.map(ask, range(BUILDERS)))
    assert len(compiled) == 1
    assert len(folders) == 1
    kept = {each.name for each in folders.pop().iterdir()}
    assert {"etcd", "kwok", "kubelet", "kubectl"} <= kept
    assert len([each for each in cache.iterdir() if each.is_dir()]) == 1


def test_a_failed_build_leaves_nothing_and_can_be_retried(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Failure("no such package")

    monkeypatch.setattr(build, "_compile", fail)
    for _ in range(2):
        with pytest.raises(Failure, match="no such package"):
            build.programs()
    assert [each for each in cache.iterdir() if each.is_dir()] == []
    assert not build.built()
