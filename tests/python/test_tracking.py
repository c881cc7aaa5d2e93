# SPDX-License-Identifier: Apache-2.0
"""Metrics that are also sent to W&B or MLflow: what is sent, and whole jobs with both."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import elasticdl
from conftest import ROOT, Cluster
from elasticdl import ZooError, _tracking
from elasticdl._log import Logging
from read_protobuf import fields

REQUIREMENTS = Path(__file__).with_name("requirements-tracking.txt")
SCRIPT = Path(__file__).with_name("tracking_script.py")
N_STEPS = 8


class Service:
    """Stands in for a service."""

    def __init__(self) -> None:
        self.points: list[tuple[int, str, float]] = []
        self.opened: list[tuple[str | None, str, dict]] = []
        self.ended: list[str] = []
        self.n_failures = self.n_open_failures = 0
        self.run_id = "the run"
        self._given: tuple[str | None, str] = (None, "")

    def __call__(self, run_id: str | None, name: str, _folder: Path) -> Service:
        self._given = (run_id, name)
        return self

    def open(self, config: dict) -> None:
        if self.n_open_failures:
            self.n_open_failures -= 1
            raise OSError("no network")
        self.opened.append((*self._given, config))

    def send(self, lines: list[_tracking.Line]) -> None:
        if self.n_failures:
            self.n_failures -= 1
            raise OSError("no network")
        new = [(step, name, value) for step, _, metrics in lines for name, value in metrics.items()]
        self.points += new

    def end(self, state: str) -> None:
        self.ended.append(state)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Service:
    """A service, and a job that has ended."""
    found = Service()
    monkeypatch.setitem(_tracking._SERVICES, "wandb", found)
    (tmp_path / "logged").mkdir()
    (tmp_path / "job.json").write_text(json.dumps({"job_name": "x", "lanes": 2, "output": ""}))
    (tmp_path / "status.json").write_text('{"state": "succeeded"}')
    return found


def write(folder: Path, worker: int, *lines: tuple[int, dict[str, Any]]) -> None:
    with (folder / "logged" / f"worker-{worker}.jsonl").open("a") as file:
        for step, metrics in lines:
            print(json.dumps({"step": step, "at_secs": 1.0, "metrics": metrics}), file=file)


def written_lines(folder: Path) -> list[str]:
    text = (folder / "logged" / "worker-0.jsonl").read_text()
    return [line for line in text.splitlines() if line]


def fail(*_: object) -> None:
    raise OSError(errno.ENOLCK, "no locks")


class SimpleParam(tuple[str, str]):
    """Stands in for MLflow's."""

    def __new__(cls, key: str, value: str) -> SimpleParam:
        return super().__new__(cls, (key, value))

    @property
    def key(self) -> str:
        return self[0]


def test_a_metric_of_a_step_is_sent_once_whoever_has_logged_it(
    service: Service, tmp_path: Path
) -> None:
    write(tmp_path, 0, (1, {"a": 1.0}), (2, {"a": 2.0, "b": None}))
    write(tmp_path, 1, (2, {"a": 9.0}), (3, {"a": 3.0}))
    _tracking.main("wandb", tmp_path)
    first = service.points[:]
    assert [(step, name) for step, name, _ in first] == [(1, "a"), (2, "a"), (2, "b"), (3, "a")]
    assert first[1][2] == 2.0 and math.isnan(first[2][2])
    # Another process continues, for example because the job was resumed.
    write(tmp_path, 2, (3, {"a": 9.0}), (4, {"a": 4.0}))
    with (tmp_path / "logged" / "worker-0.jsonl").open("a") as file:
        file.write('{"step": 5, "at_')  # Its writer was killed.
    _tracking.main("wandb", tmp_path)
    assert service.points[len(first) :] == [(4, "a", 4.0)]
    config = {"job/job_name": "x", "job/lanes": 2}
    assert service.opened == [(None, "x", config), ("the run", "x", config)]
    assert service.ended == ["FINISHED"] * 2


def test_what_could_not_be_sent_is_sent_again(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tracking, "_POLL_SECS", 0.0)
    service.n_failures = 3
    write(tmp_path, 0, (1, {"a": 1.0}))
    _tracking.main("wandb", tmp_path)
    assert service.points == [(1, "a", 1.0)]
    # What was never sent is left to the next process.
    monkeypatch.setattr(_tracking, "_RETRY_SECS", 0.0)
    write(tmp_path, 0, (2, {"a": 2.0}))
    service.n_failures = 9
    _tracking.main("wandb", tmp_path)
    service.n_failures = 0
    _tracking.main("wandb", tmp_path)
    assert service.points == [(1, "a", 1.0), (2, "a", 2.0)]


