"""The nano model's chat format: ChatML in MiMo's style.

A turn is `<|im_start|>ROLE\\nCONTENT<|im_end|>` with nothing after the end token. Tools are listed
in the system turn, results come back inside `<tool_response>` in a user turn, and calls are text:
`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
The corpora build their text with the functions below, a served model with the template; a test
holds the two equal.
"""

from collections.abc import Mapping, Sequence

TOOLS_HEADER = "You can call these tools:"

NANO_CHAT_TEMPLATE = """\
{%- macro arguments(call) -%}
{%- for key, value in call.arguments.items() -%}
<parameter={{ key }}>{{ value if value is string else value | tojson }}</parameter>
{%- endfor -%}
{%- endmacro -%}
{%- macro tool_lines() -%}
You can call these tools:
{%- for tool in tools -%}
{%- set function = tool.function if tool.function else tool -%}
{{ '\\n' }}{{ function.name }}({{ function.parameters.properties | join(', ') \
if function.parameters and function.parameters.properties }}): {{ function.description }}
{%- endfor -%}
{%- endmacro -%}
{%- set has_system = messages[0].role in ('system', 'developer') -%}
{%- if has_system or tools -%}
<|im_start|>system{{ '\\n' }}
{%- if has_system -%}{{ messages[0].content }}{%- if tools -%}{{ '\\n' }}{%- endif -%}{%- endif -%}
{%- if tools -%}{{ tool_lines() }}{%- endif -%}
<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ('system', 'developer') -%}
{%- if not loop.first -%}<|im_start|>system{{ '\\n' }}{{ message.content }}<|im_end|>{%- endif -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}<|im_start|>user{{ '\\n' }}{%- endif -%}
<tool_response>{{ message.content }}</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' -%}<|im_end|>{%- endif -%}
{%- else -%}
<|im_start|>{{ message.role }}{{ '\\n' }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function else call -%}
<tool_call><function={{ function.name }}>{{ arguments(function) }}</function></tool_call>
{%- endfor -%}
<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}
"""


def turn(role: str, content: str) -> str:
    """Returns one whole turn."""
    return f"<|im_start|>{role}\n{content}<|im_end|>"


def answer_header() -> str:
    """Returns the header after which the assistant writes."""
    return "<|im_start|>assistant\n"


def question_prompt(question: str) -> str:
    """Returns the prompt of a single user question."""
    return turn("user", question) + answer_header()


def tools_text(tools: Sequence[tuple[str, Sequence[str], str]]) -> str:
    """Returns the system turn's list of tools, each given as (name, parameters, description)."""
    lines = [f"{name}({', '.join(keys)}): {description}" for name, keys, description in tools]
    return "\n".join([TOOLS_HEADER, *lines])


def tool_call_text(name: str, arguments: Mapping[str, object]) -> str:
    """Returns one tool call in text form."""
    parameters = "".join(f"<parameter={k}>{v}</parameter>" for k, v in arguments.items())
    return f"<tool_call><function={name}>{parameters}</function></tool_call>"


def tool_response_turn(*contents: str) -> str:
    """Returns the user turn that carries the results of one or more tools."""
    responses = (f"<tool_response>{content}</tool_response>" for content in contents)
    return turn("user", "".join(responses))
