"""What a product with an FP8 weight costs against the same weight expanded, in turn."""

import jax.numpy as jnp
import numpy as np

from mimo_jax.bench.moe_bench import time_forms
from mimo_jax.layers.linear import linear
from mimo_jax.layers.scaled import Fp8Weight, expand
from mimo_jax.quant.fp8 import scale_shape


def compare_products(
    num_rows: int, width: int, num_tokens: int, *, rounds: int
) -> dict[str, dict[str, float]]:
    """One product in FP8, float32 and bfloat16, both layouts of the latter two.

    Args:
      num_rows: Outputs of the weight.
      width: Its inputs.
      num_tokens: Rows that meet it.
      rounds: Calls of each form.

    Returns:
      As `time_forms`, FP8 first.
    """
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.normal(size=(num_rows, width)), jnp.float8_e4m3fn)
    scale = jnp.asarray(rng.uniform(0.5, 2, scale_shape((num_rows, width))), jnp.float32)
    x = jnp.asarray(rng.normal(size=(num_tokens, width)), jnp.float32)
    full, half = (expand(Fp8Weight(codes, scale), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    as_turned = lambda x, w: linear(x, w, is_transposed=True)
    forms = {
        "fp8": (lambda x, codes, scale: linear(x, Fp8Weight(codes, scale)), (x, codes, scale)),
        "float32 (out, in)": (as_turned, (x, full)),
        "float32 (in, out)": (linear, (x, jnp.array(full.T))),
        "bfloat16 (out, in)": (as_turned, (x.astype(jnp.bfloat16), half)),
        "bfloat16 (in, out)": (linear, (x.astype(jnp.bfloat16), jnp.array(half.T))),
    }
    # bfloat16 rounds tokens, weights and sums.
    return time_forms(forms, num_rows * width, rounds=rounds, tolerance=2e-2)
