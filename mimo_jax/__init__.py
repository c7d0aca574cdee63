"""Speculative decoding of MiMo-style mixture-of-experts models in JAX.

A large *target* model decides what text comes out; a small *drafter* proposes a block of tokens
that the target checks in one pass. This package holds both models, the loop that drafts, verifies
and commits inside one compiled program, and the trainer that makes a drafter. Terms are defined in
GLOSSARY.md, the modules and their import order in ARCHITECTURE.md.

Only public names belong in this file. Importing it must not start JAX or touch a device: `--help`
and the planner answer on machines where that is slow or impossible.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mimo_jax.checkpoint.safetensors_reader import CheckpointError as CheckpointError
    from mimo_jax.config import ConfigError as ConfigError
    from mimo_jax.config import DrafterConfig as DrafterConfig
    from mimo_jax.config import TargetConfig as TargetConfig
    from mimo_jax.decode.engine import Engine as Engine
    from mimo_jax.decode.functional import emitted_ids as emitted_ids
    from mimo_jax.decode.functional import initial_state as initial_state
    from mimo_jax.decode.functional import step_function as step_function
    from mimo_jax.decode.generate import Completion as Completion
    from mimo_jax.decode.jobs import Output as Output
    from mimo_jax.decode.llm import LLM as LLM
    from mimo_jax.decode.params import SamplingParams as SamplingParams
    from mimo_jax.decode.placement import Model as Model
    from mimo_jax.decode.request import Request as Request
    from mimo_jax.decode.stats import AcceptStats as AcceptStats
    from mimo_jax.decode.step import DecodeState as DecodeState

__version__ = "0.1.0.dev0"

# Where each public name lives; imported when it is first asked for.
_HOME = {
    "AcceptStats": "decode.stats",
    "CheckpointError": "checkpoint.safetensors_reader",
    "Completion": "decode.generate",
    "ConfigError": "config",
    "DecodeState": "decode.step",
    "DrafterConfig": "config",
    "Engine": "decode.engine",
    "LLM": "decode.llm",
    "Model": "decode.placement",
    "Output": "decode.jobs",
    "Request": "decode.request",
    "SamplingParams": "decode.params",
    "TargetConfig": "config",
    "emitted_ids": "decode.functional",
    "initial_state": "decode.functional",
    "step_function": "decode.functional",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
