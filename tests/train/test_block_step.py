"""Blocks a chunk at a time: equal to all at once, summed over devices once, right about the target.

Run: .venv/bin/python -m pytest tests/train/test_block_step.py
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from configs.tiny import smallest_drafter, smallest_target, train_mesh_drafter, train_mesh_target
from mimo_jax.bench.dense_mask import dense_loss, dense_mask
from mimo_jax.config import ConfigError
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import split
from mimo_jax.models.target import Target
from mimo_jax.sharding import TRAIN, make_mesh
from mimo_jax.train.block_rows import DraftBlocks, cut_blocks, draw_blocks, read_rows
from mimo_jax.train.block_step import BlockForward, block_sums_and_gradient
from mimo_jax.train.config import DrafterTrainConfig
from mimo_jax.train.data import PackedRows
from mimo_jax.train.drafter_step import drafter_forward, make_drafter_step
from mimo_jax.train.objectives import DPACE, ObjectiveConfig
from mimo_jax.train.placement import place_params
from mimo_jax.train.step import Batch, init_state, place_batch

B, S, N, M1, V = 3, 22, 7, 5, 23
# Half the compile time, and the same program as far as anything here can tell.
FAST = {"xla_backend_optimization_level": 0}
MIXED = ObjectiveConfig(
    cross_entropy=0.3, forward_kl=0.5, reverse_kl=0.2, total_variation=0.9, weighting=DPACE
)


@functools.cache
def models():
    target = split(Target(smallest_target(), rngs=nnx.Rngs(0)))
    graph, drafter = split(Drafter(smallest_drafter(), rngs=nnx.Rngs(1)))
    return target, graph, {"drafter": drafter, "mask_embedding": jnp.linspace(-1, 1, 20)}


def make_batch(segment_ids, loss_mask, seed: int = 0) -> Batch:
    """Rows of random ids; positions count within documents."""
    segment_ids = np.asarray(segment_ids, np.int32)
    ids = np.random.default_rng(seed).integers(4, V, segment_ids.shape).astype(np.int32)
    index = np.broadcast_to(np.arange(segment_ids.shape[1], dtype=np.int32), segment_ids.shape)
    is_start = np.diff(segment_ids, axis=1, prepend=-1) != 0
    positions = index - np.maximum.accumulate(np.where(is_start, index, 0), axis=1)
    return Batch(*map(jnp.asarray, (ids, segment_ids, np.asarray(loss_mask, bool), positions)))


@pytest.fixture(scope="module")
def packed() -> Batch:
    segments = np.ones((B, S), int)
    segments[0, 9:] = 2
    segments[1, 15:] = 0
    return make_batch(segments, np.random.default_rng(1).random((B, S)) < 0.8)


@functools.cache
def gradient_of(objective: ObjectiveConfig, block_chunk: int | None):
    (target_graph, _), graph, _ = models()
    forward = drafter_forward(graph, smallest_drafter())

    @functools.partial(jax.jit, compiler_options=FAST)
    def run(target_params, trained, batch, features, states):
        target = nnx.merge(target_graph, target_params)
        blocks = draw_blocks(0, jnp.int32(0), batch, N, M1)
        rows = read_rows(batch, features, states, 9, M1)
        return block_sums_and_gradient(
            forward, target, trained, rows, blocks, objective, block_chunk
        )

    return run


def features_of(batch: Batch, width: int = 40, seed: int = 2):
    return jax.random.normal(jax.random.key(seed), (*batch.token_ids.shape, width))


@pytest.mark.parametrize("objective", [ObjectiveConfig(), MIXED])
def test_chunks_give_the_sums_and_the_gradient_of_all_at_once(packed, objective):
    (_, target_params), _, trained = models()
    states = features_of(packed, 20, seed=3)
    run = lambda chunk: gradient_of(objective, chunk)(
        target_params, trained, packed, features_of(packed), states
    )
    sums, grads = run(None)
    chunked_sums, chunked_grads = run(7)  # 3 rows: 2 anchors of each, in 4 chunks, one half empty
    assert int(sums.num_signals) == int(chunked_sums.num_signals) > 40
    for ours, whole in zip(chunked_sums, sums, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5)
    pairs = zip(*map(jax.tree.leaves, (chunked_grads, grads)), strict=True)
    for ours, whole in pairs:
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-5 * float(jnp.abs(whole).max()))
        assert np.abs(whole).max() > 0


def test_the_step_equals_one_with_a_dense_mask(packed):
    """Value and gradient of the position-weighted loss, packed rows, windows of 9."""
    (target_graph, target_params), graph, trained = models()
    features = features_of(packed)
    sums, grads = gradient_of(ObjectiveConfig(), 7)(
        target_params, trained, packed, features, features_of(packed, 20)
    )

    @functools.partial(jax.jit, compiler_options=FAST)
    def dense(trained):
        target = nnx.merge(target_graph, target_params)
        drafter = nnx.merge(graph, trained["drafter"])
        blocks = draw_blocks(0, jnp.int32(0), packed, N, M1)
        mask_embedding = trained["mask_embedding"]
        return dense_loss(target, drafter, mask_embedding, packed, features, blocks, 4.0)

    expected, expected_grads = jax.value_and_grad(dense)(trained)
    np.testing.assert_allclose(sums.loss / sums.weight, expected, rtol=1e-6)
    pairs = zip(*map(jax.tree.leaves, (grads, expected_grads)), strict=True)
    for ours, theirs in pairs:
        largest = float(jnp.abs(theirs).max())
        np.testing.assert_allclose(ours / sums.weight, theirs, rtol=1e-5, atol=1e-5 * largest)


def test_who_sees_whom_in_a_dense_mask():
    batch = make_batch(np.ones((1, 6)), np.ones((1, 6)))
    blocks = DraftBlocks(jnp.array([[4]], jnp.int32), jnp.array([[1]]), jnp.array([[True]]))
    seen = dense_mask(batch, blocks, 2, 3, False)[0].astype(jnp.int32)
    assert seen.tolist() == [[0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 1, 0, 0, 1, 1]]
    assert dense_mask(batch, blocks, 2, 3, True)[0, 0, 6:].tolist() == [True, False]


def test_chunks_of_blocks_literal():
    """Two rows of three anchors, at most two blocks at once: one of each row in every chunk."""
    anchors = jnp.array([[1, 2, 3], [4, 5, 6]], jnp.int32)
    labels = jnp.arange(6, dtype=jnp.int32)[:, None] + jnp.array([[10, 20]], jnp.int32)
    blocks = DraftBlocks(anchors, labels, labels > 11)
    chunks = cut_blocks(blocks, 2)
    assert chunks.anchor_pos.tolist() == [[[1], [4]], [[2], [5]], [[3], [6]]]
    assert chunks.labels[:, :, 0].tolist() == [[10, 13], [11, 14], [12, 15]]
    filled = cut_blocks(blocks, 4)
    assert filled.anchor_pos.tolist() == [[[1, 2], [4, 5]], [[3, 0], [6, 0]]]
    assert filled.labels[1, :, 0].tolist() == [12, 0, 15, 0]
    assert filled.is_valid[1].tolist() == [[True, True], [False] * 2, [True, True], [False] * 2]
    assert cut_blocks(blocks, None).anchor_pos.shape == (1, 2, 3)


def test_the_targets_distribution_of_a_slot_is_that_before_it(packed):
    """A drafter that proposes the target's own logits one position earlier is never apart."""
    (target_graph, target_params), _, _ = models()

    def drafting(target_logits, shift: int) -> BlockForward:
        def draft(target, trained, rows, shared, blocks):
            slots = jnp.arange(1, M1)[None, None] - shift
            at = (blocks.anchor_pos[:, :, None] + slots).reshape(B, -1, 1)
            logits = jnp.take_along_axis(target_logits, jnp.clip(at, 0, S - 1), axis=1)
            return logits.reshape(-1, M1 - 1, V) * trained

        return BlockForward(lambda s: 1, lambda target, trained, rows: (), draft)

    @functools.partial(jax.jit, compiler_options=FAST)
    def mean_distances(target_params, batch):
        target = nnx.merge(target_graph, target_params)
        out = target(
            batch.token_ids,
            segment_ids=batch.segment_ids,
            positions=batch.positions,
            tap_layer_ids=(1,),
        )
        objective = ObjectiveConfig(cross_entropy=0.0, total_variation=1.0)
        blocks = draw_blocks(0, jnp.int32(0), batch, N, M1)
        rows = read_rows(batch, out.context_features, out.context_features, 1, M1)
        found = (
            block_sums_and_gradient(
                drafting(out.logits, shift), target, jnp.ones(()), rows, blocks, objective, None
            )[0]
            for shift in (0, 1)
        )
        return [sums.loss / sums.weight for sums in found]

    at_the_slot, before_it = mean_distances(target_params, packed)
    assert before_it < 1e-6
    assert at_the_slot > 0.02


