"""The target: MiMo-V2's text backbone, and dense Qwen3 and Llama as configs of the same module.

One loop over layers serves training, prefill and verify; they differ in how a layer's queries
meet keys, which the loop receives as a function. Nothing here knows about drafting: the target
merely returns the residual stream after the layers it is asked for (the context features).

The q, k and v projections stand side by side in one matrix: a decode step is many small products.
Layers are unrolled: their geometry differs by kind, and XLA would copy each slice of a stack.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mimo_jax import cache as kv
from mimo_jax import recall
from mimo_jax.config import AttentionConfig, TargetConfig
from mimo_jax.layers import masks, moe, tiled_experts
from mimo_jax.layers.attention import (
    Stretch,
    attend,
    attend_in_causal_chunks,
    attend_in_causal_sections,
    attend_in_window_chunks,
)
from mimo_jax.layers.linear import linear, psum_over
from mimo_jax.layers.norm import add_and_norm, rms_norm
from mimo_jax.layers.rope import apply_rope, inverse_frequencies, rope_tables
from mimo_jax.layers.scaled import Fp8Weight, join_chunks
from mimo_jax.layers.tiled_experts import TiledExperts
from mimo_jax.layers.vocab import embed_rows, first_id
from mimo_jax.models.block_attention import Block, attend_block, block_of, chain
from mimo_jax.models.params import weight
from mimo_jax.quant import fp8
from mimo_jax.quant.kv import KVFormat
from pallas_kernels.dispatch import XLA
from pallas_kernels.formats import MX_GROUP_LEN
from pallas_kernels.grouped_matmul.tiles import TiledWeights

# Queries per chunk of a global layer over a whole row.
_ROW_CHUNK_LEN = 128
# Beyond it a row's mask alone is over 64 MB, and its chunks are too many to write out.
_LONG_ROW_LEN = 8192


def _anywhere(x, axes):
    del axes
    return x


class TargetOutput(NamedTuple):
    """What a target forward gives.

    Attributes:
      logits: float32 [b, t, v], or [b, 1, v] where one position per row was asked for.
      context_features: [b, t, c] residual stream after each tapped layer, in the asked order;
        None when no layer was asked for.
      cache: Memory with the tokens written; None without a cache.
      routing: Per sparse layer the chosen experts, int32 [b, t, top_k], and their weights.
    """

    logits: Float[Array, "b t v"]
    context_features: Float[Array, "b t c"] | None
    cache: kv.KVCache | None
    routing: tuple[tuple[Int[Array, "b t top_k"], Float[Array, "b t top_k"]], ...] = ()


class TargetLayer(nnx.Module):
    """Weights of one layer; see `Target` for the forward."""

    def __init__(self, config: TargetConfig, layer_idx: int, *, rngs: nnx.Rngs, dtype):
        d, geometry = config.hidden_size, config.layer_attention(layer_idx)
        out_scale = (2 * config.num_layers) ** -0.5
        self.attention_norm = weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)
        width = sum(geometry.qkv_widths)
        if config.is_fp8:
            self._declare_fp8("w_qkv", rngs, (width, d), ("heads", "embed"), config.num_fp8_chunks)
        else:
            self.w_qkv = weight(rngs, (d, width), ("embed", "heads"), dtype=dtype)
        if config.use_qk_norm:
            h = geometry.head_dim
            self.q_norm = weight(rngs, (h,), (None,), fill=1.0, dtype=dtype)
            self.k_norm = weight(rngs, (h,), (None,), fill=1.0, dtype=dtype)
        if geometry.has_sink:
            self.sink = weight(rngs, (geometry.num_heads,), ("heads",), fill=0.0, dtype=dtype)
        width = geometry.out_width
        self.w_out = weight(
            rngs, (width, d), ("heads", "embed"), scale=out_scale * width**-0.5, dtype=dtype
        )
        self.ffn_norm = weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)
        if config.moe is not None and config.is_moe_layer[layer_idx]:
            e, f = config.moe.num_experts, config.moe.hidden_size
            # f32 router: a bf16 one picks other experts near ties (sglang-jax issue 969).
            self.w_router = weight(rngs, (d, e), ("embed", None), dtype=jnp.float32)
            self.selection_bias = weight(rngs, (e,), (None,), fill=0.0, dtype=jnp.float32)
            if config.moe.is_mxfp4:
                self._declare_packed_experts(rngs, e, d, f)
                return
            axes = ("embed", "experts", "expert_hidden")
            self.experts_gate = weight(rngs, (d, e, f), axes, scale=d**-0.5, dtype=dtype)
            self.experts_up = weight(rngs, (d, e, f), axes, scale=d**-0.5, dtype=dtype)
            axes = ("experts", "expert_hidden", "embed")
            scale = out_scale * f**-0.5
            self.experts_down = weight(rngs, (e, f, d), axes, scale=scale, dtype=dtype)
        elif config.is_fp8:
            f = config.dense_hidden_size
            self._declare_fp8("w_gate", rngs, (f, d), ("hidden", "embed"))
            self._declare_fp8("w_up", rngs, (f, d), ("hidden", "embed"))
            self._declare_fp8("w_down", rngs, (d, f), ("embed", "hidden"))
        else:
            f = config.dense_hidden_size
            self.w_gate = weight(rngs, (d, f), ("embed", "hidden"), dtype=dtype)
            self.w_up = weight(rngs, (d, f), ("embed", "hidden"), dtype=dtype)
            scale = out_scale * f**-0.5
            self.w_down = weight(rngs, (f, d), ("hidden", "embed"), scale=scale, dtype=dtype)

    def _declare_packed_experts(self, rngs: nnx.Rngs, e: int, d: int, f: int) -> None:
        """As the files hold them, [out, in] packed along the input; zero until loaded."""

        def packed(shape, axes):
            *rows, width = shape
            for divisor in (2, MX_GROUP_LEN):
                yield weight(rngs, (*rows, width // divisor), axes, fill=0, dtype=jnp.uint8)

        into_hidden = ("experts", "expert_hidden", "embed")
        out_of_hidden = ("experts", "embed", "expert_hidden")
        self.experts_gate, self.experts_gate_scale = packed((e, f, d), into_hidden)
        self.experts_up, self.experts_up_scale = packed((e, f, d), into_hidden)
        self.experts_down, self.experts_down_scale = packed((e, d, f), out_of_hidden)

    def _declare_fp8(self, name: str, rngs: nnx.Rngs, shape, axes, num_chunks: int = 1) -> None:
        """As the files hold it, [out, in], with one scale per block; zero until loaded."""
        # A block's columns of "embed" are never cut: decoding does not, and training has no FP8.
        scale_axes = tuple(None if axis == "embed" else axis for axis in axes)
        blocks = fp8.scale_shape(shape, num_chunks)
        setattr(self, name, weight(rngs, shape, axes, fill=0, dtype=jnp.float8_e4m3fn))
        scale = weight(rngs, blocks, scale_axes, fill=0, dtype=jnp.float32)
        setattr(self, f"{name}_scale", scale)

    def matrix(self, name: str, implementation: str, num_chunks: int = 1) -> Array | Fp8Weight:
        """A projection in the form that `linear` takes, whichever is held."""
        scale = getattr(self, f"{name}_scale", None)
        values = getattr(self, name)[...]
        if scale is None:
            return values
        return Fp8Weight(values, scale[...], num_chunks, implementation)

    def experts(self) -> moe.Experts | moe.PackedExperts | TiledExperts:
        """The expert stacks of a sparse layer."""
        if hasattr(self, "experts_gate_tiles"):
            read = lambda name: getattr(self, f"experts_{name}")[...]
            part = lambda name: TiledWeights(*(read(f"{name}_{x}") for x in TiledWeights._fields))
            return TiledExperts(*(part(name) for name in TiledExperts._fields))
        kind = moe.PackedExperts if hasattr(self, "experts_gate_scale") else moe.Experts
        return kind(*(getattr(self, f"experts_{name}")[...] for name in kind._fields))


class Target(nnx.Module):
    """Decoder-only transformer; every weight is declared here or in TargetLayer.

    Example: `Target(config, rngs=nnx.Rngs(0))(token_ids).logits` -> float32 [b, t, v].
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = config
        self.is_transposed = False  # see models/params.transpose_weights
        self.mesh_axis = None  # see models/cut.py
        self.implementation = XLA  # see models/kernels.py
        v, d = config.vocab_size, config.hidden_size
        self.embedding = weight(rngs, (v, d), ("vocab", "embed"), scale=d**-0.5, dtype=dtype)
        self.layers = nnx.List(
            [TargetLayer(config, i, rngs=rngs, dtype=dtype) for i in range(config.num_layers)]
        )
        self.final_norm = weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)
        if not config.tie_embeddings:
            self.head = weight(rngs, (d, v), ("embed", "vocab"), dtype=dtype)

    @property
    def dtype(self):
        return self.embedding[...].dtype

    def embed(self, token_ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        return embed_rows(self.embedding[...], token_ids, self.mesh_axis)

    def unembed(self, hidden: Float[Array, "*b d"], vocab_size: int | None = None):
        """Float32 logits of normed hidden states, over the first vocab_size ids.

        On a mesh: of this device's stretch of the vocabulary, -inf past vocab_size.
        """
        if self.config.tie_embeddings:
            head, is_transposed = self.embedding[...], True
        else:
            head, is_transposed = self.head[...], self.is_transposed
        v = head.shape[0 if is_transposed else 1]
        if vocab_size is not None and vocab_size < v and self.mesh_axis is None:
            head = head[:vocab_size] if is_transposed else head[:, :vocab_size]
        logits = linear(hidden, head, is_transposed=is_transposed, out_dtype=jnp.float32)
        if vocab_size is None or self.mesh_axis is None:
            return logits
        ids = first_id(v, self.mesh_axis) + jnp.arange(v, dtype=jnp.int32)
        return jnp.where(ids < vocab_size, logits, -jnp.inf)

    def make_cache(
        self,
        batch_size: int,
        max_len: int,
        slack: int,
        *,
        form: KVFormat | None = None,
        piece_len: int = kv.PIECE_LEN,
    ) -> kv.KVCache:
        """Empty memory for rows of up to max_len tokens, written up to `slack` at a time.

        Args:
          batch_size: Rows.
          max_len: Longest row.
          slack: Longest block of a step.
          form: How global layers are quantised, or None.
          piece_len: As in `cache.make_cache`.
        """
        if self.implementation != XLA:
            slack = kv.whole_slots(slack)
        kinds = [self.config.layer_attention(i) for i in range(self.config.num_layers)]
        return kv.make_cache(
            batch_size,
            max_len,
            [(a.num_kv_heads, a.head_dim, a.v_head_dim) for a in kinds],
            tuple(a.window for a in kinds),
            slack=slack,
            dtype=self.dtype,
            piece_len=piece_len,
            form=form,
        )

    def __call__(
        self,
        token_ids: Int[Array, "b t"],
        *,
        segment_ids: Int[Array, "b t"] | None = None,
        positions: Int[Array, "b t"] | None = None,
        tap_layer_ids: tuple[int, ...] = (),
        run_sparse: Callable = moe.route_and_run,
        place: Callable = _anywhere,
    ) -> TargetOutput:
        """Forward over whole rows, without memory: training and parity.

        Args:
          token_ids: int32 ids.
          segment_ids: Packed documents; tokens see their own segment only. None = one document.
          positions: RoPE positions; default 0..t-1. Only differences within a segment matter.
          tap_layer_ids: Layers whose output is returned as context features.
          run_sparse: A sparse layer, as `moe.route_and_run`; training has its own.
          place: (activation, logical axes) -> the activation, held to its place on a mesh.
        """
        b, t = token_ids.shape
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
        if segment_ids is None:
            segment_ids = jnp.ones((b, t), jnp.int32)
        whole_rows = mix_whole_rows(self.config, segment_ids)

        def mix(layer_idx, queries, keys, values, sink):
            queries = place(queries, ("batch", "sequence", "heads", None))
            keys, values = (place(x, ("batch", "kv_heads", None, None)) for x in (keys, values))
            return whole_rows(layer_idx, queries, keys, values, sink)

        hidden, features, routing, _ = run_layers(
            self,
            place(self.embed(token_ids), ("batch", "sequence", None)),
            rotated(self, positions, mix),
            tap_layer_ids,
            run_sparse,
        )
        logits = place(self.unembed(hidden), ("batch", "sequence", "vocab"))
        return TargetOutput(logits, features, None, routing)

    def prefill(
        self,
        token_ids: Int[Array, "b t"],
        cache: kv.KVCache,
        start: Int[Array, "b"],
        num_valid: Int[Array, "b"],
        *,
        is_first: bool,
        tap_layer_ids: tuple[int, ...] = (),
    ) -> TargetOutput:
        """One chunk of a prompt: attends to the memory and itself, then writes.

        Args:
          token_ids: The chunk, padded on the right.
          cache: Memory of positions below `start`.
          start: Position of the chunk's first token; with quantised layers a multiple of their
            group length.
          num_valid: Tokens that are not padding, 1..t.
          is_first: Whether the memory is empty (start = 0): then it is not read.
          tap_layer_ids: As in `__call__`.

        Returns:
          Logits [b, 1, v] after the last valid token; features [b, t, c] (padding included).
        """
        b, t = token_ids.shape
        index = jnp.arange(t, dtype=jnp.int32)[None, :]
        positions = start[:, None] + index
        chunk_pos = jnp.where(index < num_valid[:, None], positions, -1)
        layers = list(cache.layers)
        old_mask, new_mask = {}, {}

        def mix(layer_idx, queries, keys, values, sink):
            window = self.config.layer_attention(layer_idx).window
            if window not in new_mask:
                new_mask[window] = masks.causal_mask(positions, chunk_pos, window)
            own = Stretch(keys, kv.without_nan(values), new_mask[window])
            if cache.is_long(layer_idx):
                write = lambda cache, keys, values: kv.write_chunk(
                    cache, layer_idx, keys, values, start, num_valid
                )
                out, layers[layer_idx] = recall.attend_long(
                    queries, own, cache, layer_idx, start, positions, sink=sink, write=write
                )
                return out
            stretches, old = [own], cache.layers[layer_idx]
            if not is_first:
                assert isinstance(old, kv.LayerCache), "quantised layers are long"
                if window not in old_mask:
                    old_pos = cache.key_positions(layer_idx)
                    old_pos = jnp.where(old_pos < start[:, None], old_pos, -1)
                    old_mask[window] = masks.causal_mask(positions, old_pos, window)
                stretches.append(Stretch(old.keys, old.values, old_mask[window]))
            layers[layer_idx] = kv.write_chunk(cache, layer_idx, keys, values, start, num_valid)
            return attend(queries, stretches, sink=sink)

        meet = rotated(self, positions, mix)
        hidden, features, _, _ = run_layers(self, self.embed(token_ids), meet, tap_layer_ids)
        last = jnp.take_along_axis(hidden, (num_valid - 1)[:, None, None], axis=1)
        new_cache = dataclasses.replace(cache, layers=tuple(layers))
        new_cache = kv.finish_chunk(new_cache, start, num_valid)
        return TargetOutput(self.unembed(last), features, new_cache)

    def step(
        self,
        token_ids: Int[Array, "b t"],
        cache: kv.KVCache,
        start: Int[Array, "b"],
        *,
        tap_layer_ids: tuple[int, ...] = (),
    ) -> TargetOutput:
        """A few tokens per row at positions start .. start+t-1: plain decoding (t=1) and verify.

        Writes, then attends to the memory (of long layers: to what lies before, and to the block).
        Rolling back is the caller's business: pass a smaller `start` next time.
        """
        t = token_ids.shape[1]
        positions = start[:, None] + jnp.arange(t, dtype=jnp.int32)[None, :]
        cache = kv.advance_ring_positions(kv.seal_full_groups(cache, start), start, t)
        layers = list(cache.layers)
        own_mask = masks.causal_mask(positions, positions, None)
        mask = {}

        def mix(layer_idx, queries, keys, values, sink):
            write = lambda cache, keys, values: kv.write_block(
                cache, layer_idx, keys, values, start
            )
            if cache.is_long(layer_idx):
                own = Stretch(keys, kv.without_nan(values), own_mask)
                out, layers[layer_idx] = recall.attend_long(
                    queries, own, cache, layer_idx, start, positions, sink=sink, write=write
                )
                return out
            window = self.config.layer_attention(layer_idx).window
            if window not in mask:
                mask[window] = masks.causal_mask(
                    positions, cache.key_positions(layer_idx), window
                )
            layers[layer_idx] = written = write(cache, keys, values)
            assert isinstance(written, kv.LayerCache), "quantised layers are long"
            memory = Stretch(written.keys, written.values, mask[window])
            return attend(queries, [memory], sink=sink)

        meet = rotated(self, positions, mix)
        if self.has_block_kernel(cache):

            def keep(layer_idx, written):
                layers[layer_idx] = written

            meet = self._in_kernel(cache, chain(start, t), positions, keep, write=True)
        hidden, features, _, _ = run_layers(self, self.embed(token_ids), meet, tap_layer_ids)
        new_cache = dataclasses.replace(cache, layers=tuple(layers))
        return TargetOutput(self.unembed(hidden), features, new_cache)

    def has_block_kernel(self, cache: kv.KVCache) -> bool:
        """Whether a step's attention runs in the kernel, which reads no quantised memory."""
        return self.implementation != XLA and cache.form is None

    def _in_kernel(
        self, cache: kv.KVCache, block: Block, positions, keep: Callable, *, write: bool
    ) -> Callable:
        """`meet` of `run_layers`; keep(layer_idx, memory or the block's own) takes what it made."""
        config, tables = self.config, {}

        def meet(layer_idx, layer, qkv):
            geometry, kind = config.layer_attention(layer_idx), config.layer_kinds[layer_idx]
            if kind not in tables:
                tables[kind] = tables_of(geometry, positions)
            out, made = attend_block(
                qkv,
                cache,
                layer_idx,
                layer,
                geometry,
                tables[kind],
                block,
                value_scale=config.value_scale,
                norm_eps=config.norm_eps,
                has_norms=config.use_qk_norm,
                window=geometry.window,
                write=write,
                implementation=self.implementation,
            )
            keep(layer_idx, made)
            return out

        return meet

    def look(
        self,
        token_ids: Int[Array, "b n"],
        cache: kv.KVCache,
        start: Int[Array, "b"],
        depths: Int[Array, "b n"],
        sees: Bool[Array, "b n n"],
        *,
        tap_layer_ids: tuple[int, ...] = (),
    ) -> tuple[TargetOutput, tuple[kv.LayerCache, ...]]:
        """The nodes of a draft tree against the memory, into which none of them is written.

        Args:
          token_ids: Of the nodes.
          cache: Memory; positions at or past `start` are not read.
          start: Position of the root.
          depths: Position of each node after the root.
          sees: [i, j]: node i sees node j.
          tap_layer_ids: As in `__call__`.

        Returns:
          (output, per layer the keys and values of the nodes as `cache.write_path` takes them).
        """
        positions = start[:, None] + depths
        cache = kv.seal_full_groups(cache, start)
        memory_mask, tree_mask, nodes = {}, {}, []

        def keep(cache, keys, values):
            """In place of writing: as the memory would have them."""
            nodes.append(kv.LayerCache(keys, values))
            return cache.layers[len(nodes) - 1]

        def mix(layer_idx, queries, keys, values, sink):
            window = self.config.layer_attention(layer_idx).window
            if window not in tree_mask:
                tree_mask[window] = masks.tree_mask(depths, sees, window)
            own = Stretch(keys, kv.without_nan(values), tree_mask[window])
            if cache.is_long(layer_idx):
                return recall.attend_long(
                    queries, own, cache, layer_idx, start, positions, sink=sink, write=keep
                )[0]
            old = keep(cache, keys, values)
            assert isinstance(old, kv.LayerCache), "quantised layers are long"
            if window not in memory_mask:
                old_pos = cache.key_positions(layer_idx)
                old_pos = jnp.where(old_pos < start[:, None], old_pos, -1)
                memory_mask[window] = masks.causal_mask(positions, old_pos, window)
            memory = Stretch(old.keys, old.values, memory_mask[window])
            return attend(queries, [memory, own], sink=sink)

        meet = rotated(self, positions, mix)
        if self.has_block_kernel(cache):
            block = block_of(start, depths, sees)
            append = lambda _, made: nodes.append(made)
            meet = self._in_kernel(cache, block, positions, append, write=False)
        hidden, features, _, _ = run_layers(self, self.embed(token_ids), meet, tap_layer_ids)
        return TargetOutput(self.unembed(hidden), features, cache), tuple(nodes)


def tables_of(geometry: AttentionConfig, positions: Int[Array, "b t"]):
    """(cos, sin) of a kind of layer, float32 [b, t, rope_dim/2]."""
    inv_freq = inverse_frequencies(geometry.rope_dim, geometry.rope_theta, geometry.rope_scaling)
    return rope_tables(positions, inv_freq)


def mix_whole_rows(config: TargetConfig, segment_ids: Int[Array, "b t"]) -> Callable:
    """How queries meet keys in a whole row without memory: causal, windowed, within a segment."""
    b, t = segment_ids.shape
    index = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))

    def row_mask(query_idx, key_idx, window):
        """Mask of row indices [b, c, q] and [b, c, s] -> [b*c, q, s]."""
        query_idx, key_idx = (x.reshape(-1, x.shape[-1]) for x in (query_idx, key_idx))
        segments = jnp.repeat(segment_ids, query_idx.shape[0] // b, axis=0)
        of = lambda idx: jnp.take_along_axis(segments, jnp.maximum(idx, 0), axis=1)
        mask = masks.causal_mask(query_idx, key_idx, window)
        return mask & masks.segment_mask(of(query_idx), of(key_idx))

    whole_mask = {}

    def mix(layer_idx, queries, keys, values, sink):
        window = config.layer_attention(layer_idx).window
        if window is not None and t % window == 0 and t >= 2 * window:
            mask_fn = lambda q, s: row_mask(q, s, window)
            return attend_in_window_chunks(
                queries, keys, values, mask_fn, chunk_len=window, sink=sink
            )
        if t > _LONG_ROW_LEN and t % (8 * _ROW_CHUNK_LEN) == 0:
            mask_fn = lambda q, s: row_mask(q, s, window)
            return attend_in_causal_sections(
                queries, keys, values, mask_fn, chunk_len=_ROW_CHUNK_LEN, sink=sink
            )
        if window not in whole_mask:
            whole_mask[window] = row_mask(index, index, window)
        return attend_in_causal_chunks(
            queries, keys, values, whole_mask[window], chunk_len=_ROW_CHUNK_LEN, sink=sink
        )

    return mix


def rotated(model, positions: Int[Array, "b t"], mix: Callable) -> Callable:
    """How a layer's raw projection becomes attention output, step by step in plain XLA.

    Args:
      model: As in `run_layers`.
      positions: RoPE positions.
      mix: (layer_idx, queries, keys, values, sink) -> output [b, t, n, hv]; how queries meet keys.

    Returns:
      `meet` of `run_layers`.
    """
    config, tables = model.config, {}

    def meet(layer_idx, layer, qkv):
        b, t, _ = qkv.shape
        geometry = config.layer_attention(layer_idx)
        kind = config.layer_kinds[layer_idx]
        if kind not in tables:
            tables[kind] = tables_of(geometry, positions)
        q_width, k_width, _ = geometry.qkv_widths
        n, k, h = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        queries_keys, values = jnp.split(qkv, [q_width + k_width], axis=-1)
        queries_keys = queries_keys.reshape(b, t, n + k, h)
        values = values.reshape(b, t, k, geometry.v_head_dim)
        if config.use_qk_norm:
            queries, keys = jnp.split(queries_keys, [n], axis=2)
            queries = rms_norm(queries, layer.q_norm[...], eps=config.norm_eps)
            keys = rms_norm(keys, layer.k_norm[...], eps=config.norm_eps)
            queries_keys = jnp.concatenate([queries, keys], axis=2)
        # Rotated together: a decode step's cost is half the number of its small operations.
        queries_keys = apply_rope(queries_keys, *tables[kind])
        queries, keys = jnp.split(queries_keys, [n], axis=2)
        if config.value_scale != 1.0:
            values = values * jnp.asarray(config.value_scale, values.dtype)
        sink = layer.sink[...] if geometry.has_sink else None
        mixed = mix(
            layer_idx, queries, keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3), sink
        )
        return mixed.reshape(b, t, geometry.out_width)

    return meet


