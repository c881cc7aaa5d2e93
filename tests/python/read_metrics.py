# SPDX-License-Identifier: Apache-2.0
"""Prints what Prometheus' own OpenMetrics parser finds in a file, as JSON: families with their kind
and samples. The parser is strict: it fails on invalid input."""

import json
import sys
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families


def main() -> None:
    families = {}
    for family in text_string_to_metric_families(Path(sys.argv[1]).read_text()):
        samples = [
            {"name": sample.name, "labels": sample.labels, "value": sample.value}
            for sample in family.samples
        ]
        families[family.name] = {"kind": family.type, "samples": samples}
    json.dump(families, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
