"""Every kind of drafter on one target, trained for the same processor seconds, side by side.

The table of the DFlash paper at the size of the embedded default. DFlash, EAGLE-3 and MTP heads are
trained from nothing on the target's own answers (`train/baselines.py`) and kept in a directory, so
that a second run only measures; the embedded DFlash drafter, which was trained longer, is a further
row, alone and in several passes. Every drafter decodes with blocks of several lengths: a baseline
is read off its best line, not off the length that suits its rival.

Draft and verify times are those of the two programs alone, called 32 times from one dispatch and
all contenders' in turn; a step of the loop also accepts, commits and writes both memories.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mimo_jax.bench.race import race
from mimo_jax.config import DraftConfig, DrafterConfig
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.layers.vocab import argmax_lowest
from mimo_jax.models.denoising import with_passes
from mimo_jax.models.mtp import chain_first_head
from mimo_jax.text.tokenizer import Tokenizer
from mimo_jax.timing import alternate
from mimo_jax.train import baselines, recipe
from mimo_jax.train.config import RegenerateConfig
from mimo_jax.train.corpora.build import build_corpus
from mimo_jax.train.data import PackedRows, pack_documents
from mimo_jax.train.regenerate import regenerate
from mimo_jax.train.row_files import read_rows, write_rows

LENGTHS = (3, 5)  # blocks beside each drafter's longest
ROW_LEN = 256
_CALLS = 32


class Contender(NamedTuple):
    """A drafter to measure.

    Attributes:
      name: Of its rows.
      drafter: The drafter.
      cpu_s: Processor seconds of its training, None = not trained here.
      num_steps: Of its training.
    """

    name: str
    drafter: Model[Any]
    cpu_s: float | None = None
    num_steps: int | None = None


def answer_rows(
    target: Model,
    tokenizer: Tokenizer,
    directory: Path,
    heldout: set[str],
    on_progress: Callable[[str, int, int], None],
) -> dict[str, PackedRows]:
    """The target's own answers to training prompts, made once: SCENE.npz in a directory.

    Args:
      target: Answers.
      tokenizer: Its tokenizer.
      directory: Where rows are, or shall be.
      heldout: Prompts that must not be among them.
      on_progress: (scene, tokens so far, tokens wanted).
    """
    rows = read_rows(directory) if directory.exists() else {}
    if rows:
        return rows
    settings, made = RegenerateConfig(), []
    corpus = build_corpus()
    quota = settings.num_tokens // len(corpus.train)
    for scene, documents in corpus.train.items():
        prompts = [d.prompt for d in documents if d.prompt not in heldout]
        pairs = regenerate(
            target,
            tokenizer.encode_batch(prompts),
            settings,
            stop_ids=recipe.STOP_IDS,
            row_len=ROW_LEN,
            num_tokens=quota,
            seed=0,
            on_progress=lambda count, scene=scene: on_progress(scene, count, quota),
        )
        made.append((scene, pack_documents(pairs, ROW_LEN, pad_id=recipe.PAD_ID, seed=0)))
    for scene, packed in made:  # all or nothing: a directory that has rows is taken as it is
        write_rows(directory / f"{scene}.npz", packed)
    return dict(made)


def contenders(
    target: Model,
    embedded: Model[DrafterConfig],
    rows: dict[str, PackedRows],
    seconds: float,
    directory: Path,
    kinds: tuple[str, ...] = baselines.KINDS,
) -> list[Contender]:
    """The embedded drafter in one to three passes, and every kind trained or taken up."""
    found = [Contender("DFlash, embedded", embedded)]
    for num_passes in (2, 3):
        passes = with_passes(embedded.config, embedded.graph, embedded.params, num_passes)
        found.append(Contender(f"DFlash, embedded, {num_passes} passes", Model(*passes)))
    names = {baselines.DFLASH: "DFlash", baselines.EAGLE: "EAGLE-3", baselines.MTP: "MTP apart"}
    for kind in kinds:
        drafter, spent = baselines.train_baseline(
            kind, target, embedded.config, rows, seconds, directory
        )
        cost = {"cpu_s": spent.cpu_s, "num_steps": spent.num_steps}
        found.append(Contender(names[kind], drafter, **cost))
        if kind == baselines.MTP:
            length = embedded.config.draft_block_len
            chain = chain_first_head(drafter.config, drafter.params, length)
            found.append(Contender("MTP chained", Model(*chain), **cost))
    return found


def part_programs(
    target: Model, drafter: Model[DraftConfig], engine: Engine, request: Request
) -> dict[str, Callable[[], Any]]:
    """By part, "draft" and "verify": that of one block, 32 times over, after a prompt; batch 1."""
    block_len = engine.draft_block_len
    state = engine.prefill(request)
    taps = drafter.config.target_layer_ids
    anchor_pos = state.length - 1
    anchors = jnp.take_along_axis(state.tokens, anchor_pos[:, None], axis=1)

    @jax.jit
    def draft(target_params, params, anchors, memory):
        t, d = nnx.merge(target.graph, target_params), nnx.merge(drafter.graph, params)
        active_len = jnp.full((1,), block_len, jnp.int32)

        def body(_, ids):
            logits = d.draft_logits(t, ids, memory, anchor_pos, active_len, block_len)
            return argmax_lowest(logits)[:, 0]

        return jax.lax.fori_loop(0, _CALLS, body, anchors)

    @jax.jit
    def verify(target_params, block, cache):
        t = nnx.merge(target.graph, target_params)

        def body(_, carry):
            block, cache, features = carry
            out = t.step(block, cache, anchor_pos, tap_layer_ids=taps)
            return argmax_lowest(out.logits), out.cache, features + out.context_features.sum()

        features = jnp.zeros((), jnp.float32)  # used, so that taps are not dropped
        return jax.lax.fori_loop(0, _CALLS, body, (block, cache, features))[::2]

    block = jnp.broadcast_to(anchors, (1, block_len))
    memory, cache = state.drafter_cache, state.target_cache
    return {
        "draft": lambda: draft(target.params, drafter.params, anchors[:, 0], memory),
        "verify": lambda: verify(target.params, block, cache),
    }


def block_lengths(contender: Contender) -> list[int]:
    """Blocks that a contender is measured with: its longest and the shorter ones of LENGTHS."""
    longest = contender.drafter.config.draft_block_len
    if "passes" in contender.name:
        return [longest]
    return sorted({longest, *(n for n in LENGTHS if n < longest)})


def compare(
    target: Model,
    found: list[Contender],
    requests: dict[str, list[Request]],
    *,
    max_len: int,
    on_progress: Callable[[], None] = lambda: None,
) -> dict[str, dict]:
    """Figures of plain decoding and of every contender at every block length.

    Args:
      target: The target.
      found: The contenders.
      requests: Greedy ones, by scene.
      max_len: Longest prompt + output.
      on_progress: Called after each prompt, twice per prompt.

    Returns:
      {"drafter, block length": figures}: tau is the mean over scenes, tokens_per_s and step_ms are
      over all of them.
    """
    entries: dict[str, tuple[Contender | None, int]] = {"plain": (None, 1)}
    for contender in found:
        for length in block_lengths(contender):
            entries[f"{contender.name}, {length}"] = (contender, length)
    engines = {
        name: Engine(target, max_len=max_len)
        if contender is None
        else Engine(target, contender.drafter, max_len=max_len, draft_block_len=length)
        for name, (contender, length) in entries.items()
    }
    laps = race(engines, requests, on_progress)
    request = next(iter(requests.values()))[0]
    programs = {
        f"{name}: {part}": program
        for name, (contender, _) in entries.items()
        if contender is not None
        for part, program in part_programs(
            target, contender.drafter, engines[name], request
        ).items()
    }
    timings = alternate(programs, rounds=9).timings
    part_ms = {key: timing.median_s / _CALLS * 1e3 for key, timing in timings.items()}
    plain_s = sum(scene["plain"].decode_s for scene in laps.values())
    rows = {}
    for name, (contender, _) in entries.items():
        own = [scene[name] for scene in laps.values()]
        decode_s, num_steps = sum(lap.decode_s for lap in own), sum(lap.num_steps for lap in own)
        leaves = jax.tree.leaves(contender.drafter.params) if contender else []
        rows[name] = {
            "parameters": sum(leaf.size for leaf in leaves) or None,
            "cpu_s": contender and contender.cpu_s,
            "num_steps": contender and contender.num_steps,
            "tau": float(np.mean([lap.tau for lap in own])),
            "scenes": {scene: laps[scene][name].tau for scene in laps},
            "draft_ms": part_ms.get(f"{name}: draft"),
            "verify_ms": part_ms.get(f"{name}: verify"),
            "step_ms": decode_s / num_steps * 1e3,
            "tokens_per_s": sum(lap.num_decoded for lap in own) / decode_s,
            "over_plain": plain_s / decode_s,
            "identical": all(lap.identical for lap in own),
        }
    return rows
