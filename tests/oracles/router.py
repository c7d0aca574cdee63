"""Routed experts token by token in float64. Imports nothing of ours."""

import math

import numpy as np


def route(x, w_router, selection_bias, *, top_k, routed_scale, scoring):
    """(ids [t, top_k], weights [t, top_k]) of tokens x [t, d]; ties go to the lower id."""
    ids, weights = [], []
    for token in np.asarray(x, np.float64):
        logits = [float(token @ column) for column in np.asarray(w_router, np.float64).T]
        if scoring == "sigmoid":
            scores = [1 / (1 + math.exp(-logit)) for logit in logits]
        else:
            total = sum(math.exp(logit) for logit in logits)
            scores = [math.exp(logit) / total for logit in logits]
        order = sorted(range(len(scores)), key=lambda e: (-(scores[e] + selection_bias[e]), e))
        chosen = order[:top_k]
        total = sum(scores[e] for e in chosen)
        ids.append(chosen)
        weights.append([routed_scale * scores[e] / total for e in chosen])
    return np.array(ids), np.array(weights)


def swiglu(token, w_gate, w_up, w_down):
    """down(silu(gate) * up) of one token."""
    gate, up = token @ w_gate, token @ w_up
    return (gate / (1 + np.exp(-gate)) * up) @ w_down


def run_experts(x, ids, weights, gate, up, down, capacity=None):
    """Weighted sum over chosen experts [t, d]; each serves its first `capacity` tokens only."""
    x, gate, up, down = (np.asarray(a, np.float64) for a in (x, gate, up, down))
    out, served = np.zeros_like(x), [0] * len(down)
    for t, token in enumerate(x):
        for expert, weight in zip(np.asarray(ids)[t], np.asarray(weights)[t], strict=True):
            served[expert] += 1
            if capacity is None or served[expert] <= capacity:
                out[t] += float(weight) * swiglu(
                    token, gate[:, expert], up[:, expert], down[expert]
                )
    return out
