"""Held-out loss of one target in three forms: what MXFP4 costs, and how much training removes.

Losses are compared document by document, for the same text is hard or easy for every form: the
spread of the differences is a hundredth of the spread of the losses.

  float   trained in float to the end
  naive   the same, experts rounded to MXFP4
  qat     trained for as many steps, the last of them with experts seen as MXFP4

Closed: the share of the gap between `naive` and `float` that `qat` does not leave open.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mimo_jax.config import require
from mimo_jax.decode.placement import Model
from mimo_jax.models.params import flatten, unflatten
from mimo_jax.quant.qat import fake_quantize_params
from mimo_jax.train import losses
from mimo_jax.train.data import PackedRows

FLOAT, NAIVE, QAT = "float", "naive", "qat"
FORMS = (FLOAT, NAIVE, QAT)
_BATCH_ROWS = 8
_Z95 = 1.96


class Difference(NamedTuple):
    """Nats per token by which one form is worse than another, and half of its 95% interval."""

    mean: float
    half_width: float


def check_same_ids(target: Path, texts: Path) -> None:
    """Refuses a target that was trained on the ids of another tokenizer than the text's.

    Args:
      target: Directory of a checkpoint; its tokenizer is there, or in the corpus of its run.
      texts: Directory of held-out rows, with the tokenizer beside it. Where either has none,
        nothing is checked.

    Raises:
      ConfigError: If both have one and they differ.
    """
    places = (target / "tokenizer.json", target.parent.parent / "corpus" / "tokenizer.json")
    own = next((path for path in places if path.is_file()), None)
    used = texts.parent / "tokenizer.json"
    if own is None or not used.is_file():
        return
    require(
        json.loads(own.read_text()) == json.loads(used.read_text()),
        f"{target} reads ids of another tokenizer ({own}) than the text's ({used}): losses would "
        "mean nothing",
    )


def rounded(params, rule: str):
    """Parameters with experts as MXFP4 holds them, without any training."""
    return unflatten(params, fake_quantize_params(flatten(params), rule))


def make_token_losses(graph) -> Callable:
    """Jitted (params, token ids, segment ids, positions) -> losses [r, s], and which count."""

    @jax.jit
    def token_losses(params, token_ids, segment_ids, positions):
        target = nnx.merge(graph, params)
        logits = target(token_ids, segment_ids=segment_ids, positions=positions).logits
        labels, mask = losses.shift_labels(token_ids, segment_ids > 0, segment_ids)
        _, aux = losses.next_token_loss(logits, labels, mask)
        return aux.cross_entropy, mask

    return token_losses


def document_losses(
    token_losses: Callable, params, rows: PackedRows
) -> tuple[np.ndarray, np.ndarray]:
    """Summed next-token loss and number of tokens of every document, float64 [documents].

    Args:
      token_losses: From `make_token_losses`.
      params: Of the target, float32.
      rows: Packed documents; all their tokens count.
    """
    sums, counts = [], []
    for first in range(0, len(rows.token_ids), _BATCH_ROWS):
        part = [a[first : first + _BATCH_ROWS] for a in rows]
        missing = _BATCH_ROWS - len(part[0])
        padded = PackedRows(*(np.pad(a, ((0, missing), (0, 0))) for a in part))
        of_token, mask = token_losses(
            params,
            *(jnp.asarray(a) for a in (padded.token_ids, padded.segment_ids, padded.positions)),
        )
        of_token, mask = np.asarray(of_token, np.float64), np.asarray(mask)
        for row, segments in enumerate(padded.segment_ids):
            num_segments = int(segments.max()) + 1
            of_segment = lambda x, s=segments, n=num_segments: np.bincount(s, x, n)[1:]
            sums.append(of_segment(of_token[row]))
            counts.append(of_segment(mask[row]))
    return np.concatenate(sums), np.concatenate(counts)


def difference(worse: np.ndarray, better: np.ndarray, tokens: np.ndarray) -> Difference:
    """Of two forms on the same documents, as a ratio of sums over documents.

    Args:
      worse: Summed loss of each document.
      better: Of the other form.
      tokens: Of each document.

    Example: losses 3, 4 and 1, 2 over 2 and 2 tokens -> mean (2 + 2) / 4 = 1.0, half width 0.
    """
    apart, total = worse - better, tokens.sum()
    mean = apart.sum() / total
    n = len(apart)
    spread = np.sqrt(np.sum((apart - mean * tokens) ** 2) * n / max(n - 1, 1)) / total
    return Difference(float(mean), float(_Z95 * spread))


def compare(plain: Model, qat: Model, texts: dict[str, PackedRows], rule: str) -> dict:
    """Losses and differences of the three forms by scene, and over all scenes.

    Args:
      plain: After training in float.
      qat: After quantization-aware training, its experts already rounded.
      texts: Held-out rows by scene.
      rule: By which `naive` is rounded.

    Returns:
      Scene -> row of figures; "all" weighs scenes by their tokens. `left` is `qat` less `float`,
      `gap` is `naive` less `float`; `_pm` are halves of 95% intervals.
    """
    forms = {
        FLOAT: plain.params,
        NAIVE: rounded(plain.params, rule),
        QAT: qat.params,
    }
    token_losses = make_token_losses(plain.graph)
    found = {}
    for scene, rows in texts.items():
        by_form = {form: document_losses(token_losses, p, rows) for form, p in forms.items()}
        found[scene] = {form: sums for form, (sums, _) in by_form.items()} | {
            "tokens": by_form[FLOAT][1]
        }
    found["all"] = {
        key: np.concatenate([row[key] for row in found.values()]) for key in (*FORMS, "tokens")
    }
    return {scene: _row(parts) for scene, parts in found.items()}


def _row(parts: dict[str, np.ndarray]) -> dict:
    tokens = parts["tokens"]
    row: dict[str, Any] = {"documents": len(tokens), "tokens": int(tokens.sum())}
    row |= {form: float(parts[form].sum() / tokens.sum()) for form in FORMS}
    row["gap"], row["gap_pm"] = gap = difference(parts[NAIVE], parts[FLOAT], tokens)
    row["left"], row["left_pm"] = left = difference(parts[QAT], parts[FLOAT], tokens)
    return row | {"closed": 1 - left.mean / gap.mean}
