"""A pair of two layers and one, and ways to run it: compiles in seconds. Used by several tests."""

import functools

import numpy as np
from flax import nnx

from configs.tiny import smallest_drafter, smallest_target
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import ADJUSTED, FILTERED, GREEDY, SAMPLED
from mimo_jax.models.params import split
from mimo_jax.models.target import Target
from mimo_jax.testing.drafters import TableDrafter, table_of

V, BLOCK_LEN, MAX_LEN = 23, 5, 120
WARM = {"temperature": 0.8}
FILTERS = WARM | {"top_p": 0.9, "top_k": 9, "min_p": 0.01}
PENALTIES = FILTERS | {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.1,
    "logit_bias": ((5, 1.5), (20, -2.0)),
}
# name -> (fields of every request, Engine's arguments); "off" without a drafter
MODES = {
    "off": (WARM, {"mode": SAMPLED}),
    "greedy": ({}, {"mode": GREEDY}),
    "sampled": (WARM, {"mode": SAMPLED}),
    "filtered": (FILTERS, {"mode": FILTERED}),
    "adjusted": (PENALTIES, {"mode": ADJUSTED, "max_bias_ids": 2}),
    "rejection": (FILTERS, {"mode": FILTERED, "rule": "rejection"}),
    "block": (WARM, {"mode": SAMPLED, "rule": "block"}),
    "tree": (PENALTIES, {"mode": ADJUSTED, "max_bias_ids": 2, "max_verify_nodes": 9}),
    "costs": (WARM, {"mode": SAMPLED, "policy": "costs"}),
    "profile": (PENALTIES, {"mode": ADJUSTED, "max_bias_ids": 2, "policy": "profile"}),
}
COSTS = [1.0, 1.3, 1.9]  # so that all three rungs get their turn


class CheckedEngine(Engine):
    """Checks its state after every row that it takes in and every group of steps."""

    num_checks = 0

    def start(self, request, memory, earlier=None):
        state = super().start(request, memory, earlier)
        self._last_prompt_len = len(request.prompt_ids)
        if self.batch_size == 1:
            self._prompt_lens = [self._last_prompt_len]
        return state

    def empty_state(self, row_state):
        self._prompt_lens = [None] * self.batch_size
        return super().empty_state(row_state)

    def insert(self, state, row_state, row):
        self._prompt_lens[row] = self._last_prompt_len
        state = super().insert(state, row_state, row)
        self.check_integrity(state, self._prompt_lens)
        return state

    def run(self, state, num_steps, held=None):
        state = super().run(state, num_steps, held)
        self.check_integrity(state, self._prompt_lens)
        self.num_checks += 1
        return state


@functools.cache
def pair() -> tuple[Model, Model]:
    """Target and drafter; the drafter proposes what followed its anchor in the target's texts."""
    target = Target(smallest_target(), rngs=nnx.Rngs(5))
    target.embedding[...] = target.embedding[...] * 8  # larger: text follows the last token more
    model = Model(target.config, *split(target))
    engine = Engine(model, max_len=MAX_LEN, mode=SAMPLED, batch_size=3)
    rng = np.random.default_rng(0)
    requests = [
        Request(rng.integers(0, V, 4).tolist(), 90, seed=seed, **WARM) for seed in range(18)
    ]
    texts = [c.token_ids for c in generate_all(engine, requests)]
    config = smallest_drafter()
    drafter = TableDrafter(config, table_of(texts, config), rngs=nnx.Rngs(6))
    return model, Model(config, *split(drafter))


def requests_of(name: str, count: int, seed: int = 1) -> list[Request]:
    """Random prompts, lengths and stop ids with the fields of a mode; some rows are greedy."""
    fields, rng = MODES[name][0], np.random.default_rng(seed)
    requests = []
    for number in range(count):
        own = fields if number % 4 else {k: v for k, v in fields.items() if k != "temperature"}
        requests.append(
            Request(
                rng.integers(0, V, int(rng.integers(1, 30))).tolist(),
                int(rng.integers(1, 60)),
                tuple(rng.integers(0, V, int(rng.integers(0, 2))).tolist()),
                seed=number,
                scene=("chat", "code", None)[number % 3],
                **own,
            )
        )
    return requests
