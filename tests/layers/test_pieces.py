"""A long memory read in pieces against the loops, below any limit and with garbage past it.

Run: .venv/bin/python -m pytest tests/layers/test_pieces.py

Seen red: a last piece that is clamped but not masked; a limit off by one; a top not rescaled.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.layers import pieces as pieces_module
from mimo_jax.layers.attention import Stretch, attend, fold_queries
from mimo_jax.layers.pieces import Pieces, sum_pieces
from tests.oracles import attention as oracle

B, N, K, H, HV, S, PIECE = 2, 6, 3, 8, 4, 21, 8
ATOL = 3e-6  # as tests/layers/test_attention.py


def read_from(keys, values):
    def read(row, num_rows, slot, num):
        part = lambda x: jax.lax.dynamic_slice(
            x, (row, 0, slot, 0), (num_rows, x.shape[1], num, x.shape[3])
        )
        return part(keys), part(values)

    return read


@pytest.mark.parametrize("form", ["one by one", "as matrices", "together", "whole"])
@pytest.mark.parametrize("limit", [(0, 1), (8, 9), (21, 20), (5, 16)])
def test_pieces_beside_a_stretch_are_one_softmax(form, limit, monkeypatch):
    t, own = 2, 3
    rng = np.random.default_rng(sum(limit))
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    queries, sink = draw(B, t, N, H), draw(N)
    keys, values = draw(B, K, S + own, H), draw(B, K, S + own, HV)
    seen = np.zeros((B, t, S + own), bool)
    seen[:, :, S:] = rng.random((B, t, own)) < 0.7
    seen[:, :, S] = True
    limits = np.stack([np.asarray(limit)] * t, axis=1).astype(np.int32)
    limits[:, 1] = np.minimum(limits[:, 1] + 2, S)  # queries of a block may differ
    for row in range(B):
        for query in range(t):
            seen[row, query, : limits[row, query]] = True
    positions = np.zeros((B, S + own), np.int32)
    want = oracle.attention(queries, keys, values, positions, positions, sink=sink, seen=seen)
    for row in range(B):  # nobody may look past a row's highest limit
        end = limits[row].max()
        keys[row, :, end:S], values[row, :, end:S] = 1e4, -1e4

    if form == "together":
        monkeypatch.setattr(pieces_module, "_SCORES_AT_ONCE", 4 * PIECE)  # one piece at a time
    if form == "as matrices":
        monkeypatch.setattr(pieces_module, "_MAX_ONE_BY_ONE", 0)

    @jax.jit
    def run(queries, keys, values, limits):
        memory = (keys[:, :, :S], values[:, :, :S])
        pieces = Pieces(read_from(*memory), S, PIECE, limits, memory if form == "whole" else None)
        if form in ("together", "whole"):
            earlier = pieces_module._together(fold_queries(queries, K), pieces=pieces)
        else:
            earlier = sum_pieces(queries, pieces, K)
        beside = Stretch(keys[:, :, S:], values[:, :, S:], jnp.asarray(seen[:, :, S:]))
        return attend(queries, [beside], sink=jnp.asarray(sink), earlier=earlier)

    np.testing.assert_allclose(run(queries, keys, values, limits), want, atol=ATOL, rtol=0)


def test_pieces_past_the_limit_are_not_read():
    """NaN there would show: masked or not, a piece that is read is multiplied."""
    keys = np.ones((1, K, 3 * PIECE, H), np.float32)
    values = np.ones((1, K, 3 * PIECE, HV), np.float32)
    keys[:, :, PIECE:], values[:, :, PIECE:] = np.nan, np.nan
    limit = np.full((1, 1), PIECE, np.int32)

    @jax.jit
    def run(keys, values, limit):
        pieces = Pieces(read_from(keys, values), 3 * PIECE, PIECE, limit)
        return sum_pieces(jnp.ones((1, 1, N, H)), pieces, K)

    sums = run(keys, values, limit)
    np.testing.assert_allclose(sums.weighted / sums.total, 1.0, rtol=1e-6)
    np.testing.assert_allclose(sums.total, PIECE, rtol=1e-6)


def test_many_rows_share_a_loop():
    b = 9
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((b, K, S, H)).astype(np.float32)
    values = rng.standard_normal((b, K, S, HV)).astype(np.float32)
    queries = rng.standard_normal((b, 1, N, H)).astype(np.float32)
    limit = np.arange(1, b + 1, dtype=np.int32)[:, None]

    @jax.jit
    def run(queries, keys, values, limit):
        sums = sum_pieces(queries, Pieces(read_from(keys, values), S, PIECE, limit), K)
        return (sums.weighted / sums.total).reshape(b, 1, N, HV)

    seen = np.arange(S)[None, None, :] < limit[:, :, None]
    positions = np.zeros((b, S), np.int32)
    want = oracle.attention(queries, keys, values, positions, positions, seen=seen)
    np.testing.assert_allclose(run(queries, keys, values, limit), want, atol=ATOL, rtol=0)


def test_accelerators_get_no_loop_in_a_step_and_pieces_in_a_prompt():
    """Lowered for a GPU that is not here; a CPU has its loops per row."""

    def text(t, platform):
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, t, 2, 8), (1, 1, 2**18, 8))]

        def run(queries, keys):
            limit = jnp.full((1, t), 5, jnp.int32)
            memory = (keys, keys)
            return sum_pieces(queries, Pieces(read_from(*memory), 2**18, 1024, limit, memory), 1)

        lowered = jax.jit(run).trace(*shapes).lower(lowering_platforms=(platform,))
        return lowered.as_text()

    assert "while" not in text(8, "cuda")
    assert "while" in text(512, "cuda")
    assert "x262144" not in text(512, "cuda").replace("1x1x262144x8", "")
    assert "while" in text(8, "cpu")
