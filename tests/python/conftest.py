# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the package: jobs with real processes, in a separate home folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ZOO = ROOT / "model_zoo"
DATA = ROOT / "data" / "fashion_mnist"
# Far longer than any job takes; a test that reaches this limit hangs.
LIMIT = 240
# A line of scripts: the first optimizer would import the compiler of PyTorch, which takes 1.2 s of
# CPU time, only to exclude a method from being compiled.
NO_COMPILER = (
    "torch.optim.Optimizer.add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__"
)


class Cluster:
    """Runs `python -m elasticdl …` as a user would."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {
            **os.environ,
            "ELASTICDL_HOME": str(home),
            "PYTHONPATH": "",
            "KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "tensorflow"),
        }
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *args: str, **env: str) -> subprocess.Popen[str]:
        """Starts a command; its output is captured."""
        process = subprocess.Popen(
            [sys.executable, "-m", "elasticdl", *args],
            env={**self.env, **env},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, *args: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs a command until it exits; the exit code must be `code`."""
        process = self.start(*args, **env)
        out, err = process.communicate(timeout=LIMIT)
        assert process.returncode == code, (
            f"{args} exited with code {process.returncode}:\n{out}\n{err}"
        )
        return subprocess.CompletedProcess(args, code, out, err)

    def job(self, name: str) -> Path:
        return self.home / "jobs" / name

    def log(self, name: str, instance: str) -> str:
        return (self.job(name) / "logs" / f"{instance}.log").read_text()

    def status(self, name: str) -> dict:
        done = self.run("status", name, "--json")
        return json.loads(done.stdout)

    def written_status(self, name: str) -> dict | None:
        """Returns the last status file of the master, which is cheaper to poll than the command."""
        path = self.job(name) / "status.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def logged(self, name: str) -> dict[str, list[int]]:
        """The steps of each metric that was logged; none has two values at a step."""
        lines = map(json.loads, (self.job(name) / "metrics.jsonl").read_text().splitlines())
        steps: dict[str, list[int]] = {}
        for line in lines:
            for metric in line["metrics"] if line["kind"] == "logged" else ():
                steps.setdefault(metric, []).append(line["version"])
        assert all(len(set(found)) == len(found) for found in steps.values()), steps
        shown = {metric["name"]: metric["step"] for metric in self.status(name)["logged"]}
        assert shown == {metric: found[-1] for metric, found in steps.items()}
        return {metric: sorted(found) for metric, found in steps.items()}

    def train(
        self,
        folder: Path,
        words: list[str],
        n_workers: int,
        kills: tuple[int, ...],
        n_lanes: int,
        **env: str,
    ) -> tuple[subprocess.CompletedProcess[str], bytes]:
        """Runs a job named like `folder`, whose script (`words`) notes there which workers were
        killed, joined and ended (see `faults.Faults`). Returns what the command printed,
        and what all workers have at the end.
        """
        # The others wait for those that replace killed ones.
        workers = f"--workers={n_workers}:{n_workers}"
        flags = [workers, f"--lanes={n_lanes}", f"--job_name={folder.name}"]
        done = self.run("run", *flags, *words, **env)
        self.run("audit", folder.name)
        noted = {path.name for path in folder.glob("killed-*")}
        assert noted == {f"killed-{kill}" for kill in kills}
        joined = [int(path.name.split("-")[1]) for path in folder.glob("joined-*")]
        assert not kills or max(joined) > min(kills), "a worker got the state from another one"
        ends = {path.read_bytes() for path in folder.glob("end-*")}
        assert len(ends) == 1, "all workers have the same bits, callbacks, counters and logs"
        return done, ends.pop()

    def wait(self, what: str, look: Callable[[], object]) -> object:
        """Waits until `look` returns something."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            found = look()
            if found:
                return found
            time.sleep(0.05)
        raise AssertionError(f"timed out waiting for: {what}")

    def stop(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def pytest_configure(config: pytest.Config) -> None:
    line = "backends(*names): the Keras backends that the test is for; it does not run on others"
    config.addinivalue_line("markers", line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    others = [
        item for item in items for mark in item.iter_markers("backends") if backend not in mark.args
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "home")
    yield cluster
    cluster.stop()


@pytest.fixture
def become_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[type], None]:
    """Makes this process a worker of a job, with a stand-in for the job's loop."""
    import elasticdl

    def become(loop: type) -> None:
        fake = types.ModuleType("elasticdl._elasticdl")
        fake.Loop = loop
        monkeypatch.setitem(sys.modules, "elasticdl._elasticdl", fake)
        monkeypatch.setattr(elasticdl, "_elasticdl", fake, raising=False)
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        monkeypatch.setattr("atexit.register", lambda *_: None)
        monkeypatch.delenv("ELASTICDL_DESCRIBE", raising=False)
        monkeypatch.setenv("ELASTICDL_MASTER_ADDR", "127.0.0.1:1")
        monkeypatch.setenv("ELASTICDL_JOB_KEY_FILE", str(tmp_path / "key"))
        (tmp_path / "status.json").write_text('{"state": "succeeded"}')

    return become
