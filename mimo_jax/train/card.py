"""The card of an exported drafter: a README.md made from what the run recorded, and nothing else.

Problem: a drafter is worth what its accept length is on the text and in the mode that it was made
for, and one of another target, template or thinking mode is worth nothing; yet a directory of
weights says none of that. Choice: the export carries a card in the layout of a model hub (YAML in
front, then text) that says the target's hash, the data, the steps, and the accept length per scene
and slot as they were measured at the end. No figure stands in it that was not measured.

Source: front matter as in Hugging Face model cards (`base_model`, `tags`, `library_name`).
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import jinja2

from mimo_jax.config import DrafterConfig


@dataclasses.dataclass(frozen=True)
class Measured:
    """Accept length of one scene in one mode, decoded with the exported weights.

    Attributes:
      scene: Its name.
      temperature: 0 is greedy.
      num_prompts: Held-out prompts that were answered.
      accept_length: Mean tokens committed per step.
      acceptance: Share of steps that accept slot k among those that accepted all before it.
    """

    scene: str
    temperature: float
    num_prompts: int
    accept_length: float
    acceptance: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class CardFacts:
    """What a card says.

    Attributes:
      name: Of the drafter.
      target: Of the target, as its makers call it.
      target_hash: Of the files of the target's directory.
      drafter: The architecture.
      num_parameters: Trained parameters.
      data: What it was trained on, a line each.
      num_steps: Optimizer steps in all rounds.
      num_signals: Draft slots with a label that it learned from; None where nobody counted.
      sampling: How the target answered: temperature, shares, thinking.
      measured: Accept lengths, at least one.
      provenance: `provenance.record` of the run.
    """

    name: str
    target: str
    target_hash: str
    drafter: DrafterConfig
    num_parameters: int
    data: Sequence[str]
    num_steps: int
    num_signals: int | None
    sampling: Mapping[str, object]
    measured: Sequence[Measured]
    provenance: Mapping[str, object]


def card_text(facts: CardFacts) -> str:
    """The card as Markdown with YAML in front.

    Args:
      facts: What was recorded and measured.

    Returns:
      The whole README.md, ending in a newline.

    Raises:
      ValueError: If nothing was measured: a drafter without an accept length says nothing.

    Example: `Measured("math", 0.0, 40, 5.62, (0.9, 0.8))` gives the row
      `| math | 0 | 40 | 5.62 | 0.90 0.80 |`.
    """
    if not facts.measured:
        raise ValueError("a card needs at least one measured accept length")
    source = resources.files("mimo_jax.train").joinpath("card.md.jinja").read_text("utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    front = {
        "base_model": facts.target,
        "library_name": "mimo_jax",
        "tags": ["dflash", "speculative-decoding", "drafter"],
    }
    return environment.from_string(source).render(
        front=front, facts=facts, drafter=facts.drafter, provenance=facts.provenance
    )


def write_card(directory: Path, facts: CardFacts) -> Path:
    """Writes README.md, and measured.json with the same figures, into an exported directory.

    Returns:
      The card's path.
    """
    path = directory / "README.md"
    path.write_text(card_text(facts), encoding="utf-8")
    figures = [dataclasses.asdict(m) for m in facts.measured]
    (directory / "measured.json").write_text(json.dumps(figures, indent=1) + "\n")
    return path
