"""Run: pytest tests/train/test_row_files.py"""

from pathlib import Path

import numpy as np
import pytest

from mimo_jax.config import ConfigError
from mimo_jax.train.data import PackedRows, pack_documents
from mimo_jax.train.row_files import dataset_hash, open_rows, read_rows, write_rows

ROWS = pack_documents([([1, 2], [3]), ([4], [5, 6, 7, 8]), ([9], [10])], 6, pad_id=0, seed=0)


def test_rows_come_back_mapped_and_equal(tmp_path: Path) -> None:
    write_rows(tmp_path / "math.npz", ROWS)
    write_rows(tmp_path / "none.npz", pack_documents([], 6, pad_id=0, seed=0))
    rows = read_rows(tmp_path)
    assert list(rows) == ["math", "none"]
    for a, b in zip(rows["math"], ROWS, strict=True):
        assert isinstance(a, np.memmap)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert rows["none"].token_ids.shape == (0, 6)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, share: float) -> None:
    path = tmp_path / "math.npz"
    write_rows(path, ROWS)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ConfigError, match="math.npz: not a file of packed rows"):
        open_rows(path)


def test_other_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "math.npz"
    write_rows(path, ROWS._replace(loss_mask=ROWS.loss_mask[:, :5]))
    with pytest.raises(ConfigError, match="of one shape"):
        open_rows(path)
    write_rows(path, ROWS._replace(token_ids=ROWS.token_ids.astype(np.float32)))
    with pytest.raises(ConfigError, match="int32"):
        open_rows(path)
    np.savez_compressed(path, **ROWS._asdict())
    with pytest.raises(ConfigError, match="compressed"):
        open_rows(path)


def test_hash_follows_content_order_and_name(tmp_path: Path) -> None:
    wanted = dataset_hash({"math": ROWS})
    assert wanted == "e260bc16f974c7615217af793bb4c016"
    write_rows(tmp_path / "math.npz", ROWS)
    assert dataset_hash(read_rows(tmp_path)) == wanted
    swapped = PackedRows(*(array[::-1] for array in ROWS))
    learned = ROWS._replace(loss_mask=~ROWS.loss_mask)
    others = [{"math": swapped}, {"math": learned}, {"code": ROWS}, {"math": ROWS, "code": ROWS}]
    assert len({wanted, *map(dataset_hash, others)}) == 5
