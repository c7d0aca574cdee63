"""Muon: momentum whose matrix directions are orthogonalised, and its split from AdamW.

Problem: Adam scales each weight by itself, so a matrix update is dominated by a few singular
directions. Muon replaces the momentum M = U S V^T by roughly U V^T, using matrix products only.

Choices:
- Newton-Schulz works on the last two axes and broadcasts over all leading ones, so an expert stack
  `[e, d, f]` is e independent matrices. `optax.contrib.muon` gives AdamW to every leaf that is not
  2-D unless told otherwise, and its reshape/vmap form all-gathers sharded experts under `jit`.
- The update is multiplied by 0.2 * sqrt(max(rows, cols)), which gives it the root-mean-square of a
  typical AdamW update (0.2), so learning rates and weight decay carry over between the two.
- Embeddings, the unembedding, the router and everything vector-like go to AdamW. Names decide as
  well as ranks, because norms of stacked layers are `[l, d]` and would pass for matrices.

Traps: under plain `jit` the compiler gathers what is cut, every expert included; on a mesh the
iteration alone runs inside `shard_map` (`sharded_muon.py`), the rest is elementwise and stays where
it is. Momentum is kept in float32 whatever the parameters are.

Products may take bfloat16 factors (`dtype`); sums, norm and iterate stay float32. The update is
then off by 2.3 % of its norm (7 matrices [96, 64]). float32 is the default.

Source: K. Jordan et al., "Muon" (2024), for the iteration and its coefficients; arXiv:2502.16982
for the scale. Differs: there the iterate is bfloat16 too.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Predicate = Callable[[tuple[Any, ...], Any], bool]
Orthogonalise = Callable[[tuple[Any, ...], jax.Array], jax.Array]

MUON, ADAMW = "muon", "adamw"
# Largest slope at zero for a quintic that stays bounded on [0, 1]; singular values end in about
# [0.68, 1.13] rather than at 1, which costs nothing in practice.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
RMS_OF_ADAMW = 0.2

_ADAMW_MATRIX_NAMES = ("embed", "lm_head", "router")
_VECTOR_NAMES = ("norm", "bias", "scale", "sink")


def newton_schulz(
    g: Float[Array, "*batch rows cols"],
    *,
    num_steps: int = 5,
    dtype: DTypeLike = jnp.float32,
    eps: float = 1e-12,
) -> Float[Array, "*batch rows cols"]:
    """Moves every singular value of each matrix to about 1, keeping its singular vectors.

    Does not scale for width and does not know about momentum (see `scale_by_muon`).

    Args:
      g: Matrices in the last two axes, any float dtype; leading axes are independent. Finite.
      num_steps: Iterations; five bring singular values >= 1e-3 of the Frobenius norm into the band.
      dtype: Of the factors of every product; sums are float32.
      eps: Added to the Frobenius norm, so that a zero matrix (an expert that saw no token) maps to
        zero. Gradients far below it are not brought to unit size.

    Returns:
      float32 matrices of the same shape, singular values in about [0.68, 1.13].

    Raises:
      ValueError: If g has fewer than two axes.

    Example: g = diag(3, 4) -> normalised diag(.6, .8) -> about diag(.7, 1.1) in five steps.
    """
    if g.ndim < 2:
        raise ValueError(f"newton_schulz needs matrices in the last two axes, got shape {g.shape}")
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = g.shape[-2] > g.shape[-1]
    x = g.astype(jnp.float32)
    if is_tall:  # the Gram matrix is then [cols, cols], the smaller of the two
        x = x.mT
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True)) + eps)

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        left, right = left.astype(dtype), right.astype(dtype)
        return jnp.matmul(left, right, preferred_element_type=jnp.float32)

    for _ in range(num_steps):
        gram = product(x, x.mT)
        x = a * x + product(b * gram + c * product(gram, gram), x)
    return x.mT if is_tall else x


class MuonState(NamedTuple):
    """Momentum, float32, one leaf per matrix."""

    momentum: optax.Updates


def _newton_schulz_here(path: tuple[Any, ...], g: jax.Array) -> jax.Array:
    del path
    return newton_schulz(g)


def scale_by_muon(
    momentum: float = 0.95,
    nesterov: bool = True,
    *,
    orthogonalise: Orthogonalise = _newton_schulz_here,
) -> optax.GradientTransformation:
    """Replaces gradients by orthogonalised momentum with the RMS of an AdamW update.

    Applies no learning rate, no weight decay and no clipping. Every leaf must be a matrix or a
    stack of matrices; use `muon_or_adamw` for a whole model.

    Args:
      momentum: Decay of the gradient accumulator, in [0, 1).
      nesterov: Look one step ahead: orthogonalise g + momentum * accumulator.
      orthogonalise: (key path, matrices) -> what `newton_schulz` makes of them; on a mesh
        `sharded_muon.newton_schulz_on_mesh`, which must know how each leaf is cut.

    Returns:
      An optax transform; updates keep the gradients' dtype.

    Example: gradient [e=8, d=64, f=96] -> update of the same shape with RMS about
      0.2 * sqrt(96) * sqrt(64 / (64 * 96)) = 0.2.
    """

    def init(params: optax.Params) -> MuonState:
        return MuonState(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MuonState]:
        del params
        accumulator = jax.tree.map(
            lambda g, m: momentum * m + g.astype(jnp.float32), updates, state.momentum
        )

        def direction(path: tuple[Any, ...], g: jax.Array, m: jax.Array) -> jax.Array:
            ahead = g.astype(jnp.float32) + momentum * m if nesterov else m
            factor = RMS_OF_ADAMW * math.sqrt(max(g.shape[-2:]))
            return (factor * orthogonalise(path, ahead)).astype(g.dtype)

        directions = jax.tree_util.tree_map_with_path(direction, updates, accumulator)
        return directions, MuonState(accumulator)

    return optax.GradientTransformation(init, update)


def _path_words(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/").lower()


def default_is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
    """Says whether a leaf is updated by Muon: a matrix, and not of a kind that AdamW keeps.

    Looks at the name and the rank only, never at values.

    Args:
      path: Key path as given by `jax.tree_util.tree_map_with_path`.
      leaf: Array or `ShapeDtypeStruct`.

    Returns:
      False for ranks below two and for paths holding "embed", "lm_head", "router" (AdamW keeps
      them) or "norm", "bias", "scale", "sink" (vectors even when stacked `[l, d]`).

    Example: ("layers", 0, "q_proj", "kernel") of shape [28, 48] -> True;
      ("embed_tokens", "kernel") of shape [512, 28] -> False.
    """
    words = _path_words(path)
    return leaf.ndim >= 2 and not any(w in words for w in _ADAMW_MATRIX_NAMES + _VECTOR_NAMES)


def _is_decayed(path: tuple[Any, ...], leaf: Any) -> bool:
    return leaf.ndim >= 2 and not any(w in _path_words(path) for w in _VECTOR_NAMES)


def muon_or_adamw(
    params: Any,
    *,
    muon_lr: optax.ScalarOrSchedule,
    adamw_lr: optax.ScalarOrSchedule,
    weight_decay: float,
    is_matrix: Any = default_is_matrix,
    momentum: float = 0.95,
    orthogonalise: Orthogonalise = _newton_schulz_here,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Builds one optimizer that gives matrices to Muon and every other leaf to AdamW.

    Does not clip gradients; chain `optax.clip_by_global_norm` in front.

    Args:
      params: Parameters or their `ShapeDtypeStruct`s; only paths and shapes are read.
      muon_lr: Step size or optax schedule for matrices (about 10x `adamw_lr` for a drafter).
      adamw_lr: Step size or optax schedule for the rest.
      weight_decay: Decoupled decay of both groups; vectors (norms, biases, sinks) are not decayed.
      is_matrix: Pytree of bool shaped like params, or a predicate(path, leaf).
      momentum: Muon's momentum.
      orthogonalise: As in `scale_by_muon`.
      b1: AdamW's first-moment decay.
      b2: AdamW's second-moment decay.
      eps: AdamW's denominator floor.

    Returns:
      A transform whose `update` needs `params` (weight decay reads them).

    Raises:
      ValueError: If a leaf with fewer than two axes is marked as a matrix.

    Example: {"embed": [512, 28], "w": [28, 20], "norm": [28]}
      -> Muon on "w"; AdamW with decay on "embed"; AdamW without decay on "norm".
    """
    if callable(is_matrix):
        marks = jax.tree_util.tree_map_with_path(is_matrix, params)
    else:
        marks = is_matrix

    def label(path: tuple[Any, ...], leaf: Any, mark: bool) -> str:
        if mark and leaf.ndim < 2:
            raise ValueError(f"{_path_words(path)} has shape {leaf.shape}: Muon needs matrices")
        return MUON if mark else ADAMW

    labels = jax.tree_util.tree_map_with_path(label, params, marks)
    decayed = jax.tree_util.tree_map_with_path(_is_decayed, params)
    optimizer = optax.partition(
        {
            MUON: optax.chain(scale_by_muon(momentum, orthogonalise=orthogonalise)),
            ADAMW: optax.scale_by_adam(b1, b2, eps),
        },
        labels,
    )
    learning_rate = optax.partition(
        {
            MUON: optax.scale_by_learning_rate(muon_lr),
            ADAMW: optax.scale_by_learning_rate(adamw_lr),
        },
        labels,
    )
    chain = optax.chain(
        optimizer, optax.add_decayed_weights(weight_decay, mask=decayed), learning_rate
    )

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        # optax 0.2.8 raises a float to an int32 step in Adam's bias correction
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(updates, state, params)

    return optax.GradientTransformation(chain.init, update)
