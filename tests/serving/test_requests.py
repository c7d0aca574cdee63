"""Input lines of a batch job. Run: pytest tests/serving/test_requests.py"""

import contextlib
import json

import pytest

from mimo_jax.decode.params import SamplingParams
from mimo_jax.serving.requests import LineError, parse_line

DEFAULTS = SamplingParams(max_tokens=9, seed=4)


def parse(record, number=3, scene=None):
    raw = record if isinstance(record, bytes) else json.dumps(record).encode()
    return parse_line(raw, number, DEFAULTS, scene)


def test_our_own_lines():
    line = parse({"prompt": "a", "temperature": 1, "stop": "x", "scene": "math"})
    assert (line.line_id, line.prompt, line.scene) == ("3", "a", "math")
    assert line.params == SamplingParams(max_tokens=9, seed=4, temperature=1.0, stop=("x",))
    line = parse({"id": 17, "prompt_token_ids": [1, 2], "stop_token_ids": [], "ignore_eos": True})
    assert (line.line_id, line.prompt_token_ids) == ("17", [1, 2])
    assert line.params.stop_token_ids == ()
    assert line.params.ignore_eos
    assert parse({"prompt": "a", "top_p": None, "scene": None}, scene="chat").scene == "chat"
    chat = {"messages": [{"role": "user", "content": "q"}], "tools": [{"type": "function"}]}
    line = parse(chat | {"custom_id": "c", "chat_template_kwargs": {"x": 1}})
    assert (line.line_id, line.tools, line.chat_template_kwargs) == ("c", chat["tools"], {"x": 1})


def test_openai_lines():
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": "q"}],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "n": 1,
        "stream": False,
    }
    openai = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions"}
    line = parse(openai | {"body": body, "scene": "chat"})
    assert (line.line_id, line.messages, line.scene) == ("r1", body["messages"], "chat")
    assert (line.params.max_tokens, line.params.temperature) == (5, 0.5)
    completions = openai | {"url": "/v1/completions"}
    assert parse(completions | {"body": {"prompt": "a"}}).prompt == "a"
    assert parse(completions | {"body": {"prompt": [5, 6]}}).prompt_token_ids == [5, 6]
    for wrong, message in (
        ({"method": "GET"}, "method is 'GET'; allowed: POST"),
        ({"url": "/v1/embeddings"}, "url is '/v1/embeddings'; allowed: /v1/chat/completions"),
        ({"url": ["x"]}, "url is"),
        ({"body": 3}, "body is a int, expected an object"),
        ({"body": body | {"n": 3, "best_of": 2}}, "best_of 2 is out of range; .* n is 3"),
        ({"body": body | {"n": 0}}, r"n 0 is out of range; allowed: 1\.\.128"),
        ({"body": body | {"n": 2, "temperature": 0}}, "n 2 has no meaning at temperature 0"),
        ({"body": body | {"stream": True}}, "stream is True; allowed: false"),
        ({"body": body | {"max_tokens": 4}}, "both max_tokens and max_completion_tokens"),
        ({"body": body | {"temprature": 1}}, "field 'temprature' in body .*nearest: temperature"),
        ({"prompt": "a"}, "unknown field 'prompt' beside body"),
    ):
        with pytest.raises(LineError, match=message) as caught:
            parse(openai | {"body": body} | wrong)
        assert caught.value.line_id == "r1"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b'{"prompt": "a"', "line 3: not JSON"),
        (b"[1]", "line 3: JSON is a list, expected an object"),
        (b'{"prompt": "\xff"}', "line 3: not UTF-8"),
        (b'{"prompt": "a", "prompt": "b"}', "line 3: duplicate key 'prompt'"),
        (b'{"prompt": "\\ud83d"}', "line 3: a string holds half of a surrogate pair"),
        (b"[" * 100_000, "line 3: JSON is nested too deeply"),
        ({}, "exactly one of prompt, prompt_token_ids, messages is needed, found none"),
        ({"prompt": "a", "messages": []}, "is needed, found prompt, messages"),
        ({"prompt": ""}, "prompt is empty; at least one token"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ({"prompt": 5}, "prompt is a int, expected a string"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids must be a list of integers"),
        ({"messages": ["hi"]}, "messages must be a list of objects"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens 0 is out of range; allowed: >= 1"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens is 1.5, expected an integer"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens is True, expected an integer"),
        ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot', expected a number"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature nan is out of range"),
        ({"prompt": "a", "temperature": 10**400}, "temperature is 1000000000"),
        ({"prompt": "a", "stop": [1]}, "stop is .*, expected a string or a list of strings"),
        ({"prompt": "a", "stop": [""]}, "stop '' is out of range"),
        ({"prompt": "a", "temprature": 1}, r"unknown field 'temprature' \(nearest: temperature\)"),
        ({"prompt": "a", "zzz": 1}, "unknown field 'zzz'; allowed: id, custom_id, scene, prompt"),
        ({"prompt": "a", "scene": "maths"}, "scene 'maths' is unknown; allowed: code-stdlib"),
        ({"prompt": "a", "tools": []}, "tools has no meaning without messages"),
        ({"prompt": "a", "id": []}, "id is .*, expected a string"),
        ({"prompt": "a", "id": "x", "custom_id": "y"}, "both id and custom_id"),
    ],
)
def test_bad_lines(record, message):
    with pytest.raises(LineError, match=message) as caught:
        parse(record)
    assert caught.value.line_id == "3"
    assert str(caught.value).startswith("line 3: ")
    assert "\n" not in str(caught.value)


ODD = (None, True, -1, 1.5, 2**70, "", "x", [], [[]], [{}], {}, {"x": []})
FIELDS = ("prompt", "prompt_token_ids", "messages", "tools", "chat_template_kwargs", "id", "scene")
FIELDS += ("custom_id", "method", "url", "body", "stop", "stop_token_ids", "seed", "ignore_eos")


@pytest.mark.parametrize("field", FIELDS)
def test_no_other_error_escapes(field):
    bases = ({}, {"prompt": "a"}, {"messages": [{"role": "user"}]}, {"body": {"prompt": "a"}})
    for base in bases:
        for value in ODD:
            for record in (base | {field: value}, {"body": base | {field: value}}):
                with contextlib.suppress(LineError):
                    parse(record)
