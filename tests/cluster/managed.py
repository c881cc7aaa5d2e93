# SPDX-License-Identifier: Apache-2.0
"""A job that the operator starts and resizes."""

from __future__ import annotations

from jobs import training_job
from trained import Job

LIMIT = 240


class Managed(Job):
    """A job whose description is a TrainingJob."""

    def submit(self) -> Managed:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o777)
        spec = {word: value for word, value in self._spec().items() if word != "job_name"}
        self.kubectl.apply(training_job(self.name, spec))
        return self

    def conditions(self) -> set[str]:
        """The conditions that are true."""
        found = self.kubectl.json("get", "trainingjob", self.name)
        shown = found.get("status", {}).get("conditions", [])
        return {each["type"] for each in shown if each["status"] == "True"}

    def until_workers(self, n: int) -> float:
        return self.until_pods(f"{n} workers", lambda: len(self.running("worker")) == n, LIMIT)
