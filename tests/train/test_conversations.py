"""Run: pytest tests/train/test_conversations.py"""

from pathlib import Path

import pytest

from mimo_jax.config import ConfigError
from mimo_jax.text.chat import load_chat_template
from mimo_jax.text.tokenizer import Tokenizer
from mimo_jax.train.conversations import (
    Tally,
    TextFormat,
    document_of,
    documents,
    prompt_ids_of,
)
from mimo_jax.train.records import parse_record
from mimo_jax.train.thinking import OFF, ON

NANO = Path(__file__).parents[2] / "assets" / "mimo-nano"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
# Thinking of all but the last turn is dropped, as Qwen3 does.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last or m.role == 'user' %}{{ m.content }}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
ASKS = [{"role": "user", "content": text} for text in ("2+2?", "And 3+3?")]
SAYS = [{"role": "assistant", "content": text} for text in ("4", "It is 6.")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(NANO)


def make_format(tokenizer: Tokenizer, template: str | None = CHATML, **fields) -> TextFormat:
    return TextFormat(tokenizer, template, **({"vocab_size": 2048} | fields))


def learned(tokenizer: Tokenizer, document) -> list[str]:
    """Texts of the stretches that are learned and (in brackets) that are not."""
    texts, last = [], None
    for token_id, is_learned in zip(*document, strict=True):
        if is_learned != last:
            texts.append([])
        texts[-1].append(token_id)
        last = is_learned
    return [tokenizer.decode(ids, skip_special=False) for ids in texts]


def test_chatml_by_hand(tokenizer: Tokenizer) -> None:
    record = parse_record({"messages": [SYSTEM, ASKS[0], SAYS[0], ASKS[1], SAYS[1]]}, "x:1")
    document = document_of(make_format(tokenizer), record, Tally())
    assert document is not None
    assert not document.loss_mask[0]
    assert learned(tokenizer, document) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n",
        "4<|im_end|>",
        "\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n",
        "It is 6.<|im_end|>",
        "\n",
    ]


def test_the_embedded_template_by_hand(tokenizer: Tokenizer) -> None:
    """It writes no newline between turns, and tool results as turns of the user."""
    call = {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "add", "arguments": '{"a": 1}'}}
    ]}
    messages = [ASKS[0], call, {"role": "tool", "content": "4"}, SAYS[0]]
    tools = [{"function": {"name": "add", "description": "Adds."}}]
    record = parse_record({"messages": messages, "tools": tools}, "x:1")
    template = load_chat_template(NANO)
    document = document_of(make_format(tokenizer, template), record, Tally())
    assert document is not None
    assert learned(tokenizer, document) == [
        "<|im_start|>system\nYou can call these tools:\nadd(): Adds.<|im_end|>"
        "<|im_start|>user\n2+2?<|im_end|><|im_start|>assistant\n",
        "<tool_call><function=add><parameter=a>1</parameter></function></tool_call><|im_end|>",
        "<|im_start|>user\n<tool_response>4</tool_response><|im_end|><|im_start|>assistant\n",
        "4<|im_end|>",
    ]
    assert prompt_ids_of(make_format(tokenizer, template), record) == document.token_ids[: -2]


def test_ids_are_those_of_decode_time(tokenizer: Tokenizer) -> None:
    """The answer begins with spaces: tokenized with its prompt, newline and spaces were one."""
    says = {"role": "assistant", "content": "    return"}
    record = parse_record({"messages": [ASKS[0], says]}, "x:1")
    document = document_of(make_format(tokenizer), record, Tally())
    assert document is not None
    prompt = prompt_ids_of(make_format(tokenizer), record)
    assert document.token_ids[: len(prompt)] == prompt
    assert document.loss_mask.index(True) == len(prompt)
    text = tokenizer.decode(document.token_ids, skip_special=False)
    assert tokenizer.encode(text) != document.token_ids


