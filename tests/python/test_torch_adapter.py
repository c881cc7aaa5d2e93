# SPDX-License-Identifier: Apache-2.0
"""Compares the adapter of torch modules with plain PyTorch."""

from __future__ import annotations

import functools
import random
import threading
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from elasticdl import ZooError  # noqa: E402
from torch_fixtures import Batch, adapter, images, job, plain  # noqa: E402

N_CLASSES = 10


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(4 * 13 * 13, N_CLASSES),
    )


def cross_entropy(labels, predictions):
    return functional.cross_entropy(predictions, labels)


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, N_CLASSES))


def named(model, vector: np.ndarray) -> dict[str, np.ndarray]:
    """The parts of a flat vector by name."""
    pieces, at = {}, 0
    for param in model.spec["params"]:
        n_numbers = int(np.prod(param["shape"]))
        pieces[param["name"]] = vector[at : at + n_numbers].reshape(param["shape"])
        at += n_numbers
    assert at == len(vector)
    return pieces


def test_gradients_are_bit_identical_to_plain_autograd():
    model = adapter(cnn, cross_entropy)
    module = plain(cnn)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    batch = images(32)
    torch.manual_seed(7)
    labels = torch.from_numpy(batch.columns["label"])
    loss = cross_entropy(labels, module(torch.from_numpy(batch.columns["image"])))
    loss.backward()

    found, rows = model.train(batch, [], 7)

    assert found == loss.item()
    assert rows == []
    gradient = named(model, model.gradient)
    for name, parameter in module.named_parameters():
        assert np.array_equal(gradient[name], parameter.grad.numpy()), name
    for name in ("2.running_mean", "2.running_var"):
        difference = module.get_buffer(name) - before[name]
        assert np.array_equal(gradient[name], difference.numpy()), name
        assert np.any(gradient[name] != 0)


def test_a_gradient_in_several_parts_is_the_same_gradient():
    def custom_model():
        module = cnn()
        module[1].bias.requires_grad_(False)
        return module

    model = adapter(custom_model, cross_entropy)
    batch = images(8)
    expected, _ = model.train(batch, [], 7)
    whole = model.gradient.copy()
    found, pieces, rows = model.train_in_pieces(batch, [], 7)
    assert found == expected and rows == []
    assert np.array_equal(np.concatenate(pieces), whole)


def test_initial_values_equal_those_of_the_plain_module_with_the_same_seed():
    model = adapter(cnn, cross_entropy)
    values = named(model, model.dense)
    state = plain(cnn).state_dict()
    assert set(values) == set(state)
    for name, value in values.items():
        assert np.array_equal(value, state[name].numpy()), name


def test_a_pass_does_not_depend_on_earlier_passes():
    model = adapter(cnn, cross_entropy)
    batch = images(16)
    first = model.train(batch, [], 2**64 - 1)[0], model.gradient.copy()
    dense = model.dense.copy()

    model.train(images(8, seed=5), [], 3)
    model.evaluate(batch, [])
    model.predict(batch, [])
    random.random(), np.random.rand(), torch.rand(3)
    model.gradient.fill(np.nan)

    assert np.array_equal(model.dense, dense)
    again = model.train(batch, [], 2**64 - 1)[0], model.gradient
    assert first[0] == again[0]
    assert np.array_equal(first[1], again[1])
    assert model.train(batch, [], 1)[0] != first[0], "dropout depends on the seed"


def test_a_failed_pass_does_not_affect_later_passes():
    fails = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            if fails:
                raise RuntimeError("an error in backward")
            return gradient

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(784, 8), nn.Linear(8, N_CLASSES)

        def forward(self, x):
            return self.second(Fails.apply(self.first(x.flatten(1))))

    model = adapter(Model, cross_entropy)
    batch = images(4)
    model.train(batch, [], 1)
    expected = model.gradient.copy()
    fails.append(True)
    with pytest.raises(RuntimeError, match="an error in backward"):
        model.train(batch, [], 1)
    fails.clear()
    model.train(batch, [], 1)
    assert np.array_equal(model.gradient, expected)


def test_a_pass_on_another_thread_is_bit_identical():
    model = adapter(cnn, cross_entropy)
    batch = images(16)
    model.train(batch, [], 3)
    expected = model.gradient.copy()
    found = []

    def train():
        model.train(batch, [], 3)
        found.append((torch.get_num_threads(), np.array_equal(model.gradient, expected)))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [(1, True)]


