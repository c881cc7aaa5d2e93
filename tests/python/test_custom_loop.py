# SPDX-License-Identifier: Apache-2.0
"""Training loops of the user's own, against a stand-in for the job's loop."""

from __future__ import annotations

import copy
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset, TensorDataset  # noqa: E402

import elasticdl  # noqa: E402
import elasticdl.torch  # noqa: E402
from conftest import NO_COMPILER  # noqa: E402
from elasticdl import ZooError  # noqa: E402

TWO_TURNS = [([3, 1], 11), ([0, 2], 22)]
DATA = torch.arange(8, dtype=torch.float32).reshape(4, 2)


class FakeLoop:
    """Asks for `turns`, each with all parameters set to its seed, and for the last one to 99.

    Each turn is a step, of which this worker leads all but the first.
    """

    turns: list[tuple[list[int], int]] = TWO_TURNS
    last_step: tuple[int, bool] | None = (2, True)
    is_script = False
    stepped = loaded = None

    def __init__(self) -> None:
        self.waiting = list(self.turns)
        self.heard: list[tuple] = []
        self.arrays: tuple[np.ndarray, np.ndarray] | None = None
        self.asked: tuple[list[int], int] | None = None
        self.seconds_left: float | None = None
        FakeLoop.last = self

    def preemption(self) -> float | None:
        return self.seconds_left

    def attach(self, dense: np.ndarray, gradient: np.ndarray) -> None:
        self.arrays = dense, gradient

    def next(self) -> tuple[np.ndarray, int, int, bool] | None:
        assert self.asked is None, "a turn was not answered"
        self.asked = self.waiting.pop(0) if self.waiting else None
        if self.arrays is not None:
            self.arrays[0][:] = 99 if self.asked is None else self.asked[1]
        if self.asked is None:
            return None
        records, seed = self.asked
        step = len(self.turns) - len(self.waiting) - 1
        return np.array(records, np.uint64), seed, step, step > 0

    def end(self) -> tuple[int, bool] | None:
        return self.last_step

    def computed(self, loss: float) -> None:
        assert self.arrays is not None
        self.heard.append(("computed", self.asked[0], loss, self.arrays[1].copy()))
        self.asked = None

    def again(self) -> None:
        self.heard.append(("again", self.asked[0]))
        self.waiting.insert(0, self.asked)
        self.asked = None

    def fail(self, why: str) -> None:
        self.heard.append(("fail", why))
        self.asked = None
        self.waiting = []


@pytest.fixture(autouse=True)
def worker(monkeypatch, become_worker):
    become_worker(FakeLoop)
    monkeypatch.setattr(FakeLoop, "turns", TWO_TURNS)
    monkeypatch.setattr(FakeLoop, "last", None, raising=False)
    monkeypatch.setenv("ELASTICDL_WORKER_ID", "3")


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def turn(job, model, batch) -> torch.Tensor:
    loss = model(batch).mean()
    loss.backward()
    job.allreduce(model, loss)
    job.commit()
    return loss


def test_the_jobs_folder_may_be_elsewhere_than_its_key(monkeypatch, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "status.json").write_text('{"state": "stopped"}')
    monkeypatch.setenv("ELASTICDL_JOB_DIR", str(folder))
    model, optimizer = linear()
    job = elasticdl.init(model, optimizer)
    with pytest.raises(SystemExit):
        for batch in job.batches(DATA, batch_size=2):
            turn(job, model, batch)


def test_each_iteration_has_the_parameters_of_the_job_and_returns_its_gradient():
    model, optimizer = linear()
    job = elasticdl.init(model, optimizer)
    seen = []
    for batch in job.batches(DATA, batch_size=2):
        seen.append((batch.tolist(), model.weight.tolist(), model.bias.item()))
        turn(job, model, batch)

    assert seen == [([[6, 7], [2, 3]], [[11, 11]], 11), ([[0, 1], [4, 5]], [[22, 22]], 22)]
    (_, records, loss, gradient), second = FakeLoop.last.heard
    assert (records, loss, gradient.tolist()) == ([3, 1], 110.0, [4.0, 5.0, 1.0])
    assert (second[1], second[3].tolist()) == ([0, 2], [2.0, 3.0, 1.0])
    assert (job.step, job.worker_id, job.is_leader) == (2, 3, True)
    assert model.weight.tolist() == [[99, 99]], "the parameters that the job ends with"


