# SPDX-License-Identifier: Apache-2.0
"""Compares embeddings on parameter servers with those of plain PyTorch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from elasticdl import ZooError  # noqa: E402
from elasticdl.torch import Embedding  # noqa: E402
from torch_fixtures import Batch, adapter, job, plain  # noqa: E402

N_IDS, DIM = 50, 4


class Scores(nn.Module):
    """A score per record from any embedding."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(ids)
        return self.head(rows.mean(1) if rows.dim() == 3 else rows).squeeze(1)


def squares(labels, predictions):
    return ((predictions - labels) ** 2).mean()


def batch_of(ids, first_record: int = 0) -> Batch:
    ids = np.asarray(ids)
    label = np.linspace(-1, 1, len(ids), dtype=np.float32)
    return Batch({"ids": ids, "label": label}, first_record)


def rows_for(model, batch: Batch, tables: list[np.ndarray]) -> list[np.ndarray]:
    """The rows that the training loop passes: those that `lookups` returned."""
    return [table[ids] for table, ids in zip(tables, model.lookups(batch))]


def summed(ids: np.ndarray, gradient: np.ndarray, n_rows: int) -> np.ndarray:
    """The gradient of the whole table, as summed by the training loop."""
    whole = np.zeros((n_rows, gradient.shape[1]), np.float32)
    np.add.at(whole, ids, gradient)
    return whole


def copied(module: nn.Module, model, weight: np.ndarray, name: str = "embedding") -> None:
    """Copies the values of the adapter and its table to a plain module."""
    with torch.no_grad():
        for own, theirs in zip(module.head.parameters(), model.module.head.parameters()):
            own.copy_(theirs)
        getattr(module, name).weight.copy_(torch.from_numpy(weight))


@pytest.fixture
def weight() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((N_IDS, DIM)).astype(np.float32)


@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_the_gradient_equals_that_of_nn_embedding(weight, padding_idx):
    model = adapter(
        lambda: Scores(Embedding(N_IDS, DIM, padding_idx=padding_idx)),
        squares,
        columns=batch_of([[0]]).columns,
    )
    module = plain(lambda: Scores(nn.Embedding(N_IDS, DIM, padding_idx=padding_idx)))
    if padding_idx is not None:
        weight[padding_idx] = 0
    copied(module, model, weight)
    ids = np.random.default_rng(2).integers(0, N_IDS, (8, 5))
    ids[0, :2] = 3, N_IDS - 1
    batch = batch_of(ids)

    named = model.lookups(batch)[0]
    loss, (gradient,) = model.train(batch, [weight[named]], 1)

    expected = squares(torch.from_numpy(batch.columns["label"]), module(torch.from_numpy(ids)))
    expected.backward()
    assert loss == expected.item()
    table = summed(named, gradient, N_IDS)
    assert np.array_equal(table, module.embedding.weight.grad.numpy())
    assert np.array_equal(model.gradient[:DIM], module.head.weight.grad.numpy()[0])


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("ragged", [False, True])
def test_combined_rows_equal_those_of_an_embedding_bag(weight, mode, ragged):
    layer = Embedding(N_IDS, DIM, combiner=mode)
    bag = nn.EmbeddingBag(N_IDS, DIM, mode=mode)
    layer.load_state_dict({"weight": torch.from_numpy(weight)})
    bag.load_state_dict({"weight": torch.from_numpy(weight)})
    ids = torch.randint(0, N_IDS, (12,))
    inputs = (ids, torch.tensor([0, 3, 3, 7])) if ragged else (ids.view(4, 3),)
    torch.testing.assert_close(layer(*inputs), bag(*inputs).detach())


def test_negative_ids_are_skipped_and_an_empty_bag_is_zeros(weight):
    rows = torch.from_numpy(weight)
    ids = torch.tensor([[1, 2, -1], [-1, -1, -1], [4, 4, 4]])
    for combiner, scale in (("sum", 1), ("mean", 2), ("sqrtn", 2**0.5)):
        layer = Embedding(N_IDS, DIM, combiner=combiner)
        layer.load_state_dict({"weight": rows})
        combined = layer(ids)
        torch.testing.assert_close(combined[0], (rows[1] + rows[2]) / scale)
        assert not combined[1].any()
    layer = Embedding(N_IDS, DIM)
    layer.load_state_dict({"weight": rows})
    assert not layer(ids)[1].any() and torch.equal(layer(ids)[0, 1], rows[2])


