"""Builds the demo's corpus: every scene, split into training and held-out documents.

Trap: the first prototype split before it removed duplicates, and 48 % of the held-out generated
functions also stood in the training set. Here duplicates go first, and no held-out prompt or
document occurs on the training side; `build_corpus` proves it before it returns.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from absl import logging

from mimo_jax.train.corpora import agent, chat, code_gen, code_stdlib, math_problems
from mimo_jax.train.corpora.document import SCENES, Document, scene_rng

# Training characters per scene. code-stdlib takes all that the interpreter brings (about 4e6).
TARGET_CHARS = {
    "code-stdlib": 20_000_000,
    "code-gen": 9_000_000,
    "math": 8_000_000,
    "agent": 8_000_000,
    "chat": 4_000_000,
}
DEMO_MAX_PROMPT_CHARS = 360  # about 120 tokens
DEMO_MIN_ANSWER_CHARS = 250  # short answers cap the accept length
_GENERATORS: Mapping[str, Callable[[int], Iterator[Document]]] = {
    "code-gen": code_gen.generate,
    "math": math_problems.generate,
    "agent": agent.generate,
    "chat": chat.generate,
}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents by scene; no held-out prompt or document occurs in train."""

    train: dict[str, list[Document]]
    heldout: dict[str, list[Document]]


def build_corpus(
    seed: int = 0,
    target_chars: Mapping[str, int] | None = None,
    num_heldout: int = 200,
    scenes: Iterable[str] = SCENES,
) -> Corpus:
    """Generates and reads all scenes, removes duplicates, and splits.

    Held-out documents prefer short prompts and long answers (the DEMO_ limits), so that they can
    serve as demo prompts; of code-stdlib whole files are held out.

    Args:
        seed: Decides everything that is random.
        target_chars: Training characters per scene; missing scenes use TARGET_CHARS.
        num_heldout: Held-out documents per scene.
        scenes: The scenes to build, of SCENES.

    Returns:
        Corpus, documents of a scene in random but fixed order.

    Raises:
        ValueError: If a scene is unknown or yields too few documents.
    """
    sizes = dict(TARGET_CHARS) | dict(target_chars or {})
    train: dict[str, list[Document]] = {}
    heldout: dict[str, list[Document]] = {}
    for scene in scenes:
        if scene not in SCENES:
            raise ValueError(f"scene {scene!r}: allowed are {', '.join(SCENES)}")
        split = _split_stdlib if scene == "code-stdlib" else _split_generated
        train[scene], heldout[scene] = split(scene, seed, sizes[scene], num_heldout)
        if len(heldout[scene]) < num_heldout or not train[scene]:
            raise ValueError(
                f"scene {scene}: {len(heldout[scene])} held-out documents, {num_heldout} wanted; "
                "raise target_chars or lower num_heldout"
            )
        logging.info("%s: %d train, %d held out", scene, len(train[scene]), len(heldout[scene]))
    corpus = Corpus(train, heldout)
    assert_disjoint(corpus)
    return corpus


def write_prompts(corpus: Corpus, directory: str | Path) -> list[Path]:
    """Writes the held-out prompts as `SCENE.jsonl` into directory and returns the paths.

    Each line is `{"id": "math-0001", "scene": "math", "prompt": "..."}`; special tokens stay text.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for scene, documents in corpus.heldout.items():
        path = directory / f"{scene}.jsonl"
        with path.open("w", encoding="utf-8", newline="\n") as file:
            for i, document in enumerate(documents, start=1):
                line = {"id": f"{scene}-{i:04d}", "scene": scene, "prompt": document.prompt}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        paths.append(path)
    return paths


def assert_disjoint(corpus: Corpus) -> None:
    """Raises AssertionError if a held-out prompt or document occurs on the training side."""
    train_prompts, train_texts = set(), set()
    for documents in corpus.train.values():
        train_prompts.update(normalised(d.prompt) for d in documents)
        train_texts.update(normalised(d.text) for d in documents)
    for scene, documents in corpus.heldout.items():
        for document in documents:
            assert normalised(document.prompt) not in train_prompts, (scene, document.prompt)
            assert normalised(document.text) not in train_texts, (scene, document.prompt)


def normalised(text: str) -> str:
    """Returns text with every run of white space as one blank."""
    return " ".join(text.split())


def _is_demo(document: Document) -> bool:
    return (
        len(document.prompt) <= DEMO_MAX_PROMPT_CHARS
        and len(document.answer) >= DEMO_MIN_ANSWER_CHARS
    )


def _unique(documents: Iterable[Document]) -> Iterator[Document]:
    seen: set[str] = set()
    for document in documents:
        key = normalised(document.text)
        if key not in seen:
            seen.add(key)
            yield document


def _split_generated(
    scene: str, seed: int, num_chars: int, num_heldout: int
) -> tuple[list[Document], list[Document]]:
    """Holds out the first demo-like documents; training takes whatever has another prompt."""
    heldout: dict[str, Document] = {}
    passed_over: list[Document] = []
    stream = _unique(_GENERATORS[scene](seed))
    while len(heldout) < num_heldout:
        document = next(stream)
        prompt = normalised(document.prompt)
        if _is_demo(document) and prompt not in heldout:
            heldout[prompt] = document
        else:
            passed_over.append(document)
    train: list[Document] = []
    total = 0
    extra = chat.read_chatterbot() if scene == "chat" else ()
    for document in itertools.chain(extra, passed_over, stream):
        if total >= num_chars:
            break
        if normalised(document.prompt) not in heldout:
            train.append(document)
            total += len(document.text)
    scene_rng(f"{scene}/order", seed).shuffle(train)
    return train, list(heldout.values())


def _split_stdlib(
    scene: str, seed: int, num_chars: int, num_heldout: int
) -> tuple[list[Document], list[Document]]:
    """Holds out whole files, about one in ten, then drops what occurs on both sides."""
    rng = scene_rng(f"{scene}/files", seed)
    files = code_stdlib.stdlib_files()
    rng.shuffle(files)
    candidates: list[Document] = []
    train: list[Document] = []
    total = 0
    for file in files:
        documents = list(code_stdlib.read_file(file))
        if sum(map(_is_demo, candidates)) < num_heldout * 3 // 2:
            candidates += documents
        elif total < num_chars:
            train += documents
            total += sum(len(document.text) for document in documents)
        else:
            break
    train = list(_unique(train))
    known = {normalised(d.prompt) for d in train} | {normalised(d.text) for d in train}
    fresh = {
        normalised(d.prompt): d
        for d in candidates
        if normalised(d.prompt) not in known and normalised(d.text) not in known
    }
    rng.shuffle(train)
    heldout = list(fresh.values())
    rng.shuffle(heldout)
    heldout.sort(key=lambda document: not _is_demo(document))  # stable: demo-like ones first
    return train, heldout[:num_heldout]
