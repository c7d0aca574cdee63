"""The drafters that are compared at equal cost, and how each is trained from nothing.

Every one meets the same rows, anchors, labels, position weights and optimizer; what differs is the
drafter and its logits at an anchor. DFlash gets a mask vector of its own, so that the target, whose
embedding row was another drafter's, stays as it is.
"""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mimo_jax.config import DrafterConfig, TargetConfig
from mimo_jax.decode.placement import Model
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.eagle import EagleConfig, EagleDrafter
from mimo_jax.models.mtp import MtpConfig, MtpDrafter
from mimo_jax.models.params import flatten, split, unflatten
from mimo_jax.train.budget import Spent, Training, train_for_seconds
from mimo_jax.train.config import DrafterTrainConfig
from mimo_jax.train.data import PackedRows, batch_for_step
from mimo_jax.train.drafter_run import balance_taps
from mimo_jax.train.drafter_step import make_drafter_step
from mimo_jax.train.eagle_step import make_eagle_step
from mimo_jax.train.mtp_step import make_mtp_step
from mimo_jax.train.optimizer import make_optimizer
from mimo_jax.train.row_checks import check_rows
from mimo_jax.train.step import Batch, eval_params, init_state, place_batch, run_target

DFLASH, EAGLE, MTP = "dflash", "eagle3", "mtp"
KINDS = (DFLASH, EAGLE, MTP)


def eagle_config(like: DrafterConfig, target: TargetConfig) -> EagleConfig:
    """An EAGLE-3 drafter with the heads, widths, window and block of a DFlash drafter.

    Its taps are the second layer, the one below the middle and the last but one.

    Example: six layers -> taps 1, 3, 4; four -> 0, 1, 2.
    """
    high = target.num_layers - 2
    middle = min(target.num_layers // 2, high - 1)
    window = like.windows[0] or target.max_position
    return EagleConfig(
        hidden_size=like.hidden_size,
        attention=dataclasses.replace(like.attention, window=window),
        dense_hidden_size=like.dense_hidden_size,
        target_layer_ids=(min(1, middle - 1), middle, high),
        num_target_layers=target.num_layers,
        draft_block_len=like.draft_block_len,
        norm_eps=like.norm_eps,
    )


def fresh(kind: str, like: DrafterConfig, target: TargetConfig, seed: int) -> Model[Any]:
    """An untrained drafter of a kind for a target, shaped after a DFlash drafter."""
    rngs = nnx.Rngs(seed)
    if kind == DFLASH:
        config: Any = dataclasses.replace(like, has_mask_embedding=True)
        return Model(config, *split(Drafter(config, rngs=rngs)))
    if kind == EAGLE:
        config = eagle_config(like, target)
        return Model(config, *split(EagleDrafter(config, rngs=rngs)))
    config = MtpConfig(target)
    return Model(config, *split(MtpDrafter(config, rngs=rngs)))


def balanced(drafter: Model, target: Model, batch: Batch):
    """Parameters of a fresh drafter whose fusion hears every tap alike; see `balance_taps`."""
    taps = drafter.config.target_layer_ids

    @jax.jit
    def tap_features(params):
        merged = nnx.merge(target.graph, params)
        features = run_target(merged, batch, tap_layer_ids=taps).context_features
        return features.reshape(*features.shape[:2], len(taps), -1)

    features = tap_features(target.params)
    prefix = "" if isinstance(drafter.config, DrafterConfig) else "heads.0."
    flat = flatten(drafter.params)
    if f"{prefix}w_fuse" not in flat:  # MTP heads read one layer
        return drafter.params
    return unflatten(drafter.params, balance_taps(flat, features, f"{prefix}w_fuse"))


def train_config(kind: str, scenes: Iterable[str]) -> DrafterTrainConfig:
    """How a kind is trained on equal shares of some scenes.

    32 anchors per row for drafters that pay for each; 128 for MTP heads, which run over the whole
    row anyway (a step costs 0.40 processor seconds then, with 32 anchors 0.38).
    """
    mix = dict.fromkeys(sorted(scenes), 1.0)
    return DrafterTrainConfig(mix=mix, num_anchors=128 if kind == MTP else 32)


def train_baseline(
    kind: str,
    target: Model,
    like: DrafterConfig,
    rows: dict[str, PackedRows],
    seconds: float,
    run_dir: Path,
    seed: int = 0,
) -> tuple[Model[Any], Spent]:
    """A drafter of a kind, trained for so many processor seconds or read from run_dir.

    Args:
      kind: Of KINDS.
      target: Frozen.
      like: DFlash config that gives the drafter its shape.
      rows: The target's own answers by scene, which get equal shares.
      seconds: Processor seconds.
      run_dir: Where runs live.
      seed: Of weights, batches and anchors.

    Raises:
      ConfigError: If rows hold ids of another vocabulary or nothing to learn.

    Example: `train_baseline("eagle3", target, dflash.config, rows, 480, Path("out/drafters"))[0]`
      is a `Model` for `LLM` or `Engine`.
    """
    for scene, packed in rows.items():
        check_rows(scene, packed, target.config.vocab_size)
    train = train_config(kind, rows)
    drafter = fresh(kind, like, target.config, seed + 1)
    first = place_batch(batch_for_step(rows, train.mix, 16, seed, 0))
    trained: dict[str, Any] = {"drafter": balanced(drafter, target, first)}
    make_step: Callable = {EAGLE: make_eagle_step, MTP: make_mtp_step}.get(kind, make_drafter_step)
    if kind == DFLASH:
        d = like.hidden_size
        noise = jax.random.normal(jax.random.key(seed + 2), (d,), jnp.float32)
        trained["mask_embedding"] = noise * d**-0.5

    def make(config: DrafterTrainConfig) -> Training:
        optimizer = make_optimizer(trained, config)
        step = make_step(target.graph, drafter.graph, optimizer, config, drafter.config)

        def step_fn(state, number: int):
            batch = batch_for_step(rows, config.mix, config.batch_rows, seed, number)
            return step(state, target.params, place_batch(batch), np.int32(seed))

        has_ema = config.ema_decay > 0
        copied = jax.tree.map(jnp.copy, trained)
        return Training(init_state(copied, optimizer, has_ema=has_ema), step_fn)

    state, spent = train_for_seconds(kind, make, train, seconds, run_dir)
    found = eval_params(state)
    params = found["drafter"]
    if kind == DFLASH:
        flat = flatten(params) | {"mask_embedding": found["mask_embedding"]}
        params = unflatten(params, flat)
    return Model(drafter.config, drafter.graph, params), spent
