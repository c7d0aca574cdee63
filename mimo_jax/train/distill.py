"""Makes a drafter for a target that exists: it answers prompts, the drafter learns them, in rounds.

    answers/SCENE.jsonl          what the target said, as `train.py regenerate` writes it
    answers/heldout/SCENE.jsonl  the same for held-out prompts, greedy
    rows/                        the answers as packed rows
    drafter/                     checkpoints/, metrics.jsonl, export/
    export/                      the last round's drafter with its card: what to publish

Further rounds have answers-2/, rows-2/, drafter-2/ and so on. Round r answers its own share of the
prompts, decoding with the drafter of round r - 1, so that its text comes sooner; it learns all text
so far and goes on from the weights of round r - 1. What a drafter learns is its target's own text,
whoever drafted it: answers do not depend on the drafter.

Stages leave files, are skipped when those are whole, and go on inside when they are not: answers by
line, training by checkpoint. Of several processes the first one answers and exports while the
others wait; all of them train.
"""

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mimo_jax.checkpoint.fingerprint import fingerprint
from mimo_jax.checkpoint.hf_target import open_target
from mimo_jax.decode.llm import LLM
from mimo_jax.distributed import ALONE, ProcessGroup
from mimo_jax.sharding import connect, to_host
from mimo_jax.text.tokenizer import Tokenizer
from mimo_jax.train.answer_job import run_answer_job
from mimo_jax.train.answer_options import NONE, AnswerOptions
from mimo_jax.train.config import DataConfig, DistillConfig
from mimo_jax.train.conversations import Tally, TextFormat, documents
from mimo_jax.train.data import Document, prompt_of
from mimo_jax.train.dataset import make_dataset
from mimo_jax.train.drafter_run import Runtime, Text, one_per_row, read_trained, train_drafter
from mimo_jax.train.export import save_trained, write_card_of_run
from mimo_jax.train.provenance import record
from mimo_jax.train.sources import read_source
from mimo_jax.train.start import load_frozen_target, on_all_devices, run_mesh

PAD_ID = 0  # fills rows up; segment 0 masks it, whatever the id means


def of_round(name: str, number: int) -> str:
    """Directory of a stage. Example: "drafter", 2 -> "drafter-2"; round 1 is plain."""
    return name if number == 1 else f"{name}-{number}"


def share_of_round(num_prompts: int, number: int, rounds: int) -> tuple[int, int]:
    """(skip, limit): which prompts a round answers; all rounds together answer each once.

    Example: 10 prompts in 3 rounds -> (0, 4), (4, 4), (8, 4).
    """
    share = math.ceil(num_prompts / rounds)
    return (number - 1) * share, share


def text_format(config: DistillConfig) -> TextFormat:
    """How the target reads text."""
    directory = Path(config.checkpoint)
    vocab_size = open_target(directory)[0].vocab_size
    tokenizer = Tokenizer.from_file(directory)
    return TextFormat.of_checkpoint(directory, tokenizer, vocab_size, config.answers.thinking)


def answer_stage(config: DistillConfig, number: int, run_dir: Path) -> None:
    """The target answers this round's prompts, and in round 1 the held-out ones, greedily."""
    answers = config.answers
    drafter_dir = run_dir / of_round("drafter", number - 1) / "export" if number > 1 else None
    if number == 1 and config.start is not None:
        drafter_dir = Path(config.start)
    out = run_dir / of_round("answers", number)
    common: dict[str, Any] = {
        "model": Path(config.checkpoint),
        "drafter": NONE if drafter_dir is None else str(drafter_dir),
        "max_tokens": answers.max_tokens,
        "thinking": answers.thinking,
        "batch_size": answers.batch_size,
    }
    llm = LLM.load(config.checkpoint, drafter_dir)
    for scene, source in config.prompts.items():
        prompts = itertools.islice(read_source(source), answers.num_prompts)
        skip, limit = share_of_round(sum(1 for _ in prompts), number, config.rounds)
        options = AnswerOptions(
            data=source,
            out=out / f"{scene}.jsonl",
            temperature=answers.temperature,
            top_p=answers.top_p,
            seed=config.seed + number - 1,
            skip=skip,
            limit=limit,
            exclude=(config.heldout[scene],),
            **common,
        )
        run_answer_job(options, llm)
        if number == 1:
            heldout = AnswerOptions(
                data=config.heldout[scene],
                out=out / "heldout" / f"{scene}.jsonl",
                limit=answers.num_heldout,
                **common,
            )
            run_answer_job(heldout, llm)


