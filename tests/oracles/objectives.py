"""Losses of draft slots, one slot and one id at a time, float64; imports nothing of the package."""

import math

import numpy as np


def softmax(logits: np.ndarray) -> list[float]:
    """Probabilities of one slot."""
    top = float(max(logits))
    parts = [math.exp(float(x) - top) for x in logits]
    return [part / sum(parts) for part in parts]


def slot_loss(
    logits: np.ndarray, label: int, target_logits: np.ndarray, shares: dict[str, float]
) -> float:
    """The mixture of terms of one slot."""
    q, p = softmax(logits), softmax(target_logits)
    terms = {
        "cross_entropy": -math.log(q[label]),
        "forward_kl": sum(b * math.log(b / a) for a, b in zip(q, p, strict=True)),
        "reverse_kl": sum(a * math.log(a / b) for a, b in zip(q, p, strict=True)),
        "total_variation": sum(abs(a - b) for a, b in zip(q, p, strict=True)) / 2,
    }
    return sum(share * terms[name] for name, share in shares.items())


def block_weights(
    label_probs: list[float], is_valid: list[bool], alpha: float | None, gamma: float
) -> list[float]:
    """Weights of one block's slots: D-PACE's if alpha is given, else by position."""
    m = len(label_probs)
    if alpha is None:
        return [math.exp(-k / gamma) if is_valid[k] else 0.0 for k in range(m)]
    products, product = [], 1.0
    for prob, valid in zip(label_probs, is_valid, strict=True):
        product *= (1 - alpha) * prob + alpha if valid else 1.0
        products.append(product)
    return [
        sum(products[i] for i in range(k, m) if is_valid[i]) if is_valid[k] else 0.0
        for k in range(m)
    ]


def objective(
    logits: np.ndarray,
    labels: np.ndarray,
    is_valid: np.ndarray,
    target_logits: np.ndarray,
    shares: dict[str, float],
    alpha: float | None,
    gamma: float,
    weights: list[list[float]] | None = None,
) -> tuple[float, list[list[float]]]:
    """(loss of all blocks as one weighted mean, their weights); weights may be held fixed."""
    found, total, weight_sum = [], 0.0, 0.0
    for n in range(len(logits)):
        valid = [bool(x) for x in is_valid[n]]
        probs = [
            softmax(logits[n, k])[labels[n, k]] if valid[k] else math.nan
            for k in range(logits.shape[1])
        ]
        of_slot = block_weights(probs, valid, alpha, gamma) if weights is None else weights[n]
        found.append(of_slot)
        for k, weight in enumerate(of_slot):
            if valid[k]:
                loss = slot_loss(logits[n, k], labels[n, k], target_logits[n, k], shares)
                total += weight * loss
                weight_sum += weight
    return total / weight_sum, found
