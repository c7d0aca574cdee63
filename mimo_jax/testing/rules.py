"""The rules of sampling and acceptance once more: NumPy and Python loops, one row at a time.

Written from the papers' and the glossary's words, not from `decode/`: nothing of it is imported.
Shared is only the source of randomness (numbers of `jax.random` keyed by seed, position and
stream), without which no token could be foretold.
"""

import functools
import heapq
from collections.abc import Sequence

import jax
import numpy as np

MISSING = -1  # the token of logits that are not finite
TOKEN, PROPOSAL, COIN = None, 1, 2  # streams of noise at one (seed, position)


@functools.partial(jax.jit, static_argnames=("v", "stream"))
def _numbers(seed, position, v, stream):
    key = jax.random.fold_in(jax.random.key(seed), position)
    if stream is not None:
        key = jax.random.fold_in(key, stream)
    return jax.random.gumbel(key, (v,)), jax.random.uniform(key, ())


def gumbel(seed: int, position: int, v: int, stream: int | None) -> np.ndarray:
    """Gumbel noise [v] of a token or a proposal."""
    return np.asarray(_numbers(np.int32(seed), np.int32(position), v, stream)[0])


def coin(seed: int, position: int) -> np.floating:
    """The number in [0, 1) that judges the proposal at a position."""
    return np.float32(_numbers(np.int32(seed), np.int32(position), 1, COIN)[1])


def first_best(values: np.ndarray) -> int:
    """The lowest index of the largest value; MISSING if a value is NaN or the largest infinite."""
    best = -np.inf
    index = MISSING
    for i, value in enumerate(values.tolist()):
        if np.isnan(value) or value == np.inf:
            return MISSING
        if value > best:
            best, index = value, i
    return index


def adjusted(logits: np.ndarray, request, output: Sequence[int]) -> np.ndarray:
    """Logits [v] with penalties for an output so far, and biases; the request's fields name them.

    Example: logit 2, said twice, repetition 1.25, presence .5, frequency .1 -> .9.
    """
    logits = np.array(logits, np.float32)
    asked = set(request.prompt_ids)
    for i in range(len(logits)):
        count = list(output).count(i)
        if count or i in asked:
            factor = np.float32(request.repetition_penalty)
            logits[i] = logits[i] / factor if logits[i] > 0 else logits[i] * factor
        if count:
            logits[i] -= np.float32(request.presence_penalty)
            logits[i] -= np.float32(request.frequency_penalty) * np.float32(count)
    for i, value in request.logit_bias:
        logits[i] += np.float32(value)
    return logits


def filtered(scaled: np.ndarray, request) -> np.ndarray:
    """Scaled logits [v] with min-p, then top-k, then top-p: what falls out is -inf."""
    if np.isnan(scaled).any():
        return scaled
    kept = np.array(scaled, np.float32)
    if request.min_p > 0:
        kept[kept < kept.max() + np.log(np.float32(request.min_p))] = -np.inf
    order = sorted(range(len(kept)), key=lambda i: (-kept[i], i))
    if request.top_k > 0:
        kept[order[request.top_k :]] = -np.inf
    if request.top_p < 1:
        mass = np.exp(kept - kept.max())
        before, wanted = 0.0, float(mass.sum()) * request.top_p
        for i in order:
            if before >= wanted:
                kept[i] = -np.inf
            before += float(mass[i])
    return kept


def scaled_logits(logits: np.ndarray, request, *, has_filters: bool) -> np.ndarray:
    """Logits [v] over the temperature, filtered; of a greedy request unscaled."""
    temperature = np.float32(request.temperature) if request.temperature > 0 else np.float32(1)
    scaled = np.asarray(logits, np.float32) / temperature
    return filtered(scaled, request) if has_filters else scaled


def probabilities(scaled: np.ndarray, request) -> np.ndarray:
    """Distribution [v]; one-hot for a greedy request, and then zeros where there is no choice."""
    if request.temperature > 0:
        mass = np.exp(scaled - scaled.max())
        return mass / mass.sum()
    probs, best = np.zeros_like(scaled), first_best(scaled)
    if best != MISSING:
        probs[best] = 1
    return probs


def choose(scaled: np.ndarray, request, position: int, stream: int | None) -> int:
    """The token or proposal at a position: the argmax, with noise unless greedy."""
    if request.temperature > 0:
        scaled = scaled + gumbel(request.seed, position, len(scaled), stream)
    return first_best(scaled)


def accept_by_match(drafts: Sequence[int], choices: Sequence[int]) -> tuple[int, int]:
    """(drafts accepted, the token after them).

    Args:
      drafts: Those that are offered.
      choices: The target's own token after the anchor and after each draft.

    Example: drafts (5, 6, 7), choices (5, 6, 9, 1) -> (2, 9).
    """
    for number, draft in enumerate(drafts):
        if draft != choices[number]:
            return number, choices[number]
    return len(drafts), choices[len(drafts)]


