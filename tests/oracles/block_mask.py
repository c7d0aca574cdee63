"""Slow loops over the rules of drafter training blocks; imports nothing of the package."""

import numpy as np


def valid_anchors(loss_mask: np.ndarray, segment_ids: np.ndarray) -> list[set[int]]:
    """Positions per row whose token and successor are learned and share a document."""
    num_rows, row_len = loss_mask.shape
    result = []
    for row in range(num_rows):
        found = set()
        for pos in range(row_len - 1):
            learned = loss_mask[row, pos] and loss_mask[row, pos + 1]
            document = segment_ids[row, pos]
            if learned and document != 0 and document == segment_ids[row, pos + 1]:
                found.add(pos)
        result.append(found)
    return result


def block_labels(
    token_ids: np.ndarray,
    loss_mask: np.ndarray,
    segment_ids: np.ndarray,
    anchor_pos: np.ndarray,
    keep: np.ndarray,
    draft_block_len: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Labels and validity of slots 1..draft_block_len - 1 of every block."""
    num_rows, row_len = token_ids.shape
    shape = (*anchor_pos.shape, draft_block_len - 1)
    labels, is_valid = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for row in range(num_rows):
        for block in range(anchor_pos.shape[1]):
            anchor = anchor_pos[row, block]
            for slot in range(1, draft_block_len):
                pos = anchor + slot
                if not keep[row, block] or pos >= row_len or not loss_mask[row, pos]:
                    continue
                if segment_ids[row, pos] != segment_ids[row, anchor]:
                    continue
                labels[row, block, slot - 1] = token_ids[row, pos]
                is_valid[row, block, slot - 1] = True
    return labels, is_valid


def context_mask(
    anchor_pos: np.ndarray,
    keep: np.ndarray,
    segment_ids: np.ndarray,
    draft_block_len: int,
    window: int | None,
) -> np.ndarray:
    """Which context position every slot of every block sees, one comparison at a time."""
    num_rows, row_len = segment_ids.shape
    num_blocks = anchor_pos.shape[1]
    mask = np.zeros((num_rows, num_blocks, draft_block_len, row_len), bool)
    for row in range(num_rows):
        for block in range(num_blocks):
            anchor = anchor_pos[row, block]
            for slot in range(draft_block_len):
                for key in range(row_len):
                    if not keep[row, block]:
                        continue
                    if key >= anchor:  # the anchor's own feature does not exist when drafting
                        continue
                    if window is not None and anchor + slot - key >= window:
                        continue
                    if segment_ids[row, key] != segment_ids[row, anchor]:
                        continue
                    mask[row, block, slot, key] = True
    return mask
