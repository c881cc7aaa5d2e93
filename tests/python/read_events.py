# SPDX-License-Identifier: Apache-2.0
"""Prints all scalars that TensorBoard finds in a folder of event files, as JSON."""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main() -> None:
    accumulator = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
    accumulator.Reload()
    scalars = {
        tag: [{"step": point.step, "value": point.value} for point in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }
    json.dump(scalars, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
