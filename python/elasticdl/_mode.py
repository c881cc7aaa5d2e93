# SPDX-License-Identifier: Apache-2.0
"""The `mode` passed to `feed`: what a pass over the data is for."""

from __future__ import annotations


class Mode:
    """Plain strings, so `mode == "training"` and `mode == Mode.TRAINING` are equivalent."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"
