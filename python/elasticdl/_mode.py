# SPDX-License-Identifier: Apache-2.0
"""What a pass over the data is for: the `mode` that `feed` is told."""

from __future__ import annotations


class Mode:
    """Plain strings, so that `mode == "training"` and `mode == Mode.TRAINING` are the same."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"
