"""A training run that compiles in seconds, as a program for several processes and as a function.

    python tests/train/process_run.py RUN_DIR NUM_STEPS PAUSE_S [the flags of a group]

One dense layer, trained by the project's own step, loop and checkpoints. The pause after each step
gives a test the time to kill a process in the middle.
"""

import sys
import time
from pathlib import Path

ROW_LEN, BATCH_ROWS, SAVE_EVERY, SEED = 24, 8, 2, 5


def train(run_dir: Path, num_steps: int, mesh, group, pause_s: float = 0.0):
    """The state after num_steps."""
    import numpy as np
    from flax import nnx

    from mimo_jax.config import GLOBAL, AttentionConfig, TargetConfig
    from mimo_jax.models.params import split
    from mimo_jax.models.target import Target
    from mimo_jax.train import loop
    from mimo_jax.train.config import TargetTrainConfig
    from mimo_jax.train.data import pack_documents
    from mimo_jax.train.drafter_run import run_settings
    from mimo_jax.train.optimizer import make_optimizer
    from mimo_jax.train.pipeline import Batches, own_rows
    from mimo_jax.train.placement import place_params
    from mimo_jax.train.step import init_state, make_target_step, place_batch

    model = TargetConfig(
        vocab_size=52,
        hidden_size=20,
        layer_kinds=(GLOBAL,),
        attention={
            GLOBAL: AttentionConfig(
                num_heads=4, num_kv_heads=2, head_dim=12, v_head_dim=8, rope_theta=1e4, rope_dim=6
            )
        },
        dense_hidden_size=36,
        moe=None,
        is_moe_layer=(False,),
        max_position=64,
    )
    config = TargetTrainConfig(
        num_steps=50, batch_rows=BATCH_ROWS, mix={"math": 1.0}, warmup_steps=2, eval_every=100,
        save_every=SAVE_EVERY,
    )
    words = np.random.default_rng(SEED).integers(1, 52, size=(40, 17)).tolist()
    rows = {"math": pack_documents([(w[:5], w[5:]) for w in words], ROW_LEN, pad_id=0, seed=SEED)}
    graph, params = split(Target(model, rngs=nnx.Rngs(SEED)))
    params = place_params(params, mesh)
    optimizer = make_optimizer(params, config, mesh)
    step = make_target_step(graph, optimizer, config, mesh)
    batches = Batches(rows, config.mix, BATCH_ROWS, SEED, own_rows=own_rows(mesh, BATCH_ROWS))

    def step_fn(state, number):
        out = step(state, place_batch(batches[number], mesh))
        time.sleep(pause_s)
        return out

    settings = run_settings(config) | {"num_steps": num_steps}
    return loop.run(
        "target", init_state(params, optimizer, mesh), step_fn, run_dir=run_dir, eval_fn=None,
        tokens_per_step=BATCH_ROWS * ROW_LEN, group=group, **settings,
    )


def main(run_dir: str, num_steps: str, pause_s: str, *flags: str) -> int:
    import tyro

    from mimo_jax.distributed import ProcessFlags, open_group

    group = open_group(tyro.cli(ProcessFlags, args=flags), "process_run")
    import jax

    from mimo_jax.sharding import TRAIN, connect, make_mesh
    from mimo_jax.train.stopping import Stopped, raising_stop

    try:
        mesh = make_mesh(TRAIN, (jax.device_count(), 1, 1))
        connect(mesh, group)
        with raising_stop():
            train(Path(run_dir), int(num_steps), mesh, group, float(pause_s))
        return group.close()
    except Stopped as stopped:
        print(f"process_run: {stopped}", file=sys.stderr)
        return group.close() if stopped.is_agreed else 130
    except group.losses() as error:
        group.abandon(f"process_run: {group.explain(error)}", 2)
        raise


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
