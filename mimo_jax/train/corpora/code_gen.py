"""Scene `code-gen`: generated small Python functions and classes that follow their docstring.

Problem: with a handful of templates a drafter predicts everything and the accept length sits at its
ceiling, which measures nothing.
Choice: chain random stages (see code_stages), so that the docstring determines the code, down to
the names of temporaries, which follow one convention. (With free names the target's greedy choice
among them was a toss of a coin: accept length 4.5.) Every document is valid Python.
"""

import random
from collections.abc import Iterator

from mimo_jax.train.corpora import code_words as words
from mimo_jax.train.corpora.code_classes import write_class
from mimo_jax.train.corpora.code_draft import Draft
from mimo_jax.train.corpora.code_stages import STAGES
from mimo_jax.train.corpora.code_stages_lists import guard_empty
from mimo_jax.train.corpora.document import END_OF_CODE, Document, maybe, pick, scene_rng

MIN_ANSWER_CHARS, MAX_ANSWER_CHARS = 250, 620
MAX_PROMPT_CHARS = 420


def generate(seed: int) -> Iterator[Document]:
    """Yields an endless stream of documents; the same seed gives the same stream."""
    rng = scene_rng("code-gen", seed)
    while True:
        prompt, body = write_class(rng) if maybe(rng, 0.2) else _function(rng)
        answer = body + "\n" + END_OF_CODE
        if MIN_ANSWER_CHARS <= len(answer) <= MAX_ANSWER_CHARS and len(prompt) <= MAX_PROMPT_CHARS:
            yield Document("code-gen", prompt, answer)


def _function(rng: random.Random) -> tuple[str, str]:
    draft, source = _start(rng)
    if maybe(rng, 0.4):
        guard_empty(draft)
    for _ in range(rng.randint(3, 6)):
        pick(rng, STAGES[draft.kind])(draft)
        if draft.kind == "string" and maybe(rng, 0.6):
            break
    verb = pick(rng, words.FINAL_NAMES[draft.kind])
    name = f"{verb}_{source}"
    if maybe(rng, 0.35):
        name += pick(rng, ("_by_rule", "_v2", "_once", "_safe", "_fast", "_now", "_again"))
    head = f"def {name}({', '.join([source, *draft.params])}):\n"
    if maybe(rng, 0.5):
        doc = f'    """{_wrapped(" ".join(draft.doc))}"""\n'
    else:
        steps = "".join(f"    - {sentence}\n" for sentence in draft.doc)
        doc = f'    """{verb.capitalize()} {source}.\n\n{steps}    """\n'
    lines = [*draft.body, f"return {draft.var}"]
    return head + doc, "\n".join("    " + line for line in lines)


def _start(rng: random.Random) -> tuple[Draft, str]:
    """Returns a draft and the name of the function's first parameter."""
    roll = rng.randrange(8)
    if roll < 4:
        plural, singular, nums, texts, flags = pick(rng, words.RECORDS)
        draft = Draft(rng, "records", plural, singular, (nums, texts, flags))
    elif roll == 4:
        draft = Draft(rng, "numbers", *pick(rng, words.NUMBERS))
    elif roll == 5:
        draft = Draft(rng, "strings", *pick(rng, words.STRINGS))
    elif roll == 6:
        var, key, _ = pick(rng, words.MAPPINGS)
        draft = Draft(rng, "mapping", var, key)
    else:
        plural, singular = pick(rng, words.STRINGS)
        text = pick(rng, words.TEXT_ARGS)
        sep = pick(rng, (",", ";", "|", ":", "\\n"))
        singular = singular if singular != text else f"one_{singular}"
        draft = Draft(rng, "strings", plural, singular, used={text})
        draft.add(f"Split {text} at '{sep}' into {plural}.", f'{plural} = {text}.split("{sep}")')
        draft.used |= {plural, singular}
        return draft, text
    draft.used |= {draft.var, draft.item}
    return draft, draft.var


def _wrapped(text: str, width: int = 84) -> str:
    """Breaks text into lines of at most width characters, indented for a docstring."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return "\n    ".join(lines)
