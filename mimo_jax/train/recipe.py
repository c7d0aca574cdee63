"""The stages of a run: corpus -> target -> regenerate -> drafter -> export.

Each stage leaves files in the run directory and is skipped when its last file is there, so a run
that was stopped goes on where it was. Files are written under another name and renamed: what
exists is whole.

    corpus/      tokenizer.json, train and held-out rows per scene (.npz), prompts/SCENE.jsonl
    target/      checkpoints/, metrics.jsonl, export/ (the published layout, bfloat16)
    regenerate/  rows per scene (.npz): prompts with the target's own answers; heldout/ the same
                 for held-out prompts, greedy, one per row
    drafter/     checkpoints/, metrics.jsonl
    export/      target + tokenizer + chat template + dflash/ + provenance
    prompts/     SCENE.jsonl, the held-out prompts, those with near ties last

Several processes (a `ProcessGroup`) share one run directory and train on one mesh of all their
devices. What needs no mesh is done by the first one while the others wait at a barrier, except
regenerating, the longest of these: there each process takes scenes of its own, whose files are then
those of a process alone (to split a scene would change which answers count into its quota).
"""

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh

from mimo_jax.checkpoint.hf_drafter import load_drafter, save_drafter
from mimo_jax.checkpoint.hf_target import load_target, open_target, save_target
from mimo_jax.config import require
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.distributed import ALONE, ProcessGroup
from mimo_jax.layers.dispatch import PADDED, RAGGED
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.packing import pack_experts, unpack_experts
from mimo_jax.models.params import abstract, flatten, split, unflatten
from mimo_jax.models.target import Target
from mimo_jax.sharding import TRAIN, connect, full_sizes, make_mesh, to_host
from mimo_jax.text import bpe
from mimo_jax.text.tokenizer import Tokenizer
from mimo_jax.train import loop
from mimo_jax.train.config import ExperimentConfig, TrainConfig
from mimo_jax.train.corpora.build import build_corpus, write_prompts
from mimo_jax.train.corpora.chat_format import NANO_CHAT_TEMPLATE
from mimo_jax.train.data import PackedRows, batch_for_step, pack_documents
from mimo_jax.train.drafter_step import make_drafter_step
from mimo_jax.train.evaluate import make_propose, simulated_accept_length
from mimo_jax.train.near_ties import NEAR_TIE, smallest_margins, ties_last
from mimo_jax.train.placement import param_shardings, place_params, whole_over_data
from mimo_jax.train.provenance import record
from mimo_jax.train.regenerate import prompts_of, regenerate
from mimo_jax.train.step import (
    Batch,
    TrainState,
    init_state,
    make_optimizer,
    make_target_eval,
    make_target_step,
    place_batch,
    run_target,
    sparse_layer,
)

PAD_ID = 0  # <|endoftext|>; padding is masked by segment 0
STOP_IDS = (0, 2)  # <|endoftext|>, <|im_end|>


def write_rows(path: Path, rows: PackedRows) -> None:
    """Writes packed rows to an .npz that is either whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("wb") as file:
        np.savez(file, **rows._asdict())
    os.replace(temporary, path)


def read_rows(directory: Path) -> dict[str, PackedRows]:
    """Rows of each scene in a directory of SCENE.npz files."""
    rows = {}
    for path in sorted(directory.glob("*.npz")):
        with np.load(path) as arrays:
            rows[path.stem] = PackedRows(**{name: arrays[name] for name in PackedRows._fields})
    return rows


def build_corpus_stage(config: ExperimentConfig, run_dir: Path) -> None:
    """Generates the text, trains the tokenizer, packs rows and writes the held-out prompts."""
    out = run_dir / "corpus"
    if (out / "DONE").exists():
        return
    settings = config.corpus
    corpus = build_corpus(settings.seed, settings.target_chars, settings.num_heldout)
    out.mkdir(parents=True, exist_ok=True)
    if config.checkpoint is not None:
        shutil.copy(Path(config.checkpoint) / "tokenizer.json", out / "tokenizer.json")
    else:
        num_docs = settings.tokenizer_docs
        samples = [doc.text for docs in corpus.train.values() for doc in docs[:num_docs]]
        bpe.save_tokenizer(bpe.train_bpe(samples, vocab_size=settings.vocab_size), out)
    tokenizer = Tokenizer.from_file(out)
    for split_name, scenes in (("train", corpus.train), ("heldout", corpus.heldout)):
        for scene, docs in scenes.items():
            prompts = tokenizer.encode_batch([doc.prompt for doc in docs])
            answers = tokenizer.encode_batch([doc.answer for doc in docs])
            rows = pack_documents(
                list(zip(prompts, answers, strict=True)),
                settings.row_len,
                pad_id=PAD_ID,
                seed=settings.seed,
            )
            write_rows(out / split_name / f"{scene}.npz", rows)
            num_tokens = int((rows.segment_ids > 0).sum())
            logging.info("%s %s: %d documents, %d tokens", split_name, scene, len(docs), num_tokens)
    write_prompts(corpus, out / "prompts")
    (out / "DONE").write_text(json.dumps(dataclasses.asdict(settings)))


def run_settings(train: TrainConfig) -> dict[str, Any]:
    """What a stage's config says to `loop.run`."""
    return {
        "num_steps": train.num_steps,
        "save_every": train.save_every,
        "eval_every": train.eval_every,
        "meta": {"config": json.loads(json.dumps(dataclasses.asdict(train)))},
    }