def test_every_worker_counts_the_steps_of_the_job_and_leadership_passes_on():
    model, optimizer = linear()
    job = elasticdl.init(model, optimizer)
    seen = [(job.step, job.is_leader)]
    for batch in job.batches(DATA, batch_size=2):
        turn(job, model, batch)
        seen.append((job.step, job.is_leader))
    assert seen == [(0, False), (0, False), (1, True)]
    assert (job.step, job.is_leader) == (2, True)


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_number_of_steps_is_known_once_the_batches_are(monkeypatch, lanes):
    monkeypatch.setenv("ELASTICDL_LANES", str(lanes))
    job = elasticdl.init()
    with pytest.raises(RuntimeError, match="number of steps is not known yet; first call"):
        job.total_steps  # noqa: B018
    sampler = elasticdl.torch.ElasticSampler(job, 10, batch_size=2, epochs=3)
    assert (job.steps_per_epoch, job.total_steps) == {1: (5, 15), 2: (3, 9)}[lanes]
    assert len(sampler) == len(DataLoader(range(10), batch_sampler=sampler)) == job.total_steps


def check_loop_exits() -> None:
    model, optimizer = linear()
    job = elasticdl.init(model, optimizer)
    with pytest.raises(SystemExit) as left:
        for batch in job.batches(DATA):
            turn(job, model, batch)
    assert left.value.code == 0


def test_a_worker_without_the_final_parameters_does_not_continue_after_its_loop(monkeypatch):
    monkeypatch.setattr(FakeLoop, "last_step", None)
    check_loop_exits()


def test_signals_are_pythons_again_after_the_loop():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    libc = ctypes.CDLL(None)
    model, optimizer = linear()
    job = elasticdl.init(model, optimizer)
    for batch in job.batches(DATA):
        # What Rust does, without Python's knowledge: here, the signal is ignored.
        libc.signal(signal.SIGTERM, ctypes.c_void_p(1))
        turn(job, model, batch)
    assert {number: signal.getsignal(number) for number in before} == before
    assert libc.signal(signal.SIGTERM, ctypes.c_void_p(0)) == 0, "the default again"


def test_the_leader_saves_the_state_dict(monkeypatch, tmp_path):
    monkeypatch.setenv("ELASTICDL_OUTPUT", str(tmp_path / "output"))
    model, optimizer = linear()
    job = elasticdl.init(model, optimizer)
    for batch in job.batches(DATA):
        turn(job, model, batch)
    saved = torch.load(tmp_path / "output" / "model.pt")
    assert saved["weight"].tolist() == [[99, 99]]
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["model.pt"]


def test_random_numbers_that_only_a_leader_draws_do_not_change_its_pass(monkeypatch):
    monkeypatch.setattr(FakeLoop, "turns", [([3, 1], 11), ([3, 1], 11)])
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    job = elasticdl.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in job.batches(DATA):
        if job.is_leader:
            model.eval()
            with torch.no_grad():
                for held_out in DataLoader(DATA, shuffle=True):
                    model(held_out)
            torch.rand(3), np.random.rand(), random.random()
            model.train()
        turn(job, model, batch)
    first, second = (heard[3] for heard in FakeLoop.last.heard)
    assert np.array_equal(first, second)
    assert copy.deepcopy(model)[0].weight.tolist() == model[0].weight.tolist()


def test_a_script_learns_that_the_job_stops():
    model, optimizer = linear()
    job = elasticdl.init(model, optimizer)
    assert job.preemption() is None, "before the loop"
    seen = []
    for batch in job.batches(DATA, batch_size=2):
        seen.append(job.preemption())
        FakeLoop.last.seconds_left = 4.5
        turn(job, model, batch)
    assert seen == [None, 4.5]


def test_parameters_stay_those_of_the_turn_until_the_next_batch():
    model, optimizer = linear()
    job = elasticdl.init(model, optimizer)
    for batch in job.batches(DATA):
        before = model.weight.tolist()
        turn(job, model, batch)
        FakeLoop.last.arrays[0][:] = -1.0
        assert model.weight.tolist() == before


def test_a_model_that_is_only_known_by_allreduce_gets_the_first_batch_twice():
    model, optimizer = linear()
    job = elasticdl.init(optimizer=optimizer)
    batches = [batch.tolist() for batch in job.batches(DATA) if turn(job, model, batch) is not None]

    assert batches == [[[6, 7], [2, 3]], [[6, 7], [2, 3]], [[0, 1], [4, 5]]]
    answers = [heard[:2] for heard in FakeLoop.last.heard]
    assert answers == [("again", [3, 1]), ("computed", [3, 1]), ("computed", [0, 2])]
    assert job.step == 2
    assert FakeLoop.last.heard[1][3].tolist() == [4.0, 5.0, 1.0], "nothing is left of the first"


