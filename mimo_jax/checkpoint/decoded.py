"""A checkpoint's tensors as the name map wants them: FP8 decoded, a fused qkv cut in three.

The name map speaks of logical matrices (`q_proj.weight`, float). The published files store some of
them as FP8 with block scales, and some fused into one `qkv_proj` whose rows are the training
shards [Q_c | K_c | V_c] one after the other. This module is the one place that knows. MXFP4
experts pass through packed, weight and scale as two tensors.

Traps, each silent when missed: the scale rows of a fused qkv start anew with every shard; the
shards are counted by the config, not by shapes (14848 rows have 116 scale rows either way); in
MiMo-V2-Flash, keys and values were scaled as one stack before they were cut, so a value row's
scale can stand in the keys' file (sglang-jax#969); scales may lie in another shard file.
"""

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np

from mimo_jax.checkpoint.safetensors_reader import CheckpointError, SafetensorsDir, nearest
from mimo_jax.quant import fp8

_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_SCALE = ".weight_scale_inv"
QKV_PARTS = ("q_proj", "k_proj", "v_proj")
CHUNKED, PLAIN = "chunked", "plain"
QKV_LAYOUTS = (CHUNKED, PLAIN)
SPLIT, FUSED = "split", "fused_qkv"  # of attention_projection_layout in config.json
PROJECTION_LAYOUTS = (SPLIT, FUSED)


