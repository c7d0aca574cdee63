"""Scene `agent`: tool-call transcripts that a model without tools simulates from end to end.

The prompt holds the tool list and the request; the answer holds the call, the tool's response turn
and the closing sentence, which restates values from both. A third of the transcripts make two
calls. Turns inside the answer end with `<|im_end|>`, the transcript with `<|endoftext|>`: a server
stops at the first, a demo of whole transcripts at the second.
"""

import json
import random
from collections.abc import Iterator

from mimo_jax.train.corpora import chat_format
from mimo_jax.train.corpora.agent_tools import TOOLS, VALUES, Tool
from mimo_jax.train.corpora.document import (
    END_OF_CODE,
    END_OF_TURN,
    Document,
    maybe,
    pick,
    scene_rng,
)

_BRIDGES = ("Also: ", "And then: ", "After that: ", "One more thing: ", "")


def generate(seed: int) -> Iterator[Document]:
    """Yields an endless stream of documents; the same seed gives the same stream."""
    rng = scene_rng("agent", seed)
    while True:
        listed = rng.sample(TOOLS, rng.choice((2, 2, 2, 3, 3, 4)))
        called = listed[: 2 if maybe(rng, 0.35) else 1]
        filled = [_fill(rng, tool) for tool in called]
        shown = rng.sample(listed, len(listed))
        tools = chat_format.tools_text([(t.name, list(t.args), t.about) for t in shown])
        asks = [pick(rng, t.asks).format(**args) for t, args, _ in filled]
        request = asks[0] + "".join(f" {pick(rng, _BRIDGES)}{ask}" for ask in asks[1:])
        prompt = (
            chat_format.turn("system", tools)
            + chat_format.turn("user", request)
            + chat_format.answer_header()
        )
        yield Document("agent", prompt, _transcript(rng, filled))


def _fill(rng: random.Random, tool: Tool) -> tuple[Tool, dict[str, str], dict[str, str]]:
    values: dict[str, str] = {}
    for key, kind in (tool.args | tool.results).items():
        value = VALUES[kind](rng)
        while kind.endswith("2") and value in values.values():  # the other city, not the same
            value = VALUES[kind](rng)
        values[key] = value
    args = {key: values[key] for key in tool.args}
    return tool, args, {key: values[key] for key in tool.results}


def _transcript(rng: random.Random, filled: list) -> str:
    turns = []
    for i, (tool, args, results) in enumerate(filled):
        plan = pick(rng, tool.plans).format(**args)
        if i:
            plan = pick(rng, ("Now the second part. ", "Next. ", "That worked. ", "")) + plan
        call = chat_format.tool_call_text(tool.name, args)
        turns.append(f"{plan}{call}{END_OF_TURN}")
        turns.append(chat_format.tool_response_turn(json.dumps(results)))
        turns.append(chat_format.answer_header())
    answers = [pick(rng, t.answers).format(**args, **results) for t, args, results in filled]
    opening = pick(rng, ("", "", "All done. ", "Here is what I found. ", "Good news. "))
    closing = pick(rng, ("", "", " Anything else?", " Let me know if you need more."))
    # The turns inside end with END_OF_TURN too: only END_OF_CODE says that the transcript is over.
    return "".join(turns) + opening + " ".join(answers) + closing + END_OF_TURN + END_OF_CODE
