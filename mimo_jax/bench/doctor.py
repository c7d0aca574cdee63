"""Why does a drafter not draft? Acceptance on a given text, as shipped and with one thing changed.

A port can be wrong in ways that leave the text fluent and the accept length at 1.0-1.4 instead of
6: taps off by one, the mask vector not loaded, another output head, a window or a RoPE base read
differently, a causal block. Each is tried here on the same blocks. Acceptance is teacher-forced:
slot k counts if the drafter's argmax equals the target's argmax at that position of the *text*, and
a block's accept length is one plus its leading hits. On the target's own answers that is what
decoding sees.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mimo_jax.checkpoint.hf_drafter import find_drafter, load_drafter
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.config import ConfigError, DrafterConfig, TargetConfig
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import abstract, flatten, unflatten
from mimo_jax.text.tokenizer import Tokenizer
from mimo_jax.train.drafter_step import draft_logits_at_anchors
from mimo_jax.train.step import Batch

SHIPPED = "as shipped"
RAISES_BY = 0.1  # accept length; below it a variation says nothing on a few hundred blocks


@dataclasses.dataclass(frozen=True)
class Variation:
    """Acceptance with one thing changed.

    Attributes:
      name: What was changed.
      accept_length: Mean of 1 + leading hits.
      acceptance: Share of blocks whose slot k hits, k = 1...
    """

    name: str
    accept_length: float
    acceptance: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """Findings about a pair; `variations[0]` is the pair as shipped."""

    variations: tuple[Variation, ...]
    findings: tuple[str, ...]
    num_tokens: int
    num_blocks: int
    mask_norm: float
    embedding_norm: float


def _variations(
    config: DrafterConfig, target: TargetConfig
) -> Iterator[tuple[str, DrafterConfig]]:
    """One config per usual fault that a config can undo."""
    change = lambda **fields: dataclasses.replace(config, **fields)
    for shift in (-1, 1):
        ids = tuple(i + shift for i in config.target_layer_ids)
        if 0 <= min(ids) and max(ids) < target.num_layers:
            yield f"taps {shift:+d}", change(target_layer_ids=ids)
    if any(config.windows):
        yield "no window", change(windows=(None,) * config.num_layers)
    flipped = not all(config.is_causal)
    name = "causal block" if flipped else "non-causal block"
    yield name, change(is_causal=(flipped,) * config.num_layers)
    bases = {a.rope_theta for a in target.attention.values()} | {1e4, 1e6, 5e6, 1e7}
    for theta in sorted(bases - {config.attention.rope_theta}):
        attention = dataclasses.replace(config.attention, rope_theta=theta)
        yield f"RoPE base {theta:g}", change(attention=attention)
    if config.attention.rope_dim != config.attention.head_dim:
        attention = dataclasses.replace(config.attention, rope_dim=config.attention.head_dim)
        yield "full rotary", change(attention=attention)
    for scale in sorted({1.0, target.value_scale} - {config.value_scale}):
        yield f"value scale {scale:g}", change(value_scale=scale)


def examine(
    checkpoint: str | os.PathLike,
    drafter_dir: str | os.PathLike | None,
    text: str | os.PathLike,
    *,
    max_tokens: int,
    num_anchors: int,
) -> Report:
    """Measures a pair on the text of a file.

    Args:
      checkpoint: Target with a tokenizer.
      drafter_dir: Drafter; None = the one inside the target's directory.
      text: UTF-8 file.
      max_tokens: Tokens used.
      num_anchors: Draft blocks, at random positions (fixed seed).

    Raises:
      ConfigError: If there is no drafter, or the text is too short; CheckpointError on loading.
    """
    checkpoint = Path(checkpoint)
    drafter_dir = find_drafter(checkpoint) if drafter_dir is None else Path(drafter_dir)
    if drafter_dir is None:
        raise ConfigError(f"{checkpoint}: has no drafter in dflash/; name one")
    token_ids = Tokenizer.from_file(checkpoint).encode(Path(text).read_text("utf-8"))[:max_tokens]
    return examine_ids(checkpoint, drafter_dir, token_ids, num_anchors=num_anchors)


def examine_ids(
    checkpoint: str | os.PathLike,
    drafter_dir: str | os.PathLike,
    token_ids: list[int],
    *,
    num_anchors: int,
) -> Report:
    """As `examine`, on token ids."""
    config, graph, params = load_target(checkpoint, jnp.float32)
    draft_config, _, draft_params = load_drafter(drafter_dir, jnp.float32)
    draft_config.check_fits(config)
    m1 = draft_config.draft_block_len
    token_ids = token_ids[: config.max_position]
    if len(token_ids) < 2 * m1:
        raise ConfigError(f"the text has {len(token_ids)} tokens; at least {2 * m1} are needed")
    ids = np.asarray(token_ids, np.int32)[None]
    t = ids.shape[1]
    batch = Batch(
        jnp.asarray(ids),
        jnp.ones((1, t), jnp.int32),
        jnp.ones((1, t), bool),
        jnp.arange(t, dtype=jnp.int32)[None],
    )
    all_layers = tuple(range(config.num_layers))
    forward = jax.jit(lambda p, x: nnx.merge(graph, p)(x, tap_layer_ids=all_layers))
    out = forward(params, ids)
    layer_out = np.split(np.asarray(out.context_features), config.num_layers, axis=-1)
    choice = np.argmax(np.asarray(out.logits)[0], axis=-1)
    places = np.arange(1, t - m1 + 1)
    rng = np.random.default_rng(0)
    anchors = np.sort(rng.choice(places, min(num_anchors, len(places)), replace=False))
    wanted = choice[anchors[:, None] + np.arange(m1 - 1)[None]]  # of positions anchor + 1, ...

    flat = flatten(draft_params)
    own_mask = flat.pop("mask_embedding", None)
    embedding = flatten(params)["embedding"]
    row = embedding[draft_config.mask_token_id]
    mask = row if own_mask is None else own_mask
    plain_config = dataclasses.replace(draft_config, has_mask_embedding=False)

    def measure(name: str, variant: DrafterConfig, mask_embedding, target_params) -> Variation:
        draft_graph, like = abstract(lambda: Drafter(variant, rngs=nnx.Rngs(0)))

        @jax.jit
        def propose(target_params, flat_params, features, mask_embedding):
            logits = draft_logits_at_anchors(
                nnx.merge(graph, target_params),
                nnx.merge(draft_graph, flat_params),
                batch,
                features,
                jnp.asarray(anchors[None], jnp.int32),
                mask_embedding,
            )
            return jnp.argmax(logits, axis=-1)

        features = np.concatenate([layer_out[i] for i in variant.target_layer_ids], axis=-1)
        drafted = propose(target_params, unflatten(like, flat), features, mask_embedding)
        hits = np.asarray(drafted) == wanted
        accepted = np.cumprod(hits, axis=1).sum(axis=1)
        return Variation(
            name, float(1 + accepted.mean()), tuple(float(x) for x in hits.mean(axis=0))
        )

    variations = [measure(SHIPPED, plain_config, mask, params)]
    if own_mask is not None:
        variations.append(measure("the target's row as mask vector", plain_config, row, params))
    variations.append(measure("zero mask vector", plain_config, jnp.zeros_like(mask), params))
    if not config.tie_embeddings:
        target_flat = flatten(params)
        tied = unflatten(params, target_flat | {"head": embedding.T})
        variations.append(measure("embedding as output head", plain_config, mask, tied))
    for name, variant in _variations(plain_config, config):
        variations.append(measure(name, variant, mask, params))
    mask_norm = float(jnp.linalg.norm(mask))
    mean_norm = float(jnp.mean(jnp.linalg.norm(embedding, axis=1)))
    return Report(
        tuple(variations),
        tuple(_findings(variations, mask_norm, mean_norm)),
        t,
        len(anchors),
        mask_norm,
        mean_norm,
    )


def _findings(
    variations: list[Variation], mask_norm: float, embedding_norm: float
) -> Iterator[str]:
    shipped, others = variations[0], variations[1:]
    if mask_norm < 0.05 * embedding_norm:
        yield (
            f"the mask vector is near zero ({mask_norm:.3g} against {embedding_norm:.3g} for a "
            "token): is mask_embedding.pt or .safetensors missing?"
        )
    better = [v for v in others if v.accept_length > shipped.accept_length + RAISES_BY]
    for variation in sorted(better, key=lambda v: -v.accept_length):
        yield (
            f"{variation.name} raises the accept length from {shipped.accept_length:.2f} to "
            f"{variation.accept_length:.2f}: look there"
        )
    if not better:
        yield f"no variation raises the accept length by more than {RAISES_BY}"
    if shipped.accept_length < 1.5 and not better:
        yield "the accept length is near 1: the drafter may belong to another target"
