"""The stages of a run: corpus -> target -> regenerate -> drafter -> export.

Each stage leaves files in the run directory and is skipped when its last file is there, so a run
that was stopped goes on where it was. Files are written under another name and renamed: what
exists is whole.

    corpus/      tokenizer.json, train and held-out rows per scene (.npz), prompts/SCENE.jsonl
    target/      checkpoints/, metrics.jsonl, export/ (the published layout, bfloat16)
    regenerate/  rows per scene (.npz): prompts with the target's own answers; heldout/ the same
                 for held-out prompts, greedy, one per row
    drafter/     checkpoints/, metrics.jsonl
    export/      target + tokenizer + chat template + dflash/ with its card + provenance
    prompts/     SCENE.jsonl, the held-out prompts, those with near ties last

Several processes (a `ProcessGroup`) share one run directory and train on one mesh of all their
devices. What needs no mesh is done by the first one while the others wait at a barrier, except
regenerating, the longest of these: there each process takes scenes of its own, whose files are then
those of a process alone (to split a scene would change which answers count into its quota).
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh

from mimo_jax.checkpoint.fingerprint import fingerprint
from mimo_jax.checkpoint.hf_drafter import save_drafter
from mimo_jax.checkpoint.hf_target import load_target, save_target
from mimo_jax.config import require
from mimo_jax.decode.llm import LLM
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.distributed import ALONE, ProcessGroup
from mimo_jax.models.packing import pack_experts
from mimo_jax.models.params import abstract, flatten, split, unflatten
from mimo_jax.models.target import Target
from mimo_jax.sharding import connect, to_host
from mimo_jax.text import bpe
from mimo_jax.text.tokenizer import Tokenizer
from mimo_jax.train import loop
from mimo_jax.train.config import ExperimentConfig
from mimo_jax.train.corpora.build import build_corpus, write_prompts
from mimo_jax.train.corpora.chat_format import NANO_CHAT_TEMPLATE
from mimo_jax.train.data import (
    Document,
    PackedRows,
    batch_for_step,
    documents_of,
    pack_documents,
    prompt_of,
)
from mimo_jax.train.drafter_run import (
    Runtime,
    Text,
    one_per_row,
    read_trained,
    run_settings,
    train_drafter,
)
from mimo_jax.train.export import write_card_of_run
from mimo_jax.train.near_ties import NEAR_TIE, smallest_margins, ties_last
from mimo_jax.train.optimizer import make_optimizer
from mimo_jax.train.pipeline import Batches, own_rows
from mimo_jax.train.placement import param_shardings, place_params
from mimo_jax.train.provenance import record
from mimo_jax.train.regenerate import prompts_of, regenerate
from mimo_jax.train.row_files import dataset_hash, read_rows, write_rows
from mimo_jax.train.start import load_float_target, load_frozen_target, on_all_devices, run_mesh
from mimo_jax.train.step import (
    TrainState,
    eval_params,
    init_state,
    make_target_eval,
    make_target_step,
    place_batch,
)

PAD_ID = 0  # <|endoftext|>; padding is masked by segment 0
STOP_IDS = (0, 2)  # <|endoftext|>, <|im_end|>


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
    has_tensorboard: bool = False,
) -> None:
    """Pre-trains the target and exports it."""
    train = config.target_train
    rows = read_rows(run_dir / "corpus" / "train")
    heldout = read_rows(run_dir / "corpus" / "heldout")
    graph, params = target_init(config, mesh)
    optimizer = make_optimizer(params, train, mesh)
    step_with = lambda options: make_target_step(graph, optimizer, options, mesh, config.dispatch)
    step, float_step = step_with(train), step_with(dataclasses.replace(train, qat=None))
    evaluate = make_target_eval(graph, mesh, config.dispatch, train.qat)
    batches = Batches(
        rows, train.mix, train.batch_rows, config.seed, own_rows=own_rows(mesh, train.batch_rows)
    )

    batch_of = functools.partial(batch_for_step, rows, train.mix, train.batch_rows, config.seed)

    def step_fn(state: TrainState, step_number: int):
        is_float = train.qat is not None and step_number < train.qat.from_step
        return (float_step if is_float else step)(state, place_batch(batches[step_number], mesh))

    def eval_fn(state: TrainState) -> dict:
        params, losses = eval_params(state), {}
        for scene, scene_rows in heldout.items():
            total = count = 0.0
            for start in range(0, min(len(scene_rows.token_ids), 32), 8):
                chunk = PackedRows(*(array[start : start + 8] for array in scene_rows))
                if len(chunk.token_ids) < 8:
                    break
                loss_sum, num = evaluate(params, place_batch(chunk, mesh))
                total, count = total + float(loss_sum), count + float(num)
            losses[scene] = round(total / max(count, 1), 4)
        return {"heldout_loss": losses}

    state = loop.run(
        "target",
        init_state(params, optimizer, mesh, has_ema=train.ema_decay > 0),
        step_fn,
        run_dir=run_dir,
        eval_fn=eval_fn,
        batch_of=batch_of,
        has_tensorboard=has_tensorboard,
        **run_settings(train, seed=config.seed, data_hash=dataset_hash(rows)),
        tokens_per_step=train.batch_rows * config.corpus.row_len,
        group=group,
    )
    params = jax.tree.map(to_host, eval_params(state))
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


def regenerate_stage(config: ExperimentConfig, run_dir: Path, group: ProcessGroup = ALONE) -> None:
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
        target = target or load_frozen_target(run_dir / "target" / "export")
        quota = int(settings.num_tokens * share / sum(mix.values()))
        common: dict[str, Any] = {
            "stop_ids": STOP_IDS,
            "row_len": row_len,
            "seed": config.seed,
        }
        heldout = regenerate(
            target,
            list(prompts_of(heldout_rows[scene]))[: settings.num_heldout],
            settings,
            num_tokens=settings.num_heldout * row_len,
            greedy_only=True,
            **common,
        )
        documents = (Document.of_pair(*pair) for pair in heldout)
        write_rows(heldout_path, one_per_row(documents, row_len, PAD_ID))
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


def train_drafter_stage(config: ExperimentConfig, runtime: Runtime) -> dict[str, Any]:
    """Distils the drafter; returns {"drafter": params, "mask_embedding": [d]}."""
    run_dir = runtime.run_dir
    target = load_frozen_target(run_dir / "target" / "export", runtime.mesh)
    text = Text(read_rows(run_dir / "regenerate"), read_rows(run_dir / "regenerate" / "heldout"))
    model, start = config.drafter, None
    if config.checkpoint is not None:
        start = read_trained(Path(config.checkpoint) / "dflash", model, target)
    return train_drafter(
        "drafter", target, text, model, config.drafter_train, config.seed, runtime, start
    )


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


def card_stage(config: ExperimentConfig, run_dir: Path) -> None:
    """Measures the exported pair on the held-out prompts and writes the drafter's card."""
    out = run_dir / "export"
    heldout = read_rows(run_dir / "regenerate" / "heldout")
    write_card_of_run(
        out / "dflash",
        LLM.load(out),
        {scene: [prompt_of(d) for d in documents_of(rows)] for scene, rows in heldout.items()},
        name=f"{config.name}-dflash",
        target=config.name,
        target_hash=fingerprint(out),
        drafter=config.drafter,
        data=[f"{scene}: answers to generated prompts" for scene in config.drafter_train.mix],
        sampling=dataclasses.asdict(config.regenerate),
        max_tokens=config.regenerate.max_tokens,
        metrics=[run_dir / "drafter" / "metrics.jsonl"],
        provenance=run_dir / "config.json",
    )


