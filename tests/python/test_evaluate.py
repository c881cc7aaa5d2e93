# SPDX-License-Identifier: Apache-2.0
"""Evaluation, metrics and the best model in a custom loop, with a stand-in for the job's loop."""

from __future__ import annotations

import json
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import elasticdl  # noqa: E402
from elasticdl import _evaluate  # noqa: E402
from elasticdl._evaluate import Board, Chunks, Evaluation  # noqa: E402
from elasticdl._log import Log  # noqa: E402
from test_loop_control import BATCH, DATA, N_EPOCHS, N_STEPS, FakeLoop, started  # noqa: E402

TEST = (torch.arange(20.0).reshape(10, 2), torch.arange(10))


@pytest.fixture(autouse=True)
def worker(monkeypatch, become_worker, tmp_path):
    become_worker(FakeLoop)
    monkeypatch.setattr(FakeLoop, "is_script", True)
    monkeypatch.setattr(FakeLoop, "first", 0)
    monkeypatch.setenv("ELASTICDL_OUTPUT", str(tmp_path / "output"))
    monkeypatch.setattr(_evaluate, "_PATIENCE_SECS", 0.1)


def run(evaluation: Evaluation) -> list[int]:
    """Computes this worker's share; returns its batches."""
    batches = []
    for batch, records in evaluation:
        evaluation.record({"first": int(records[0]), "all": torch.from_numpy(records)})
        batches.append(batch)
    return batches


def merged(evaluation: Evaluation) -> list[int]:
    return torch.cat([value for value, _ in evaluation.values("all")]).tolist()


@pytest.mark.parametrize("n_records", [1, 255, 256 * 4, 1027, 5000])
def test_chunks_cover_all_records_in_order(n_records):
    chunks = Chunks(n_records, 4)
    batches = [batch for chunk in range(len(chunks)) for batch in chunks.batches(chunk)]
    assert batches == list(range(chunks.n_batches)) and len(chunks) <= 256
    assert np.concatenate([chunks.records(batch) for batch in batches]).tolist() == list(
        range(n_records)
    )


def test_workers_share_an_evaluation_and_get_the_same_results(tmp_path):
    chunks = Chunks(10, 2)
    one, two = (Evaluation(chunks, Board(tmp_path / "board")) for _ in range(2))
    both = threading.Barrier(2)

    def share(evaluation: Evaluation) -> int:
        n_batches = 0
        for _, records in evaluation:
            if n_batches == 0:
                both.wait(10)
            evaluation.record({"all": torch.from_numpy(records)})
            n_batches += 1
        return n_batches

    with ThreadPoolExecutor(2) as threads:
        n_batches = list(threads.map(share, (one, two)))
    assert sum(n_batches) == 5 and min(n_batches) >= 1
    assert merged(one) == merged(two) == list(range(10))
    late = Evaluation(chunks, Board(tmp_path / "board"))
    assert run(late) == [] and merged(late) == list(range(10))


def test_a_chunk_of_a_lost_worker_is_computed_by_another_one(tmp_path):
    chunks = Chunks(10, 2)
    lost = iter(Evaluation(chunks, Board(tmp_path / "board")))
    assert next(lost)[0] == 0
    other = Evaluation(chunks, Board(tmp_path / "board"))
    assert run(other) == [1, 2, 3, 4, 0]
    assert merged(other) == list(range(10))


def test_the_first_result_of_a_chunk_counts_for_all_workers(tmp_path):
    boards = [Board(tmp_path / "board") for _ in range(2)]
    assert boards[0].publish(0, [{"a": 1}]) == [{"a": 1}]
    assert boards[1].publish(0, [{"a": 2}]) == [{"a": 1}]
    assert [path.name for path in (tmp_path / "board").iterdir()] == ["0.part"]


def test_without_a_folder_a_worker_computes_everything(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="cannot share the evaluation"):
        board = Board(tmp_path / "file" / "board")
    alone = Evaluation(Chunks(10, 2), board)
    assert run(alone) == [0, 1, 2, 3, 4] and merged(alone) == list(range(10))
    board = Board(tmp_path / "gone")
    evaluation = Evaluation(Chunks(10, 2), board)
    (tmp_path / "gone").rmdir()
    assert run(evaluation) == [0, 1, 2, 3, 4]


def test_a_damaged_result_is_computed_again(tmp_path):
    assert run(Evaluation(Chunks(10, 2), Board(tmp_path))) == [0, 1, 2, 3, 4]
    (tmp_path / "3.part").write_bytes(b"nonsense")
    assert run(Evaluation(Chunks(10, 2), Board(tmp_path))) == [3]