def test_weights_of_a_bag_scale_its_rows(weight):
    layer = Embedding(N_IDS, DIM, combiner="sum")
    bag = nn.EmbeddingBag(N_IDS, DIM, mode="sum", include_last_offset=True)
    layer.include_last_offset = True
    for one in layer, bag:
        one.load_state_dict({"weight": torch.from_numpy(weight)})
    ids, offsets, weights = torch.arange(6), torch.tensor([0, 2, 6]), torch.rand(6)
    torch.testing.assert_close(layer(ids, offsets, weights), bag(ids, offsets, weights).detach())


def test_a_layer_that_is_called_twice_gets_both_gradients(weight):
    class Twice(Scores):
        def forward(self, ids):
            first, second = self.embedding(ids[:, 0]), self.embedding(ids[:, 1:]).sum(1)
            first *= 2  # The input may be changed in place.
            return self.head(first + second).squeeze(1)

    model = adapter(lambda: Twice(Embedding(N_IDS, DIM)), squares, columns=batch_of([[0]]).columns)
    module = plain(lambda: Twice(nn.Embedding(N_IDS, DIM)))
    copied(module, model, weight)
    ids = np.array([[1, 2, 3], [1, 1, 4]])
    batch = batch_of(ids)
    for _ in range(2):  # The second recording stops at the last lookup.
        (named,) = model.lookups(batch)
        assert named.tolist() == [1, 1, 2, 3, 1, 4]
        rows = weight[named]
        _, (gradient,) = model.train(batch, [rows], 1)
        assert np.array_equal(rows, weight[named])
    squares(torch.from_numpy(batch.columns["label"]), module(torch.from_numpy(ids))).backward()
    expected = module.embedding.weight.grad.numpy()
    np.testing.assert_allclose(summed(named, gradient, N_IDS), expected, rtol=1e-6)


def test_a_recording_pass_stops_at_the_last_lookup():
    n_heads = []

    class Head(nn.Linear):
        def forward(self, x):
            n_heads.append(1)
            return super().forward(x)

    def model():
        scores = Scores(Embedding(N_IDS, DIM))
        scores.head = Head(DIM, 1)
        return scores

    found = adapter(model, squares, columns=batch_of([[0]]).columns)
    for _ in range(3):
        found.lookups(batch_of([[1, 2]]))
    assert len(n_heads) == 1


def test_passes_over_two_datasets_do_not_interfere(weight):
    model = adapter(lambda: Scores(Embedding(N_IDS, DIM)), squares, columns=batch_of([[0]]).columns)
    training, evaluation = batch_of([[1, 2]]), batch_of([[3, 4]])
    rows = [rows_for(model, batch, [weight]) for batch in (training, evaluation)]
    model.train(training, rows[0], 1)
    model.evaluate(evaluation, rows[1])


def test_ids_that_change_between_passes_are_refused(weight):
    class Masked(Scores):
        def forward(self, ids):
            return super().forward(torch.where(torch.rand(ids.shape) < 0.5, 0, ids))

    model = adapter(lambda: Masked(Embedding(N_IDS, DIM)), squares, columns=batch_of([[0]]).columns)
    batch = batch_of(np.arange(1, 33).reshape(4, 8))
    rows = rows_for(model, batch, [weight])
    with pytest.raises(ZooError, match="`embedding` changed between two passes over one batch"):
        model.train(batch, rows, 1)


