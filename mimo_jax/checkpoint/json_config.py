"""Typed reading of a published config.json: every refusal is one line with file, key and reason.

Null and missing are the same thing, as in the published loaders. Unknown keys are not an error:
published configs are full of settings of no consequence; what would change the mathematics is
refused by name in `hf_target_config.py` and `hf_drafter.py`.
"""

import os
from pathlib import Path
from typing import Any

from mimo_jax.checkpoint.safetensors_reader import CheckpointError, parse_json
from mimo_jax.config import RopeScaling

_REQUIRED = object()
MAX_NUMBER = 1e38
MAX_LAYERS, MAX_EXPERTS, MAX_HEADS = 4096, 65536, 65536


def read_json(path: str | os.PathLike) -> dict:
    """A JSON object from a file; duplicate keys are refused."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_json(data, path)


class Keys:
    """Values of one JSON object by key and type.

    A getter returns its default for a missing key, hence `Any`: with a default of None the caller
    decides what None means.

    Args:
      values: The object.
      path: File it came from, for messages.
      prefix: Where in the file it stands, for messages.
    """

    def __init__(self, values: dict, path: str | os.PathLike, prefix: str = ""):
        self.values, self.path, self.prefix = values, path, prefix

    def error(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.prefix}{key} {message}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _get(self, key: str, default, is_right, expected: str) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise self.error(key, "is missing")
            return default
        if not is_right(value):
            raise self.error(key, f"is {value!r}, expected {expected}")
        return value

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        is_right = lambda v: isinstance(v, int) and not isinstance(v, bool)
        return self._get(key, default, is_right, "an integer")

    def count(self, key: str, limit: int, default: Any = _REQUIRED) -> Any:
        """An integer in 1..limit: lists of this length are about to be made."""
        value = self.integer(key, default)
        if value is not None and not 1 <= value <= limit:
            raise self.error(key, f"is {value}; allowed: 1..{limit}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A number within float32's range; nan and infinities are refused."""
        is_right = lambda v: (
            isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) < MAX_NUMBER
        )
        value = self._get(key, default, is_right, "a number")
        return value if value is None else float(value)

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, lambda v: isinstance(v, bool), "true or false")

    def items(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        is_right = lambda v: (
            isinstance(v, list) and all(isinstance(x, kind) and not isinstance(x, bool) for x in v)
        )
        value = self._get(key, default, is_right, f"a list of {kind.__name__}")
        return value if value is None else tuple(value)

    def nested(self, key: str, default: Any = _REQUIRED) -> "Keys":
        value = self._get(key, default, lambda v: isinstance(v, dict), "an object")
        return Keys(value, self.path, f"{self.prefix}{key}.")

    def allow(self, key: str, *allowed) -> None:
        """Refuses any value but the allowed ones; missing and null are always allowed."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            listed = ", ".join(repr(item) for item in allowed) or "null"
            raise self.error(key, f"{value!r} is not supported; allowed: {listed}")

    def layers(self, key: str, names: dict, num_layers: int, default: Any = _REQUIRED) -> Any:
        """A per-layer list translated by `names`."""
        value = self._get(key, default, lambda v: isinstance(v, list), "a list")
        if value is None:
            return None
        if len(value) != num_layers:
            raise self.error(key, f"has {len(value)} entries for {num_layers} layers")
        for item in value:
            if isinstance(item, (dict, list)) or isinstance(item, bool) or item not in names:
                listed = ", ".join(repr(name) for name in names)
                raise self.error(key, f"has {item!r}, which is unknown; allowed: {listed}")
        return tuple(names[item] for item in value)


def read_rope(keys: Keys) -> tuple[float, RopeScaling | None, float | None]:
    """(theta, scaling, partial_rotary_factor or None) in the old and the new key style.

    New: `rope_parameters` {rope_theta, rope_type, ...}. Old: `rope_theta` beside `rope_scaling`.
    """
    if keys.has("rope_parameters"):
        rope = keys.nested("rope_parameters")
        theta = rope.number("rope_theta", None)
        theta = keys.number("rope_theta", 10000.0) if theta is None else theta
    else:
        theta = keys.number("rope_theta", 10000.0)
        rope = keys.nested("rope_scaling", {})
    kind_key = "rope_type" if rope.has("rope_type") else "type"
    rope.allow(kind_key, "default", "linear", "llama3")
    kind = rope.values.get(kind_key)
    scaling = None
    if kind == "linear":
        scaling = RopeScaling("linear", rope.number("factor"))
    elif kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            rope.integer("original_max_position_embeddings"),
        )
    return theta, scaling, rope.number("partial_rotary_factor", None)


def rope_to_json(theta: float, scaling: RopeScaling | None) -> dict:
    """The inverse of `read_rope`, in the new style."""
    rope = {"rope_theta": float(theta), "rope_type": "default"}
    if scaling is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
    return rope


def rotary_factor(rope_dim: int, head_dim: int) -> float:
    """A factor with int(head_dim * factor) == rope_dim, also where the quotient rounds down.

    Example: 64 of 192 -> 0.3333333333333333; the published 0.334 gives 64 too.
    """
    factor = rope_dim / head_dim
    while int(head_dim * factor) < rope_dim:
        factor += 1e-12
    return factor
