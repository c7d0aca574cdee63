"""Run: pytest tests/train/test_data.py"""

from collections import Counter

import numpy as np
import pytest

from mimo_jax.train import data

ROW_LEN, PAD = 48, 0


def make_docs(num_docs: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Documents whose every token is its own, so that each can be found again."""
    rng, docs, next_id = np.random.default_rng(seed), [], 1
    for prompt_len, answer_len in rng.integers(1, 17, (num_docs, 2)):
        ids = list(range(next_id, next_id + prompt_len + answer_len))
        docs.append((ids[:prompt_len], ids[prompt_len:]))
        next_id += prompt_len + answer_len
    return docs


def unpack(rows: data.PackedRows) -> list[tuple[list[int], list[int]]]:
    docs = []
    for ids, segments, learned in zip(
        rows.token_ids, rows.segment_ids, rows.loss_mask, strict=True
    ):
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            docs.append((ids[here & ~learned].tolist(), ids[here & learned].tolist()))
    return docs


def test_nothing_is_lost_and_masks_are_right() -> None:
    docs = make_docs(213)
    rows = data.pack_documents(docs, ROW_LEN, pad_id=PAD, seed=3)
    assert sorted(unpack(rows)) == sorted(docs)
    assert rows.token_ids.dtype == rows.segment_ids.dtype == rows.positions.dtype == np.int32
    assert rows.loss_mask.dtype == bool
    is_padding = rows.segment_ids == 0
    assert (rows.token_ids[is_padding] == PAD).all()
    assert not rows.loss_mask[is_padding].any()
    assert not rows.positions[is_padding].any()


def test_documents_are_contiguous_and_positions_restart() -> None:
    rows = data.pack_documents(make_docs(97), ROW_LEN, pad_id=PAD, seed=1)
    for segments, positions in zip(rows.segment_ids, rows.positions, strict=True):
        used = segments[segments > 0]
        assert (segments[: len(used)] == used).all()  # padding only at the end
        assert set(np.diff(used)) <= {0, 1}
        assert used[0] == 1
        for segment in range(1, used.max() + 1):
            here = positions[segments == segment]
            assert here.tolist() == list(range(len(here)))


def test_rows_are_well_filled_and_order_follows_the_seed() -> None:
    docs = make_docs(900)
    rows = data.pack_documents(docs, ROW_LEN, pad_id=PAD, seed=1)
    assert (rows.segment_ids > 0).mean() > 0.96  # measured .99; documents have 2..32 tokens
    again = data.pack_documents(iter(docs), ROW_LEN, pad_id=PAD, seed=1)
    other = data.pack_documents(docs, ROW_LEN, pad_id=PAD, seed=2)
    for a, b in zip(rows, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (
        rows.token_ids.shape != other.token_ids.shape or (rows.token_ids != other.token_ids).any()
    )


def test_worked_example() -> None:
    docs = [([1], [2, 3]), ([4, 5], [6])]
    seed = next(s for s in range(9) if np.random.default_rng(s).permutation(2)[0] == 0)
    rows = data.pack_documents(docs, 8, pad_id=9, seed=seed)
    assert rows.token_ids.tolist() == [[1, 2, 3, 4, 5, 6, 9, 9]]
    assert rows.segment_ids.tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]]
    assert rows.loss_mask.astype(int).tolist() == [[0, 1, 1, 0, 0, 1, 0, 0]]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]


@pytest.mark.parametrize(
    ("prompt_len", "answer_len", "learned"), [(3, 9, 4), (7, 2, 0), (9, 4, 0), (0, 7, 7), (2, 5, 5)]
)
def test_long_documents_lose_their_end(prompt_len: int, answer_len: int, learned: int) -> None:
    docs = [(list(range(1, prompt_len + 1)), list(range(101, 101 + answer_len))), ([], [])]
    rows = data.pack_documents(docs, 7, pad_id=PAD, seed=0)
    assert rows.token_ids.tolist() == [(docs[0][0] + docs[0][1])[:7]]
    assert rows.loss_mask.sum() == learned
    assert rows.segment_ids.all()


def test_long_documents_are_split_or_dropped() -> None:
    """13 tokens, the first 8 a prompt, in rows of 5: the piece 1..5 has nothing to learn."""
    docs = [(list(range(1, 9)), list(range(9, 14))), ([21], [22, 23])]
    pack = lambda how: data.pack_documents(docs, 5, pad_id=PAD, seed=0, long_documents=how)
    split = [([], [11, 12, 13]), ([6, 7, 8], [9, 10]), ([21], [22, 23])]
    assert sorted(unpack(pack(data.SPLIT))) == split
    assert unpack(pack(data.DROP)) == [([21], [22, 23])]
    assert sorted(unpack(pack(data.TRUNCATE))) == [([1, 2, 3, 4, 5], []), ([21], [22, 23])]
    for positions in pack(data.SPLIT).positions.tolist():
        assert positions[0] == 0  # a piece starts anew
    with pytest.raises(ValueError, match="truncate, split, drop"):
        pack("wrap")


def test_several_answers_of_a_document_are_learned_and_found_again() -> None:
    document = data.Document([5, 6, 7, 8, 9], [False, True, False, False, True])
    rows = data.pack([document, data.Document([4], [True])], 6, pad_id=PAD, seed=0)
    found = [data.Document(list(d.token_ids), list(d.loss_mask)) for d in data.documents_of(rows)]
    assert sorted(found) == [([4], [True]), ([5, 6, 7, 8, 9], [False, True, False, False, True])]
    assert not list(data.documents_of(data.empty_rows(2, 3, pad_id=9)))


@pytest.mark.parametrize(
    ("mask", "prompt"),
    [("011", [5]), ("0101", [5, 6, 7]), ("010110", [5, 6, 7]), ("000", [5, 6, 7]), ("11", [])],
)
def test_a_prompt_ends_where_the_last_answer_begins(mask: str, prompt: list[int]) -> None:
    ids = list(range(5, 5 + len(mask)))
    assert data.prompt_of(data.Document(ids, [char == "1" for char in mask])) == prompt


def test_small_pool_and_no_documents() -> None:
    docs = make_docs(120)
    assert sorted(unpack(data.pack_documents(docs, 40, pad_id=PAD, seed=0, num_open_rows=1)))
    empty = data.pack_documents([], 5, pad_id=PAD, seed=0)
    assert empty.token_ids.shape == (0, 5)
    with pytest.raises(ValueError, match="row_len"):
        data.pack_documents(docs, 0, pad_id=PAD, seed=0)


@pytest.mark.parametrize(
    "shares", [(1.0,), (3, 1), (0.5, 0.2, 0.2, 0.07, 0.03), (0.0, 1 / 3, 2 / 3), (1e-4, 1.0)]
)
def test_scene_counts_are_monotone_and_close(shares: tuple[float, ...]) -> None:
    exact = np.array(shares) / sum(shares)
    last = [0] * len(shares)
    for num_rows in range(1, 700):
        counts = data.scene_counts(shares, num_rows)
        assert sum(counts) == num_rows
        assert all(new - old in (0, 1) for new, old in zip(counts, last, strict=True))
        assert np.abs(np.array(counts) - num_rows * exact).max() <= max(len(shares) / 2, 0.5)
        last = counts
    far = data.scene_counts(shares, 10**12)  # no float drift, however long the run
    assert np.abs(np.array(far) / 1e12 - exact).max() < 1e-9


@pytest.mark.parametrize("shares", [(0.0, 0.0), (-1.0, 2.0), (float("nan"), 1.0)])
def test_bad_shares_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="shares"):
        data.scene_counts(shares, 5)


MIX = {"math": 0.6, "chat": 0.3, "agent": 0.1}
BATCH_ROWS = 7


@pytest.fixture(scope="module")
def rows_by_scene() -> dict[str, data.PackedRows]:
    """Rows that name their scene (segment id) and number (first token)."""
    result = {}
    for scene_id, (scene, num_rows) in enumerate([("math", 23), ("chat", 11), ("agent", 5)], 1):
        ids = np.tile(np.arange(num_rows, dtype=np.int32)[:, None], (1, 3))
        result[scene] = data.PackedRows(
            ids, np.full_like(ids, scene_id), np.ones(ids.shape, bool), ids + 100
        )
    return result


def test_long_run_shares_equal_the_mix(rows_by_scene: dict[str, data.PackedRows]) -> None:
    counts: Counter[int] = Counter()
    for step in range(100):
        batch = data.batch_for_step(rows_by_scene, MIX, BATCH_ROWS, 0, step)
        assert batch.token_ids.shape == (BATCH_ROWS, 3)
        counts.update(batch.segment_ids[:, 0].tolist())
    np.testing.assert_allclose([counts[1], counts[2], counts[3]], [420, 210, 70], atol=1.5)


def test_every_row_once_per_epoch(rows_by_scene: dict[str, data.PackedRows]) -> None:
    drawn: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for step in range(60):
        batch = data.batch_for_step(rows_by_scene, MIX, BATCH_ROWS, 4, step)
        np.testing.assert_array_equal(batch.positions, batch.token_ids + 100)
        for scene, number in zip(batch.segment_ids[:, 0], batch.token_ids[:, 0], strict=True):
            drawn[int(scene)].append(int(number))
    for scene, num_rows in [(1, 23), (2, 11), (3, 5)]:
        counts = np.bincount(drawn[scene], minlength=num_rows)
        assert counts.max() - counts.min() <= 1
        assert counts.min() >= 5


def test_resuming_needs_the_step_alone(rows_by_scene: dict[str, data.PackedRows]) -> None:
    straight = [data.batch_for_step(rows_by_scene, MIX, BATCH_ROWS, 1, step) for step in range(40)]
    data._epoch_permutation.cache_clear()  # a new process
    for step in (39, 17, 0):
        resumed = data.batch_for_step(rows_by_scene, MIX, BATCH_ROWS, 1, step)
        for a, b in zip(straight[step], resumed, strict=True):
            np.testing.assert_array_equal(a, b)
    # another seed draws other rows, not the same ones in another order
    other = data.batch_for_step(rows_by_scene, MIX, BATCH_ROWS, 2, 17)
    assert sorted(other.token_ids[:, 0]) != sorted(straight[17].token_ids[:, 0])


def test_epochs_differ_and_scenes_are_mixed_within_a_batch(
    rows_by_scene: dict[str, data.PackedRows],
) -> None:
    # one row per batch, so that the order is that of the epoch's permutation alone
    drawn = [
        int(data.batch_for_step(rows_by_scene, {"math": 1}, 1, 0, step).token_ids[0, 0])
        for step in range(3 * 23)
    ]
    epochs = [drawn[:23], drawn[23:46], drawn[46:]]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert epochs[1] != epochs[2]
    orders = {
        tuple(data.batch_for_step(rows_by_scene, MIX, BATCH_ROWS, 0, step).segment_ids[:, 0])
        for step in range(9)
    }
    assert any(list(order) != sorted(order) for order in orders)


def test_missing_scene_is_named(rows_by_scene: dict[str, data.PackedRows]) -> None:
    with pytest.raises(ValueError, match="'poetry'"):
        data.batch_for_step(rows_by_scene, {"math": 1, "poetry": 1}, BATCH_ROWS, 0, 0)
    batch = data.batch_for_step(rows_by_scene, {"math": 1, "poetry": 0}, BATCH_ROWS, 0, 0)
    assert (batch.segment_ids == 1).all()