@dataclasses.dataclass(frozen=True)
class QkvLayout:
    """How the attention projections of one layer are stored.

    Attributes:
      widths: Rows of q, k and v.
      num_chunks: Training shards whose rows follow each other; 1 = plain [Q; K; V].
    """

    widths: tuple[int, int, int]
    num_chunks: int

    @property
    def has_stacked_kv(self) -> bool:
        """Whether FP8 keys and values stored apart were scaled as one stack per chunk."""
        return self.num_chunks > 1

    def rows_of(self, part_idx: int) -> np.ndarray:
        """Rows of the fused matrix that make up q, k or v, in order."""
        chunk_widths = [width // self.num_chunks for width in self.widths]
        chunk_rows, first = sum(chunk_widths), sum(chunk_widths[:part_idx])
        within = first + np.arange(chunk_widths[part_idx])
        return (np.arange(self.num_chunks)[:, None] * chunk_rows + within[None]).reshape(-1)


class DecodedTensors:
    """`SafetensorsDir` seen through the formats; the same reading interface.

    Args:
      tensors: Opened files.
      qkv_layouts: Prefix of an attention module ("model.layers.0.self_attn.") -> its layout. Fused
        tensors are looked for there, and FP8 keys and values of more than one chunk are taken for
        scaled together.

    Raises:
      CheckpointError: If a scale has no weight, an FP8 weight no scale, or shapes do not fit.
    """

    def __init__(self, tensors: SafetensorsDir, qkv_layouts: dict[str, QkvLayout]):
        self.tensors, self.path = tensors, tensors.path
        self._layouts = qkv_layouts
        self._fused: dict[str, tuple[str, int]] = {}  # logical name -> (prefix, part)
        self._shared: dict[str, str] = {}  # k_proj / v_proj weight -> prefix of its module
        names = set(tensors.names())
        for name in names:
            if not name.endswith(_SCALE):
                continue
            weight = name.removesuffix("_scale_inv")
            if weight not in names:
                raise self._error(name, f"is a scale without a weight{nearest(name, names)}")
            if tensors.dtype(weight) != _FP8:
                raise self._error(name, f"is the scale of a {tensors.dtype(weight)} weight")
        self._names = {name for name in names if not name.endswith(_SCALE)}
        for prefix, layout in qkv_layouts.items():
            self._see_attention(prefix, layout)
        for name in self._names:
            if name in tensors and tensors.dtype(name) == _FP8:
                self._check_scale(name)

    def _error(self, name: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.tensors.file_of(name)}: {name!r} {message}")

    def _see_attention(self, prefix: str, layout: QkvLayout) -> None:
        fused = f"{prefix}qkv_proj.weight"
        if fused in self._names:
            expected = sum(layout.widths)
            shape = self.tensors.shape(fused)
            if len(shape) != 2 or shape[0] != expected or expected % layout.num_chunks:
                raise self._error(
                    fused,
                    f"has shape {list(shape)}, expected {expected} rows "
                    f"(q, k, v {layout.widths}) in {layout.num_chunks} equal chunks",
                )
            self._names.remove(fused)
            for part_idx, part in enumerate(QKV_PARTS):
                name = f"{prefix}{part}.weight"
                if name in self._names:
                    raise self._error(name, f"stands beside the fused {fused!r}; allowed: one")
                self._names.add(name)
                self._fused[name] = (prefix, part_idx)
            if self.tensors.dtype(fused) == _FP8:
                self._check_scale(fused, layout.num_chunks)
        elif layout.has_stacked_kv:
            keys, values = (f"{prefix}{part}.weight" for part in QKV_PARTS[1:])
            if all(n in self._names and self.tensors.dtype(n) == _FP8 for n in (keys, values)):
                self._see_shared_scales(prefix, layout, keys, values)

    def _see_shared_scales(self, prefix, layout, keys, values) -> None:
        _, key_rows, value_rows = layout.widths
        if self.tensors.shape(keys)[0] != key_rows or self.tensors.shape(values)[0] != value_rows:
            return  # the name map will say which shape was expected
        place_k, place_v, num_key_scales = fp8.split_kv_scale_rows(
            layout.num_chunks, key_rows, value_rows
        )
        num_scales = int(max(place_k.max(), place_v.max())) + 1
        got = tuple(self._scale_shape(name)[0] for name in (keys, values))
        together = (num_key_scales, num_scales - num_key_scales)
        apart = tuple(fp8.num_blocks(rows) for rows in (key_rows, value_rows))
        if got == together:
            self._shared[keys] = self._shared[values] = prefix
        elif got != apart:
            raise self._error(
                keys,
                f"and v_proj have {got} scale rows, expected {together} (scaled together in "
                f"{layout.num_chunks} chunks) or {apart} (each alone)",
            )

    def _scale_shape(self, weight: str) -> tuple[int, ...]:
        scale = weight + "_scale_inv"
        if scale not in self.tensors:
            raise self._error(weight, f"is FP8, but {scale!r} is missing")
        return self.tensors.shape(scale)

    def _check_scale(self, weight: str, num_chunks: int = 1) -> None:
        got = self._scale_shape(weight)
        if weight in self._shared:
            return
        shape = self.tensors.shape(weight)
        expected = fp8.scale_shape(shape, num_chunks) if len(shape) == 2 else None
        if got != expected:
            raise self._error(
                weight + "_scale_inv",
                f"has shape {list(got)}, expected {list(expected or ())} for a weight of "
                f"{list(shape)} in {num_chunks} chunk(s)",
            )

    def names(self) -> list[str]:
        """Logical names, sorted; scales of FP8 weights are not among them."""
        return sorted(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def _stored(self, name: str) -> str:
        """The stored tensor that holds a logical one."""
        if name in self._fused:
            return f"{self._fused[name][0]}qkv_proj.weight"
        return name

    def file_of(self, name: str) -> Path:
        return self.tensors.file_of(self._stored(name))

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.tensors.shape(self._stored(name))
        if name in self._fused:
            prefix, part_idx = self._fused[name]
            return (self._layouts[prefix].widths[part_idx], *shape[1:])
        return shape

    def dtype(self, name: str) -> np.dtype:
        """Of what `get` returns: float32 for FP8 weights."""
        dtype = self.tensors.dtype(self._stored(name))
        return np.dtype(np.float32) if dtype == _FP8 else dtype

    def prefetch(self, name: str) -> None:
        """Asks the system to read a tensor's bytes in the background."""
        self.tensors.prefetch(self._stored(name))

    def get(self, name: str, region: tuple[slice, ...] = ()) -> np.ndarray:
        """One logical tensor or a region of it; read-only where it is a view of the file."""
        if name not in self._names:
            raise CheckpointError(f"{self.path}: no tensor {name!r}{nearest(name, self._names)}")
        stored, is_fp8 = self._stored(name), self.is_fp8(name)
        if not is_fp8 and name not in self._fused:
            return self.tensors.get(stored, region)
        rows, columns = (*region, slice(None), slice(None))[:2]
        row = self._stored_rows(name)[rows]
        # A slice where the rows follow each other: then nothing is copied before decoding.
        is_run = len(row) > 0 and bool((np.diff(row) == 1).all())
        where = slice(row[0], row[-1] + 1) if is_run else row
        array = self.tensors.get(stored)[where, columns]
        if not is_fp8:
            return array
        scales, scale_row = self.scale_rows(name)
        scale = np.concatenate([self.tensors.get(other) for other in scales])
        first_column = columns.indices(self.shape(name)[1])[0]
        return fp8.dequantize_rows(array, scale, scale_row[rows], first_column)

    def layout_of(self, prefix: str) -> QkvLayout:
        """How the projections of an attention module are stored."""
        return self._layouts[prefix]

    def is_fp8(self, name: str) -> bool:
        """Whether a logical tensor is stored as codes."""
        return self.tensors.dtype(self._stored(name)) == _FP8

    def codes(self, name: str) -> np.ndarray:
        """The FP8 codes of a logical tensor, as they are stored."""
        return self.tensors.get(self._stored(name))[self._stored_rows(name)]

    def _stored_rows(self, name: str) -> np.ndarray:
        """Row of the stored tensor that each row of a logical one is."""
        if name in self._fused:
            prefix, part_idx = self._fused[name]
            return self._layouts[prefix].rows_of(part_idx)
        return np.arange(self.shape(name)[0])

    def scale_rows(self, name: str) -> tuple[tuple[str, ...], np.ndarray]:
        """Scales of an FP8 tensor: stored names, and for each of its rows one of their rows.

        Rows are counted over the scale tensors side by side: where keys and values were scaled
        together there are two.
        """
        if name in self._shared:
            prefix = self._shared[name]
            layout = self._layouts[prefix]
            place_k, place_v, _ = fp8.split_kv_scale_rows(layout.num_chunks, *layout.widths[1:])
            both = tuple(f"{prefix}{part}{_SCALE}" for part in QKV_PARTS[1:])
            return both, place_k if name.endswith("k_proj.weight") else place_v
        stored, num_chunks = self._stored(name), 1
        if name in self._fused:
            num_chunks = self._layouts[self._fused[name][0]].num_chunks
        rows = fp8.scale_rows(self.tensors.shape(stored)[0], num_chunks)
        return (stored + "_scale_inv",), rows[self._stored_rows(name)]
