# SPDX-License-Identifier: Apache-2.0
"""Each way to install in the README works in an empty environment; `make try-install` builds first.

`TARGET` is cargo's target folder, `PACKAGES` a folder with the wheels that our wheel depends on.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGET = Path(os.environ.get("TARGET", ROOT / "target"))
# Users download the archive, so it must be small.
MAX_BYTES = 40_000_000
LIMIT = 600
SYSTEM = "/usr/bin:/bin"


def ways() -> dict[str, str]:
    """The lines of the README's section, by the program of their last command."""
    section = (ROOT / "README.md").read_text().split("## Install\n")[1].split("\n## ")[0]
    lines = re.search(r"```sh build\n(.*?)```", section, re.S)[1].splitlines()
    commands = [line.split(" # ")[0].split("&&")[-1].strip() for line in lines]
    return {command.split()[0]: command for command in commands}


class Machine:
    """An account that has only the system's programs."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {"HOME": str(home), "PATH": SYSTEM}

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Runs a line in the repository, whose target folder may be elsewhere."""
        line = line.replace(" target/", f" {TARGET}/")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, f"`{line}` exited with code {done.returncode}:\n{done.stderr}"
        return done

    def trains(self, command: str) -> None:
        assert self.run(f"{command} --version").stdout.startswith("elasticdl ")
        data = ROOT / "data" / "fashion_mnist" / "test"
        flags = f"--model_def=mnist_mlp --training_data={data} --max_step=3 --job_name=first"
        self.run(f"{command} train {flags}")
        assert (self.home / ".elasticdl/jobs/first/output/model.safetensors").is_file()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    home = tmp_path / "home"
    home.mkdir()
    return Machine(home)


def test_every_way_in_the_readme_is_tested() -> None:
    assert sorted(ways()) == ["cargo", "pip", "tar"]


def test_the_archive_contains_a_small_command_that_runs(machine: Machine) -> None:
    machine.run(ways()["tar"])
    command = next(machine.home.glob("elasticdl-*/elasticdl"))
    assert command.stat().st_size < MAX_BYTES
    linked = subprocess.run(["ldd", command], capture_output=True, text=True)
    assert "statically linked" in linked.stdout + linked.stderr
    machine.trains(str(command))


def test_the_wheel_contains_the_command_and_the_package(machine: Machine) -> None:
    subprocess.run([sys.executable, "-m", "venv", machine.home / "venv"], check=True)
    machine.env["PATH"] = f"{machine.home / 'venv' / 'bin'}:{SYSTEM}"
    machine.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": os.environ["PACKAGES"]}
    machine.run(ways()["pip"])
    machine.trains("elasticdl")
    machine.run("cd / && python -c 'import elasticdl'")


def test_cargo_installs_the_command_without_recompiling_dependencies(machine: Machine) -> None:
    cargo = Path(shutil.which("cargo") or "cargo")
    real = Path.home()
    machine.env |= {
        # The toolchain and the sources of crates, which users have or download.
        "PATH": f"{cargo.parent}:{SYSTEM}",
        "CARGO_HOME": os.environ.get("CARGO_HOME", str(real / ".cargo")),
        "RUSTUP_HOME": os.environ.get("RUSTUP_HOME", str(real / ".rustup")),
        "CARGO_TARGET_DIR": str(TARGET),
        "CARGO_INSTALL_ROOT": str(machine.home / ".cargo"),
    }
    printed = machine.run(ways()["cargo"]).stderr
    assert set(re.findall(r"Compiling (\S+)", printed)) <= {"elasticdl"}, printed
    machine.trains(str(machine.home / ".cargo/bin/elasticdl"))


def test_the_archive_is_reproducible(tmp_path: Path) -> None:
    def sums() -> list[str]:
        lines = (TARGET / "dist" / "SHA256SUMS").read_text().splitlines()
        return [line for line in lines if line.endswith(".tar.gz")]

    before = sums()
    # The archive does not depend on the umask or on file times.
    again = f"umask 077 && make --no-print-directory dist CARGO_TARGET_DIR={TARGET}"
    subprocess.run(["bash", "-c", again], cwd=ROOT, check=True, capture_output=True)
    assert len(before) == 1 and sums() == before
