"""One input line -> one checked request; knows JSON, not models.

Accepted are our own lines and the requests of OpenAI batch files. Checks are strict: a field that
is not known is an error that names the nearest one, since a misspelt "temperture" would otherwise
be answered greedily without a word. A null field counts as missing, as clients write nulls.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from mimo_jax.checkpoint.safetensors_reader import CheckpointError, nearest, parse_json
from mimo_jax.config import SCENES, ConfigError
from mimo_jax.decode.params import SamplingParams

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
CHAT_FIELDS = ("tools", "chat_template_kwargs")
_ENDPOINTS = {"/v1/chat/completions": ("messages",), "/v1/completions": ("prompt",)}


class LineError(ValueError):
    """A line that cannot be answered.

    Attributes:
      line_id: Its id, as far as it could be read.
    """

    def __init__(self, message: str, line_id: str):
        super().__init__(message)
        self.line_id = line_id


@dataclasses.dataclass(frozen=True)
class Line:
    """A request as it stands in a line; exactly one of the three prompts is set.

    Attributes:
      number: Of the line, from 1.
      line_id: Its id, by default the number.
      scene: Of config.SCENES, or None.
      params: Sampling fields, the defaults filled in.
      prompt: Text.
      prompt_token_ids: Token ids.
      messages: A conversation.
      tools: Tool descriptions beside the messages.
      chat_template_kwargs: Variables of the template beside the messages.
    """

    number: int
    line_id: str
    scene: str | None
    params: SamplingParams
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict] | None = None
    tools: list[dict] | None = None
    chat_template_kwargs: dict | None = None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """A value as an error line quotes it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(value: Any) -> int | None:
    return value if _is_int(value) else None


def _number(value: Any) -> float | None:
    try:
        return float(value) if _is_int(value) or isinstance(value, float) else None
    except OverflowError:  # an integer of more than 308 digits
        return None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _ids(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) and all(map(_is_int, value)) else None


def _strings(value: Any) -> tuple[str, ...] | None:
    strings = [value] if isinstance(value, str) else value
    is_right = isinstance(strings, list) and all(isinstance(s, str) for s in strings)
    return tuple(strings) if is_right else None


def _biases(value: Any) -> tuple[tuple[int, float], ...] | None:
    """{"50256": -100} as pairs: JSON has no integer keys."""
    if not isinstance(value, dict):
        return None
    pairs = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit()) or _number(bias) is None or len(key) > 12:
            return None
        pairs.append((int(key), float(bias)))
    return tuple(pairs)


# Field -> (reader that gives None for a wrong type, what is expected).
_READERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "max_tokens": (_integer, "an integer"),
    "temperature": (_number, "a number"),
    "top_p": (_number, "a number"),
    "top_k": (_integer, "an integer"),
    "min_p": (_number, "a number"),
    "repetition_penalty": (_number, "a number"),
    "presence_penalty": (_number, "a number"),
    "frequency_penalty": (_number, "a number"),
    "logit_bias": (_biases, "an object of numbers by token id"),
    "logprobs": (_integer, "an integer"),
    "seed": (_integer, "an integer"),
    "stop": (_strings, "a string or a list of strings"),
    "stop_token_ids": (_ids, "a list of integers"),
    "ignore_eos": (_flag, "true or false"),
    "n": (_integer, "an integer"),
    "best_of": (_integer, "an integer"),
}
SAMPLING_FIELDS = tuple(_READERS)
_OWN_FIELDS = ("id", "custom_id", "scene", *PROMPT_FIELDS, *CHAT_FIELDS, *SAMPLING_FIELDS)
_OPENAI_FIELDS = ("custom_id", "method", "url", "body", "scene")
# What a body may say beside the sampling fields; see `_unpack_body`.
_BODY_FIELDS = (
    "model",
    "stream",
    "user",
    "max_completion_tokens",
    "top_logprobs",
    *CHAT_FIELDS,
)


class _Problem(ValueError):
    """Message of a LineError whose id the caller knows."""


