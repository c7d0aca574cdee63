"""Corpora of the demo: determinism, split, form, truth. Run: pytest tests/train/test_corpora.py"""

import ast
import itertools
import json
import re
import string
import sys

import pytest

from mimo_jax.train.corpora import (
    agent,
    agent_tools,
    build,
    chat,
    code_gen,
    code_stdlib,
    math_problems,
)
from mimo_jax.train.corpora.arithmetic import add, divide, multiply, subtract
from mimo_jax.train.corpora.document import END_OF_CODE, END_OF_TURN, SCENES, Document

GENERATORS = {
    "code-gen": code_gen.generate,
    "math": math_problems.generate,
    "agent": agent.generate,
    "chat": chat.generate,
}
NUM_HELDOUT = 20
SIZES: dict[str, int] = dict.fromkeys(SCENES, 60_000)


@pytest.fixture(scope="module")
def corpus():
    return build.build_corpus(seed=3, target_chars=SIZES, num_heldout=NUM_HELDOUT)


def take(scene: str, seed: int, count: int) -> list[Document]:
    return list(itertools.islice(GENERATORS[scene](seed), count))


@pytest.mark.parametrize("scene", GENERATORS)
def test_generators_are_deterministic_and_follow_the_seed(scene):
    assert take(scene, 1, 30) == take(scene, 1, 30)
    assert take(scene, 1, 30) != take(scene, 2, 30)


@pytest.mark.parametrize("scene", GENERATORS)
def test_generators_rarely_repeat(scene):
    texts = [document.text for document in take(scene, 5, 400)]
    assert len(set(texts)) >= 396


def test_corpus_is_deterministic(corpus):
    again = build.build_corpus(3, SIZES, NUM_HELDOUT, scenes=["math", "chat"])
    for scene in ("math", "chat"):
        assert again.train[scene] == corpus.train[scene]
        assert again.heldout[scene] == corpus.heldout[scene]


def test_no_heldout_prompt_or_document_is_in_training(corpus):
    for scene in SCENES:
        texts = {" ".join(document.text.split()) for document in corpus.train[scene]}
        prompts = {" ".join(document.prompt.split()) for document in corpus.train[scene]}
        for document in corpus.heldout[scene]:
            assert " ".join(document.text.split()) not in texts
            assert " ".join(document.prompt.split()) not in prompts


def test_overlap_is_noticed():
    one, two = Document("math", "p", "a"), Document("math", " p\n", "b")
    with pytest.raises(AssertionError):
        build.assert_disjoint(build.Corpus({"math": [one]}, {"math": [two]}))


def test_repeats_are_dropped_before_the_split(monkeypatch):
    long = "x" * build.DEMO_MIN_ANSWER_CHARS
    pool = [Document("math", f"p{i % 9}", f"{long}{i % 30}") for i in range(3000)]
    monkeypatch.setattr(build, "_GENERATORS", {"math": lambda seed: iter(pool)})
    made = build.build_corpus(0, {"math": 40_000}, num_heldout=4, scenes=["math"])
    assert len({d.prompt for d in made.heldout["math"]}) == 4
    assert not {d.prompt for d in made.heldout["math"]} & {d.prompt for d in made.train["math"]}
    assert len(made.train["math"]) == len(set(made.train["math"]))


@pytest.mark.parametrize("scene", SCENES)
def test_heldout_documents_suit_a_demo(corpus, scene):
    assert len(corpus.heldout[scene]) == NUM_HELDOUT
    for document in corpus.heldout[scene]:
        assert document.scene == scene
        assert 0 < len(document.prompt) <= build.DEMO_MAX_PROMPT_CHARS
        assert len(document.answer) >= build.DEMO_MIN_ANSWER_CHARS


@pytest.mark.parametrize("scene", SCENES)
def test_documents_end_with_their_end_token(corpus, scene):
    end = {"agent": END_OF_TURN, "math": END_OF_TURN, "chat": END_OF_TURN}
    for document in corpus.train[scene]:
        assert document.prompt.strip()
        assert document.answer.endswith(end.get(scene, END_OF_CODE))
        if scene in end:
            assert document.prompt.endswith("<|im_end|><|im_start|>assistant\n") or (
                document.prompt == "<|im_start|>assistant\n"
            )
        else:
            assert "<|" not in document.prompt


@pytest.mark.parametrize("scene", ["code-gen", "code-stdlib"])
def test_code_is_valid_python(corpus, scene):
    for document in corpus.train[scene]:
        ast.parse(document.text.removesuffix(END_OF_CODE))


def test_generated_functions_say_what_they_do():
    for document in take("code-gen", 7, 60):
        module = ast.parse(document.prompt + "    pass\n")
        (node,) = module.body
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        assert ast.get_docstring(node)


def test_stdlib_files_stay_on_one_side(corpus):
    heldout = {document.text for document in corpus.heldout["code-stdlib"]}
    assert not heldout & {document.text for document in corpus.train["code-stdlib"]}


