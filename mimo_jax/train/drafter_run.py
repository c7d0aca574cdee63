"""The training of a drafter on rows that a target has written, from fresh weights to trained ones.

What recipes share: `recipe.py` comes here with generated text and a target of its own, `distill.py`
with files and a target that exists. What is trained is {"drafter": params, "mask_embedding": [d]};
the target is frozen.

Real accept length is measured beside the simulated one, by decoding the same held-out prompts with
the weights of the moment: the simulated one is exact only while training and decoding agree.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.config import DrafterConfig, require
from mimo_jax.decode.placement import Model
from mimo_jax.decode.stats import AcceptStats
from mimo_jax.distributed import ALONE, ProcessGroup
from mimo_jax.layers.dispatch import PADDED
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import flatten, split, unflatten
from mimo_jax.sharding import to_host
from mimo_jax.train import loop
from mimo_jax.train.config import DrafterTrainConfig, TrainConfig
from mimo_jax.train.data import Document, PackedRows, batch_for_step, pack, picks_for_step
from mimo_jax.train.drafter_step import make_drafter_step
from mimo_jax.train.evaluate import (
    known_requests,
    make_propose,
    make_real_accept_length,
    simulate,
)
from mimo_jax.train.features import features_of, keep_features
from mimo_jax.train.optimizer import make_optimizer
from mimo_jax.train.pipeline import Batches, own_rows
from mimo_jax.train.placement import place_params, whole_over_data
from mimo_jax.train.row_checks import check_rows
from mimo_jax.train.row_files import dataset_hash
from mimo_jax.train.step import (
    Batch,
    TrainState,
    eval_params,
    init_state,
    place_batch,
    run_target,
    sparse_layer,
)

# Held-out prompts per scene that are decoded at each evaluation.
REAL_PROMPTS = 4
# Rows whose features say how much each tap weighs.
_ROWS_FOR_TAPS = 16


class Text(NamedTuple):
    """Rows of each scene: to learn, and held out (one document a row, answered greedily)."""

    train: dict[str, PackedRows]
    heldout: dict[str, PackedRows]


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Where a training runs and what watches it.

    Attributes:
      run_dir: Its files go to run_dir/NAME/.
      mesh: None: one device.
      dispatch: How tokens travel to experts.
      group: The processes that train together.
      has_tensorboard: Write metrics for TensorBoard, too.
    """

    run_dir: Path
    mesh: Mesh | None = None
    dispatch: str = PADDED
    group: ProcessGroup = ALONE
    has_tensorboard: bool = False


def run_settings(train: TrainConfig, **more_meta) -> dict[str, Any]:
    """What a training's config says to `loop.run`; more_meta goes into its checkpoints, too."""
    return {
        "num_steps": train.num_steps,
        "save_every": train.save_every,
        "eval_every": train.eval_every,
        "max_bad_steps": train.max_bad_steps,
        "meta": {"config": json.loads(json.dumps(dataclasses.asdict(train))), **more_meta},
    }


def one_per_row(
    documents: Iterable[Document], row_len: int, pad_id: int
) -> PackedRows:
    """Held-out rows of one document each; an answer of one token leaves nothing to foresee.

    Raises:
      ConfigError: If no answer is longer.
    """
    pages = [
        pack([document], row_len, pad_id=pad_id, seed=0)
        for document in documents
        if sum(document.loss_mask[:row_len]) > 1
    ]
    require(len(pages) > 0, "held out: no answer has 2 tokens, so there is nothing to measure")
    return PackedRows(*(np.concatenate(arrays) for arrays in zip(*pages, strict=True)))


def balance_taps(flat, features, name: str = "w_fuse"):
    """Scales the rows of an untrained fusion matrix so that every tap weighs the same.

    The residual stream grows with depth (about 4x from the first layer to the last here), and the
    published drafter has no norm per tap, so an untouched matrix hears the deepest tap only. The
    median token says how large a tap is, for the first token of a text may be an outlier: at layer
    14 of SmolLM2-135M it has an RMS of 867 where others have 6.4, and over all tokens it is 236, by
    which that layer would count for a 37th of its share.

    Args:
      flat: Fresh parameters by name.
      features: float [b, s, num_taps, d], context features of some training rows.
      name: Of the fusion matrix [num_taps * d, d].
    """
    rms = jnp.sqrt(jnp.median(jnp.mean(features**2, axis=3), axis=(0, 1)))
    d = features.shape[3]
    return flat | {name: flat[name] / jnp.repeat(rms, d)[:, None]}


def fresh_drafter(
    model: DrafterConfig,
    target: Model,
    rows: dict[str, PackedRows],
    train: DrafterTrainConfig,
    seed: int,
    runtime: Runtime,
) -> dict[str, Any]:
    """What is trained, before training: taps weigh the same, the mask vector is the target's row.

    Args:
      model: Architecture.
      target: That it is for.
      rows: To be learned.
      train: Says how scenes are mixed.
      seed: Of the weights.
      runtime: Where the target lies.
    """
    mesh = runtime.mesh
    _, params = split(Drafter(model, rngs=nnx.Rngs(seed)))
    first = place_batch(batch_for_step(rows, train.mix, _ROWS_FOR_TAPS, seed, 0), mesh)
    run_sparse = sparse_layer(mesh, None, runtime.dispatch)

    @jax.jit
    def tap_features(target_params, batch: Batch):
        merged = nnx.merge(target.graph, whole_over_data(target_params, mesh))
        options = {"tap_layer_ids": model.target_layer_ids, "run_sparse": run_sparse}
        out = run_target(merged, batch, mesh, **options)
        b, s, _ = out.context_features.shape
        return out.context_features.reshape(b, s, len(model.target_layer_ids), -1)

    features = to_host(tap_features(target.params, first))[:_ROWS_FOR_TAPS]
    embedding = to_host(flatten(target.params)["embedding"])
    return {
        "drafter": unflatten(params, balance_taps(flatten(params), features)),
        "mask_embedding": jnp.asarray(embedding[model.mask_token_id]),
    }


