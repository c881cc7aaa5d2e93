# SPDX-License-Identifier: Apache-2.0
"""Kills workers of a script that imports this module: in a step that the script has computed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from elasticdl import _job
from faults import Faults

FOLDER, N_WORKERS, KILLS = json.loads(os.environ["FAULTS"])
FAULTS = Faults(Path(FOLDER), N_WORKERS, KILLS)


class Interrupted(_job._Member):
    def __init__(self, loop: Any) -> None:
        super().__init__(loop)
        self._rust, self._step = loop, 0
        self.next, self.stepped = self._noted_next, self._interrupted_step

    def _noted_next(self) -> Any:
        request = self._rust.next()
        if request is not None:
            self._step = request[2]
        return request

    def _interrupted_step(self) -> None:
        FAULTS.between(self._step)
        self._rust.stepped()


_job._Member = Interrupted
