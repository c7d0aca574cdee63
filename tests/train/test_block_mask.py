"""Run: pytest tests/train/test_block_mask.py"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.layers import masks
from mimo_jax.train import block_mask
from tests.oracles import block_mask as oracle

B, S, N, M1 = 3, 29, 7, 5


@pytest.fixture
def packed() -> dict[str, np.ndarray]:
    """Three rows of documents (prompt then answer) and padding; positions differ per row."""
    rng = np.random.default_rng(0)
    segment_ids, loss_mask = np.zeros((B, S), np.int32), np.zeros((B, S), bool)
    for row, lengths in enumerate([(9, 4, 12), (29,), (2, 3, 11, 6)]):
        start = 0
        for segment, length in enumerate(lengths, start=1):
            segment_ids[row, start : start + length] = segment
            loss_mask[row, start + length // 3 : start + length] = True
            start += length
    loss_mask[1, 20] = False  # a hole inside an answer
    return {
        "token_ids": rng.integers(3, 97, (B, S), np.int32),
        "segment_ids": segment_ids,
        "loss_mask": loss_mask,
    }


def gathered_mask(anchor_pos, keep, index, is_valid, *, draft_block_len, window):
    """layers/masks.py's rule over gathered keys, as the trainer applies it: [b, a, m1, c]."""
    b, a, c = index.shape
    key_pos = jnp.where(is_valid, index, -1).reshape(b * a, c)
    mask = masks.draft_context_mask(anchor_pos.reshape(-1), draft_block_len, key_pos, window)
    return mask.reshape(b, a, draft_block_len, c) & keep[:, :, None, None]


def dense_mask(anchor_pos, keep, segment_ids, *, draft_block_len, window=None):
    """The same rule over every position of the row: [b, a, m1, s]."""
    b, a = anchor_pos.shape
    s = segment_ids.shape[1]
    anchor_segment = jnp.take_along_axis(segment_ids, anchor_pos, axis=1)
    is_same = segment_ids[:, None, :] == anchor_segment[:, :, None]
    index = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32)[None, None], (b, a, s))
    return gathered_mask(
        anchor_pos, keep, index, is_same, draft_block_len=draft_block_len, window=window
    )


