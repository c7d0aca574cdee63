"""Fake quantization: the values that are shipped, and gradients that reach the masters.

Run: .venv/bin/python -m pytest tests/quant/test_qat.py

Seen red: groups along the wrong axis; the gradient passed where floor clips.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.tiny import mesh_target
from mimo_jax.config import ConfigError, MoeConfig
from mimo_jax.models.packing import pack_experts, unpack_experts
from mimo_jax.models.params import flatten, split
from mimo_jax.models.target import Target
from mimo_jax.quant import mxfp4
from mimo_jax.quant.qat import fake_quantize, fake_quantize_params


@pytest.mark.parametrize("rule", mxfp4.RULES)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_values_are_those_of_packing_and_decoding(axis, rule):
    shape = [3, 5, 7]
    shape[axis] = 96
    rng = np.random.default_rng(axis)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, shape))).astype(np.float32)
    got = jax.jit(fake_quantize, static_argnums=(1, 2))(x, axis, rule)
    rows = jnp.asarray(np.moveaxis(x, axis, -1))
    want = mxfp4.dequantize(mxfp4.quantize(rows, rule))
    np.testing.assert_array_equal(got, np.moveaxis(np.asarray(want), -1, axis))
    assert len(np.unique(np.asarray(got))) > 20


@pytest.mark.parametrize(
    ("rule", "values", "gradient"),
    [
        ("floor", [6, 1, 6, -6], [0, 1, 1, 0]),
        ("even", [8, 1, 6, -8], [1, 1, 1, 1]),
        ("rceil", [8, 1, 6, -8], [1, 1, 1, 1]),
    ],
)
def test_the_gradient_stops_where_the_rule_clips(rule, values, gradient):
    x = jnp.zeros((32, 2), jnp.float32).at[:4, 1].set(jnp.asarray([7, 1, 6, -7.0]))
    weigh = jnp.arange(64, dtype=jnp.float32).reshape(32, 2) + 1
    out, back = jax.value_and_grad(lambda x: jnp.sum(weigh * fake_quantize(x, 0, rule)))(x)
    del out
    assert fake_quantize(x, 0, rule)[:4, 1].tolist() == values
    np.testing.assert_array_equal(back[:4, 1], np.asarray(weigh)[:4, 1] * np.asarray(gradient))
    np.testing.assert_array_equal(back[4:], weigh[4:])


def test_even_clips_below_seven():
    """amax 6.5 stays under the smaller scale there, and is clipped to 6."""
    x = jnp.zeros((32,), jnp.float32).at[0].set(6.5).at[1].set(3.0)
    back = jax.grad(lambda x: jnp.sum(fake_quantize(x, 0, "even")))(x)
    assert fake_quantize(x, 0, "even")[:2].tolist() == [6, 3]
    assert back[:2].tolist() == [0, 1]


def test_a_target_packed_and_unpacked_is_the_one_that_training_saw():
    moe = MoeConfig(num_experts=7, top_k=2, hidden_size=96)
    config = dataclasses.replace(mesh_target(is_mxfp4=True), moe=moe)
    _, params = split(Target(config, rngs=nnx.Rngs(0)))
    packed_config, _, packed = pack_experts(config, params, "even")
    assert packed_config.moe.is_mxfp4
    shapes = {name: leaf.shape for name, leaf in flatten(packed).items() if "experts_" in name}
    layer = next(name for name in shapes if name.endswith("experts_down")).split("experts")[0]
    assert shapes[layer + "experts_gate"] == (7, 96, 32)
    assert shapes[layer + "experts_down"] == (7, 64, 48)
    assert shapes[layer + "experts_down_scale"] == (7, 64, 3)
    back_config, _, back = unpack_experts(packed_config, packed)
    assert back_config == config
    want, got = fake_quantize_params(flatten(params), "even"), flatten(back)
    assert list(got) == list(want)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
    with pytest.raises(ConfigError, match="packed already"):
        pack_experts(packed_config, packed, "even")
    with pytest.raises(ConfigError, match="experts are float"):
        unpack_experts(config, params)
