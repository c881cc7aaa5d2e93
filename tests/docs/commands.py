# SPDX-License-Identifier: Apache-2.0
"""Tests a command of the documentation: runs it, or checks it as far as possible on this machine.

`Checked` records how a command was checked, so no command is skipped silently.
"""

from __future__ import annotations

import os
import pty
import re
import runpy
import select
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from pages import ROOT, simple_commands

# Far longer than any command takes; a command that reaches this limit hangs.
LIMIT = 150
# An endless command is stopped with a key or Ctrl-C when it has printed something, or after this
# many seconds without output.
LOOK = 3
POLL = 0.05

# Why the commands of a marked block are not run.
MARKS = {
    "cluster": "needs a Kubernetes cluster",
    "docker": "needs a docker daemon",
    "internet": "downloads something",
    "build": "takes minutes to build",
    "forms": "shows the syntax, with placeholders",
    "data": "needs data that is not shipped",
}

# Programs that are never run, and why.
NEVER_RUN = {
    "kubectl": "needs a Kubernetes cluster",
    "minikube": "needs minikube",
    "gcloud": "needs a Google account",
    "docker": "needs a docker daemon",
    "podman": "needs podman",
    "git": "downloads something",
    "pip": "downloads something",
    "apt-get": "installs packages",
    "make": "takes minutes to build",
    "cargo": "takes minutes to build",
    "eval": "changes the reader's shell",
    "export": "changes the reader's shell",
    "cd": "changes the reader's shell",
}

# The same for our own commands; a block of them needs no mark.
NOT_RUN = [(r"^elasticdl zoo push\b", "needs a container registry")]

# Standard tools, run unchanged.
STANDARD_TOOLS = {
    "cat",
    "cmp",
    "cp",
    "grep",
    "head",
    "jq",
    "ls",
    "mkdir",
    "python",
    "sed",
    "sha256sum",
    "tail",
    "tar",
}

# In a list of commands, `elasticdl attach JOB | status JOB` has the program's name only once.
SHORT = {"audit", "data", "explain", "job", "logs", "scale", "status", "stop", "top", "wait", "zoo"}

# How commands are changed before they are run, and why.
EDITS: list[tuple[str, str, str]] = [
    (r"^cargo run --release -- train +#", "elasticdl train --detach --max_time=15 #",
     "there is no other shell, and the next commands need a running job"),
    (r"^cargo run --release -- ", "elasticdl ", "the command is already built"),
    (r"^(elasticdl train\b(?!.*--(max_step|detach|resume|print_config)).*?)( *#.*)?$",
     r"\1 --max_step=8", "a few steps show that it trains"),
    (r"^(elasticdl zoo build\b(?!.*--builder).*?)( *#.*)?$", r"\1 --builder=own",
     "the image is the same, and no daemon stores it"),
    (r"--resume second\b", "--resume second --max_step=60", "it need not finish its epoch"),
    (r"--at_step 500\b", "--at_step 40", "the step is reached sooner"),
    (r"--num_epochs=2\b", "--num_epochs=1", "one epoch shows that it trains"),
    (r"--workers 2:8\b", "--workers 2", "eight processes are slow on two cores"),
    (r"--seeds=10\b", "--seeds=1", "one seed shows that it works"),
]  # fmt: skip

# These run until they are stopped: with a key in their full-screen view, or with Ctrl-C.
FULL_SCREEN = re.compile(r"^elasticdl (top\b|train\b.*--tui\b)")
ENDLESS = re.compile(r"^elasticdl (attach\b|logs\b.*(-f\b|--follow\b)|chaos\b.*--every\b)")


@dataclass
class Checked:
    """A command that was not run, and how it was checked instead."""

    place: str
    command: str
    why: str
    by: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.place}: {self.command}\n    not run: {self.why}; {', '.join(self.by)}"


class Failed(AssertionError):
    """A command of the documentation does not work as written."""