def choose(
    packed: dict[str, np.ndarray], num_anchors: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    pos, keep = block_mask.choose_anchors(
        jax.random.key(seed),
        jnp.asarray(packed["loss_mask"]),
        num_anchors,
        jnp.asarray(packed["segment_ids"]),
        jnp.arange(B, dtype=jnp.int32),
    )
    return np.asarray(pos), np.asarray(keep)


@pytest.mark.parametrize("num_anchors", [1, N, S, S + 4])
def test_anchors_are_valid_distinct_sorted(packed: dict[str, np.ndarray], num_anchors: int) -> None:
    pos, keep = choose(packed, num_anchors)
    valid = oracle.valid_anchors(packed["loss_mask"], packed["segment_ids"])
    assert pos.shape == keep.shape == (B, num_anchors)
    assert pos.dtype == np.int32
    for row in range(B):
        kept = pos[row][keep[row]].tolist()
        assert len(kept) == min(num_anchors, len(valid[row]))
        assert kept == sorted(set(kept))
        assert set(kept) <= valid[row]
        assert keep[row].tolist() == sorted(keep[row].tolist(), reverse=True)
        assert not pos[row][~keep[row]].any()


def test_every_valid_position_is_drawn_equally_often(packed: dict[str, np.ndarray]) -> None:
    draws, valid = 400, oracle.valid_anchors(packed["loss_mask"], packed["segment_ids"])
    keys = jax.random.split(jax.random.key(5), draws)
    mask, segments = jnp.asarray(packed["loss_mask"]), jnp.asarray(packed["segment_ids"])
    ids = jnp.arange(B, dtype=jnp.int32)
    draw = lambda key: block_mask.choose_anchors(key, mask, 4, segments, ids)
    pos, keep = jax.vmap(draw)(keys)
    for row in range(B):
        counts = np.bincount(np.asarray(pos)[:, row][np.asarray(keep)[:, row]], minlength=S)
        expected = draws * 4 / len(valid[row])
        # five standard deviations of a binomial; valid positions only
        assert abs(counts[sorted(valid[row])] - expected).max() < 5 * expected**0.5
        assert counts.sum() == draws * 4


def test_anchors_of_a_row_do_not_depend_on_the_others(packed: dict[str, np.ndarray]) -> None:
    whole, _ = choose(packed, N)
    for row in range(B):
        alone, _ = block_mask.choose_anchors(
            jax.random.key(0),
            jnp.asarray(packed["loss_mask"][row : row + 1]),
            N,
            jnp.asarray(packed["segment_ids"][row : row + 1]),
            jnp.array([row], jnp.int32),
        )
        np.testing.assert_array_equal(alone[0], whole[row])


def test_equal_rows_and_chunks_draw_differently() -> None:
    everything = jnp.ones((2, 80), bool)
    pos, keep = block_mask.choose_anchors(
        jax.random.key(0),
        everything,
        10,
        everything.astype(jnp.int32),
        jnp.arange(2, dtype=jnp.int32),
        chunk_len=40,
    )
    assert keep.all()
    in_chunk = np.asarray(pos).reshape(4, 5) % 40
    assert len({tuple(draw.tolist()) for draw in in_chunk}) == 4


def test_each_chunk_draws_its_share_from_its_own_positions(packed: dict[str, np.ndarray]) -> None:
    """Chunks of 8 over 29 positions: four chunks, the last one short; 7 anchors are 2 each."""
    packed["loss_mask"][:, 15] = False
    arguments = [jnp.asarray(packed[name]) for name in ("loss_mask", "segment_ids")]
    draw = lambda num_anchors, mask, segments: block_mask.choose_anchors(
        jax.random.key(0), mask, num_anchors, segments, jnp.arange(B, dtype=jnp.int32), chunk_len=8
    )
    pos, keep = map(np.asarray, draw(7, *arguments))
    valid = oracle.valid_anchors(packed["loss_mask"], packed["segment_ids"])
    assert pos.shape == keep.shape == (B, 8)
    for row in range(B):
        for chunk in range(4):
            kept = pos[row, 2 * chunk : 2 * chunk + 2][keep[row, 2 * chunk : 2 * chunk + 2]]
            mine = {p for p in valid[row] if p // 8 == chunk}
            assert len(kept) == min(2, len(mine))
            assert set(kept.tolist()) <= mine
    # A row that ends with a chunk keeps the draws before its end (15 has no successor there).
    head_pos, _ = draw(4, *(a[:, :16] for a in arguments))
    np.testing.assert_array_equal(head_pos, pos[:, :4])


def test_no_valid_position(packed: dict[str, np.ndarray]) -> None:
    packed["loss_mask"][:] = False
    pos, keep = choose(packed, N)
    assert not keep.any()
    assert not pos.any()


def test_anchor_and_successor_in_one_document() -> None:
    # the only learned neighbours stand in different documents
    pos, keep = block_mask.choose_anchors(
        jax.random.key(0),
        jnp.array([[False, True, True, False]]),
        2,
        jnp.array([[1, 1, 2, 2]], jnp.int32),
        jnp.array([0], jnp.int32),
    )
    assert not keep.any()
    assert pos.tolist() == [[0, 0]]


@pytest.mark.parametrize("seed", [0, 1])
def test_labels_match_the_oracle(packed: dict[str, np.ndarray], seed: int) -> None:
    pos, keep = choose(packed, 24, seed)  # more than some rows hold, so padding is present
    assert not keep.all()
    arrays = [packed["token_ids"], packed["loss_mask"], packed["segment_ids"], pos, keep]
    labels, is_valid = block_mask.draft_block_labels(*map(jnp.asarray, arrays), M1)
    expected_labels, expected_valid = oracle.block_labels(*arrays, M1)
    np.testing.assert_array_equal(is_valid, expected_valid)
    np.testing.assert_array_equal(labels, expected_labels)
    assert is_valid[..., 0].sum() == keep.sum()  # a chosen anchor always has its first label


def test_labels_worked_example() -> None:
    labels, is_valid = block_mask.draft_block_labels(
        jnp.array([[10, 11, 12, 13]], jnp.int32),
        jnp.ones((1, 4), bool),
        jnp.ones((1, 4), jnp.int32),
        jnp.array([[2]], jnp.int32),
        jnp.array([[True]]),
        4,
    )
    assert labels.tolist() == [[[13, 0, 0]]]
    assert is_valid.tolist() == [[[True, False, False]]]


@pytest.mark.parametrize("window", [None, 1, 2, 6, 64])
def test_context_mask_matches_the_oracle(packed: dict[str, np.ndarray], window: int | None) -> None:
    pos, keep = choose(packed, 24)
    actual = dense_mask(
        jnp.asarray(pos),
        jnp.asarray(keep),
        jnp.asarray(packed["segment_ids"]),
        draft_block_len=M1,
        window=window,
    )
    expected = oracle.context_mask(pos, keep, packed["segment_ids"], M1, window)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("window", [2, 6, 31])
def test_gathered_mask_equals_the_dense_one(packed: dict[str, np.ndarray], window: int) -> None:
    pos, keep = choose(packed, 24)
    segments = jnp.asarray(packed["segment_ids"])
    index, is_valid = block_mask.gather_context_index(
        jnp.asarray(pos), window=window, segment_ids=segments
    )
    assert index.shape == (B, 24, window - 1)
    gathered = gathered_mask(
        jnp.asarray(pos), jnp.asarray(keep), index, is_valid, draft_block_len=M1, window=window
    )
    scattered = np.zeros((B, 24, M1, S), int)
    for row, block, slot, entry in zip(*np.nonzero(np.asarray(gathered)), strict=True):
        scattered[row, block, slot, index[row, block, entry]] += 1
    expected = oracle.context_mask(pos, keep, packed["segment_ids"], M1, window)
    np.testing.assert_array_equal(scattered, expected.astype(int))


def test_published_example_of_the_window() -> None:
    # anchor 5, window 3, block of 3: slots see {3, 4}, {4}, {}
    mask = dense_mask(
        jnp.array([[5]], jnp.int32),
        jnp.array([[True]]),
        jnp.ones((1, 8), jnp.int32),
        draft_block_len=3,
        window=3,
    )
    seen = [np.flatnonzero(row).tolist() for row in np.asarray(mask)[0, 0]]
    assert seen == [[3, 4], [4], []]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, {2: [[0, 1]] * 4, 5: [[0, 1, 2, 3, 4]] * 4, 9: [list(range(9))] * 4}),
        (
            4,
            {
                2: [[0, 1], [0, 1], [1], []],
                5: [[2, 3, 4], [3, 4], [4], []],
                9: [[6, 7, 8], [7, 8], [8], []],
            },
        ),
    ],
)
def test_golden_masks(window: int | None, expected: dict[int, list[list[int]]]) -> None:
    # twelve positions, anchors 2, 5 and 9, blocks of four
    mask = dense_mask(
        jnp.array([[2, 5, 9]], jnp.int32),
        jnp.ones((1, 3), bool),
        jnp.ones((1, 12), jnp.int32),
        draft_block_len=4,
        window=window,
    )
    for block, rows in zip(np.asarray(mask)[0], expected.values(), strict=True):
        assert [np.flatnonzero(row).tolist() for row in block] == rows


