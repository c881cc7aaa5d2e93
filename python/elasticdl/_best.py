# SPDX-License-Identifier: Apache-2.0
"""The best model of a custom training loop, and the end of training when it does not improve."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

# How long other workers wait for the model that the leader writes.
_LEADER_SECS = 10.0
_POLL_SECS = 0.02


class Best:
    """Keeps the best model by a metric, and can end training early.

        best = elasticdl.Best(mode="max", patience=3)
        job = elasticdl.init(model, optimizer, best=best)
        …
        best.update(accuracy)   # in every worker, after an evaluation

    When `update` gets the best value so far, the leader writes the model's state dict to
    `best_model.pt` in the job's output folder, and its step and value to `best_model.json`. After
    `patience` updates in a row without an improvement of more than `min_delta`, training ends, as
    by `job.stop()`.

    It is part of the job's state, so all workers agree, and a resumed job continues with it. It
    needs optimizer steps in Python, which `elasticdl run` chooses by itself.
    """

    # It only needs steps in Python, not that the user's code takes them.
    is_updated_after_steps = True

    def __init__(
        self,
        mode: str = "min",
        patience: int | None = None,
        min_delta: float = 0.0,
        file: str = "best_model.pt",
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f'mode="{mode}" is unknown; use "min" or "max"')
        if patience is not None and patience < 1:
            raise ValueError(f"patience={patience}; at least 1 is required")
        if Path(file).name != file or not file.endswith(".pt"):
            raise ValueError(f'file="{file}" must be a file name that ends with .pt')
        self._mode, self._patience, self._min_delta = mode, patience, min_delta
        self._file = file
        self._job: Any = None
        # The best value, and the step of the job when it was measured; None before the first one.
        self.value: float | None = None
        self.step: int | None = None
        # Updates since then.
        self.n_since = 0
        # The step after which training ends.
        self._end_step: int | None = None

    @property
    def should_stop(self) -> bool:
        """Whether the value has not improved for `patience` updates."""
        return self._patience is not None and self.n_since >= self._patience

    def connect(self, job: Any) -> None:
        """Called by the job that it is registered with."""
        self._job = job

    def update(self, value: Any) -> bool:
        """Takes the value of this step, the same in every worker; returns whether it is the best.

        A value that is not a number is never the best.
        """
        if self._job is None:
            raise RuntimeError(
                "`update()` was called, but the job does not know this object; pass it to "
                "`elasticdl.init(model, optimizer, best=best)`"
            )
        value = float(value)
        is_best = self._improves(value)
        if is_best:
            self.value, self.step, self.n_since = value, self._job.step, 0
            self._keep()
        else:
            self.n_since += 1
        if self.should_stop:
            self._end_step = self._job.step
            self._job.stop()
        return is_best

    def state_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "step": self.step,
            "n_since": self.n_since,
            "end_step": self._end_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.step = state["value"], state["step"]
        self.n_since, self._end_step = state["n_since"], state["end_step"]
        if self._end_step is not None and self._job is not None:
            # The workers that ended training may be lost.
            self._job.stop_after(self._end_step)

    def _improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.value is None:
            return True
        gain = self.value - value if self._mode == "min" else value - self.value
        return gain > self._min_delta

    def _keep(self) -> None:
        """Has the model written before the step is complete, by the leader if it is there."""
        folder = os.environ.get("ELASTICDL_OUTPUT")
        if not folder or self._job.is_described:
            return
        path = Path(folder) / self._file
        end = time.monotonic() + (0.0 if self._job.is_leader else _LEADER_SECS)
        while time.monotonic() < end:
            if self._is_written(path):
                return
            time.sleep(_POLL_SECS)
        self._write(path)

    def _is_written(self, path: Path) -> bool:
        try:
            written = json.loads(path.with_suffix(".json").read_text())
        except (OSError, ValueError):
            return False
        return written == self._note()

    def _note(self) -> dict[str, Any]:
        value = self.value if self.value is not None and math.isfinite(self.value) else None
        return {"step": self.step, "value": value}

    def _write(self, path: Path) -> None:
        import torch

        state = {
            name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
            for name, value in self._job.module.state_dict().items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.stem}-{os.getpid()}.pt")
        torch.save(state, unfinished)
        unfinished.replace(path)
        # Last: the model of this step is there.
        unfinished.write_text(json.dumps(self._note()))
        unfinished.replace(path.with_suffix(".json"))
