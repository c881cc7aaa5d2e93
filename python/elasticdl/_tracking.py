# SPDX-License-Identifier: Apache-2.0
"""Sends what a script logs to W&B or MLflow (`--track`).

The workers of a job write metrics to files in the folder of the job (`_log.py`). A separate process
reads these files and sends each metric of a step once. It is started by the worker that leads, but
does not end with it: if the leader is killed, nothing is lost, and nothing is sent twice. If this
process is lost, too, the next one continues where it was.

    python -m elasticdl._tracking wandb /folder/of/the/job
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from elasticdl._zoo import ZooError

_TRACK = "ELASTICDL_TRACK"
# Module and package of each service.
_PACKAGES = {"wandb": ("wandb", "wandb"), "mlflow": ("mlflow", "mlflow")}
# The project of W&B or the experiment of MLflow, unless the user's environment names one.
_PROJECT = "elasticdl"

# In the folder of what is logged. Each worker holds the first one; the process that sends, the
# second.
_WORKERS_LOCK = "workers.lock"
_TRACKER_LOCK = "tracker.lock"
# What was sent, and to which run.
_SENT = "sent.json"
_CONFIG = "config.json"
# Exists while nothing can be sent.
_FAILING = "failing"

_POLL_SECS = 0.5
# How often sending is repeated at least, if it keeps failing.
_MAX_POLL_SECS = 5.0
# How long a job may have no workers, for example while its last one is replaced.
_GAP_SECS = 30.0
# How long a worker waits at its end until everything is sent.
_LAST_SECS = 60.0
# How long it waits for the end of the job. The master writes its status about every second.
_STATE_SECS = 2.0
# How long sending is repeated after the end of the job.
_RETRY_SECS = 30.0
# How long W&B uploads what it was sent; without a limit, it never gives up.
_UPLOAD_SECS = 600.0
# How often a worker starts this process, in case it fails, and looks whether it runs.
_MAX_STARTS = 3
_LOOK_SECS = 5.0
# How long this process waits for others that only look.
_LOCK_SECS = 5.0
_ENDS = {"succeeded": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
# The options of a job that are sent. All others stay here, because a text that the user chooses,
# such as a command, a URL or a parameter of a model, can contain a password.
_OPTION_NAMES = """
job_name job_type seed model_def
optimizer learning_rate learning_rate_schedule weight_decay clip_norm
codec_type minibatch_size num_minibatches_per_task num_epochs shuffle batch_plan
distribution_strategy num_workers min_workers max_workers spares num_ps_pods partitions
lanes lane_balance threads_per_worker same_bits allreduce_dtype encrypt_data
use_async grads_to_wait sync_version_tolerance lr_staleness_modulation get_model_steps
evaluation_steps evaluation_secs evaluation_epochs early_stop_patience
checkpoint_steps checkpoint_secs keep_checkpoint_max
max_step max_time task_timeout_secs heartbeat_timeout_secs relaunch_on_worker_failure
fork_workers max_batch_failures on_nonfinite log_loss_steps
"""
_OPTIONS = frozenset(_OPTION_NAMES.split())
# What MLflow takes at a time, and the length of a value that all of its servers take.
_MAX_BATCH = 1000
_MAX_PARAM = 500

# Steps and the metrics of each, with the time when they were logged.
Line = tuple[int, float, dict[str, float]]


def service() -> str | None:
    """The service that the job sends metrics to, by the name of its flag."""
    return os.environ.get(_TRACK) or None


def check() -> None:
    """Refuses a service whose package is not installed."""
    chosen = service()
    if chosen is None:
        return
    if chosen not in _PACKAGES:
        raise ZooError(f"{_TRACK}={chosen} is unknown; use {' or '.join(_PACKAGES)}")
    module, package = _PACKAGES[chosen]
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:  # A folder of this name is no package.
        raise ZooError(
            f"--track={chosen} needs the package `{package}`, which is not installed; install it "
            f"with `pip install {package}`"
        )


class Tracker:
    """The process that sends, as workers see it."""

    def __init__(self, folder: Path, is_over: Callable[[], bool]) -> None:
        self._folder, self._is_over = folder, is_over
        self._n_starts = 0
        self._next_look = 0.0
        self._has_told = False
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _open_lock(folder / _WORKERS_LOCK)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        except OSError:
            self._lock.close()
            raise
        self._owner = os.getpid()
        atexit.register(self._close)

    def start(self, config: dict[str, Any]) -> None:
        """Starts the process unless it runs; `config` are the hyper-parameters."""
        now = time.monotonic()
        if self._n_starts == _MAX_STARTS or now < self._next_look:
            return
        self._next_look = now + _LOOK_SECS
        try:
            self._look(config)
        except OSError as error:  # Training does not depend on it.
            self._n_starts = _MAX_STARTS
            warn_of(error)

    def _look(self, config: dict[str, Any]) -> None:
        if self._runs():
            if not self._has_told and (self._folder / _FAILING).exists():
                self._has_told = True
                warnings.warn(
                    f"metrics cannot be sent to {service()} at the moment; this is repeated, see "
                    "`logs/tracking.log` in the job folder",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        self._n_starts += 1
        write_json(self._folder / _CONFIG, config)
        job = self._folder.parent
        with (job / "logs" / "tracking.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "elasticdl._tracking", str(service()), str(job)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # It ends by itself, after it has sent everything.
                start_new_session=True,
            )
        if self._n_starts == _MAX_STARTS:
            warnings.warn(
                f"metrics are not sent to {service()}; see `logs/tracking.log` in the job folder",
                RuntimeWarning,
                stacklevel=2,
            )

    def _runs(self) -> bool:
        with _open_lock(self._folder / _TRACKER_LOCK) as lock:
            return not _try_lock(lock, fcntl.LOCK_SH)

    def _is_sending(self) -> bool:
        # What this worker has just started has no lock yet.
        is_there = self._process is not None and self._process.poll() is None
        return is_there or self._runs()

    def _close(self) -> None:
        """Waits until everything is sent, at the end of the job."""
        if os.getpid() != self._owner:
            return
        self._lock.close()
        now = time.monotonic()
        state_end, end = now + _STATE_SECS, now + _LAST_SECS
        has_ended = False
        with contextlib.suppress(OSError):
            while self._is_over() and time.monotonic() < end and self._is_sending():
                # The job can continue without this worker, and so can the process that sends.
                has_ended = has_ended or state_of(self._folder.parent) in _ENDS
                if not has_ended and time.monotonic() >= state_end:
                    return
                time.sleep(0.05)


def warn_of(error: OSError) -> None:
    """Tells that metrics are only in the job's folder, for example because it has no locks."""
    warnings.warn(f"metrics are not sent to {service()}: {error}", RuntimeWarning, stacklevel=2)


