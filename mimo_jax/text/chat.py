"""Chat templates and stop strings.

A checkpoint brings its template as Jinja text, either in `chat_template.jinja` or inside
`tokenizer_config.json`. It is third-party code, so it runs in Jinja's immutable sandbox.
Trap: OpenAI-style tool calls carry their arguments as a JSON *string*, templates want a mapping;
`render_chat` converts before rendering.
"""

import copy
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

ROLES = ("system", "developer", "user", "assistant", "tool")


def load_chat_template(directory: str | Path) -> str:
    """Reads the chat template of a checkpoint directory.

    Raises:
        ValueError: If the directory has none.
    """
    directory = Path(directory)
    jinja_file = directory / "chat_template.jinja"
    if jinja_file.is_file():
        return jinja_file.read_text(encoding="utf-8")
    config_file = directory / "tokenizer_config.json"
    if config_file.is_file():
        template = json.loads(config_file.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, list):  # older files: several templates by name
            by_name = {entry["name"]: entry["template"] for entry in template}
            template = by_name.get("default")
        if template:
            return template
    raise ValueError(
        f"no chat template in {directory}: expected chat_template.jinja, or chat_template in "
        "tokenizer_config.json"
    )


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> str:
    """Renders messages to the prompt text of a model; does not tokenize.

    Args:
        template: Jinja source, see `load_chat_template`.
        messages: OpenAI-style messages, each with a `role` of ROLES; not changed.
        tools: OpenAI-style tool descriptions, or None.
        add_generation_prompt: End with the header of the assistant's turn.
        **kwargs: Further variables for the template, such as `enable_thinking`.

    Returns:
        The prompt, special tokens in text form.

    Raises:
        ValueError: If a message is malformed or the template fails.
    """
    if not messages:
        raise ValueError("messages is empty: at least one message is needed")
    prepared = [_prepared_message(i, message) for i, message in enumerate(messages)]
    try:
        return _compiled(template).render(
            messages=prepared,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template failed: {error}") from error


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Returns where the earliest stop string starts in text, or None.

    Call it on the text decoded so far, not on single tokens: a stop may span several of them.

    Raises:
        ValueError: If a stop is empty.

    Example: find_stop("a\\nEND", ["END", "\\n"]) -> 1
    """
    _check_stops(stops)
    found = [index for index in (text.find(stop) for stop in stops) if index >= 0]
    return min(found, default=None)


def held_back_len(text: str, stops: Sequence[str]) -> int:
    """Returns how many last characters of text must wait: they may be the start of a stop.

    Raises:
        ValueError: If a stop is empty.

    Example: held_back_len("a EN", ["END"]) -> 2
    """
    _check_stops(stops)
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


def _check_stops(stops: Sequence[str]) -> None:
    if isinstance(stops, str):
        raise ValueError(f"stops={stops!r}: expected a list of strings, not one string")
    if not all(stops):
        raise ValueError("stops holds an empty string: every stop needs at least one character")


def _prepared_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"messages[{index}].role={role!r}: allowed are {', '.join(ROLES)}")
    prepared = copy.deepcopy(dict(message))
    for call in prepared.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"messages[{index}]: tool call arguments are not JSON: {error}"
                ) from error
    return prepared


@functools.lru_cache(maxsize=8)  # compiling takes 25 ms, rendering a tenth of one
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Jinja's own tojson escapes <, > and & for HTML; prompts need them as they are.
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.datetime.now().strftime(fmt)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
