"""The target answers prompts: self-distillation text for a drafter.

A drafter must predict what its target would say, not what the corpus says (the difference is
largest where the target is wrong about the corpus). Prompts come from packed training rows; they
are decoded through the engine in one continuous batch, some greedily, the rest sampled. A file of
prompts is `answer_job`.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import GREEDY, SAMPLED
from mimo_jax.train.config import RegenerateConfig
from mimo_jax.train.data import PackedRows, documents_of, prompt_of


def prompts_of(rows: PackedRows) -> Iterator[list[int]]:
    """Prompt ids of every document."""
    return map(prompt_of, documents_of(rows))


def regenerate(
    target: Model,
    prompts: Sequence[list[int]],
    config: RegenerateConfig,
    *,
    stop_ids: tuple[int, ...],
    row_len: int,
    num_tokens: int,
    seed: int,
    greedy_only: bool = False,
    drafter: Model | None = None,
    on_progress: Callable[[int], None] = lambda num_tokens: None,
) -> list[tuple[list[int], list[int]]]:
    """Answers prompts until about num_tokens tokens are generated or prompts run out.

    Args:
      target: The target.
      prompts: Token ids; shuffled by seed, prompts over 3/4 of row_len are left out.
      config: Temperature, shares and lengths.
      stop_ids: End an answer.
      row_len: Longest prompt + answer.
      num_tokens: Generated tokens wanted.
      seed: Of the shuffle, of the greedy share and of the noise.
      greedy_only: Ignore greedy_share.
      drafter: Of the target, from an earlier round: the answers to the same prompts are the same,
        and come sooner. How many prompts fit into num_tokens may differ, as rows finish in another
        order.
      on_progress: Called with the number of tokens so far.

    Returns:
      (prompt ids, answer ids) in order of the shuffled prompts.
    """
    rng = np.random.default_rng(seed)
    usable = [p for p in prompts if 0 < len(p) <= row_len * 3 // 4]
    order = rng.permutation(len(usable))
    is_greedy = rng.random(len(usable)) < (1.0 if greedy_only else config.greedy_share)
    generated = 0
    sent: list[list[int]] = []

    def requests():
        for number, i in enumerate(order):
            if generated >= num_tokens:
                return
            prompt = usable[i]
            sent.append(prompt)
            yield Request(
                prompt,
                max_tokens=min(config.max_tokens, row_len - len(prompt)),
                stop_ids=stop_ids,
                temperature=0.0 if is_greedy[number] else config.temperature,
                seed=int((seed * 1_000_003 + number) % 2**31),
            )

    engine = Engine(
        target,
        drafter,
        max_len=row_len,
        batch_size=min(config.batch_size, len(usable)),
        mode=GREEDY if greedy_only else SAMPLED,
    )
    answers: dict[int, list[int]] = {}
    for index, completion in generate(engine, requests(), steps_per_group=16):
        answers[index] = completion.token_ids
        generated += len(completion.token_ids)
        on_progress(generated)
    return [(sent[index], answers[index]) for index in sorted(answers)]
