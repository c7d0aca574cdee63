"""Packed rows of documents, and batches that depend on the step number alone.

Problem: documents are short and uneven; a run must resume exactly, on any number of hosts, without
replaying its input. Choice: pack once into fixed rows (best fit into a small pool of open rows),
then make every batch a pure function of (seed, step). Resuming needs nothing but the step. Files
of rows are `row_files`, reading ahead is `pipeline`.

- The mixture over scenes follows cumulative counts, not random draws: after n rows every scene has
  had within one row per scene of n * share. Counts come from splitting n rows between the first
  scene and the rest, the rest between the second and its rest, and so on, each split rounded; every
  split is monotone in n, so a batch is the difference of two cumulative counts and never negative.
  (Rounding all shares at once is not monotone.) Shares are integers of 2**-32, so nothing drifts.
- Within a scene, draw number d is row `permutation(epoch = d // num_rows)[d % num_rows]`, so every
  row is seen once per epoch. The permutation is recomputed from (seed, scene, epoch).

NumPy only: it runs on the host, beside the device step.
"""

import functools
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

_SHARE_UNITS = 1 << 32
LONG_DOCUMENTS = TRUNCATE, SPLIT, DROP = ("truncate", "split", "drop")


class PackedRows(NamedTuple):
    """Rows of packed documents; all arrays are [rows, row_len].

    token_ids: int32, `pad_id` where there is no document.
    segment_ids: int32, 0 for padding, 1.. for the documents of a row in order.
    loss_mask: bool, True on answer tokens.
    positions: int32, restarting at 0 in every document; 0 in padding.
    """

    token_ids: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray
    positions: np.ndarray


def empty_rows(num_rows: int, row_len: int, pad_id: int) -> PackedRows:
    """Rows of padding, to be filled."""
    shape = (num_rows, row_len)
    return PackedRows(
        token_ids=np.full(shape, pad_id, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, bool),
        positions=np.zeros(shape, np.int32),
    )


class Document(NamedTuple):
    """One text in ids, and which of them are learned (the answers).

    Example: prompt 1, answer 2 3 -> token_ids (1, 2, 3), loss_mask (False, True, True).
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[bool]

    @classmethod
    def of_pair(cls, prompt: Sequence[int], answer: Sequence[int]) -> "Document":
        """A prompt, and the answer to learn."""
        return cls([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))


def documents_of(rows: PackedRows) -> Iterator[Document]:
    """The documents of packed rows, row by row."""
    for token_ids, segment_ids, loss_mask in zip(
        rows.token_ids, rows.segment_ids, rows.loss_mask, strict=True
    ):
        for segment in range(1, int(segment_ids.max(initial=0)) + 1):
            here = segment_ids == segment
            yield Document(token_ids[here].tolist(), loss_mask[here].tolist())


def prompt_of(document: Document) -> list[int]:
    """All ids before the last stretch that is learned: earlier answers are part of it.

    Example: loss_mask 0 1 0 1 1 0 -> the first three ids; nothing learned -> all of them.
    """
    learned = np.flatnonzero(document.loss_mask)
    if not len(learned):
        return list(document.token_ids)
    given = np.flatnonzero(~np.asarray(document.loss_mask, bool)[: learned[-1]])
    return list(document.token_ids[: given[-1] + 1 if len(given) else 0])


def pack_documents(
    docs: Iterable[tuple[Sequence[int], Sequence[int]]],
    row_len: int,
    *,
    pad_id: int,
    seed: int,
    num_open_rows: int = 64,
    long_documents: str = TRUNCATE,
) -> PackedRows:
    """Packs (prompt, answer) documents into rows of one length; see `pack`."""
    pairs = (Document.of_pair(*pair) for pair in docs)
    return pack(
        pairs, row_len, pad_id=pad_id, seed=seed, num_open_rows=num_open_rows,
        long_documents=long_documents,
    )


def _fitted(
    document: Document, row_len: int, long_documents: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, loss mask) of what goes into rows; pieces become documents of their own."""
    ids, mask = np.asarray(document.token_ids, np.int32), np.asarray(document.loss_mask, bool)
    if len(ids) <= row_len:
        return [(ids, mask)] if len(ids) else []
    if long_documents == TRUNCATE:
        return [(ids[:row_len], mask[:row_len])]
    starts = range(0, len(ids), row_len) if long_documents == SPLIT else ()
    pieces = [(ids[start : start + row_len], mask[start : start + row_len]) for start in starts]
    return [(ids, mask) for ids, mask in pieces if mask.any()]