def _rest(p: np.ndarray, q: np.ndarray, factor) -> np.ndarray:
    """What p has beyond q, or p itself where that is nothing."""
    rest = np.maximum(factor * p - q, 0)
    return rest if rest.sum() > 0 else p


def accept_by_rejection(drafts, q, p, coins) -> tuple[int, np.ndarray]:
    """(drafts accepted, weights [v] of the token after them), token by token.

    Args:
      drafts: Those that are offered.
      q: Distribution that each was drawn from, [drafts, v].
      p: The target's after the anchor and after each draft, [drafts + 1, v].
      coins: One per draft.

    Source: arXiv:2211.17192, algorithm 1.
    """
    for number, draft in enumerate(drafts):
        if np.isnan(q[number]).any():
            return number, p[number]
        if not coins[number] * q[number][draft] < p[number][draft]:
            return number, _rest(p[number], q[number], np.float32(1))
    return len(drafts), p[len(drafts)]


def accept_by_block(drafts, q, p, coins) -> tuple[int, np.ndarray]:
    """As `accept_by_rejection`, the block as a whole: the longest prefix whose coin says so.

    Source: arXiv:2403.10444, algorithm 2.
    """
    num_drafts = next((i for i, x in enumerate(q) if np.isnan(x).any()), len(drafts))
    num_drafts = min(num_drafts, len(drafts))
    kept, best, factor = np.float32(1), 0, np.float32(1)
    nothing = np.zeros_like(p[0])
    for number in range(num_drafts):
        draft = drafts[number]
        ratio = p[number][draft] / max(q[number][draft], np.float32(1e-30))
        kept = np.float32(min(kept * ratio, 1))
        after = p[number + 1]
        if np.isnan(after).any():  # nothing can be judged behind it: the block ends here
            mass = kept
        else:
            proposed = q[number + 1] if number + 1 < num_drafts else nothing
            mass = np.maximum(kept * after - proposed, 0).sum(dtype=np.float32)
        bar = mass / max(mass + 1 - kept, np.float32(1e-30))
        if coins[number] < bar:
            best, factor = number + 1, kept
    proposed = q[best] if best < num_drafts else nothing
    return best, _rest(p[best], proposed, factor)


def cut(tokens: Sequence[int], stop_ids: Sequence[int], room: int) -> tuple[int, str]:
    """(tokens that count, why the row ends there or "running") of a step's tokens.

    Example: tokens (4, 2, 8), stop ids (2,), room 9 -> (2, "stop").
    """
    for number, token in enumerate(tokens[:room]):
        if token == MISSING:
            return number, "error"
        if token in stop_ids:
            return number + 1, "stop"
    return (room, "length") if len(tokens) >= room else (len(tokens), "running")


def check_tree(prefixes: set[tuple[int, ...]], draft_logits: np.ndarray, num_nodes: int) -> None:
    """Asserts that a tree holds the likeliest prefixes of the drafter's marginals, by a heap.

    Args:
      prefixes: Drafts up to each node; () is the anchor.
      draft_logits: float32 [m, v].
      num_nodes: Of the tree, the anchor included.
    """
    top = draft_logits.max(axis=1, keepdims=True)
    logs = draft_logits - top - np.log(np.exp(draft_logits - top).sum(axis=1, keepdims=True))
    order = np.argsort(-logs, axis=1, kind="stable")
    score = lambda ids: sum(float(logs[depth, i]) for depth, i in enumerate(ids))
    ids_of = lambda ranks: tuple(int(order[depth, rank]) for depth, rank in enumerate(ranks))
    heap: list[tuple[float, tuple[int, ...]]] = [(-score(ids_of((0,))), (0,))]
    best: list[tuple[int, ...]] = []
    while heap and len(best) < num_nodes - 1:
        ranks = heapq.heappop(heap)[1]
        best.append(ids_of(ranks))
        following = [(*ranks, 0)] if len(ranks) < len(logs) else []
        if ranks[-1] + 1 < logs.shape[1]:
            following.append((*ranks[:-1], ranks[-1] + 1))
        for after in following:
            heapq.heappush(heap, (-score(ids_of(after)), after))
    assert len(prefixes) == num_nodes, "two nodes stand for one prefix"
    assert all(ids[:-1] in prefixes for ids in prefixes if ids), "a node without its parent"
    got, want = (sorted(map(score, x)) for x in (prefixes - {()}, best))
    assert np.allclose(got, want, atol=1e-4), "a likelier prefix was left out"