def test_a_sparse_gradient_is_converted_to_a_dense_one():
    def custom_model(sparse=True):
        return nn.Sequential(nn.Embedding(8, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 10))

    columns = {"ids": np.array([[1, 1, 2], [3, 1, 5]]), "label": np.array([0, 1])}
    sparse, dense = (
        adapter(functools.partial(custom_model, sparse), cross_entropy, columns=columns)
        for sparse in (True, False)
    )
    for model in sparse, dense:
        model.train(Batch(columns), [], 1)
    assert np.array_equal(sparse.gradient, dense.gradient)


def test_parameters_written_to_dense_are_used():
    model = adapter(cnn, cross_entropy)
    batch = images(16)
    module = plain(cnn)
    with torch.no_grad():
        for number, value in enumerate([*module.parameters(), *module.buffers()]):
            value.add_(0.01 * number if value.is_floating_point() else number)
    for name, piece in named(model, model.dense).items():
        piece[...] = module.state_dict()[name].numpy()
    module.eval()
    expected = module(torch.from_numpy(batch.columns["image"])).detach().numpy()
    assert np.array_equal(model.predict(batch, []), expected)


def test_every_random_number_depends_on_the_seed():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(784, N_CLASSES)
            self.own = torch.Generator()

        def forward(self, x):
            noise = random.random() + np.random.rand() + torch.rand(1, generator=self.own)
            return self.linear(x.flatten(1)) * (noise + torch.rand(1))

    model = adapter(Noisy, cross_entropy)
    batch = images(4)
    assert model.train(batch, [], 9)[0] == model.train(batch, [], 9)[0]
    assert model.train(batch, [], 9)[0] != model.train(batch, [], 10)[0]


def test_state_outside_the_vector_is_reset_for_every_pass():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(784, N_CLASSES)
            number = torch.zeros((), dtype=torch.int64)
            self.register_buffer("n_passes", number, persistent=is_persistent)
            self.register_buffer("cache", torch.zeros(3), persistent=False)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.n_passes += 1
            self.cache = self.cache + 1
            self.mean = 0.5 * self.mean + 0.5
            return self.linear(x.flatten(1)) * self.n_passes * self.cache.sum()

    is_persistent = True
    batch = images(4)
    with pytest.raises(ZooError, match="changed the integer buffer `n_passes`, .* make it a float"):
        adapter(Counting, cross_entropy).train(batch, [], 1)
    is_persistent = False
    model = adapter(Counting, cross_entropy)
    assert [p["name"] for p in model.spec["params"]] == ["linear.weight", "linear.bias", "mean"]
    losses = {model.train(batch, [], 1)[0] for _ in range(3)}
    assert len(losses) == 1
    assert np.array_equal(model.gradient[-3:], [0.5] * 3)
    assert np.array_equal(model.dense[-3:], [0.0] * 3)


def test_tied_frozen_and_unused_parameters():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(784, 784)
            self.second = nn.Linear(784, 784)
            self.second.weight = self.first.weight
            self.frozen = nn.Linear(784, N_CLASSES)
            self.frozen.requires_grad_(False)
            self.unused = nn.Linear(2, 2)

        def forward(self, x):
            return self.frozen(self.second(self.first(x.flatten(1))))

    model = adapter(Odd, cross_entropy)
    module = plain(Odd)
    batch = images(4)
    image, label = (torch.from_numpy(batch.columns[name]) for name in ("image", "label"))
    cross_entropy(label, module(image)).backward()
    model.gradient.fill(np.nan)
    model.train(batch, [], 1)
    gradient = named(model, model.gradient)
    assert "second.weight" not in gradient
    assert np.array_equal(gradient["first.weight"], module.first.weight.grad.numpy())
    for name in ("frozen.weight", "frozen.bias", "unused.weight"):
        assert not gradient[name].any()
    rules = {param["name"]: param["rule"] for param in model.spec["params"]}
    assert rules["frozen.weight"] == "moving_average"
    assert rules["unused.weight"] == {"trainable": {"decay": True}}


def test_parameters_that_the_optimizer_does_not_have_are_frozen():
    def optimizer(parameters):
        return torch.optim.SGD(parameters[:1], lr=0.1)

    model = adapter(linear, cross_entropy, optimizer=optimizer)
    assert model.spec["params"][1]["rule"] == "moving_average"
    model.train(images(4), [], 1)
    assert model.gradient[:784].any() and not model.gradient[-N_CLASSES:].any()


