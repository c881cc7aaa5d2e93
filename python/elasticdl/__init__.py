# SPDX-License-Identifier: Apache-2.0
"""Train deep-learning models on machines that come and go.

`elasticdl train --model_zoo=model_zoo --model_def=mnist.mnist_torch.custom_model …` trains a model
that you write; `elasticdl.init()` gives the same to a training loop of your own.
"""

from __future__ import annotations

from elasticdl._mode import Mode
from elasticdl._zoo import ZooError

__all__ = ["Mode", "ZooError", "__version__", "init"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Only a training loop needs what `init` imports.
    if name == "init":
        from elasticdl._job import init

        return init
    raise AttributeError(f"module 'elasticdl' has no attribute '{name}'")
