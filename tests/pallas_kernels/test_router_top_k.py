"""The router's choice: literal numbers, and the kernel in the GPU interpreter.

Run: .venv/bin/python -m pytest tests/pallas_kernels/test_router_top_k.py
"""

import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.layers.moe import route
from pallas_kernels.dispatch import INTERPRET, MOSAIC_GPU, XLA
from pallas_kernels.router_top_k.api import router_top_k
from pallas_kernels.router_top_k.reference import distinct


def test_the_example_of_the_docstring():
    logits = jnp.array([[0.0], [2.0], [1.0]])
    choice = router_top_k(logits, jnp.zeros(3), top_k=2, implementation=XLA)
    assert choice.choices.tolist() == [[1], [2]]
    assert choice.expert_ids.tolist() == [1, 2]
    np.testing.assert_allclose(choice.weights[:, 0], [0.5465, 0.4535], atol=1e-4)


def test_distinct_numbers_keep_their_order():
    ids, number = distinct(jnp.array([[7, 3, 7], [3, 0, 7]], jnp.int32))
    assert ids.tolist() == [7, 3, 0, 0, 0, 0]
    assert number.tolist() == [3]


def test_reference_is_the_models_router():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((5, 24), (24, 12)))
    bias = jnp.asarray(rng.standard_normal(12) * 0.3, jnp.float32)
    for scoring in ("sigmoid", "softmax"):
        options = {"top_k": 3, "routed_scale": 2.5, "scoring": scoring}
        ids, weights, _ = route(x, w, bias, **options)
        choice = router_top_k((x @ w).T, bias, **options, implementation=XLA)
        np.testing.assert_array_equal(choice.choices.T, ids)
        np.testing.assert_allclose(choice.weights.T, weights, rtol=1e-6)


@pytest.mark.parametrize(
    ("e", "t", "top_k", "scoring"),
    [(64, 8, 8, "sigmoid"), (100, 5, 3, "softmax"), (128, 16, 8, "sigmoid")],
)
def test_kernel_agrees_ties_included(e, t, top_k, scoring):
    """Logits of one decimal: every token has ties, which go to the lower expert."""
    rng = np.random.default_rng(e)
    logits = jnp.asarray(rng.standard_normal((e, t)).round(1), jnp.float32)
    bias = jnp.asarray(rng.integers(-2, 3, e) / 8, jnp.float32)
    options = {"top_k": top_k, "routed_scale": 1.5, "scoring": scoring}
    wanted = router_top_k(logits, bias, **options, implementation=XLA)
    found = router_top_k(logits, bias, **options, implementation=INTERPRET)
    np.testing.assert_array_equal(found.choices, wanted.choices)
    np.testing.assert_allclose(found.weights, wanted.weights, atol=1e-6)
    number = int(wanted.num_active[0])
    assert number < top_k * t  # some experts are chosen twice
    assert int(found.num_active[0]) == number
    np.testing.assert_array_equal(found.expert_ids[:number], wanted.expert_ids[:number])


def test_many_choices_take_the_plain_path():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((16, 40)), jnp.float32)
    found, wanted = (
        router_top_k(logits, jnp.zeros(16), top_k=4, implementation=implementation)
        for implementation in (MOSAIC_GPU, XLA)
    )
    np.testing.assert_array_equal(found.expert_ids, wanted.expert_ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, r"top_k 9 must be in 1\.\.8, the number of experts"),
        ({"t": 65}, r"logits are of 65 tokens; 1\.\.64 are allowed"),
        ({"scoring": "tanh"}, "allowed: sigmoid, softmax"),
        ({"implementation": "cuda"}, "allowed: xla, mosaic_gpu, interpret"),
    ],
)
def test_calls_that_cannot_be(options, message):
    call = {"top_k": 2, "implementation": MOSAIC_GPU} | options
    logits = jnp.zeros((8, call.pop("t", 3)), jnp.float32)
    with pytest.raises(ValueError, match=message):
        router_top_k(logits, jnp.zeros(8), **call)
