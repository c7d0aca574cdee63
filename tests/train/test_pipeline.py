"""Run: pytest tests/train/test_pipeline.py"""

import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from mimo_jax.sharding import TRAIN, make_mesh
from mimo_jax.train import data, pipeline
from mimo_jax.train.placement import place_rows
from mimo_jax.train.row_files import open_rows, write_rows

MIX = {"math": 0.6, "chat": 0.3, "agent": 0.1}
BATCH_ROWS, SEED = 8, 5


def numbered_rows(num_rows: int, scene_id: int) -> data.PackedRows:
    """Rows of 3 tokens that name their scene (segment id) and number (tokens)."""
    ids = np.tile(np.arange(num_rows, dtype=np.int32)[:, None], (1, 3))
    return data.PackedRows(ids, np.full_like(ids, scene_id), ids % 2 == 0, ids + 100)


@pytest.fixture(scope="module")
def rows_by_scene() -> dict[str, data.PackedRows]:
    sizes = {"math": 23, "chat": 11, "agent": 5}
    return {scene: numbered_rows(n, i) for i, (scene, n) in enumerate(sizes.items(), 1)}


def assert_same(got: data.PackedRows, wanted: data.PackedRows) -> None:
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_any_step_at_any_time(rows_by_scene: dict[str, data.PackedRows]) -> None:
    batches = pipeline.Batches(rows_by_scene, MIX, BATCH_ROWS, SEED)
    for step in (0, 1, 2, 40, 41, 7, 7, 8, 0, 10**9):
        wanted = data.batch_for_step(rows_by_scene, MIX, BATCH_ROWS, SEED, step)
        assert_same(batches[step], wanted)


def test_next_batches_are_read_before_they_are_asked_for() -> None:
    """An epoch has two rows, a batch one: reading both means that step 1 was read after step 0."""
    seen, both = set(), threading.Event()

    class Watched(np.ndarray):
        def __getitem__(self, index):
            seen.add(int(index))
            if len(seen) == 2:
                both.set()
            return super().__getitem__(index)

    rows = numbered_rows(2, 1)
    rows = rows._replace(token_ids=rows.token_ids.view(Watched))
    batches = pipeline.Batches({"math": rows}, {"math": 1}, 1, SEED, num_ahead=2)
    batches[0]
    assert both.wait(timeout=10)


def test_each_process_reads_its_own_rows_only(
    rows_by_scene: dict[str, data.PackedRows],
) -> None:
    """Three processes hold rows 0-1, 2-6 and 7: together they have the batch, in its places."""
    whole = data.batch_for_step(rows_by_scene, MIX, BATCH_ROWS, SEED, 12)
    parts = [
        pipeline.Batches(rows_by_scene, MIX, BATCH_ROWS, SEED, own_rows=own)[12]
        for own in (range(2), range(2, 7), range(7, 8))
    ]
    for array, *of_parts in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(of_parts[0][:2], array[:2])
        np.testing.assert_array_equal(of_parts[1][2:7], array[2:7])
        np.testing.assert_array_equal(of_parts[2][7:], array[7:])
        assert not of_parts[1][:2].any()
        assert not of_parts[1][7:].any()


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 1, 4)])
def test_own_rows_are_those_that_the_mesh_asks_for(
    sizes: tuple[int, ...], rows_by_scene: dict[str, data.PackedRows]
) -> None:
    mesh = make_mesh(TRAIN, sizes, jax.devices()[: np.prod(sizes)])
    assert pipeline.own_rows(mesh, BATCH_ROWS) == list(range(BATCH_ROWS))
    batch = data.batch_for_step(rows_by_scene, MIX, BATCH_ROWS, SEED, 3)
    placed = place_rows(batch, mesh)
    np.testing.assert_array_equal(np.asarray(placed.token_ids), batch.token_ids)
    assert pipeline.own_rows(None, BATCH_ROWS) is None
    assert pipeline.own_rows(mesh, 5) == list(range(5))  # place_batch fills up with empty rows


def test_mapped_files_give_the_same_batches(
    tmp_path: Path, rows_by_scene: dict[str, data.PackedRows]
) -> None:
    for scene, rows in rows_by_scene.items():
        write_rows(tmp_path / f"{scene}.npz", rows)
    mapped = {scene: open_rows(tmp_path / f"{scene}.npz") for scene in rows_by_scene}
    assert all(isinstance(array, np.memmap) for rows in mapped.values() for array in rows)
    batches = pipeline.Batches(mapped, MIX, BATCH_ROWS, SEED)
    for step in range(5):
        wanted = data.batch_for_step(rows_by_scene, MIX, BATCH_ROWS, SEED, step)
        assert_same(batches[step], wanted)


def test_missing_scene_is_one_line_at_the_start(
    rows_by_scene: dict[str, data.PackedRows],
) -> None:
    with pytest.raises(ValueError, match="'poetry'"):
        pipeline.Batches(rows_by_scene, {"poetry": 1}, BATCH_ROWS, SEED)
