"""FP8 that stays FP8: a checkpoint's projections as codes and scales, in the order of memory.

`DecodedTensors` gives floats. Here the fused qkv of every layer and the dense SwiGLU matrices come
as they are held (models/target.py): qkv in chunks [Q_c | K_c | V_c], each with blocks of its own.
Files of V2.5 and Pro have just that. Flash keeps q, k and v apart; its blocks were cut so that each
chunk's rows, put together, are whole blocks again. Whether they are is not assumed: every block of
memory must find all its rows under one scale, or the checkpoint is not kept and gets decoded.

FP8 experts and MTP heads are decoded still: nothing executes their codes.
"""

from pathlib import Path

import numpy as np

from mimo_jax.checkpoint.decoded import QKV_PARTS, DecodedTensors, QkvLayout
from mimo_jax.checkpoint.name_map import FP8
from mimo_jax.config import TargetConfig
from mimo_jax.quant import fp8

SCALE = "_scale_inv"


def attention_prefix(layer_idx: int) -> str:
    """Of the tensors of a layer's attention. Example: 3 -> "model.layers.3.self_attn."."""
    return f"model.layers.{layer_idx}.self_attn."


def dense_names(config: TargetConfig) -> list[str]:
    """Weights of the dense SwiGLU layers."""
    return [
        f"model.layers.{i}.mlp.{part}_proj.weight"
        for i in range(config.num_layers)
        if not config.is_moe_layer[i]
        for part in ("gate", "up", "down")
    ]


def memory_layout_of_qkv(config: TargetConfig, layer_idx: int) -> QkvLayout:
    """Rows of a layer's qkv as they are held in FP8."""
    return QkvLayout(config.layer_attention(layer_idx).qkv_widths, config.num_fp8_chunks)


def block_scales(scale_row: np.ndarray, num_chunks: int) -> np.ndarray | None:
    """Which scale serves each block, where every row of a block has the same; None where not.

    Args:
      scale_row: int [rows] scale of each row.
      num_chunks: Stretches of rows whose blocks start anew.

    Returns:
      int [num_chunks * blocks of a chunk].

    Example: 4 rows, 2 chunks: 5, 5, 7, 7 -> 5, 7; 5, 6, 7, 7 -> None.
    """
    block = fp8.scale_rows(len(scale_row), num_chunks)
    first = np.flatnonzero(np.diff(block, prepend=-1))
    of_block = scale_row[first]
    return of_block if bool((of_block[block] == scale_row).all()) else None


