"""The decode loop as a NumPy interpreter: every integer that the state carries, from logits alone.

Recorded logits (`recording.py`) go in, and after each dispatch everything that the compiled loop
carries must be what came out here: tokens, length, finish, the records of the steps, the position
tables of both rings, the counts of penalties, the controller, the features kept aside. Rules and
numbers are written down again (`rules.py` and the constants below), not imported: a constant
changed by mistake shows as well as a wrong index.

Where logits are within rounding of a tie the two may part; seeds of tests are chosen without.
"""

import dataclasses

import jax
import numpy as np

from mimo_jax.cache import KVCache
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.request import Request
from mimo_jax.decode.step import DecodeState
from mimo_jax.testing import rules
from mimo_jax.testing.recording import DRAFT, PREFILL, STEP, TREE, Event, Recorder
from mimo_jax.testing.replay_row import Learner, ReplayRow, Ring

FINISH = {"running": 0, "stop": 1, "length": 2, "error": 3}
PENDING_ROOM, PIECE = 128, 32
BETTER = 1.05  # by which another rung must win


def _ring_of(memory, row: int) -> Ring | None:
    if not isinstance(memory, KVCache) or memory.ring_positions is None:
        return None
    return Ring(np.asarray(memory.ring_positions)[row], memory.slack)