def on_all_devices(config: ExperimentConfig, group: ProcessGroup) -> ExperimentConfig:
    """The config with a mesh for all processes: its own, or rows over all devices if it has none.

    Raises:
      ConfigError: If its mesh leaves out devices of some process, or rows do not divide.
    """
    num_devices = jax.device_count()
    if group.count > 1 and math.prod(config.mesh) == 1:
        config = dataclasses.replace(config, mesh=full_sizes(TRAIN, (num_devices, 1, 1)))
    require(
        group.count == 1 or math.prod(config.mesh) == num_devices,
        f"mesh {'x'.join(map(str, config.mesh))} has {math.prod(config.mesh)} devices, and "
        f"{group.count} processes bring {num_devices}: allowed is a mesh of all of them",
    )
    return config


def run_mesh(config: ExperimentConfig) -> Mesh | None:
    """The devices of a run: None for a mesh of one.

    Raises:
      ConfigError: If there are fewer devices, or they cannot dispatch experts as the config asks.
    """
    if math.prod(config.mesh) == 1:
        return None
    mesh = make_mesh(TRAIN, config.mesh)
    require(
        config.dispatch != RAGGED or mesh.devices.flat[0].platform == "gpu",
        f"dispatch {RAGGED} needs GPUs (XLA has no ragged all-to-all elsewhere); use {PADDED}",
    )
    return mesh


def target_init(config: ExperimentConfig, mesh: Mesh | None = None):
    """(graph, params) of the target before training; on a mesh every device makes its own part."""
    if config.checkpoint is not None:
        target = load_float_target(Path(config.checkpoint))
        require(
            target.config == config.target,
            f"checkpoint {config.checkpoint} holds another architecture than the config's target",
        )
        return target.graph, place_params(target.params, mesh)
    make_module = lambda: Target(config.target, rngs=nnx.Rngs(config.seed))
    if mesh is None:
        return split(make_module())
    graph, like = abstract(make_module)
    make = jax.jit(lambda: split(make_module())[1], out_shardings=param_shardings(like, mesh))
    return graph, make()