def test_the_spec_describes_the_model():
    def optimizer(parameters):
        weights = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}
        rest = {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0}
        return torch.optim.SGD([weights, rest], lr=0.5)

    model = adapter(linear, cross_entropy, optimizer=optimizer)
    assert model.spec["name"] == "zoo.custom_model"
    decays = [param["rule"]["trainable"]["decay"] for param in model.spec["params"]]
    assert decays == [True, False]
    assert model.spec["optimizer"]["learning_rate"] == 0.5
    assert [metric["name"] for metric in model.spec["metrics"]] == ["loss"]
    assert model.spec["inputs"][0]["name"] == "image"
    assert model.spec["tables"] == [] and model.lookups(images(2)) == []


def test_an_optimizer_can_have_a_scheduler():
    def optimizer(parameters):
        made = torch.optim.SGD(parameters, lr=0.5)
        return made, torch.optim.lr_scheduler.ExponentialLR(made, gamma=0.5), *every

    every = ("step",)
    model = adapter(linear, cross_entropy, optimizer=optimizer)
    assert model.spec["optimizer"]["learning_rate"] == 0.5
    assert list(model.spec["optimizer"]["schedule"]) == ["exponential"]
    every = ("epoch",)
    steps = job(max_step=5, epoch_steps=2)
    model = adapter(linear, cross_entropy, optimizer=optimizer, job=steps)
    expected = {"table": {"starts": [0, 2, 4], "factors": [1.0, 0.5, 0.25]}}
    assert model.spec["optimizer"]["schedule"] == expected
    every = ()
    with pytest.raises(ZooError, match="`ExponentialLR` can count steps or epochs"):
        adapter(linear, cross_entropy, optimizer=optimizer)


def test_batch_norms_count_their_batches(tmp_path):
    model = adapter(cnn, cross_entropy)
    for _ in range(3):
        model.train(images(4), [], 1)
        model.dense[len(model.dense) - len(model._flat.changes) :] += model._flat.changes
    model.export(str(tmp_path), model.dense, {})
    state = torch.load(tmp_path / "model.pt")
    counters = {name: value for name, value in state.items() if "num_batches" in name}
    assert counters and all(value == 3 for value in counters.values()), counters
    assert all(value.dtype == torch.int64 for value in counters.values())


@pytest.mark.parametrize(
    "loss",
    [
        cross_entropy,
        functional.cross_entropy,
        nn.CrossEntropyLoss(),
        lambda labels, predictions: functional.cross_entropy(predictions, labels, reduction="none"),
        lambda output, target: functional.cross_entropy(output, target),
    ],
)
def test_losses_in_either_order_and_per_record_give_one_number(loss):
    batch = images(8)
    found, _ = adapter(linear, loss).train(batch, [], 1)
    expected, _ = adapter(linear, cross_entropy).train(batch, [], 1)
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_is_not_a_number_is_returned():
    model = adapter(linear, lambda labels, predictions: predictions.sum() * float("nan"))
    assert np.isnan(model.train(images(4), [], 1)[0])


def test_metrics_add_up():
    def accuracy(labels, predictions):
        return (predictions.argmax(1) == labels).float()

    model = adapter(linear, cross_entropy, eval_metrics_fn=lambda: {"accuracy": accuracy})
    batch = images(8)
    loss, sums = model.evaluate(batch, [])
    right = (model.predict(batch, []).argmax(1) == batch.columns["label"]).sum()
    assert sums["accuracy"] == [right, 8.0]
    assert sums["loss"] == [loss * 8, 8.0]


def test_several_columns_are_a_dict_and_several_outputs_are_concatenated():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, features):
            return {"a": self.linear(features["x"]), "b": features["y"]}

    columns = {"x": np.ones((4, 3), np.float32), "y": np.ones((4,), np.float32)}
    model = adapter(Two, lambda labels, predictions: predictions["a"].sum(), columns=columns)
    batch = Batch(columns)
    assert model.predict(batch, []).shape == (4, 3)
    model.train(batch, [], 1)
    assert model.gradient[:6].any()


def test_an_export_predicts_the_same_in_plain_torch(tmp_path):
    model = adapter(cnn, cross_entropy)
    model.dense += 0.01
    batch = images(8)
    model.train(batch, [], 1)
    assert model.export(str(tmp_path), model.dense, {}) == ["model.pt"]
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    module = cnn()
    module.load_state_dict(state)
    module.eval()
    expected = module(torch.from_numpy(batch.columns["image"])).detach().numpy()
    assert np.array_equal(model.predict(batch, []), expected)
    assert int(state["2.num_batches_tracked"]) == 0


