# SPDX-License-Identifier: Apache-2.0
"""The state of a training script as bytes: a safetensors file with a JSON tree in its metadata.

A `state_dict` is a tree of tensors and plain values: None, bool, int, float, str, lists, tuples and
dictionaries. Anything else is refused by its path, and nothing is ever pickled.

Tensors are those of PyTorch, or numpy arrays in a process that has not imported it or trains with
something else, such as Keras on TensorFlow or JAX.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, OrderedDict
from typing import Any

import numpy as np

from elasticdl._zoo import ZooError

_FORMAT = "1"
_TREE = "elasticdl.state"
_VERSION = "elasticdl.format"
_LENGTH_BYTES = 8
_MAX_HEADER = 1 << 30

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}
# Whether tensors are numpy arrays, even if something has imported PyTorch.
_HAS_ARRAYS = False


def hold_arrays() -> None:
    """From now on, tensors are numpy arrays: the script may import PyTorch for another purpose."""
    global _HAS_ARRAYS
    _HAS_ARRAYS = True


def dump(objects: dict[str, Any]) -> bytes:
    """Returns a safetensors file with the trees of `objects`, each under its name."""
    tensors: list[Any] = []
    tree = {name: _to_json(value, name, 0, tensors) for name, value in objects.items()}
    header: dict[str, Any] = {"__metadata__": {_VERSION: _FORMAT, _TREE: json.dumps(tree)}}
    parts, end = [], 0
    for number, tensor in enumerate(tensors):
        part = _bytes(tensor)
        offsets = [end, end + len(part)]
        shape = list(tensor.shape)
        header[str(number)] = {
            "dtype": _DTYPES[_dtype(tensor)],
            "shape": shape,
            "data_offsets": offsets,
        }
        parts.append(part)
        end += len(part)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *parts])


def parse(data: bytes) -> dict[str, Any]:
    """Returns the trees that `dump` wrote."""
    try:
        return _parse(data)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise ZooError(f"the state of the training script is corrupt: {error}") from None


def load(value: Any, state: Any) -> None:
    """Loads the state of an object. PyTorch would convert that of optimizers to other types."""
    value.load_state_dict(_placed(state, value.state_dict()))
    torch = _torch()
    if torch is None or not isinstance(value, torch.optim.Optimizer):
        return
    parameters = [parameter for group in value.param_groups for parameter in group["params"]]
    for index, kept in state["state"].items():
        if isinstance(index, int) and isinstance(kept, dict):
            now = value.state[parameters[index]]
            tensors = {key: part for key, part in kept.items() if _is_tensor(part)}
            now.update({key: _placed(part, now.get(key)) for key, part in tensors.items()})


def _placed(state: Any, now: Any) -> Any:
    """Returns a tree whose tensors are on the devices of those that they replace."""
    if _is_tensor(state):
        return state.to(now.device) if _is_tensor(now) and hasattr(now, "to") else state
    if type(state) is dict and isinstance(now, dict):
        return {key: _placed(part, now.get(key)) for key, part in state.items()}
    if type(state) in (list, tuple) and isinstance(now, (list, tuple)) and len(now) == len(state):
        return type(state)(_placed(part, other) for part, other in zip(state, now))
    return state


def difference(before: Any, after: Any) -> tuple[Any, ...] | None:
    """Returns the keys that lead to the first part of a tree that differs by a bit, or None."""
    if _is_tensor(before) and _is_tensor(after):
        is_same = before.dtype == after.dtype and before.shape == after.shape
        return None if is_same and _bytes(before) == _bytes(after) else ()
    if type(before) is not type(after):
        return ()
    if isinstance(before, (list, tuple)):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if not isinstance(before, dict):
        return None if repr(before) == repr(after) else ()
    if before.keys() != after.keys():
        return ()
    for key in before:
        below = difference(before[key], after[key])
        if below is not None:
            return key, *below
    return None


def show(keys: tuple[Any, ...]) -> str:
    """Returns the path of a part of a tree, as in error messages."""
    return f"{keys[0]}" + "".join(f"[{json.dumps(key)}]" for key in keys[1:])


def _parse(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if len(data) < _LENGTH_BYTES or length > _MAX_HEADER or start > len(data):
        raise ValueError("its header is cut off")
    header = json.loads(data[_LENGTH_BYTES:start])
    metadata = header.pop("__metadata__")
    if metadata[_VERSION] != _FORMAT:
        raise ValueError(f"it has format {metadata[_VERSION]}, this version reads {_FORMAT}")
    tensors = {int(name): _tensor(entry, data, start) for name, entry in header.items()}
    tree = json.loads(metadata[_TREE])
    return {name: _from_json(value, tensors) for name, value in tree.items()}


def _to_json(value: Any, path: str, depth: int, tensors: list[Any]) -> Any:
    """Returns plain JSON; what JSON lacks is an object with one key, its kind."""

    def inner(part: Any, key: Any) -> Any:
        is_attribute = depth == 0 and isinstance(key, str) and key.isidentifier()
        below = f"{path}.{key}" if is_attribute else f"{path}[{json.dumps(key)}]"
        return _to_json(part, below, depth + 1, tensors)

    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if _is_tensor(value):
        _check_tensor(value, path)
        tensors.append(value.detach() if hasattr(value, "detach") else value)
        return {"tensor": len(tensors) - 1}
    if kind in (list, tuple):
        items = [inner(item, index) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind in (dict, OrderedDict, Counter):
        for key in value:
            if type(key) not in (str, int):
                raise _refused(f"the key {key!r} of {path}", key)
        items = [[key, inner(item, key)] for key, item in value.items()]
        return {"counter" if kind is Counter else "dict": items}
    raise _refused(path, value)


def _from_json(value: Any, tensors: dict[int, Any]) -> Any:
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "float":
        return float(content)
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_from_json(item, tensors) for item in content)
    if kind not in ("dict", "counter"):
        raise ValueError(f"it has a value of unknown kind `{kind}`")
    items = {key: _from_json(item, tensors) for key, item in content}
    return Counter(items) if kind == "counter" else items


def _refused(what: str, value: Any) -> ZooError:
    article = "an" if type(value).__name__[0] in "aeiouAEIOU" else "a"
    return ZooError(
        f"{what} is {article} {type(value).__name__}; the state of a training script can only hold "
        "tensors, numbers, strings, None, lists, tuples and dictionaries"
    )


def _torch() -> Any:
    """Returns PyTorch, if tensors are its."""
    return None if _HAS_ARRAYS else sys.modules.get("torch")


def _is_tensor(value: Any) -> bool:
    torch = _torch()
    return isinstance(value, np.ndarray if torch is None else torch.Tensor)


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_tensor(tensor: Any, path: str) -> None:
    is_sparse = "strided" not in str(getattr(tensor, "layout", "strided"))
    if is_sparse or _dtype(tensor) not in _DTYPES:
        kind = str(tensor.layout).removeprefix("torch.") if is_sparse else _dtype(tensor)
        raise ZooError(f"{path} is a tensor of {kind}, which cannot be saved")


def _bytes(tensor: Any) -> bytes:
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(sys.modules["torch"].uint8).numpy().tobytes()


def _tensor(entry: dict[str, Any], data: bytes, start: int) -> Any:
    name, shape = _NAMES[entry["dtype"]], entry["shape"]
    torch = _torch()
    dtype = _numpy_dtype(name) if torch is None else getattr(torch, name)
    first, end = entry["data_offsets"]
    if not 0 <= first <= end <= len(data) - start:
        raise ValueError("a tensor is cut off")
    if math.prod(shape) * dtype.itemsize != end - first:
        raise ValueError("a tensor does not have the size of its shape")
    if first == end:
        return (torch or np).empty(shape, dtype=dtype)
    # Copied: the bytes may not be aligned.
    copied = np.frombuffer(data, np.uint8, end - first, start + first).copy()
    if torch is None:
        return copied.view(dtype).reshape(shape)
    return torch.from_numpy(copied).view(dtype).reshape(shape)


def _numpy_dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
