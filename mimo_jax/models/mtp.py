"""Multi-token prediction heads of MiMo-V2: one sliding layer that looks two tokens ahead.

A head sees, at position t, the target's residual stream h_t (before its final norm) and the next
token, and predicts the token after that. Embedding and head are the target's. Several heads look
further, head k at the token k positions later; see `lookahead.py` for how they draft.

Of the conventions met in engines two are here: heads apart, each fed the target's state (SGLang),
and the first head alone, fed back its own state (vLLM; it feeds the normed state, which differs
from the residual stream here by the weights of one norm). Chaining different heads (llama.cpp) is
not.

Trap: the embedding half comes first in the concatenation; exchanged halves still run.

Source: arXiv:2601.02780 section 2.3; the half order as served by the published engines.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mimo_jax.config import SLIDING, AttentionConfig, TargetConfig, require
from mimo_jax.layers.linear import linear
from mimo_jax.layers.norm import rms_norm
from mimo_jax.models.lookahead import HeadOutput, LookaheadDrafter
from mimo_jax.models.params import abstract, flatten, unflatten, weight
from mimo_jax.models.target import Target, TargetLayer, mix_whole_rows, rotated, run_layers
from pallas_kernels.dispatch import XLA


def mtp_layer_config(config: TargetConfig) -> TargetConfig:
    """The target's geometry with the one dense sliding layer of a head."""
    return dataclasses.replace(
        config,
        layer_kinds=(SLIDING,),
        attention={SLIDING: config.attention[SLIDING]},
        moe=None,
        is_moe_layer=(False,),
        is_fp8=False,
    )


@dataclasses.dataclass(frozen=True)
class MtpConfig:
    """A drafter of MTP heads.

    Attributes:
      target: The target that they belong to.
      draft_block_len: Anchor and drafts; apart there is a head for each draft (published: 3).
      is_chained: Draft with the first head alone, fed back its own state.
    """

    target: TargetConfig
    draft_block_len: int = 4
    is_chained: bool = False

    def __post_init__(self):
        require(SLIDING in self.target.attention, "MTP heads need a target with sliding layers")
        require(
            self.draft_block_len >= 2, f"draft_block_len {self.draft_block_len} must be >= 2"
        )

    @property
    def num_heads(self) -> int:
        return 1 if self.is_chained else self.draft_block_len - 1

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return (self.target.num_layers - 1,)

    @property
    def context_width(self) -> int:
        return self.target.hidden_size

    def check_fits(self, target: TargetConfig) -> None:
        """Raises ConfigError, saying which value was expected, when made for another target."""
        for name in ("num_layers", "hidden_size", "vocab_size", "attention"):
            ours, theirs = getattr(self.target, name), getattr(target, name)
            require(
                ours == theirs,
                f"MTP heads do not fit the target: {name} is {ours}, expected {theirs}",
            )


class MtpOutput(NamedTuple):
    """What a head gives over whole rows.

    Attributes:
      logits: float32 [b, t, v], for the token two after each position.
      hidden: [b, t, d], the head's residual stream before its final norm.
    """

    logits: Float[Array, "b t v"]
    hidden: Float[Array, "b t d"]


