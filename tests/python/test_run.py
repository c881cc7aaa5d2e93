# SPDX-License-Identifier: Apache-2.0
"""`elasticdl run`: whole jobs whose workers are scripts with a loop of their own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import LIMIT, NO_COMPILER, ROOT, Cluster, is_alive
from elasticdl._export import read_safetensors

EXAMPLE = "examples/torch_mnist.py"

# A model with batch norm and dropout, that is only known by the first `allreduce`.
SCRIPT = """
import sys
import numpy as np
import torch
import elasticdl

{no_compiler}
torch.manual_seed(0)
draw = torch.Generator().manual_seed(1)
x = torch.randn({n_records}, 16, generator=draw)
y = (x.sum(1) > 0).long()
model = torch.nn.Sequential(
    torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
job = elasticdl.init(optimizer=optimizer)
for features, labels in job.batches((x, y), batch_size=16, epochs={epochs}):
    {before}
    loss = torch.nn.functional.cross_entropy(model(features), labels)
    loss.backward()
    job.allreduce(model, loss)
    job.commit()
    {after}
np.savez(sys.argv[1], **{{name: value.numpy() for name, value in model.state_dict().items()}})
print("after the loop")
"""


def script(folder: Path, before: str = "pass", after: str = "pass", **numbers: int) -> list[str]:
    """Writes a script; returns its path and what it is given."""
    path = folder / "train.py"
    numbers = {"n_records": 640, "epochs": 1, **numbers}
    lines = {"before": before, "after": after, "no_compiler": NO_COMPILER}
    path.write_text(SCRIPT.format(**lines, **numbers))
    return [str(path), str(folder / "weights.npz")]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        # It may just have ended.
        with contextlib.suppress(OSError):
            if parent(int(path.name)) == pid:
                found.append(int(path.name))
    return found


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def weights(job: Path) -> str:
    return hashlib.sha256((job / "output" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "example",
    [
        EXAMPLE,
        "examples/torch_own_step.py",
        "examples/torch_evaluate.py",
        "examples/torch_shards.py {folder}",
    ],
)
def test_the_examples_learn_with_two_workers(
    cluster: Cluster, tmp_path: Path, example: str
) -> None:
    words = example.format(folder=tmp_path / "shards").split()
    cluster.run("run", "--workers=2", "--job_name=own", *words)
    cluster.run("audit", "own")
    logs = cluster.log("own", "worker-0") + cluster.log("own", "worker-1")
    (accuracy,) = re.findall(r"^accuracy ([0-9.]+)$", logs, re.MULTILINE)
    assert float(accuracy) > 0.9


def test_results_are_bit_identical_for_any_number_of_workers(
    cluster: Cluster, tmp_path: Path
) -> None:
    found = {}
    for n_workers in (1, 2):
        name = f"bits-{n_workers}"
        command = script(tmp_path, epochs=2)
        cluster.run("run", f"--workers={n_workers}", "--lanes=2", f"--job_name={name}", *command)
        found[n_workers] = weights(cluster.job(name))
        cluster.run("audit", name)
    assert len(set(found.values())) == 1, found


def test_the_loop_ends_with_the_parameters_of_the_job(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("run", "--workers=1", "--job_name=last", *script(tmp_path))
    exported = read_safetensors(cluster.job("last") / "output" / "model.safetensors")
    with np.load(tmp_path / "weights.npz") as ours:
        for name, value in exported.items():
            np.testing.assert_array_equal(ours[name], value, name)


def test_a_script_without_a_job_computes_the_same_bits(cluster: Cluster, tmp_path: Path) -> None:
    path, out = script(tmp_path)
    cluster.run("run", "--workers=1", "--lanes=2", "--job_name=job", path, str(tmp_path / "job"))
    env = {**os.environ, "PYTHONPATH": "", "ELASTICDL_LANES": "2", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, path, out], env=env, check=True, timeout=LIMIT)
    with np.load(tmp_path / "job.npz") as job, np.load(out) as alone:
        for name, value in job.items():
            np.testing.assert_array_equal(alone[name], value, name)


def test_a_script_without_a_job_that_is_killed_leaves_no_files(tmp_path: Path) -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    command = script(tmp_path, before=f"if job.step == 3: {kill}")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**os.environ, "PYTHONPATH": "", "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, *command], env=env, timeout=LIMIT)
    assert done.returncode == -signal.SIGKILL
    assert not [*temporary.iterdir()]


def test_one_worker_that_leaves_its_loop_ends_the_job_for_all(
    cluster: Cluster, tmp_path: Path
) -> None:
    found = {}
    # A worker with both lanes must not leave the step after the first of them.
    for n_workers, how in ((1, "job.stop()"), (2, "break")):
        name = f"left-{n_workers}"
        path, out = script(tmp_path, after=f"if job.worker_id == 0 and job.step == 7: {how}")
        whose = ["--log_to_terminal=all"] if n_workers == 2 else []
        done = cluster.run(
            "run", f"--workers={n_workers}", "--lanes=2", f"--job_name={name}", *whose, path, out
        )
        shown = re.findall(r"^(.*)after the loop", done.stdout, re.M)
        if n_workers == 1:
            assert shown == [""], "the leader's output is shown"
        else:
            assert sorted(map(str.strip, shown)) == ["worker-0", "worker-1"]
        logs = [cluster.log(name, f"worker-{worker}") for worker in range(n_workers)]
        assert all("after the loop" in log for log in logs)
        status = cluster.status(name)
        assert (status["state"], status["step"]) == ("succeeded", 8)
        audit = cluster.run("audit", name).stdout
        assert "256" in audit, audit
        found[n_workers] = weights(cluster.job(name))
    assert len(set(found.values())) == 1, found


# Written by each worker: the signals that it got, and whether it reached its end.
AFTER = """
import os, signal, time
got = []
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
time.sleep(1.5)
assert not got, got
open(sys.argv[1] + f".{job.worker_id}", "w").write(f"{job.step} {job.is_leader}")
"""


def test_what_follows_the_loop_runs_to_its_end_in_every_worker(
    cluster: Cluster, tmp_path: Path
) -> None:
    path, out = script(tmp_path)
    Path(path).write_text(Path(path).read_text() + AFTER)
    done = cluster.run("run", "--workers=2", "--job_name=after", path, out)
    ends = sorted(Path(f"{out}.{worker}").read_text() for worker in (0, 1))
    assert ends == ["20 False", "20 True"]
    assert done.stdout.count("after the loop") == 1, "the leader's output is shown"
    assert "] [INFO]" not in done.stdout
    exits = (cluster.job("after") / "exits.jsonl").read_text()
    assert exits.count('"how":{"exit":0}') == 3, exits


def test_the_state_dict_is_saved_with_the_counters_of_batch_norms(
    cluster: Cluster, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    path, out = script(tmp_path)
    cluster.run(
        "run", "--workers=2", "--job_name=saved", f"--tensorboard_dir={tmp_path / 'tb'}", path, out
    )
    assert any((tmp_path / "tb").iterdir())
    output = cluster.job("saved") / "output"
    saved = torch.load(output / "model.pt")
    exported = read_safetensors(output / "model.safetensors")
    assert set(saved) == set(exported)
    for name, value in exported.items():
        np.testing.assert_array_equal(saved[name].numpy(), value, name)
    # The model is only known by its first iteration, which its initial values include.
    assert saved["1.num_batches_tracked"] == 21
    assert saved["1.num_batches_tracked"].dtype == torch.int64


def test_leadership_passes_on_when_the_leader_dies(cluster: Cluster, tmp_path: Path) -> None:
    path, out = script(tmp_path, n_records=6400, epochs=15)
    ran = tmp_path / "ran"
    first = f"import os; open({str(ran)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    last = "if job.is_leader: print('led by', job.worker_id)\n"
    text = Path(path).read_text().replace("torch.manual_seed(0)", first, 1)
    Path(path).write_text(text + last)
    job = cluster.start("run", "--workers=2", "--min_workers=1", "--job_name=led", path, out)
    first_worker = pids(cluster, "led", job)[0]
    # It has described the job, and nothing else has run the script.
    assert ran.read_text().split()[0] == str(first_worker)
    os.kill(first_worker, signal.SIGKILL)
    printed, err = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, printed + err
    logs = [*(cluster.job("led") / "logs").glob("worker-*.log")]
    assert len(ran.read_text().split()) == len(logs)
    assert len(re.findall(r"^led by \d+$", printed, re.MULTILINE)) == 1, printed


def pids(cluster: Cluster, name: str, job: subprocess.Popen[str]) -> list[int]:
    """The processes of two workers, once they train together."""

    def look() -> list[int]:
        if job.poll() is not None:
            raise AssertionError("it ended early:\n" + job.communicate()[1])
        status = cluster.written_status(name)
        if not status:
            return []
        workers = [i for i in status["instances"] if i["role"] == "worker" and i["lanes"]]
        return [i["pid"] for i in workers] if status["step"] > 5 and len(workers) == 2 else []

    return cluster.wait("training", look)


@pytest.mark.parametrize("is_server_killed", [False, True])
def test_a_killed_worker_costs_no_record(
    cluster: Cluster, tmp_path: Path, is_server_killed: bool
) -> None:
    command = script(tmp_path, n_records=6400, epochs=15)
    job = cluster.start("run", "--workers=2", "--job_name=killed", *command)
    workers = pids(cluster, "killed", job)
    # Workers are forks of one process, and like that a child of the command.
    assert [parent(worker) for worker in workers] == [job.pid, job.pid]
    assert all("elasticdl._fork_server" in command_line(worker) for worker in workers)
    servers = [pid for pid in children(job.pid) if "elasticdl._fork_server" in command_line(pid)]
    [server] = set(servers) - set(workers)
    if is_server_killed:
        os.kill(server, signal.SIGKILL)
    os.kill(workers[1], signal.SIGKILL)
    out, err = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, out + err
    cluster.run("audit", "killed")
    logs = " ".join(os.listdir(cluster.job("killed") / "logs"))
    assert "worker-2" in logs, "not replaced"
    assert "worker-3" not in logs, "the other one did not survive"


@pytest.mark.parametrize("flag", ["--fork_workers=true", "--fork_workers=false", "--detach"])
def test_a_script_runs_once_in_each_worker(cluster: Cluster, tmp_path: Path, flag: str) -> None:
    path, out = script(tmp_path)
    ran = tmp_path / "ran"
    top = f"print('at the top')\nopen({str(ran)!r}, 'a').write('once\\n')\n"
    text = Path(path).read_text().replace("torch.manual_seed(0)", top, 1)
    Path(path).write_text(text.replace("for features", "job.log({'early': 1})\nfor features"))
    done = cluster.run("run", "--workers=2", "--job_name=once", flag, path, out)
    cluster.run("wait", "once")
    cluster.run("audit", "once")
    assert ran.read_text() == "once\n" * 2
    logs = [cluster.log("once", f"worker-{worker}") for worker in (0, 1)]
    assert [log.count("at the top") for log in logs] == [1, 1]
    is_shown = flag != "--detach"
    assert done.stdout.count("at the top") == is_shown, "the output of the leader"
    assert cluster.logged("once") == {"early": [0]}
    assert not [name for name in os.listdir(cluster.home / "jobs") if name.startswith(".")]


@pytest.mark.parametrize("is_for_the_group", [True, False])
def test_ctrl_c_ends_a_script_that_is_examined(
    cluster: Cluster, tmp_path: Path, is_for_the_group: bool
) -> None:
    note = tmp_path / "pid"
    note.touch()
    path = tmp_path / "train.py"
    path.write_text(
        "import os, time\n"
        f"with open({str(note)!r}, 'w') as note:\n"
        "    note.write(str(os.getpid()))\n"
        "time.sleep(600)\n"
        "import elasticdl\n"
        "elasticdl.init()\n"
    )
    command = [sys.executable, "-m", "elasticdl", "run", "--job_name=examined", str(path)]
    job = subprocess.Popen(
        command, env=cluster.env, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True
    )
    script = int(cluster.wait("the script", note.read_text))
    assert "elasticdl._fork_server" in command_line(script)
    if is_for_the_group:
        os.killpg(job.pid, signal.SIGINT)
    else:
        os.kill(job.pid, signal.SIGINT)
    job.communicate(timeout=LIMIT)
    assert job.returncode == -signal.SIGINT
    cluster.wait("the end of the script", lambda: not is_alive(script))


def test_a_removed_worker_does_not_continue_after_its_loop(
    cluster: Cluster, tmp_path: Path
) -> None:
    command = script(tmp_path, n_records=6400, epochs=15)
    job = cluster.start("run", "--workers=2", "--min_workers=1", "--job_name=fewer", *command)
    pids(cluster, "fewer", job)
    cluster.run("scale", "fewer", "--workers=1")
    out, err = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, out + err
    cluster.run("audit", "fewer")
    logs = cluster.log("fewer", "worker-0") + cluster.log("fewer", "worker-1")
    assert logs.count("after the loop") == 1, logs
    assert "Traceback" not in logs, logs


def test_a_script_saves_what_it_likes_when_its_job_stops(cluster: Cluster, tmp_path: Path) -> None:
    note = "import atexit; atexit.register(lambda: print('left', job.preemption()))"
    command = script(tmp_path, before=f"if job.step == 0: {note}", n_records=6400, epochs=15)
    job = cluster.start("run", "--workers=2", "--job_name=notice", *command)
    pids(cluster, "notice", job)
    cluster.run("stop", "notice", "--within=9s")
    job.communicate(timeout=LIMIT)
    logs = cluster.log("notice", "worker-0") + cluster.log("notice", "worker-1")
    left = [float(seconds) for seconds in re.findall(r"^left ([0-9.]+)$", logs, re.MULTILINE)]
    assert len(left) >= 2 and all(seconds < 9 for seconds in left), logs
    assert "after the loop" not in logs, logs


@pytest.mark.parametrize("place", ["before", "after"])
def test_an_exception_fails_the_job_once(cluster: Cluster, tmp_path: Path, place: str) -> None:
    command = script(tmp_path, **{place: "if job.step == 3: {}['no such word']"})
    failed = cluster.run("run", "--workers=2", "--job_name=failed", *command, code=1)
    assert "KeyError: 'no such word'" in failed.stderr, failed.stderr
    shown = failed.stdout + failed.stderr
    assert shown.count("Traceback") == shown.count('train.py", line') == 1, shown
    status = cluster.status("failed")
    assert (status["state"], status["instances"][-1]["restarts"]) == ("failed", 0)


def test_an_exception_before_the_loop_fails_the_job_once(cluster: Cluster, tmp_path: Path) -> None:
    path, out = script(tmp_path)
    # In workers alone: what fails when the script describes itself starts nothing.
    failing = "import os\nif 'ELASTICDL_DESCRIBE' not in os.environ: {}['no such table']\n"
    text = Path(path).read_text()
    Path(path).write_text(text.replace("for features", failing + "for features"))
    failed = cluster.run("run", "--workers=2", "--job_name=early", path, out, code=1)
    assert "KeyError: 'no such table'" in failed.stderr, failed.stderr
    status = cluster.status("early")
    restarts = [instance["restarts"] for instance in status["instances"]]
    assert status["state"] == "failed" and max(restarts) <= 1, status


def test_exiting_in_the_loop_is_a_failure(cluster: Cluster, tmp_path: Path) -> None:
    command = script(tmp_path, after="if job.step == 3: sys.exit()")
    failed = cluster.run("run", "--workers=1", "--job_name=left", *command, code=1)
    assert "end training with `break` or `job.stop()`" in failed.stderr, failed.stderr


def test_a_script_that_fails_at_once_starts_nothing(cluster: Cluster, tmp_path: Path) -> None:
    command = script(tmp_path, before="print('begins'); open('/no/such/file')")
    for flags in [[], ["--detach"]]:
        refused = cluster.run("run", "--job_name=bad", *flags, *command, code=2)
        shown = refused.stdout + refused.stderr
        assert "FileNotFoundError" in shown and "_job.py" not in shown
        assert len(re.findall("begins$", shown, re.M)) == shown.count("error: ") == 1, shown
        assert not [*(cluster.home / "jobs").iterdir()]


def test_a_bad_name_is_refused_before_the_script_runs(cluster: Cluster, tmp_path: Path) -> None:
    path, out = script(tmp_path)
    Path(path).write_text(f"import elasticdl\nopen({out!r}, 'w')\n")
    refused = cluster.run("run", "--job_name=Not!", path, out, code=2)
    assert "job name `not!` must be" in refused.stderr.lower(), refused.stderr
    assert not Path(out).exists()


def test_a_script_that_never_joins_is_refused_before_it_runs(
    cluster: Cluster, tmp_path: Path
) -> None:
    path, out = script(tmp_path)
    Path(path).write_text(f"open({out!r}, 'w')\n")
    refused = cluster.run("run", path, out, code=2)
    assert "never calls `elasticdl.init()`" in refused.stderr, refused.stderr
    assert not Path(out).exists()


def test_the_example_learns_without_a_job() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.removeprefix("accuracy ")) > 0.9
