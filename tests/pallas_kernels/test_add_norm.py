"""Residual sum and norm: literal numbers, and the kernel in the GPU interpreter.

Run: .venv/bin/python -m pytest tests/pallas_kernels/test_add_norm.py
"""

import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.layers.norm import rms_norm
from pallas_kernels.add_norm.api import add_norm
from pallas_kernels.dispatch import INTERPRET, XLA


def test_the_example_of_the_docstring():
    x, addend = jnp.array([[3.0, 0.0]]), jnp.array([[0.0, 4.0]])
    total, normed = add_norm(x, addend, jnp.ones(2), eps=0.0, implementation=XLA)
    assert total.tolist() == [[3.0, 4.0]]
    np.testing.assert_allclose(normed, [[0.8485, 1.1314]], atol=1e-4)


@pytest.mark.parametrize("d", [256, 384])
def test_kernel_agrees_with_the_models_norm(d):
    rng = np.random.default_rng(d)
    x, addend = (jnp.asarray(rng.standard_normal((3, d)), jnp.bfloat16) for _ in range(2))
    weight = jnp.asarray(rng.standard_normal(d), jnp.bfloat16)
    found = add_norm(x, addend, weight, eps=0.5, implementation=INTERPRET)
    np.testing.assert_array_equal(found[0], x + addend)
    wanted = rms_norm(x + addend, weight, eps=0.5)
    # Two roundings, each of which may go the other way: 2 * 2**-8.
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (found[1], wanted)), rtol=0.016)


@pytest.mark.parametrize(
    ("shape", "implementation", "message"),
    [
        ((2, 64), INTERPRET, "x has 64 columns; the kernel takes multiples of 128"),
        ((2, 128), "mosaic", "allowed: xla, mosaic_gpu, interpret"),
    ],
)
def test_calls_that_cannot_be(shape, implementation, message):
    x = jnp.zeros(shape, jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        add_norm(x, x, x[0], eps=1e-5, implementation=implementation)


def test_shapes_that_do_not_fit():
    x = jnp.zeros((2, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="do not fit"):
        add_norm(x, x[:1], x[0], eps=1e-5, implementation=XLA)
