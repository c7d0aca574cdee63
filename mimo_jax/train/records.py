"""Records of training text, each checked and knowing where it stands.

Problem: one bad line among millions must neither end a run in a traceback nor be trained on.
Choice: what cannot be understood is refused where it stands, in one line that says what is allowed.
A record has exactly one of

- `messages`: a conversation, roles in order;
- `prompt`, and `response` unless it is still to be written: text as it is, no chat template;
- `prompt_ids`, and `response_ids` likewise: exact ids. They win where text stands beside them, as
  in what `train.py regenerate` writes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mimo_jax.config import ConfigError, require
from mimo_jax.train.data import Document

COLUMNS = ("id", "messages", "tools", "prompt", "response", "prompt_ids", "response_ids")
ALLOWED = "allowed: messages; prompt (+ response); prompt_ids (+ response_ids)"
# Whose turn may come next; None is the beginning.
_NEXT_ROLES = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_MAX_ID = 2**31 - 1  # ids are int32
_MAX_SHOWN = 40  # characters of a bad value


@dataclasses.dataclass(frozen=True)
class Record:
    """One text of a source.

    Attributes:
      where: File and line, for messages. Example: "chats.jsonl:17".
      line_id: Its `id` as text; file name and line where it has none.
      messages: OpenAI-style conversation, or None.
      tools: Tool descriptions that go with it.
      prompt: Text, or None.
      response: Text that answers it; None: it is still to be written.
      document: Exact ids, the response as what is learned, or None.
    """

    where: str
    line_id: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | None = None
    response: str | None = None
    document: Document | None = None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def check_text(value: Any, where: str, name: str) -> str:
    """The value, if it is text that a tokenizer takes; raises ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} is {_shown(value)}; allowed: text")
    is_utf8 = not any("\ud800" <= char <= "\udfff" for char in value)
    require(is_utf8, f"{where}: {name} holds half a surrogate pair; allowed: text that is UTF-8")
    return value


def check_ids(value: Any, where: str, name: str) -> list[int]:
    """The value as a list, if it is one of ids; raises ConfigError."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    require(is_list, f"{where}: {name} is {_shown(value)}; allowed: a list of token ids")
    for i in value:
        is_id = type(i) is int and 0 <= i <= _MAX_ID
        require(is_id, f"{where}: {name} holds {_shown(i)}; allowed: ids in 0..{_MAX_ID}")
    return list(value)


def _check_messages(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    require(is_list, f"{where}: messages is {_shown(value)}; allowed: a list of at least one")
    last, messages = None, []
    for i, message in enumerate(value):
        name = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise ConfigError(
                f"{where}: {name} is {_shown(message)}; allowed: an object with role and content"
            )
        # A table has every column in every row: absent ones are None there.
        message = {key: part for key, part in message.items() if part is not None}
        role = message.get("role")
        require(
            isinstance(role, str) and role in _NEXT_ROLES[last],
            f"{where}: {name}.role is {_shown(role)} after {last or 'nothing'}; allowed there: "
            f"{', '.join(_NEXT_ROLES[last])}",
        )
        calls = message.get("tool_calls", ())
        is_calls = isinstance(calls, Sequence) and all(isinstance(c, Mapping) for c in calls)
        require(is_calls, f"{where}: {name}.tool_calls is {_shown(calls)}; allowed: a list")
        if "content" in message or not calls:
            check_text(message.get("content"), where, f"{name}.content")
        messages.append(message)
        last = role
    require(
        any(message["role"] == "user" for message in messages),
        f"{where}: messages has no turn of the user; allowed: at least one",
    )
    return tuple(messages)


def parse_record(fields: Mapping[str, Any], where: str) -> Record:
    """Checks one line or table row; other keys than COLUMNS are ignored, None is absent.

    Args:
      fields: The line's object.
      where: File and line, for messages; its last part is the id of a line that has none.

    Raises:
      ConfigError: In one line, naming `where`, what is wrong and what is allowed.

    Example: {"prompt": "1+1=", "response": "2"} -> prompt "1+1=", response "2", document None.
    """
    given = {name: fields[name] for name in COLUMNS if fields.get(name) is not None}
    line_id = given.get("id", where.rpartition("/")[2])
    is_name = isinstance(line_id, str | int) and not isinstance(line_id, bool)
    require(is_name, f"{where}: id is {_shown(line_id)}; allowed: text or an integer")
    line_id = check_text(str(line_id), where, "id")
    if "prompt_ids" in given:
        prompt = check_ids(given["prompt_ids"], where, "prompt_ids")
        response = check_ids(given.get("response_ids", []), where, "response_ids")
        return Record(where, line_id, document=Document.of_pair(prompt, response))
    if "messages" in given:
        tools = given.get("tools", ())
        is_tools = isinstance(tools, Sequence) and all(isinstance(t, Mapping) for t in tools)
        require(is_tools, f"{where}: tools is {_shown(tools)}; allowed: a list of objects")
        messages = _check_messages(given["messages"], where)
        return Record(where, line_id, messages=messages, tools=tuple(tools) or None)
    if "prompt" in given:
        response = given.get("response")
        if response is not None:
            response = check_text(response, where, "response")
        prompt = check_text(given["prompt"], where, "prompt")
        return Record(where, line_id, prompt=prompt, response=response)
    raise ConfigError(f"{where}: has none of the keys that are needed; {ALLOWED}")