def test_push_and_pull_are_the_same_turn():
    model, optimizer = linear()
    job = elasticdl.init(model, optimizer)
    for batch in job.batches(DATA):
        job.pull(model)
        model(batch).mean().backward()
        job.push(model)
        job.commit(loss=0.25)
    assert [heard[2] for heard in FakeLoop.last.heard] == [0.25, 0.25]


def test_gradients_of_several_backward_passes_add_up():
    model, optimizer = linear()
    job = elasticdl.init(model, optimizer)
    for batch in job.batches(DATA):
        for record in batch:
            (model(record).sum() / len(batch)).backward()
        job.allreduce()
        job.commit()
    assert FakeLoop.last.heard[0][3].tolist() == [4.0, 5.0, 1.0]


def test_random_numbers_and_buffers_depend_on_the_turn_alone(monkeypatch):
    monkeypatch.setattr(FakeLoop, "turns", [([3, 1], 11), ([0, 2], 22), ([3, 1], 11)])
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1))
    job = elasticdl.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    drawn = []
    for batch in job.batches(DATA):
        drawn.append((torch.rand(1).item(), np.random.rand(), turn(job, model, batch).item()))

    first, second, third = (heard[3] for heard in FakeLoop.last.heard)
    assert drawn[0] == drawn[2] != drawn[1]
    assert np.array_equal(first, third)
    # Frozen names and buffers come last: the running mean went from 11 towards 4.
    assert first[-5:-3].tolist() == pytest.approx([0.1 * (4 - 11), 0.1 * (5 - 11)], rel=1e-5)
    assert first[-1] == 1, "the number of batches"


def test_random_data_is_the_same_in_every_worker():
    drawn = []
    for _ in range(2):
        elasticdl.init()
        drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]