def read_trained(directory: Path, model: DrafterConfig, target: Model) -> dict[str, Any]:
    """What is trained, from a drafter on disk.

    Raises:
      ConfigError: If it has another architecture.
    """
    found, _, params = load_drafter(directory, jnp.float32)
    plain = lambda config: dataclasses.replace(config, has_mask_embedding=False)
    require(
        plain(found) == plain(model),
        f"{directory} holds another architecture than the config's drafter",
    )
    flat = flatten(params)
    mask_embedding = flat.pop("mask_embedding", None)
    if mask_embedding is None:
        mask_embedding = to_host(flatten(target.params)["embedding"])[model.mask_token_id]
    _, like = split(Drafter(plain(model), rngs=nnx.Rngs(0)))
    return {"drafter": unflatten(like, flat), "mask_embedding": jnp.asarray(mask_embedding)}


def accept_figures(kind: str, by_scene: dict[str, AcceptStats]) -> dict:
    """Metrics of an evaluation: accept length and per-position acceptance of each scene."""
    figures = {scene: stats.to_json() for scene, stats in by_scene.items()}
    return {
        f"{kind}_accept_length": {scene: each["tau"] for scene, each in figures.items()},
        f"{kind}_acceptance": {
            scene: each["per_position_acceptance"] for scene, each in figures.items()
        },
    }


def train_drafter(
    name: str,
    target: Model,
    text: Text,
    model: DrafterConfig,
    train: DrafterTrainConfig,
    seed: int,
    runtime: Runtime,
    start: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains a drafter, or goes on where an earlier run of this name stopped.

    Args:
      name: Of the training; its files go to runtime.run_dir/name/.
      target: Frozen, in float, lying on the mesh.
      text: What it is taught and measured on.
      model: Architecture, without a mask vector of its own.
      train: How.
      seed: Of initial weights, batches and anchors.
      runtime: Where.
      start: Weights to go on from; None: fresh ones.

    Returns:
      {"drafter": params, "mask_embedding": [d]}.
    """
    for scene, rows in text.train.items():
        check_rows(scene, rows, target.config.vocab_size)
    mesh, dispatch = runtime.mesh, runtime.dispatch
    graph, _ = split(Drafter(model, rngs=nnx.Rngs(0)))
    trained = start or fresh_drafter(model, target, text.train, train, seed + 1, runtime)
    trained = place_params(trained, mesh)
    optimizer = make_optimizer(trained, train, mesh)
    step = make_drafter_step(target.graph, graph, optimizer, train, model, mesh, dispatch)
    propose = make_propose(target.graph, graph, mesh, dispatch)
    own = own_rows(mesh, train.batch_rows)
    batches = Batches(text.train, train.mix, train.batch_rows, seed, own_rows=own)

    counts = {scene: len(rows.token_ids) for scene, rows in text.train.items()}
    picks_of = functools.partial(picks_for_step, counts, train.mix, train.batch_rows, seed)
    kept = {}
    if train.keeps_features and mesh is None:
        kept = keep_features(target, text.train, train.objective, model)

    def step_fn(state: TrainState, step_number: int):
        batch = place_batch(batches[step_number], mesh)
        features = features_of(kept, picks_of(step_number)) if kept else None
        return step(state, target.params, batch, seed, features)

    asked = {scene: known_requests(some, REAL_PROMPTS) for scene, some in text.heldout.items()}
    real = None  # decoding, as training does not, wants a model in one memory
    if mesh is None:
        options = {"max_len": train.row_len, "batch_size": REAL_PROMPTS}
        real = make_real_accept_length(target, model, **options)

    def eval_fn(state: TrainState) -> dict:
        params = eval_params(state)
        by_scene = {
            scene: simulate(propose, target.params, params, rows, mesh)
            for scene, rows in text.heldout.items()
        }
        found = accept_figures("heldout", by_scene)
        if real is not None:
            done = {scene: real(params, requests) for scene, requests in asked.items()}
            found |= accept_figures("real", done)
        return found

    state = loop.run(
        name,
        init_state(trained, optimizer, mesh, has_ema=train.ema_decay > 0),
        step_fn,
        run_dir=runtime.run_dir,
        eval_fn=eval_fn,
        batch_of=functools.partial(
            batch_for_step, text.train, train.mix, train.batch_rows, seed
        ),
        has_tensorboard=runtime.has_tensorboard,
        **run_settings(train, seed=seed, data_hash=dataset_hash(text.train)),
        tokens_per_step=train.batch_rows * train.row_len,
        group=runtime.group,
    )
    return eval_params(state)
