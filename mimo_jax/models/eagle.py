"""The EAGLE-3 drafter: one layer over three fused taps that runs on its own states.

A baseline. At position p it reads g_p (low, middle and high taps of the target, fused to the model
width) and the embedding of the id at p + 1; queries, keys and values come from both side by side,
the residual stream from g_p alone. Its output state takes g's place one position later, so a block
of m drafts is m passes of the layer, one after another (`lookahead.unroll`).

Choices: embedding and head are the target's, as for every drafter here (the published ones train a
head over a reduced vocabulary). The layer is sliding, with the window of the DFlash drafter that it
is compared with: the published layer is global, and at our rows of 256 tokens a window of 128 costs
neither of them anything.

Trap: trained on true features only it collapses after the first token; `train/eagle_step.py`
unrolls it on its own states.

Source: arXiv:2503.01840.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mimo_jax.config import AttentionConfig, TargetConfig, require
from mimo_jax.layers.linear import linear
from mimo_jax.layers.moe import swiglu
from mimo_jax.layers.norm import rms_norm
from mimo_jax.layers.rope import apply_rope, inverse_frequencies, rope_tables
from mimo_jax.models.lookahead import HeadOutput, LookaheadDrafter
from mimo_jax.models.params import weight
from mimo_jax.models.target import Target


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """An EAGLE-3 drafter.

    Attributes:
      hidden_size: Width; the target's, whose embedding and head it shares.
      attention: Geometry of its layer; has a window.
      dense_hidden_size: SwiGLU width.
      target_layer_ids: Low, middle and high layer of the target whose output is tapped, 0-based.
      num_target_layers: Layers of the target it was made for.
      draft_block_len: Anchor and as many drafts as it was unrolled for in training.
      norm_eps: Epsilon of every RMS norm.
    """

    hidden_size: int
    attention: AttentionConfig
    dense_hidden_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    draft_block_len: int
    norm_eps: float = 1e-6

    def __post_init__(self):
        require(self.attention.window is not None, "the layer of an EAGLE-3 drafter has a window")
        require(
            self.draft_block_len >= 2, f"draft_block_len {self.draft_block_len} must be >= 2"
        )
        ids = self.target_layer_ids
        require(
            len(set(ids)) == 3 and all(0 <= i < self.num_target_layers for i in ids),
            f"target_layer_ids {list(ids)} must be three of 0..{self.num_target_layers - 1}",
        )

    @property
    def context_width(self) -> int:
        return len(self.target_layer_ids) * self.hidden_size

    def check_fits(self, target: TargetConfig) -> None:
        """Raises ConfigError, saying which value was expected, when made for another target."""
        for name, ours, theirs in (
            ("num_target_layers", self.num_target_layers, target.num_layers),
            ("hidden_size", self.hidden_size, target.hidden_size),
        ):
            require(
                ours == theirs,
                f"EAGLE-3 drafter does not fit the target: {name} is {ours}, expected {theirs}",
            )


class EagleHead(nnx.Module):
    """Fusion, the one layer and its final norm."""

    def __init__(self, config: EagleConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = config
        self.is_transposed = False  # see models/params.transpose_weights
        d, f, a = config.hidden_size, config.dense_hidden_size, config.attention
        norm = lambda: weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)
        matrix = lambda shape, axes, **options: weight(rngs, shape, axes, dtype=dtype, **options)
        self.w_fuse = matrix((config.context_width, d), ("context", "embed"))
        self.embedding_norm, self.state_norm = norm(), norm()
        self.w_qkv = matrix((2 * d, sum(a.qkv_widths)), ("context", "heads"))
        out_scale = 2**-0.5
        scale = out_scale * a.out_width**-0.5
        self.w_out = matrix((a.out_width, d), ("heads", "embed"), scale=scale)
        self.ffn_norm = norm()
        self.w_gate = matrix((d, f), ("embed", "hidden"))
        self.w_up = matrix((d, f), ("embed", "hidden"))
        self.w_down = matrix((f, d), ("hidden", "embed"), scale=out_scale * f**-0.5)
        self.final_norm = norm()

    @property
    def layer_attention(self) -> AttentionConfig:
        return self.config.attention

    def _linear(self, x, weight):
        return linear(x, weight[...], is_transposed=self.is_transposed)

    def enter(self, features: Float[Array, "b t c"]) -> Float[Array, "b t d"]:
        """The three taps fused to one state."""
        return self._linear(features, self.w_fuse)

    def run(
        self,
        target: Target,
        state: Float[Array, "b t d"],
        next_ids: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        mix: Callable,
    ) -> HeadOutput:
        """The layer, as `lookahead.Head` says.

        Args:
          target: Gives the embedding.
          state: Fused taps, or the head's own state one step earlier.
          next_ids: Id at position p + 1, for each position p.
          positions: Of the queries.
          mix: (queries, keys, values, sink) -> attention output.
        """
        a, eps = self.config.attention, self.config.norm_eps
        b, t, _ = state.shape
        embedded = rms_norm(target.embed(next_ids), self.embedding_norm[...], eps=eps)
        normed = rms_norm(state, self.state_norm[...], eps=eps)
        qkv = self._linear(jnp.concatenate([embedded, normed], axis=-1), self.w_qkv)
        n, k = a.num_heads, a.num_kv_heads
        queries_keys, values = jnp.split(qkv, [(n + k) * a.head_dim], axis=-1)
        frequencies = inverse_frequencies(a.rope_dim, a.rope_theta, a.rope_scaling)
        queries_keys = apply_rope(
            queries_keys.reshape(b, t, n + k, a.head_dim), *rope_tables(positions, frequencies)
        )
        queries, keys = jnp.split(queries_keys, [n], axis=2)
        values = values.reshape(b, t, k, a.v_head_dim)
        mixed = mix(queries, keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3), None)
        x = state + self._linear(mixed.reshape(b, t, a.out_width), self.w_out)
        normed = rms_norm(x, self.ffn_norm[...], eps=eps)
        matrices = (self.w_gate[...], self.w_up[...], self.w_down[...])
        x = x + swiglu(normed, *matrices, is_transposed=self.is_transposed)
        return HeadOutput(rms_norm(x, self.final_norm[...], eps=eps), x)


class EagleDrafter(LookaheadDrafter):
    """An EAGLE-3 drafter for the decode loop.

    Example: `LLM(target, Model(config, *split(EagleDrafter(config, rngs=nnx.Rngs(0)))))`.
    """

    def __init__(self, config: EagleConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        super().__init__(config, [EagleHead(config, rngs=rngs, dtype=dtype)], is_chained=True)
