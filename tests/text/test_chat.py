"""Chat templates and stop strings. Run: pytest tests/text/test_chat.py"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_jax.text.chat import find_stop, held_back_len, load_chat_template, render_chat
from mimo_jax.train.corpora import chat_format
from mimo_jax.train.corpora.chat_format import NANO_CHAT_TEMPLATE

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "weather of a city",
            "parameters": {"type": "object", "properties": {"city": {}, "day": {}}},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "the time"}},
]


def test_one_question():
    text = render_chat(NANO_CHAT_TEMPLATE, [{"role": "user", "content": "Hi <b> & 'you'"}])
    assert text == "<|im_start|>user\nHi <b> & 'you'<|im_end|><|im_start|>assistant\n"
    assert text == chat_format.question_prompt("Hi <b> & 'you'")


def test_history_without_generation_prompt():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " a\n"},
        {"role": "assistant", "content": "b"},
    ]
    assert render_chat(NANO_CHAT_TEMPLATE, messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\n a\n<|im_end|>"
        "<|im_start|>assistant\nb<|im_end|>"
    )


def test_tools_and_calls_equal_the_corpus_format():
    arguments = {"city": "Rome", "day": 3}
    call = {"type": "function", "function": {"name": "get_weather"}}
    call["function"]["arguments"] = json.dumps(arguments)
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": '{"sky": "<clear>"}'},
    ]
    tools = chat_format.tools_text(
        [("get_weather", ["city", "day"], "weather of a city"), ("now", [], "the time")]
    )
    expected = (
        chat_format.turn("system", tools)
        + chat_format.turn("user", "Weather?")
        + chat_format.turn(
            "assistant", "I look." + chat_format.tool_call_text("get_weather", arguments)
        )
        + chat_format.tool_response_turn('{"sky": "<clear>"}')
        + chat_format.answer_header()
    )
    assert render_chat(NANO_CHAT_TEMPLATE, messages, tools=TOOLS) == expected
    assert "<parameter=city>Rome</parameter><parameter=day>3</parameter>" in expected
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == arguments


def test_system_text_and_tools_share_a_turn():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    text = render_chat(NANO_CHAT_TEMPLATE, messages, tools=TOOLS[1:])
    assert text.startswith(
        "<|im_start|>system\nBe brief.\nYou can call these tools:\nnow(): the time<|im_end|>"
        "<|im_start|>user\na<|im_end|>"
    )


def test_tool_results_in_a_row_share_a_turn():
    messages = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    text = render_chat(NANO_CHAT_TEMPLATE, messages, add_generation_prompt=False)
    assert text == (
        "<|im_start|>user\n<tool_response>1</tool_response><tool_response>2</tool_response>"
        "<|im_end|>"
    )


def test_keyword_arguments_reach_the_template():
    template = "{% if enable_thinking %}<think>{% endif %}{{ messages[0].content }}"
    messages = [{"role": "user", "content": "a"}]
    assert render_chat(template, messages, enable_thinking=True) == "<think>a"
    assert render_chat(template, messages) == "a"


def test_template_comes_from_the_jinja_file_first(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert load_chat_template(tmp_path) == "from config"
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "by name"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_chat_template(tmp_path) == "by name"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert load_chat_template(tmp_path) == "from file"


def test_errors_name_the_thing(tmp_path):
    user = {"role": "user", "content": "a"}
    with pytest.raises(ValueError, match=r"no chat template in .*: expected chat_template.jinja"):
        load_chat_template(tmp_path)
    with pytest.raises(ValueError, match=r"messages\[1\].role='bot': allowed are system"):
        render_chat(NANO_CHAT_TEMPLATE, [user, {"role": "bot", "content": "b"}])
    with pytest.raises(ValueError, match="messages is empty"):
        render_chat(NANO_CHAT_TEMPLATE, [])
    with pytest.raises(ValueError, match="the chat template failed: no such role"):
        render_chat("{{ raise_exception('no such role') }}", [user])
    bad = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    with pytest.raises(ValueError, match=r"messages\[0\]: tool call arguments are not JSON"):
        render_chat(NANO_CHAT_TEMPLATE, [bad])


def test_template_runs_in_a_sandbox():
    user = {"role": "user", "content": "a"}
    with pytest.raises(ValueError, match="the chat template failed"):
        render_chat("{{ messages.__class__.__mro__[1].__subclasses__() }}", [user])


def test_find_stop_takes_the_earliest():
    assert find_stop("one two three", ["three", "two"]) == 4
    assert find_stop("one", ["two"]) is None
    assert find_stop("one", []) is None


def test_held_back_len_is_the_longest_possible_start():
    assert held_back_len("a EN", ["END"]) == 2
    assert held_back_len("a\n\n", ["\n\nUser", "\n\n\n"]) == 2
    assert held_back_len("END", ["END"]) == 0  # complete: find_stop reports it
    assert held_back_len("abc", []) == 0


def test_stops_are_checked():
    with pytest.raises(ValueError, match="empty string"):
        find_stop("a", [""])
    with pytest.raises(ValueError, match="expected a list of strings"):
        held_back_len("a", "END")


@given(st.text("ab"), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_streaming_finds_the_same_stop_and_never_shows_part_of_it(text, stops):
    shown, buffered = "", ""
    for char in text:
        buffered += char
        stop = find_stop(buffered, stops)
        if stop is not None:
            shown, buffered = shown + buffered[:stop], ""
            break
        keep = held_back_len(buffered, stops)
        shown, buffered = shown + buffered[: len(buffered) - keep], buffered[len(buffered) - keep :]
    # A stream ends at the stop that is complete first, which starts no later than any other.
    first = find_first_completed(text, stops)
    assert shown + buffered == (text if first is None else text[:first])


def find_first_completed(text: str, stops: list[str]) -> int | None:
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None