class Replay:
    """A batch of rows beside an engine's; tell it what the engine is told.

    Args:
      engine: Whose mode, rule, policy and block length are replayed.
      recorder: Of its logits.
    """

    def __init__(self, engine: Engine, recorder: Recorder):
        self.engine, self.recorder = engine, recorder
        self.mode, self.rule, self.policy = engine.mode, engine.rule, engine.policy
        self.block_len = engine.draft_block_len
        self.rows: list[ReplayRow | None] = [None] * engine.batch_size
        self._events: list[Event] = []

    def prefill(self, request: Request, state: DecodeState, row: int) -> None:
        """A row takes a request; `state` is what the engine's prefill made of it."""
        events = self.recorder.take()
        assert events, "a prefill computes logits"
        assert all(event.kind == PREFILL for event in events)
        learner = None
        if self.policy is not None:
            lengths = self.engine.lengths
            costs = self.engine.costs or self.engine.nominal_costs
            learner = Learner(lengths, costs, request.scene)
        new = ReplayRow(
            request,
            list(request.prompt_ids),
            "running",
            learner,
            _ring_of(state.target_cache, 0),
            _ring_of(state.drafter_cache, 0),
        )
        for ring in (new.target_ring, new.drafter_ring):
            if ring is not None:
                ring.fill(len(request.prompt_ids))
        first = self._choices(new, events[-1].logits[0], [])
        count, new.finish = rules.cut(first, request.stop_ids, new.room)
        new.tokens += first[:count]
        self.rows[row] = new

    def run(self, num_steps: int) -> None:
        """As `Engine.run`, from the logits that it left behind."""
        self._events = self.recorder.take()[::-1]
        if self.policy is None:
            for _ in range(num_steps):
                if not self._is_open():
                    break
                if self.engine.max_verify_nodes is not None:
                    self._step_by_tree()
                else:
                    self._step(self.block_len, [self.block_len] * len(self.rows))
        else:
            self._run_adaptive(num_steps)
        assert not self._events, f"{len(self._events)} forwards more than the replay knows of"

    # --- one step --------------------------------------------------------------------------------

    def _is_open(self) -> bool:
        return any(row is not None and row.is_running for row in self.rows)

    def _next_event(self, kind: str) -> Event:
        assert self._events, f"the engine has no further {kind}"
        event = self._events.pop()
        assert event.kind == kind, f"the engine's next forward is a {event.kind}, expected {kind}"
        return event

    def _next(self, kind: str) -> np.ndarray:
        return self._next_event(kind).logits

    def _step_by_tree(self) -> None:
        """One step in which each row verifies the likeliest prefixes of its draft."""
        draft_logits, event = self._next(DRAFT), self._next_event(TREE)
        for index, row in enumerate(self.rows):
            if row is None:
                continue
            start = len(row.tokens) - 1
            for ring in (row.target_ring, row.drafter_ring):
                if ring is not None:
                    ring.write(start, self.block_len)
            if not row.is_running:
                continue
            tokens, depths, sees = (x[index] for x in event.nodes)
            node_of: dict[tuple[int, ...], int] = {}
            for node in range(len(tokens)):
                path = np.flatnonzero(sees[node])
                path = path[np.argsort(depths[path])][1:]  # without the anchor
                assert depths[path].tolist() == list(range(1, len(path) + 1))
                node_of[tuple(tokens[path].tolist())] = node
            rules.check_tree(set(node_of), draft_logits[index], len(tokens))
            active_len = min(self.block_len, row.room + 1)
            prefix: tuple[int, ...] = ()
            while True:
                drafts, values = list(prefix), event.logits[index][node_of[prefix]]
                if self.mode == "adjusted":
                    values = rules.adjusted(values, row.request, [*row.output, *drafts])
                has_filters = self.mode in ("filtered", "adjusted")
                values = rules.scaled_logits(values, row.request, has_filters=has_filters)
                position = len(row.tokens) + len(prefix)
                choice = rules.choose(values, row.request, position, rules.TOKEN)
                if len(prefix) + 1 >= active_len or (*prefix, choice) not in node_of:
                    break
                prefix = (*prefix, choice)
            self._note_step(row, [*prefix, choice], len(prefix), active_len - 1)

    def _step(self, width: int, active: list[int]) -> None:
        """One step of `width` slots, of which each row may use `active`."""
        draft_logits = self._next(DRAFT) if width > 1 else None
        logits = self._next(STEP)
        assert logits.shape[1] == width, f"{logits.shape[1]} slots were verified, expected {width}"
        for index, row in enumerate(self.rows):
            if row is None:
                continue
            start = len(row.tokens) - 1
            if row.target_ring is not None:
                row.target_ring.write(start, width)
            if row.drafter_ring is not None and width > 1:
                row.drafter_ring.write(start, width)
            if not row.is_running:
                continue
            proposals = None if draft_logits is None else draft_logits[index]
            self._step_row(row, logits[index], proposals, min(active[index], row.room + 1))

    def _step_row(self, row: ReplayRow, logits, draft_logits, active_len: int) -> None:
        num_drafts = active_len - 1
        if draft_logits is None or self.rule == "match":
            drafts = []
            if draft_logits is not None:
                drafts = [max(rules.first_best(slot), 0) for slot in draft_logits[:num_drafts]]
            choices = self._choices(row, logits, drafts)
            num_accepted, bonus = rules.accept_by_match(drafts, choices)
        else:
            drafts, num_accepted, bonus = self._judge(row, logits, draft_logits, num_drafts)
        self._note_step(row, [*drafts[:num_accepted], bonus], num_accepted, num_drafts)
        if row.learner is not None and draft_logits is not None:
            row.learner.learn(self._rungs[id(row)], num_accepted, num_drafts)

    def _note_step(
        self, row: ReplayRow, emitted: list[int], num_accepted: int, num_drafts: int
    ) -> None:
        """Commits what a step emitted."""
        count, finish = rules.cut(emitted, row.request.stop_ids, row.room)
        row.finish = finish
        if count:
            row.tokens += emitted[:count]
            for record, value in (
                (row.committed, count),
                (row.accepted, num_accepted),
                (row.offered, num_drafts),
            ):
                record.append(value)

    def _scaled(self, row: ReplayRow, logits, drafts: list[int]) -> list[np.ndarray]:
        """Logits that tokens are chosen by: after the anchor and after each draft."""
        out = []
        for number in range(len(drafts) + 1):
            values = logits[number]
            if self.mode == "adjusted":
                values = rules.adjusted(values, row.request, [*row.output, *drafts[:number]])
            has_filters = self.mode in ("filtered", "adjusted")
            out.append(rules.scaled_logits(values, row.request, has_filters=has_filters))
        return out

    def _choices(self, row: ReplayRow, logits, drafts: list[int]) -> list[int]:
        scaled = self._scaled(row, logits, drafts)
        first = len(row.tokens)
        return [
            rules.choose(values, row.request, first + number, rules.TOKEN)
            for number, values in enumerate(scaled)
        ]

    def _judge(self, row: ReplayRow, logits, draft_logits, num_drafts: int):
        """(drafts, how many count, the token after them) where drafts are sampled themselves."""
        request, first = row.request, len(row.tokens)
        missing = logits.shape[-1] - draft_logits.shape[-1]
        drafts, q = [], []
        for number in range(num_drafts):
            values = np.pad(draft_logits[number], (0, missing), constant_values=-np.inf)
            has_filters = self.mode in ("filtered", "adjusted")
            values = rules.scaled_logits(values, request, has_filters=has_filters)
            draft = rules.choose(values, request, first + number, rules.PROPOSAL)
            drafts.append(max(draft, 0))
            q.append(rules.probabilities(values, request))
        scaled = self._scaled(row, logits, drafts)
        p = [rules.probabilities(values, request) for values in scaled]
        coins = [rules.coin(request.seed, first + number) for number in range(num_drafts)]
        judge = rules.accept_by_block if self.rule == "block" else rules.accept_by_rejection
        num_accepted, weights = judge(drafts, q, p, coins)
        logs = np.full(len(weights), -np.inf, np.float32)
        logs[weights > 0] = np.log(np.maximum(weights[weights > 0], np.float32(1e-38)))
        bonus = rules.choose(logs, request, first + num_accepted, rules.TOKEN)
        return drafts, num_accepted, bonus

    # --- the loop whose block length the controller picks ---------------------------------------

    def _held(self) -> list[ReplayRow]:
        return [row for row in self.rows if row is not None]

    def _pick(self) -> int:
        """Chooses every row's rung for the next step; returns the width's rung."""
        rows = self._held()
        learners = [(row, row.learner) for row in rows if row.learner is not None]
        running = [learner for row, learner in learners if row.is_running]
        if self.policy == "profile":
            for _, learner in learners:
                learner.settle_by_profile()
        else:
            rates = [np.asarray(x.expected(), np.float32) / x.costs for x in running]
            votes = np.sum(rates, axis=0) if rates else np.zeros(len(self.engine.lengths))
            held = max((x.rung for x in running), default=0)
            best = int(np.argmax(votes))
            kept = best if votes[best] > BETTER * votes[held] else held
            for _, learner in learners:
                learner.rung = kept
        due = {id(row): row.is_running and x.is_due(self.policy or "") for row, x in learners}
        if self.policy == "costs" and any(due.values()):
            due = dict.fromkeys(due, True)
        self._rungs = {id(row): x.top if due[id(row)] else x.rung for row, x in learners}
        return max((self._rungs[id(row)] for row in rows if row.is_running), default=0)

    def _run_adaptive(self, num_steps: int) -> None:
        done, width = 0, self._pick()
        while done < num_steps and self._is_open():
            if width == 0:
                last = done + PENDING_ROOM - max(row.num_pending for row in self._held())
                steps_before = {id(row): len(row.committed) for row in self._held()}
                while done < min(num_steps, last) and self._is_open():
                    for row in self._held():
                        row.num_pending += 1
                    self._step(1, [1] * len(self.rows))
                    done += 1
                if done == last:
                    self._flush()
                for row in self._held():
                    if row.learner is not None:
                        row.learner.since += len(row.committed) - steps_before[id(row)]
            else:
                self._flush()
                lengths = self.engine.lengths
                active = [1 if row is None else lengths[self._rungs[id(row)]] for row in self.rows]
                self._step(lengths[width], active)
                done += 1
            width = self._pick()

    def _flush(self) -> None:
        """Features kept aside go into the drafter's memory, 32 at a time, all rows together."""
        most = max(row.num_pending for row in self._held())
        for row in self._held():
            anchor = len(row.tokens) - 1
            for offset in range(0, most, PIECE):
                if row.drafter_ring is not None:
                    row.drafter_ring.write(min(anchor - row.num_pending + offset, anchor), PIECE)
            row.num_pending = 0

    # --- comparison ------------------------------------------------------------------------------

    def differences(self, state: DecodeState) -> list[str]:
        """One line per field in which a state differs from the replay: row, field, both values."""
        tables = {
            name: np.asarray(memory.ring_positions)
            for name in ("target_cache", "drafter_cache")
            if isinstance(memory := getattr(state, name), KVCache)
            and memory.ring_positions is not None
        }
        memories = {"target_cache": None, "drafter_cache": None}
        num_pending = None if state.pending is None else np.asarray(state.pending.num)
        host = jax.device_get(dataclasses.replace(state, pending=None, **memories))
        lines = []
        for index, row in enumerate(self.rows):
            if row is None:
                continue
            for name, got, want in self._fields(index, row, host, tables, num_pending):
                if not np.array_equal(got, want):
                    lines.append(f"row {index}: {name} is {got}, the replay has {want}")
        return lines

    def _fields(self, index: int, row: ReplayRow, host, tables, num_pending):
        """(name, the state's value, the replay's) of everything that is carried."""
        n, length = len(row.committed), len(row.tokens)
        yield "length", int(host.length[index]), length
        yield "finish", int(host.finish[index]), FINISH[row.finish]
        yield "num_steps", int(host.num_steps[index]), n
        yield "tokens", host.tokens[index, :length].tolist(), row.tokens
        for name in ("committed", "accepted", "offered"):
            record = getattr(host, f"{name}_per_step")[index]
            yield f"{name}_per_step", record[:n].tolist(), getattr(row, name)
            yield f"{name}_per_step past the end", int(np.abs(record[n:]).sum()), 0
        if host.seen is not None:
            v = host.seen.num_emitted.shape[1]
            counts = [row.output.count(i) for i in range(v)]
            yield "seen.num_emitted", host.seen.num_emitted[index].tolist(), counts
            asked = [i in row.request.prompt_ids for i in range(v)]
            yield "seen.is_in_prompt", host.seen.is_in_prompt[index].tolist(), asked
        for name, ring in (("target_cache", row.target_ring), ("drafter_cache", row.drafter_ring)):
            if ring is not None:
                yield f"{name} ring", tables[name][index].tolist(), ring.table.tolist()
        learner = row.learner
        if learner is not None:
            for name, want in (
                ("rung", learner.rung),
                ("num_blocks", learner.num_blocks),
                ("since_probe", learner.since),
            ):
                yield f"control.{name}", int(getattr(host.control, name)[index]), want
            alpha = host.control.alpha[index]
            is_near = np.allclose(alpha, learner.alpha, atol=1e-5)
            yield "control.alpha", alpha.tolist(), alpha.tolist() if is_near else learner.alpha
        if num_pending is not None:
            yield "pending.num", int(num_pending[index]), row.num_pending