def pack(
    documents: Iterable[Document],
    row_len: int,
    *,
    pad_id: int,
    seed: int,
    num_open_rows: int = 64,
    long_documents: str = TRUNCATE,
) -> PackedRows:
    """Packs documents into rows of one length.

    Adds no special tokens: begin- and end-of-text are the caller's. Holds everything in memory, 5
    bytes for a token of a document and 13 for one of a row.

    Args:
      documents: The whole iterable is read. Empty documents are skipped.
      row_len: Tokens per row.
      pad_id: Id that fills the tail of a row.
      seed: Shuffles the documents before packing.
      num_open_rows: Rows kept open; a document goes to the fullest one that still has room.
      long_documents: What becomes of documents longer than a row, of LONG_DOCUMENTS: "truncate"
        loses their end, "split" makes documents of pieces of row_len tokens (each forgets what
        stood before it; pieces with nothing to learn are left out), "drop" leaves them out.

    Returns:
      PackedRows with as many rows as were needed; [0, row_len] for no documents.

    Raises:
      ValueError: If row_len or num_open_rows is below 1, or long_documents is unknown.

    Example: prompt 1, answer 2 3 and prompt 4 5, answer 6 with row_len 8, in this order
      -> ids 1 2 3 4 5 6 p p, segments 1 1 1 2 2 2 0 0, loss 0 1 1 0 0 1 0 0,
      positions 0 1 2 0 1 2 0 0.
    """
    if row_len < 1 or num_open_rows < 1:
        raise ValueError(f"row_len and num_open_rows must be >= 1: {row_len}, {num_open_rows}")
    if long_documents not in LONG_DOCUMENTS:
        allowed = ", ".join(LONG_DOCUMENTS)
        raise ValueError(f"long_documents {long_documents!r} is unknown; allowed: {allowed}")
    pieces = [p for document in documents for p in _fitted(document, row_len, long_documents)]
    order = np.random.default_rng(seed).permutation(len(pieces))
    rows: list[list[int]] = []  # numbers of the pieces of each row
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), kept sorted: fullest first
    for number in order:
        length = len(pieces[number][0])
        fit = next((i for i, (free, _) in enumerate(open_rows) if free >= length), None)
        if fit is None:
            if len(open_rows) == num_open_rows:
                open_rows.pop(0)
            free, row = row_len, len(rows)
            rows.append([])
        else:
            free, row = open_rows.pop(fit)
        rows[row].append(number)
        if free > length:
            open_rows.append((free - length, row))
            open_rows.sort()

    packed = empty_rows(len(rows), row_len, pad_id)
    for row, members in enumerate(rows):
        start = 0
        for segment, number in enumerate(members, start=1):
            token_ids, loss_mask = pieces[number]
            end = start + len(token_ids)
            packed.token_ids[row, start:end] = token_ids
            packed.segment_ids[row, start:end] = segment
            packed.loss_mask[row, start:end] = loss_mask
            packed.positions[row, start:end] = np.arange(end - start)
            start = end
    return packed


def scene_counts(shares: Sequence[int | float], num_rows: int) -> list[int]:
    """Rows each scene has had after the first num_rows rows of the stream.

    Monotone in num_rows for every scene, sums to num_rows, and stays within len(shares) / 2 rows
    of num_rows * share.

    Args:
      shares: Non-negative, any positive sum.
      num_rows: Rows so far.

    Returns:
      One count per share.

    Raises:
      ValueError: If a share is negative or not finite, or all are zero.

    Example: shares (.5, .25, .25) after 4 rows -> [2, 1, 1].
    """
    total = float(sum(shares))
    if not np.isfinite(total) or min(shares) < 0 or total <= 0:
        raise ValueError(f"shares must be finite, non-negative and not all zero, got {shares}")
    weights = [round(share / total * _SHARE_UNITS) for share in shares]
    weight_left, rows_left, counts = sum(weights), num_rows, []
    for weight in weights:
        # round half up in integers; a weight of 0 always gets 0, the last one all that is left
        count = (2 * rows_left * weight + weight_left) // (2 * weight_left) if weight else 0
        counts.append(count)
        rows_left -= count
        weight_left -= weight
    return counts


@functools.lru_cache(maxsize=32)
def _epoch_permutation(seed: int, scene: str, epoch: int, num_rows: int) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(scene.encode()), epoch])
    return rng.permutation(num_rows)


def batch_for_step(
    rows_by_scene: Mapping[str, PackedRows],
    mix: Mapping[str, int | float],
    batch_rows: int,
    seed: int,
    step: int,
    own_rows: Collection[int] | None = None,
) -> PackedRows:
    """Picks the rows of one training step, as a pure function of (seed, step).

    Keeps no state, so a run that resumes at step k sees what the first run saw at k. Reads the rows
    it gives and no others, which matters where they lie in mapped files.

    Args:
      rows_by_scene: Packed rows of each scene; all of one row length.
      mix: Share of the batch rows per scene, any positive sum; scenes not named are not used.
      batch_rows: Rows in a batch, the same at every step.
      seed: Non-negative; fixes the permutation of every epoch.
      step: Step number from 0.
      own_rows: Rows of the batch that this process needs, None = all. The others are not read and
        stay empty (segment 0): the batch has the same shape, and each row its place, everywhere.

    Returns:
      PackedRows of batch_rows rows, scenes in shuffled order.

    Raises:
      ValueError: If mix names a scene that is missing or has no rows.

    Example: mix {"math": 3, "chat": 1}, batch_rows 4 -> 3 math rows and 1 chat row at every step.
    """
    scenes = sorted(mix)
    for scene in scenes:
        if mix[scene] > 0 and (scene not in rows_by_scene or not len(rows_by_scene[scene][0])):
            raise ValueError(f"mix names scene {scene!r}, which has no rows: {list(rows_by_scene)}")
    shares = [mix[scene] for scene in scenes]
    before = scene_counts(shares, step * batch_rows)
    after = scene_counts(shares, (step + 1) * batch_rows)
    picks = [
        (scene, draw)
        for scene, first, last in zip(scenes, before, after, strict=True)
        for draw in range(first, last)
    ]
    order = np.random.default_rng([seed, step]).permutation(batch_rows)
    row_len = rows_by_scene[picks[0][0]].token_ids.shape[1]
    batch = empty_rows(batch_rows, row_len, pad_id=0)
    for row in range(batch_rows) if own_rows is None else own_rows:
        scene, draw = picks[order[row]]
        rows = rows_by_scene[scene]
        epoch, number = divmod(draw, len(rows.token_ids))
        source = _epoch_permutation(seed, scene, epoch, len(rows.token_ids))[number]
        for to, array in zip(batch, rows, strict=True):
            to[row] = array[source]
    return batch
