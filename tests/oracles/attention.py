"""Attention by three loops in float64: grouped heads, window, sink. Imports nothing of ours."""

import math

import numpy as np


def attention(queries, keys, values, query_pos, key_pos, *, window=None, sink=None, seen=None):
    """Outputs [b, t, n, hv] of queries [b, t, n, h] over keys [b, k, s, h], values [b, k, s, hv].

    A key is seen if its position is not negative, not after the query's and less than `window`
    before it; or as `seen` [b, t, s] says. A query that sees nothing, with no sink, gives NaN.
    """
    num_rows, num_queries, num_heads, head_dim = queries.shape
    queries_per_kv = num_heads // keys.shape[1]
    out = np.zeros((num_rows, num_queries, num_heads, values.shape[-1]))
    for row in range(num_rows):
        for query in range(num_queries):
            for head in range(num_heads):
                kv_head = head // queries_per_kv
                total, mixed = 0.0, np.zeros(values.shape[-1])
                if sink is not None:
                    total += math.exp(float(sink[head]))
                for key in range(keys.shape[2]):
                    distance = int(query_pos[row, query]) - int(key_pos[row, key])
                    is_seen = key_pos[row, key] >= 0 and distance >= 0
                    if window is not None and distance >= window:
                        is_seen = False
                    if seen is not None:
                        is_seen = bool(seen[row, query, key])
                    if not is_seen:
                        continue
                    score = 0.0
                    for i in range(head_dim):
                        product = float(queries[row, query, head, i]) * float(
                            keys[row, kv_head, key, i]
                        )
                        score += product / math.sqrt(head_dim)
                    weight = math.exp(score)
                    total += weight
                    mixed += weight * values[row, kv_head, key].astype(np.float64)
                out[row, query, head] = mixed / total if total else math.nan
    return out
