"""Slow acceptance rules: plain Python loops, nothing of ours."""


def accept_and_cut(draft_tokens, target_tokens, active_len, stop_ids, room):
    """One row: (number accepted, tokens emitted, finish) with finish running, stop or length."""
    num_accepted = 0
    for slot in range(1, active_len):
        if draft_tokens[slot - 1] != target_tokens[slot - 1]:
            break
        num_accepted += 1
    emitted, finish = [], "running"
    for token in target_tokens[: num_accepted + 1]:
        emitted.append(token)
        if token in stop_ids:
            finish = "stop"
            break
        if len(emitted) == room:
            finish = "length"
            break
    return num_accepted, emitted, finish
