# SPDX-License-Identifier: Apache-2.0
"""A Keras script with `model.fit` as an elastic job, on all back ends: two changed lines.

    import elasticdl.keras
    ...
    model = elasticdl.keras.elastic(model)
    model.fit(x, y, epochs=3, validation_data=(x_val, y_val))

One batch of `fit` is one step of the job. A lane of the job takes the place of a device: it trains
`batch_size` records. Without a job, the model stays as it is.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from elasticdl import _keras_tensorflow, _trainers
from elasticdl._zoo import ZooError

__all__ = ["elastic"]

_keras_tensorflow.leave_unimported()

# Callbacks that write their own files or expect a single process, and what to use instead.
_REFUSED = {
    "BackupAndRestore": "the job saves checkpoints; continue it with `elasticdl run --resume JOB`",
    "CSVLogger": "use the History that `fit` returns",
    "OrbaxCheckpoint": "use ModelCheckpoint",
    "RemoteMonitor": "use the History that `fit` returns",
    "SwapEMAWeights": "the job cannot swap the weights",
    "TensorBoard": "set --tensorboard_dir",
}
# Arguments of `fit` that a job cannot follow, and why.
_ARGUMENTS = {
    "class_weight": "pass `sample_weight`",
    "initial_epoch": "the job keeps its position; continue it with `elasticdl run --resume JOB`",
    "steps_per_epoch": "the job trains every record once per epoch",
}
# Methods by which a callback changes within an epoch.
_BATCH_EVENTS = [
    f"on_{what}_{when}" for what in ("batch", "train_batch") for when in ("begin", "end")
]
_BACKENDS = ("torch", "tensorflow", "jax")


def _prepare(_job: Any) -> None:
    """Fixes threads and the order of sums, before the script creates its first tensor."""
    if keras.backend.backend() != "torch":
        from elasticdl import _keras

        _keras.prepare({"threads_per_worker": os.environ.get("OMP_NUM_THREADS")})


_trainers.ON_JOIN.append(_prepare)
# The job's seed comes first, so that a model that the script creates is the same in every worker.
_trainers.job()


def elastic(model: Any) -> Any:
    """Makes `model.fit` train in the job that started this script; returns the model.

    `model.save`, `save_weights` and `export` then write in one worker, the leader.
    """
    job = _trainers.job()
    if job is None:
        return model
    if not isinstance(model, keras.Model):
        raise ZooError(f"`elastic` got a {type(model).__name__}; pass a keras.Model")
    backend = keras.backend.backend()
    if backend not in _BACKENDS:
        raise ZooError(
            f"Keras uses the backend `{backend}`, which cannot train; set KERAS_BACKEND to "
            f"{', '.join(_BACKENDS)}"
        )
    # Not setattr: Keras would track the methods.
    for name in ("save", "save_weights", "export"):
        vars(model)[name] = _by_leader(job, getattr(model, name))
    vars(model)["fit"] = _Fit(job, model)
    return model


class _Fit:
    """Stands in for `model.fit`."""

    def __init__(self, job: Any, model: Any) -> None:
        self._job, self._model = job, model

    def __call__(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        _trainers.begin("`fit()` was called")
        _check_only("class_weight", class_weight, None)
        _check_only("initial_epoch", initial_epoch, 0)
        _check_only("steps_per_epoch", steps_per_epoch, None)
        _check(self._model, callbacks)
        records = _Records(x, y, sample_weight, batch_size, shuffle)
        if validation_split and validation_data is None:
            records, validation_data = records.split(validation_split)
        evaluation = None
        if validation_data is not None:
            evaluation = {
                **_unpacked(validation_data),
                "batch_size": validation_batch_size or batch_size,
                "steps": validation_steps,
            }
        training = _Training(self._job, self._model, records, epochs)
        training.begin(callbacks, verbose)
        return training.run(evaluation, validation_freq)


class _Training:
    """A run of `fit`."""

    def __init__(self, job: Any, model: Any, records: _Records, epochs: int) -> None:
        self._job, self._model, self._records, self._epochs = job, model, records, epochs
        job.plan(len(records), records.batch_size, epochs, records.is_shuffled)

    def begin(self, callbacks: Any, verbose: Any) -> None:
        """Builds everything and joins the job."""
        job, model, records = self._job, self._model, self._records
        model._assert_compile_called("fit")
        model._symbolic_build(data_batch=records.collate([0] * min(2, len(records))))
        model.reset_metrics()
        self._steps_per_epoch = job.steps_per_epoch
        is_shown = verbose != 0 and not job.is_rehearsal
        given = keras.tree.flatten(callbacks or [])
        has_bar = any(isinstance(one, keras.callbacks.ProgbarLogger) for one in given)
        own = [_Log(job), *([_Bar(job)] if is_shown and not has_bar else [])]
        self._callbacks = keras.callbacks.CallbackList(
            [*given, *own],
            add_history=True,
            verbose=verbose if is_shown else 0,
            epochs=self._epochs,
            steps=self._steps_per_epoch,
            model=model,
        )
        self._fit = _new_fit(job, model)
        self._optimizer = self._fit.optimizer
        config = model.optimizer.get_config()
        job.log_config({**config, "optimizer": type(model.optimizer).__name__})
        followed = [one for one in self._callbacks.callbacks if one not in own]
        self._progress = _Progress(model, followed, self._optimizer)
        self._fit.attach(self._progress)
        steps = job.steps(
            range(len(records)),
            records.batch_size,
            self._epochs,
            records.is_shuffled,
            collate=records.counted,
            **records.loader_options,
        )
        self._feed = _trainers.Feed(job, steps)

    def run(self, evaluation: dict[str, Any] | None, every: Any) -> Any:
        model, feed, progress, callbacks = self._model, self._feed, self._progress, self._callbacks
        model.stop_training = False
        callbacks.on_train_begin()
        logs: dict[str, Any] = {}
        while True:
            progress.keep()
            if not feed.has_step():
                break
            lanes = feed.take()
            if progress.has_moved:
                progress.restore()
            epoch, number = divmod(progress.n_steps, self._steps_per_epoch)
            if number == 0:
                progress.has_epoch_event = True
                callbacks.on_epoch_begin(epoch)
            callbacks.on_train_batch_begin(number)
            self._fit.begin_batch()
            for n_records, batch in lanes:
                loss = self._fit.train(batch, self._step_records() / n_records)
                self._job.allreduce(loss=loss)
            if progress.has_moved or not self._job.is_step:
                feed.move()
                progress.restore()
                continue
            self._fit.check()
            feed.begin_step()
            self._optimizer.step()
            if self._job.is_described:
                feed.has_step()  # Waits for the job: nothing is evaluated or saved before it.
                progress.restore()
                continue
            progress.n_steps += 1
            logs = _numbers(model.get_metrics_result())
            callbacks.on_train_batch_end(number, logs)
            if number + 1 == self._steps_per_epoch or model.stop_training:
                logs = self._end_epoch(epoch, evaluation, every)
            if model.stop_training:
                progress.keep()
                break
        feed.end()
        if progress.has_moved:  # The last step was that of another worker.
            progress.restore()
            logs = progress.last_logs
        callbacks.on_train_end(logs or progress.last_logs)
        return model.history

    def _step_records(self) -> int:
        """Returns the number of records of this step, in all lanes."""
        n_most = self._records.batch_size * self._job.lanes
        n_before = self._job.step % self._steps_per_epoch * n_most
        return min(n_most, len(self._records) - n_before)

    def _end_epoch(
        self, epoch: int, evaluation: dict[str, Any] | None, every: Any
    ) -> dict[str, Any]:
        model = self._model
        self._progress.has_epoch_event = True
        logs = _numbers(model.get_metrics_result())
        self._fit.begin_evaluation()
        if evaluation is not None and model._should_eval(epoch, every):
            found = model.evaluate(
                **evaluation, callbacks=self._callbacks, return_dict=True, verbose=0
            )
            logs.update({f"val_{name}": value for name, value in _numbers(found).items()})
        self._progress.last_logs = dict(logs)
        self._callbacks.on_epoch_end(epoch, logs)
        model.reset_metrics()
        return logs


def _new_fit(job: Any, model: Any) -> Any:
    if keras.backend.backend() == "torch":
        from elasticdl._keras_fit_torch import TorchFit

        return TorchFit(job, model)
    from elasticdl._keras_fit_flat import FlatFit

    return FlatFit(job, model)


class _Log(keras.callbacks.Callback):
    """Logs with the job what the callbacks before it have left in the logs of an epoch."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self._job = job

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._job.log_from_trainer(logs or {})