EQUATION = re.compile(r"(?<![-+*/] )(?<!\d)(\d+) ([-+*/]) (\d+) = (\d+)(?![\d]| [-+*/] )")
RESULTS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


def test_math_is_true():
    num_equations = 0
    for document in take("math", 11, 1500):
        for a, sign, b, c in EQUATION.findall(document.answer):
            assert RESULTS[sign](int(a), int(b)) == int(c), document.text
            num_equations += 1
        final = re.fullmatch(r".*\D(\d+)\.\n#### (\d+)<\|im_end\|>", document.answer, re.DOTALL)
        assert final, document.answer
        assert final[1] == final[2]
        # The last equation gives the result, apart from the reason of a division and a check.
        work = re.sub(r" because \d+ \* \d+ = \d+", "", document.answer).split("Check:")[0]
        assert re.findall(r"= (\d+)", work)[-1] == final[2], document.answer
    assert num_equations > 5000


def test_arithmetic_examples():
    assert add(47, 38) == "7 + 8 = 15 and 40 + 30 = 70, so 47 + 38 = 70 + 15 = 85"
    assert add(120, 7) == "120 + 7 = 127"
    assert add(145, 28) == "140 + 20 = 160, plus 13 gives 145 + 28 = 173"
    assert subtract(52, 17) == "52 - 10 = 42 and 42 - 7 = 35, so 52 - 17 = 35"
    assert multiply(23, 4) == "20 * 4 = 80 and 3 * 4 = 12, so 23 * 4 = 80 + 12 = 92"
    assert divide(42, 6) == "42 / 6 = 7 because 6 * 7 = 42"


@pytest.mark.parametrize("tool", agent_tools.TOOLS, ids=lambda tool: tool.name)
def test_tool_sentences_use_known_fields(tool):
    assert not set(tool.args) & set(tool.results)
    known = {**tool.args, **tool.results}
    assert set(known.values()) <= set(agent_tools.VALUES)
    for sentence in tool.asks:
        assert fields_of(sentence) == set(tool.args)  # else the call could not be known
    for sentence in tool.plans:
        assert fields_of(sentence) <= set(tool.args)
    for sentence in tool.answers:
        assert set(tool.results) <= fields_of(sentence) <= set(known)


def fields_of(sentence: str) -> set[str]:
    return {field for _, field, _, _ in string.Formatter().parse(sentence) if field}


def test_tool_calls_copy_the_request_and_answers_copy_the_response():
    num_reports = 0
    for document in take("agent", 13, 100):
        request, *called = document.prompt.split("<|im_start|>assistant\n")[:-1]
        responses = re.findall(r"<tool_response>(.*?)</tool_response>", document.prompt)
        calling = called[0] if called else document.answer
        calls = re.findall(r"<tool_call><function=(\w+)>(.*?)</function>", calling)
        assert len(calls) in (1, 2, 3)
        for name, arguments in calls:
            assert f"\n{name}(" in request
            for value in re.findall(r"<parameter=\w+>(.*?)</parameter>", arguments):
                assert value in request
        assert "<tool_response>" not in document.answer  # what a tool says is not the model's
        assert len(responses) == (len(calls) if called else 0)
        for response in responses:
            assert all(value in document.answer for value in json.loads(response).values())
        num_reports += bool(called)
    assert 15 <= num_reports <= 45


def test_chat_speaks_to_the_listener():
    answers = [document.answer for document in take("chat", 17, 1500)]
    assert not any("yyour" in answer for answer in answers)
    assert not any(re.search(r"\bmy (sister|brother|mother|father|aunt)", a) for a in answers)


def test_chat_works_without_the_optional_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "chatterbot_corpus", None)
    assert list(chat.read_chatterbot()) == []
    made = build.build_corpus(0, {"chat": 20_000}, num_heldout=5, scenes=["chat"])
    assert len(made.train["chat"]) > 20


def test_prompts_file(corpus, tmp_path):
    paths = build.write_prompts(corpus, tmp_path)
    assert [path.name for path in paths] == [f"{scene}.jsonl" for scene in SCENES]
    lines = [json.loads(line) for line in paths[2].read_text(encoding="utf-8").splitlines()]
    assert len(lines) == NUM_HELDOUT
    assert lines[0] == {
        "id": "math-0001",
        "scene": "math",
        "prompt": corpus.heldout["math"][0].prompt,
    }


def test_errors_name_the_thing(monkeypatch):
    files = code_stdlib.stdlib_files()[:8]
    monkeypatch.setattr(code_stdlib, "stdlib_files", lambda: list(files))
    with pytest.raises(ValueError, match="scene 'poems': allowed are code-stdlib, code-gen"):
        build.build_corpus(scenes=["poems"])
    with pytest.raises(ValueError, match="scene code-stdlib: .* held-out documents, 99999 wanted"):
        build.build_corpus(0, SIZES, num_heldout=99_999, scenes=["code-stdlib"])