def write_json(path: Path, value: Any) -> None:
    """Replaces a file."""
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(value))
    partial.replace(path)


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the hyper-parameters that are numbers, texts, or small collections of them."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return len(value) <= 100 and all(map(is_plain, value))
        return value is None or isinstance(value, (bool, int, float, str))

    return {str(name): value for name, value in values.items() if is_plain(value)}


class Lines:
    """Reads what workers log, each metric of a step once."""

    def __init__(self, folder: Path, ends: dict[str, int]) -> None:
        self._folder = folder
        # The bytes that were read of each file.
        self.ends: dict[str, int] = {}
        # The steps and names in the files, as far as they were read.
        self.known: set[tuple[int, str]] = set()
        for name, end in ends.items():
            self._read(folder / name, end)

    def read(self) -> list[Line]:
        """Returns what is new, in the order of its steps."""
        found: dict[int, Line] = {}
        for path in sorted(self._folder.glob("worker-*.jsonl")):
            for step, at_secs, metrics in self._read(path):
                found.setdefault(step, (step, at_secs, {}))[2].update(metrics)
        return [found[step] for step in sorted(found)]

    def _read(self, path: Path, end: int | None = None) -> Iterator[Line]:
        first = self.ends.get(path.name, 0)
        with path.open("rb") as file:
            file.seek(first)
            data = file.read(-1 if end is None else end - first)
        data = data[: data.rfind(b"\n") + 1]
        self.ends[path.name] = first + len(data)
        return iter([line for text in data.split(b"\n") if (line := self._line(text))])

    def _line(self, text: bytes) -> Line | None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            step, metrics = line["step"], line["metrics"]
            new = {
                name: math.nan if value is None else value
                for name, value in metrics.items()
                if (step, name) not in self.known
            }
            self.known.update((step, name) for name in new)
            return (step, line["at_secs"], new) if new else None
        return None


# ---- The process itself --------------------------------------------------------------------------


class Wandb:
    """A run of W&B. Steps are a metric, because they may come out of order."""

    def __init__(self, run_id: str | None, name: str, folder: Path) -> None:
        self.run_id = run_id or uuid.uuid4().hex
        self._name, self._folder = name, folder

    def open(self, config: dict[str, Any]) -> None:
        import wandb

        settings: dict[str, Any] = {"console": "off"}
        # Earlier versions have no limit.
        is_known = "finish_timeout" in getattr(wandb.Settings, "model_fields", ())
        if is_known and "WANDB_FINISH_TIMEOUT" not in os.environ:
            settings["finish_timeout"] = _UPLOAD_SECS
        try:
            self._run = wandb.init(
                id=self.run_id,
                resume="allow",
                name=self._name,
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                dir=os.environ.get("WANDB_DIR", str(self._folder)),
                config=config,
                settings=wandb.Settings(**settings),
            )
        except Exception:
            # Its service would keep the run, and refuse it the next time.
            wandb.teardown()
            raise
        self._run.config.update(config, allow_val_change=True)
        self._run.define_metric("*", step_metric="step")

    def send(self, lines: list[Line]) -> None:
        for step, _, metrics in lines:
            self._run.log({**metrics, "step": step})

    def end(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "FINISHED" else 1)


