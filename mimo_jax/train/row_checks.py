"""Whether packed rows can be trained on at all: on the host, once, where they are read.

Inside a jitted step an id beyond the vocabulary is silent: a gather clips it, and the loss of the
slot is that of another token. Rows in which no block can be drawn train nothing, silently as well.
A few bad rows among good ones are no fault: a slot without a label has no weight.
"""

import numpy as np

from mimo_jax.config import require
from mimo_jax.train.data import PackedRows


def check_rows(name: str, rows: PackedRows, vocab_size: int) -> None:
    """Refuses rows with ids that the target does not have, or without any draft block.

    Args:
      name: Of the rows, for the message; such as the scene or the file.
      rows: On the host.
      vocab_size: Of the target.

    Raises:
      ConfigError: Names the first bad id and its place, or says that nothing can be learned.

    Example: id 70 in row 1 at position 4, vocabulary of 61 -> "math: id 70 in row 1 at position 4
      is outside of the vocabulary; allowed: 0 to 60".
    """
    is_bad = (rows.token_ids < 0) | (rows.token_ids >= vocab_size)
    if is_bad.any():
        row, pos = np.argwhere(is_bad)[0]
        require(
            False,
            f"{name}: id {rows.token_ids[row, pos]} in row {row} at position {pos} is outside of "
            f"the vocabulary; allowed: 0 to {vocab_size - 1}",
        )
    segments = rows.segment_ids
    is_same = (segments[:, :-1] == segments[:, 1:]) & (segments[:, 1:] > 0)
    is_anchor = rows.loss_mask[:, :-1] & rows.loss_mask[:, 1:] & is_same
    require(
        bool(is_anchor.any()),
        f"{name}: no draft block in {len(rows.token_ids)} rows: one needs two tokens of an answer "
        "in a row, and every answer is shorter or masked out",
    )
