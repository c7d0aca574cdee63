"""The DFlash drafter: one forward proposes every token of a draft block.

A block is [anchor, mask x m]. Queries come from the block only; keys and values come from the
context features of committed positions and from the block itself ("KV injection": each layer
projects the same fused features with its own K and V weights, so the context has no residual
stream and costs nothing per layer beyond that). The mask slot at a position predicts the token
*at* that position; the anchor's slot predicts nothing. There is one denoising step.

The drafter owns no embedding and no head: both are the target's. The mask vector is the row of
`mask_token_id` in the target's embedding.

Memory holds context K/V only; block K/V never enters it.

Traps: the anchor's own feature does not exist when it is drafted from (context is strictly before
it); context features do not pass a layer's input norm (their only norm is `context_norm`).

Source: arXiv:2602.06036 and the published drafter class; glossary: KV injection, draft block.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mimo_jax import cache as kv
from mimo_jax import recall
from mimo_jax.config import DrafterConfig
from mimo_jax.layers import masks
from mimo_jax.layers.attention import Stretch, attend
from mimo_jax.layers.linear import linear
from mimo_jax.layers.moe import swiglu
from mimo_jax.layers.norm import add_and_norm, rms_norm
from mimo_jax.layers.rope import apply_rope, inverse_frequencies, rope_tables
from mimo_jax.models.block_attention import attend_block, block_of
from mimo_jax.models.params import weight
from mimo_jax.models.target import Target
from pallas_kernels.dispatch import XLA
from pallas_kernels.sink_attention.api import write_context


class ContextKV(NamedTuple):
    """Per layer, keys [b, k, s, h] and values [b, k, s, hv] of context features."""

    keys: tuple[Float[Array, "b k s h"], ...]
    values: tuple[Float[Array, "b k s hv"], ...]


class DrafterLayer(nnx.Module):
    """Weights of one draft layer."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype):
        d, a = config.hidden_size, config.attention
        out_scale = (2 * config.num_layers) ** -0.5
        self.attention_norm = weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)
        q_width, k_width, v_width = a.qkv_widths
        self.w_q = weight(rngs, (d, q_width), ("embed", "heads"), dtype=dtype)
        self.w_kv = weight(rngs, (d, k_width + v_width), ("embed", "heads"), dtype=dtype)
        if config.use_qk_norm:
            self.q_norm = weight(rngs, (a.head_dim,), (None,), fill=1.0, dtype=dtype)
            self.k_norm = weight(rngs, (a.head_dim,), (None,), fill=1.0, dtype=dtype)
        if a.has_sink:
            self.sink = weight(rngs, (a.num_heads,), ("heads",), fill=0.0, dtype=dtype)
        scale = out_scale * a.out_width**-0.5
        self.w_out = weight(rngs, (a.out_width, d), ("heads", "embed"), scale=scale, dtype=dtype)
        self.ffn_norm = weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)
        f = config.dense_hidden_size
        self.w_gate = weight(rngs, (d, f), ("embed", "hidden"), dtype=dtype)
        self.w_up = weight(rngs, (d, f), ("embed", "hidden"), dtype=dtype)
        scale = out_scale * f**-0.5
        self.w_down = weight(rngs, (f, d), ("hidden", "embed"), scale=scale, dtype=dtype)


