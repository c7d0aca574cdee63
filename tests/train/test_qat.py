"""Quantization-aware training in the trainer: steps, meshes, a run from checkpoint to checkpoint.

Run: .venv/bin/python -m pytest tests/train/test_qat.py

Seen red: the forward on the masters; evaluation on the masters; a teacher that is the student.
"""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import nano, qat_nano
from configs.tiny import tiny_target, train_mesh_drafter, train_mesh_target
from mimo_jax import LLM
from mimo_jax.checkpoint.hf_drafter import save_drafter
from mimo_jax.checkpoint.hf_target import load_target, save_target
from mimo_jax.config import GLOBAL, ConfigError
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.packing import pack_experts, unpack_experts
from mimo_jax.models.params import flatten, split
from mimo_jax.models.target import Target
from mimo_jax.sharding import TRAIN, make_mesh
from mimo_jax.text import bpe
from mimo_jax.train import recipe
from mimo_jax.train.block_step import read_target
from mimo_jax.train.config import QatConfig, TargetTrainConfig
from mimo_jax.train.data import PackedRows, pack_documents
from mimo_jax.train.objectives import ObjectiveConfig
from mimo_jax.train.optimizer import make_optimizer
from mimo_jax.train.placement import place_params, whole_over_data
from mimo_jax.train.start import load_frozen_target
from mimo_jax.train.step import (
    Batch,
    init_state,
    make_target_eval,
    make_target_step,
    place_batch,
    quantized_view,
)
from tests.train import smallest_run

FAST = {"xla_backend_optimization_level": 0}


def with_groups(config, *, hidden_size: int, width: int):
    """A target whose experts have whole groups."""
    moe = dataclasses.replace(config.moe, hidden_size=width)
    return dataclasses.replace(config, hidden_size=hidden_size, moe=moe)


def packed_rows(vocab_size: int, row_len: int, num_rows: int) -> PackedRows:
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(4, vocab_size - 1, n).tolist()
    docs = [(draw(3), draw(int(rng.integers(4, 12)))) for _ in range(70)]
    rows = pack_documents(docs, row_len, pad_id=0, seed=0, num_open_rows=1)
    return PackedRows(*(array[:num_rows] for array in rows))


@pytest.fixture(scope="module")
def small():
    config = with_groups(tiny_target(), hidden_size=32, width=32)
    return config, *split(Target(config, rngs=nnx.Rngs(0)))


def test_a_step_learns_for_the_packed_weights(small, standard_promotion):
    """The loss that falls is that of the experts as packing would leave them."""
    config, graph, params = small
    batch = Batch(*(jnp.asarray(a) for a in packed_rows(config.vocab_size, 48, 4)))
    qat = QatConfig("floor")
    train = TargetTrainConfig(num_steps=25, warmup_steps=2, qat=qat)
    optimizer = make_optimizer(params, train)
    step = make_target_step(graph, optimizer, train)
    state = init_state(jax.tree.map(jnp.copy, params), optimizer)
    evaluate = make_target_eval(graph, qat=qat)
    before, count = evaluate(params, batch)
    for _ in range(25):
        state, metrics = step(state, batch)
    after, _ = evaluate(state.params, batch)
    assert after / count < 0.7 * before / count
    assert float(metrics["loss"]) < float(before / count)
    _, _, shipped = unpack_experts(*pack_experts(config, state.params, "floor")[::2])
    loss, _ = make_target_eval(graph)(shipped, batch)
    np.testing.assert_allclose(loss, after, rtol=1e-6)
    assert abs(float(make_target_eval(graph)(state.params, batch)[0] - after)) > 1e-3
    # Nothing but experts is rounded, and masters are not: they move by less than a code.
    view = flatten(quantized_view(state.params, qat))
    rounded = {name for name, value in flatten(state.params).items() if (view[name] != value).any()}
    assert rounded == {name for name in view if "experts_" in name}