class _Bar(keras.callbacks.ProgbarLogger):
    """Shows the progress in the worker that leads, which can be another one in each step."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self._job = job

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._reset_progbar()
        if self._job.is_leader:
            super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._job.is_leader:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._job.is_leader:
            self._maybe_init_progbar()
            super().on_epoch_end(epoch, logs)


class _Records:
    """What `fit` trains on: arrays, or the dataset of a DataLoader."""

    def __init__(self, x: Any, y: Any, weight: Any, batch_size: int | None, shuffle: Any) -> None:
        self.loader_options: dict[str, Any] = {}
        self._loader = None
        if type(x).__name__ == "DataLoader":
            for name, value in (("y", y), ("sample_weight", weight)):
                if value is not None:
                    raise ZooError(
                        f"`fit` got `{name}` beside a DataLoader; its batches contain it: "
                        "(x, y) or (x, y, sample_weight)"
                    )
            if keras.backend.backend() != "torch":
                raise ZooError(
                    "`fit` got a DataLoader, which needs KERAS_BACKEND=torch; pass arrays"
                )
            from elasticdl import _torch_trainers

            self.is_shuffled = _torch_trainers.check_loader("the training data", x)
            self._loader, self.batch_size = x, x.batch_size
            self.loader_options = _torch_trainers.loader_options(x)
            return
        given = {"x": x, "y": y, "sample_weight": weight}
        self._arrays = keras.tree.map_structure(_array, given)
        leaves = [leaf for leaf in keras.tree.flatten(self._arrays) if leaf is not None]
        lengths = {len(leaf) for leaf in leaves}
        if len(lengths) != 1:
            raise ZooError(f"the arrays of `fit` have different lengths: {sorted(lengths)}")
        if not isinstance(shuffle, bool):
            raise ZooError(f"shuffle={shuffle!r} does not work in a job; use True or False")
        (self._n_records,) = lengths
        self.batch_size, self.is_shuffled = batch_size or 32, shuffle

    def __len__(self) -> int:
        return len(self._loader.dataset) if self._loader is not None else self._n_records

    def collate(self, numbers: list[int]) -> Any:
        """Returns the batch of these records, as `fit` gets it."""
        if self._loader is not None:
            dataset = self._loader.dataset
            return self._loader.collate_fn([dataset[number] for number in numbers])
        parts = _taken(self._arrays, np.asarray(numbers), keras.ops.convert_to_tensor)
        return keras.utils.pack_x_y_sample_weight(parts["x"], parts["y"], parts["sample_weight"])

    def counted(self, numbers: list[int]) -> tuple[int, Any]:
        """Returns the batch of these records behind their number."""
        return len(numbers), self.collate(numbers)

    def split(self, share: float) -> tuple[_Records, Any]:
        """Returns the records without the last `share` of them, and those."""
        if self._loader is not None:
            raise ZooError("validation_split needs arrays; pass `validation_data`")
        place = int(self._n_records * (1 - share))
        first, last = (_taken(self._arrays, span) for span in (slice(place), slice(place, None)))
        parts = [first[name] for name in ("x", "y", "sample_weight")]
        records = _Records(*parts, self.batch_size, self.is_shuffled)
        return records, (last["x"], last["y"], last["sample_weight"])


def _array(leaf: Any) -> Any:
    """Returns an array whose rows have numbers."""
    torch = sys.modules.get("torch")
    kinds = (np.ndarray,) if torch is None else (np.ndarray, torch.Tensor)
    # The index of a pandas object selects labels or columns, not rows.
    array = leaf.to_numpy() if hasattr(leaf, "iloc") else leaf
    if array is None or isinstance(array, kinds):
        return array
    is_torch = keras.backend.backend() == "torch"
    what = "numpy arrays, torch tensors, pandas objects or a torch DataLoader"
    raise ZooError(
        f"`fit` got a {type(leaf).__name__}, but a job assigns records by their numbers; pass "
        f"{what if is_torch else 'numpy arrays or pandas objects'}"
    )


def _taken(arrays: Any, index: Any, convert: Callable[[Any], Any] = lambda part: part) -> Any:
    """Returns some rows of each array."""

    def take(leaf: Any) -> Any:
        return None if leaf is None else convert(leaf[index])

    return keras.tree.map_structure(take, arrays)


class _Progress:
    """The counters of `fit` and the state of its callbacks, as they were between two steps."""

    def __init__(self, model: Any, callbacks: list[Any], optimizer: Any) -> None:
        self._model, self._callbacks, self._optimizer = model, callbacks, optimizer
        self.n_steps = 0
        self.last_logs: dict[str, Any] = {}
        # Whether state was loaded that the loop does not have yet.
        self.has_moved = False
        # Whether an epoch has begun or ended since the state was kept.
        self.has_epoch_event = False
        # Callbacks without events of batches only change then. Their state can be large: that of
        # EarlyStopping has the best weights.
        self._is_steady = [not _has_batch_events(callback) for callback in callbacks]
        self._kept = self._collect([])

    def keep(self) -> None:
        """A step is complete, with everything that follows it."""
        self._optimizer.keep_rate()
        self._kept = self._collect([] if self.has_epoch_event else self._kept["callbacks"])
        self.has_epoch_event = False

    def restore(self) -> None:
        """Undoes what callbacks did since then, or continues where loaded state is."""
        self._apply(copy.deepcopy(self._kept))
        self._optimizer.restore_rate()
        self.has_moved = False

    def state_dict(self) -> dict[str, Any]:
        return self._kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept, self.has_moved = state, True

    def _collect(self, before: list[Any]) -> dict[str, Any]:
        """Returns the state; `before` is that of the callbacks if no epoch has begun or ended."""
        callbacks = [
            before[number] if before and is_steady else _state_of(callback)
            for number, (callback, is_steady) in enumerate(zip(self._callbacks, self._is_steady))
        ]
        return {
            "n_steps": self.n_steps,
            "last_logs": dict(self.last_logs),
            "stop_training": bool(self._model.stop_training),
            "callbacks": callbacks,
        }

    def _apply(self, state: dict[str, Any]) -> None:
        self.n_steps, self.last_logs = state["n_steps"], state["last_logs"]
        self._model.stop_training = state["stop_training"]
        for callback, kept in zip(self._callbacks, state["callbacks"]):
            _set_state(callback, kept)


def _check_only(name: str, value: Any, default: Any) -> None:
    if value != default:
        raise ZooError(f"{name}={value!r} does not work in a job: {_ARGUMENTS[name]}")


def _check(model: Any, callbacks: Any) -> None:
    """Rejects what a job would not honour."""
    for method in ("fit", "make_train_function", "train_step"):
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise ZooError(
                f"the model `{type(model).__name__}` overrides `{method}`, which the job does not "
                "call; override `compute_loss`, or write a custom training loop (docs/own-loop.md)"
            )
    # On other back ends, Keras compiles by default, and the job always does.
    is_torch = keras.backend.backend() == "torch"
    name = "jit_compile" if is_torch else "run_eagerly"
    if getattr(model, name):
        raise ZooError(f"{name}=True does not work in a job; remove it from `compile`")
    if getattr(model, "steps_per_execution", 1) != 1:
        raise ZooError("steps_per_execution does not work in a job; use 1")
    optimizer = model.optimizer
    if optimizer is None:
        raise ZooError("the model has no optimizer; pass one to `compile`")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ZooError("loss scaling does not work in a job; use bfloat16 instead of float16")
    for option in ("use_ema", "gradient_accumulation_steps", "loss_scale_factor"):
        if getattr(optimizer, option, None):
            raise ZooError(f"`{option}` of the optimizer does not work in a job; remove it")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise ZooError("`fit` got a CallbackList; pass a list of callbacks in a job")
    listed = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in listed:
        for kind in type(callback).__mro__:
            if kind.__module__.startswith("keras.") and kind.__name__ in _REFUSED:
                raise ZooError(
                    f"the callback `{type(callback).__name__}` does not work in a job: "
                    f"{_REFUSED[kind.__name__]}"
                )


def _unpacked(data: Any) -> dict[str, Any]:
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    return {"x": x, "y": y, "sample_weight": weight}


def _numbers(logs: dict[str, Any]) -> dict[str, Any]:
    return {name: float(value) for name, value in logs.items()}


def _by_leader(job: Any, write: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        is_writer = job.is_leader and not job.is_rehearsal
        return write(*args, **kwargs) if is_writer else None

    return run


def _has_batch_events(callback: Any) -> bool:
    return any(
        name in vars(callback)
        or getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name)
        for name in _BATCH_EVENTS
    )


def _state_of(callback: Any) -> dict[str, Any]:
    """Returns the plain attributes of a callback; others do not change in training."""
    state = {name: _encoded(value) for name, value in _plain(callback)}
    if hasattr(callback, "_set_monitor_op"):
        state["monitor_op"] = callback.monitor_op is not None
    return state


def _set_state(callback: Any, state: dict[str, Any]) -> None:
    state = dict(state)
    # It also changes `min_delta`, which is part of the state.
    if state.pop("monitor_op", False) and callback.monitor_op is None:
        callback._set_monitor_op()
    for name, value in state.items():
        # What is an object in this worker was None where the state comes from.
        if _is_plain(getattr(callback, name, None)):
            setattr(callback, name, _decoded(value))


def _plain(callback: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(callback).items():
        if name not in ("params", "monitor_op") and _is_plain(value):
            yield name, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    if isinstance(value, dict):
        is_named = all(type(key) in (str, int) for key in value)
        return type(value) is dict and is_named and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str, np.generic, np.ndarray))


def _encoded(value: Any) -> Any:
    """Returns a value that the job can keep: arrays become tensors with a mark."""
    if isinstance(value, np.ndarray):
        is_torch = keras.backend.backend() == "torch"
        return {"array": keras.ops.convert_to_tensor(value.copy()) if is_torch else value.copy()}
    if isinstance(value, (list, tuple)):
        return type(value)(_encoded(one) for one in value)
    if isinstance(value, dict):
        return {"dict": {key: _encoded(one) for key, one in value.items()}}
    return value.item() if isinstance(value, np.generic) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_decoded(one) for one in value)
    if isinstance(value, dict):
        if "array" in value:
            return keras.ops.convert_to_numpy(value["array"])
        return {key: _decoded(one) for key, one in value["dict"].items()}
    return value
