"""Frozen dataclasses that describe a model; the one home of every default.

A config is checked when it is made (`__post_init__`), so that an impossible model is refused with
one line that names the field and what is allowed, before any array exists. Derived values are
properties. Hugging Face key names never appear here: `checkpoint/hf_*.py` translate them.

Rejected: one attention geometry for the whole model. MiMo-V2's sliding layers have other KV heads
and another RoPE base than its global layers, so the geometry belongs to the *kind* of a layer.
"""

import dataclasses
from typing import Protocol, runtime_checkable

GLOBAL = "global"
SLIDING = "sliding"
LAYER_KINDS = (GLOBAL, SLIDING)

SCENES = ("code-stdlib", "code-gen", "code", "math", "agent", "chat")


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the field and what is allowed."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of a RoPE table.

    Attributes:
      kind: "linear" divides every frequency by `factor`; "llama3" divides the long wavelengths
        and blends the middle ones (Llama 3.1's rule).
      factor: How much longer the context is than the original one; > 0.
      low_freq_factor: llama3 only: wavelengths above original_max_position / this are divided.
      high_freq_factor: llama3 only: wavelengths below original_max_position / this are kept.
      original_max_position: llama3 only: context length before scaling.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        require(
            self.kind in ("linear", "llama3"),
            f"rope scaling kind {self.kind!r} is unknown; allowed: linear, llama3",
        )
        require(self.factor > 0, f"rope scaling factor {self.factor} must be > 0")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Attention geometry of one kind of layer.

    Attributes:
      num_heads: Query heads (`n`).
      num_kv_heads: Key/value heads (`k`); divides num_heads.
      head_dim: Width of a query or key head (`h`).
      v_head_dim: Width of a value head; may differ from head_dim (192 / 128 in MiMo-V2).
      rope_theta: RoPE base.
      rope_dim: How many leading dims of a head are rotated; even, 0 < rope_dim <= head_dim.
      window: Number of keys a query sees, itself included (128 = the query and 127 before it);
        None sees all.
      has_sink: Whether each query head has a learned logit in the softmax denominator.
      rope_scaling: Frequency scaling or None.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope_theta: float
    rope_dim: int
    window: int | None = None
    has_sink: bool = False
    rope_scaling: RopeScaling | None = None

    def __post_init__(self):
        for name in ("num_heads", "num_kv_heads", "head_dim", "v_head_dim"):
            require(getattr(self, name) > 0, f"{name} {getattr(self, name)} must be > 0")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}",
        )
        require(
            0 < self.rope_dim <= self.head_dim and self.rope_dim % 2 == 0,
            f"rope_dim {self.rope_dim} must be even and in 2..head_dim {self.head_dim}",
        )
        require(self.window is None or self.window >= 1, f"window {self.window} must be >= 1")

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Columns of the fused projection: (queries, keys, values)."""
        return (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.v_head_dim,
        )

    @property
    def out_width(self) -> int:
        """Input width of the output projection: num_heads * v_head_dim."""
        return self.num_heads * self.v_head_dim


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Routed experts of a sparse layer: sigmoid scores, selection bias, renormalised top-k.

    Attributes:
      num_experts: `e`.
      top_k: Experts per token, 1..num_experts.
      hidden_size: Width of one expert (`f`).
      routed_scale: Factor on the renormalised weights (1.0 where a checkpoint says null).
      scoring: "sigmoid" (MiMo, DeepSeek-V3) or "softmax" (Qwen3-MoE).
      is_mxfp4: Experts are stored packed, as MXFP4 (pallas_kernels/formats.py).
    """

    num_experts: int
    top_k: int
    hidden_size: int
    routed_scale: float = 1.0
    scoring: str = "sigmoid"
    is_mxfp4: bool = False

    def __post_init__(self):
        require(
            1 <= self.top_k <= self.num_experts,
            f"top_k {self.top_k} must be in 1..num_experts {self.num_experts}",
        )
        require(
            self.scoring in ("sigmoid", "softmax"),
            f"scoring {self.scoring!r} is unknown; allowed: sigmoid, softmax",
        )


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """The target: a decoder-only transformer of the MiMo-V2 shape, or a dense Qwen3 or Llama.

    Attributes:
      vocab_size: Rows of the embedding (`v`).
      hidden_size: Model width (`d`).
      layer_kinds: "global" or "sliding" per layer. Always the list, never a ratio: the published
        lists are irregular.
      attention: Geometry per kind; a kind that no layer uses may be missing.
      dense_hidden_size: SwiGLU width of the dense layers.
      moe: Routed experts of the sparse layers, or None for an all-dense model.
      is_moe_layer: Per layer; all False for a dense model.
      value_scale: Factor on the values before they are cached.
      use_qk_norm: RMS norm on each query and key head (Qwen3).
      norm_eps: Epsilon of every RMS norm.
      tie_embeddings: Whether the head is the transposed embedding.
      max_position: Longest sequence, prompt and output together.
      is_fp8: The fused qkv and the dense SwiGLU matrices are held as FP8 codes with block scales
        (layers/scaled.py), qkv in `num_fp8_chunks` stretches of rows [Q_c | K_c | V_c].
    """

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[str, ...]
    attention: dict[str, AttentionConfig]
    dense_hidden_size: int
    moe: MoeConfig | None = None
    is_moe_layer: tuple[bool, ...] = ()
    value_scale: float = 1.0
    use_qk_norm: bool = False
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_position: int = 4096
    is_fp8: bool = False

    def __post_init__(self):
        require(len(self.layer_kinds) > 0, "layer_kinds is empty; at least one layer is needed")
        for kind in self.layer_kinds:
            require(
                kind in LAYER_KINDS,
                f"layer kind {kind!r} is unknown; allowed: {', '.join(LAYER_KINDS)}",
            )
            require(kind in self.attention, f"layer kind {kind!r} has no attention geometry")
        for kind in self.attention:
            require(kind in LAYER_KINDS, f"attention of kind {kind!r} is unknown")
        if GLOBAL in self.attention:
            require(
                self.attention[GLOBAL].window is None, "a global layer has no window; use sliding"
            )
        if SLIDING in self.attention:
            require(self.attention[SLIDING].window is not None, "sliding layers need a window")
        if not self.is_moe_layer:
            object.__setattr__(self, "is_moe_layer", (False,) * self.num_layers)
        require(
            len(self.is_moe_layer) == self.num_layers,
            f"is_moe_layer has {len(self.is_moe_layer)} entries for {self.num_layers} layers",
        )
        require(
            self.moe is not None or not any(self.is_moe_layer),
            "some layers are sparse but moe is None",
        )
        for kind in set(self.layer_kinds) if self.is_fp8 else ():
            a, chunks = self.attention[kind], self.num_fp8_chunks
            require(
                a.num_heads % chunks == 0 and a.num_kv_heads % chunks == 0,
                f"is_fp8: {kind} heads ({a.num_heads} and {a.num_kv_heads}) must divide into "
                f"{chunks} chunks, one per global KV head",
            )

    def __hash__(self):
        fields = dataclasses.astuple(self)
        return hash(repr(fields))

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def num_fp8_chunks(self) -> int:
        """Training shards of a fused FP8 qkv: as many as global layers have KV heads, or one."""
        return self.attention[GLOBAL].num_kv_heads if GLOBAL in self.attention else 1

    def layer_attention(self, layer_idx: int) -> AttentionConfig:
        return self.attention[self.layer_kinds[layer_idx]]


