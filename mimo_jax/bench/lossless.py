"""Are drafted answers those of plain decoding? Every way of drafting at every batch size.

Greedy, float32: each answer must be plain decoding's of batch 1, token for token. Verifying eight
positions and stepping through one sum in another order, so where the target's two best logits are
nearer than `near_ties.NEAR_TIE` both texts are right: such pairs are counted apart, with the margin
at the token where they part, taken from a third forward without caches. Any other difference is a
bug.

A new way to draft joins by a line in MODES.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mimo_jax.config import DrafterConfig, TargetConfig
from mimo_jax.decode import controller
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import Completion, generate
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.decode.stats import AcceptStats
from mimo_jax.decode.step import DecodeState
from mimo_jax.decode.tree import NUM_NODES
from mimo_jax.train.near_ties import NEAR_TIE, margin_between

BATCH_SIZES = (1, 3, 8)
# One row: the host has nothing to do before the answer's end. More: it refills rows.
_STEPS_ALONE, _STEPS_TOGETHER = 256, 8


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to draft.

    Attributes:
      name: For the table.
      options: Of Engine, beside those that all share.
      rung: Rung of the ladder (0 = plain) that every step takes, or None.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rung: int | None = None


MODES = (
    Mode("chain"),
    Mode("short chain", {"draft_block_len": 3}),
    Mode("tree", {"max_verify_nodes": NUM_NODES}),
    Mode("auto", {"policy": controller.COSTS, "max_verify_nodes": NUM_NODES}),
    Mode("profile", {"policy": controller.PROFILE}),
    Mode("held plain", {"policy": controller.COSTS}, rung=0),
    Mode("held half", {"policy": controller.COSTS}, rung=1),
    Mode("held full", {"policy": controller.COSTS}, rung=2),
)


@dataclasses.dataclass
class Outcome:
    """One mode at one batch size over one scene.

    Attributes:
      mode, batch_size, scene: What was run.
      num_answers: Prompts.
      num_tokens: Of the answers.
      num_identical: Answers that are plain decoding's.
      tau: Accept length; None if no answer had a second token.
      near_ties: Of the others those that rounding explains: index of the prompt, token at which
        the answers part, and by how much the target prefers one of the two.
      differences: The rest, in the same form; a margin of None means that one answer ends there.
    """

    mode: str
    batch_size: int
    scene: str
    num_answers: int = 0
    num_tokens: int = 0
    num_identical: int = 0
    tau: float | None = None
    near_ties: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    differences: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class _HeldEngine(Engine):
    """An engine whose controller takes one rung while `rung` is not None."""

    rung: int | None = None

    def run(self, state: DecodeState, num_steps: int, held: int | None = None) -> DecodeState:
        return super().run(state, num_steps, held if self.rung is None else self.rung)


def _answers(
    engine: Engine, requests: Sequence[Request], on_answer: Callable[[], object]
) -> list[Completion]:
    steps = _STEPS_ALONE if engine.batch_size == 1 else _STEPS_TOGETHER
    done: dict[int, Completion] = {}
    for index, completion in generate(engine, requests, steps_per_group=steps):
        done[index] = completion
        on_answer()
    return [done[index] for index in range(len(requests))]


def _compare(
    outcome: Outcome,
    target: Model[TargetConfig],
    requests: Sequence[Request],
    plain: Sequence[Completion],
    drafted: Sequence[Completion],
    draft_block_len: int,
) -> Outcome:
    """Fills in what came of it."""
    outcome.num_answers = len(drafted)
    outcome.num_tokens = sum(len(c.token_ids) for c in drafted)
    outcome.tau = AcceptStats.of(drafted, draft_block_len).tau
    for index, (request, ours, theirs) in enumerate(zip(requests, drafted, plain, strict=True)):
        is_same_end = ours.finish_reason == theirs.finish_reason
        if ours.token_ids == theirs.token_ids and is_same_end:
            outcome.num_identical += 1
            continue
        shared, margin = margin_between(target, request, ours.token_ids, theirs.token_ids)
        is_tie = margin is not None and margin < NEAR_TIE
        found = {"prompt": index, "token": shared, "margin": margin}
        (outcome.near_ties if is_tie else outcome.differences).append(found)
    return outcome


def run_lossless(
    target: Model[TargetConfig],
    drafter: Model[DrafterConfig],
    requests: Mapping[str, Sequence[Request]],
    *,
    max_len: int,
    modes: Sequence[Mode] = MODES,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    on_answer: Callable[[str], object] = lambda what: None,
) -> Iterator[Outcome]:
    """Yields an outcome per mode, batch size and scene.

    Args:
      target: In float32.
      drafter: Its drafter.
      requests: Greedy requests by scene.
      max_len: Of prompt and answer.
      modes: Ways to draft.
      batch_sizes: Rows decoded at once.
      on_answer: Called with what is being run after every answer.
    """
    jobs = {
        scene: [dataclasses.replace(r, scene=scene) for r in scene_requests]
        for scene, scene_requests in requests.items()
    }
    engine = Engine(target, max_len=max_len)
    plain = {
        scene: _answers(engine, job, lambda: on_answer("plain")) for scene, job in jobs.items()
    }
    engines: dict[str, _HeldEngine] = {}  # modes that differ in the rung share their programs
    for mode in modes:
        for batch_size in batch_sizes:
            options = {"max_len": max_len, "batch_size": batch_size, **mode.options}
            key = repr(options)
            if key not in engines:
                engines[key] = _HeldEngine(target, drafter, **options)
            engine = engines[key]
            engine.rung = mode.rung
            what = f"{mode.name}, batch {batch_size}"
            for scene, job in jobs.items():
                drafted = _answers(engine, job, lambda what=what: on_answer(what))
                outcome = Outcome(mode.name, batch_size, scene)
                yield _compare(
                    outcome, target, job, plain[scene], drafted, engine.draft_block_len
                )
