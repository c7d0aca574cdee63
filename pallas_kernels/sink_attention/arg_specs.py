"""Named calls at the published sizes, of one device of eight; tests and measurements share them."""

from typing import NamedTuple


class ArgSpec(NamedTuple):
    """Sizes of one call of `api.sink_attention`.

    Attributes:
      num_heads: Query heads.
      num_kv_heads: Key and value heads.
      head_dim: Width of queries and keys.
      v_head_dim: Width of values.
      rope_dim: Rotated dims.
      tokens: Of a block.
      slots: Of the memory.
      window: Of a ring; None = a linear memory.
      has_sink: Whether every head has a sink.
      has_norms: Whether queries and keys are normed.
      write: Whether the block goes into memory; trees do not.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope_dim: int
    tokens: int
    slots: int
    window: int | None
    has_sink: bool = False
    has_norms: bool = False
    write: bool = True

    @property
    def qkv_width(self) -> int:
        per_kv_head = self.head_dim + self.v_head_dim
        return self.num_heads * self.head_dim + self.num_kv_heads * per_kv_head


PRO_SLIDING = ArgSpec(16, 1, 192, 128, 64, 8, 144, 128, has_sink=True)
PRO_GLOBAL = ArgSpec(16, 1, 192, 128, 64, 8, 262_152, None)

ARG_SPECS = {
    "pro sliding": PRO_SLIDING,
    "pro global": PRO_GLOBAL,
    "pro sliding tree": PRO_SLIDING._replace(tokens=64, write=False),
    "pro global tree": PRO_GLOBAL._replace(tokens=64, write=False),
    "pro drafter": ArgSpec(16, 1, 128, 128, 64, 8, 1040, 1024, has_sink=True, write=False),
    "qwen3 drafter": ArgSpec(32, 8, 128, 128, 128, 16, 40_976, None, has_norms=True, write=False),
}
