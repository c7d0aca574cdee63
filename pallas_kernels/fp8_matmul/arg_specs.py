"""Named shapes of dense products, shared by tests and bench."""

from typing import NamedTuple


class ArgSpec(NamedTuple):
    """One product [num_rows, in_len] x [out_len, in_len].T; `has_norm`: an RMS norm before it."""

    num_rows: int
    out_len: int
    in_len: int
    has_norm: bool = False


# One device of the 8-way MiMo-V2.5-Pro: 16 query heads and 1 key/value head of width 6144, a dense
# first layer of 16384 / 8. 3392 = 16 * 192 + 192 + 128 rows: 26.5 scale blocks.
PRIMARY = {
    "qkv": ArgSpec(8, 3392, 6144, has_norm=True),
    "attention_out": ArgSpec(8, 6144, 2048),
    "dense_up": ArgSpec(8, 2048, 6144, has_norm=True),
    "dense_down": ArgSpec(8, 6144, 2048),
}

# Small enough for the interpreter: a partial block of rows, fewer column blocks than warpgroups and
# more than all rings have slots, two widths of the accumulator.
TOY = {
    "partial_block": ArgSpec(8, 192, 384),
    "one_column_block": ArgSpec(5, 64, 128),
    "rings_go_round": ArgSpec(16, 64, 2432),
    "normed": ArgSpec(8, 64, 256, has_norm=True),
}