def sgd_step(drafter_config, config: DrafterTrainConfig):
    """A whole step without Muon, which is most of the compile time."""
    (target_graph, _), _, trained = models()
    graph, _ = split(Drafter(drafter_config, rngs=nnx.Rngs(1)))
    optimizer = optax.sgd(1.0)
    step = make_drafter_step(target_graph, graph, optimizer, config, drafter_config)
    return step, init_state(jax.tree.map(jnp.copy, trained), optimizer)


@pytest.fixture(scope="module")
def small_vocabulary():
    """A drafter over 17 of the target's 23 ids, and its step on 12 anchors per row."""
    config = dataclasses.replace(smallest_drafter(), vocab_size=17)
    options = DrafterTrainConfig(num_anchors=12, block_chunk=5, objective=MIXED)
    return sgd_step(config, options)[0]


@pytest.mark.parametrize(
    ("ids", "learned", "num_signals"),
    [
        ((), (), 0),  # every answer masked out
        ((), (8,), 0),  # an answer of one token: no anchor has a successor
        ((), (8, 9, 10), 3),  # shorter than a block of 5: anchors 8 and 9 with 2 and 1 slots
        ((10,), (8, 9, 10), 1),  # the last id is not in the drafter's vocabulary
    ],
)
def test_what_cannot_be_learned_is_counted_out(small_vocabulary, ids, learned, num_signals):
    (_, target_params), _, trained = models()
    mask = np.zeros((2, 14), bool)
    mask[1, list(learned)] = True
    batch = make_batch(np.ones((2, 14)), mask)
    token_ids = batch.token_ids % 17
    for place in ids:
        token_ids = token_ids.at[1, place].set(20)
    state = init_state(jax.tree.map(jnp.copy, trained), optax.sgd(1.0))
    state, metrics = small_vocabulary(state, target_params, batch._replace(token_ids=token_ids), 0)
    assert metrics["num_signals"] == num_signals
    assert bool(metrics["grad_norm"] > 0) == bool(metrics["loss"] > 0) == (num_signals > 0)
    assert np.isfinite(metrics["loss"])
    for leaf, before in zip(*map(jax.tree.leaves, (state.params, trained)), strict=True):
        assert np.isfinite(leaf).all()
        assert num_signals > 0 or (leaf == before).all()


