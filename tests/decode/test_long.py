"""Long memories in the loop: the same text as a short one's, and drafts that change nothing.

Run: .venv/bin/python -m pytest tests/decode/test_long.py
Slow: .venv/bin/python -m pytest -m slow tests/decode/test_long.py (a row of 200,000 positions)

Seen red: pieces up to the block's end instead of its start; codes sealed for drafted positions.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.tiny import mesh_target, tiny_drafter
from mimo_jax import cache as kv
from mimo_jax.bench.context_bench import VARIANTS, Stepper
from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.config import ConfigError
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model, place_on_mesh
from mimo_jax.decode.request import Request
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import split
from mimo_jax.models.target import Target
from mimo_jax.quant.kv import KVFormat
from mimo_jax.sharding import DECODE, make_mesh
from mimo_jax.testing.drafters import ScriptedDrafter

GOLDEN = "tests/golden/data"
PIECE_LEN = 16
FORM = KVFormat(4, is_evened=True, group_len=8)


@pytest.fixture
def short_pieces(monkeypatch):
    """Every linear layer of a capacity of 128 is long."""
    short = functools.partial(kv.make_cache, piece_len=PIECE_LEN)
    monkeypatch.setattr(kv, "make_cache", short)
    of_target = functools.partialmethod(Target.make_cache, piece_len=PIECE_LEN)
    monkeypatch.setattr(Target, "make_cache", of_target)


def _target() -> Model:
    return Model(*load_target(f"{GOLDEN}/mimo-tiny"))


REQUEST = Request(np.random.default_rng(4).integers(0, 255, 21).tolist(), 90)


def _answer(engine: Engine) -> list[int]:
    return generate_all(engine, [REQUEST])[0].token_ids


def _often_right(answer: list[int]) -> Model:
    """A drafter whose every fifth proposal is wrong: blocks of all lengths are rolled back."""
    config = load_drafter(f"{GOLDEN}/mimo-tiny-dflash")[0]
    script = np.asarray([*REQUEST.prompt_ids, *answer, *[0] * 16])
    script[::5] += 1
    return Model(config, *split(ScriptedDrafter(config, script)))


@pytest.mark.parametrize("form", [None, FORM], ids=["float", "codes"])
def test_drafting_changes_no_text_in_long_memory(form, short_pieces, monkeypatch):
    target = _target()
    plain = _answer(Engine(target, max_len=128, kv_format=form))
    engine = Engine(target, _often_right(plain), max_len=128, kv_format=form)
    (drafted,) = generate_all(engine, [REQUEST])
    assert drafted.token_ids == plain
    assert sorted(set(drafted.num_committed_per_step)) != [1]
    assert max(drafted.num_committed_per_step) == 5
    monkeypatch.undo()
    dense = _answer(Engine(target, max_len=128))
    # In pieces the text is the dense one; in codes it is not, or nothing was read from them.
    assert (plain == dense) == (form is None)


def test_a_drafter_without_windows_reads_its_context_in_pieces():
    config = tiny_drafter(window=None)
    drafter = Drafter(config, rngs=nnx.Rngs(3))
    rng = np.random.default_rng(1)
    features = rng.standard_normal((2, 50, config.context_width)).astype(np.float32)
    block = jnp.asarray(rng.standard_normal((2, 5, config.hidden_size)), jnp.float32)
    anchors = jnp.asarray([50, 33], jnp.int32)

    def hidden(piece_len):
        a = config.attention
        geometry = [(a.num_kv_heads, a.head_dim, a.v_head_dim)] * config.num_layers
        cache = kv.make_cache(
            2, 60, geometry, config.windows, slack=5, dtype=jnp.float32, piece_len=piece_len
        )
        zeros, num = jnp.zeros((2,), jnp.int32), jnp.full((2,), 50, jnp.int32)
        ids = jnp.zeros(features.shape[:2], jnp.int32)  # DFlash does not look at them
        cache = drafter.inject_prompt(None, cache, jnp.asarray(features), ids, zeros, num)
        assert cache.is_long(0) == (piece_len == 16)
        return drafter.draft_hidden(block, cache, anchors, jnp.full((2,), 5, jnp.int32))

    run = jax.jit(hidden, static_argnums=0)
    # Measured 4e-7: the same sums in another order.
    np.testing.assert_allclose(run(16), run(kv.PIECE_LEN), atol=5e-6, rtol=0)


@pytest.mark.multi_device
def test_codes_on_a_mesh_give_one_device_s_text(short_pieces):
    config = mesh_target()
    target = Model(config, *split(Target(config, rngs=nnx.Rngs(1))))
    requests = [Request([1, 2, 3, 4, 5, 6], 40), Request([7, 8, 9], 40)]

    def ids(target):
        engine = Engine(target, max_len=128, batch_size=2, kv_format=FORM)
        return [c.token_ids for c in generate_all(engine, requests)]

    assert ids(place_on_mesh(target, make_mesh(DECODE, (2, 4)))) == ids(target)


def test_groups_must_fit_prompt_chunks():
    target = _target()
    with pytest.raises(ConfigError, match="group_len 24 does not divide prompt chunks of 512"):
        Engine(target, max_len=128, kv_format=KVFormat(4, True, 24))


def _copied(program) -> list[str]:
    """Shapes of more than a million numbers that the program copies or makes anew."""
    found = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|broadcast|iota)\(", program.as_text())
    return [s for s in found if np.prod([int(x) for x in s.split(",")]) > 1e6]


def test_a_step_holds_nothing_as_long_as_the_capacity():
    """262,144 positions: no copy of a memory, no mask, no pass over the records."""
    for variant in (VARIANTS[2], VARIANTS[4]):  # global layers, in float and in codes
        stepper = Stepper(variant, 262_144)
        program = stepper.engine.group_program(stepper.state)
        assert not _copied(program)
        assert program.memory_analysis().temp_size_in_bytes < 8e6


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_row_of_200_000_positions(variant):
    """Decodes there, and a position more changes nothing but the length."""
    stepper = Stepper(variant, 262_144)
    jax.block_until_ready(stepper.steps(200_000, 3)())
    assert int(stepper.state.length[0]) == 200_000 + int(
        np.asarray(stepper.state.committed_per_step)[0, :3].sum()
    )
    leaves = jax.tree.leaves(dataclasses.replace(stepper.state, sampling=None))
    assert all(bool(jnp.isfinite(x).all()) for x in leaves if x.dtype == jnp.float32)


@pytest.mark.parametrize("form", [None, FORM])
def test_trees_read_long_memories_as_plain_decoding_does(short_pieces, form):
    drafter = Model(*load_drafter(f"{GOLDEN}/mimo-tiny-dflash"))
    plain = _answer(Engine(_target(), max_len=128, kv_format=form))
    engine = Engine(_target(), drafter, max_len=128, kv_format=form, max_verify_nodes=10)
    assert _answer(engine) == plain