def evaluated(job, model, data=TEST, **options):
    for x, y in job.evaluate(data, **options):
        assert not model.training and not torch.is_grad_enabled()
        random.random(), np.random.rand(), torch.rand(1)
        output = model(x)
        job.record(output=output, label=y, mean=output.mean(), names=[str(n) for n in y.tolist()])
    return job.mean("output"), job.gather("label").tolist(), job.mean("mean"), job.gather("names")


def step_loop(job, model, optimizer):
    for step in job.steps(DATA, batch_size=BATCH, epochs=N_EPOCHS):
        for batch in step:
            model(batch).mean().backward()
        optimizer.step()
        yield job.step


def test_an_evaluation_in_the_loop_leaves_everything_as_it_was():
    job, model, optimizer = started()
    model.train()
    for _ in step_loop(job, model, optimizer):
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        result = evaluated(job, model, batch_size=3)
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
        assert model.training and torch.is_grad_enabled()
        with torch.no_grad():
            expected = [nn.Linear.forward(model, TEST[0][at : at + 3]) for at in range(0, 10, 3)]
        mean = math.fsum(torch.cat(expected).double().flatten().tolist()) / 10
        assert result[:2] == (mean, list(range(10)))
        assert result[2] == pytest.approx(mean, rel=1e-6), "batches count by their records"
        assert result[3] == [str(n) for n in range(10)]


def test_old_evaluations_are_removed(tmp_path):
    job, model, optimizer = started()
    for step in step_loop(job, model, optimizer):
        evaluated(job, model, batch_size=3)
        evaluated(job, model, batch_size=3)
        steps = sorted(
            int(path.name.split("-")[0]) for path in (tmp_path / "evaluations").iterdir()
        )
        assert steps == sorted([step, step] + ([step - 1, step - 1] if step else []))


def test_an_evaluation_takes_a_loader_and_repeats_nothing_in_the_next_batch_of_a_step(monkeypatch):
    loader = DataLoader(TensorDataset(*TEST), batch_size=4, shuffle=True, drop_last=True)
    monkeypatch.setattr(FakeLoop, "is_script", False)
    job, model, _ = started()
    seen = []
    for batch in job.batches(DATA, batch_size=BATCH):
        for _ in range(2):  # As if there were another batch of the same step.
            seen.append(sum(len(y) for _, y in watch(job, job.evaluate(loader))))
            assert job.gather("label").tolist() == list(range(8))
            job._turn = type(job._turn)(**vars(job._turn))
        model(batch).mean().backward()
        job.allreduce(model)
        job.commit()
        if len(seen) == 4:
            break
    assert seen == [8, 0, 0, 0], "the first step has the model of the check"


def watch(job, batches):
    for x, y in batches:
        job.record(label=y)
        yield x, y


def test_mean_takes_weights():
    job, model, optimizer = started()
    for _ in step_loop(job, model, optimizer):
        for x, _y in job.evaluate(TEST, batch_size=4):
            job.record(loss=float(x[0, 0]), n_tokens=len(x) * 2 if x[0, 0] else 0)
        break
    expected = (8.0 * 8 + 16.0 * 4) / 12
    assert job.mean("loss", weight="n_tokens") == expected
    assert job.mean("loss") == (0 * 4 + 8.0 * 4 + 16.0 * 2) / 10


def test_what_is_wrong_in_an_evaluation_is_named():
    job, model, optimizer = started()
    with pytest.raises(RuntimeError, match="before an evaluation"):
        job.mean("loss")
    for _ in step_loop(job, model, optimizer):
        with pytest.raises(RuntimeError, match="nothing was recorded"):
            for _x in job.evaluate(TEST, batch_size=5):
                pass
        for _x in job.evaluate(TEST, batch_size=5):
            job.record(a=1)
            break
        with pytest.raises(RuntimeError, match="left before its end"):
            job.mean("a")
        for number, _x in enumerate(job.evaluate(TEST, batch_size=5)):
            job.record(**{"a" if number == 0 else "b": 1, "text": ["x"]})
        with pytest.raises(RuntimeError, match="no `a` was recorded for batch 1"):
            job.mean("a")
        with pytest.raises(TypeError, match="`text` has no mean"):
            job.mean("text")
        with pytest.raises(RuntimeError, match="without a batch"):
            job.record(a=1)
        with pytest.raises(TypeError, match="`a` was recorded as a dict"):
            for _x in job.evaluate(TEST):
                job.record(a={})
        with pytest.raises(ValueError, match="batch_size=0"):
            job.evaluate(TEST, batch_size=0)
        break