class Mlflow:
    """A run of MLflow."""

    def __init__(self, run_id: str | None, name: str, _folder: Path) -> None:
        self.run_id = run_id
        self._name = name

    def open(self, config: dict[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = mlflow.MlflowClient()
        # Kept if what follows fails, so that there is only one run.
        self.run_id = self.run_id or self._create(self._name)
        self._client.update_run(self.run_id, "RUNNING")
        # Parameters cannot be changed, for example when a job is resumed.
        known = self._client.get_run(self.run_id).data.params
        new = [Param(_name(key), str(value)[:_MAX_PARAM]) for key, value in config.items()]
        new = [one for one in new if one.key not in known]
        for first in range(0, len(new), 100):
            self._client.log_batch(self.run_id, params=new[first : first + 100])

    def _create(self, name: str) -> str:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if experiment is None:
            wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
            found = self._client.get_experiment_by_name(wanted)
            experiment = found.experiment_id if found else self._client.create_experiment(wanted)
        return self._client.create_run(experiment, run_name=name).info.run_id

    def send(self, lines: list[Line]) -> None:
        points = [
            self._metric(_name(name), value, int(at_secs * 1000), step)
            for step, at_secs, metrics in lines
            for name, value in metrics.items()
        ]
        for first in range(0, len(points), _MAX_BATCH):
            self._client.log_batch(self.run_id, points[first : first + _MAX_BATCH])

    def end(self, state: str) -> None:
        self._client.set_terminated(self.run_id, state)


def _name(text: str) -> str:
    """Returns a name with the characters that MLflow accepts."""
    return "".join(one if one.isalnum() or one in "_-. /" else "_" for one in text)


_SERVICES: dict[str, Any] = {"wandb": Wandb, "mlflow": Mlflow}


def main(chosen: str, job: Path) -> None:
    folder = job / "logged"
    with _open_lock(folder / _TRACKER_LOCK) as lock:
        end = time.monotonic() + _LOCK_SECS
        while not _try_lock(lock):
            if time.monotonic() > end:
                return  # Another one runs.
            time.sleep(0.01)
        sent = _read_json(folder / _SENT)
        spec = _read_json(job / "job.json")
        options = {name: value for name, value in spec.items() if value not in ("", {}, None)}
        config = {f"job/{name}": options[name] for name in options if name in _OPTIONS}
        config = plain(config | _read_json(folder / _CONFIG))
        # The service can have been changed when the job was resumed.
        before = sent if sent.get("service") == chosen else {}
        lines = Lines(folder, before.get("ends", {}))
        run = _SERVICES[chosen](before.get("run"), spec.get("job_name", job.name), job)

        def note(ends: dict[str, int]) -> None:
            write_json(folder / _SENT, {"service": chosen, "run": run.run_id, "ends": ends})

        if _send_all(run, config, lines, note, folder):
            run.end(_ENDS.get(state_of(job), "FAILED"))


def _send_all(
    run: Any,
    config: dict[str, Any],
    lines: Lines,
    note: Callable[[dict[str, int]], None],
    folder: Path,
) -> bool:
    """Opens the run and sends what workers log until there are none; returns whether it is open."""
    left: list[Line] = []
    is_open = False
    alone_since = failing_since = None
    told, pause = "", _POLL_SECS
    (folder / _FAILING).unlink(missing_ok=True)
    while True:
        # Before the last lines are read.
        is_alone = _has_no_workers(folder)
        alone_since = (alone_since or time.monotonic()) if is_alone else None
        if is_open:
            left += lines.read()
        try:
            if not is_open:
                run.open(config)
                note(lines.ends)
                is_open = True
                continue
            if left:
                run.send(left)
                note(lines.ends)
            if failing_since is not None:
                (folder / _FAILING).unlink(missing_ok=True)
            left, failing_since, told, pause = [], None, "", _POLL_SECS
        except Exception as error:  # For example because of the network.
            failing_since = failing_since or time.monotonic()
            if str(error) != told:  # It can be the same for days.
                told = str(error)
                print(f"cannot send metrics: {error}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                (folder / _FAILING).touch()
            # It can have failed for long; what is new since the end is tried, too.
            first = None if alone_since is None else max(alone_since, failing_since)
            if first is not None and time.monotonic() > first + _RETRY_SECS:
                return is_open
            pause = min(2 * pause, _MAX_POLL_SECS)
        is_over = alone_since is not None and (
            state_of(folder.parent) in _ENDS or time.monotonic() > alone_since + _GAP_SECS
        )
        if is_over and failing_since is None:
            return True
        time.sleep(pause)


def _has_no_workers(folder: Path) -> bool:
    with _open_lock(folder / _WORKERS_LOCK) as lock:
        return _try_lock(lock)


def _open_lock(path: Path) -> IO[Any]:
    # NFS needs a file that can be read for a shared lock, and one that can be written for another.
    return path.open("a+")


def _try_lock(file: IO[Any], kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def state_of(job: Path) -> str:
    """The state of the job, as its master has written it last; empty if that cannot be read."""
    return str(_read_json(job / "status.json").get("state", ""))


def _read_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