class Nested(nn.Module):
    """Large and small, plain and tied embeddings, some deeply nested."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"a": Scores(nn.Embedding(200_000, DIM, padding_idx=0))})
        self.bag = nn.EmbeddingBag(200_000, DIM, mode="mean")
        self.small = nn.Embedding(10, DIM)
        self.tied = nn.Embedding(200_000, DIM)
        self.out = nn.Linear(DIM, 200_000, bias=False)
        self.out.weight = self.tied.weight
        nn.init.uniform_(self.bag.weight, -0.1, 0.1)

    def forward(self, ids):
        deep = self.towers["a"](ids)
        return deep + self.bag(ids).sum(1) + self.small(ids % 10).sum((1, 2))


def test_the_values_of_a_swapped_embedding_are_the_first_rows_of_its_table():
    pretrained = torch.arange(200_000.0 * DIM).reshape(-1, DIM)

    def custom_model():
        return Scores(nn.Embedding.from_pretrained(pretrained, freeze=False))

    model = adapter(custom_model, squares, columns=batch_of([[0]]).columns)
    assert model.spec["tables"] == [{"name": "embedding", "dim": DIM, "init": "given"}]
    assert np.array_equal(model.first_rows(0), pretrained.numpy())


def test_large_embeddings_are_replaced_and_restored_at_export(tmp_path):
    model = adapter(Nested, squares, columns=batch_of([[0]]).columns)
    tables = {table["name"]: table for table in model.spec["tables"]}
    assert list(tables) == ["towers.a.embedding", "bag"]
    assert {table["init"] for table in tables.values()} == {"given"}
    names = [param["name"] for param in model.spec["params"]]
    assert "small.weight" in names and "tied.weight" in names and "out.weight" not in names

    rng = np.random.default_rng(3)
    values = [rng.standard_normal((200_000, DIM)).astype(np.float32) for _ in range(2)]
    batch = batch_of(np.array([[0, 7, 199_999], [5, 7, 1]]))
    predicted = model.predict(batch, rows_for(model, batch, values))
    known = np.unique(batch.columns["ids"])
    rows = {name: (known, value[known]) for name, value in zip(tables, values)}
    rows["towers.a.embedding"][1][0] = 0  # The padding.
    model.export(str(tmp_path), model.dense, rows)

    module = Nested()
    module.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    module.eval()
    expected = module(torch.from_numpy(batch.columns["ids"])).detach().numpy()
    np.testing.assert_allclose(predicted[:, 0], expected, rtol=1e-5)


def test_a_weight_that_forward_reads_is_refused_by_name():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(200_000, DIM)

        def forward(self, ids):
            return nn.functional.linear(self.words(ids).mean(1), self.words.weight).sum(1)

    model = adapter(Tied, squares, columns=batch_of([[0]]).columns)
    with pytest.raises(RuntimeError, match="the embedding `words` has no `weight`"):
        model.lookups(batch_of([[1, 2]]))


def test_a_table_that_is_not_looked_up_has_an_empty_gradient(weight):
    class Unused(Scores):
        def __init__(self, embedding: nn.Module) -> None:
            super().__init__(embedding)
            self.other = Embedding(N_IDS, DIM)

    model = adapter(lambda: Unused(Embedding(N_IDS, DIM)), squares, columns=batch_of([[0]]).columns)
    batch = batch_of([[1, 2]])
    named = model.lookups(batch)
    assert [len(ids) for ids in named] == [2, 0]
    rows = [weight[ids] for ids in named]
    gradients = model.train(batch, rows, 1)[1]
    assert [(g.shape, g.dtype) for g in gradients] == [((2, DIM), "float32"), ((0, DIM), "float32")]


def test_without_parameter_servers_embeddings_stay_dense():
    model = adapter(
        Nested,
        squares,
        columns=batch_of([[0]]).columns,
        job=job(distribution_strategy="AllreduceStrategy"),
    )
    assert model.spec["tables"] == []


def test_a_table_with_arbitrary_ids_is_exported_with_them(tmp_path):
    def custom_model():
        return Scores(Embedding(None, DIM, init={"normal": {"mean": 0.0, "std": 0.02}}))

    model = adapter(custom_model, squares, columns=batch_of([[0]]).columns)
    assert model.spec["tables"][0]["init"] == {"normal": {"mean": 0.0, "std": 0.02}}
    batch = batch_of(np.array([[2**62, 5], [5, 9]]))
    (named,) = model.lookups(batch)
    rows = np.stack([np.full(DIM, id % 7, np.float32) for id in named])
    predicted = model.predict(batch, [rows])
    model.export(str(tmp_path), model.dense, {"embedding": (named[:2], rows[:2])})

    module = custom_model().eval()
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state["embedding.ids"].tolist() == [5, 2**62]
    module.load_state_dict(state)
    found = module(torch.from_numpy(batch.columns["ids"])).detach().numpy()
    assert found[0] == predicted[0, 0]
    assert found[1] != predicted[1, 0], "9 is not in the export, so its row is zeros"


def test_a_model_that_has_only_tables(weight):
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = Embedding(N_IDS, DIM, combiner="sum")

        def forward(self, ids):
            return self.embedding(ids).sum(1)

    model = adapter(Sums, squares, columns=batch_of([[0]]).columns)
    batch = batch_of([[1, 2], [3, -1]])
    assert len(model.dense) == 0 and model.spec["params"] == []
    _, (gradient,) = model.train(batch, rows_for(model, batch, [weight]), 1)
    assert gradient.shape == (3, DIM) and gradient.any()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Embedding(5, 2, combiner="max"), ValueError, "`combiner` is 'max'"),
        (lambda: Embedding(5, 2, init="ones"), ValueError, "`init` is 'ones'"),
        (lambda: Embedding(5, 2)(torch.tensor([1.5])), TypeError, "must be integers"),
        (lambda: Embedding(5, 2)(torch.tensor([7])), IndexError, "embedding id 7 is too large"),
        (lambda: Embedding(5, 2)(torch.tensor([1])), RuntimeError, "no rows outside a job"),
    ],
)
def test_wrong_use_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_missing_torch_is_reported_in_one_line():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n    import elasticdl.torch\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = "PyTorch is not installed; install it with `pip install elasticdl[torch]`\n"
    assert found.stdout == expected
