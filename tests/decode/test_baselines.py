"""The baseline drafters in the decode loop: exact, rolled back right, the same as in training.

Run: .venv/bin/python -m pytest tests/decode/test_baselines.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.tiny import tiny_drafter, tiny_target
from mimo_jax.config import AttentionConfig
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.models.denoising import with_passes
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.eagle import EagleConfig, EagleDrafter
from mimo_jax.models.mtp import MtpConfig, MtpDrafter
from mimo_jax.models.params import split
from mimo_jax.models.target import Target


def tiny_eagle() -> EagleConfig:
    """Fits `tiny_target`; four drafts."""
    return EagleConfig(
        hidden_size=28,
        attention=AttentionConfig(
            num_heads=4, num_kv_heads=2, head_dim=14, v_head_dim=9, rope_theta=1e4, rope_dim=6,
            window=11,
        ),
        dense_hidden_size=33,
        target_layer_ids=(0, 2, 3),
        num_target_layers=4,
        draft_block_len=5,
    )


def model(config, module) -> Model:
    return Model(config, *split(module))


@pytest.fixture(scope="module")
def target() -> Model:
    module = Target(tiny_target(), rngs=nnx.Rngs(0))
    module.embedding[...] = module.embedding[...] * 6  # less repetitive greedy text
    return model(module.config, module)


@pytest.fixture(scope="module")
def drafters(target) -> dict[str, Model]:
    plain = Drafter(tiny_drafter(), rngs=nnx.Rngs(1))
    plain = model(plain.config, plain)
    eagle, apart = tiny_eagle(), MtpConfig(target.config)
    chain = MtpConfig(target.config, 5, is_chained=True)
    return {
        "passes": Model(*with_passes(plain.config, plain.graph, plain.params, 3)),
        "eagle": model(eagle, EagleDrafter(eagle, rngs=nnx.Rngs(2))),
        "apart": model(apart, MtpDrafter(apart, rngs=nnx.Rngs(3))),
        "chain": model(chain, MtpDrafter(chain, rngs=nnx.Rngs(4))),
    }


KINDS = ("passes", "eagle", "apart", "chain")


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_that_of_plain_decoding(target, drafters, kind):
    rng = np.random.default_rng(5)
    requests = [Request(rng.integers(0, 61, n).tolist(), m) for n, m in ((1, 30), (33, 25), (2, 9))]
    want = [c.token_ids for c in generate_all(Engine(target, max_len=96), requests)]
    for batch_size in (1, 3):
        engine = Engine(target, drafters[kind], max_len=96, batch_size=batch_size)
        got = generate_all(engine, requests, steps_per_group=4)
        assert [c.token_ids for c in got] == want