def train_target_stage(
    config: ExperimentConfig,
    run_dir: Path,
    mesh: Mesh | None = None,
    group: ProcessGroup = ALONE,
) -> None:
    """Pre-trains the target and exports it."""
    train = config.target_train
    rows = read_rows(run_dir / "corpus" / "train")
    heldout = read_rows(run_dir / "corpus" / "heldout")
    graph, params = target_init(config, mesh)
    optimizer = make_optimizer(params, train, mesh)
    step = make_target_step(graph, optimizer, train, mesh, config.dispatch)
    evaluate = make_target_eval(graph, mesh, config.dispatch, train.qat)

    def step_fn(state: TrainState, step_number: int):
        batch = batch_for_step(rows, train.mix, train.batch_rows, config.seed, step_number)
        return step(state, place_batch(batch, mesh))

    def eval_fn(state: TrainState) -> dict:
        losses = {}
        for scene, scene_rows in heldout.items():
            total = count = 0.0
            for start in range(0, min(len(scene_rows.token_ids), 32), 8):
                chunk = PackedRows(*(array[start : start + 8] for array in scene_rows))
                if len(chunk.token_ids) < 8:
                    break
                loss_sum, num = evaluate(state.params, place_batch(chunk, mesh))
                total, count = total + float(loss_sum), count + float(num)
            losses[scene] = round(total / max(count, 1), 4)
        return {"heldout_loss": losses}

    state = loop.run(
        "target",
        init_state(params, optimizer, mesh),
        step_fn,
        run_dir=run_dir,
        eval_fn=eval_fn,
        **run_settings(train),
        tokens_per_step=train.batch_rows * config.corpus.row_len,
        group=group,
    )
    params = jax.tree.map(to_host, state.params)
    if group.is_first:
        written = Model(config.target, graph, params)
        if train.qat is not None:
            written = Model(*pack_experts(config.target, params, train.qat.rule))
        save_target(
            run_dir / "target" / "export",
            written.config,
            written.params,
            extra_config={"eos_token_id": list(STOP_IDS), "pad_token_id": PAD_ID},
        )


def load_float_target(directory: Path) -> Model:
    """A target in float32 throughout, packed experts decoded (which changes no value)."""
    model = Model(*load_target(directory, dtype=jnp.float32))
    is_packed = model.config.moe is not None and model.config.moe.is_mxfp4
    return Model(*unpack_experts(model.config, model.params)) if is_packed else model


def load_exported_target(run_dir: Path, mesh: Mesh | None = None) -> Model:
    """The target as it will be published (rounded), computing in float32.

    The drafter must learn the text of the weights that are shipped. On a mesh every device reads
    its own part, unless experts are packed: a mesh of training wants them in float.
    """
    directory = run_dir / "target" / "export"
    target_config, _ = open_target(directory)
    is_packed = target_config.moe is not None and target_config.moe.is_mxfp4
    if mesh is None or is_packed:
        model = load_float_target(directory)
        return dataclasses.replace(model, params=place_params(model.params, mesh))
    _, like = abstract(lambda: Target(target_config, rngs=nnx.Rngs(0)))
    shardings = flatten(param_shardings(like, mesh))
    return Model(
        *load_target(directory, dtype=jnp.float32, sharding_of=shardings.__getitem__)
    )


def regenerate_stage(
    config: ExperimentConfig, run_dir: Path, group: ProcessGroup = ALONE
) -> None:
    """The target answers training prompts, and greedily a few held-out ones."""
    out = run_dir / "regenerate"
    train_rows = read_rows(run_dir / "corpus" / "train")
    heldout_rows = read_rows(run_dir / "corpus" / "heldout")
    row_len = config.drafter_train.row_len
    mix, settings = config.drafter_train.mix, config.regenerate
    target = None
    for number, (scene, share) in enumerate(mix.items()):
        path, heldout_path = out / f"{scene}.npz", out / "heldout" / f"{scene}.npz"
        if path.exists() or number % group.count != group.index:
            continue
        target = target or load_exported_target(run_dir)
        quota = int(settings.num_tokens * share / sum(mix.values()))
        common: dict[str, Any] = {
            "stop_ids": STOP_IDS, "row_len": row_len, "seed": config.seed
        }
        heldout = regenerate(
            target,
            list(prompts_of(heldout_rows[scene]))[: settings.num_heldout],
            settings,
            num_tokens=settings.num_heldout * row_len,
            greedy_only=True,
            **common,
        )
        pages = [
            pack_documents([pair], row_len, pad_id=PAD_ID, seed=0)
            for pair in heldout
            if len(pair[1]) > 1
        ]
        stacked = PackedRows(*(np.concatenate(arrays) for arrays in zip(*pages, strict=True)))
        write_rows(heldout_path, stacked)
        with loop.progress_bar(is_shown=group.is_first) as bar:
            task = bar.add_task(f"regenerate {scene}", total=quota, figures="tokens")
            pairs = regenerate(
                target,
                list(prompts_of(train_rows[scene])),
                settings,
                num_tokens=quota,
                on_progress=lambda count, task=task, bar=bar: bar.update(task, completed=count),
                **common,
            )
        write_rows(path, pack_documents(pairs, row_len, pad_id=PAD_ID, seed=config.seed))