def test_a_template_that_rewrites_history(tokenizer: Tokenizer) -> None:
    thinks = [{**m, "content": f"hm</think>{m['content']}"} for m in SAYS]
    messages = [ASKS[0], thinks[0], ASKS[1], thinks[1]]
    tally = Tally()
    format_ = make_format(tokenizer, FORGETFUL)
    document = document_of(format_, parse_record({"messages": messages}, "x:1"), tally)
    assert document is not None
    assert learned(tokenizer, document) == [
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n"
        "And 3+3?<|im_end|>\n<|im_start|>assistant\n",
        "hm</think>It is 6.<|im_end|>",
        "\n",
    ]
    assert tally.num_last_turn_only == 1
    assert tally.num_learned == sum(document.loss_mask)


def test_thinking_is_the_template_s_variable(tokenizer: Tokenizer) -> None:
    record = parse_record({"messages": [ASKS[0], SAYS[0]]}, "x:7")
    prompts = [prompt_ids_of(make_format(tokenizer, thinking=t), record) for t in (ON, OFF)]
    ends = [tokenizer.decode(ids, skip_special=False).rpartition("\n")[2] for ids in prompts]
    assert ends == ["", "<think></think>"]
    # This template opens with the empty thoughts, and does not write them into a finished turn.
    with pytest.raises(ConfigError, match="x:7: .*otherwise than the finished turn.*'off'"):
        document_of(make_format(tokenizer, thinking=OFF), record, Tally())
    with pytest.raises(ConfigError, match="thinking 'yes' is unknown; allowed: default, on, off"):
        make_format(tokenizer, thinking="yes")


def test_short_and_missing_responses_are_counted_and_left_out(tokenizer: Tokenizer) -> None:
    lines = [
        {"messages": [ASKS[0], {"role": "assistant", "content": ""}]},  # its end token alone
        {"messages": [ASKS[0]]},
        {"prompt": "1+1="},
        {"prompt": "1+1=", "response": ""},
        {"prompt_ids": [5], "response_ids": [6]},
        {"prompt": "1+1=", "response": "2\n and no more"},
        {"prompt_ids": [5], "response_ids": [6, 7]},
    ]
    tally = Tally()
    records = [parse_record(line, f"x:{i}") for i, line in enumerate(lines, start=1)]
    *_, pair, ids = documents(make_format(tokenizer), records, tally)
    assert learned(tokenizer, pair) == ["1+1=", "2\n and no more"]
    assert ids == ([5, 6, 7], [False, True, True])
    assert tally == Tally(
        num_records=7, num_documents=2, num_learned=sum(pair.loss_mask) + 2, num_short=3,
        num_unanswered=2,
    )


def test_what_does_not_fit_the_model_is_refused(tokenizer: Tokenizer) -> None:
    ids = parse_record({"prompt_ids": [5, 2048], "response_ids": [6, 7]}, "x:3")
    with pytest.raises(ConfigError, match="x:3: id 2048 is beyond .*; allowed: 0..2047"):
        document_of(make_format(tokenizer), ids, Tally())
    chat = parse_record({"messages": [ASKS[0], SAYS[0]]}, "x:4")
    with pytest.raises(ConfigError, match="x:4: messages need a chat template"):
        document_of(make_format(tokenizer, None), chat, Tally())
    text = parse_record({"prompt": "a", "response": "b"}, "x:5")
    with pytest.raises(ConfigError, match="x:5: text needs a tokenizer"):
        document_of(TextFormat(None, None, 2048), text, Tally())
    for template in ("{{ raise_exception('no\ngood') }}", "{{ 1 / 0 }}", "{{ messages[9].x.y }}"):
        with pytest.raises(ConfigError, match="x:4: ") as caught:
            document_of(make_format(tokenizer, template), chat, Tally())
        assert "\n" not in str(caught.value)
    function = {"name": "\ud800", "arguments": "{}"}
    call = {"role": "assistant", "tool_calls": [{"function": function}]}
    bad = parse_record({"messages": [ASKS[0], call]}, "x:6")
    with pytest.raises(ConfigError, match="x:6: the rendered conversation holds half a surrogate"):
        document_of(make_format(tokenizer, load_chat_template(NANO)), bad, Tally())
