"""python -m pytest tests/train/test_step.py

Training must see what decoding will see: block logits, accept lengths, losses.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.tiny import tiny_drafter, tiny_target
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import flatten, split, unflatten
from mimo_jax.models.target import Target
from mimo_jax.train import loop
from mimo_jax.train.config import DrafterTrainConfig, TargetTrainConfig
from mimo_jax.train.data import PackedRows, pack_documents
from mimo_jax.train.drafter_step import draft_logits_at_anchors, make_drafter_step
from mimo_jax.train.evaluate import make_propose, simulated_accept_length
from mimo_jax.train.optimizer import make_optimizer
from mimo_jax.train.step import (
    Batch,
    init_state,
    make_target_eval,
    make_target_step,
)


@pytest.fixture(scope="module")
def pair():
    target = Target(tiny_target(), rngs=nnx.Rngs(0))
    drafter = Drafter(tiny_drafter(), rngs=nnx.Rngs(1))
    return Model(target.config, *split(target)), Model(drafter.config, *split(drafter))


def _batch(rows: PackedRows) -> Batch:
    return Batch(*(jnp.asarray(array) for array in rows))


def _packed(seed: int, row_len: int = 48, num_docs: int = 9) -> PackedRows:
    rng = np.random.default_rng(seed)
    docs = [
        (rng.integers(4, 61, rng.integers(2, 7)).tolist(), rng.integers(4, 61, 17).tolist())
        for _ in range(num_docs)
    ]
    return pack_documents(docs, row_len, pad_id=0, seed=0)


def _mask_embedding(target: Model, drafter: Model):
    return flatten(target.params)["embedding"][drafter.config.mask_token_id]


@pytest.mark.parametrize("window", [11, None])
def test_block_logits_in_training_equal_those_of_decoding(pair, window):
    """Packed rows with segments against each document alone through the decode memory."""
    target, _ = pair
    module = Drafter(tiny_drafter(window=window), rngs=nnx.Rngs(1))
    drafter = Model(module.config, *split(module))
    rows = _packed(3)
    batch = _batch(rows)
    m1 = drafter.config.draft_block_len
    anchors = jnp.broadcast_to(jnp.arange(48, dtype=jnp.int32)[None], rows.token_ids.shape)

    @jax.jit
    def in_training(target_params, drafter_params):
        t, d = nnx.merge(target.graph, target_params), nnx.merge(drafter.graph, drafter_params)
        out = t(
            batch.token_ids,
            segment_ids=batch.segment_ids,
            positions=batch.positions,
            tap_layer_ids=d.config.target_layer_ids,
        )
        mask_embedding = _mask_embedding(target, drafter)
        return draft_logits_at_anchors(t, d, batch, out.context_features, anchors, mask_embedding)

    trained = np.asarray(in_training(target.params, drafter.params))
    trained = trained.reshape(*anchors.shape, *trained.shape[1:])

    @jax.jit
    def in_decoding(target_params, drafter_params, ids, length):
        """Block logits with the anchor at position `length`."""
        t, d = nnx.merge(target.graph, target_params), nnx.merge(drafter.graph, drafter_params)
        cache, context = t.make_cache(1, 64, m1), d.make_cache(1, 64, m1)
        start = jnp.zeros((1,), jnp.int32)
        out = t.prefill(
            ids, cache, start, length, is_first=True, tap_layer_ids=d.config.target_layer_ids
        )
        context = d.inject_prompt(t, context, out.context_features, ids, start, length)
        anchor = jnp.take_along_axis(ids, length[:, None], axis=1)
        masks = jnp.full((1, m1 - 1), d.config.mask_token_id, jnp.int32)
        embeddings = t.embed(jnp.concatenate([anchor, masks], axis=1))
        hidden = d.draft_hidden(embeddings, context, length, jnp.full((1,), m1, jnp.int32))
        return t.unembed(hidden[:, 1:], d.config.vocab_size)[0]

    checked = 0
    for row in range(2):
        for segment in (1, 2):
            where = np.flatnonzero(rows.segment_ids[row] == segment)
            ids = jnp.asarray(rows.token_ids[row, where[0] : where[0] + 24])[None]
            for anchor in (1, 6, 14, 18):
                if anchor >= len(where):
                    continue
                length = jnp.asarray([anchor], jnp.int32)
                want = in_decoding(target.params, drafter.params, ids, length)
                got = trained[row, where[0] + anchor]
                np.testing.assert_allclose(got, np.asarray(want), atol=2e-5)
                checked += 1
    assert checked >= 10


def test_simulated_accept_length_equals_the_decode_loop(pair, standard_promotion):
    """On the target's own greedy text the walk commits what the loop commits, step by step."""
    target, drafter = pair
    rng = np.random.default_rng(2)
    prompts = [rng.integers(4, 61, n).tolist() for n in (3, 9, 14, 20)]
    engine = Engine(target, drafter, max_len=64)
    done = generate_all(engine, [Request(p, 40) for p in prompts])
    pages = [
        pack_documents([(p, c.token_ids)], 64, pad_id=0, seed=0)
        for p, c in zip(prompts, done, strict=True)
    ]
    rows = PackedRows(*(np.concatenate(arrays) for arrays in zip(*pages, strict=True)))
    trained = {"drafter": drafter.params, "mask_embedding": _mask_embedding(target, drafter)}
    propose = make_propose(target.graph, drafter.graph)
    steps = [n for c in done for n in c.num_committed_per_step]
    tau = simulated_accept_length(propose, target.params, trained, rows)
    assert tau == pytest.approx(sum(steps) / len(steps), abs=1e-9)
    assert tau > 1.0


