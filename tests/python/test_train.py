# SPDX-License-Identifier: Apache-2.0
"""Whole jobs with Keras and PyTorch models: real processes, killed with real signals."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import DATA, ZOO, Cluster
from elasticdl._export import read_safetensors

KERAS = "mnist.mnist_functional_api.custom_model"
TORCH = "mnist.mnist_torch.custom_model"


def job_flags(name: str, model: str, **more: object) -> list[str]:
    """The flags of a job on the shipped images."""
    flags = {
        "model_zoo": ZOO,
        "model_def": model,
        "training_data": DATA / "train",
        "job_name": name,
        "num_workers": 1,
        "checkpoint_secs": 0,
        "evaluation_epochs": "false",
        **more,
    }
    return [f"--{flag}={value}" for flag, value in flags.items() if value is not None]


def accuracies(log: str) -> dict[int, float]:
    """The evaluations of a master's log: version to accuracy."""
    found = re.findall(r"Evaluation metrics\[v=(\d+)\].*?accuracy\D+([0-9.]+)", log)
    return {int(version): float(accuracy) for version, accuracy in found}


def weights(job: Path) -> str:
    return hashlib.sha256((job / "output" / "model.safetensors").read_bytes()).hexdigest()


def kill_a_worker(cluster: Cluster, job: subprocess.Popen[str], name: str) -> None:
    """Kills a worker of a running job."""

    def pid() -> int | None:
        if job.poll() is not None:
            raise AssertionError("the job ended early:\n" + job.communicate()[1])
        written = cluster.written_status(name)
        if not written or int(written["step"]) <= 5:
            return None
        # A short job may have ended after its master wrote the status.
        workers = [i for i in cluster.status(name)["instances"] if i["role"] == "worker"]
        return next((int(worker["pid"]) for worker in workers if worker.get("pid")), None)

    os.kill(cluster.wait("training", pid), signal.SIGKILL)


# `enough` is a step early in the second epoch, by which the model must have learned. With two
# workers, a step trains twice as many records.
@pytest.mark.parametrize(
    ("strategy", "enough"),
    [
        ("--distribution_strategy=ParameterServerStrategy --num_ps_pods=1 --num_workers=1", 170),
        ("--distribution_strategy=AllreduceStrategy --num_workers=2", 100),
    ],
    ids=["servers", "allreduce"],
)
def test_the_tutorials_command_learns(cluster: Cluster, strategy: str, enough: int) -> None:
    cluster.run(
        "train",
        f"--model_zoo={ZOO}",
        f"--model_def={KERAS}",
        f"--training_data={DATA / 'train'}",
        f"--validation_data={DATA / 'test'}",
        "--num_epochs=2",
        f"--max_step={enough}",
        "--minibatch_size=64",
        "--num_minibatches_per_task=2",
        f"--evaluation_steps={enough}",
        "--job_name=test-mnist",
        *strategy.split(),
    )
    log = cluster.log("test-mnist", "master")
    found = accuracies(log)
    assert found, log
    assert max(value for version, value in found.items() if version <= enough) >= 0.77, found
    assert "Loss = " in cluster.log("test-mnist", "worker-0")
    assert (cluster.job("test-mnist") / "output" / "model.keras").is_file()
    cluster.run("audit", "test-mnist")


# Each worker imports its framework, which is slow with TensorFlow.
@pytest.mark.parametrize(
    ("model", "numbers"), [(KERAS, (1, 2)), (TORCH, (1, 3))], ids=["keras", "torch"]
)
def test_results_are_bit_identical_for_any_number_of_workers(
    cluster: Cluster, model: str, numbers: tuple[int, ...]
) -> None:
    found = {}
    for n_workers in numbers:
        name = f"bits-{n_workers}"
        more = {"num_workers": n_workers, "lanes": 4, "minibatch_size": 8, "max_step": 12}
        allreduce = {"distribution_strategy": "AllreduceStrategy"}
        cluster.run("train", *job_flags(name, model, **more, **allreduce), "--detach")
        # Until all of its results are there, also those in the format of its framework.
        cluster.run("wait", name)
        found[n_workers] = weights(cluster.job(name))
    assert len(set(found.values())) == 1, found
    if model == TORCH:
        assert_plain_torch_loads_the_same(cluster.job(name) / "output")


