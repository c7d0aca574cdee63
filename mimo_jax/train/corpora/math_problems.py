"""Scene `math`: word problems with a worked solution, ending in a line `#### N`.

Each problem function returns (question, steps, result). Numbers stay small and every product is
split into partial products, because a model of four million parameters learns steps, not tables.
"""

import random
from collections.abc import Callable, Iterator

from mimo_jax.train.corpora import math_puzzles as puzzles
from mimo_jax.train.corpora import math_stories as stories
from mimo_jax.train.corpora.chat_format import question_prompt
from mimo_jax.train.corpora.document import END_OF_TURN, Document, maybe, pick, scene_rng, usual
from mimo_jax.train.corpora.math_words import Problem

MAX_QUESTION_CHARS, MIN_ANSWER_CHARS = 320, 160
OPENINGS = (
    "Let us go step by step.", "We solve it in steps.", "First we look at what is given.",
    "Here is the work.", "Let us count carefully.", "We can find this in a few steps.",
    "Take it one step at a time.", "Start from what we know.",
)  # fmt: skip
CLOSINGS = (
    "So the answer is {n}.", "The answer is {n}.", "That makes {n}.", "The result is {n}.",
    "Hence we get {n}.", "In the end it is {n}.",
)  # fmt: skip
# Drawn evenly; the open-ended story counts four times.
PROBLEMS: tuple[Callable[[random.Random], Problem], ...] = (
    stories.story,
    stories.story,
    stories.story,
    stories.story,
    stories.boxes,
    stories.boxes_given,
    stories.change,
    stories.savings,
    stories.ages,
    stories.age_future,
    puzzles.rectangle,
    stories.travel,
    stories.pages,
    puzzles.average,
    puzzles.percent,
    stories.share,
    stories.compare,
    stories.wages,
    puzzles.equation,
    puzzles.expression,
    puzzles.brackets,
    puzzles.sum_list,
    puzzles.sequence,
    puzzles.clock,
    stories.recipe,
    puzzles.temperature,
    stories.team_points,
    stories.bus,
    puzzles.coins,
    puzzles.reverse,
    stories.two_sorts,
    stories.growth,
)


def generate(seed: int) -> Iterator[Document]:
    """Yields an endless stream of documents; the same seed gives the same stream."""
    rng = scene_rng("math", seed)
    while True:
        question, steps, result = pick(rng, PROBLEMS)(rng)
        if result < 0:
            continue
        opening = [usual(rng, OPENINGS)] if maybe(rng, 0.7) else []
        closing = usual(rng, CLOSINGS).format(n=result)
        if maybe(rng, 0.3):
            lines = [f"Step {i}: {step}" for i, step in enumerate(steps, start=1)]
            body = "\n".join([*opening, *lines, closing])
        else:
            body = " ".join([*opening, *steps, closing])
        answer = f"{body}\n#### {result}{END_OF_TURN}"
        if len(question) <= MAX_QUESTION_CHARS and len(answer) >= MIN_ANSWER_CHARS:
            yield Document("math", question_prompt(question), answer)