def test_distillation_pulls_the_rounded_model_to_the_float_one(small, standard_promotion):
    """With all the weight on it and nothing learned yet, the loss is the divergence of the two."""
    config, graph, params = small
    batch = Batch(*(jnp.asarray(a) for a in packed_rows(config.vocab_size, 48, 4)))
    first = {}
    for weight in (0.0, 0.25, 1.0):
        train = TargetTrainConfig(num_steps=9, qat=QatConfig("floor", distill_weight=weight))
        optimizer = make_optimizer(params, train)
        state = init_state(jax.tree.map(jnp.copy, params), optimizer)
        _, metrics = make_target_step(graph, optimizer, train)(state, batch)
        first[weight] = float(metrics["loss"])
    assert 0 < first[1.0] < 0.05 < first[0.0]
    np.testing.assert_allclose(first[0.25], 0.75 * first[0.0] + 0.25 * first[1.0], rtol=1e-5)


def collectives(text: str) -> dict[str, int]:
    names = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
    return {n: len(re.findall(rf"= (?:\(.*?\)|\S+) {n}(?:-start)?\(", text)) for n in names}


@pytest.mark.multi_device
def test_a_step_on_a_mesh_equals_that_of_one_device(standard_promotion):
    """Experts and their widths cut: the same step, and not one collective for the rounding."""
    config = with_groups(train_mesh_target(), hidden_size=64, width=64)
    graph, params = split(Target(config, rngs=nnx.Rngs(0)))
    rows = packed_rows(config.vocab_size, 20, 8)

    def program(mesh, qat):
        # e / top_k: room for every token, so that nothing is dropped on any mesh.
        train = TargetTrainConfig(num_steps=10, warmup_steps=0, capacity_factor=12.0, qat=qat)
        placed = place_params(jax.tree.map(jnp.copy, params), mesh)
        optimizer = make_optimizer(placed, train, mesh)
        step = make_target_step(graph, optimizer, train, mesh)
        arguments = (init_state(placed, optimizer, mesh), place_batch(rows, mesh))
        return step.lower(*arguments).compile(compiler_options=FAST), arguments

    mesh = make_mesh(TRAIN, (2, 2, 2))
    on_mesh, arguments = program(mesh, QatConfig())
    plain, _ = program(mesh, None)
    assert collectives(on_mesh.as_text()) == collectives(plain.as_text())
    state, metrics = on_mesh(*arguments)
    alone, arguments = program(None, QatConfig())
    expected_state, expected = alone(*arguments)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    for ours, one in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
        np.testing.assert_allclose(ours, one, atol=1e-5, rtol=0)


@pytest.mark.multi_device
def test_a_frozen_target_on_a_mesh_keeps_its_experts_packed(tmp_path, standard_promotion):
    config = with_groups(train_mesh_target(), hidden_size=64, width=64)
    few = dataclasses.replace(config.attention[GLOBAL], num_kv_heads=4)  # as the format wants it
    config = dataclasses.replace(config, attention={**config.attention, GLOBAL: few})
    params = split(Target(config, rngs=nnx.Rngs(0)))[1]
    packed_config, _, packed = pack_experts(config, params, "even")
    save_target(tmp_path, packed_config, packed)
    rows = packed_rows(config.vocab_size, 20, 8)

    def states(mesh):
        model = load_frozen_target(tmp_path, mesh)

        @jax.jit
        def read(params, batch):
            target = nnx.merge(model.graph, whole_over_data(params, mesh))
            return read_target(target, batch, ObjectiveConfig(), train_mesh_drafter(), mesh)

        return flatten(model.params), np.asarray(read(model.params, place_batch(rows, mesh)))

    on_mesh, found = states(make_mesh(TRAIN, (2, 2, 2)))
    alone, expected = states(None)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for name in ("experts_gate", "experts_down", "experts_up_scale"):
        array = on_mesh[f"layers.1.{name}"]
        assert array.dtype == jnp.uint8
        assert array.addressable_shards[0].data.size == array.size // 8
    assert alone["layers.1.experts_gate"].dtype == jnp.float32


def qat_run(checkpoint):
    """`smallest_run` with whole groups, from a checkpoint, for packed experts."""
    config = smallest_run.get_config()
    return dataclasses.replace(
        config,
        name="smallest-qat",
        checkpoint=str(checkpoint),
        target=with_groups(config.target, hidden_size=32, width=64),
        drafter=dataclasses.replace(config.drafter, hidden_size=32, target_hidden_size=32),
        target_train=dataclasses.replace(config.target_train, qat=QatConfig("rceil")),
    )