def heldout_documents(config: DistillConfig, run_dir: Path) -> dict[str, list[Document]]:
    """Held-out prompts with their greedy answers, by scene."""
    format_ = text_format(config)
    directory = run_dir / "answers" / "heldout"
    return {
        scene: list(documents(format_, read_source(str(directory / f"{scene}.jsonl")), Tally()))
        for scene in config.heldout
    }


def text_stage(config: DistillConfig, number: int, run_dir: Path) -> Text:
    """All answers up to this round, and the held-out ones, as rows."""
    row_len = config.drafter_train.row_len
    data = DataConfig(
        # answers/, answers-2/ and so on; later rounds are not there yet
        sources={scene: str(run_dir / "answers*" / f"{scene}.jsonl") for scene in config.prompts},
        row_len=row_len,
        thinking=config.answers.thinking,
        seed=config.seed,
    )
    rows = make_dataset(data, text_format(config), PAD_ID, run_dir / of_round("rows", number))
    found = heldout_documents(config, run_dir)
    return Text(rows, {scene: one_per_row(docs, row_len, PAD_ID) for scene, docs in found.items()})


def export_stage(config: DistillConfig, run_dir: Path) -> Path:
    """Copies the last round's drafter, measures it and writes its card."""
    out = run_dir / "export"
    if (out / "README.md").exists():
        return out
    last = run_dir / of_round("drafter", config.rounds) / "export"
    shutil.copytree(last, out, dirs_exist_ok=True)
    shutil.copy(run_dir / "config.json", out / "provenance.json")
    found = heldout_documents(config, run_dir)
    names = [of_round("drafter", number) for number in range(1, config.rounds + 1)]
    write_card_of_run(
        out,
        LLM.load(config.checkpoint, out),
        {scene: [prompt_of(document) for document in some] for scene, some in found.items()},
        name=config.name,
        target=Path(config.checkpoint).resolve().name,
        target_hash=fingerprint(config.checkpoint),
        drafter=config.drafter,
        data=[f"{scene}: prompts of {Path(path).name}" for scene, path in config.prompts.items()],
        sampling=dataclasses.asdict(config.answers),
        max_tokens=config.answers.max_tokens,
        metrics=[run_dir / name / "metrics.jsonl" for name in names],
        provenance=run_dir / "config.json",
    )
    return out


def run_distillation(
    config: DistillConfig,
    run_dir: Path,
    group: ProcessGroup = ALONE,
    has_tensorboard: bool = False,
) -> Path:
    """All rounds; returns the exported drafter's directory.

    Args:
      config: Of the run.
      run_dir: Where the run lives, the same directory for every process.
      group: The processes that work on it together.
      has_tensorboard: Write the trainings' metrics for TensorBoard, too.

    Raises:
      ConfigError: If the drafter was not made for the target, or a line of text is refused.
    """
    config = on_all_devices(config, group)
    mesh = run_mesh(config)
    if mesh is not None:
        connect(mesh, group)
    runtime = Runtime(run_dir, mesh, config.dispatch, group, has_tensorboard)
    target = load_frozen_target(Path(config.checkpoint), mesh)
    config.drafter.check_fits(target.config)
    if group.is_first:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.json").write_text(json.dumps(record(config), indent=1) + "\n")
    trained = None
    if config.start is not None:
        trained = read_trained(Path(config.start), config.drafter, target)
    text = Text({}, {})
    for number in range(1, config.rounds + 1):
        name = of_round("drafter", number)
        if group.is_first:
            answer_stage(config, number, run_dir)
            text = text_stage(config, number, run_dir)
        group.barrier(f"answers of round {number} are written")
        if not group.is_first:
            text = text_stage(config, number, run_dir)
        train, seed = config.drafter_train, config.seed + number - 1
        trained = train_drafter(name, target, text, config.drafter, train, seed, runtime, trained)
        trained = jax.tree.map(lambda x: jnp.asarray(to_host(x)), trained)  # off the mesh
        if group.is_first:
            save_trained(run_dir / name / "export", config.drafter, trained)
        group.barrier(f"drafter of round {number} is written")
    if group.is_first:
        export_stage(config, run_dir)
    return run_dir / "export"