def assert_plain_torch_loads_the_same(output: Path) -> None:
    import torch

    state = torch.load(output / "model.pt", weights_only=True)
    for name, value in read_safetensors(output / "model.safetensors").items():
        np.testing.assert_array_equal(state[name].numpy(), value)


@pytest.mark.parametrize("model", [KERAS, TORCH], ids=["keras", "torch"])
def test_a_killed_worker_loses_no_record(cluster: Cluster, model: str) -> None:
    # Half of the images last long enough for the kill.
    data = {"training_data": DATA / "train" / "data-0000[01].recordio"}
    flags = job_flags("killed", model, num_workers=2, minibatch_size=32, **data)
    job = cluster.start("train", *flags)
    kill_a_worker(cluster, job, "killed")
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, out + err
    cluster.run("audit", "killed")


def test_python_m_elasticdl_is_the_command(cluster: Cluster) -> None:
    assert "elasticdl" in cluster.run("--version").stdout
    assert cluster.run("no_such_command", code=2).stderr


BROKEN = {
    "import": ("import no_such_package_here\n", ["ModuleNotFoundError", "no_such_package_here"]),
    "symbol": ("import torch\n", ["custom_model", "CustomModel"]),
    "loss": (
        "import torch\n"
        "def custom_model(): return torch.nn.Flatten()\n"
        "def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)\n",
        ["`loss`", "--loss"],
    ),
    "optimizer": (
        "import torch\n"
        "def custom_model(): return torch.nn.Linear(784, 10)\n"
        "def loss(labels, predictions): return predictions.mean()\n"
        "def optimizer(parameters): return torch.optim.LBFGS(parameters)\n",
        ["LBFGS", "Adam"],
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_module_is_refused_before_anything_starts(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    code, expected = BROKEN[kind]
    (tmp_path / "broken.py").write_text(code)
    err = cluster.run("train", *job_flags("broken", str(tmp_path / "broken.py")), code=2).stderr
    for words_ in expected:
        assert words_ in err, err
    assert not cluster.job("broken").exists()


TORCH_MODEL = """
import os

import numpy as np
import torch

def custom_model():
    return {model}

def loss(labels, predictions):
    return {loss}

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def feed(batch, mode, metadata):
    images = batch["image"].reshape(-1, 784).astype(np.float32)
    return {feed}

def eval_metrics_fn():
    return {{"accuracy": lambda labels, predictions: {metric}}}
"""

KERAS_MODEL = """
import keras
import tensorflow as tf

def custom_model():
    image = keras.Input((28, 28), name="image")
    {model}

def loss(labels, predictions):
    return {loss}

def optimizer():
    return keras.optimizers.SGD(0.1)

def feed(dataset, mode, metadata):
    kinds = [tf.io.FixedLenFeature([], kind) for kind in (tf.string, tf.int64)]

    def parse(record):
        row = tf.io.parse_single_example(record, dict(zip(["image", "label"], kinds)))
        image = tf.reshape(tf.io.decode_raw(row["image"], tf.uint8), [28, 28])
        return tf.cast(image, tf.float32) / 255, row["label"]

    return dataset.map(parse)

def eval_metrics_fn():
    return {{"accuracy": keras.metrics.SparseCategoricalAccuracy()}}
"""

# Parts of modules that fit the images.
TORCH_PARTS = {
    "model": "torch.nn.Linear(784, 10)",
    "loss": "torch.nn.functional.cross_entropy(predictions, labels)",
    "feed": "images, batch.get('label')",
    "metric": "predictions.argmax(1) == labels",
}
KERAS_PARTS = {
    "model": "return keras.Model(image, keras.layers.Dense(10)(keras.layers.Flatten()(image)))",
    "loss": "keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)",
}

TRAINED = "cannot train the first batch of the training data: 64 records with "
FED = "`feed` returned the features float32 [64, 784] and the labels int64 [64]"
KERAS_FED = "`feed` returned the features float32 [64, 28, 28] and the labels int64 [64]"

# What does not fit the images: the framework, its parts, and what the refusal says.
MISFITS = {
    "model": (
        (TORCH_MODEL, TORCH_PARTS),
        {"model": "torch.nn.Linear(28, 10)"},
        [
            TRAINED + "`image` uint8 [64, 784], `label` int64 [64]:",
            FED,
            "mat1 and mat2 shapes cannot be multiplied (64x784 and 28x10)",
        ],
    ),
    "loss": (
        (TORCH_MODEL, TORCH_PARTS),
        {"loss": "torch.nn.functional.mse_loss(predictions, labels.float())"},
        [TRAINED, FED, "in loss", "The size of tensor a (10) must match"],
    ),
    "shape of the loss": (
        (TORCH_MODEL, TORCH_PARTS),
        {"loss": "predictions.mean(0)"},
        [TRAINED, "`loss` returned values of shape [10] for 64 records"],
    ),
    "records": (
        (TORCH_MODEL, TORCH_PARTS),
        {"feed": "images[:-1], batch['label'][:-1]"},
        [TRAINED, "`feed` returned features of 63 records for a batch of 64", "change the number"],
    ),
    "exception": (
        (TORCH_MODEL, TORCH_PARTS),
        {"feed": "images, batch['no_such_column']"},
        [TRAINED, "in feed", "KeyError: 'no_such_column'"],
    ),
    "metric": (
        (TORCH_MODEL, TORCH_PARTS),
        {"metric": "predictions == labels"},
        [
            "cannot evaluate the first batch of the validation data: 64 records with `image`",
            FED,
            "The size of tensor a (10) must match",
        ],
    ),
    "Keras model": (
        (KERAS_MODEL, KERAS_PARTS),
        {"model": "return keras.Sequential([keras.Input((14, 14)), keras.layers.Dense(10)])"},
        [TRAINED, KERAS_FED, "input shape to have value 14, but received"],
    ),
    "Keras loss": (
        (KERAS_MODEL, KERAS_PARTS),
        {"loss": "keras.losses.categorical_crossentropy(labels, predictions)"},
        [TRAINED, KERAS_FED, "in loss"],
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_module_that_does_not_fit_the_data_is_refused_before_anything_starts(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    (template, parts), changed, expected = MISFITS[kind]
    (tmp_path / "misfit.py").write_text(template.format(**parts | changed))
    more = {"num_ps_pods": 0} if kind == "loss" else {}
    flags = job_flags("misfit", str(tmp_path / "misfit.py"), validation_data=DATA / "test", **more)
    err = cluster.run("train", *flags, code=2).stderr
    for words_ in expected:
        assert words_ in err, err
    assert err.count("Traceback (most recent call last)") <= 1, err
    assert not cluster.job("misfit").exists()


FAILING = (
    TORCH_MODEL.format(**TORCH_PARTS | {"feed": "fed(images, batch)"})
    + """
def fed(images, batch):
    {body}
"""
)

# Only workers fail: these stand for records that come later than the first batch.
FEEDS = {
    "exception": ("raise RuntimeError('a bug in user code')", ["a bug in user code", "in fed"]),
    "records": ("return images[:-1], batch['label'][:-1]", ["records", "change the number"]),
    "nan": (
        "return images * np.float32('nan'), batch['label']",
        ["the loss is not finite"],
    ),
}


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [(kind, "ParameterServerStrategy") for kind in FEEDS] + [("exception", "AllreduceStrategy")],
)
def test_an_error_in_user_code_fails_the_job_once_with_its_traceback(
    cluster: Cluster, tmp_path: Path, kind: str, strategy: str
) -> None:
    body, expected = FEEDS[kind]
    if kind != "nan":  # Which is no error of the module, so it is left to the job.
        body = f"if 'ELASTICDL_WORKER_ID' in os.environ: {body}\n    return images, batch['label']"
    (tmp_path / "failing.py").write_text(FAILING.replace("{body}", body))
    more = {"num_workers": 2, "distribution_strategy": strategy}
    flags = job_flags("failing", str(tmp_path / "failing.py"), **more)
    done = cluster.run("train", *flags, code=1)
    printed = done.stdout + done.stderr
    for part in [*expected, "worker-", "records "]:
        assert part in printed, printed


HANGING = FAILING.replace(
    "{body}",
    """import pathlib, ctypes
    mark = pathlib.Path(os.environ["HANG_ONCE"])
    if "ELASTICDL_WORKER_ID" in os.environ and mark.exists():
        mark.unlink()
        # Holds the interpreter lock forever: no other Python thread of the process runs again.
        ctypes.PyDLL(None).pause()
    return images, batch['label']""",
)


@pytest.mark.parametrize("strategy", ["ParameterServerStrategy", "AllreduceStrategy"])
def test_a_worker_that_holds_the_interpreter_forever_is_replaced(
    cluster: Cluster, tmp_path: Path, strategy: str
) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    mark = tmp_path / "hang"
    mark.touch()
    flags = job_flags(
        "hanging",
        str(tmp_path / "hanging.py"),
        num_workers=2,
        max_step=20,
        task_timeout_secs=5,
        distribution_strategy=strategy,
    )
    cluster.run("train", *flags, HANG_ONCE=str(mark))
    assert not mark.exists()
    cluster.run("audit", "hanging")


EMBEDDING = """
import keras

import elasticdl.layers

def custom_model():
    ids = keras.Input((1,), dtype="int64", name="id")
    rows = elasticdl.layers.Embedding(8, input_dim=N_IDS, name="rows")(ids)
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))

def loss(labels, predictions):
    truth = keras.ops.reshape(keras.ops.cast(labels, "float32"), (-1, 1))
    return keras.losses.binary_crossentropy(truth, predictions, from_logits=True)

def optimizer():
    return keras.optimizers.Adam(learning_rate=0.05)

def feed(dataset, mode, metadata):
    return dataset.map(lambda columns: (columns["id"][None], columns["label"]))

def eval_metrics_fn():
    right = lambda labels, predictions: (predictions[:, 0] > 0) == (labels == 1)
    return {"accuracy": right}

N_IDS = 500
"""


def test_embeddings_are_on_the_servers_and_are_restored_at_export(
    cluster: Cluster, tmp_path: Path
) -> None:
    data = tmp_path / "odd.csv"
    data.write_text("id,label\n" + "".join(f"{n % 500},{n % 500 % 2}\n" for n in range(4000)))
    (tmp_path / "odd.py").write_text(EMBEDDING)
    flags = job_flags(
        "odd",
        str(tmp_path / "odd.py"),
        training_data=data,
        validation_data=data,
        num_workers=2,
        num_ps_pods=2,
        evaluation_epochs="true",
        num_epochs=2,
    )
    cluster.run("train", *flags)
    found = re.findall(r"'accuracy': ([0-9.]+)", cluster.log("odd", "master"))
    assert found and float(found[-1]) > 0.99, found
    output = cluster.job("odd") / "output"
    tensors = read_safetensors(output / "model.safetensors")
    assert sorted(tensors["rows.ids"]) == list(range(500))
    code = (
        "import keras, numpy as np\n"
        f"model = keras.saving.load_model({str(output / 'model.keras')!r})\n"
        "predicted = model(np.arange(500).reshape(-1, 1)).numpy()[:, 0] > 0\n"
        "assert (predicted == (np.arange(500) % 2 == 1)).mean() > 0.99\n"
    )
    subprocess.run([sys.executable, "-c", code], env=cluster.env, check=True)
    cluster.run("audit", "odd")


def test_hybrid_is_bit_identical_with_a_worker_killed(cluster: Cluster, tmp_path: Path) -> None:
    data = tmp_path / "odd.csv"
    data.write_text("id,label\n" + "".join(f"{n % 500},{n % 500 % 2}\n" for n in range(8000)))
    (tmp_path / "odd.py").write_text(EMBEDDING)
    flags = {
        "training_data": data,
        "distribution_strategy": "HybridStrategy",
        "num_ps_pods": 1,
        "lanes": 2,
        "minibatch_size": 8,
        "num_epochs": 1,
    }
    undisturbed = job_flags("undisturbed", str(tmp_path / "odd.py"), **flags)
    cluster.run("train", *undisturbed)
    disturbed = job_flags("disturbed", str(tmp_path / "odd.py"), **flags | {"num_workers": 2})
    job = cluster.start("train", *disturbed)
    kill_a_worker(cluster, job, "disturbed")
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, out + err
    cluster.run("audit", "disturbed")
    assert weights(cluster.job("undisturbed")) == weights(cluster.job("disturbed"))


COUNTING = """
import pathlib, time
import torch

N_RECORDS = {n_records}
BATCH = {batch}
KILLED = pathlib.Path({killed!r})
n_passes = 0

class CustomModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(N_RECORDS))

    def forward(self, ids):
        global n_passes
        n_passes += 1
        while n_passes > 20 and not KILLED.exists():
            time.sleep(0.01)
        return self.counts[ids]

def loss(labels, predictions):
    return -predictions  # One step adds 1 to each record of a batch.

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=BATCH)

def feed(columns, mode, metadata):
    return torch.from_numpy(columns["id"]), None
"""


@pytest.mark.parametrize("strategy", ["ParameterServerStrategy", "AllreduceStrategy"])
def test_a_counting_model_counts_every_record_once_per_epoch(
    cluster: Cluster, tmp_path: Path, strategy: str
) -> None:
    n_records, batch, n_epochs = 2048, 16, 3
    data = tmp_path / "ids.csv"
    data.write_text("id\n" + "".join(f"{n}\n" for n in range(n_records)))
    model = tmp_path / "counting.py"
    killed = tmp_path / "killed"
    model.write_text(COUNTING.format(n_records=n_records, batch=batch, killed=str(killed)))
    flags = job_flags(
        "count",
        str(model),
        training_data=data,
        num_workers=2,
        num_epochs=n_epochs,
        minibatch_size=batch if strategy == "ParameterServerStrategy" else batch // 2,
        distribution_strategy=strategy,
    )
    job = cluster.start("train", *flags)
    kill_a_worker(cluster, job, "count")
    killed.touch()
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, out + err
    counts = read_safetensors(cluster.job("count") / "output" / "model.safetensors")["counts"]
    np.testing.assert_array_equal(counts, np.full(n_records, n_epochs, np.float32))


PROCESSING = (
    TORCH_MODEL.format(**TORCH_PARTS)
    + """
class PredictionOutputsProcessor:
    def process(self, predictions, worker_id):
        with open(os.environ["PROCESSED"], "a") as file:
            file.write(f"{worker_id} {predictions.shape[0]} {predictions.shape[1]}\\n")
"""
)


def test_a_trained_model_is_evaluated_and_predicts(cluster: Cluster, tmp_path: Path) -> None:
    model = tmp_path / "processing.py"
    model.write_text(PROCESSING)
    cluster.run("train", *job_flags("made", str(model), max_step=5))
    data = DATA / "test"
    made = ["made", "--num_workers=1"]
    cluster.run("evaluate", *made, f"--validation_data={data}", "--job_name=measured")
    assert "'accuracy'" in cluster.log("measured", "master")
    cluster.run("export", "made", f"--output={tmp_path / 'model'}")
    files = {file.name for file in (tmp_path / "model").iterdir()}
    assert files == {"model.json", "model.pt", "model.safetensors"}
    # A folder that no job knows does not say where the module is.
    processed = tmp_path / "processed"
    shared = [str(tmp_path / "model"), f"--model_def={model}", "--num_workers=1"]
    args = [*shared, f"--prediction_data={data}", "--job_name=predicted"]
    cluster.run("predict", *args, PROCESSED=str(processed))
    calls = [line.split() for line in processed.read_text().splitlines()]
    predicted = (cluster.job("predicted") / "output" / "predictions.jsonl").read_text().splitlines()
    assert sum(int(n) for _, n, _ in calls) == len(predicted) == 2000
    assert {int(width) for _, _, width in calls} == {10}


@pytest.mark.parametrize("kind", ["evaluate", "predict"])
def test_only_the_pass_of_the_job_is_tried(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    model = tmp_path / "partly.py"
    model.write_text(TORCH_MODEL.format(**TORCH_PARTS))
    cluster.run("train", *job_flags("made", str(model), max_step=2))
    flags = [
        f"--model_def={model}",
        f"--checkpoint_dir_for_init={cluster.job('made') / 'checkpoints'}",
        f"--{'validation' if kind == 'evaluate' else 'prediction'}_data={DATA / 'test'}",
        "--num_workers=1",
        "--job_name=partly",
    ]
    # An error that only this pass can have, after one that it cannot have.
    wrong = {
        "evaluate": {"metric": "predictions == labels"},
        "predict": {"loss": "no_loss", "metric": "no_metric"},
    }
    text = TORCH_MODEL.format(**TORCH_PARTS | wrong[kind])
    if kind == "predict":
        model.write_text(text)
        cluster.run("predict", *flags)
        text = text.replace("return images", "return images[:, :-1]")
    model.write_text(text)
    flags[-1] = "--job_name=refused"
    err = cluster.run(kind, *flags, code=2).stderr
    place = {
        "evaluate": "cannot evaluate the first batch of the validation data: 64 records with ",
        "predict": "cannot predict the first batch of the prediction data: 64 records with ",
    }
    assert place[kind] in err, err
    assert not cluster.job("refused").exists()