class KeptTensors:
    """`DecodedTensors` with projections as codes; the same reading interface.

    Use `keep` to make one.

    Args:
      decoded: The tensors as floats.
      config: Of the target, `is_fp8`.
      scales: Per layer (names of scale tensors side by side, row of them for each block).
    """

    def __init__(
        self,
        decoded: DecodedTensors,
        config: TargetConfig,
        scales: list[tuple[tuple[str, ...], np.ndarray]],
    ):
        self.decoded, self.tensors, self.path = decoded, decoded.tensors, decoded.path
        self._scales = {
            f"{attention_prefix(i)}qkv_proj.weight{SCALE}": scale for i, scale in enumerate(scales)
        }
        self._qkv = {
            f"{attention_prefix(i)}qkv_proj.weight": (
                attention_prefix(i),
                memory_layout_of_qkv(config, i),
            )
            for i in range(config.num_layers)
        }
        self._as_stored = {n + end for n in dense_names(config) for end in ("", SCALE)}
        parts = {
            f"{prefix}{part}.weight" for prefix, _ in self._qkv.values() for part in QKV_PARTS
        }
        own = {*self._qkv, *self._scales, *self._as_stored}
        self._names = frozenset((set(decoded.names()) - parts) | own)

    def names(self) -> list[str]:
        """Logical names, sorted; with scales of what is kept."""
        return sorted(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def _sources(self, name: str) -> list[str]:
        """Logical tensors of the file that make up a qkv."""
        return [f"{self._qkv[name][0]}{part}.weight" for part in QKV_PARTS]

    def file_of(self, name: str) -> Path:
        if name in self._qkv:
            return self.decoded.file_of(self._sources(name)[0])
        if name in self._scales:
            return self.tensors.file_of(self._scales[name][0][0])
        return self.tensors.file_of(name) if name in self._as_stored else self.decoded.file_of(name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._qkv:
            shapes = [self.decoded.shape(source) for source in self._sources(name)]
            return (sum(rows for rows, _ in shapes), shapes[0][1])
        if name in self._scales:
            sources, rows = self._scales[name]
            return (len(rows), self.tensors.shape(sources[0])[1])
        return self.tensors.shape(name) if name in self._as_stored else self.decoded.shape(name)

    def dtype(self, name: str) -> np.dtype:
        """Of what `get` returns."""
        if name in self._qkv:
            return FP8
        if name in self._scales:
            return np.dtype(np.float32)
        return self.tensors.dtype(name) if name in self._as_stored else self.decoded.dtype(name)

    def prefetch(self, name: str) -> None:
        """Asks the system to read a tensor's bytes in the background."""
        if name in self._qkv:
            for source in self._sources(name):
                self.decoded.prefetch(source)
        elif name not in self._scales:
            (self.tensors if name in self._as_stored else self.decoded).prefetch(name)

    def get(self, name: str, region: tuple[slice, ...] = ()) -> np.ndarray:
        """One tensor or a region of it; read-only where it is a view of the file."""
        if name in self._qkv:
            return self._codes(name, region)
        if name in self._scales:
            sources, of_block = self._scales[name]
            scale = np.concatenate([self.tensors.get(source) for source in sources])
            return scale[of_block][region]
        if name in self._as_stored:
            return self.tensors.get(name, region)
        return self.decoded.get(name, region)

    def _codes(self, name: str, region: tuple[slice, ...]) -> np.ndarray:
        prefix, layout = self._qkv[name]
        if name in self.tensors and self.decoded.layout_of(prefix) == layout:
            return self.tensors.get(name, region)  # in the order of memory already
        rows, columns = (*region, slice(None), slice(None))[:2]
        wanted = np.arange(sum(layout.widths))[rows]
        codes = np.empty((sum(layout.widths), self.shape(name)[1]), FP8)[wanted, columns]
        for part_idx, source in enumerate(self._sources(name)):
            row_of = {row: i for i, row in enumerate(layout.rows_of(part_idx).tolist())}
            here = [(i, row_of[row]) for i, row in enumerate(wanted.tolist()) if row in row_of]
            if here:
                at, own = np.array(here).T
                codes[at] = self.decoded.codes(source)[own][:, columns]
        return codes


def keep(decoded: DecodedTensors, config: TargetConfig) -> KeptTensors | str:
    """The tensors with projections as codes, or the reason, in a line, why they are decoded.

    Args:
      decoded: The files.
      config: Of the target, with `is_fp8`.
    """
    names = set(decoded.names())
    scales = []
    for i in range(config.num_layers):
        prefix, layout = attention_prefix(i), memory_layout_of_qkv(config, i)
        sources = [f"{prefix}{part}.weight" for part in QKV_PARTS]
        widths = [decoded.shape(source)[0] for source in sources if source in names]
        if tuple(widths) != layout.widths:
            return f"{prefix}* is missing or has another shape"  # reading will say which
        if not all(decoded.is_fp8(source) for source in sources):
            return f"{prefix}* is not FP8"
        scale_row = np.empty(sum(layout.widths), np.int64)
        tensors: list[str] = []
        for part_idx, source in enumerate(sources):
            own, rows = decoded.scale_rows(source)
            before = tensors[: tensors.index(own[0])] if own[0] in tensors else tensors
            first = sum(decoded.tensors.shape(name)[0] for name in before)
            scale_row[layout.rows_of(part_idx)] = first + rows
            tensors += [name for name in own if name not in tensors]
        of_block = block_scales(scale_row, layout.num_chunks)
        if of_block is None:
            return f"{prefix}* has blocks across its {layout.num_chunks} chunks"
        scales.append((tuple(tensors), of_block))
    for name in dense_names(config):
        if name not in names or not decoded.is_fp8(name):
            return f"{name} is not FP8"
    return KeptTensors(decoded, config, scales)
