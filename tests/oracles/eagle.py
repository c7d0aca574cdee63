"""The EAGLE-3 drafter in loops and float64: one token at a time, nothing cached."""

import numpy as np


def _norm(x, weight, eps=1e-6):
    return x / np.sqrt((x**2).mean() + eps) * weight


def _rotate(head, position, rope_dim, theta):
    half = rope_dim // 2
    out = head.copy()
    for i in range(half):
        angle = position * theta ** (-2 * i / rope_dim)
        x, y = head[i], head[half + i]
        out[i] = x * np.cos(angle) - y * np.sin(angle)
        out[half + i] = y * np.cos(angle) + x * np.sin(angle)
    return out


def eagle_logits(
    w, features, ids, anchor, *, num_drafts, heads=4, kv_heads=2, h=14, hv=9, rope_dim=6,
    theta=1e4, window=11,
):
    """Logits [num_drafts, v] drafted from an anchor, each step reading the argmax of the last."""
    ids = [int(i) for i in ids[: anchor + 1]]
    states = [features[p] @ w["w_fuse"] for p in range(anchor)]
    logits = []
    for step in range(num_drafts):
        last = anchor - 1 + step
        keys, values = [], []
        for p in range(last + 1):
            embedded = _norm(w["embedding"][ids[p + 1]], w["embedding_norm"])
            both = np.concatenate([embedded, _norm(states[p], w["state_norm"])])
            qkv = both @ w["w_qkv"]
            q, k, v = np.split(qkv, [heads * h, (heads + kv_heads) * h])
            keys.append([_rotate(x, p, rope_dim, theta) for x in k.reshape(kv_heads, h)])
            values.append(v.reshape(kv_heads, hv))
        queries = [_rotate(x, last, rope_dim, theta) for x in q.reshape(heads, h)]
        mixed = []
        for n in range(heads):
            k = n // (heads // kv_heads)
            seen = range(max(0, last - window + 1), last + 1)
            scores = np.array([queries[n] @ keys[p][k] for p in seen]) * h**-0.5
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed.append(sum(a * values[p][k] for a, p in zip(weights, seen, strict=True)))
        x = states[last] + np.concatenate(mixed) @ w["w_out"]
        normed = _norm(x, w["ffn_norm"])
        gate = normed @ w["w_gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w["w_up"])) @ w["w_down"]
        states.append(x)
        logits.append(_norm(x, w["final_norm"]) @ w["head"])
        ids.append(int(np.argmax(logits[-1])))
    return np.stack(logits)