def test_parameters_that_the_optimizer_does_not_hold_are_frozen():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    job = elasticdl.init(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    for batch in job.batches(DATA):
        turn(job, model, batch)
    gradient = FakeLoop.last.heard[0][3]
    assert np.all(gradient[:3] != 0), "the second layer, which comes first"
    assert np.all(gradient[3:] == 0)


class Words(Dataset):
    """Items of a number and a word."""

    def __len__(self):
        return 4

    def __getitem__(self, record):
        assert isinstance(record, int)
        return torch.tensor([float(record)]), "abcd"[record]


@pytest.mark.parametrize(
    ("dataset", "collate", "expected"),
    [
        (Words(), None, [torch.tensor([[3.0], [1.0]]), ("d", "b")]),
        (Words(), lambda items: [word for _, word in items], ["d", "b"]),
        (["a", "b", "c", "d"], None, ["d", "b"]),
        ([0.5, 1.5, 2.5, 3.5], None, torch.tensor([3.5, 1.5], dtype=torch.float64)),
        (np.arange(4) * 10, None, np.array([30, 10])),
        ((DATA, np.arange(4)), None, (DATA[[3, 1]], np.array([3, 1]))),
        ((np.arange(4), np.arange(4)), list, [(3, 3), (1, 1)]),
        (TensorDataset(DATA, DATA), None, [DATA[[3, 1]], DATA[[3, 1]]]),
    ],
)
def test_a_dataset_is_whatever_has_a_length_and_items(dataset, collate, expected):
    job = elasticdl.init(*linear())
    found = next(iter(job.batches(dataset, collate=collate)))
    assert type(found) is type(expected)
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        found, expected = [found], [expected]
    for ours, theirs in zip(found, expected):
        assert np.array_equal(ours, theirs) and np.shape(ours) == np.shape(theirs)


def test_a_dataset_that_cannot_be_counted_is_refused():
    job = elasticdl.init(*linear())
    with pytest.raises(TypeError, match="has no length; use a map-style dataset"):
        job.batches(iter([1, 2]))
    with pytest.raises(ValueError, match="have 3 and 4 records"):
        job.batches((np.zeros(3), np.zeros(4)))
    with pytest.raises(ValueError, match="the dataset has no records"):
        job.batches([])
    with pytest.raises(ValueError, match="epochs=0; at least 1 is required"):
        job.batches([1], epochs=0)


def check_refused(sentence: str, body) -> None:
    model, optimizer = linear()
    job = elasticdl.init()
    with pytest.raises(RuntimeError, match=sentence):
        body(job, model, optimizer)


def test_calls_out_of_order_report_what_to_do():
    def commit_nothing(job, model, optimizer):
        job.commit()

    def no_commit(job, model, optimizer):
        job.attach(model, optimizer)
        for _ in job.batches(DATA):
            job.allreduce()

    def no_allreduce(job, model, optimizer):
        job.attach(model, optimizer)
        for _ in job.batches(DATA):
            job.commit()

    def twice(job, model, optimizer):
        job.attach(model, optimizer)
        for _ in job.batches(DATA):
            job.allreduce()
            job.allreduce()

    def no_optimizer(job, model, optimizer):
        for _ in job.batches(DATA):
            job.allreduce(model)

    def no_model(job, model, optimizer):
        job.attach(optimizer=optimizer)
        for _ in job.batches(DATA):
            job.allreduce()

    def other_model(job, model, optimizer):
        job.attach(model, optimizer)
        job.attach(nn.Linear(2, 1))

    def two_epochs_by_hand(job, model, optimizer):
        job.attach(model, optimizer)
        for _ in range(2):
            for batch in job.batches(DATA):
                turn(job, model, batch)

    def own_step(job, model, optimizer):
        job.attach(model, optimizer)
        optimizer.step()

    def own_rate(job, model, optimizer):
        job.attach(model, optimizer)
        for batch in job.batches(DATA):
            optimizer.param_groups[0]["lr"] *= 0.1
            turn(job, model, batch)

    def own_decay(job, model, optimizer):
        job.attach(model, optimizer)
        for batch in job.batches(DATA):
            optimizer.param_groups[0]["weight_decay"] = 0.1
            turn(job, model, batch)

    def own_schedule(job, model, optimizer):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        job.attach(model, optimizer, schedule, schedule_every="epoch")
        for batch in job.batches(DATA):
            turn(job, model, batch)
            schedule.step()

    check_refused(r"`job.commit\(\)` was called without a batch; call it once", commit_nothing)
    check_refused(r"requested before `job.commit\(\)`; call it at the end", no_commit)
    check_refused(r"called before `job.allreduce\(model\)`; call `allreduce` first", no_allreduce)
    check_refused(r"called twice for one batch; call it once", twice)
    check_refused(r"does not know the optimizer .* call `job.attach", no_optimizer)
    check_refused(r"does not know the model; call `job.allreduce\(model\)`", no_model)
    check_refused(r"the job already has another model", other_model)
    check_refused(r"requested twice; request them once, with the number of", two_epochs_by_hand)
    check_refused(r"`optimizer.step\(\)` was called, but the job takes the steps", own_step)
    check_refused(r"learning rate was changed from 0.5 to 0.05 .* lr_schedule", own_rate)
    check_refused(r"learning rate was changed from 0.5 to 0.25 .* do not call its", own_schedule)
    check_refused(r"`weight_decay` of the optimizer was changed from 0 to 0.1", own_decay)


def test_models_and_optimizers_that_cannot_be_trained_are_refused():
    job = elasticdl.init()
    with pytest.raises(ZooError, match="the model is a list; use a torch.nn.Module"):
        job.attach([])
    with pytest.raises(ZooError, match="the optimizer is a list; use a torch.optim.Optimizer"):
        job.attach(optimizer=[])
    with pytest.raises(ZooError, match="parameter servers, .* use torch.nn.Embedding instead"):
        job.attach(nn.Sequential(elasticdl.torch.Embedding(10, 2)))


def test_a_failure_is_reported_once_with_the_users_traceback(capsys):
    model, optimizer = linear()
    job = elasticdl.init(model, optimizer)

    def explode():
        raise KeyError("no such word")

    try:
        for _ in job.batches(DATA):
            explode()
    except KeyError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    job._fail("the script ended")

    ((kind, text),) = set(FakeLoop.last.heard)
    assert kind == "fail"
    assert text.endswith("KeyError: 'no such word'") and "in explode" in text
    assert "_job.py" not in text
    assert "KeyError" in capsys.readouterr().err


def test_a_failure_between_iterations_is_reported_in_the_next():
    model, optimizer = linear()
    job = elasticdl.init(model, optimizer)
    batches = job.batches(DATA)
    turn(job, model, next(batches))
    job._fail("it is over")
    assert [heard[0] for heard in FakeLoop.last.heard][:2] == ["computed", "fail"]


def test_the_end_of_the_job_is_no_failure():
    model, optimizer = linear()
    job = elasticdl.init(model, optimizer)
    for batch in job.batches(DATA):
        turn(job, model, batch)
    job._fail("the script ended")
    assert [heard[0] for heard in FakeLoop.last.heard] == ["computed", "computed"]


@pytest.mark.parametrize("state", ["running", "failed", "stopped"])
def test_only_workers_of_a_trained_model_continue_after_their_loop(tmp_path, state):
    (tmp_path / "status.json").write_text(json.dumps({"state": state}))
    check_loop_exits()
    assert [heard[0] for heard in FakeLoop.last.heard] == ["computed", "computed"]


def test_an_ordinary_script_changes_by_five_lines():
    model, optimizer = linear()
    dataset = TensorDataset(DATA, torch.ones(4, 1))

    job = elasticdl.init()
    model = elasticdl.torch.DistributedDataParallel(model, job)
    optimizer = elasticdl.torch.DistributedOptimizer(optimizer, job)
    sampler = elasticdl.torch.ElasticSampler(job, len(dataset), batch_size=2)
    for x, y in DataLoader(dataset, batch_sampler=sampler):
        optimizer.zero_grad()
        loss = (model(x) * y).mean()
        loss.backward()
        optimizer.step()

    heard = FakeLoop.last.heard
    assert [(kind, records) for kind, records, *_ in heard] == [
        ("computed", [3, 1]),
        ("computed", [0, 2]),
    ]
    assert heard[0][3].tolist() == [4.0, 5.0, 1.0]
    assert list(model.state_dict()) == ["weight", "bias"]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_closure_is_one_turn_and_its_loss_is_reported():
    model, optimizer = linear()
    job = elasticdl.init(model)
    optimizer = elasticdl.torch.DistributedOptimizer(optimizer, job)
    for batch in job.batches(DATA):

        def closure(batch=batch):
            loss = model(batch).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert [heard[2] for heard in FakeLoop.last.heard] == [110.0, 132.0]


def describe(tmp_path: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Runs a script that is only asked what it is."""
    script = tmp_path / "script.py"
    head = ["import torch, elasticdl", NO_COMPILER, "model = torch.nn.Linear(2, 1)"]
    head += ["optimizer = torch.optim.Adam(model.parameters(), lr=0.25)"]
    script.write_text("\n".join(head + list(lines)))
    answer = tmp_path / "answer"
    answer.mkdir()
    package = str(Path(elasticdl.__file__).parents[1])
    env = {**os.environ, "ELASTICDL_DESCRIBE": str(answer), "PYTHONPATH": package}
    env.pop("ELASTICDL_MASTER_ADDR")
    return subprocess.run(
        [sys.executable, script],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


ATTACHED = ["job = elasticdl.init(model, optimizer)"]
LATE = ["job = elasticdl.init(optimizer=optimizer)"]
LOOP = [
    "torch.nn.init.constant_(model.weight, 3.0)",
    "print('begin')",
    "for batch in job.batches(torch.zeros(100, 2), batch_size=8, epochs=3, shuffle=False):",
    "    assert batch.shape == (8, 2), batch.shape",
    "    model(batch).mean().backward()",
    "    job.allreduce(model)",
    "    job.commit()",
    "    raise SystemExit('never reached')",
]


@pytest.mark.parametrize("lines", [ATTACHED + LOOP, LATE + LOOP], ids=["attached", "late"])
def test_a_script_describes_itself_without_a_master(tmp_path, lines):
    done = describe(tmp_path, *lines)

    assert (done.returncode, done.stdout) == (0, "begin\n"), done.stderr
    found = json.loads((tmp_path / "answer" / "model.json").read_text())
    model = found.pop("model")
    expected = {"n_records": 100, "minibatch_size": 8, "num_epochs": 3, "shuffle": False}
    # Nothing holds its standard input.
    assert found == {**expected, "is_stream": False, "continues": False}
    assert [param["name"] for param in model["params"]] == ["weight", "bias"]
    assert model["name"] == "Linear"
    assert model["optimizer"]["learning_rate"] == 0.25
    values = np.fromfile(tmp_path / "answer" / "first_values.f32", "<f4")
    assert values[:2].tolist() == [3.0, 3.0]
    assert len(values) == 3


def test_weights_that_are_loaded_after_init_are_the_first_values(tmp_path):
    lines = [
        "model = torch.nn.BatchNorm1d(2)",
        "job = elasticdl.init(model, torch.optim.SGD(model.parameters(), lr=0.1))",
        "model.load_state_dict({name: value + 5 for name, value in model.state_dict().items()})",
        *LOOP[2:],
    ]
    done = describe(tmp_path, *lines)
    assert done.returncode == 0, done.stderr
    values = np.fromfile(tmp_path / "answer" / "first_values.f32", "<f4")
    assert values.tolist() == [6, 6, 5, 5, 5, 5, 6, 6, 5]


def test_schedules_are_read_for_every_step(tmp_path):
    lines = ["job = elasticdl.init(model, optimizer, lambda step: 1.0 / (1 + step))", *LOOP]
    done = describe(tmp_path, *lines)
    assert done.returncode == 0, done.stderr
    model = json.loads((tmp_path / "answer" / "model.json").read_text())["model"]
    starts = model["optimizer"]["schedule"]["table"]["starts"]
    assert starts == list(range(3 * 13))


PER_EPOCH = [
    "from torch.optim.lr_scheduler import OneCycleLR, StepLR",
    "job = elasticdl.init()",
    "job.attach(model, optimizer, StepLR(optimizer, 1, gamma=0.5), {every})",
    *LOOP,
]


def test_a_scheduler_counts_epochs_or_steps_as_the_script_says(tmp_path):
    for every, expected in [
        ("'epoch'", {"table": {"starts": [0, 13, 26], "factors": [1.0, 0.5, 0.25]}}),
        ("'step'", {"exponential": {"every": 1, "factor": 0.5, "staircase": True}}),
    ]:
        folder = tmp_path / every.strip("'")
        folder.mkdir()
        done = describe(folder, *[line.replace("{every}", every) for line in PER_EPOCH])
        assert done.returncode == 0, done.stderr
        model = json.loads((folder / "answer" / "model.json").read_text())["model"]
        assert model["optimizer"]["learning_rate"] == 0.25
        assert model["optimizer"]["schedule"] == expected


def test_a_scheduler_that_could_count_either_is_refused(tmp_path):
    done = describe(tmp_path, *[line.replace("{every}", "None") for line in PER_EPOCH])
    assert done.returncode == 1
    assert "`StepLR` can count steps or epochs; set `schedule_every`" in done.stderr


def test_a_scheduler_may_change_the_betas(tmp_path):
    cycle = "OneCycleLR(optimizer, 0.2, total_steps=39)"
    lines = [line.replace("StepLR(optimizer, 1, gamma=0.5), {every}", cycle) for line in PER_EPOCH]
    done = describe(tmp_path, *lines)
    assert done.returncode == 0, done.stderr
    optimizer = json.loads((tmp_path / "answer" / "model.json").read_text())["model"]["optimizer"]
    assert optimizer["kind"]["adam"]["beta_1"] == 0.95
    factors = optimizer["momentum_schedule"]["table"]["factors"]
    assert min(factors) == pytest.approx(0.85 / 0.95, rel=1e-3) and factors[0] == 1


def test_the_optimizer_has_the_learning_rate_of_each_step(monkeypatch):
    monkeypatch.setattr(FakeLoop, "turns", [([0, 1], n) for n in range(4)])
    model, optimizer = linear()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    job = elasticdl.init(model, optimizer, schedule, schedule_every="epoch")
    seen = []
    for batch in job.batches(DATA, batch_size=2, epochs=2):
        seen.append((job.epoch, optimizer.param_groups[0]["lr"], *schedule.get_last_lr()))
        turn(job, model, batch)
    assert seen == [(0, 0.5, 0.5), (0, 0.5, 0.5), (1, 0.25, 0.25), (1, 0.25, 0.25)]


def test_what_cannot_be_trained_is_one_sentence(tmp_path):
    done = describe(tmp_path, "job = elasticdl.init(model.to(torch.complex64), optimizer)")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "is complex64, but parameters must be float32, float64" in done.stderr


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [("complex64", "store its real and imaginary parts"), ("int64", "register it as a buffer")],
)
def test_advice_fits_the_type_of_a_parameter(dtype, advice):
    model = nn.Linear(2, 1)
    numbers = torch.zeros(1, dtype=getattr(torch, dtype))
    model.register_parameter("odd", nn.Parameter(numbers, requires_grad=False))
    with pytest.raises(ZooError, match=f"the parameter `odd` is {dtype}, .* {advice}"):
        elasticdl.init(model)
