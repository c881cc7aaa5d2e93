# SPDX-License-Identifier: Apache-2.0
"""Loads the user's module and the functions that a job refers to."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

# Tried in this order if only a module is given.
MODEL_NAMES = ("custom_model", "CustomModel")


class ZooError(Exception):
    """A problem with the user's module. The message says what to do next."""


@dataclass
class Zoo:
    """The functions of a user's module, by role."""

    module: ModuleType
    name: str
    custom_model: Callable[..., Any]
    loss: Callable[..., Any]
    optimizer: Callable[..., Any]
    feed: Callable[..., Any] | None = None
    eval_metrics_fn: Callable[..., Any] | None = None
    callbacks: Callable[..., Any] | None = None
    custom_data_reader: Callable[..., Any] | None = None
    prediction_outputs_processor: Any = None
    lr_schedule: Callable[..., Any] | None = None
    params: dict[str, Any] = field(default_factory=dict)


def load(job: dict[str, Any]) -> Zoo:
    """Loads the module that `job` names, and checks that required functions exist."""
    module, model = _find(job["model_def"], job["model_zoo"])
    given = {name: _value(text) for name, text in job["model_params"].items()}

    def part(role: str, *names: str, needed: bool = False) -> Any:
        chosen = job.get(role, "")
        if chosen:
            return _symbol(module, chosen)
        for name in names:
            if hasattr(module, name):
                return getattr(module, name)
        if needed:
            raise ZooError(
                f"`{_shown(module)}` has no `{names[0]}`; define it, or set another with --{role}"
            )
        return None

    optimizer = part("optimizer_fn", "optimizer", needed=True)
    if "lr" in given and _accepts(optimizer, "lr"):
        optimizer = functools.partial(optimizer, lr=given.pop("lr"))
    given.pop("lr", None)
    unknown = [name for name in given if not _accepts(model, name)]
    if unknown:
        raise ZooError(
            f"--model_params: `{unknown[0]}` is not a parameter of `{_name(model)}`{_takes(model)}"
        )
    processor = part("prediction_outputs_processor", "PredictionOutputsProcessor")
    return Zoo(
        module=module,
        name=job["model_def"],
        custom_model=functools.partial(model, **given) if given else model,
        loss=part("loss", "loss", needed=True),
        optimizer=optimizer,
        feed=part("feed", "feed", "dataset_fn"),
        eval_metrics_fn=part("eval_metrics_fn", "eval_metrics_fn"),
        callbacks=part("callbacks", "callbacks"),
        custom_data_reader=part("custom_data_reader", "custom_data_reader"),
        prediction_outputs_processor=processor() if inspect.isclass(processor) else processor,
        lr_schedule=getattr(module, "lr_schedule", None),
        params=given,
    )


def framework(zoo: Zoo) -> str:
    """Returns the framework of the model: `torch` or `keras`."""
    model = zoo.custom_model
    model = model.func if isinstance(model, functools.partial) else model
    bases = inspect.getmro(model) if inspect.isclass(model) else ()
    roots = {base.__module__.partition(".")[0] for base in bases}
    if "keras" in roots:
        return "keras"
    if "torch" in roots:
        return "torch"
    used = {_root(value) for value in vars(zoo.module).values()}
    # A Keras model on the torch backend may use both.
    for name in ("keras", "torch"):
        if name in used or (name == "keras" and "tensorflow" in used):
            return name
    raise ZooError(
        f"`{_shown(zoo.module)}` uses neither Keras nor PyTorch; its `{_name(model)}` must return "
        "a keras.Model or a torch.nn.Module"
    )


def _root(value: Any) -> str:
    name = getattr(value, "__name__", "") if inspect.ismodule(value) else ""
    return (name or getattr(value, "__module__", None) or "").partition(".")[0]


def _find(model_def: str, folder: str) -> tuple[ModuleType, Callable[..., Any]]:
    if "/" in model_def or model_def.endswith(".py"):
        module = _from_path(Path(model_def))
        return module, _model(module)
    place = Path(folder) if folder else Path.cwd()
    if not place.is_dir():
        raise ZooError(f"the folder `{place}` does not exist; check --model_zoo")
    sys.path.insert(0, str(place))
    whole, _, last = model_def.rpartition(".")
    module = _module(model_def)
    if module is not None:
        return module, _model(module)
    module = _module(whole) if whole else None
    if module is None:
        raise ZooError(
            f"`{place}` has no module `{whole or model_def}`; check --model_zoo and --model_def"
        )
    return module, _symbol(module, last)


def _from_path(path: Path) -> ModuleType:
    file = _file(path)
    sys.path.insert(0, str(file.parent))
    # A package keeps its name, so its modules can import each other.
    if file.name == "__init__.py":
        sys.path.insert(0, str(file.parent.parent))
        return importlib.import_module(file.parent.name)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise ZooError(f"`{path}` does not exist; check --model_def")
    for name in ("__init__.py", "model.py"):
        if (path / name).is_file():
            return path / name
    files = sorted(path.glob("*.py"))
    if len(files) == 1:
        return files[0]
    raise ZooError(f"`{path}` has {len(files)} modules; select one with --model_def")


def source(model_def: str, folder: str) -> Path | None:
    """Returns the file that `load` would import first, without importing anything."""
    if "/" in model_def or model_def.endswith(".py"):
        return _file(Path(model_def))
    parts = model_def.split(".")
    # The last part may be the name of a function.
    for n in (len(parts), len(parts) - 1):
        path = Path(folder or ".", *parts[:n])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if n and file.is_file():
                return file
    return None


def _module(name: str) -> ModuleType | None:
    """Imports a module, or returns None if it does not exist; errors inside it propagate."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return importlib.import_module(name) if found is not None and found.loader else None


def _model(module: ModuleType) -> Callable[..., Any]:
    for name in MODEL_NAMES:
        if hasattr(module, name):
            return getattr(module, name)
    names = " nor ".join(f"`{name}`" for name in MODEL_NAMES)
    raise ZooError(f"`{_shown(module)}` has neither {names}; define one of them")


def _symbol(module: ModuleType, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        known = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))) or "nothing"
        raise ZooError(f"`{_shown(module)}` has no `{name}`; it has {known}") from None


def _accepts(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_all or name in parameters


def _takes(function: Callable[..., Any]) -> str:
    names = ", ".join(inspect.signature(function).parameters)
    return f", which takes {names}" if names else ", which takes none"


def _name(function: Any) -> str:
    return getattr(function, "__name__", str(function))


def _shown(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__


def _value(text: str) -> Any:
    """Parses the text as a boolean or a number if possible; otherwise returns the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
