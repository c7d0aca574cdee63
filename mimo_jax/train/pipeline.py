"""Batches of a run, read ahead of the step that takes them.

    batches = Batches(rows, mix, batch_rows, seed, own_rows=own_rows(mesh, batch_rows))
    batches[step]   # any step, at any time

Problem: rows may lie on a disk that is slower than a step; yet a run must resume exactly, on
another number of processes too. Choice: Grain's MapDataset over *steps*. Its element is a pure
function of the step (`data.batch_for_step`), its prefetch runs some steps ahead on a thread, and
its position is one number, which is the step: nothing is saved that a checkpoint has not.

Rejected: a chain of Grain's own shuffle, mix, repeat and batch per row. Its mix rounds shares down
to hundredths of the smallest one; its shuffle in epoch e with seed s is that in epoch 0 with seed
s + e, so neighbouring seeds see the same order an epoch apart; and sharding by `dataset[p::P]`
makes a row's place in the batch, hence its random anchors, depend on the number of processes.
`batch_for_step` has none of these and is as long as the chain.

Each process builds the same stream and reads from it only the rows that its devices hold.
"""

import sys
from collections.abc import Callable, Collection, Mapping

import grain
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mimo_jax.train.data import PackedRows, batch_for_step
from mimo_jax.train.placement import ROWS, num_row_parts


def own_rows(mesh: Mesh | None, batch_rows: int) -> list[int] | None:
    """Rows of a batch that lie on devices of this process; None without a mesh: all.

    Args:
      mesh: Of TRAIN.
      batch_rows: Rows in a batch; `step.place_batch` fills it up to what divides.

    Example: 8 rows on 4 devices, of which this process has the last two -> [4, 5, 6, 7].
    """
    if mesh is None:
        return None
    num_placed = -(-batch_rows // num_row_parts(mesh)) * num_row_parts(mesh)
    indices = NamedSharding(mesh, P(ROWS)).addressable_devices_indices_map((num_placed,))
    rows = {row for index in indices.values() if index for row in range(num_placed)[index[0]]}
    return sorted(row for row in rows if row < batch_rows)


class _Steps:
    """Grain's random-access source whose record number k is the batch of step k."""

    def __init__(self, batch_of: Callable[[int], PackedRows]):
        self._batch_of = batch_of

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> PackedRows:
        return self._batch_of(index)


class Batches:
    """The batches of one run by step number; asked for in order, they are there already."""

    def __init__(
        self,
        rows_by_scene: Mapping[str, PackedRows],
        mix: Mapping[str, int | float],
        batch_rows: int,
        seed: int,
        *,
        own_rows: Collection[int] | None = None,
        num_ahead: int = 2,
    ):
        """Checks the arguments, which are those of `batch_for_step`, and starts reading at step 0.

        Args:
          rows_by_scene: See there; mapped files will do.
          mix: See there.
          batch_rows: See there.
          seed: See there.
          own_rows: See there, and `own_rows`.
          num_ahead: Batches to keep ready, >= 1.

        Raises:
          ValueError: If mix names a scene that is missing or has no rows.
        """
        batch_of = lambda step: batch_for_step(
            rows_by_scene, mix, batch_rows, seed, step, own_rows
        )
        batch_of(0)  # now, and in this thread: an error of the mix is one line at the start
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=num_ahead)
        self._iterator = iter(grain.MapDataset.source(_Steps(batch_of)).to_iter_dataset(options))
        self._next_step = 0

    def __getitem__(self, step: int) -> PackedRows:
        """The batch of a step; a jump (a resumed run, a look back) starts reading anew there."""
        if step != self._next_step:
            self._iterator.set_state({"next_index": step})
        self._next_step = step + 1
        return next(self._iterator)