def test_common_layers_run_with_deterministic_algorithms():
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(256, 8)
            self.bag = nn.EmbeddingBag(256, 8)
            self.lstm = nn.LSTM(8, 8, batch_first=True)
            self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.conv = nn.ConvTranspose2d(1, 1, 3)
            self.pool = nn.AdaptiveAvgPool2d(4)
            self.head = nn.Linear(8, N_CLASSES)

        def forward(self, x):
            ids = x.flatten(1)[:, :6].long()
            words = self.attention(self.lstm(self.embedding(ids))[0]).mean(1) + self.bag(ids)
            picture = functional.interpolate(self.conv(x.unsqueeze(1)), scale_factor=0.5)
            picture = functional.max_pool2d(functional.pad(picture, (1, 1, 1, 1), "reflect"), 2)
            cells = self.pool(picture).flatten(1).cumsum(1)
            counts = torch.zeros(len(x), 8).scatter_add(1, ids % 8, torch.ones(ids.shape))
            return self.head(words + cells[:, :8] + counts[torch.arange(len(x))])

    model = adapter(Layers, cross_entropy)
    batch = images(4)
    model.train(batch, [], 1)
    first = model.gradient.copy()
    model.train(batch, [], 1)
    assert np.array_equal(model.gradient, first)


def wrong_loss(labels, predictions):
    return predictions.sum(0)


def half_feed(columns, mode, metadata):
    return columns["image"][:2], columns["label"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"custom_model": lambda: "a model"},
            "`zoo.custom_model` returned a str; return a torch.nn.Module",
        ),
        (
            {"custom_model": lambda: linear().double()},
            "the parameter `1.weight` is float64, but parameters must be float32; call `.float()` "
            "on the model",
        ),
        (
            {"custom_model": lambda: nn.LazyLinear(3)},
            "the parameter `weight` gets its shape from the first batch; use a layer with explicit "
            "sizes instead of a lazy one, or run a batch through the model first",
        ),
        (
            {"custom_model": lambda: nn.BatchNorm1d(3, momentum=None)},
            "the batch norm `BatchNorm1d` has momentum=None, which averages over all batches of "
            "one process; set a momentum, for example 0.1",
        ),
        (
            {"loss": wrong_loss},
            "`loss` returned values of shape [10] for 4 records; return one number per record or "
            "their mean",
        ),
        ({"loss": lambda labels, _: 1.0}, "`loss` returned a float; return a tensor"),
        (
            {"feed": half_feed},
            "`feed` returned features of 2 records for a batch of 4; it must not change the number "
            "of records",
        ),
        (
            {"feed": lambda columns, mode, metadata: columns},
            "`feed` returned a dict; return a tuple (features, labels)",
        ),
        (
            {"optimizer": lambda parameters: "sgd"},
            "`optimizer` returned a str; return a torch.optim.Optimizer",
        ),
    ],
)
def test_errors_are_one_line(parts, message):
    with pytest.raises(ZooError) as error:
        parts = {"custom_model": linear, "loss": cross_entropy, **parts}
        adapter(**parts).train(images(4), [], 1)
    assert str(error.value) == message


def test_an_error_in_user_code_is_not_changed():
    def feed(columns, mode, metadata):
        raise KeyError("picture")

    with pytest.raises(KeyError, match="picture"):
        adapter(linear, cross_entropy, feed=feed).train(images(4), [], 1)


def test_feed_receives_the_mode_and_the_columns():
    seen = []

    def feed(columns, mode, metadata):
        seen.append((mode, metadata.column_names, isinstance(metadata, types.SimpleNamespace)))
        return columns["image"], columns["label"]

    model = adapter(linear, cross_entropy, feed=feed)
    model.train(images(4), [], 1)
    model.evaluate(images(4), [])
    model.predict(images(4), [])
    modes = ["training", "evaluation", "prediction"]
    assert seen == [(mode, ["image", "label"], True) for mode in modes]


def test_the_number_of_threads_is_that_of_the_job():
    adapter(linear, cross_entropy, job=job(threads_per_worker=2))
    assert torch.get_num_threads() == 2
    adapter(linear, cross_entropy)
    assert torch.get_num_threads() == 1