def lines(path) -> list[tuple[int, dict]]:
    read = [json.loads(text) for text in path.read_text().splitlines() if text]
    return [(line["step"], line["metrics"]) for line in read]


def test_the_leader_logs_with_the_step_of_the_job(tmp_path):
    job, model, optimizer = started()
    for step in step_loop(job, model, optimizer):
        job.log({"a": torch.tensor(0.5 * step), "b": math.nan})
    expected = [(step, {"a": 0.5 * step, "b": None}) for step in range(N_STEPS)]
    assert lines(tmp_path / "logged" / "worker-0.jsonl") == expected
    with pytest.raises(TypeError, match="`x` is a str, not a number"):
        job.log({"x": "y"})
    with pytest.raises(ValueError, match="different metrics"):
        for n in range(201):
            job.log({f"at {n}": 1})


def test_others_log_what_a_lost_leader_has_not(tmp_path):
    tmp_path = tmp_path / "logged"
    leader, other, third = (Log(tmp_path, worker) for worker in range(3))
    for log in (leader, other, third):
        log.add(4, {"a": 1}, leads=log is leader, is_after_step=True)
        log.add(5, {"in_a_batch": 1}, leads=False, is_after_step=False)
    for log in (other, third):
        log.add(5, {"a": 2}, leads=False, is_after_step=True)  # The leader is lost.
        log.at(6, leads=log is third)
        log.at(7, leads=log is third)
    assert lines(tmp_path / "worker-0.jsonl") == [(4, {"a": 1})]
    found = [line for path in tmp_path.iterdir() for line in lines(path)]
    assert (5, {"a": 2}) in found and found.count((4, {"a": 1})) == 1


def test_a_worker_logs_nothing_of_the_batch_that_checks_it(tmp_path):
    log = Log(tmp_path / "logged", 3)
    log.add(0, {"a": 1}, leads=False, is_after_step=True)
    log.at(40, leads=True)
    assert not (tmp_path / "logged").exists()


def trained(best, values):
    job, model, optimizer = started(best=best)
    weights = []
    for step in step_loop(job, model, optimizer):
        best.update(values[step])
        weights.append(model.weight.flatten().tolist())
    return job, weights


def test_the_best_model_is_kept_and_training_ends(tmp_path):
    best = elasticdl.Best(mode="max", patience=2)
    job, weights = trained(best, [0.1, 0.5, 0.4, 0.5, 0.9, 0.9])
    assert (best.value, best.step, best.should_stop) == (0.5, 1, True)
    assert job.step == 4 and len(weights) == 4, "the step of the last update counts"
    output = tmp_path / "output"
    assert torch.load(output / "best_model.pt")["weight"].flatten().tolist() == weights[1]
    assert json.loads((output / "best_model.json").read_text()) == {"step": 1, "value": 0.5}
    assert sorted(path.name for path in output.iterdir() if "best" in path.name) == [
        "best_model.json",
        "best_model.pt",
    ]


def test_the_least_value_is_the_best_and_nan_never_is():
    best = elasticdl.Best(min_delta=0.1)
    trained(best, [math.nan, 1.0, 0.95, 0.5, math.nan, 0.45])
    assert (best.value, best.step, best.n_since) == (0.5, 3, 2)


def test_another_worker_writes_the_best_model_if_the_leader_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("elasticdl._best._LEADER_SECS", 0.1)
    monkeypatch.setattr("elasticdl._job.Job.is_leader", property(lambda _: False))
    monkeypatch.delenv("ELASTICDL_OUTPUT")
    monkeypatch.setenv("ELASTICDL_OUTPUT", str(tmp_path / "other"))
    trained(elasticdl.Best(), [3, 2, 1, 4, 5, 6])
    note = json.loads((tmp_path / "other" / "best_model.json").read_text())
    assert note == {"step": 2, "value": 1.0}


def test_a_worker_that_gets_the_state_of_the_end_ends_too():
    best = elasticdl.Best(patience=1)
    job, model, optimizer = started(best=best)
    steps = []
    for step in step_loop(job, model, optimizer):
        steps.append(step)
        if step == 1:
            best.load_state_dict({"value": 1.0, "step": 0, "n_since": 1, "end_step": 1})
    assert steps == [0, 1] and best.state_dict()["end_step"] == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "maximum"}, 'mode="maximum" is unknown'),
        ({"patience": 0}, "patience=0"),
        ({"file": "../best.pt"}, "must be a file name"),
    ],
)
def test_a_wrong_option_of_the_best_model_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        elasticdl.Best(**options)
    with pytest.raises(RuntimeError, match="does not know this object"):
        elasticdl.Best().update(1)
