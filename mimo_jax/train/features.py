"""What the frozen target makes of every training row, computed once and kept in host memory.

Problem: rows are learned again and again (nine times in the embedded recipe), and each time the
target, which does not change, is run over them: a quarter of the embedded drafter's step, two
thirds of that of a target of 135M parameters. Choice: run it over all rows before the first step
and keep the taps in bfloat16, 2 * context_width bytes a token: 2.5 GB for the embedded recipe.

Rejected: files. They would have to be tied to target and rows by hash, and read faster than the
target computes them. A run that is resumed computes them anew, which is a minute there.

Rounded to 8 bits of mantissa: the target is frozen, so the drafter learns from slightly other
features than it decodes with. Measured on the embedded pair: see LOG.md.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from mimo_jax.config import DraftConfig
from mimo_jax.decode.placement import Model
from mimo_jax.train import loop
from mimo_jax.train.block_step import read_target
from mimo_jax.train.data import PackedRows
from mimo_jax.train.objectives import ObjectiveConfig
from mimo_jax.train.step import Batch, place_batch

_ROWS_AT_ONCE = 16


def keep_features(
    target: Model,
    rows_by_scene: Mapping[str, PackedRows],
    objective: ObjectiveConfig,
    model: DraftConfig,
) -> dict[str, np.ndarray]:
    """Runs the target over all rows.

    Args:
      target: Frozen.
      rows_by_scene: To be learned.
      objective: See `read_target`.
      model: See there.

    Returns:
      bfloat16 [rows, s, c] of each scene.
    """

    @jax.jit
    def read(params, batch: Batch):
        found = read_target(nnx.merge(target.graph, params), batch, objective, model)
        return found.astype(jnp.bfloat16)

    kept = {}
    num_rows = sum(len(rows.token_ids) for rows in rows_by_scene.values())
    with loop.progress_bar() as bar:
        task = bar.add_task("target reads", total=num_rows, figures="rows")
        for scene, rows in rows_by_scene.items():
            count, row_len = rows.token_ids.shape
            found: np.ndarray | None = None
            for start in range(0, count, _ROWS_AT_ONCE):
                part = PackedRows(*(array[start : start + _ROWS_AT_ONCE] for array in rows))
                missing = _ROWS_AT_ONCE - len(part.token_ids)
                padded = PackedRows(*(np.pad(array, ((0, missing), (0, 0))) for array in part))
                values = np.asarray(read(target.params, place_batch(padded)))
                if found is None:
                    found = np.empty((count, row_len, values.shape[2]), ml_dtypes.bfloat16)
                found[start : start + _ROWS_AT_ONCE] = values[: len(part.token_ids)]
                bar.update(task, advance=len(part.token_ids))
            assert found is not None, scene  # `check_rows` has refused scenes without rows
            kept[scene] = found
    return kept


def features_of(kept: Mapping[str, np.ndarray], picks: Sequence[tuple[str, int]]) -> jax.Array:
    """The features of a batch: bfloat16 [b, s, c] for the (scene, row) of `picks_for_step`."""
    return jnp.asarray(np.stack([kept[scene][row] for scene, row in picks]))
