"""A trained drafter as others load it: its directory, its accept length, its card."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flax import nnx

from mimo_jax.checkpoint.hf_drafter import save_drafter
from mimo_jax.config import DrafterConfig
from mimo_jax.decode.jobs import run_jobs
from mimo_jax.decode.llm import LLM
from mimo_jax.decode.params import SamplingParams
from mimo_jax.decode.stats import AcceptStats
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import abstract, flatten, unflatten
from mimo_jax.train.card import CardFacts, Measured, write_card
from mimo_jax.train.metrics import read_metrics

CARD_TEMPERATURES = (0.0, 1.0)


def save_trained(directory: Path, model: DrafterConfig, trained: Mapping[str, Any]) -> None:
    """Writes a drafter that brings its own mask vector, as published drafters are laid out.

    Args:
      directory: Made if needed.
      model: Architecture.
      trained: {"drafter": params, "mask_embedding": [d]}.
    """
    own = dataclasses.replace(model, has_mask_embedding=True)
    _, like = abstract(lambda: Drafter(own, rngs=nnx.Rngs(0)))
    flat = flatten(trained["drafter"]) | {"mask_embedding": trained["mask_embedding"]}
    save_drafter(directory, own, unflatten(like, flat))


def measure(
    llm: LLM, prompts: Mapping[str, Sequence[list[int]]], temperature: float, max_tokens: int
) -> list[Measured]:
    """Decodes held-out prompts one after the other, as a user would.

    Args:
      llm: Target and drafter as they were exported.
      prompts: Ids, by scene.
      temperature: 0 is greedy.
      max_tokens: Most tokens per answer.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    found = []
    for scene, ids in prompts.items():
        jobs = [llm.make_job(each, params) for each in ids]
        engine = llm.open_engine(jobs, batch_size=1)
        stats = AcceptStats()
        for _, output in run_jobs(engine, jobs, llm.tokenizer):
            stats += output.stats
        # Slots that no step came to have no acceptance.
        reached = (a for a in stats.per_position_acceptance if a is not None)
        found.append(Measured(scene, temperature, len(ids), stats.tau or 0.0, tuple(reached)))
    return found


def write_card_of_run(
    directory: Path,
    llm: LLM,
    prompts: Mapping[str, Sequence[list[int]]],
    *,
    name: str,
    target: str,
    target_hash: str,
    drafter: DrafterConfig,
    data: Sequence[str],
    sampling: Mapping[str, object],
    max_tokens: int,
    metrics: Sequence[Path],
    provenance: Path,
) -> Path:
    """Measures an exported drafter and writes its card.

    Args:
      directory: Of the drafter; gets README.md and measured.json.
      llm: As for `measure`.
      prompts: As for `measure`.
      name: See `CardFacts`, as for target, target_hash, drafter, data and sampling.
      target: See there.
      target_hash: See there.
      drafter: See there.
      data: See there.
      sampling: See there.
      max_tokens: Most tokens per answer.
      metrics: Of its trainings, in order.
      provenance: JSON that `provenance.record` wrote.
    """
    measured = [
        each
        for temperature in CARD_TEMPERATURES
        for each in measure(llm, prompts, temperature, max_tokens)
    ]
    steps = [read_metrics(path)[-1]["step"] for path in metrics]
    flat = flatten(llm.drafter.params) if llm.drafter is not None else {}
    facts = CardFacts(
        name=name,
        target=target,
        target_hash=target_hash,
        drafter=drafter,
        num_parameters=sum(leaf.size for leaf in flat.values()),
        data=data,
        num_steps=sum(steps),
        num_signals=None,
        sampling=sampling,
        measured=measured,
        provenance=json.loads(provenance.read_text(encoding="utf-8")),
    )
    return write_card(directory, facts)
