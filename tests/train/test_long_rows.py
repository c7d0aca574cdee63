"""Rows of 32,768 tokens: attention in sections, and the memory of a whole train step.

Run: .venv/bin/python -m pytest tests/train/test_long_rows.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from configs.common import nano_drafter, nano_target
from mimo_jax.layers import masks
from mimo_jax.layers.attention import attend_in_causal_chunks, attend_in_causal_sections
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import abstract
from mimo_jax.models.target import Target
from mimo_jax.train.config import DrafterTrainConfig
from mimo_jax.train.drafter_step import make_drafter_step
from mimo_jax.train.step import Batch, init_state

ROW_LEN, NUM_ANCHORS = 32_768, 2_944  # 2,944 * 7 = 20,608 signals
MOST_BYTES = 600e6  # 392 MB with 128 blocks at a time, 604 with 512, 1,976 with all at once


def test_sections_attend_as_chunks_do() -> None:
    b, t, n, k, h, hv = 2, 48, 4, 2, 5, 3
    keys = jax.random.split(jax.random.key(0), 4)
    queries = jax.random.normal(keys[0], (b, t, n, h))
    key, value = (jax.random.normal(keys[i], (b, k, t, w)) for i, w in ((1, h), (2, hv)))
    sink = jax.random.normal(keys[3], (n,))
    documents = jnp.asarray(np.arange(t)[None] // np.array([[17], [29]]), jnp.int32)

    def mask_of(query_idx, key_idx):
        at = lambda idx: jnp.take_along_axis(documents, idx, axis=1)
        seen = masks.causal_mask(query_idx, key_idx, None)
        return seen & masks.segment_mask(at(query_idx), at(key_idx))

    index = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    chunks = functools.partial(
        attend_in_causal_chunks, mask=mask_of(index, index), chunk_len=16, sink=sink
    )
    sections = functools.partial(
        attend_in_causal_sections, key_mask_fn=mask_of, chunk_len=4, num_sections=3, sink=sink
    )
    arguments = (queries, key, value)

    def both(attention):
        out, pull_back = jax.vjp(attention, *arguments)
        return out, *pull_back(jnp.sin(out))

    found = [jax.jit(both, static_argnums=0)(attention) for attention in (sections, chunks)]
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, atol=5e-6)


def temp_bytes(block_chunk: int | None) -> int:
    """Memory of a compiled step of the nano models on one long row, arguments not counted."""
    target_config = dataclasses.replace(nano_target(), max_position=ROW_LEN)
    config = dataclasses.replace(nano_drafter(), max_position=ROW_LEN)
    target_graph, target_params = abstract(
        lambda: Target(target_config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    )
    graph, params = abstract(lambda: Drafter(config, rngs=nnx.Rngs(1), dtype=jnp.float32))
    shape = jax.ShapeDtypeStruct
    trained = {"drafter": params, "mask_embedding": shape((192,), jnp.float32)}
    optimizer = optax.sgd(1.0)  # Muon needs little memory and long to compile
    options = DrafterTrainConfig(
        num_anchors=NUM_ANCHORS, batch_rows=1, row_len=ROW_LEN, block_chunk=block_chunk
    )
    step = make_drafter_step(target_graph, graph, optimizer, options, config)
    state = jax.eval_shape(lambda p: init_state(p, optimizer), trained)
    ids = shape((1, ROW_LEN), jnp.int32)
    batch = Batch(ids, ids, shape((1, ROW_LEN), jnp.bool_), ids)
    program = step.lower(state, target_params, batch, shape((), jnp.int32)).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_a_step_on_a_long_row_keeps_within_its_memory() -> None:
    assert temp_bytes(256) < MOST_BYTES


@pytest.mark.slow
def test_without_chunks_it_would_not() -> None:
    assert temp_bytes(None) > 3 * MOST_BYTES
