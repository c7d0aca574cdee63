"""python -m pytest tests/e2e/test_nano.py

The embedded default, from its files to text: drafting changes nothing but the number of steps.
"""

import json
from pathlib import Path

import pytest

from mimo_jax import LLM
from mimo_jax.config import ConfigError
from mimo_jax.decode.stats import AcceptStats

CHECKPOINT, PROMPTS = Path("assets/mimo-nano"), Path("assets/prompts")
SCENES = ("code-stdlib", "code-gen", "math", "agent", "chat")
# Well below what BENCHMARKS.md has for 200 prompts: six prompts only.
LEAST_TAU = {"code-gen": 4.0, "math": 4.5, "agent": 4.0}


@pytest.fixture(scope="module")
def llm():
    return LLM.load(CHECKPOINT)


@pytest.mark.e2e
@pytest.mark.parametrize("scene", SCENES)
def test_drafting_changes_nothing_but_the_number_of_steps(llm, scene):
    lines = (PROMPTS / f"{scene}.jsonl").read_text().splitlines()
    assert len(lines) == 200
    prompts = [json.loads(line)["prompt"] for line in lines[:6]]
    answers = {
        draft: llm.generate(prompts, max_tokens=64, draft=draft, batch_size=3)
        for draft in (False, True)
    }
    assert [a.token_ids for a in answers[True]] == [a.token_ids for a in answers[False]]
    tau = AcceptStats.of([a.completion for a in answers[True]], llm.trained_block_len).tau
    assert tau > LEAST_TAU.get(scene, 1.0)


@pytest.mark.e2e
def test_chat_template_and_streaming(llm):
    messages = [{"role": "user", "content": "What is the sum of 20 and 23?"}]
    answer = llm.chat(messages, max_tokens=48)
    prompt = llm.render_chat(messages)
    assert prompt.startswith("<|im_start|>user\n")
    assert "".join(llm.stream(prompt, max_tokens=48)) == answer.text


@pytest.mark.e2e
def test_context_limit_is_one_line(llm):
    with pytest.raises(ConfigError, match="context of 512") as error:
        llm.generate([[20] * 512])
    assert "\n" not in str(error.value)
