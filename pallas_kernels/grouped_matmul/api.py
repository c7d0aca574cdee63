"""SwiGLU experts over MXFP4 weights, for the few tokens of a decode step.

Two launches: `up` makes the hidden values of every chosen expert, `down` adds their outputs up
under the router's weights. Each chosen expert is read once however many tokens chose it, the
others not at all. Weights are whole stacks of layers with a layer index, because a slice of a stack
would be copied; a model that keeps one array per layer passes stacks of one.

Who is chosen comes from outside (`router_top_k`): this op never routes.
"""


import jax

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.tiles import ROWS, TiledWeights, tile_inputs
from pallas_kernels.router_top_k.api import Choice

MAX_TOKENS = 64


def _check_stack(name: str, weights: TiledWeights, n: int, k: int, e: int | None) -> None:
    tiles = weights.tiles.shape
    width = tile_inputs(k)
    wanted = (n // ROWS, k // width, ROWS, width // 8)
    if tiles[2:] != wanted or (e is not None and tiles[1] != e):
        raise ValueError(
            f"{name}: tiles {tiles} do not hold {'' if e is None else f'{e} '}matrices "
            f"[{n}, {k}]; expected [layers, experts, {', '.join(map(str, wanted))}]"
        )
    expected = (*tiles[:3], k // 32, ROWS)
    if weights.scales.shape != expected:
        raise ValueError(f"{name}: scales {weights.scales.shape}, expected {expected}")


def swiglu_experts(
    x: jax.Array,
    gate: TiledWeights,
    up: TiledWeights,
    down: TiledWeights,
    choice: Choice,
    layer: jax.Array,
    *,
    implementation: str,
) -> jax.Array:
    """Weighted sum of the chosen experts' down(silu(gate x) * (up x)).

    Args:
      x: Tokens [t, d], 1..64 of them; d a multiple of 128.
      gate: Stack [layers, experts, f, d] in tiles; f a multiple of 128.
      up: As gate.
      down: Stack [layers, experts, d, f] in tiles.
      choice: Which experts, for whom, with what weight.
      layer: int32 [1], which layer of the stacks; an index beyond them means the last one, as
        does an expert's.
      implementation: One of dispatch.IMPLEMENTATIONS.

    Returns:
      [t, d] in the dtype of x; the hidden values between the two halves have it too, sums are
      float32.

    Raises:
      ValueError: If shapes do not fit; names the array and what is expected.

    Example: one expert with gate = up = down = 1 everywhere, d = f = 128, x = 0.125, weight 0.5:
      gate x = 16, hidden 16 * 16 = 256, output 0.5 * 128 * 256 = 16384.
    """
    dispatch.check(implementation)
    t, d = x.shape
    if not 1 <= t <= MAX_TOKENS:
        raise ValueError(f"x has {t} tokens; 1..{MAX_TOKENS} are allowed")
    f = gate.tiles.shape[2] * ROWS
    for name, size in (("d", d), ("f", f)):
        if size % 128:
            raise ValueError(f"{name} = {size} is not a multiple of 128")
    e = gate.tiles.shape[1]
    _check_stack("gate", gate, f, d, None)
    _check_stack("up", up, f, d, e)
    _check_stack("down", down, d, f, e)
    if choice.choices.shape[1] != t:
        raise ValueError(f"choices are for {choice.choices.shape[1]} tokens, x has {t}")
    ids, num, chosen, weights = choice
    if implementation == dispatch.XLA:
        hidden = reference.up(x, gate, up, layer[0], ids).astype(x.dtype)
        return reference.down(hidden, down, layer[0], ids, num[0], chosen, weights).astype(x.dtype)
    from pallas_kernels.grouped_matmul import pallas_mosaic_gpu as kernel

    x, chosen, weights = kernel.pad_tokens(x, chosen, weights)
    hidden = kernel.up(x, gate, up, layer, ids, num, implementation=implementation)
    out = kernel.down(
        hidden, down, layer, ids, num, chosen, weights, implementation=implementation
    )
    return out[:t]
