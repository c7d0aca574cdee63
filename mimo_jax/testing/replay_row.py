"""One row of a replayed batch: its lists, its rings as loops, its controller in NumPy.

Numbers are written down again, not imported; see `replay.py`, which runs the rows.
"""

import dataclasses

import numpy as np

from mimo_jax.decode.request import Request

MARGIN, BURST = 0.3, 4
BARS = {
    "code": (3.0, 6.0),
    "code-gen": (3.0, 6.0),
    "code-stdlib": (3.0, 6.0),
    "math": (2.5, 5.0),
    "agent": (2.0, 4.0),
    "chat": (2.0, 4.0),
}


class Ring:
    """Which position each slot holds; None stands for a memory without rings."""

    def __init__(self, table: np.ndarray, slack: int):
        self.table, self.slack = np.full(len(table), -1), slack
        self.num_slots = len(table) - slack

    def fill(self, length: int) -> None:
        """What a prompt of this length leaves."""
        for position in range(length):
            self.table[position % self.num_slots] = position

    def write(self, start: int, count: int) -> None:
        """Positions start, start + 1, ... into neighbouring slots; what stood at or past goes."""
        self.table[self.table >= start] = -1
        for i in range(count):
            self.table[start % self.num_slots + i] = start + i


class Learner:
    """The controller of one row."""

    def __init__(self, lengths: tuple[int, ...], costs: list[float], scene: str | None):
        self.lengths, self.costs = lengths, np.asarray(costs, np.float32)
        self.bars = BARS.get(scene or "chat", BARS["chat"])[-(len(lengths) - 1) :]
        self.alpha = np.full(lengths[-1] - 1, 0.8, np.float32)
        self.num_blocks, self.rung, self.since = 0, len(lengths) - 1, 0

    @property
    def top(self) -> int:
        return len(self.lengths) - 1

    def expected(self) -> list[float]:
        """Tokens that a step of each rung commits, as the rates have it."""
        reach = np.cumprod(self.alpha, dtype=np.float32)
        return [1 + float(reach[: length - 1].sum()) for length in self.lengths]

    def is_due(self, policy: str) -> bool:
        """Whether a full block shall be tried."""
        if self.since < 0:
            return True
        if policy == "profile":
            return self.since >= 64
        tokens = self.expected()
        worth = tokens[-1] * float(self.costs[self.rung]) / tokens[self.rung]
        loss = max(float(self.costs[-1]) - worth, 0) / float(self.costs[0]) * BURST
        return self.since >= min(max(loss / 0.01, 32), 4096)

    def settle_by_profile(self) -> None:
        """Takes the highest rung whose bar the running accept length clears."""
        running = self.expected()[-1]
        self.rung = sum(
            running >= bar + (MARGIN if number > self.rung else 0)
            for number, bar in enumerate(self.bars, start=1)
        )

    def learn(self, rung: int, num_accepted: int, num_offered: int) -> None:
        """After one block."""
        if num_offered > 0:
            rate = np.float32(max(1 / 16, 1 / (self.num_blocks + 4)))
            for i in range(min(num_accepted + 1, num_offered)):
                survived = np.float32(i < num_accepted)
                self.alpha[i] += rate * (survived - self.alpha[i])
            self.num_blocks += 1
        if rung == self.top and self.rung == self.top:
            self.since = 0
        elif rung == self.top and self.since > 0:
            self.since = 1 - BURST
        else:
            self.since += 1


@dataclasses.dataclass
class ReplayRow:
    """What the state carries of one row; records as lists, one entry per step."""

    request: Request
    tokens: list[int]
    finish: str
    learner: Learner | None
    target_ring: Ring | None
    drafter_ring: Ring | None
    committed: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    offered: list[int] = dataclasses.field(default_factory=list)
    num_pending: int = 0

    @property
    def is_running(self) -> bool:
        return self.finish == "running"

    @property
    def room(self) -> int:
        return len(self.request.prompt_ids) + self.request.max_tokens - len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt_ids) :]