def order_prompts_stage(config: ExperimentConfig, run_dir: Path) -> None:
    """Writes the held-out prompts with those last whose greedy answer passes a near tie."""
    target = load_frozen_target(run_dir / "target" / "export")
    tokenizer = Tokenizer.from_file(run_dir / "export")
    out = run_dir / "prompts"
    out.mkdir(parents=True, exist_ok=True)
    scenes = {
        path.name: path.read_text(encoding="utf-8").splitlines()
        for path in sorted((run_dir / "corpus" / "prompts").glob("*.jsonl"))
    }
    requests = [
        Request(
            tokenizer.encode(json.loads(line)["prompt"]),
            max_tokens=config.regenerate.max_tokens,
            stop_ids=STOP_IDS,
        )
        for lines in scenes.values()
        for line in lines
    ]
    # All at once: a program is compiled for the longest.
    max_len = max(len(r.prompt_ids) + r.max_tokens for r in requests)
    margins = smallest_margins(target, requests, max_len=max_len)
    ends = np.cumsum([len(lines) for lines in scenes.values()])
    for (name, lines), own in zip(scenes.items(), np.split(margins, ends[:-1]), strict=True):
        text = "".join(f"{lines[i]}\n" for i in ties_last(own))
        (out / name).write_text(text, encoding="utf-8")
        logging.info("%s: %d near ties", name, int((own < NEAR_TIE).sum()))


def run_recipe(
    config: ExperimentConfig,
    run_dir: Path,
    group: ProcessGroup = ALONE,
    has_tensorboard: bool = False,
) -> Path:
    """All stages in order; returns the exported checkpoint directory.

    Training runs on the config's mesh, and may go on on another one; the other stages use one
    device.

    Args:
      config: Of the run; several processes without a mesh in it train on all their devices.
      run_dir: Where the run lives, the same directory for every process.
      group: The processes that work on it together.
      has_tensorboard: Write the trainings' metrics for TensorBoard, too.
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
        train_target_stage(config, run_dir, mesh, group, has_tensorboard)
        group.barrier("target is exported")
    regenerate_stage(config, run_dir, group)
    group.barrier("answers are written")
    runtime = Runtime(run_dir, mesh, config.dispatch, group, has_tensorboard)
    trained = jax.tree.map(to_host, train_drafter_stage(config, runtime))
    if group.is_first:
        export_stage(config, run_dir, trained)
        card_stage(config, run_dir)
        order_prompts_stage(config, run_dir)
    return run_dir / "export"
