#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Injects a thousand faults into jobs of all strategies.

Usage: `chaos.py ELASTICDL [--faults=1000] [--seed=N]`.

It uses only the command, and the processes, folders and files of the jobs. Every job must succeed,
its audit must be clean, its model must be bit-identical to that of an undisturbed job, and it must
leave no processes, sockets or temporary files behind. A fault counts only if it took effect.
`make soak` runs it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL = 0.02
# A signal takes effect at once, and a job recovers within seconds; the rest is for slow machines.
EFFECT_SECS, END_SECS = 20.0, 300.0
MAX_FAULTS_PER_JOB = 25
EPOCHS = 3
# In every strategy, all rounds and steps have the same number of records, so each record has the
# same weight, in any order.
N_RECORDS = 7200
COUNT = f"--model_def=count --training_data=range:{N_RECORDS} --minibatch_size=10 "
DATA = Path(__file__).resolve().parents[1] / "data" / "fashion_mnist" / "test"
STRATEGIES = {
    "asynchronous": COUNT + "--model_params=sleep_ms=25",
    "rounds": COUNT + "--model_params=sleep_ms=25 --grads_to_wait=3",
    "allreduce": f"--model_def=mnist_cnn --training_data={DATA} --minibatch_size=16 --lanes=4 "
    "--distribution_strategy=AllreduceStrategy",
    "hybrid": COUNT + "--model_params=sleep_ms=25 --lanes=4 --distribution_strategy=HybridStrategy",
}
COMMON = (
    f"--num_epochs={EPOCHS} --seed=7 --heartbeat_timeout_secs=1.5 --checkpoint_secs=2 --allow_chaos"
)


class Failure(Exception):
    """A job did not behave as expected."""


def wait_until(what: str, condition: Callable[[], bool], secs: float) -> None:
    deadline = time.monotonic() + secs
    while not condition():
        if time.monotonic() > deadline:
            raise Failure(f"{what}: not within {secs:.0f} s")
        time.sleep(POLL)


def state_of(pid: int) -> str:
    """The state of a process as a letter; X if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]


@dataclass
class Job:
    """A job with its own home folder."""

    command: str
    home: Path
    strategy: str
    n_workers: int
    n_servers: int
    faults: list[str] = field(default_factory=list)
    resumes: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        return self.home / "jobs" / "job"

    def environment(self) -> dict[str, str]:
        (self.home / "tmp").mkdir(parents=True, exist_ok=True)
        return os.environ | {"ELASTICDL_HOME": str(self.home), "TMPDIR": str(self.home / "tmp")}

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        command, env = [self.command, *args], self.environment()
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=END_SECS, check=False
        )

    def launch(self, *args: str) -> None:
        with (self.home / "terminal.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.command, "train", *args],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def start(self) -> None:
        servers = [] if self.strategy == "allreduce" else [f"--num_ps_pods={self.n_servers}"]
        flags = [*STRATEGIES[self.strategy].split(), *COMMON.split(), *servers]
        self.environment()
        self.launch("--job_name=job", f"--num_workers={self.n_workers}", *flags)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def status(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "status.json").read_text())
        except (OSError, ValueError):
            return {}

    def is_ours(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return f"ELASTICDL_HOME={self.home}".encode() in environment.split(b"\0")

    def processes(self, *roles: str) -> list[dict[str, Any]]:
        """The running processes with these roles, according to the job's status."""
        shown = self.status().get("instances", [])
        return [i for i in shown if i["role"] in roles and i["pid"] and self.is_ours(i["pid"])]

    def leftover_processes(self) -> list[int]:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in pids if self.is_ours(pid) and state_of(pid) not in "ZX"]

    def resume(self) -> None:
        """Resumes the job, unless it finished before it could be stopped."""
        wait_until("all processes exit", lambda: not self.leftover_processes(), EFFECT_SECS)
        if self.status().get("state") != "succeeded":
            self.resumes += 1
            self.launch("--resume", "job")


