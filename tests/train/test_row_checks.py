"""Run: .venv/bin/python -m pytest tests/train/test_row_checks.py"""

import re

import numpy as np
import pytest

from mimo_jax.config import ConfigError
from mimo_jax.train.data import PackedRows
from mimo_jax.train.row_checks import check_rows


def rows(ids=((5, 6, 7), (8, 9, 60)), segments=((1, 1, 1), (1, 1, 2)), learned=((0, 1, 1),) * 2):
    ids, segments = np.array(ids, np.int32), np.array(segments, np.int32)
    return PackedRows(ids, segments, np.array(learned, bool), np.zeros_like(ids))


def test_rows_with_one_block_are_enough():
    check_rows("math", rows(), 61)
    check_rows("math", rows(learned=((0, 1, 1), (0, 0, 0))), 61)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"ids": ((5, 6, 7), (8, 61, 70))}, "math: id 61 in row 1 at position 1 is outside of the"),
        ({"ids": ((5, -1, 7), (8, 9, 9))}, "id -1 in row 0 at position 1 is outside of the vocabul"
         "ary; allowed: 0 to 60"),
        ({"learned": ((0, 0, 1), (1, 0, 1))}, "math: no draft block in 2 rows"),
        # The second answer's two tokens are of two documents.
        ({"learned": ((0, 0, 0), (0, 1, 1))}, "math: no draft block in 2 rows"),
        ({"segments": ((0, 0, 0), (0, 0, 0))}, "math: no draft block in 2 rows"),
    ],
)  # fmt: skip
def test_rows_that_teach_nothing_or_wrongly_are_refused(bad, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_rows("math", rows(**bad), 61)
