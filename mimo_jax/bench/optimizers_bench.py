"""Muon against AdamW on one target and one text: steps to the same held-out loss.

Each optimizer trains from the same weights on the same batches, once per rate of its grid, with
rates falling linearly to zero over the run. AdamW's mark is the held-out loss at the end of its
best run; counted is the first evaluation at which Muon's best run is at or below it. Muon's rate
has not fallen to zero by then, so the count is no kindness to it.

The grids are of one length, so neither is tuned more than the other. A rate at the edge of a grid
says that the grid should be moved: `is_at_edge`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from flax import nnx

from mimo_jax.config import TargetConfig
from mimo_jax.models.params import split
from mimo_jax.models.target import Target
from mimo_jax.text.tokenizer import Tokenizer
from mimo_jax.timing import cpu_seconds
from mimo_jax.train.config import TargetTrainConfig
from mimo_jax.train.corpora.build import build_corpus
from mimo_jax.train.data import PackedRows, batch_for_step, pack_documents
from mimo_jax.train.muon import ADAMW, MUON
from mimo_jax.train.optimizer import make_optimizer
from mimo_jax.train.schedule import LINEAR
from mimo_jax.train.step import init_state, make_target_eval, make_target_step, place_batch

_SEED = 0
_NUM_HELDOUT_ROWS = 16
# Training characters per scene: 120 steps of 1,024 tokens see about a third of them.
CHARS = {"code-gen": 400_000, "math": 400_000, "agent": 400_000}


class Text(NamedTuple):
    """Packed rows by scene."""

    train: dict[str, PackedRows]
    heldout: dict[str, PackedRows]


class Run(NamedTuple):
    """One training.

    Attributes:
      rate: Peak rate, of matrices for Muon and of everything for AdamW.
      losses: Step -> held-out loss, nats per token, mean over scenes.
      cpu_s: Processor seconds of its steps, compiling and evaluations left out.
    """

    rate: float
    losses: dict[int, float]
    cpu_s: float

    @property
    def final(self) -> float:
        """Held-out loss at the end."""
        return self.losses[max(self.losses)]


def read_text(tokenizer: Tokenizer, chars: Mapping[str, int], row_len: int) -> Text:
    """Short text of some scenes, generated anew.

    Args:
      tokenizer: Of the model's vocabulary.
      chars: Scene -> training characters.
      row_len: Tokens per row.
    """
    corpus = build_corpus(_SEED, dict(chars), num_heldout=40, scenes=tuple(chars))

    def pack(scenes) -> dict[str, PackedRows]:
        packed = {}
        for scene, docs in scenes.items():
            prompts = tokenizer.encode_batch([doc.prompt for doc in docs])
            answers = tokenizer.encode_batch([doc.answer for doc in docs])
            pairs = list(zip(prompts, answers, strict=True))
            packed[scene] = pack_documents(pairs, row_len, pad_id=0, seed=_SEED)
        return packed

    return Text(pack(corpus.train), pack(corpus.heldout))


def train(
    model: TargetConfig, config: TargetTrainConfig, text: Text, eval_every: int
) -> tuple[dict[int, float], float]:
    """Trains a fresh target: (step -> held-out loss, processor seconds of its steps)."""
    graph, params = split(Target(model, rngs=nnx.Rngs(_SEED)))
    optimizer = make_optimizer(params, config)
    evaluate = make_target_eval(graph)
    state = init_state(params, optimizer)
    make_batch = lambda number: place_batch(
        batch_for_step(text.train, config.mix, config.batch_rows, _SEED, number)
    )
    step = make_target_step(graph, optimizer, config).lower(state, make_batch(0)).compile()
    heldout = [
        place_batch(PackedRows(*(array[:_NUM_HELDOUT_ROWS] for array in rows)))
        for rows in text.heldout.values()
    ]
    losses, cpu_s = {}, 0.0
    for first in range(0, config.num_steps, eval_every):
        before = cpu_seconds()
        for number in range(first, min(first + eval_every, config.num_steps)):
            state, _ = step(state, make_batch(number))
        jax.block_until_ready(state)
        cpu_s += cpu_seconds() - before
        sums = [evaluate(state.params, batch) for batch in heldout]
        mean = sum(float(total) / float(count) for total, count in sums) / len(sums)
        losses[int(state.step)] = round(mean, 4)
    return losses, round(cpu_s, 1)


def best(runs: Sequence[Run]) -> Run:
    """The run with the least loss at its end; a loss that is not a number is never least."""
    return min(runs, key=lambda run: (run.final != run.final, run.final))


def first_at(losses: Mapping[int, float], mark: float) -> int | None:
    """First step at which a loss is at or below the mark. Example: {5: 3., 10: 2.}, 2.5 -> 10."""
    return min((step for step, loss in losses.items() if loss <= mark), default=None)


def compare(runs: Mapping[str, Sequence[Run]]) -> dict:
    """What the runs of both optimizers say.

    Returns:
      "mark", "adamw_rate", "muon_rate", "steps_adamw", "steps_muon" and "ratio" (None where Muon
      never comes to the mark), "final_muon", "is_at_edge" (optimizers whose best rate is the least
      or the greatest of its grid) and processor seconds per step of both.

    Example: AdamW ends at 3.0 after 120 steps, Muon is at 2.9 after 60 -> ratio 0.5.
    """
    chosen = {name: best(runs[name]) for name in (ADAMW, MUON)}
    adamw, muon = chosen[ADAMW], chosen[MUON]
    num_steps = max(adamw.losses)
    steps = first_at(muon.losses, adamw.final)
    grids = {name: [run.rate for run in runs[name]] for name in chosen}
    edges = {name: (min(grid), max(grid)) for name, grid in grids.items()}
    return {
        "mark": adamw.final,
        "adamw_rate": adamw.rate,
        "muon_rate": muon.rate,
        "steps_adamw": num_steps,
        "steps_muon": steps,
        "ratio": None if steps is None else steps / num_steps,
        "final_muon": muon.final,
        "is_at_edge": [name for name, run in chosen.items() if run.rate in edges[name]],
        "cpu_s_per_step": {name: run.cpu_s / num_steps for name, run in chosen.items()},
    }


def measure(
    model: TargetConfig,
    text: Text,
    grids: Mapping[str, Sequence[float]],
    *,
    num_steps: int,
    batch_rows: int,
    eval_every: int,
) -> dict[str, list[Run]]:
    """Every rate of both grids: optimizer -> its runs.

    Args:
      model: Of the target.
      text: Rows that both read.
      grids: MUON and ADAMW -> peak rates; Muon's other leaves have AdamW's middle rate.
      num_steps: Of each run.
      batch_rows: Rows per step.
      eval_every: Steps between evaluations.
    """
    middle = sorted(grids[ADAMW])[len(grids[ADAMW]) // 2]
    common = TargetTrainConfig(
        num_steps=num_steps,
        batch_rows=batch_rows,
        mix=dict.fromkeys(text.train, 1.0),
        schedule=LINEAR,
        warmup_steps=max(num_steps // 12, 1),
        adamw_lr=middle,
    )
    found: dict[str, list[Run]] = {}
    for name, field in ((ADAMW, "adamw_lr"), (MUON, "muon_lr")):
        for rate in grids[name]:
            config = dataclasses.replace(common, matrix_optimizer=name, **{field: rate})
            found.setdefault(name, []).append(Run(rate, *train(model, config, text, eval_every)))
    return found
