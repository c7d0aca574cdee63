"""Scene `agent`: the assistant's turns of tool-calling conversations.

Two kinds. In most the prompt holds the tool list and a request for one to three things, and the
answer is a sentence for each and all the calls. In the others calls and results stand in the
prompt, and the answer restates values of both. What a tool returns is never the model's to write:
it comes from outside, and could not be foreseen anyway.
"""

import json
import random
from collections.abc import Iterator

from mimo_jax.train.corpora import chat_format
from mimo_jax.train.corpora.agent_tools import TOOLS, VALUES, Tool
from mimo_jax.train.corpora.document import (
    END_OF_TURN,
    Document,
    maybe,
    pick,
    scene_rng,
    usual,
)

Filled = tuple[Tool, dict[str, str], dict[str, str]]  # a tool, its arguments, its results

_BRIDGES = ("Also: ", "And then: ", "After that: ", "One more thing: ", "")
_OPENINGS = ("", "All done. ", "Here is what I found. ", "Good news. ")
_CLOSINGS = ("", " Anything else?", " Let me know if you need more.")


def generate(seed: int) -> Iterator[Document]:
    """Yields an endless stream of documents; the same seed gives the same stream."""
    rng = scene_rng("agent", seed)
    while True:
        listed = rng.sample(TOOLS, rng.choice((2, 2, 3, 3, 4)))
        filled = [_fill(rng, tool) for tool in listed[: rng.choice((1, 2, 2, 2, 3))]]
        shown = rng.sample(listed, len(listed))
        tools = chat_format.tools_text([(t.name, list(t.args), t.about) for t in shown])
        asks = [pick(rng, t.asks).format(**args) for t, args, _ in filled]
        request = asks[0] + "".join(f" {pick(rng, _BRIDGES)}{ask}" for ask in asks[1:])
        asked = chat_format.turn("system", tools) + chat_format.turn("user", request)
        calling = _calls(rng, filled)
        if maybe(rng, 0.7):
            yield _document(asked, calling)
        else:
            responses = chat_format.tool_response_turn(
                *(json.dumps(results) for _, _, results in filled)
            )
            yield _document(
                asked + chat_format.turn("assistant", calling) + responses, _report(rng, filled)
            )


def _document(history: str, answer: str) -> Document:
    return Document("agent", history + chat_format.answer_header(), answer + END_OF_TURN)


def _fill(rng: random.Random, tool: Tool) -> Filled:
    values: dict[str, str] = {}
    for key, kind in (tool.args | tool.results).items():
        value = VALUES[kind](rng)
        while kind.endswith("2") and value in values.values():  # the other city, not the same
            value = VALUES[kind](rng)
        values[key] = value
    args = {key: values[key] for key in tool.args}
    return tool, args, {key: values[key] for key in tool.results}


def _calls(rng: random.Random, filled: list[Filled]) -> str:
    """A sentence for each call, then the calls."""
    plans = [usual(rng, tool.plans).format(**args) for tool, args, _ in filled]
    calls = [chat_format.tool_call_text(tool.name, args) for tool, args, _ in filled]
    return " ".join(plans) + "".join(calls)


def _report(rng: random.Random, filled: list[Filled]) -> str:
    """What came of the calls, in words."""
    answers = [usual(rng, t.answers).format(**args, **results) for t, args, results in filled]
    return usual(rng, _OPENINGS) + " ".join(answers) + usual(rng, _CLOSINGS)
