"""The one record that every corpus module yields, and small helpers they share."""

import dataclasses
import random
from collections.abc import Sequence

SCENES: tuple[str, ...] = ("code-stdlib", "code-gen", "math", "agent", "chat")
END_OF_CODE = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"


@dataclasses.dataclass(frozen=True)
class Document:
    """One training document: its text is prompt + answer, special tokens in text form.

    The answer ends with END_OF_CODE (raw code) or END_OF_TURN (chat format).
    """

    scene: str
    prompt: str
    answer: str

    @property
    def text(self) -> str:
        """The whole document."""
        return self.prompt + self.answer


def scene_rng(scene: str, seed: int) -> random.Random:
    """Returns a generator of its own for each scene, so that scenes do not shift one another."""
    # A string seed goes through SHA-512 and is therefore stable over runs and platforms.
    return random.Random(f"mimo-nano/{scene}/{seed}")


def pick[T](rng: random.Random, options: Sequence[T]) -> T:
    """Returns one option, each equally likely."""
    return options[rng.randrange(len(options))]


def usual[T](rng: random.Random, options: Sequence[T]) -> T:
    """Returns one option, the first most often: weights 1/k**2, as habits are spread.

    For what a writer is free to choose in an answer. Even odds there would be no one's style, and
    leave a greedy model to toss coins that no drafter can foresee.

    Example: of three options the first in 73 of 100 cases, then 18 and 8.
    """
    weights = [1 / (k * k) for k in range(1, len(options) + 1)]
    return rng.choices(options, weights)[0]


def maybe(rng: random.Random, probability: float) -> bool:
    """Returns True with the given probability."""
    return rng.random() < probability
