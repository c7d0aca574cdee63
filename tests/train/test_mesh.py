"""Training on a mesh is training on one device: steps, draws, evaluation, checkpoints, refusals.

Run: .venv/bin/python -m pytest tests/train/test_mesh.py
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from configs import nano
from configs.tiny import train_mesh_drafter, train_mesh_target
from mimo_jax.config import ConfigError
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import split
from mimo_jax.models.target import Target
from mimo_jax.sharding import SEQUENCE, TRAIN, make_mesh, parse_mesh
from mimo_jax.train import loop
from mimo_jax.train.block_mask import with_left_halo, with_right_halo
from mimo_jax.train.block_rows import (
    draw_blocks,
    find_context,
    gather_blocks,
    read_rows,
    states_before_slots,
)
from mimo_jax.train.config import DrafterTrainConfig, TargetTrainConfig
from mimo_jax.train.data import PackedRows, pack_documents
from mimo_jax.train.drafter_step import make_drafter_step
from mimo_jax.train.evaluate import make_propose, simulated_accept_length
from mimo_jax.train.optimizer import make_optimizer
from mimo_jax.train.placement import BLOCKS, ROWS, on_own, place_params, state_shardings
from mimo_jax.train.start import run_mesh
from mimo_jax.train.step import (
    Batch,
    init_state,
    make_target_step,
    place_batch,
)

pytestmark = pytest.mark.multi_device

ROW_LEN = 20
# Half the compile time, and the same program as far as anything here can tell.
FAST = {"xla_backend_optimization_level": 0}
# e / top_k: room for every token, so that nothing is dropped on any mesh.
TARGET_TRAIN = TargetTrainConfig(num_steps=10, warmup_steps=0, capacity_factor=12.0)
DRAFTER_TRAIN = DrafterTrainConfig(num_steps=10, warmup_steps=0, num_anchors=4)


@functools.cache
def models():
    target = split(Target(train_mesh_target(), rngs=nnx.Rngs(0)))
    drafter_graph, drafter = split(Drafter(train_mesh_drafter(), rngs=nnx.Rngs(1)))
    mask_embedding = target[1]["embedding"][...][train_mesh_drafter().mask_token_id]
    return target, (drafter_graph, {"drafter": drafter, "mask_embedding": mask_embedding})


@functools.cache
def rows(num_rows: int = 8) -> PackedRows:
    rng = np.random.default_rng(0)
    docs = [
        (rng.integers(4, 71, 3).tolist(), rng.integers(4, 71, int(rng.integers(4, 12))).tolist())
        for _ in range(60)
    ]
    packed = pack_documents(docs, ROW_LEN, pad_id=0, seed=0, num_open_rows=1)
    return PackedRows(*(array[:num_rows] for array in packed))


def target_program(mesh):
    """(compiled step, its arguments)."""
    (graph, params), _ = models()
    params = place_params(jax.tree.map(jnp.copy, params), mesh)
    optimizer = make_optimizer(params, TARGET_TRAIN, mesh)
    step = make_target_step(graph, optimizer, TARGET_TRAIN, mesh)
    arguments = (init_state(params, optimizer, mesh), place_batch(rows(), mesh))
    return step.lower(*arguments).compile(compiler_options=FAST), arguments


def drafter_program(mesh, batch_rows: PackedRows | None = None):
    (target_graph, target_params), (graph, trained) = models()
    target_params = place_params(target_params, mesh)
    trained = place_params(jax.tree.map(jnp.copy, trained), mesh)
    optimizer = make_optimizer(trained, DRAFTER_TRAIN, mesh)
    step = make_drafter_step(
        target_graph, graph, optimizer, DRAFTER_TRAIN, train_mesh_drafter(), mesh
    )
    state = init_state(trained, optimizer, mesh)
    batch = place_batch(batch_rows or rows(), mesh)
    arguments = (state, target_params, batch, 5)
    return step.lower(*arguments).compile(compiler_options=FAST), arguments


@functools.cache
def on_one_device(make_program):
    with jax.numpy_dtype_promotion("standard"):
        program, arguments = make_program(None)
        state, metrics = program(*arguments)
    return jax.tree.map(np.asarray, (state, metrics))


def shapes_of(text: str, operation: str) -> list[str]:
    """Result shapes of a collective in a compiled program."""
    return re.findall(rf"= (\(.*?\)|\S+) {operation}(?:-start)?\(", text)


@pytest.mark.parametrize(
    ("make_program", "sizes"),
    [
        (target_program, (2, 2, 2)),
        (target_program, (1, 8, 1)),
        (drafter_program, (2, 2, 2)),
        (drafter_program, (1, 1, 8)),
    ],
)
def test_a_step_equals_that_of_one_device(make_program, sizes, standard_promotion):
    """Loss, and the state after the step: Muon's momentum is the clipped gradient itself."""
    mesh = make_mesh(TRAIN, sizes)
    program, arguments = make_program(mesh)
    state, metrics = program(*arguments)
    expected_state, expected_metrics = on_one_device(make_program)
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, atol=1e-5, rtol=1e-6, err_msg=name)
    expected_leaves = jax.tree_util.tree_leaves_with_path(expected_state)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), (_, expected) in zip(leaves, expected_leaves, strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(leaf, expected, atol=1e-5, rtol=0, err_msg=name)
    # What comes out lies where what went in lay, the optimizer's state as its parameters.
    shardings = jax.tree.leaves(state_shardings(state, mesh))
    for (path, leaf), sharding in zip(leaves, shardings, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), jax.tree_util.keystr(path)
    if make_program is target_program:
        check_collectives_of_target(program.as_text(), sizes)


def check_collectives_of_target(text: str, sizes) -> None:
    gathers = shapes_of(text, "all-gather")
    if sizes == (1, 8, 1):
        # Nothing is cut over data or tensor: neither weights nor gradients are ever gathered.
        assert gathers == []
        # Rows to their experts and back, and the gradients of both; nothing for Muon.
        assert len(shapes_of(text, "all-to-all")) == 4
        return
    # Once per step, to be whole over "data": 4 + 5 matrices of the layers, router, 3 stacks less
    # the 3 that are counted among the 5 of a sparse layer, embedding and head.
    fsdp = [s for s in gathers if "[4,1," not in s and s != "f32[8,2]{1,0}"]
    assert len(fsdp) == 13
    # Muon: w_qkv and w_out twice, w_gate, w_up, w_down.
    assert len([s for s in gathers if "[4,1," in s]) == 7
    # No stack is ever whole over "expert": 24 experts in 2 parts.
    assert not [s for s in gathers if re.search(r"\[(\d+,)?24,(32|16),", s)]
    assert len([s for s in shapes_of(text, "all-to-all") if "[1,3," in s]) == 6
    assert shapes_of(text, "reduce-scatter") == []


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_anchors_are_the_same_on_any_mesh_and_need_no_collective(sizes):
    mesh = make_mesh(TRAIN, sizes)
    draw = lambda mesh, seed=5, step=3: functools.partial(
        draw_blocks, seed, jnp.int32(step), num_anchors=4, draft_block_len=3, mesh=mesh
    )
    program = jax.jit(draw(mesh)).lower(place_batch(rows(), mesh)).compile()
    for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert shapes_of(program.as_text(), name) == []
    expected = jax.jit(draw(None))(place_batch(rows()))
    assert expected.is_valid.any()
    for ours, one in zip(program(place_batch(rows(), mesh)), expected, strict=True):
        np.testing.assert_array_equal(ours, one)
        assert len({shard.index for shard in ours.addressable_shards}) > 1
    for other in (draw(None, seed=6), draw(None, step=4)):
        assert (other(place_batch(rows())).anchor_pos != expected.anchor_pos).any()


def test_accept_length_on_a_mesh_that_rows_do_not_divide(standard_promotion):
    """Four rows over three devices: the batch is filled up with empty rows."""
    (target_graph, target_params), (graph, trained) = models()
    heldout = PackedRows(*(np.pad(array, ((0, 0), (0, 12))) for array in rows(4)))
    heldout.loss_mask[:, 3:9] = True
    results = []
    for mesh in (None, make_mesh(TRAIN, (3, 1, 1))):
        propose = make_propose(target_graph, graph, mesh)
        placed = [place_params(p, mesh) for p in (target_params, trained)]
        results.append(simulated_accept_length(propose, *placed, heldout, mesh))
    assert results[0] == results[1]
    assert place_batch(rows(4), mesh).token_ids.shape == (6, ROW_LEN)


def _train_nothing(state, run_dir, num_steps):
    def step_fn(state, number):
        return dataclasses.replace(state, step=state.step + 1), {"loss": 1.0}

    return loop.run(
        "target",
        state,
        step_fn,
        run_dir=run_dir,
        num_steps=num_steps,
        save_every=10,
        eval_every=10,
        eval_fn=None,
        meta={},
        tokens_per_step=1,
    )


def test_a_run_goes_on_on_another_mesh(tmp_path, standard_promotion):
    """Checkpoints of 8 devices restored on 4, of 4 on 1: bit for bit, and cut anew."""
    (_, params), _ = models()

    def fresh(sizes, scale):
        mesh = None if sizes is None else make_mesh(TRAIN, sizes)
        placed = place_params(jax.tree.map(lambda p: p * scale, params), mesh)
        return init_state(placed, make_optimizer(placed, TARGET_TRAIN, mesh), mesh)

    first = _train_nothing(fresh((2, 2, 2), 1.0), tmp_path, 3)
    for sizes, num_steps in (((2, 1, 2), 5), (None, 6)):
        like = fresh(sizes, 0.0)
        resumed = _train_nothing(like, tmp_path, num_steps)
        assert int(resumed.step) == num_steps
        pairs = zip(*map(jax.tree.leaves, (resumed.params, first.params, like.params)), strict=True)
        for ours, saved, placed in pairs:
            np.testing.assert_array_equal(ours, saved)
            assert ours.sharding.is_equivalent_to(placed.sharding, ours.ndim)
    stack = lambda state: jax.tree.leaves(state.opt_state[1][0])[0]
    assert len(stack(first).sharding.device_set) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": (3, 1, 1)}, "target_train.batch_rows: axis batch of 8 cannot be cut into 3"),
        ({"mesh": (1, 1, 4)}, "target.attention.global: axis heads of 6 cannot be cut into 4"),
        ({"mesh": (1, 8, 1)}, "drafter_train.batch_rows: axis batch of 4 cannot be cut into 8"),
        ({"mesh": (2, 2)}, "mesh 2x2 does not fit rules train: one size >= 1 is needed for each"),
        ({"mesh": (1, 1, 1, 2)}, "drafter_train.row_len of 256 cannot be cut into 2 stretches of"),
        ({"dispatch": "sorted"}, "dispatch 'sorted' is unknown; allowed: padded, ragged"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_when_it_is_configured(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        dataclasses.replace(nano.get_config(), **change)


def test_weights_that_do_not_divide_are_named():
    config = nano.get_config()
    moe = dataclasses.replace(config.target.moe, num_experts=5)
    target = dataclasses.replace(config.target, moe=moe)
    message = "target.layers.1.experts_down: axis experts of 5 cannot be cut into 2 parts (rules "
    with pytest.raises(ConfigError, match=re.escape(message)):
        dataclasses.replace(config, target=target, mesh=(1, 2, 1))


def test_a_run_asks_for_devices_that_are_there():
    config = nano.get_config()
    assert run_mesh(config) is None
    assert run_mesh(dataclasses.replace(config, mesh=(2, 1, 2))).size == 4
    eight_rows = dataclasses.replace(config.drafter_train, batch_rows=8)
    many = dataclasses.replace(config, mesh=(2, 4, 2), drafter_train=eight_rows)
    with pytest.raises(ConfigError, match="mesh 2x4x2x1 needs 16 devices; there are 8"):
        run_mesh(many)
    with pytest.raises(ConfigError, match="dispatch ragged needs GPUs"):
        run_mesh(dataclasses.replace(config, mesh=(1, 2, 1), dispatch="ragged"))


def test_mesh_as_a_user_writes_it():
    assert parse_mesh("2x1X4") == (2, 1, 4)
    for text in ("2x", "2,2", "", "2x-1x1", "axb"):
        with pytest.raises(ConfigError, match="is not a shape"):
            parse_mesh(text)


def test_a_cut_sequence_exchanges_one_halo_each_way():
    """Four stretches of 8 positions, window 5, block 4: what is read equals that of whole rows."""
    b, s, window, mesh = 2, 32, 5, make_mesh(TRAIN, (1, 1, 1, 4))
    anchor_pos = np.array([[0, 3, 8, 11, 16, 23, 24, 31], [1, 7, 9, 15, 17, 18, 26, 30]], np.int32)
    ids = jnp.arange(b * s, dtype=jnp.int32).reshape(b, s)  # all distinct: they name the anchors
    segments = jnp.ones((b, s), jnp.int32).at[1, 14:].set(2)
    batch = Batch(ids, segments, segments > 0, ids % s)
    features = jax.random.normal(jax.random.key(0), (b, s, 3))

    def read(mesh):
        def gathered(batch, features, anchor_pos):
            rows = read_rows(batch, features, features, window, 4, mesh)
            at = find_context(rows, anchor_pos, window)
            context = gather_blocks(rows.features[:, None], at.index)[:, 0]
            places = gather_blocks(rows.positions[:, None, :, None], at.index)[:, 0, :, 0]
            states = states_before_slots(rows, anchor_pos, 3)
            return at.anchor_ids, context, places, at.context_pos, states

        cut = P(ROWS, SEQUENCE)
        return jax.jit(on_own(gathered, mesh, (P(ROWS), cut, cut), P(BLOCKS)))

    program = read(mesh).lower(batch, features, anchor_pos).compile()
    halos = shapes_of(program.as_text(), "collective-permute")
    assert sorted(halos) == ["f32[2,2,3]{2,1,0}", "f32[2,4,3]{2,1,0}"]
    for name in ("all-gather", "all-reduce", "all-to-all"):
        assert shapes_of(program.as_text(), name) == []
    arguments = jax.device_put((batch, features, anchor_pos), program.input_shardings[0])
    results = [program(*arguments), read(None)(batch, features, anchor_pos)]
    cut, whole = ([np.asarray(a)[np.argsort(r[0])] for a in r] for r in results)
    np.testing.assert_array_equal(cut[0], np.sort(np.asarray(ids)[[[0], [1]], anchor_pos], None))
    np.testing.assert_array_equal(cut[3], whole[3])
    is_there = whole[3] >= 0
    np.testing.assert_array_equal(cut[1][is_there], whole[1][is_there])
    np.testing.assert_array_equal(cut[2][is_there], whole[2][is_there])
    assert is_there.sum() > 30
    # Of slots within the row: whole[0], the ids of the anchors, are their places.
    is_inside = whole[0][:, None] % s + np.arange(3) < s
    np.testing.assert_array_equal(cut[4][is_inside], whole[4][is_inside])


@pytest.mark.parametrize("with_halo", [with_left_halo, with_right_halo])
def test_a_halo_longer_than_a_stretch_is_refused(with_halo):
    mesh = make_mesh(TRAIN, (1, 1, 1, 4))
    halo = lambda x: with_halo(x, 3, SEQUENCE)
    cut = P(None, SEQUENCE)
    with pytest.raises(ValueError, match="a halo of 3 positions reaches past a stretch of 2"):
        jax.shard_map(halo, mesh=mesh, in_specs=cut, out_specs=cut)(jnp.ones((1, 8, 2)))


@pytest.mark.slow
def test_a_drafter_step_with_a_cut_sequence_equals_that_of_one_device(standard_promotion):
    """Rows of 2,048, two anchor chunks: the shortest that can be cut."""
    rng = np.random.default_rng(3)
    shape = (2, 2048)
    segments = 1 + (np.arange(2048) // 300).astype(np.int32)
    long_rows = PackedRows(
        rng.integers(4, 71, shape, np.int32),
        np.broadcast_to(segments, shape),
        rng.random(shape) < 0.8,
        np.broadcast_to(np.arange(2048, dtype=np.int32) % 300, shape),
    )
    one, cut = (drafter_program(mesh, long_rows) for mesh in (None, make_mesh(TRAIN, (1, 1, 1, 2))))
    (state, metrics), (expected_state, expected_metrics) = (p(*a) for p, a in (cut, one))
    assert int(metrics["num_signals"]) == int(expected_metrics["num_signals"]) > 8
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, atol=1e-5, rtol=1e-6, err_msg=name)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True)
    for leaf, expected in pairs:
        np.testing.assert_allclose(leaf, expected, atol=1e-5, rtol=0)
