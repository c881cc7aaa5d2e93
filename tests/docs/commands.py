# SPDX-License-Identifier: Apache-2.0
"""How a command of the documentation is tried: run for real, or checked as far as this machine can.

What `check` cannot try is said by `Checked`, so that nothing is passed over in silence.
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

# Far above what any command here takes; one that reaches it hangs.
LIMIT = 150
# What goes on for ever is ended by a key or Ctrl-C when it has shown something; after so many
# seconds without a word it is ended all the same.
LOOK = 3
POLL = 0.05

# Why the commands of a marked block are not run.
MARKS = {
    "cluster": "needs a Kubernetes cluster",
    "docker": "needs a docker daemon",
    "internet": "fetches something",
    "build": "builds for minutes",
    "forms": "shows the form, with placeholders",
    "data": "needs data that is not shipped",
}

# Programs that are never run, and why.
ABROAD = {
    "kubectl": "needs a Kubernetes cluster",
    "minikube": "needs minikube",
    "gcloud": "needs a Google account",
    "docker": "needs a docker daemon",
    "podman": "needs podman",
    "git": "fetches something",
    "pip": "fetches something",
    "apt-get": "installs packages",
    "make": "builds for minutes",
    "cargo": "builds for minutes",
    "eval": "changes the reader's shell",
    "export": "changes the reader's shell",
    "cd": "changes the reader's shell",
}

# The same of our own commands; a block of them needs no mark.
NOT_RUN = [(r"^elasticdl zoo push\b", "needs a registry of images")]

# Tools of every machine, run as they stand.
AT_HOME = {
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

# A list of commands says `elasticdl attach JOB | status JOB`: the program's name once.
SHORT = {"audit", "data", "explain", "job", "logs", "scale", "status", "stop", "top", "zoo"}

# What is changed in a command that is run, and why.
EDITS: list[tuple[str, str, str]] = [
    (r"^cargo run --release -- train +#", "elasticdl train --detach --max_time=15 #",
     "there is no other shell, and the next commands want a job that runs"),
    (r"^cargo run --release -- ", "elasticdl ", "the command is built already"),
    (r"^(elasticdl train\b(?!.*--(max_step|detach|resume|print_config)).*?)( *#.*)?$",
     r"\1 --max_step=8", "a few steps show that it trains"),
    (r"^(elasticdl zoo build\b(?!.*--builder).*?)( *#.*)?$", r"\1 --builder=own",
     "the image is the same, and no daemon keeps it"),
    (r"--resume second\b", "--resume second --max_step=60", "it need not end its epoch"),
    (r"--at_step 500\b", "--at_step 40", "its step comes sooner"),
    (r"--num_epochs=2\b", "--num_epochs=1", "one epoch shows that it trains"),
    (r"--workers 2:8\b", "--workers 2", "so many processes take long on two cores"),
    (r"--seeds=10\b", "--seeds=1", "one seed shows that it plays"),
]  # fmt: skip

# These go on until somebody ends them: by a key on their own screen, or by Ctrl-C.
ON_A_SCREEN = re.compile(r"^elasticdl (top\b|train\b.*--tui\b)")
ENDLESS = re.compile(r"^elasticdl (attach\b|logs\b.*(-f\b|--follow\b)|chaos\b.*--every\b)")


@dataclass
class Checked:
    """A command that was not run, and what could be said about it all the same."""

    place: str
    command: str
    why: str
    by: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.place}: {self.command}\n    not run: {self.why}; {', '.join(self.by)}"


class Failed(AssertionError):
    """A command of the documentation that does not work as it is written."""


class Shell:
    """Runs the commands of one page, in order, in a home and a folder of their own."""

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
        if ON_A_SCREEN.search(line):
            code, said = self._on_a_screen(line)
        elif ENDLESS.search(line):
            code, said = self._until_ctrl_c(line)
        else:
            code, said = self._to_its_end(line)
        if code != 0:
            raise Failed(f"{place}: `{line}` ended with {code}:\n{said}")
        if "--detach" in line.split() or line.startswith("elasticdl chaos"):
            self._until_all_work(place)

    def _until_all_work(self, place: str) -> None:
        """A reader takes longer to type the next command than a job to begin or to heal."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            status = yaml.safe_load(self.says(["elasticdl", "status", "--json"]))
            working = [one for one in status["instances"] if one["state"] == "working"]
            if status["state"] != "running":
                return
            if status["step"] > 0 and len(working) >= status["workers_wanted"]:
                return
            time.sleep(0.1)
        raise Failed(f"{place}: the job never trains with all its workers")

    def _to_its_end(self, line: str) -> tuple[int, str]:
        with self._start(line) as process:
            return self._end_of(process)

    def _until_ctrl_c(self, line: str) -> tuple[int, str]:
        with self._start(line) as process:
            select.select([process.stdout], [], [], LOOK)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            code, said = self._end_of(process)
        # Whoever is interrupted says so, or ends as if it had been done.
        return 0 if code in (130, -signal.SIGINT) else code, said

    def _end_of(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        try:
            said, _ = process.communicate(timeout=LIMIT)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return -signal.SIGKILL, process.communicate()[0] + f"\nno end after {LIMIT} s"

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
            # As a terminal has it: whoever was started in the background ignores Ctrl-C, and so
            # would all that it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def _on_a_screen(self, line: str) -> tuple[int, str]:
        """Gives the command a terminal, looks at it, and presses `q`."""
        pid, screen = pty.fork()
        if pid == 0:
            os.chdir(self.folder)
            os.execvpe("bash", ["bash", "-c", line], {**self.env, "TERM": "xterm"})
        said = b""
        os.set_blocking(screen, False)
        begin, pressed = time.monotonic(), -LOOK
        while time.monotonic() < begin + LIMIT:
            try:
                said += os.read(screen, 65536)
            except BlockingIOError:
                pass
            except OSError:
                break  # The other side is gone.
            if time.monotonic() > pressed + LOOK and (said or time.monotonic() > begin + LOOK):
                os.write(screen, b"q")
                pressed = time.monotonic()
            time.sleep(POLL)
        else:
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(screen)
        return os.waitstatus_to_exitcode(status), said.decode(errors="replace")

    def end(self) -> None:
        """Ends jobs that the page left running."""
        listed = subprocess.run(
            ["elasticdl", "list", "--json"], env=self.env, capture_output=True, text=True
        )
        jobs = yaml.safe_load(listed.stdout or "[]") or []
        for job in jobs:
            if job["state"] not in ("succeeded", "failed", "stopped"):
                subprocess.run(["elasticdl", "stop", job["job"]], env=self.env, timeout=LIMIT)

    # ---- what is not run ---------------------------------------------------------------------

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
        # `[JOB]` may be left out, and `…` stands for whatever one likes.
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
            return "its targets are there"
        if program == "cargo":
            return self._check_cargo(rest)
        if program == "gcloud":
            return gcloud_knows(rest)
        if program in ABROAD or program in AT_HOME:
            return "its words are nobody's here to check"
        raise Failed(f"`{program}` is not known; say in {Path(__file__).name} how it is tried")

    def _check_elasticdl(self, rest: list[str]) -> str:
        if rest[:1] == ["operator"] and rest[1:2] in (["manifests"], ["crd"]):
            self.says(["elasticdl", *rest])
            return "run"
        flags = {word.split("=")[0] for word in rest}
        is_whole = not any("…" in word for word in rest)
        is_job = rest[0] in ("train", "evaluate", "predict") and "--image_name" in flags
        if is_job and is_whole:
            words = [word for word in rest if word != "--detach"]
            objects = self.says(["elasticdl", *words, *([] if "--yaml" in flags else ["--yaml"])])
            if not list(yaml.safe_load_all(objects)):
                raise Failed("it makes no objects")
            return "its objects are made"
        if rest[0] == "run":
            # What follows the script is the script's own.
            scripts = [i for i, word in enumerate(rest) if word.endswith(".py")]
            rest = rest[: scripts[0]] if scripts else rest
        self.says(["elasticdl", *rest, "--help"])
        return "its flags are parsed"

    def _parsed_by(self, program: str, rest: list[str]) -> str:
        if not shutil.which(program):
            return f"{program} is not here to parse it"
        # `--help` comes last, so everything before it is parsed first; but before what is meant for
        # a container, which would be run. Flags of `docker run` are written `--flag=value`.
        end = len(rest)
        if "--" in rest:
            end = rest.index("--")
        elif rest[0] == "run":
            end = next(i for i, word in enumerate(rest) if i > 0 and not word.startswith("-"))
        self.says([program, *rest[:end], "--help"], DOCKER_HOST="unix:///nowhere")
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
            raise Failed(f"`{named['--path']}` is no crate")
        return "what it names is there"

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

    def says(self, words: list[str], **env: str) -> str:
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
            raise Failed(f"`{shlex.join(words)}` ended with {done.returncode}: {done.stderr}")
        return done.stdout


@cache
def gcloud_table() -> dict | None:
    """What gcloud completes commands and flags from."""
    program = shutil.which("gcloud")
    if not program:
        return None
    table = Path(program).resolve().parents[1] / "data/cli/gcloud_completions.py"
    return runpy.run_path(str(table))["STATIC_COMPLETION_CLI_TREE"] if table.exists() else None


def gcloud_knows(rest: list[str]) -> str:
    """Looks commands and flags up in gcloud's own table."""
    tree = gcloud_table()
    if not tree:
        return "gcloud is not here to parse it"
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