def test_a_service_that_cannot_be_reached_at_the_start_gets_everything_later(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tracking, "_POLL_SECS", 0.0)
    service.n_open_failures = 2
    write(tmp_path, 0, (1, {"a": 1.0}))
    _tracking.main("wandb", tmp_path)
    assert service.points == [(1, "a", 1.0)] and len(service.opened) == 1
    assert service.ended == ["FINISHED"]
    assert not (tmp_path / "logged" / "failing").exists()
    # A run that was never opened is not ended, and its metrics are left to the next process.
    monkeypatch.setattr(_tracking, "_RETRY_SECS", 0.0)
    write(tmp_path, 0, (2, {"a": 2.0}))
    service.n_open_failures = 99
    _tracking.main("wandb", tmp_path)
    assert service.ended == ["FINISHED"] and (tmp_path / "logged" / "failing").exists()
    service.n_open_failures = 0
    _tracking.main("wandb", tmp_path)
    assert service.points == [(1, "a", 1.0), (2, "a", 2.0)]


def test_what_has_failed_for_long_is_repeated_after_the_end_of_the_job(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tracking, "_POLL_SECS", 0.0)
    monkeypatch.setattr(_tracking, "_RETRY_SECS", 10.0)
    clock = iter(range(0, 10_000, 6))
    time_of_test = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    monkeypatch.setattr(_tracking, "time", time_of_test)
    # A worker is there for a while, and is then gone.
    has_none = iter([False] * 20)
    monkeypatch.setattr(_tracking, "_has_no_workers", lambda _: next(has_none, True))
    service.n_open_failures = 21
    write(tmp_path, 0, (1, {"a": 1.0}))
    _tracking.main("wandb", tmp_path)
    assert service.points == [(1, "a", 1.0)]


def test_only_harmless_options_of_a_job_are_sent(service: Service, tmp_path: Path) -> None:
    harmless = {"job_name": "x", "seed": 3, "lanes": 2, "optimizer": "sgd", "num_epochs": 1}
    secrets = [
        *("job_command", "training_data", "validation_data", "prediction_data", "model_params"),
        *("data_reader_params", "output", "checkpoint_dir", "checkpoint_dir_for_init", "envs"),
        *("image_pull_secrets", "otlp_endpoint", "image_name", "volume", "cluster_spec_json"),
        *("populate_env_names", "http_hosts", "model_zoo", "of_a_later_version"),
    ]
    spec = {**harmless, **dict.fromkeys(secrets, "https://user:password@host/x")}
    (tmp_path / "job.json").write_text(json.dumps(spec))
    _tracking.main("wandb", tmp_path)
    [(_, _, config)] = service.opened
    assert config == {f"job/{name}": value for name, value in harmless.items()}


def test_the_options_that_are_sent_are_options_of_a_job() -> None:
    text = (ROOT / "docs" / "reference" / "job.md").read_text()
    assert [name for name in _tracking._OPTIONS if f"| `{name}` |" not in text] == []


