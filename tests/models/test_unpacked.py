"""Packed experts decoded at load, for models that stay in a CPU's cache.

Run: .venv/bin/python -m pytest tests/models/test_unpacked.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.decode import engine
from mimo_jax.decode.engine import lay_out_for_decode
from mimo_jax.decode.placement import Model
from mimo_jax.models.params import flatten, logical_axes
from mimo_jax.models.unpacked import unpack_experts, unpacked_bytes
from tests.golden.files import DATA, arrays
from tests.layers.test_packed import decode


@pytest.fixture(scope="module")
def tiny():
    return load_target(DATA / "mimo-tiny-mxfp4")


def test_values_are_those_of_the_codes(tiny):
    config, graph, params = tiny
    _, floats = unpack_experts(graph, params)
    before, after = flatten(params), flatten(floats)
    e, d, f = config.moe.num_experts, config.hidden_size, config.moe.hidden_size
    for name, axes in (("gate", (2, 0, 1)), ("up", (2, 0, 1)), ("down", (0, 2, 1))):
        leaf = f"layers.2.experts_{name}"
        want = decode(before[leaf], before[f"{leaf}_scale"]).transpose(axes)
        assert after[leaf].shape == ((e, f, d) if name == "down" else (d, e, f))
        np.testing.assert_array_equal(np.asarray(after[leaf], np.float64), want)
    assert not [name for name in after if name.endswith("_scale")]
    assert logical_axes(floats)["layers.2.experts_up"] == ("embed", "experts", "expert_hidden")
    assert unpacked_bytes(params) == sum(leaf.nbytes for leaf in after.values())


def test_the_goldens_hold(tiny):
    _, graph, params = tiny
    golden = arrays("mimo_tiny_mxfp4")
    graph, params = unpack_experts(graph, params)
    run = jax.jit(lambda p, ids: nnx.merge(graph, p)(ids).logits)
    out = run(params, golden["input_ids"])
    np.testing.assert_allclose(out, golden["logits"], atol=1e-4)


def test_engines_decide_by_size_and_dtype(tiny, monkeypatch):
    is_packed = lambda model: "layers.2.experts_up_scale" in flatten(model.params)
    model = Model(*tiny)
    assert is_packed(model)
    assert not is_packed(lay_out_for_decode(model))
    half = Model(*load_target(DATA / "mimo-tiny-mxfp4", jnp.bfloat16))
    assert is_packed(lay_out_for_decode(half))
    monkeypatch.setattr(engine, "_CACHE_BYTES", unpacked_bytes(model.params))
    assert is_packed(lay_out_for_decode(model))
