"""FP8 weights with one float32 scale per 128x128 block, as the published files store them.

value = code * scale (the files call the factor `weight_scale_inv`, yet it is multiplied). Blocks
are cut from the rows of one training shard at a time: where a matrix is the concatenation of
several shards, its scale rows start anew with each (`num_chunks`).
"""

import ml_dtypes
import numpy as np

BLOCK_LEN = 128


def num_blocks(size: int) -> int:
    """Blocks that cover `size` rows or columns, the last one perhaps in part. 272 -> 3."""
    return -(-size // BLOCK_LEN)


def scale_shape(shape: tuple[int, int], num_chunks: int = 1) -> tuple[int, int]:
    """Shape of the scales of a matrix whose rows are num_chunks shards.

    Example: (13568, 4096) in 4 chunks of 3392 rows -> (108, 32); in one chunk (106, 32).
    """
    rows, columns = shape
    return num_chunks * num_blocks(rows // num_chunks), num_blocks(columns)


def dequantize(codes: np.ndarray, scale: np.ndarray, num_chunks: int = 1) -> np.ndarray:
    """Float32 values of a block-scaled matrix.

    Args:
      codes: float8_e4m3fn [out, in].
      scale: float32 of `scale_shape`.
      num_chunks: Shards along the rows; divides them.

    Returns:
      float32 [out, in].

    Raises:
      ValueError: If the scales have another shape, or the chunks do not divide the rows.

    Example: 272 rows in 2 chunks of 136 -> scale rows 0, 1 serve rows 0..127, 128..135; scale
    rows 2, 3 serve rows 136..263, 264..271.
    """
    rows, columns = codes.shape
    if rows % num_chunks:
        raise ValueError(f"{num_chunks} chunks do not divide {rows} rows")
    expected = scale_shape((rows, columns), num_chunks)
    if scale.shape != expected:
        raise ValueError(f"scales have shape {list(scale.shape)}, expected {list(expected)}")
    return dequantize_rows(codes, scale, scale_rows(rows, num_chunks))


def scale_rows(num_rows: int, num_chunks: int = 1) -> np.ndarray:
    """Scale row of each row; see `dequantize`."""
    chunk_rows = num_rows // num_chunks
    row = np.arange(num_rows)
    return row // chunk_rows * num_blocks(chunk_rows) + row % chunk_rows // BLOCK_LEN


def dequantize_rows(
    codes: np.ndarray, scale: np.ndarray, scale_row: np.ndarray, first_column: int = 0
) -> np.ndarray:
    """As `dequantize` for a region: int [rows] scale row of each, and where its columns begin."""
    columns = (first_column + np.arange(codes.shape[1])) // BLOCK_LEN
    values = codes.astype(np.float32)
    values *= scale.astype(np.float32)[scale_row][:, columns]
    return values


def split_kv_scale_rows(
    num_chunks: int, key_rows: int, value_rows: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Scale rows of keys and values whose blocks were cut while the two stood in one stack.

    Per chunk the stack was [keys | values]; then it was cut in two, weights and scales, the scale
    row that covers the seam going with the keys. A value row's scale may thus stand in the keys'
    file.

    Args:
      num_chunks: Shards.
      key_rows: Rows of keys in all.
      value_rows: Rows of values in all.

    Returns:
      (scale row of each key row, scale row of each value row, number of key scale rows), both
      counted in the concatenation [keys' scales, values' scales].

    Example: one chunk of 192 key and 128 value rows -> keys 128 x 0, 64 x 1; values 64 x 1 (the
    seam), 64 x 2; 2 key scale rows.
    """
    keys, values = key_rows // num_chunks, value_rows // num_chunks
    key_scales = num_blocks(keys)
    value_scales = num_blocks(keys + values) - key_scales
    total_key_scales = num_chunks * key_scales

    def place(chunk, block):
        is_key = block < key_scales
        in_keys = chunk * key_scales + block
        in_values = total_key_scales + chunk * value_scales + (block - key_scales)
        return np.where(is_key, in_keys, in_values)

    key = np.arange(key_rows)
    value = np.arange(value_rows)
    key_place = place(key // keys, key % keys // BLOCK_LEN)
    value_place = place(value // values, (keys + value % values) // BLOCK_LEN)
    return key_place, value_place, total_key_scales


MAX_CODE = 448.0
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# Largest first: a quantizer that fills the range leaves 448 in almost every block.
_CODE_MAGNITUDES = np.unique(np.arange(127, dtype=np.uint8).view(_E4M3).astype(np.float32))[:0:-1]
_NUM_PROBED = 16


def quantize(values: np.ndarray, num_chunks: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a float32 matrix; exact where the values came from such codes.

    Every block takes the scale amax / 448. If that does not reproduce the block bit for bit, the
    scales that would put another code at the maximum are tried; a block that no scale reproduces
    is rounded to nearest (ties to even).

    Args:
      values: float32 [out, in], finite.
      num_chunks: Shards along the rows, each with blocks of its own; divides them.

    Returns:
      (float8_e4m3fn [out, in], float32 of `scale_shape`).

    Raises:
      ValueError: If a value is not finite or the chunks do not divide the rows.

    Example: a block 0.5, -1.0, 448.0 -> scale 1.0, codes 0.5, -1.0, 448.0.
    """
    rows, columns = values.shape
    if rows % num_chunks:
        raise ValueError(f"{num_chunks} chunks do not divide {rows} rows")
    if not np.isfinite(values).all():
        raise ValueError("values that are not finite have no FP8 form")
    values = values.astype(np.float32)
    codes = np.zeros(values.shape, _E4M3)
    scale = np.ones(scale_shape((rows, columns), num_chunks), np.float32)
    chunk_rows = rows // num_chunks
    scale_row = 0
    for chunk in range(num_chunks):
        for first in range(0, chunk_rows, BLOCK_LEN):
            top = chunk * chunk_rows + first
            bottom = chunk * chunk_rows + min(first + BLOCK_LEN, chunk_rows)
            for scale_column, left in enumerate(range(0, columns, BLOCK_LEN)):
                block = (slice(top, bottom), slice(left, left + BLOCK_LEN))
                codes[block], scale[scale_row, scale_column] = _quantize_block(values[block])
            scale_row += 1
    return codes, scale


def quantize_split_kv(
    keys: np.ndarray, values: np.ndarray, num_chunks: int
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """As `quantize` for keys and values that share blocks; the inverse of `split_kv_scale_rows`.

    Args:
      keys: float32 [key rows, in], finite.
      values: float32 [value rows, in], finite.
      num_chunks: Shards; divides the rows of both.

    Returns:
      (codes, scale) of the keys and of the values; the scale of a block on the seam is with the
      keys.

    Raises:
      ValueError: As `quantize`.

    Example: one chunk of 192 key and 128 value rows, 448 once among values 0..63 and 1 elsewhere
      -> key scales 1/448 and 1, value scale 1/448.
    """
    for rows in (len(keys), len(values)):
        if rows % num_chunks:
            raise ValueError(f"{num_chunks} chunks do not divide {rows} rows")
    chunked = [part.reshape(num_chunks, -1, part.shape[1]) for part in (keys, values)]
    stack = np.concatenate(chunked, axis=1)
    codes, scale = quantize(stack.reshape(-1, keys.shape[1]), num_chunks)
    codes = codes.reshape(stack.shape)
    row_in_stack = scale_rows(stack.shape[0] * stack.shape[1], num_chunks).reshape(num_chunks, -1)
    place_k, place_v, num_key_scales = split_kv_scale_rows(num_chunks, len(keys), len(values))
    keys_of, values_of = np.s_[:, : chunked[0].shape[1]], np.s_[:, chunked[0].shape[1] :]
    placed = np.empty_like(scale)
    placed[place_k] = scale[row_in_stack[keys_of].reshape(-1)]
    placed[place_v] = scale[row_in_stack[values_of].reshape(-1)]
    return (
        (codes[keys_of].reshape(keys.shape), placed[:num_key_scales]),
        (codes[values_of].reshape(values.shape), placed[num_key_scales:]),
    )


def _quantize_block(block: np.ndarray) -> tuple[np.ndarray, np.float32]:
    largest = np.abs(block).max()
    if largest == 0:
        return np.zeros(block.shape, _E4M3), np.float32(1)
    flat = block.reshape(-1)
    probe = flat[flat != 0][:_NUM_PROBED]
    for magnitude in _CODE_MAGNITUDES:
        near = np.float32(largest / magnitude)
        for scale in (near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, -near)):
            if scale > 0 and _is_exact(probe, scale) and _is_exact(block, scale):
                return _to_codes(block, scale), scale
    scale = np.float32(largest / MAX_CODE)
    if scale == 0:  # the whole block is below what a scale can hold
        return np.zeros(block.shape, _E4M3), np.float32(1)
    return _to_codes(block, scale), scale


def _to_codes(values: np.ndarray, scale: np.float32) -> np.ndarray:
    return np.clip(values / scale, -MAX_CODE, MAX_CODE).astype(_E4M3)


def _is_exact(values: np.ndarray, scale: np.float32) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        return bool((_to_codes(values, scale).astype(np.float32) * scale == values).all())