def test_mlflow_gets_one_run_and_short_parameters_although_its_server_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    params: list[tuple[str, str]] = []
    created, n_failures = [], [1]

    class Client:
        def get_experiment_by_name(self, _name: str) -> SimpleNamespace:
            return SimpleNamespace(experiment_id="1")

        def create_run(self, _experiment: str, run_name: str) -> SimpleNamespace:
            created.append(run_name)
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def update_run(self, _run: str, _state: str) -> None:
            if n_failures[0]:
                n_failures[0] -= 1
                raise OSError("no network")

        def get_run(self, _run: str) -> SimpleNamespace:
            return SimpleNamespace(data=SimpleNamespace(params={}))

        def log_batch(self, _run: str, params: list[tuple[str, str]], sent: list = params) -> None:
            sent += params

    entities = SimpleNamespace(Metric=None, Param=SimpleParam)
    module = SimpleNamespace(MlflowClient=Client, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    run = _tracking.Mlflow(None, "x", tmp_path)
    with pytest.raises(OSError, match="no network"):
        run.open({})
    run.open({"text": "x" * 9999, "lr": 0.1})
    assert params == [("text", "x" * 500), ("lr", "0.1")] and created == ["x"]


def test_only_one_process_sends(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tracking, "_LOCK_SECS", 0.0)
    with (tmp_path / "logged" / _tracking._TRACKER_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _tracking.main("wandb", tmp_path)
    assert not service.opened


@pytest.mark.parametrize(("state", "waits"), [("running", False), ("succeeded", True)])
def test_a_worker_waits_for_what_is_sent_only_if_the_job_has_ended(
    state: str, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tracking, "_STATE_SECS", 0.1)
    monkeypatch.setattr(_tracking, "_LAST_SECS", 1.0)
    (tmp_path / "status.json").write_text(json.dumps({"state": state}))
    tracker = _tracking.Tracker(tmp_path / "logged", lambda: True)
    with (tmp_path / "logged" / _tracking._TRACKER_LOCK).open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first = time.monotonic()
        tracker._close()
        assert (time.monotonic() - first >= 1.0) == waits


def test_a_worker_waits_for_a_process_that_it_has_just_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status.json").write_text('{"state": "succeeded"}')
    tracker = _tracking.Tracker(tmp_path / "logged", lambda: True)
    ends = iter([None, None, 0])
    monkeypatch.setattr(tracker, "_process", SimpleNamespace(poll=lambda: next(ends)))
    tracker._close()
    assert next(ends, "no more") == "no more"


def test_a_folder_without_locks_only_costs_the_tracking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICDL_TRACK", "wandb")
    script = Logging()
    script.worker_id, script._is_over, script._optimizer = 0, False, None
    with monkeypatch.context() as patch:
        patch.setattr(_tracking.fcntl, "flock", fail)
        with pytest.warns(RuntimeWarning, match="not sent to wandb: .*no locks"):
            log = script._open_log(tmp_path / "logged")
        log.add(1, {"a": 1.0}, True, True)
    # Locks can also fail later.
    tracker = _tracking.Tracker(tmp_path / "logged", lambda: True)
    monkeypatch.setattr(_tracking.fcntl, "flock", fail)
    with pytest.warns(RuntimeWarning, match="not sent to wandb: .*no locks"):
        tracker.start({})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.start({})
    tracker._close()
    log.add(2, {"a": 2.0}, True, True)
    assert [json.loads(line)["step"] for line in written_lines(tmp_path)] == [1, 2]


def test_a_lock_file_can_be_read_and_written(tmp_path: Path) -> None:
    # NFS refuses a shared lock without the one, and an exclusive one without the other.
    with _tracking._open_lock(tmp_path / "lock") as lock:
        assert lock.readable() and lock.writable()


def test_a_worker_tells_once_that_a_service_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICDL_TRACK", "wandb")
    monkeypatch.setattr(_tracking, "_LOOK_SECS", 0.0)
    tracker = _tracking.Tracker(tmp_path / "logged", lambda: False)
    with (tmp_path / "logged" / _tracking._TRACKER_LOCK).open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (tmp_path / "logged" / "failing").touch()
        with pytest.warns(RuntimeWarning, match="cannot be sent to wandb at the moment") as seen:
            tracker.start({})
            tracker.start({})
        assert len(seen) == 1
    tracker._close()


def test_hyper_parameters_are_plain_values() -> None:
    values = {"lr": 0.1, "betas": (0.9, 0.99), "model": object(), "foreach": None, 3: "x"}
    assert _tracking.plain(values) == {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "3": "x"}


@pytest.mark.parametrize("spec", [None, ModuleSpec("mlflow", None)])
def test_a_job_is_refused_before_it_starts_if_the_package_is_missing(
    spec: ModuleSpec | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("ELASTICDL_TRACK", "mlflow")
    elasticdl.init()  # Without a job, nothing is sent.
    monkeypatch.setenv("ELASTICDL_DESCRIBE", str(tmp_path))
    with pytest.raises(ZooError, match="not installed; install it with `pip install mlflow`"):
        elasticdl.init()


# ---- Whole jobs ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def packages() -> str:
    """The folder of W&B and MLflow, which are installed when they are needed first."""
    pytest.importorskip("torch")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "elasticdl"
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = cache / f"tracking-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes"]
            # The file has all of them.
            target = ["--no-deps", "--target", str(folder / "packages"), "-r", str(REQUIREMENTS)]
            subprocess.run([*pip, *target], check=True)
            (folder / "ready").touch()
    return str(folder / "packages")


def records(path: Path) -> Iterator[bytes]:
    """The records of a file of W&B: 7 bytes, then the log format of LevelDB."""
    data, at, partial = path.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        partial += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield partial
            partial = b""


def wandb_rows(job: Path) -> list[dict[str, Any]]:
    """What was logged, in the files that W&B keeps."""
    rows = []
    for path in sorted(job.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            for number, content in fields(record):
                if number == 2:  # History.
                    items = [dict(fields(item)) for key, item in fields(content) if key == 1]
                    names = [item.get(1) or item[2] for item in items]
                    values = [json.loads(item[16]) for item in items]
                    rows.append(dict(zip((name.decode() for name in names), values)))
    return rows


OPEN_TWICE = """
import os, sys
from pathlib import Path
from elasticdl import _tracking

run = _tracking.Wandb(None, "x", Path(sys.argv[1]))
try:
    run.open({})
except Exception as error:
    print("failed:", type(error).__name__)
os.environ["WANDB_MODE"] = "offline"
run.open({})
run.send([(1, 0.0, {"loss": 2.0})])
run.end("FINISHED")
"""


def test_a_run_of_w_and_b_is_opened_after_it_could_not_be(tmp_path: Path, packages: str) -> None:
    env = {**os.environ, "PYTHONPATH": packages, "WANDB_INIT_TIMEOUT": "1", "WANDB_MODE": "online"}
    # Nothing listens there.
    env |= {"WANDB_BASE_URL": "http://127.0.0.1:1", "WANDB_API_KEY": "a" * 40}
    words = [sys.executable, "-c", OPEN_TWICE, str(tmp_path)]
    done = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
    assert "failed: CommError" in done.stdout, done.stderr
    assert [row["loss"] for row in wandb_rows(tmp_path)] == [2.0]


def test_w_and_b_gets_every_step_once_although_the_leader_is_killed(
    cluster: Cluster, tmp_path: Path, packages: str
) -> None:
    folder = tmp_path / "tracked"
    flags = ["--workers=2:2", "--lanes=2", "--job_name=tracked", "--track=wandb"]
    folder.mkdir()
    words = [*flags, str(SCRIPT), str(folder), "2", "4"]
    cluster.run("run", *words, PYTHONPATH=packages, WANDB_MODE="offline")
    assert (folder / "killed-4").exists()
    job = cluster.job("tracked")
    rows = wandb_rows(job)
    steps = [row["step"] for row in rows if "loss" in row]
    assert sorted(steps) == [*range(N_STEPS)], (job / "logs" / "tracking.log").read_text()
    assert all(row["loss"] == row["step"] * 0.5 for row in rows if "loss" in row)
    assert [row["step"] for row in rows if "at the end" in row] == [N_STEPS]
    [run_folder] = job.glob("wandb/offline-run-*")
    assert json.loads((job / "logged" / "sent.json").read_text())["run"] in run_folder.name
    text = next(run_folder.glob("*.wandb")).read_bytes()
    assert b"momentum_of_the_day" in text and b"tracked" in text and b'"SGD"' in text


def test_mlflow_gets_the_steps_of_a_resumed_job_in_the_same_run(
    cluster: Cluster, tmp_path: Path, packages: str
) -> None:
    folder, store = tmp_path / "resumed", tmp_path / "store"
    env = {"MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    env["PYTHONPATH"] = packages
    flags = ["--workers=1", "--lanes=2", "--job_name=resumed", "--track=mlflow", "--max_step=3"]
    folder.mkdir()
    cluster.run("run", *flags, str(SCRIPT), str(folder), "1", **env)
    cluster.run("run", "--resume=resumed", "--max_step=0", **env)
    [metrics] = store.glob("*/*/metrics")
    points = [line.split() for line in (metrics / "loss").read_text().splitlines()]
    log = (cluster.job("resumed") / "logs" / "tracking.log").read_text()
    assert [int(step) for _, _, step in points] == [*range(N_STEPS)], log
    assert [float(value) for _, value, _ in points] == [step * 0.5 for step in range(N_STEPS)]
    assert (metrics / "test" / "a b").exists()
    params = metrics.parent / "params"
    assert (params / "lr").read_text() == "0.1"
    assert (params / "job" / "job_name").read_text() == "resumed"
