"""Loops of one's own give what the engine's loop gives. Run: pytest tests/decode/test_functional.py

Seen red: a prompt's length one too small, two steps for one.
"""

import dataclasses
import re
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import mimo_jax
from mimo_jax import LLM, ConfigError, Engine, Model, Request
from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.decode.functional import emitted_ids, initial_state, step_function
from mimo_jax.decode.generate import generate_all
from tests.golden.files import DATA, arrays
from tests.serving.checkpoints import make_text_checkpoint

GOLDEN = arrays("mimo_tiny_dflash")
PROMPTS = [GOLDEN[f"spec{b}_output_ids"][:16].tolist() for b in (0, 1)]
REQUESTS = [Request(PROMPTS[0], 20), Request(PROMPTS[1], 9)]


@pytest.fixture(scope="module")
def engine():
    target = Model(*load_target(DATA / "mimo-tiny"))
    drafter = Model(*load_drafter(DATA / "mimo-tiny-dflash"))
    return Engine(target, drafter, max_len=64, batch_size=2)


def test_one_step_at_a_time(engine):
    """The golden ids and steps, row by row, from a step that is jitted here."""
    state = initial_state(engine, REQUESTS)
    assert [len(ids) for ids in emitted_ids(state)] == [1, 1]
    step = jax.jit(step_function(engine))
    seen = [emitted_ids(state)]
    for _ in range(20):
        state = step(engine.params, state)
        seen.append(emitted_ids(state))
    assert state.is_done.all()
    for row, request in enumerate(REQUESTS):
        answer = GOLDEN[f"spec{row}_output_ids"][16:].tolist()[: request.max_tokens]
        assert seen[-1][row] == answer
        counts = [len(after[row]) - len(before[row]) for before, after in pairwise(seen)]
        (alone,) = generate_all(engine, [request])
        steps = alone.num_committed_per_step
        assert counts == steps + [0] * (20 - len(steps))


def test_inside_another_program(engine):
    """A loop of the caller, with a rule of its own: stop when any row has 12 tokens or more."""
    step = step_function(engine)

    @jax.jit
    def until_twelve(params, state):
        goes_on = lambda state: (state.length < 16 + 12).all()
        return jax.lax.while_loop(goes_on, lambda state: step(params, state), state)

    free = [dataclasses.replace(r, max_tokens=40) for r in REQUESTS]
    state = until_twelve(engine.params, initial_state(engine, free))
    assert int(state.length.max()) >= 28
    for row, ids in enumerate(emitted_ids(state)):
        assert ids == GOLDEN[f"spec{row}_output_ids"][16:].tolist()[: len(ids)]
    more = jax.jit(step_function(engine, 64))(engine.params, state)
    assert [len(ids) for ids in emitted_ids(more)] == [40, 40]


def test_the_snippet_of_the_readme(tmp_path, capsys):
    """Run as it stands, on the golden models."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (snippet,) = [s for s in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "step_" in s]
    llm = LLM.load(make_text_checkpoint(tmp_path / "model"))
    prompt = "def mean(values):\n"
    exec(snippet, {"llm": llm})
    (want,) = llm.generate(prompt, max_tokens=64, ignore_eos=True)
    assert capsys.readouterr().out == f"[{want.token_ids}]\n"


def test_a_step_is_traced_without_arrays(engine):
    state = engine.state_shapes()
    out = jax.eval_shape(step_function(engine), engine.params, state)
    assert jax.tree.map(jnp.shape, out) == jax.tree.map(jnp.shape, state)


def test_refusals(engine):
    with pytest.raises(ConfigError, match="1 requests for 2 rows; give one each"):
        initial_state(engine, REQUESTS[:1])
    with pytest.raises(ConfigError, match="num_steps 0 is out of range; allowed: >= 1"):
        step_function(engine, 0)


def test_public_names():
    assert mimo_jax.step_function is step_function
    assert mimo_jax.initial_state is initial_state
    assert mimo_jax.emitted_ids is emitted_ids
