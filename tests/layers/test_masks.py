"""Every mask as a picture: rows are queries, columns keys, 1 = sees.

Run: .venv/bin/python -m pytest tests/layers/test_masks.py
"""

import jax.numpy as jnp
import numpy as np

from mimo_jax.layers import masks


def picture(text: str) -> np.ndarray:
    return np.array([[cell == "1" for cell in line.split()] for line in text.strip().split("\n")])


def ids(*values: int):
    return jnp.asarray([values], jnp.int32)


def check(mask, text: str):
    np.testing.assert_array_equal(np.asarray(mask)[0], picture(text))


def test_causal():
    check(
        masks.causal_mask(ids(0, 1, 2), ids(0, 1, 2), None),
        """
        1 . .
        1 1 .
        1 1 1
        """,
    )


def test_window_of_three_keys_counts_the_query():
    index = ids(0, 1, 2, 3, 4)
    check(
        masks.causal_mask(index, index, 3),
        """
        1 . . . .
        1 1 . . .
        1 1 1 . .
        . 1 1 1 .
        . . 1 1 1
        """,
    )


def test_a_ring_in_any_order_with_empty_slots():
    check(
        masks.causal_mask(ids(7, 8), ids(8, 5, -1, 7, 6), 3),
        """
        . 1 . 1 1
        1 . . 1 1
        """,
    )
    # Without a window an empty slot is still nothing.
    check(masks.causal_mask(ids(7), ids(-1, 7), None), ". 1")


def test_segments():
    segments = ids(1, 1, 2, 0)
    check(
        masks.segment_mask(segments, segments),
        """
        1 1 . .
        1 1 . .
        . . 1 .
        . . . 1
        """,
    )


def test_draft_context_ends_before_the_anchor():
    anchor = jnp.asarray([5], jnp.int32)
    check(
        masks.draft_context_mask(anchor, 2, ids(0, 1, 2, 3, 4, 5, 6, -1), None),
        """
        1 1 1 1 1 . . .
        1 1 1 1 1 . . .
        """,
    )


def test_draft_context_window_moves_with_the_slot():
    anchor = jnp.asarray([5], jnp.int32)
    check(
        masks.draft_context_mask(anchor, 3, ids(1, 2, 3, 4, 5), 3),
        """
        . . 1 1 .
        . . . 1 .
        . . . . .
        """,
    )


def test_draft_block_both_ways_and_backwards():
    active = jnp.asarray([3], jnp.int32)
    check(
        masks.draft_block_mask(active, 4, False),
        """
        1 1 1 .
        1 1 1 .
        1 1 1 .
        1 1 1 1
        """,
    )
    check(
        masks.draft_block_mask(active, 4, True),
        """
        1 . . .
        1 1 . .
        1 1 1 .
        1 1 1 1
        """,
    )


def test_rows_are_independent():
    active = jnp.asarray([1, 2], jnp.int32)
    mask = np.asarray(masks.draft_block_mask(active, 2, False))
    np.testing.assert_array_equal(mask, [[[1, 0], [1, 1]], [[1, 1], [1, 1]]])
    anchors = jnp.asarray([0, 2], jnp.int32)
    keys = jnp.asarray([[0, 1], [0, 1]], jnp.int32)
    mask = np.asarray(masks.draft_context_mask(anchors, 1, keys, None))
    np.testing.assert_array_equal(mask, [[[0, 0]], [[1, 1]]])
