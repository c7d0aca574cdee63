"""What quantised memory costs: the answers of the embedded default, to the end of its context.

Measured in generation, not in prefill: errors add up over a text, and one forward over known text
hardly shows them (arXiv:2606.03458). Reported are how far answers agree with float32's, what the
float32 model thinks of them, accept length, and whether drafting changes anything (it must not).
"""

import dataclasses

import jax
import numpy as np
from flax import nnx

from mimo_jax.config import TargetConfig
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import Completion, generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.decode.stats import AcceptStats
from mimo_jax.quant.kv import FORMATS, KVFormat


def agreement(ours: Completion, reference: Completion) -> int:
    """Tokens up to the first that differs."""
    pairs = zip(ours.token_ids, reference.token_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(reference.token_ids))


# Groups of 64 as well: in a context of 512 the published 128 leave a third of it in float.
ANSWER_FORMATS = {
    f"{name}, groups of {g}": None if form is None else dataclasses.replace(form, group_len=g)
    for g in (64, 128)
    for name, form in FORMATS.items()
    if form is not None or g == 64
}


def quantised_answers(
    target: Model,
    drafter: Model,
    requests: dict[str, list[Request]],
    *,
    max_len: int,
) -> dict[str, dict[str, dict]]:
    """Per format and scene: agreement with float32, likelihood under it, accept length.

    Answers run to the end of the context: stop ids are left out, so that the memory gets long.

    Args:
      target: In float32.
      drafter: Its drafter.
      requests: Greedy, by scene.
      max_len: Of the engines.
    """
    score = _scorer(target, max_len)
    reference: dict[str, list[Completion]] = {}
    rows: dict[str, dict[str, dict]] = {}
    for name, form in ANSWER_FORMATS.items():  # float32 first
        plain = Engine(target, max_len=max_len, kv_format=form)
        dflash = Engine(target, drafter, max_len=max_len, kv_format=form)
        rows[name] = {}
        for scene, given in requests.items():
            to_end = lambda r: dataclasses.replace(
                r, stop_ids=(), max_tokens=max_len - len(r.prompt_ids)
            )
            jobs = [to_end(r) for r in given]
            done = generate_all(dflash, jobs, steps_per_group=max_len)
            again = generate_all(plain, jobs, steps_per_group=max_len)
            reference.setdefault(scene, done)
            pairs = list(zip(done, reference[scene], strict=True))
            lengths = [len(theirs.token_ids) for _, theirs in pairs]
            nll = [score(r, c) for r, c in zip(jobs, done, strict=True)]
            rows[name][scene] = {
                "identical": float(np.mean([a.token_ids == b.token_ids for a, b in pairs])),
                "agreed_share": sum(agreement(a, b) for a, b in pairs) / sum(lengths),
                "mean_tokens": float(np.mean(lengths)),
                "nll": float(np.average(nll, weights=lengths)),
                "tau": AcceptStats.of(done, dflash.draft_block_len).tau,
                "drafting_changes": sum(
                    a.token_ids != b.token_ids for a, b in zip(done, again, strict=True)
                ),
                "bytes_per_token": _bytes_per_token(target.config, form),
                "num_prompts": len(done),
            }
    return rows


def _bytes_per_token(config: TargetConfig, form: KVFormat | None) -> float:
    """Of the global layers, by token of context."""
    total = 0.0
    for i in range(config.num_layers):
        a = config.layer_attention(i)
        if a.window is not None:
            continue
        if form is None:
            total += 4 * a.num_kv_heads * (a.head_dim + a.v_head_dim)
        else:
            keys = form.bytes_per_token(a.head_dim, is_by_token=not form.is_evened)
            total += a.num_kv_heads * (keys + form.bytes_per_token(a.v_head_dim, is_by_token=True))
    return total


def _scorer(target: Model, max_len: int):
    """(request, completion) -> mean negative log likelihood of the answer, memory in float32."""

    @jax.jit
    def log_probs(params, ids):
        logits = nnx.merge(target.graph, params)(ids).logits
        return jax.nn.log_softmax(logits, axis=-1)

    def score(request: Request, completion: Completion) -> float:
        ids = np.zeros((1, max_len), np.int32)
        row = [*request.prompt_ids, *completion.token_ids]
        ids[0, : len(row)] = row
        table = np.asarray(log_probs(target.params, ids))[0]
        at = np.arange(len(request.prompt_ids), len(row))
        return float(-table[at - 1, ids[0, at]].mean())

    return score