def send(pid: int, number: signal.Signals, states: str) -> bool:
    """Sends a signal and waits for its effect; false if the process had already exited."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    wait_until(f"{number.name} of {pid}", lambda: state_of(pid) in states, EFFECT_SECS)
    return True


def kill(job: Job, rng: random.Random, *roles: str) -> bool:
    targets = job.processes(*roles)
    return bool(targets) and send(rng.choice(targets)["pid"], signal.SIGKILL, "ZX")


def kill_worker(job: Job, rng: random.Random) -> bool:
    return kill(job, rng, "worker")


def kill_server(job: Job, rng: random.Random) -> bool:
    return kill(job, rng, "ps")


def kill_master(job: Job, rng: random.Random) -> bool:
    return kill(job, rng, "master")


def kill_several(job: Job, rng: random.Random) -> bool:
    targets = job.processes("worker", "ps", "master")
    chosen = rng.sample(targets, k=min(len(targets), 3))
    return [send(target["pid"], signal.SIGKILL, "ZX") for target in chosen].count(True) > 1


def freeze_for_a_while(job: Job, rng: random.Random) -> bool:
    targets = job.processes("worker", "ps", "master")
    if not targets or not send(pid := rng.choice(targets)["pid"], signal.SIGSTOP, "TZX"):
        return False
    was_frozen = state_of(pid) == "T"
    time.sleep(rng.uniform(0.2, 3.0))
    if job.is_ours(pid):
        os.kill(pid, signal.SIGCONT)
    return was_frozen


def freeze(job: Job, rng: random.Random) -> bool:
    targets = job.processes("worker", "ps")
    return bool(targets) and send(rng.choice(targets)["pid"], signal.SIGSTOP, "TZX")


def terminate_worker(job: Job, rng: random.Random) -> bool:
    targets = job.processes("worker")
    return bool(targets) and send(rng.choice(targets)["pid"], signal.SIGTERM, "ZX")


def chaos(job: Job, rng: random.Random, action: str) -> bool:
    targets = job.processes("worker", "ps") if action == "partition" else job.processes("worker")
    if not targets:
        return False
    target = rng.choice(targets)
    target = f"--{target['role']}={target['id']}"
    return job.run("chaos", "job", action, target, f"--secs={rng.randint(1, 4)}").returncode == 0


def disconnect(job: Job, rng: random.Random) -> bool:
    return chaos(job, rng, "partition")


def slow_down(job: Job, rng: random.Random) -> bool:
    return chaos(job, rng, "slow")


def end_and_resume(job: Job, number: signal.Signals) -> bool:
    assert job.process is not None
    job.process.send_signal(number)
    code = job.process.wait(timeout=END_SECS)
    job.resume()
    return code != 0


def kill_everything(job: Job, _: random.Random) -> bool:
    return end_and_resume(job, signal.SIGKILL)


def interrupt(job: Job, _: random.Random) -> bool:
    return end_and_resume(job, signal.SIGINT)


def stop(job: Job, _: random.Random) -> bool:
    if job.run("stop", "job").returncode != 0:
        return False
    assert job.process is not None
    job.process.wait(timeout=END_SECS)
    job.resume()
    return True


FAULTS: dict[Callable[[Job, random.Random], bool], int] = {
    kill_worker: 6,
    kill_server: 3,
    kill_master: 3,
    kill_several: 1,
    freeze_for_a_while: 3,
    freeze: 1,
    terminate_worker: 2,
    disconnect: 2,
    slow_down: 1,
    kill_everything: 1,
    interrupt: 1,
    stop: 1,
}


def inject_faults(job: Job, rng: random.Random, is_enough: Callable[[], bool]) -> None:
    """Injects faults until the job ends."""
    has_workers = lambda: bool(job.processes("worker")) or not job.is_running()  # noqa: E731
    wait_until("the first worker", has_workers, END_SECS)
    while job.is_running() and len(job.faults) < MAX_FAULTS_PER_JOB and not is_enough():
        time.sleep(rng.expovariate(1.2))
        fault = rng.choices(list(FAULTS), weights=list(FAULTS.values()))[0]
        if job.is_running() and fault(job, rng):
            job.faults.append(fault.__name__)


def floats(model: bytes, name: str) -> list[float]:
    """A tensor of a safetensors file."""
    size = struct.unpack_from("<Q", model)[0]
    start, end = json.loads(model[8 : 8 + size])[name]["data_offsets"]
    data = model[8 + size :][start:end]
    return [number for (number,) in struct.iter_unpack("<f", data)]


def check(job: Job) -> str:
    """Checks the result of a job; returns the hash of its model."""
    state = job.status().get("state")
    if state != "succeeded":
        raise Failure(f"the job ended as {state}: {job.status().get('reason')}")
    audit = job.run("audit", "job", "--json")
    if audit.returncode != 0:
        raise Failure(f"audit: {audit.stdout}{audit.stderr}")
    epochs = json.loads(audit.stdout)["epochs"]
    if len(epochs) != EPOCHS or any(e["missing"] or e["duplicated"] for e in epochs):
        raise Failure(f"audit: {epochs}")
    model = (job.folder / "output" / "model.safetensors").read_bytes()
    if job.strategy == "asynchronous":
        check_counts(model)
    check_leftovers(job)
    return hashlib.sha256(model).hexdigest()


def check_counts(model: bytes) -> None:
    """Checks the result of the `count` model: how often each record was trained."""
    counts = floats(model, "count.rows")
    wrong = [n for n in counts if n != EPOCHS]
    if wrong or len(counts) != N_RECORDS:
        raise Failure(f"{len(wrong)} of {len(counts)} records were not trained {EPOCHS} times")


def check_leftovers(job: Job) -> None:
    wait_until("all processes exit", lambda: not job.leftover_processes(), EFFECT_SECS)
    temporary = list((job.home / "tmp").iterdir())
    sockets = [path for path in job.folder.rglob("*") if path.is_socket()]
    partial = list(job.folder.rglob("*tmp*"))
    checkpoints = (job.folder / "checkpoints").iterdir()
    unfinished = [path for path in checkpoints if not (path / "manifest.json").is_file()]
    if left := temporary + sockets + partial + unfinished:
        raise Failure("left behind: " + ", ".join(str(path) for path in left[:5]))


class Soak:
    """Runs several jobs at a time until there were enough faults."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = time.monotonic() + options.minutes * 60
        self.lock = threading.Lock()
        self.n_started = 0
        self.done: list[Job] = []
        self.running: list[Job] = []
        self.failed: list[str] = []
        self.expected: dict[str, str] = {}

    def n_faults(self) -> int:
        return sum(len(job.faults) for job in self.done + self.running)

    def is_enough(self) -> bool:
        is_over_time = time.monotonic() > self.deadline
        return self.n_faults() >= self.options.faults or is_over_time or bool(self.failed)

    def job(self, strategy: str, n_workers: int, n_servers: int) -> Job:
        home = Path(tempfile.mkdtemp(prefix="elasticdl-chaos-"))
        return Job(self.options.command, home, strategy, n_workers, n_servers)

    def undisturbed(self, strategy: str) -> str:
        job = self.job(strategy, 4, 1)
        job.start()
        wait_until("the undisturbed job ends", lambda: not job.is_running(), END_SECS)
        found = check(job)
        shutil.rmtree(job.home)
        return found

    def next_job(self) -> tuple[Job, random.Random]:
        with self.lock:
            number = self.n_started
            self.n_started += 1
            rng = random.Random(f"{self.options.seed}/{number}")
            strategy = list(STRATEGIES)[number % len(STRATEGIES)]
            job = self.job(strategy, rng.randint(1, 4), rng.randint(1, 3))
            self.running.append(job)
            return job, rng

    def work(self) -> None:
        while not self.is_enough():
            job, rng = self.next_job()
            error = self.survive(job, rng)
            with self.lock:
                self.running.remove(job)
                self.done.append(job)
                if error is not None:
                    where = f"{job.strategy} job with {job.n_workers} workers in {job.home}"
                    self.failed.append(f"{where}: {error}\n  after {', '.join(job.faults)}")
                what = f"{len(self.done)} jobs, {self.n_faults()} faults"
                print(f"{what}; {job.strategy}: {error or 'ok'}", file=sys.stderr, flush=True)

    def survive(self, job: Job, rng: random.Random) -> str | None:
        """Runs one job with faults; returns what went wrong."""
        try:
            job.start()
            inject_faults(job, rng, self.is_enough)
            wait_until("the job ends", lambda: not job.is_running(), END_SECS)
            if check(job) != self.expected[job.strategy]:
                return "its model differs from that of an undisturbed job"
        except (Failure, subprocess.TimeoutExpired, OSError, ValueError) as error:
            self.end(job)
            return str(error)
        shutil.rmtree(job.home)
        return None

    def end(self, job: Job) -> None:
        """Kills the processes of a failed job; its folder is kept for debugging."""
        for pid in job.leftover_processes():
            os.kill(pid, signal.SIGKILL)

    def run(self) -> int:
        for strategy in STRATEGIES:
            self.expected[strategy] = self.undisturbed(strategy)
        threads = [threading.Thread(target=self.work) for _ in range(self.options.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.summarize()

    def summarize(self) -> int:
        print(f"seed {self.options.seed}: {len(self.done)} jobs, {self.n_faults()} faults")
        for strategy in STRATEGIES:
            jobs = [job for job in self.done if job.strategy == strategy]
            faults = Counter(fault for job in jobs for fault in job.faults)
            kinds = ", ".join(f"{kind} {n}" for kind, n in faults.most_common())
            resumes = sum(job.resumes for job in jobs)
            print(f"{strategy}: {len(jobs)} jobs, {faults.total()} faults, {resumes} resumes")
            print(f"  {kinds}")
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"CPU time: {used.ru_utime + used.ru_stime:.0f} s")
        for text in self.failed:
            print(f"FAILED: {text}")
        if not self.failed and self.n_faults() < self.options.faults:
            print(f"FAILED: only {self.n_faults()} faults within {self.options.minutes} minutes")
            return 1
        return 1 if self.failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", help="the elasticdl command")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=6, help="number of concurrent jobs")
    parser.add_argument("--minutes", type=float, default=90, help="give up after this many minutes")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9))
    options = parser.parse_args()
    options.command = str(Path(options.command).resolve())
    return Soak(options).run()


if __name__ == "__main__":
    sys.exit(main())