def _run_sparse_layer(model, layer, normed, run_sparse: Callable):
    """(output, [(expert ids, weights)]) of one; a kernel says nothing of whom it chose."""
    options, experts = model.config.moe, layer.experts()
    router = (layer.w_router[...], layer.selection_bias[...])
    if isinstance(experts, TiledExperts):
        if tiled_experts.fits(normed.shape[0] * normed.shape[1]):
            out = tiled_experts.route_and_run(
                normed, *router, experts, options, model.implementation
            )
            return out, []
        experts = tiled_experts.packed(experts)
    route_fn = functools.partial(
        moe.route,
        top_k=options.top_k,
        routed_scale=options.routed_scale,
        scoring=options.scoring,
    )
    out, expert_ids, weights = run_sparse(route_fn, normed, *router, experts)
    return out, [(expert_ids, weights)]


def run_layers(
    model,
    x: Float[Array, "b t d"],
    meet: Callable,
    tap_layer_ids: tuple[int, ...],
    run_sparse: Callable = moe.route_and_run,
):
    """Residual stream through all layers of a model and its final norm.

    Args:
      model: Has config, layers (of TargetLayer), final_norm, is_transposed, mesh_axis and
        implementation.
      x: Embedded tokens.
      meet: (layer_idx, layer, raw projection [b, t, q + k + v]) -> attention output
        [b, t, out_width]; see `rotated`.
      tap_layer_ids: Layers whose output is returned, side by side.
      run_sparse: A sparse layer, as `moe.route_and_run`.

    Returns:
      (normed hidden [b, t, d], context features or None, routing of the sparse layers, residual
      stream before the norm [b, t, d]).
    """
    config = model.config
    taps, routing = {}, []
    add = functools.partial(
        add_and_norm, eps=config.norm_eps, implementation=model.implementation
    )
    norms = [layer.attention_norm for layer in model.layers]
    norms.append(model.final_norm)
    normed = rms_norm(x, norms[0][...], eps=config.norm_eps)
    for layer_idx, layer in enumerate(model.layers):
        chunks = config.num_fp8_chunks
        w_qkv = layer.matrix("w_qkv", model.implementation, chunks)
        qkv = linear(normed, w_qkv, is_transposed=model.is_transposed)
        if config.is_fp8:
            qkv = join_chunks(qkv, config.layer_attention(layer_idx).qkv_widths, chunks)
        mixed = meet(layer_idx, layer, qkv)
        out = linear(
            mixed, layer.w_out[...], is_transposed=model.is_transposed, sum_over=model.mesh_axis
        )
        x, normed = add(x, out, layer.ffn_norm[...])
        if config.moe is not None and config.is_moe_layer[layer_idx]:
            out, chosen = _run_sparse_layer(model, layer, normed, run_sparse)
            routing += chosen
            out = psum_over(out, model.mesh_axis)
        else:
            names = ("w_gate", "w_up", "w_down")
            matrices = [layer.matrix(name, model.implementation) for name in names]
            out = moe.swiglu(
                normed,
                *matrices,
                is_transposed=model.is_transposed,
                sum_over=model.mesh_axis,
            )
        x, normed = add(x, out, norms[layer_idx + 1][...])
        if layer_idx in tap_layer_ids:
            taps[layer_idx] = x
    features = None
    if tap_layer_ids:
        features = jnp.concatenate([taps[i] for i in tap_layer_ids], axis=-1)
    return normed, features, tuple(routing), x
