"""Whether a model thinks before it answers, as its chat template is told.

A drafter learns one of the two: accept lengths of one that was trained for the other fall from 9.5
to 3 (z-lab/dflash#60).
"""

from mimo_jax.config import require

# As the template has it, or as its variable `enable_thinking` says.
THINKING = DEFAULT, ON, OFF = ("default", "on", "off")


def thinking_kwargs(thinking: str) -> dict[str, bool]:
    """Variables of the chat template. Example: "off" -> {"enable_thinking": False}.

    Raises:
      ConfigError: If it is none of THINKING.
    """
    require(
        thinking in THINKING,
        f"thinking {thinking!r} is unknown; allowed: {', '.join(THINKING)}",
    )
    return {} if thinking == DEFAULT else {"enable_thinking": thinking == ON}