class MtpHead(nnx.Module):
    """One head.

    Args:
      config: Of the target it belongs to.
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = mtp_layer_config(config)
        self.is_transposed = False
        self.implementation = XLA
        self.mesh_axis = None
        d = config.hidden_size
        self.embedding_norm = weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)
        self.hidden_norm = weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)
        self.w_combine = weight(rngs, (2 * d, d), ("context", "embed"), dtype=dtype)
        self.layers = nnx.List([TargetLayer(self.config, 0, rngs=rngs, dtype=dtype)])
        self.final_norm = weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)

    @property
    def layer_attention(self) -> AttentionConfig:
        return self.config.attention[SLIDING]

    def enter(self, features: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """The target's residual stream is the state."""
        return features

    def run(
        self,
        target: Target,
        state: Float[Array, "b t d"],
        next_ids: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        mix: Callable,
    ) -> HeadOutput:
        """One layer, as `lookahead.Head` says.

        Args:
          target: Gives the embedding.
          state: The target's residual stream at each position, before its final norm.
          next_ids: Id at position p + 1 (head k: p + 1 + k), for each position p.
          positions: Of the queries.
          mix: (queries, keys, values, sink) -> attention output.
        """
        eps = self.config.norm_eps
        embedded = rms_norm(target.embed(next_ids), self.embedding_norm[...], eps=eps)
        state = rms_norm(state, self.hidden_norm[...], eps=eps)
        x = linear(
            jnp.concatenate([embedded, state], axis=-1),
            self.w_combine[...],
            is_transposed=self.is_transposed,
        )
        only_layer = lambda layer_idx, *args: mix(*args)
        normed, _, _, residual = run_layers(
            self, x, rotated(self, positions, only_layer), ()
        )
        return HeadOutput(normed, residual)

    def run_rows(
        self,
        target: Target,
        state: Float[Array, "b t d"],
        next_ids: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        segment_ids: Int[Array, "b t"],
    ) -> HeadOutput:
        """`run` over whole packed rows, without memory."""
        whole_rows = mix_whole_rows(self.config, segment_ids)
        return self.run(target, state, next_ids, positions, lambda *args: whole_rows(0, *args))

    def __call__(
        self, target: Target, next_ids: Int[Array, "b t"], hidden: Float[Array, "b t d"]
    ) -> MtpOutput:
        """Forward over whole rows of one document each.

        Args:
          target: Gives embedding and head.
          next_ids: Id at position p + 1, for each position p.
          hidden: The target's residual stream at position p, before its final norm.

        Example: ids (5, 6, 7) read by the target -> next_ids (6, 7), hidden h_0, h_1; the logits
          are for the ids at positions 2 and 3.
        """
        b, t, _ = hidden.shape
        positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
        out = self.run_rows(target, hidden, next_ids, positions, jnp.ones((b, t), jnp.int32))
        return MtpOutput(target.unembed(out.normed), out.state)


class MtpDrafter(LookaheadDrafter):
    """Drafts with MTP heads, apart or by feeding the first one its own state.

    Example: `LLM(target, Model(*load_mtp_drafter(directory)))` drafts with the heads that a
      checkpoint brings.
    """

    def __init__(self, config: MtpConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        heads = [MtpHead(config.target, rngs=rngs, dtype=dtype) for _ in range(config.num_heads)]
        super().__init__(config, heads, is_chained=config.is_chained)


def mtp_drafter(config: MtpConfig, heads: list):
    """(config, graph, params) of a drafter with the given heads' weights; unneeded ones stay out.

    Args:
      config: Of the drafter.
      heads: Parameters of each `MtpHead`, config.num_heads of them at least.

    Raises:
      ConfigError: If there are too few heads.
    """
    require(
        len(heads) >= config.num_heads,
        f"draft_block_len {config.draft_block_len} needs {config.num_heads} MTP heads, there are "
        f"{len(heads)}",
    )
    flat = {
        f"heads.{i}.{name}": leaf
        for i in range(config.num_heads)
        for name, leaf in flatten(heads[i]).items()
    }
    dtype = flat["heads.0.w_combine"].dtype
    graph, like = abstract(lambda: MtpDrafter(config, rngs=nnx.Rngs(0), dtype=dtype))
    return config, graph, unflatten(like, flat)


def chain_first_head(config: MtpConfig, params, draft_block_len: int):
    """(config, graph, params) of a chain made of the first head of a drafter.

    Args:
      config: Of the given drafter.
      params: Its parameters.
      draft_block_len: Of the chain; any length can be drafted.
    """
    chained = dataclasses.replace(config, draft_block_len=draft_block_len, is_chained=True)
    graph, like = abstract(lambda: MtpDrafter(chained, rngs=nnx.Rngs(0)))
    flat = flatten(params)
    return chained, graph, unflatten(like, {name: flat[name] for name in flatten(like)})