class Shell:
    """Runs the commands of one page, in order, in a separate home and folder."""

    def __init__(self, scratch: Path, elasticdl: Path, python: Path | None) -> None:
        self.folder = scratch / "elasticdl"
        self.folder.mkdir(parents=True)
        for name in ("crates", "data", "docker", "docs", "examples", "manifests", "model_zoo"):
            (self.folder / name).symlink_to(ROOT / name)
        tools = scratch / "bin"
        tools.mkdir()
        (tools / "elasticdl").symlink_to(elasticdl)
        self.env = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "ELASTICDL_HOME": str(scratch / "home"),
            "KUBECONFIG": str(scratch / "no-cluster"),
            "KERAS_BACKEND": "tensorflow",
            "COLUMNS": "100",
        }
        if python:
            self.env["ELASTICDL_PYTHON"] = str(python)
            # A link would lose the virtual environment.
            (tools / "python").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
            (tools / "python").chmod(0o755)

    def run(self, line: str, place: str) -> None:
        for pattern, new, _ in EDITS:
            line = re.sub(pattern, new, line)
        if FULL_SCREEN.search(line):
            code, printed = self._run_in_terminal(line)
        elif ENDLESS.search(line):
            code, printed = self._run_until_ctrl_c(line)
        else:
            code, printed = self._run_to_completion(line)
        if code != 0:
            raise Failed(f"{place}: `{line}` exited with code {code}:\n{printed}")
        if "--detach" in line.split() or line.startswith("elasticdl chaos"):
            self._wait_for_workers(place)

    def _wait_for_workers(self, place: str) -> None:
        """Waits until all workers train: a reader types slower than a job starts or recovers."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            status = yaml.safe_load(self.output_of(["elasticdl", "status", "--json"]))
            working = [one for one in status["instances"] if one["state"] == "working"]
            if status["state"] != "running":
                return
            if status["step"] > 0 and len(working) >= status["workers_wanted"]:
                return
            time.sleep(0.1)
        raise Failed(f"{place}: the job never trained with all its workers")

    def _run_to_completion(self, line: str) -> tuple[int, str]:
        with self._start(line) as process:
            return self._wait_for(process)

    def _run_until_ctrl_c(self, line: str) -> tuple[int, str]:
        with self._start(line) as process:
            select.select([process.stdout], [], [], LOOK)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            code, printed = self._wait_for(process)
        # An interrupted command exits with 130, is killed by the signal, or exits normally.
        return 0 if code in (130, -signal.SIGINT) else code, printed

    def _wait_for(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        try:
            printed, _ = process.communicate(timeout=LIMIT)
            return process.returncode, printed
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return -signal.SIGKILL, process.communicate()[0] + f"\ndid not exit within {LIMIT} s"

    def _start(self, line: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", f"set -euo pipefail; {line}"],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _run_in_terminal(self, line: str) -> tuple[int, str]:
        """Runs the command in a terminal, waits for output, and presses `q`."""
        pid, screen = pty.fork()
        if pid == 0:
            os.chdir(self.folder)
            os.execvpe("bash", ["bash", "-c", line], {**self.env, "TERM": "xterm"})
        printed = b""
        os.set_blocking(screen, False)
        begin, pressed = time.monotonic(), -LOOK
        while time.monotonic() < begin + LIMIT:
            try:
                printed += os.read(screen, 65536)
            except BlockingIOError:
                pass
            except OSError:
                break  # The command has exited.
            if time.monotonic() > pressed + LOOK and (printed or time.monotonic() > begin + LOOK):
                os.write(screen, b"q")
                pressed = time.monotonic()
            time.sleep(POLL)
        else:
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(screen)
        return os.waitstatus_to_exitcode(status), printed.decode(errors="replace")

    def end(self) -> None:
        """Stops jobs that the page left running."""
        listed = subprocess.run(
            ["elasticdl", "list", "--json"], env=self.env, capture_output=True, text=True
        )
        jobs = yaml.safe_load(listed.stdout or "[]") or []
        for job in jobs:
            if job["state"] not in ("succeeded", "failed", "stopped"):
                subprocess.run(["elasticdl", "stop", job["job"]], env=self.env, timeout=LIMIT)

    # ---- commands that are not run -----------------------------------------------------------

    def check(self, line: str, place: str, why: str) -> Checked:
        checked = Checked(place, line, why)
        lint = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True)
        if lint.returncode != 0:
            raise Failed(f"{place}: {lint.stderr}")
        for words in simple_commands(line):
            try:
                checked.by.append(self._check(words))
            except Failed as failure:
                raise Failed(f"{place}: `{' '.join(words)}`: {failure}") from failure
        return checked

    def _check(self, words: list[str]) -> str:
        # `[JOB]` is optional, and `…` is a placeholder.
        program, *rest = [word.strip("[]") for word in words if word != "…"]
        if program in SHORT:
            program, rest = "elasticdl", [program, *rest]
        if program == "elasticdl":
            return self._check_elasticdl(rest)
        if program in ("kubectl", "docker"):
            self._files_exist(rest)
            return self._parsed_by(program, rest)
        if program == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
            for target in rest:
                if "=" not in target and target not in targets:
                    raise Failed(f"make has no target `{target}`")
            return "its targets exist"
        if program == "cargo":
            return self._check_cargo(rest)
        if program == "gcloud":
            return check_gcloud(rest)
        if program in NEVER_RUN or program in STANDARD_TOOLS:
            return "its arguments are not checked"
        raise Failed(f"unknown program `{program}`; add it to {Path(__file__).name}")

    def _check_elasticdl(self, rest: list[str]) -> str:
        if rest[:1] == ["operator"] and rest[1:2] in (["manifests"], ["crd"]):
            self.output_of(["elasticdl", *rest])
            return "run"
        flags = {word.split("=")[0] for word in rest}
        is_whole = not any("…" in word for word in rest)
        is_job = rest[0] in ("train", "evaluate", "predict") and "--image_name" in flags
        if is_job and is_whole:
            words = [word for word in rest if word != "--detach"]
            objects = self.output_of(
                ["elasticdl", *words, *([] if "--yaml" in flags else ["--yaml"])]
            )
            if not list(yaml.safe_load_all(objects)):
                raise Failed("it generates no objects")
            return "its objects are generated"
        if rest[0] == "run":
            # Words after the script are the script's own arguments.
            scripts = [i for i, word in enumerate(rest) if word.endswith(".py")]
            rest = rest[: scripts[0]] if scripts else rest
        self.output_of(["elasticdl", *rest, "--help"])
        return "its flags are parsed"

    def _parsed_by(self, program: str, rest: list[str]) -> str:
        if not shutil.which(program):
            return f"{program} is not installed to parse it"
        # `--help` comes last, so everything before it is parsed, but before the command for a
        # container, which would be run. Flags of `docker run` are written as `--flag=value`.
        end = len(rest)
        if "--" in rest:
            end = rest.index("--")
        elif rest[0] == "run":
            end = next(i for i, word in enumerate(rest) if i > 0 and not word.startswith("-"))
        self.output_of([program, *rest[:end], "--help"], DOCKER_HOST="unix:///nowhere")
        return f"{program} parses it"

    def _check_cargo(self, rest: list[str]) -> str:
        if "--" in rest and rest[0] == "run" and "-p" not in rest:
            return self._check_elasticdl(rest[rest.index("--") + 1 :])
        named = dict(zip(rest, rest[1:]))
        package = named.get("-p")
        if package and not (ROOT / "crates" / package).is_dir():
            raise Failed(f"there is no crate `{package}`")
        example = named.get("--example")
        if example and not (ROOT / "crates" / package / "examples" / f"{example}.rs").exists():
            raise Failed(f"crate `{package}` has no example `{example}`")
        if "--path" in named and not (ROOT / named["--path"] / "Cargo.toml").exists():
            raise Failed(f"`{named['--path']}` is not a crate")
        return "what it names exists"

    def _files_exist(self, rest: list[str]) -> None:
        named = [new for old, new in zip(rest, rest[1:]) if old in ("-f", "--filename", "--file")]
        for name in named:
            if name == "-" or name.startswith("https://"):
                continue
            path = self.folder / name
            if not path.exists():
                raise Failed(f"there is no `{name}`")
            files = [path] if path.is_file() else path.glob("*.yaml")
            for file in files:
                if file.suffix == ".yaml":
                    list(yaml.safe_load_all(file.read_text()))

    def output_of(self, words: list[str], **env: str) -> str:
        done = subprocess.run(
            words,
            cwd=self.folder,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        if done.returncode != 0:
            raise Failed(f"`{shlex.join(words)}` exited with code {done.returncode}: {done.stderr}")
        return done.stdout


@cache
def gcloud_table() -> dict | None:
    """The table that gcloud uses to complete commands and flags."""
    program = shutil.which("gcloud")
    if not program:
        return None
    table = Path(program).resolve().parents[1] / "data/cli/gcloud_completions.py"
    return runpy.run_path(str(table))["STATIC_COMPLETION_CLI_TREE"] if table.exists() else None


def check_gcloud(rest: list[str]) -> str:
    """Looks up commands and flags in gcloud's own table."""
    tree = gcloud_table()
    if not tree:
        return "gcloud is not installed to parse it"
    node = tree
    while rest and rest[0] in node.get("commands", {}):
        node, rest = node["commands"][rest[0]], rest[1:]
    if node.get("commands"):
        raise Failed(f"gcloud has no such command: {rest[:1]}")
    known = set(node["flags"]) | set(tree["flags"])
    for word in rest:
        if word.startswith("--") and word.split("=")[0] not in known:
            raise Failed(f"gcloud has no flag {word}")
    return "gcloud knows its flags"