def _refuse_unknown(values: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for name in values:
        if name not in allowed:
            hint = nearest(name, allowed) or f"; allowed: {', '.join(allowed)}"
            raise _Problem(f"unknown field {_shown(name)}{where}{hint}")


def _line_id(record: dict, number: int) -> str:
    """The line's id; the number if there is none, and also if it cannot be one."""
    given = [record[name] for name in ("id", "custom_id") if record.get(name) is not None]
    if len(given) == 1 and (_is_int(given[0]) or (isinstance(given[0], str) and given[0])):
        return str(given[0])
    return str(number)


def _check_id(record: dict) -> None:
    given = [name for name in ("id", "custom_id") if record.get(name) is not None]
    if len(given) == 2:
        raise _Problem("both id and custom_id are given; allowed: one")
    for name in given:
        value = record[name]
        if not (_is_int(value) or (isinstance(value, str) and value)):
            raise _Problem(
                f"{name} is {_shown(value)}, expected a string of at least one character"
            )


def _unpack_body(record: dict) -> tuple[dict, tuple[str, ...]]:
    """(fields, names of allowed prompts) of a request in the shape of an OpenAI batch file."""
    _refuse_unknown(record, _OPENAI_FIELDS, " beside body")
    method, url, body = (record.get(name) for name in ("method", "url", "body"))
    if method not in (None, "POST"):
        raise _Problem(f"method is {_shown(method)}; allowed: POST")
    if url is not None and url not in tuple(_ENDPOINTS):
        raise _Problem(f"url is {_shown(url)}; allowed: {', '.join(_ENDPOINTS)}")
    if not isinstance(body, dict):
        raise _Problem(f"body is a {type(body).__name__}, expected an object")
    prompts = PROMPT_FIELDS if url is None else (*_ENDPOINTS[url], "prompt_token_ids")
    _refuse_unknown(body, (*prompts, *_BODY_FIELDS, *SAMPLING_FIELDS), " in body")
    if body.get("stream") not in (None, False):
        raise _Problem(f"stream is {_shown(body['stream'])}; allowed: false")
    fields = {name: body.get(name) for name in (*prompts, *CHAT_FIELDS, *SAMPLING_FIELDS)}
    if body.get("max_completion_tokens") is not None:
        if body.get("max_tokens") is not None:
            raise _Problem("both max_tokens and max_completion_tokens are given; allowed: one")
        fields["max_tokens"] = body["max_completion_tokens"]
    if isinstance(body.get("logprobs"), bool):  # of a conversation: a flag and a number
        is_on = body["logprobs"]
        fields["logprobs"] = (body.get("top_logprobs") or 0) if is_on else None
    elif body.get("top_logprobs") is not None:
        raise _Problem("top_logprobs has no meaning without logprobs true")
    if isinstance(fields.get("prompt"), list):  # that API takes ids under the same name
        fields["prompt_token_ids"] = fields.pop("prompt")
    return fields | {"scene": record.get("scene")}, prompts


def _read_prompt(fields: dict, allowed: tuple[str, ...]) -> dict[str, Any]:
    """The prompt and what goes with it, types checked."""
    given = [name for name in PROMPT_FIELDS if fields.get(name) is not None]
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise _Problem(f"exactly one of {', '.join(allowed)} is needed, found {found}")
    name, value = given[0], fields[given[0]]
    if name == "prompt" and not isinstance(value, str):
        raise _Problem(f"prompt is a {type(value).__name__}, expected a string")
    if name == "prompt_token_ids" and _ids(value) is None:
        raise _Problem("prompt_token_ids must be a list of integers")
    if name == "messages" and not _is_list_of_objects(value):
        raise _Problem("messages must be a list of objects")
    if name in ("prompt", "prompt_token_ids") and len(value) == 0:
        raise _Problem("prompt is empty; at least one token is needed")
    extras = {extra: fields[extra] for extra in CHAT_FIELDS if fields.get(extra) is not None}
    if extras and name != "messages":
        raise _Problem(f"{next(iter(extras))} has no meaning without messages")
    if not _is_list_of_objects(extras.get("tools", [])):
        raise _Problem("tools must be a list of objects")
    if not isinstance(extras.get("chat_template_kwargs", {}), dict):
        raise _Problem("chat_template_kwargs must be an object")
    return {name: value} | extras


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _read_params(fields: dict, defaults: SamplingParams) -> SamplingParams:
    given = {}
    for name, (read, expected) in _READERS.items():
        value = fields.get(name)
        if value is None:
            continue
        given[name] = read(value)
        if given[name] is None:
            raise _Problem(f"{name} is {_shown(value)}, expected {expected}")
    return dataclasses.replace(defaults, **given)


def parse_line(
    raw: bytes, number: int, defaults: SamplingParams, default_scene: str | None = None
) -> Line:
    """Reads one line.

    Args:
      raw: The line without its newline.
      number: Of the line, from 1.
      defaults: For sampling fields that the line does not have.
      default_scene: For lines without a scene.

    Raises:
      LineError: One line that says what is wrong and what is allowed.

    Example: `{"prompt": "2+2=", "max_tokens": 4}` or `{"custom_id": "a", "method": "POST", "url":
      "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "2+2?"}]}}`.
    """
    line_id = str(number)
    try:
        record = parse_json(raw, f"line {number}")
        if b"\\u" in raw:  # half a surrogate pair is legal JSON but no text
            json.dumps(record, ensure_ascii=False).encode()
        line_id = _line_id(record, number)
        _check_id(record)
        if any(name in record for name in ("body", "url", "method")):
            fields, prompts = _unpack_body(record)
        else:
            _refuse_unknown(record, _OWN_FIELDS, "")
            fields, prompts = record, PROMPT_FIELDS
        scene = default_scene if fields.get("scene") is None else fields["scene"]
        if scene is not None and scene not in SCENES:
            raise _Problem(f"scene {_shown(scene)} is unknown; allowed: {', '.join(SCENES)}")
        prompt = _read_prompt(fields, prompts)
        return Line(number, line_id, scene, _read_params(fields, defaults), **prompt)
    except UnicodeEncodeError as error:
        message = f"line {number}: a string holds half of a surrogate pair"
        raise LineError(message, line_id) from error
    except CheckpointError as error:  # from parse_json, which names the line
        raise LineError(str(error), line_id) from error
    except (_Problem, ConfigError) as error:
        raise LineError(f"line {number}: {error}", line_id) from error