def test_a_drafter_of_another_target_is_refused():
    (_, target_params), _, _ = models()
    config = dataclasses.replace(smallest_drafter(), num_target_layers=4)
    step, state = sgd_step(config, DrafterTrainConfig())
    with pytest.raises(ConfigError, match=r"4.*2|2.*4"):
        step(state, target_params, make_batch(np.ones((2, 14)), np.ones((2, 14))), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_anchors": 0}, "num_anchors 0 must be at least 1"), ({"block_chunk": 0}, "or None for")],
)
def test_a_training_without_blocks_is_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        DrafterTrainConfig(**options)


def _collectives(text: str) -> tuple[list[str], list[str]]:
    """(all result shapes of collectives, those inside loops) of a compiled program."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute"
    pattern = rf"= (\(.*?\)|\S+) (?:{kinds})(?:-start)?\("
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    inside = []
    for computation in re.split(r"\n(?=%?[\w.\-]+ \(|ENTRY)", text):
        name = re.match(r"%?([\w.\-]+) \(", computation)
        if name and name[1] in bodies:
            inside += re.findall(pattern, computation)
    return re.findall(pattern, text), inside


@pytest.mark.multi_device
def test_chunks_on_a_mesh_are_summed_over_devices_once():
    """(4, 2, 1): as many collectives as without chunks, none in the loop, the same step.

    Without chunks it equals that of one device (test_mesh.py).
    """
    mesh = make_mesh(TRAIN, (4, 2, 1))
    target_graph, target_params = split(Target(train_mesh_target(), rngs=nnx.Rngs(0)))
    graph, drafter = split(Drafter(train_mesh_drafter(), rngs=nnx.Rngs(1)))
    trained = {"drafter": drafter, "mask_embedding": jnp.linspace(-1, 1, 48)}
    rng = np.random.default_rng(0)
    shape = (8, 20)
    rows = PackedRows(
        rng.integers(4, 71, shape, np.int32),
        np.ones(shape, np.int32),
        rng.random(shape) < 0.8,
        np.broadcast_to(np.arange(20, dtype=np.int32), shape),
    )
    optimizer, found = optax.sgd(1.0), []
    for chunk in (None, 2):
        config = DrafterTrainConfig(num_anchors=6, block_chunk=chunk)
        step = make_drafter_step(target_graph, graph, optimizer, config, train_mesh_drafter(), mesh)
        state = init_state(place_params(jax.tree.map(jnp.copy, trained), mesh), optimizer, mesh)
        arguments = (state, place_params(target_params, mesh), place_batch(rows, mesh), 5)
        program = step.lower(*arguments).compile(compiler_options=FAST)
        found.append((*program(*arguments), *_collectives(program.as_text())))
    (expected, metrics, whole, _), (state, chunked_metrics, chunked, inside) = found
    assert sorted(chunked) == sorted(whole)
    assert inside == []
    for name, value in metrics.items():
        np.testing.assert_allclose(chunked_metrics[name], value, rtol=1e-5, err_msg=name)
    for ours, one in zip(*map(jax.tree.leaves, (state.params, expected.params)), strict=True):
        np.testing.assert_allclose(ours, one, atol=1e-5)