def test_target_step_learns_and_balances(pair, standard_promotion):
    target, _ = pair
    rows = _packed(4, num_docs=12)
    config = TargetTrainConfig(num_steps=30, warmup_steps=2)
    optimizer = make_optimizer(target.params, config)
    step = make_target_step(target.graph, optimizer, config)
    state = init_state(jax.tree.map(jnp.copy, target.params), optimizer)
    evaluate = make_target_eval(target.graph)
    total, count = evaluate(target.params, _batch(rows))
    for _ in range(30):
        state, metrics = step(state, _batch(rows))
    new_total, new_count = evaluate(state.params, _batch(rows))
    assert count == new_count
    assert new_total / count < 0.5 * total / count
    assert float(metrics["loss"]) < float(total / count)
    bias = flatten(state.params)["layers.1.selection_bias"]
    assert float(jnp.abs(bias).max()) > 0


def _drafter_run(pair, tmp_path, num_steps: int, total: int):
    """Trains to num_steps of a schedule of `total`, resuming what is in tmp_path."""
    target, drafter = pair
    config = DrafterTrainConfig(num_steps=total, num_anchors=6, warmup_steps=2, row_len=48)
    trained = {"drafter": drafter.params, "mask_embedding": _mask_embedding(target, drafter)}
    trained = jax.tree.map(jnp.copy, trained)
    optimizer = make_optimizer(trained, config)
    step = make_drafter_step(target.graph, drafter.graph, optimizer, config, drafter.config)
    rows = _packed(6, num_docs=12)

    def step_fn(state, number):
        return step(state, target.params, _batch(rows), 0)

    return loop.run(
        "drafter",
        init_state(trained, optimizer),
        step_fn,
        run_dir=tmp_path,
        num_steps=num_steps,
        save_every=3,
        eval_every=100,
        eval_fn=None,
        meta={"config": {"num_steps": total}},
        tokens_per_step=1,
    )


def test_resumed_run_is_bit_identical(pair, tmp_path, standard_promotion):
    straight = _drafter_run(pair, tmp_path / "a", 7, 7)
    _drafter_run(pair, tmp_path / "b", 4, 7)
    resumed = _drafter_run(pair, tmp_path / "b", 7, 7)
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    lines = (tmp_path / "b" / "drafter" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 7]  # the last step of each run


def test_drafter_step_leaves_the_target_alone_and_learns(pair, tmp_path, standard_promotion):
    target, _ = pair
    before = jax.tree.map(np.asarray, flatten(target.params))
    state = _drafter_run(pair, tmp_path, 25, 25)
    after = flatten(target.params)
    assert all((before[name] == np.asarray(after[name])).all() for name in before)
    assert int(state.step) == 25


def test_resume_with_another_config_names_the_field(pair, tmp_path, standard_promotion):
    _drafter_run(pair, tmp_path, 3, 7)
    with pytest.raises(ValueError, match="num_steps"):
        _drafter_run(pair, tmp_path, 3, 8)


def test_nan_loss_stops_with_one_line(tmp_path):
    def step_fn(state, number):
        return state, {"loss": float("nan")}

    with pytest.raises(FloatingPointError, match="loss is nan at step 10"):
        loop.run(
            "target",
            init_state({"w": jnp.ones((2, 3))}, _NoOptimizer()),
            step_fn,
            run_dir=tmp_path,
            num_steps=20,
            save_every=20,
            eval_every=20,
            eval_fn=None,
            meta={},
            tokens_per_step=1,
        )


class _NoOptimizer:
    def init(self, params):
        return ()


def test_flatten_round_trip_and_errors(pair):
    target, _ = pair
    flat = flatten(target.params)
    again = unflatten(target.params, flat)
    assert all((flatten(again)[name] == flat[name]).all() for name in flat)
    with pytest.raises(ValueError, match="unexpected"):
        unflatten(target.params, flat | {"layers.0.w_extra": flat["final_norm"]})
    wrong = flat | {"final_norm": jnp.ones((3,))}
    with pytest.raises(ValueError, match="final_norm has shape"):
        unflatten(target.params, wrong)
