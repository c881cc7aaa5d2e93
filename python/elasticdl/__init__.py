# SPDX-License-Identifier: Apache-2.0
"""Elastic deep-learning training: workers can join, leave or fail at any time.

`elasticdl train --model_zoo=model_zoo --model_def=mnist.mnist_torch.custom_model …` trains a model
that you define. `elasticdl.init()` makes a custom training loop elastic.
"""

from __future__ import annotations

from elasticdl._mode import Mode
from elasticdl._zoo import ZooError

__all__ = ["Best", "Mode", "ZooError", "__version__", "init"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Imported lazily: only custom training loops need it.
    if name == "init":
        from elasticdl._job import init

        return init
    if name == "Best":
        from elasticdl._best import Best

        return Best
    raise AttributeError(f"module 'elasticdl' has no attribute '{name}'")