class Drafter(nnx.Module):
    """Context fusion, KV injection and the block forward."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = config
        self.is_transposed = False  # see models/params.transpose_weights
        self.mesh_axis = None  # see models/cut.py
        self.implementation = XLA  # see models/kernels.py
        c, d = config.context_width, config.hidden_size
        self.w_fuse = weight(rngs, (c, d), ("context", "embed"), dtype=dtype)
        self.context_norm = weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)
        self.layers = nnx.List(
            [DrafterLayer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)]
        )
        self.final_norm = weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)
        if config.has_mask_embedding:
            self.mask_embedding = weight(rngs, (d,), ("embed",), fill=0.0, dtype=dtype)

    @property
    def dtype(self):
        return self.w_fuse[...].dtype

    def make_cache(self, batch_size: int, max_len: int, slack: int) -> kv.KVCache:
        """Empty context memory for rows of up to max_len tokens."""
        if self.implementation != XLA:
            slack = kv.whole_slots(slack)
        a = self.config.attention
        return kv.make_cache(
            batch_size,
            max_len,
            [(a.num_kv_heads, a.head_dim, a.v_head_dim)] * self.config.num_layers,
            self.config.windows,
            slack=slack,
            dtype=self.dtype,
        )

    def _linear(self, x, weight, sum_over=None):
        return linear(x, weight[...], is_transposed=self.is_transposed, sum_over=sum_over)

    def _rope(self, positions):
        a = self.config.attention
        return rope_tables(
            positions, inverse_frequencies(a.rope_dim, a.rope_theta, a.rope_scaling)
        )

    def _keys_values(self, layer, x, tables):
        """K and V of one layer for context features or block hidden states, head-major."""
        config, a = self.config, self.config.attention
        b, s, _ = x.shape
        k_width = a.qkv_widths[1]
        keys, values = jnp.split(self._linear(x, layer.w_kv), [k_width], axis=-1)
        keys = keys.reshape(b, s, a.num_kv_heads, a.head_dim)
        values = values.reshape(b, s, a.num_kv_heads, a.v_head_dim)
        if config.use_qk_norm:
            keys = rms_norm(keys, layer.k_norm[...], eps=config.norm_eps)
        keys = apply_rope(keys, *tables)
        if config.value_scale != 1.0:
            values = values * jnp.asarray(config.value_scale, values.dtype)
        return keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)

    def fuse_context(self, context_features: Float[Array, "b s c"]) -> Float[Array, "b s d"]:
        """Projects and norms the concatenated taps; shared by all layers."""
        if self.mesh_axis is not None:  # this device's rows of w_fuse want their own features
            c = self.w_fuse.shape[1 if self.is_transposed else 0]
            start = jax.lax.axis_index(self.mesh_axis) * c
            context_features = jax.lax.dynamic_slice_in_dim(context_features, start, c, axis=2)
        fused = self._linear(context_features, self.w_fuse, self.mesh_axis)
        return rms_norm(fused, self.context_norm[...], eps=self.config.norm_eps)

    def project_context(
        self, context_features: Float[Array, "b s c"], positions: Int[Array, "b s"]
    ) -> ContextKV:
        """Context K/V of every layer at the features' own absolute positions."""
        fused, tables = self.fuse_context(context_features), self._rope(positions)
        pairs = [self._keys_values(layer, fused, tables) for layer in self.layers]
        return ContextKV(tuple(k for k, _ in pairs), tuple(v for _, v in pairs))

    def inject_context(
        self,
        target: object,
        cache: kv.KVCache,
        context_features: Float[Array, "b t c"],
        token_ids: Int[Array, "b t"],
        start: Int[Array, "b"],
    ) -> kv.KVCache:
        """Writes the context K/V of one verified block, positions start .. start+t-1.

        Target and ids are for drafters that read embeddings; features alone say enough here.
        Rejected positions may be included: they stand at or past the next anchor, where no query
        looks, and are overwritten by the next block.
        """
        del target, token_ids
        t = context_features.shape[1]
        positions = start[:, None] + jnp.arange(t, dtype=jnp.int32)[None, :]
        if self.implementation != XLA:
            return self._inject_in_kernel(cache, context_features, start, positions)
        context = self.project_context(context_features, positions)
        cache = kv.advance_ring_positions(cache, start, t)
        layers = tuple(
            kv.write_block(cache, i, context.keys[i], context.values[i], start)
            for i in range(self.config.num_layers)
        )
        return dataclasses.replace(cache, layers=layers)

    def _inject_in_kernel(self, cache: kv.KVCache, context_features, start, positions):
        config = self.config
        fused, (cos, sin) = self.fuse_context(context_features), self._rope(positions)
        layers = []
        for layer_idx, layer in enumerate(self.layers):
            held = cache.layers[layer_idx]
            assert isinstance(held, kv.LayerCache), "a drafter's memory is not quantised"
            written = write_context(
                self._linear(fused, layer.w_kv),
                held.keys,
                held.values,
                first_slot=cache.first_slot(layer_idx, start),
                cos=cos,
                sin=sin,
                k_norm=layer.k_norm[...] if config.use_qk_norm else None,
                norm_eps=config.norm_eps,
                value_scale=config.value_scale,
                implementation=self.implementation,
            )
            layers.append(kv.LayerCache(*written))
        cache = kv.advance_ring_positions(cache, start, positions.shape[1])
        return dataclasses.replace(cache, layers=tuple(layers))

    def inject_prompt(
        self,
        target: object,
        cache: kv.KVCache,
        context_features: Float[Array, "b t c"],
        token_ids: Int[Array, "b t"],
        start: Int[Array, "b"],
        num_valid: Int[Array, "b"],
    ) -> kv.KVCache:
        """As `inject_context` for a prompt chunk of any length, padded on the right."""
        del target, token_ids
        t = context_features.shape[1]
        positions = start[:, None] + jnp.arange(t, dtype=jnp.int32)[None, :]
        context = self.project_context(context_features, positions)
        layers = tuple(
            kv.write_chunk(cache, i, context.keys[i], context.values[i], start, num_valid)
            for i in range(self.config.num_layers)
        )
        return kv.finish_chunk(dataclasses.replace(cache, layers=layers), start, num_valid)

    def draft_logits(
        self,
        target: Target,
        anchors: Int[Array, "b"],
        cache: kv.KVCache,
        anchor_pos: Int[Array, "b"],
        active_len: Int[Array, "b"],
        draft_block_len: int,
    ) -> Float[Array, "b m v"]:
        """Drafts one block: logits of each mask slot; what the decode loop asks of a drafter.

        Args:
          target: Gives the embedding and the head.
          anchors: Last committed token of each row.
          cache: Context memory of all positions before the anchor.
          anchor_pos: Absolute position of the anchor.
          active_len: Slots in use; proposals at or past it mean nothing.
          draft_block_len: Slots of the block, at most the trained length.

        Returns:
          float32 [b, draft_block_len - 1, draft vocabulary] for positions anchor_pos + 1, + 2,
          ...; on a mesh as `Target.unembed`.
        """
        block = self.embed_block(target, anchors, draft_block_len)
        hidden = self.draft_hidden(block, cache, anchor_pos, active_len)
        return target.unembed(hidden[:, 1:], self.config.vocab_size)

    def embed_block(
        self, target: Target, anchors: Int[Array, "b"], draft_block_len: int
    ) -> Float[Array, "b m1 d"]:
        """Input of a block: the anchor's embedding, then the mask vector in every slot."""
        masks_shape = (anchors.shape[0], draft_block_len - 1)
        if not self.config.has_mask_embedding:
            mask_ids = jnp.full(masks_shape, self.config.mask_token_id, jnp.int32)
            return target.embed(jnp.concatenate([anchors[:, None], mask_ids], axis=1))
        first = target.embed(anchors[:, None])
        mask = self.mask_embedding[...].astype(first.dtype)
        return jnp.concatenate(
            [first, jnp.broadcast_to(mask, (*masks_shape, mask.shape[0]))], axis=1
        )

    def draft_hidden(
        self,
        block_embeddings: Float[Array, "b m1 d"],
        cache: kv.KVCache,
        anchor_pos: Int[Array, "b"],
        active_len: Int[Array, "b"],
    ) -> Float[Array, "b m1 d"]:
        """Normed hidden states of a block against the context memory.

        Args:
          block_embeddings: Target embeddings of [anchor, mask, mask, ...].
          cache: Context memory of all positions before the anchor.
          anchor_pos: Absolute position of the anchor.
          active_len: Slots in use, 1..m1; later slots are nobody's keys (the block sees itself
            both ways, so a padded slot would change the others).

        Returns:
          [b, m1, d]; slot j >= 1 goes through the target's head to predict position
          anchor_pos + j.
        """
        m1 = block_embeddings.shape[1]
        positions = self._slot_positions(anchor_pos, m1)

        def mix(layer_idx, queries, own, sink):
            if cache.is_long(layer_idx):
                return recall.attend_long(
                    queries, own, cache, layer_idx, anchor_pos, positions, sink=sink
                )[0]
            held = cache.layers[layer_idx]
            assert isinstance(held, kv.LayerCache), "a drafter's memory is not quantised"
            mask = masks.draft_context_mask(
                anchor_pos, m1, cache.key_positions(layer_idx), self.config.windows[layer_idx]
            )
            return attend(queries, [Stretch(held.keys, held.values, mask), own], sink=sink)

        if self.implementation != XLA:
            meet = self._in_kernel(cache, anchor_pos, active_len, m1)
            return self._run_layers(block_embeddings, meet)
        return self._run_block(block_embeddings, anchor_pos, active_len, mix)

    def _in_kernel(self, cache: kv.KVCache, anchor_pos, active_len, m1: int) -> Callable:
        """As `_run_block` makes it from `mix`, in one launch per layer."""
        config, a = self.config, self.config.attention
        positions = self._slot_positions(anchor_pos, m1)
        tables, blocks = self._rope(positions), {}

        def meet(layer_idx, layer, normed):
            is_causal = config.is_causal[layer_idx]
            if is_causal not in blocks:
                sees = masks.draft_block_mask(active_len, m1, is_causal)
                blocks[is_causal] = block_of(anchor_pos, positions - anchor_pos[:, None], sees)
            out, _ = attend_block(
                self._linear(normed, layer.w_qkv),
                cache,
                layer_idx,
                layer,
                a,
                tables,
                blocks[is_causal],
                value_scale=config.value_scale,
                norm_eps=config.norm_eps,
                has_norms=config.use_qk_norm,
                window=config.windows[layer_idx],
                write=False,
                implementation=self.implementation,
            )
            return out

        return meet

    def train_hidden(
        self,
        block_embeddings: Float[Array, "b m1 d"],
        context_keys: tuple[Float[Array, "b k s h"], ...],
        context_values: tuple[Float[Array, "b k s hv"], ...],
        context_pos: Int[Array, "b s"],
        anchor_pos: Int[Array, "b"],
    ) -> Float[Array, "b m1 d"]:
        """The same block forward with context K/V gathered by the trainer.

        Args:
          block_embeddings: One row per anchor.
          context_keys: Per layer, keys of the positions in context_pos.
          context_values: Per layer, values.
          context_pos: Absolute position of each gathered key, -1 = nothing there.
          anchor_pos: Absolute position of each anchor.
        """
        m1 = block_embeddings.shape[1]
        active_len = jnp.full(anchor_pos.shape, m1, jnp.int32)

        def mix(layer_idx, queries, own, sink):
            mask = masks.draft_context_mask(
                anchor_pos, m1, context_pos, self.config.windows[layer_idx]
            )
            context = Stretch(context_keys[layer_idx], context_values[layer_idx], mask)
            return attend(queries, [context, own], sink=sink)

        return self._run_block(block_embeddings, anchor_pos, active_len, mix)

    @staticmethod
    def _slot_positions(anchor_pos, m1: int):
        return anchor_pos[:, None] + jnp.arange(m1, dtype=jnp.int32)[None, :]

    def _run_block(self, x, anchor_pos, active_len, mix: Callable):
        """mix: (layer_idx, queries, own stretch, sink) -> output; how a block meets its context."""
        config, a = self.config, self.config.attention
        b, m1, _ = x.shape
        tables = self._rope(self._slot_positions(anchor_pos, m1))
        block_masks: dict[bool, Bool[Array, "b m1 m1"]] = {}

        def meet(layer_idx, layer, normed):
            is_causal = config.is_causal[layer_idx]
            if is_causal not in block_masks:
                block_masks[is_causal] = masks.draft_block_mask(active_len, m1, is_causal)
            queries = self._linear(normed, layer.w_q).reshape(b, m1, a.num_heads, a.head_dim)
            if config.use_qk_norm:
                queries = rms_norm(queries, layer.q_norm[...], eps=config.norm_eps)
            queries = apply_rope(queries, *tables)
            keys, values = self._keys_values(layer, normed, tables)
            own = Stretch(keys, values, block_masks[is_causal])
            mixed = mix(layer_idx, queries, own, layer.sink[...] if a.has_sink else None)
            return mixed.reshape(b, m1, a.out_width)

        return self._run_layers(x, meet)

    def _run_layers(self, x, meet: Callable):
        """meet: (layer_idx, layer, normed) -> attention output [b, m1, out_width]."""
        config = self.config
        add = functools.partial(
            add_and_norm, eps=config.norm_eps, implementation=self.implementation
        )
        norms = [layer.attention_norm for layer in self.layers]
        norms.append(self.final_norm)
        normed = rms_norm(x, norms[0][...], eps=config.norm_eps)
        for layer_idx, layer in enumerate(self.layers):
            mixed = meet(layer_idx, layer, normed)
            out = self._linear(mixed, layer.w_out, self.mesh_axis)
            x, normed = add(x, out, layer.ffn_norm[...])
            matrices = (layer.w_gate[...], layer.w_up[...], layer.w_down[...])
            out = swiglu(
                normed, *matrices, is_transposed=self.is_transposed, sum_over=self.mesh_axis
            )
            x, normed = add(x, out, norms[layer_idx + 1][...])
        return normed
