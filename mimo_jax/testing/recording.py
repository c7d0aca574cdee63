"""An engine that writes down every logit its programs compute, in the order of the loop.

The loop is the product's own: only the two models are wrapped, whose forwards hand their logits to
the host from inside the compiled program (`io_callback`, ordered). What the state machine made of
them is then replayed elsewhere (`replay.py`). One device, and slow: for tests.
"""

from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.experimental import io_callback

from mimo_jax.decode.engine import Engine
from mimo_jax.decode.placement import Model
from mimo_jax.models.params import split

PREFILL, STEP, DRAFT, TREE = "prefill", "step", "draft", "tree"


class Event(NamedTuple):
    """Logits of one forward.

    Attributes:
      kind: PREFILL (of a prompt chunk, [1, 1, v]), STEP (target, [b, t, v]), DRAFT (drafter,
        [b, m, v]) or TREE (target, [b, n, v]).
      logits: float32.
      nodes: Of a TREE: token ids [b, n], depths [b, n] and sees [b, n, n].
    """

    kind: str
    logits: np.ndarray
    nodes: tuple[np.ndarray, ...] = ()


class Recorder:
    """Collects events; hashed by identity, so that a module may hold it."""

    def __init__(self):
        self._events: list[Event] = []

    def note(self, kind: str, logits, nodes: tuple = ()) -> None:
        """Notes logits of a running program, and the tree that they are of."""

        def append(values, *nodes):
            self._events.append(Event(kind, np.array(values), tuple(map(np.array, nodes))))

        io_callback(append, None, logits, *nodes, ordered=True)

    def take(self) -> list[Event]:
        """The events since the last call."""
        jax.effects_barrier()
        events, self._events = self._events, []
        return events


def _recorded(model: Model, recorder: Recorder, **overrides) -> Model:
    """The model with methods that note their logits on the way."""
    module = nnx.merge(model.graph, model.params)
    methods = {}
    for name, (kind, logits_of) in overrides.items():
        inner = getattr(type(module), name)

        def noting(self, *args, inner=inner, kind=kind, logits_of=logits_of, **kwargs):
            out = inner(self, *args, **kwargs)
            # look(token_ids, cache, start, depths, sees)
            nodes = (args[0], args[3], args[4]) if kind == TREE else ()
            self.recorder.note(kind, logits_of(out), nodes)
            return out

        methods[name] = noting
    module.__class__ = type(f"Recorded{type(module).__name__}", (type(module),), methods)
    module.recorder = recorder
    return Model(model.config, *split(module))


def recording_engine(target: Model, drafter: Model | None, **options) -> tuple[Engine, Recorder]:
    """An engine whose every forward is noted, and where.

    Args:
      target: As `Engine` takes it; no mesh.
      drafter: As `Engine` takes it.
      **options: Of Engine.

    Example: `engine, recorder = recording_engine(target, None, max_len=64)`; after a prefill
      `recorder.take()` holds one event per prompt chunk.
    """
    recorder, of_output = Recorder(), lambda out: out.logits
    target = _recorded(
        target,
        recorder,
        prefill=(PREFILL, of_output),
        step=(STEP, of_output),
        look=(TREE, lambda out: out[0].logits),
    )
    if drafter is not None:
        drafter = _recorded(drafter, recorder, draft_logits=(DRAFT, lambda logits: logits))
    return Engine(target, drafter, **options), recorder
