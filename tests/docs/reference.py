# SPDX-License-Identifier: Apache-2.0
"""Generates the reference from the command's output and source: reference.py ELASTICDL [DIR].

The result does not depend on the machine or the time, so a test can compare it with the committed
files.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from pages import GENERATED, ROOT

CRATES = ROOT / "crates"
NOTE = "<!-- Written by `make reference`; do not edit. -->\n\n"


def main() -> None:
    binary = Path(sys.argv[1]).absolute()
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else GENERATED
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in reference(binary).items():
        (folder / name).write_text(text)
        print(folder / name)


def reference(binary: Path) -> dict[str, str]:
    """The pages of the reference."""
    pages = {
        "cli.md": cli(binary),
        "job.md": job(binary),
        "trainingjob.md": trainingjob(binary),
        "metrics.md": metrics(),
        "exit-codes.md": exit_codes(),
    }
    return {name: NOTE + text.rstrip() + "\n" for name, text in pages.items()}


# ---- commands ------------------------------------------------------------------------------------


def cli(binary: Path) -> str:
    """The output of `--help` for every command."""
    text = "# Commands\n\nThe output of `elasticdl --help` and `elasticdl COMMAND --help`.\n"
    return text + "".join(sections(binary, ()))


def sections(binary: Path, command: tuple[str, ...]) -> list[str]:
    text = printed(binary, *command, "--help")
    title = " ".join(("elasticdl", *command))
    found = [f"\n{'#' * (2 + max(0, len(command) - 1))} {title}\n\n```text\n{text}\n```\n"]
    for name in subcommands(text):
        found += sections(binary, (*command, name))
    return found


def subcommands(text: str) -> list[str]:
    part = re.search(r"^Commands:\n((?: .*\n)+)", text + "\n", re.M)
    if not part:
        # The overview has its commands by subject.
        part = re.search(r"^Usage: elasticdl <COMMAND>.*\n((?:.*\n)*?)Examples:", text, re.M)
    return re.findall(r"^  ([a-z]+)  ", part[1], re.M) if part else []


def printed(binary: Path, *args: str) -> str:
    environment = {
        **os.environ,
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "ELASTICDL_HOME": "~/.elasticdl",
    }
    done = subprocess.run([binary, *args], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{args} exited with code {done.returncode}: {done.stderr}"
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


# ---- the job description -------------------------------------------------------------------------


def job(binary: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.yaml"
        printed(binary, "init", str(file))
        lines = file.read_text().splitlines()
    kinds = definition(binary)["spec"]["properties"]
    helps = flags(binary)
    text = (
        "# The job description\n\n"
        "The same fields are used in the file for `elasticdl train --config FILE`, as flags of "
        "`train`, `evaluate` and `predict`, and in the `spec` of a TrainingJob.\n"
        "`elasticdl init` writes a file with all of them; flags override the file.\n"
    )
    for line in lines:
        if heading := re.match(r"# -+ (.+?) -+$", line):
            text += f"\n## {heading[1]}\n\n"
            text += "| field | type | default | description |\n|---|---|---|---|\n"
        elif word := re.match(r"([a-z_]+): (.*?)(?: +# (.*))?$", line):
            name, default, meaning = word.groups()
            default = "" if default in ("''", "null", "{}") else f"`{default}`"
            # The flag's help is complete; the file's comment may refer to the previous line.
            meaning = helps.get(name, meaning or "").rstrip(".").replace(" [default: none]", "")
            if default:
                meaning = re.sub(r" *\[default: [^]]*\]", "", meaning)
            meaning = re.sub(r" *\[alias: ([^]]*)\]", r"; as a flag also `\1`", meaning)
            text += row(f"`{name}`", kind(kinds[name]), default, meaning)
    return text


def flags(binary: Path) -> dict[str, str]:
    """The help of every flag that describes a job."""
    found = {}
    # Those of `train` last: other commands take defaults from a trained model.
    for command in ("predict", "evaluate", "train"):
        text = printed(binary, command, "--help")
        for name, help_text in re.findall(
            r"^ +--([a-z_]+)[^\n]*?(?:\n {8,}|  +)(\S.*(?:\n {8,}\S.*)*)", text, re.M
        ):
            plain = re.sub(r"\s+", " ", help_text)
            found[name] = re.sub(r" *\[possible values: [^]]*\]", "", plain)
    return found


def kind(schema: dict) -> str:
    """The type of a field."""
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    names = {"integer": "integer", "number": "number", "boolean": "boolean"}
    names |= {"string": "string", "object": "map", "array": "list"}
    name = names[schema["type"]]
    return f"{name} ≥ {schema['minimum']}" if schema.get("minimum") else name


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


# Fields of a TrainingJob that a job description does not have.
OWN_FIELDS = {
    "priority": "Jobs with a higher priority go first: a number, or the name of a PriorityClass",
    "queue": "Queue whose quota the job uses [default: default]",
}

# ---- TrainingJob ---------------------------------------------------------------------------------


def definition(binary: Path) -> dict:
    """The schema of a TrainingJob, and its columns in kubectl."""
    crd = yaml.safe_load(printed(binary, "operator", "crd"))
    version = crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    return {"crd": crd, "version": version, "schema": schema, **schema["properties"]}


def trainingjob(binary: Path) -> str:
    found = definition(binary)
    crd, version = found["crd"]["spec"], found["version"]
    described = set(re.findall(r"^\| `([a-z_]+)` \|", job(binary), re.M))
    source = (CRATES / "edl-operator/src/crd.rs").read_text()
    text = (
        "# TrainingJob\n\n"
        f"`apiVersion: {crd['group']}/{version['name']}`, `kind: {crd['names']['kind']}`; "
        f"`kubectl get {crd['names']['shortNames'][0]}`.\n"
        "[operator.md](../operator.md) explains how to use it.\n\n"
        "## spec\n\n"
        "All fields of [the job description](job.md), and:\n\n"
        "| field | type | description |\n|---|---|---|\n"
    )
    schema = found["spec"]["properties"]
    for name, meaning in OWN_FIELDS.items():
        text += row(f"`{name}`", kind(schema[name]), meaning)
    text += "\nThe fields of PaddlePaddle EDL also work:\n\n| field | type |\n|---|---|\n"
    for name in sorted(set(schema) - described - set(OWN_FIELDS)):
        assert f'"{name}"' in aliases(), f"describe `{name}` in OWN_FIELDS"
        inner = ", ".join(f"`{word}`" for word in schema[name].get("properties", {}))
        text += row(f"`{name}`", f"map: {inner}" if inner else kind(schema[name]))
    text += "\n" + edl_fields()
    text += "\n## Validation\n\nThe API server enforces these rules:\n\n"
    rules = found["schema"].get("x-kubernetes-validations", [])
    rules = rules + found["spec"].get("x-kubernetes-validations", [])
    text += "".join(f"- {rule['message']}\n" for rule in rules)
    text += "- fields must exist, have the right type, and obey the minimum in [job.md](job.md)\n"
    text += "\n## status\n\n| field | type | description |\n|---|---|---|\n"
    meanings = fields(source, "Status")
    for name, field in found["status"]["properties"].items():
        text += row(f"`{name}`", kind(field), meanings.get(snake(name), ""))
    text += "\n## Conditions\n\n| condition | meaning |\n|---|---|\n"
    for name, meaning in variants(source, "ConditionKind"):
        text += row(name, meaning)
    text += "\n## kubectl columns\n\n| column | source |\n|---|---|\n"
    for column in version["additionalPrinterColumns"]:
        wide = " (`-o wide`)" if column.get("priority") else ""
        text += row(column["name"] + wide, f"`{column['jsonPath']}`")
    scale = version["subresources"]["scale"]
    text += (
        f"\n`kubectl scale` sets `{scale['specReplicasPath']}` "
        f"and reads `{scale['statusReplicasPath']}`.\n"
    )
    return text


def edl_fields() -> str:
    """The table at the top of the file that translates them."""
    return "".join(f"{line}\n" for line in re.findall(r"^//! (\|.*)$", aliases(), re.M))


def aliases() -> str:
    return (CRATES / "edl-operator/src/aliases.rs").read_text()


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])([A-Z])", lambda found: "_" + found[1].lower(), name)


# ---- Rust's own comments -------------------------------------------------------------------------


def body(source: str, what: str) -> str:
    found = re.search(rf"^pub(?:\(crate\))? {what} \{{\n(.*?)^\}}", source, re.M | re.S)
    assert found, f"`{what}` is missing; tests/docs/reference.py reads it"
    return found[1]


def fields(source: str, name: str) -> dict[str, str]:
    """Each field of a struct with its comment."""
    found, comment = {}, []
    for line in body(source, f"struct {name}").splitlines():
        if documented := re.match(r" +/// (.*)", line):
            comment.append(documented[1])
        elif field := re.match(r" +pub(?:\(crate\))? ([a-z_]+):", line):
            found[field[1]], comment = " ".join(comment), []
    return found


def variants(source: str, name: str) -> list[tuple[str, str]]:
    """Each variant of an enum with its comment."""
    found, comment = [], []
    for line in body(source, f"enum {name}").splitlines():
        if documented := re.match(r" +/// (.*)", line):
            comment.append(documented[1])
        elif variant := re.match(r"    ([A-Z][A-Za-z]*)(?: = \d+)?,", line):
            found.append((variant[1], " ".join(comment)))
            comment = []
    return found


def exit_codes() -> str:
    source = (CRATES / "edl-core/src/exit.rs").read_text()
    codes = dict(re.findall(r"^    ([A-Za-z]+) = (\d+),", source, re.M))
    text = (
        "# Exit codes\n\nAll commands use these exit codes.\n"
        "Results go to standard output, everything else to standard error.\n\n"
        "| code | meaning |\n|---|---|\n"
    )
    for name, meaning in variants(source, "Exit"):
        text += row(codes[name], meaning)
    return text


# ---- metrics -------------------------------------------------------------------------------------

KINDS = {"Gauge": "gauge", "Float": "gauge", "Counter": "counter", "Total": "counter"}
KINDS |= {"Histogram": "histogram"}


def metrics() -> str:
    text = (
        "# Metrics\n\nA job's master and the operator serve metrics in the OpenMetrics text format "
        "at `/metrics`, and a health check at `/healthz`.\n"
    )
    for title, file in (
        ("Job master", "edl-master/src/metrics.rs"),
        ("Operator", "edl-operator/src/metrics.rs"),
    ):
        text += f"\n## {title}\n\n| name | type | labels | description |\n|---|---|---|---|\n"
        for name, sort, labels, meaning in registered(CRATES / file):
            text += row(f"`{name}`", sort, ", ".join(f"`{label}`" for label in labels), meaning)
    return text


def registered(file: Path) -> list[tuple[str, str, list[str], str]]:
    """Name, kind, labels and help of each metric that a file registers."""
    source = file.read_text()
    prefix = re.search(r'sub_registry_with_prefix\("(\w+)"\)', source)[1]
    field = r"^    (?:pub\(crate\) )?([a-z_]+): ([A-Z][\w<>, ]*),$"
    all_fields = body(source, "struct Metrics")
    types = dict(re.findall(field, all_fields, re.M))
    # Counters from another file of the crate: `spans: otlp::Counts`.
    for module, name in re.findall(r": (\w+)::(\w+),$", all_fields, re.M):
        other = file.with_name(f"{module}.rs").read_text()
        types |= dict(re.findall(field, body(other, f"struct {name}"), re.M))
    # `let speed = metrics.records_per_second.clone();`, also two at once.
    names = dict(re.findall(r"let (\w+) = metrics\.(\w+)\.clone\(\);", source))
    for left, right in re.findall(r"let \(([^)]*)\) = \((.*)\);", source):
        fields_of = re.findall(r"metrics\.(\w+)\.clone\(\)", right)
        names |= dict(zip(left.split(", "), fields_of))

    def metric(name: str, meaning: str, holder: str) -> tuple[str, str, list[str], str]:
        held = types[names.get(holder, holder)]
        family = re.match(r"Family<(\w+), (\w+)>", held)
        sort = KINDS[family[2] if family else held]
        labels = re.findall(r"^    (\w+):", struct(source, family[1]), re.M) if family else []
        total = "_total" if sort == "counter" else ""
        return f"{prefix}_{name}{total}", sort, labels, meaning

    pattern = r'\.register\(\s*"(\w+)",\s*"([^"]*)",\s*(?:metrics\.)?(\w+)(?:\.clone\(\))?,?\s*\)'
    found = [metric(*registered) for registered in re.findall(pattern, source)]
    # `step: add(all, "step", "Current step"),`
    added = r'(\w+): add\(\s*all,\s*"(\w+)",\s*"([^"]*)",?\s*\)'
    found += [metric(name, meaning, holder) for holder, name, meaning in re.findall(added, source)]
    n_registered = source.count("all.register(") + source.count("add(")
    assert len(found) == n_registered, f"{file} registers a metric in an unknown way"
    return found


def struct(source: str, name: str) -> str:
    return re.search(rf"^struct {name} \{{\n(.*?)^\}}", source, re.M | re.S)[1]


if __name__ == "__main__":
    main()
