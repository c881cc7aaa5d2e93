# SPDX-License-Identifier: Apache-2.0
"""The committed reference matches the code, and the code matches the metrics of a real job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml

from commands import LIMIT, Shell
from pages import GENERATED
from reference import CRATES, reference, registered

PAGES = ["cli.md", "job.md", "trainingjob.md", "metrics.md", "exit-codes.md"]


@pytest.fixture(scope="module")
def generated(elasticdl: Path) -> dict[str, str]:
    return reference(elasticdl)


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_up_to_date(generated: dict[str, str], name: str) -> None:
    committed = (GENERATED / name).read_text()
    assert committed == generated[name], (
        f"docs/reference/{name} is out of date: run `make reference`"
    )


def test_no_page_of_the_reference_is_left_over(generated: dict[str, str]) -> None:
    assert sorted(generated) == sorted(PAGES)
    assert sorted(page.name for page in GENERATED.iterdir()) == sorted(PAGES)


@pytest.fixture
def shell(tmp_path: Path, elasticdl: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path, elasticdl, None)
    yield shell
    shell.end()


def test_a_real_job_shows_the_metrics_of_the_reference(shell: Shell) -> None:
    shell.run("elasticdl train --detach --num_epochs=100", "a job to scrape")
    status = yaml.safe_load(shell.output_of(["elasticdl", "status", "--json"]))
    with urlopen(f"http://{status['http_address']}/metrics", timeout=LIMIT) as page:
        scraped = page.read().decode()
    helps = dict(re.findall(r"^# HELP (\w+) (.*?)\.?$", scraped, re.M))
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", scraped, re.M))
    shown = {name: (kinds[name], meaning) for name, meaning in helps.items()}
    documented = {
        name.removesuffix("_total"): (kind, meaning)
        for name, kind, _, meaning in registered(CRATES / "edl-master/src/metrics.rs")
    }
    # A family without a sample, such as evaluations before the first, is not shown.
    assert set(shown) <= set(documented) and len(shown) > len(documented) / 2
    assert shown == {name: documented[name] for name in shown}