def balance_taps(flat, features, name: str = "w_fuse"):
    """Scales the rows of an untrained fusion matrix so that every tap weighs the same.

    The residual stream grows with depth (about 4x from the first layer to the last here), and the
    published drafter has no norm per tap, so an untouched matrix hears the deepest tap only.

    Args:
      flat: Fresh parameters by name.
      features: float [b, s, num_taps, d], context features of some training rows.
      name: Of the fusion matrix [num_taps * d, d].
    """
    rms = jnp.sqrt(jnp.mean(features**2, axis=(0, 1, 3)))
    d = features.shape[3]
    return flat | {name: flat[name] / jnp.repeat(rms, d)[:, None]}


def drafter_init(
    config: ExperimentConfig, target: Model, rows: dict[str, PackedRows], mesh: Mesh | None
):
    """(graph, params) of the drafter before training: fresh with even taps, or the checkpoint's."""
    model = config.drafter
    if config.checkpoint is not None:
        found, graph, params = load_drafter(Path(config.checkpoint) / "dflash", jnp.float32)
        require(
            found == model,
            f"checkpoint {config.checkpoint}/dflash holds another architecture than the config's "
            "drafter",
        )
        return graph, params
    graph, params = split(Drafter(model, rngs=nnx.Rngs(config.seed + 1)))
    first = place_batch(
        batch_for_step(rows, config.drafter_train.mix, 16, config.seed, 0), mesh
    )
    run_sparse = sparse_layer(mesh, None, config.dispatch)

    @jax.jit
    def tap_features(target_params, batch: Batch):
        merged = nnx.merge(target.graph, whole_over_data(target_params, mesh))
        options = {"tap_layer_ids": model.target_layer_ids, "run_sparse": run_sparse}
        out = run_target(merged, batch, mesh, **options)
        b, s, _ = out.context_features.shape
        return out.context_features.reshape(b, s, len(model.target_layer_ids), -1)

    features = to_host(tap_features(target.params, first))[:16]
    return graph, unflatten(params, balance_taps(flatten(params), features))


def train_drafter_stage(
    config: ExperimentConfig,
    run_dir: Path,
    mesh: Mesh | None = None,
    group: ProcessGroup = ALONE,
):
    """Distils the drafter; returns its graph and {"drafter": params, "mask_embedding": [d]}."""
    train, model = config.drafter_train, config.drafter
    target = load_exported_target(run_dir, mesh)
    rows = read_rows(run_dir / "regenerate")
    heldout = read_rows(run_dir / "regenerate" / "heldout")
    graph, params = drafter_init(config, target, rows, mesh)
    embedding = to_host(flatten(target.params)["embedding"])
    trained = {"drafter": params, "mask_embedding": jnp.asarray(embedding[model.mask_token_id])}
    trained = place_params(trained, mesh)
    optimizer = make_optimizer(trained, train, mesh)
    step = make_drafter_step(target.graph, graph, optimizer, train, model, mesh, config.dispatch)
    propose = make_propose(target.graph, graph, mesh, config.dispatch)

    def step_fn(state: TrainState, step_number: int):
        batch = batch_for_step(rows, train.mix, train.batch_rows, config.seed, step_number)
        return step(state, target.params, place_batch(batch, mesh), config.seed)

    def eval_fn(state: TrainState) -> dict:
        tau = {
            scene: round(
                simulated_accept_length(
                    propose, target.params, state.params, scene_rows, mesh
                ),
                3,
            )
            for scene, scene_rows in heldout.items()
        }
        return {"heldout_accept_length": tau}

    state = loop.run(
        "drafter",
        init_state(trained, optimizer, mesh),
        step_fn,
        run_dir=run_dir,
        eval_fn=eval_fn,
        **run_settings(train),
        tokens_per_step=train.batch_rows * train.row_len,
        group=group,
    )
    return graph, state.params