def test_gather_index_worked_example() -> None:
    index, is_valid = block_mask.gather_context_index(jnp.array([[2]], jnp.int32), window=5)
    assert index.tolist() == [[[0, 0, 0, 1]]]
    assert is_valid.tolist() == [[[False, False, True, True]]]
    with pytest.raises(ValueError, match="at least 2"):
        block_mask.gather_context_index(jnp.array([[2]], jnp.int32), window=1)


def test_features_from_the_anchor_on_do_not_leak(packed: dict[str, np.ndarray]) -> None:
    """Moving a feature at or past the anchor must not move anything a slot computes."""
    pos, keep = choose(packed, N)
    segments = jnp.asarray(packed["segment_ids"])
    mask = dense_mask(
        jnp.asarray(pos), jnp.asarray(keep), segments, draft_block_len=M1, window=6
    )

    def read(features: jax.Array) -> jax.Array:  # stands for any attention under this mask
        return jnp.einsum("bnts,bs->bnt", mask.astype(jnp.float32), features)

    features = jax.random.normal(jax.random.key(1), (B, S))
    is_past = jnp.arange(S)[None, None, :] >= jnp.asarray(pos)[:, :, None]
    for block in range(N):
        noise = jnp.where(is_past[:, block], 100.0, 0.0)
        np.testing.assert_array_equal(read(features)[:, block], read(features + noise)[:, block])
        before = jnp.where(is_past[:, block], 0.0, 100.0)
        assert (read(features)[:, block] != read(features + before)[:, block]).any()