def test_a_run_goes_on_from_a_checkpoint_and_writes_packed_experts(tmp_path, standard_promotion):
    start = tmp_path / "start"
    config = qat_run(start)
    save_target(start, config.target, split(Target(config.target, rngs=nnx.Rngs(5)))[1])
    save_drafter(
        start / "dflash", config.drafter, split(Drafter(config.drafter, rngs=nnx.Rngs(6)))[1]
    )
    text = [chr(97 + i % 26) * (i % 7 + 1) + " def f(x): return x + 1" for i in range(400)]
    bpe.save_tokenizer(bpe.train_bpe(text, vocab_size=320), start)
    exported = recipe.run_recipe(config, tmp_path / "run")
    assert (exported / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()
    written = json.loads((exported / "config.json").read_text())
    assert written["quantization_config"]["store_dtype"] == "mxfp4"
    packed_config, _, _ = load_target(exported, dtype=jnp.float32)
    assert packed_config.moe.is_mxfp4
    exported_target = load_frozen_target(tmp_path / "run" / "target" / "export")
    assert exported_target.config == config.target
    # Six steps of training lie between start and end, and no more.
    first = flatten(load_target(start, dtype=jnp.float32)[2])
    last = flatten(exported_target.params)
    for name in ("layers.0.w_qkv", "layers.1.w_out"):
        moved = float(jnp.abs(last[name] - first[name]).max())
        assert 0 < moved < 0.1
    # The drafter goes on as well, with the vector that the target has at the mask id.
    assert LLM.load(exported).generate(["def f"], max_tokens=4)[0].token_ids


def test_only_the_last_steps_of_a_run_see_packed_experts(tmp_path, monkeypatch):
    config = qat_run(tmp_path)
    qat = QatConfig("rceil", from_step=4)
    train = dataclasses.replace(config.target_train, qat=qat)
    config = dataclasses.replace(config, checkpoint=None, target_train=train)
    seen = []

    def recording(graph, optimizer, options, mesh, dispatch):
        step = make_target_step(graph, optimizer, options, mesh, dispatch)

        def recorded(state, batch):
            seen.append(options.qat)
            return step(state, batch)

        return recorded

    monkeypatch.setattr(recipe, "make_target_step", recording)
    recipe.build_corpus_stage(config, tmp_path)
    recipe.train_target_stage(config, tmp_path)
    assert seen == [None] * 4 + [qat] * 2
    written = json.loads((tmp_path / "target" / "export" / "config.json").read_text())
    assert written["quantization_config"]["store_dtype"] == "mxfp4"


def _nano_qat(**target_changes):
    """`configs/qat_nano.py` with another target."""
    config = qat_nano.get_config()
    target = dataclasses.replace(config.target, **target_changes)
    width = target.hidden_size
    drafter = dataclasses.replace(config.drafter, hidden_size=width, target_hidden_size=width)
    return dataclasses.replace(config, target=target, drafter=drafter)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: dataclasses.replace(qat_nano.get_config(), mesh=(1, 1, 2)),
            "axis expert_hidden of 96 cut into 2 parts would split MXFP4 groups of 32",
        ),
        (lambda: QatConfig("ceil"), "MXFP4 rule 'ceil' is unknown; allowed: floor, even, rceil"),
        (
            lambda: QatConfig(distill_weight=1.5),
            "qat.distill_weight 1.5 is out of range; allowed: 0 to 1",
        ),
        (
            lambda: TargetTrainConfig(num_steps=6, qat=QatConfig(from_step=6)),
            "qat.from_step 6 is out of range; allowed: 0 to 5",
        ),
        (
            lambda: _nano_qat(hidden_size=200),
            "axis embed of 200 is no multiple of 32, the MXFP4 group",
        ),
        (
            lambda: _nano_qat(moe=None, is_moe_layer=(False,) * 6),
            "target_train.qat: the target has no experts to quantize",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_when_it_is_configured(make, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        make()
    assert "\n" not in str(error.value)


def test_the_float_recipe_differs_in_nothing_but_the_rounding():
    qat, plain = qat_nano.get_config(), nano.get_config()
    assert plain.target_train == dataclasses.replace(qat.target_train, qat=None)
    assert plain == dataclasses.replace(qat, name="nano", target_train=plain.target_train)