def export_stage(config: ExperimentConfig, run_dir: Path, trained) -> Path:
    """Writes target, tokenizer, template, drafter and provenance as one checkpoint directory."""
    out = run_dir / "export"
    target = Model(*load_target(run_dir / "target" / "export", dtype=jnp.float32))
    flat = flatten(target.params)
    mask_id = config.drafter.mask_token_id
    # The mask id never stands in a text, so its embedding row is the drafter's to use.
    flat["embedding"] = flat["embedding"].at[mask_id].set(trained["mask_embedding"])
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(run_dir / "corpus" / "tokenizer.json", out / "tokenizer.json")
    (out / "chat_template.jinja").write_text(NANO_CHAT_TEMPLATE)
    shutil.copy(run_dir / "config.json", out / "provenance.json")
    save_drafter(out / "dflash", config.drafter, trained["drafter"])
    save_target(
        out,
        target.config,
        unflatten(target.params, flat),
        extra_config={"eos_token_id": list(STOP_IDS), "pad_token_id": PAD_ID},
    )
    return out


def order_prompts_stage(config: ExperimentConfig, run_dir: Path) -> None:
    """Writes the held-out prompts with those last whose greedy answer passes a near tie."""
    target = load_exported_target(run_dir)
    tokenizer = Tokenizer.from_file(run_dir / "export")
    out = run_dir / "prompts"
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted((run_dir / "corpus" / "prompts").glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        requests = [
            Request(
                tokenizer.encode(json.loads(line)["prompt"]),
                max_tokens=config.regenerate.max_tokens,
                stop_ids=STOP_IDS,
            )
            for line in lines
        ]
        max_len = max(len(r.prompt_ids) + r.max_tokens for r in requests)
        margins = smallest_margins(target, requests, max_len=max_len)
        text = "".join(f"{lines[i]}\n" for i in ties_last(margins))
        (out / path.name).write_text(text, encoding="utf-8")
        logging.info("%s: %d near ties", path.stem, int((margins < NEAR_TIE).sum()))


def run_recipe(
    config: ExperimentConfig, run_dir: Path, group: ProcessGroup = ALONE
) -> Path:
    """All stages in order; returns the exported checkpoint directory.

    Training runs on the config's mesh, and may go on on another one; the other stages use one
    device.

    Args:
      config: Of the run; several processes without a mesh in it train on all their devices.
      run_dir: Where the run lives, the same directory for every process.
      group: The processes that work on it together.
    """
    config = on_all_devices(config, group)
    mesh = run_mesh(config)
    if mesh is not None:
        connect(mesh, group)
    if group.is_first:
        run_dir.mkdir(parents=True, exist_ok=True)
        # Taken before the work: the tree may move on while a run takes its hour.
        (run_dir / "config.json").write_text(json.dumps(record(config), indent=1) + "\n")
        build_corpus_stage(config, run_dir)
    is_trained = (run_dir / "target" / "export" / "config.json").exists()
    if not group.share("target is trained", is_trained):  # waits for the corpus, too
        train_target_stage(config, run_dir, mesh, group)
        group.barrier("target is exported")
    regenerate_stage(config, run_dir, group)
    group.barrier("answers are written")
    _, trained = train_drafter_stage(config, run_dir, mesh, group)
    trained = jax.tree.map(to_host, trained)
    if group.is_first:
        export_stage(config, run_dir, trained)
        order_prompts_stage(config, run_dir)
    return run_dir / "export"


def summary(config: ExperimentConfig) -> dict:
    """What a run would do, without doing it: parameters, steps and tokens."""

    def count(make_module) -> int:
        _, params = abstract(make_module)
        return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))

    target, drafter = config.target_train, config.drafter_train
    return {
        "name": config.name,
        "mesh": dict(zip(TRAIN.mesh_axes, full_sizes(TRAIN, config.mesh), strict=True)),
        "target_parameters": count(lambda: Target(config.target, rngs=nnx.Rngs(0))),
        "drafter_parameters": count(lambda: Drafter(config.drafter, rngs=nnx.Rngs(0))),
        "target_steps": target.num_steps,
        "target_tokens": target.num_steps * target.batch_rows * config.corpus.row_len,
        "regenerated_tokens": config.regenerate.num_tokens,
        "drafter_steps": drafter.num_steps,
        "drafter_blocks": drafter.num_steps * drafter.batch_rows * drafter.num_anchors,
    }
