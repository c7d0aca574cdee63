"""Engines over the same requests in turns: tokens/s that a drifting machine cannot reorder.

Prompt by prompt every engine answers, and who begins moves on from prompt to prompt. All texts
should be equal; that is looked at, not assumed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.request import Request
from mimo_jax.timing import Stopwatch


class Lap(NamedTuple):
    """One engine over the requests of one scene.

    Attributes:
      decode_s: Seconds of decoding, prefill left out.
      total_s: Seconds in all.
      num_steps: Decode steps.
      num_decoded: Tokens that the steps committed: prefill's are left out.
      identical: Whether every text equals the first engine's.
    """

    decode_s: float
    total_s: float
    num_steps: int
    num_decoded: int
    identical: bool

    @property
    def tau(self) -> float:
        """Accept length."""
        return self.num_decoded / max(self.num_steps, 1)

    @property
    def step_ms(self) -> float:
        return self.decode_s / max(self.num_steps, 1) * 1e3

    @property
    def tokens_per_s(self) -> float:
        return self.num_decoded / self.decode_s


def race(
    engines: Mapping[str, Engine],
    requests: Mapping[str, Sequence[Request]],
    on_progress: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Lap]]:
    """{scene: {engine: Lap}} of greedy requests, batch 1.

    Args:
      engines: By name; the first one's texts are the right ones.
      requests: By scene.
      on_progress: Called after each prompt, also of the warm-up.
    """
    for scene_requests in requests.values():  # compile every prompt bucket before the clock
        for request in scene_requests:
            for engine in engines.values():
                engine.prefill(request)
            on_progress()
        for engine in engines.values():
            generate_all(engine, scene_requests[:1])
    return {
        scene: _scene(engines, scene_requests, on_progress)
        for scene, scene_requests in requests.items()
    }


def _scene(engines, requests, on_progress) -> dict[str, Lap]:
    names = list(engines)
    laps = {name: Lap(0.0, 0.0, 0, 0, True) for name in names}
    for number, request in enumerate(requests):
        first = number % len(names)
        answers = {}
        for name in names[first:] + names[:first]:
            with Stopwatch() as watch:
                (answer,) = generate_all(
                    engines[name], [request], steps_per_group=request.max_tokens
                )
            lap, answers[name] = laps[name], answer
            laps[name] = lap._replace(
                decode_s=lap.decode_s + answer.decode_s,
                total_s=lap.total_s + watch.elapsed_s,
                num_steps=lap.num_steps + len(answer.num_committed_per_step),
                num_decoded=lap.num_decoded + len(answer.token_ids) - 1,
            )
        for name in names:
            same = answers[name].token_ids == answers[names[0]].token_ids
            laps[name] = laps[name]._replace(identical=laps[name].identical and same)
        on_progress()
    return laps
