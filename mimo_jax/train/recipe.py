"""The stages of a run: corpus -> target -> regenerate -> drafter -> export.

Each stage leaves files in the run directory and is skipped when its last file is there, so a run
that was stopped goes on where it was. Files are written under another name and renamed: what
exists is whole.

    corpus/      tokenizer.json, train and held-out rows per scene (.npz), prompts/SCENE.jsonl
    target/      checkpoints/, metrics.jsonl, export/ (the published layout, bfloat16)
    regenerate/  rows per scene (.npz): prompts with the target's own answers
    drafter/     checkpoints/, metrics.jsonl
    export/      target + tokenizer + chat template + dflash/ + provenance
"""

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from mimo_jax.config import ExperimentConfig
from mimo_jax.models.params import split
from mimo_jax.models.target import Target
from mimo_jax.text import bpe
from mimo_jax.text.tokenizer import Tokenizer
from mimo_jax.train import loop
from mimo_jax.train.corpora.build import build_corpus, write_prompts
from mimo_jax.train.data import PackedRows, batch_for_step, pack_documents
from mimo_jax.train.step import (
    Batch,
    TrainState,
    init_state,
    make_optimizer,
    make_target_eval,
    make_target_step,
)

PAD_ID = 0  # <|endoftext|>; padding is masked by segment 0


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


def to_device(rows: PackedRows) -> Batch:
    return Batch(*(jnp.asarray(array) for array in rows))


def build_corpus_stage(config: ExperimentConfig, run_dir: Path) -> None:
    """Generates the text, trains the tokenizer, packs rows and writes the held-out prompts."""
    out = run_dir / "corpus"
    if (out / "DONE").exists():
        return
    settings = config.corpus
    corpus = build_corpus(settings.seed, settings.target_chars, settings.num_heldout)
    out.mkdir(parents=True, exist_ok=True)
    samples = [doc.text for docs in corpus.train.values() for doc in docs[: settings.tokenizer_docs]]
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


def target_init(config: ExperimentConfig):
    """(graph, params) of the untrained target."""
    return split(Target(config.target, rngs=nnx.Rngs(config.seed)))


def train_target_stage(config: ExperimentConfig, run_dir: Path):
    """Pre-trains the target; returns (graph, params)."""
    train = config.target_train
    rows = read_rows(run_dir / "corpus" / "train")
    heldout = read_rows(run_dir / "corpus" / "heldout")
    graph, params = target_init(config)
    optimizer = make_optimizer(params, train)
    step = make_target_step(graph, optimizer, train)
    evaluate = make_target_eval(graph)

    def step_fn(state: TrainState, step_number: int):
        batch = batch_for_step(rows, train.mix, train.batch_rows, config.seed, step_number)
        return step(state, to_device(batch))

    def eval_fn(state: TrainState) -> dict:
        losses = {}
        for scene, scene_rows in heldout.items():
            total = count = 0.0
            for start in range(0, min(len(scene_rows.token_ids), 32), 8):
                chunk = PackedRows(*(array[start : start + 8] for array in scene_rows))
                if len(chunk.token_ids) < 8:
                    break
                loss_sum, num = evaluate(state.params, to_device(chunk))
                total, count = total + float(loss_sum), count + float(num)
            losses[scene] = round(total / max(count, 1), 4)
        return {"heldout_loss": losses}

    state = loop.run(
        "target",
        init_state(params, optimizer),
        step_fn,
        run_dir=run_dir,
        num_steps=train.num_steps,
        save_every=train.save_every,
        eval_every=train.eval_every,
        eval_fn=eval_fn,
        meta={"config": json.loads(json.dumps(dataclasses.asdict(train)))},
        tokens_per_step=train.batch_rows * config.corpus.row_len,
    )
    return graph, state.params