@runtime_checkable
class DraftConfig(Protocol):
    """What the decode loop reads of a drafter's config, whatever kind of drafter it is."""

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Layers of the target whose output it is given, 0-based."""
        ...

    @property
    def draft_block_len(self) -> int:
        """Longest block: the anchor and its proposals."""
        ...

    @property
    def context_width(self) -> int:
        """Width of what it is given per position (`c`)."""
        ...

    def check_fits(self, target: TargetConfig) -> None:
        """Raises ConfigError if it was made for another target."""
        ...


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter: one forward proposes a whole draft block.

    Attributes:
      hidden_size: Width of the drafter; equals the target's, whose embedding and head it shares.
      num_layers: Draft layers.
      attention: Geometry of every layer; its `window` is ignored in favour of `windows`.
      dense_hidden_size: SwiGLU width.
      target_layer_ids: Layers of the target whose block *output* is a context feature, 0-based.
      num_target_layers: Layers of the target it was made for.
      draft_block_len: Anchor + mask slots (8: the anchor and 7 proposals).
      mask_token_id: Id at block positions 1...; its embedding row is the target's.
      windows: Per layer, context keys a query sees (query - key < window), or None for all.
      is_causal: Per layer, whether a slot sees only earlier slots of its block.
      value_scale: Factor on the values.
      use_qk_norm: RMS norm on query and key heads.
      norm_eps: Epsilon of every RMS norm.
      vocab_size: Proposals are drawn from the first vocab_size ids of the target's head.
      target_hidden_size: Width of one context feature.
      max_position: Longest position it was trained for.
      has_mask_embedding: The drafter brings the vector of its mask slots instead of taking the
        target's row of mask_token_id.
    """

    hidden_size: int
    num_layers: int
    attention: AttentionConfig
    dense_hidden_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    draft_block_len: int
    mask_token_id: int
    vocab_size: int
    windows: tuple[int | None, ...] = ()
    is_causal: tuple[bool, ...] = ()
    value_scale: float = 1.0
    use_qk_norm: bool = True
    norm_eps: float = 1e-6
    target_hidden_size: int = 0
    max_position: int = 4096
    has_mask_embedding: bool = False

    def __post_init__(self):
        require(self.num_layers >= 1, f"num_layers {self.num_layers} must be >= 1")
        require(
            self.draft_block_len >= 2,
            f"draft_block_len {self.draft_block_len} must be >= 2 (the anchor and one mask)",
        )
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if not self.is_causal:
            object.__setattr__(self, "is_causal", (False,) * self.num_layers)
        if not self.target_hidden_size:
            object.__setattr__(self, "target_hidden_size", self.hidden_size)
        for name in ("windows", "is_causal"):
            require(
                len(getattr(self, name)) == self.num_layers,
                f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers",
            )
        ids = self.target_layer_ids
        require(len(ids) > 0, "target_layer_ids is empty")
        require(len(set(ids)) == len(ids), f"target_layer_ids {list(ids)} has duplicates")
        require(
            all(0 <= i < self.num_target_layers for i in ids),
            f"target_layer_ids {list(ids)} must be in 0..{self.num_target_layers - 1}",
        )
        require(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} must be < vocab_size {self.vocab_size}",
        )

    @property
    def num_draft_tokens(self) -> int:
        return self.draft_block_len - 1

    @property
    def context_width(self) -> int:
        """Width of a context feature vector: taps * target_hidden_size (`c`)."""
        return len(self.target_layer_ids) * self.target_hidden_size

    def check_fits(self, target: TargetConfig) -> None:
        """Raises ConfigError, saying which value was expected, when it was made for another."""
        for name, ours, theirs in (
            ("num_target_layers", self.num_target_layers, target.num_layers),
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
            ("hidden_size", self.hidden_size, target.hidden_size),
        ):
            require(
                ours == theirs,
                f"drafter does not fit the target: {name} is {ours}, expected {theirs}",
            )
        require(
            self.vocab_size <= target.vocab_size,
            f"drafter does not fit the target: vocab_size is {self.vocab_size}, expected at most "
            f"{target.vocab_size}",
        )


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Tap rule of the published drafters: evenly from layer 1 to the third-to-last.

    Example: (36, 5) -> (1, 9, 17, 25, 33); (26, 5) -> (1, 6, 12, 18, 23), since Python rounds
      halves to even; (36, 1) -> (18,).

    Raises:
      ConfigError: If the model is too shallow to give distinct ids.

    Source: arXiv:2602.06036 section 5 and the published package's rule.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    ids = tuple(
        round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps)
    )
    require(
        len(set(ids)) == num_taps and num_target_layers >= 4,
        f"{num_taps} taps need at least {num_taps + 3} target layers, got {num_target_layers}",
    )
    return ids