def replay_requests(
    engine: Engine, recorder: Recorder, requests: list[Request], *, steps_per_group: int
) -> tuple[int, list[list[int]]]:
    """Decodes requests with refilled rows, comparing after every prefill and every dispatch.

    Args:
      engine: As `recording_engine` gives it.
      recorder: Its logits.
      requests: All of them are run.
      steps_per_group: Steps per dispatch.

    Returns:
      (dispatches compared, output of each request).

    Raises:
      AssertionError: With one line per field that differs or contradicts another.
    """
    replay, waiting = Replay(engine, recorder), list(enumerate(requests))[::-1]
    outputs: list[list[int]] = [[] for _ in requests]
    held: list[int | None] = [None] * engine.batch_size
    state, num_compared = None, 0

    def compare(state):
        lines = replay.differences(state)
        assert not lines, "\n".join(lines)
        engine.check_integrity(state)

    while True:
        for slot in range(engine.batch_size):
            if held[slot] is None and waiting:
                held[slot], request = waiting.pop()
                row_state = engine.prefill(request)
                replay.prefill(request, row_state, slot)
                if state is None and engine.batch_size > 1:
                    state = engine.empty_state(row_state)
                state = row_state if state is None else engine.insert(state, row_state, slot)
                compare(state)
        if all(index is None for index in held) or state is None:
            return num_compared, outputs
        state = engine.run(state, steps_per_group)
        replay.run(steps_per_group)
        compare(state)
        num_compared += 1
        for slot, (index, row) in enumerate(zip(held, replay.rows, strict=True)):
            if index is not None and row is not None and not row.is_running:
                outputs[index], held[slot] = row.output, None
