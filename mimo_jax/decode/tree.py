"""Draft trees: many continuations of one anchor, from one pass of the drafter, verified together.

A block drafter gives a distribution per position, independent of what the other positions become.
A tree takes the prefixes of the largest products of those marginals (best first, up to a number of
nodes), the target scores all of them in one pass in which each node sees its own ancestors only,
and the walk from the root follows the target's own choices as far as the tree has them. What is
emitted is what the target would have said whatever the tree holds, greedy or sampled: noise is
keyed by absolute position, and siblings, who share a position, share it.

Nodes never enter the memory: the target reads the memory and the nodes as two stretches of keys
and gives the nodes' keys back; the accepted path alone is written, at its own positions, as a
chain's block would be. Rejected: nodes at slots of their own in the memory, which are compacted
afterwards (every ring would need slack for the largest tree, and as many writes again).

Best-first order without a heap: the products of one more factor are sorted per depth (all pairs of
a kept prefix and a rank that can be among the best n: rank products bound them to about n ln n),
then once over all depths. A prefix never scores below its continuations, so the n best are closed
under parents.

Source: arXiv:2604.12989 (the tree of a block drafter); glossary: draft tree.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mimo_jax.cache import write_path
from mimo_jax.decode.sampling import sample
from mimo_jax.decode.step import (
    BlockDrafter,
    DecodeState,
    Logprobs,
    StepResult,
    adjusted,
    block_logits,
    noted_logprobs,
)
from mimo_jax.layers.vocab import log_total, top_over
from mimo_jax.models.target import Target

NUM_NODES = 16  # the anchor included; what pays is a matter of the device (see BENCHMARKS.md)
MAX_NODES = 256  # the pairs to sort per depth, n ln n, are part of the program


class Chain(NamedTuple):
    """What a tree says about the chain of its first choices: drafts accepted and held, [b]."""

    num_accepted: Int[Array, "b"]
    num_offered: Int[Array, "b"]


class Tree(NamedTuple):
    """Continuations of each row's anchor; node 0 is the anchor, parents come before children.

    Attributes:
      tokens: int32 [b, n].
      parents: int32 [b, n]; the anchor's is itself.
      depths: int32 [b, n]; node i stands at the anchor's position + depths[i].
      sees: bool [b, n, n]; sees[i, j]: j is i or an ancestor of i.
    """

    tokens: Int[Array, "b n"]
    parents: Int[Array, "b n"]
    depths: Int[Array, "b n"]
    sees: Bool[Array, "b n n"]


def grow(
    anchors: Int[Array, "b"],
    log_probs: Float[Array, "b m k"],
    ids: Int[Array, "b m k"],
    num_nodes: int,
) -> Tree:
    """The tree of the num_nodes - 1 likeliest prefixes.

    Args:
      anchors: Last committed tokens.
      log_probs: Of the k likeliest tokens at each of the m positions after the anchor, best first.
      ids: Those tokens.
      num_nodes: Nodes of the tree, the anchor included; at most 1 + k + k^2 + ... + k^m.

    Example: positions with probabilities (.6, .4) and (.9, .1), 4 nodes -> the anchor, then the
      prefixes of probability .6, .54 (a child of the one before) and .4.
    """
    b, m, k = ids.shape
    num_kept = num_nodes - 1
    scores, tokens, ups, depths = [], [], [], []
    level_scores = jnp.zeros((b, 1), jnp.float32)
    first = 0  # where the level before begins in the list of all levels
    for depth in range(1, m + 1):
        width = level_scores.shape[1]
        # The pair (prefix i, rank r) has (i + 1)(r + 1) - 1 pairs of its depth before it.
        pairs = [(i, r) for i in range(width) for r in range(k) if (i + 1) * (r + 1) <= num_kept]
        prefix, rank = (jnp.asarray(x, jnp.int32) for x in zip(*pairs, strict=True))
        products = level_scores[:, prefix] + log_probs[:, depth - 1, rank]
        level_scores, chosen = jax.lax.top_k(products, min(num_kept, len(pairs)))
        scores.append(level_scores)
        tokens.append(jnp.take_along_axis(ids[:, depth - 1], rank[chosen], axis=1))
        # -1 stands for the anchor, else the place of the parent in the list of all levels.
        up = jnp.full_like(chosen, -1) if depth == 1 else first + prefix[chosen]
        ups.append(up)
        depths.append(jnp.full_like(chosen, depth))
        first += 0 if depth == 1 else width
    join = lambda parts: jnp.concatenate(parts, axis=1)
    _, best = jax.lax.top_k(join(scores), num_kept)  # ties: the shorter prefix comes first
    pick = lambda parts: jnp.take_along_axis(join(parts), best, axis=1)
    up = pick(ups)
    is_parent = best[:, None, :] == up[:, :, None]  # [b, node, possible parent]
    number = jnp.arange(1, num_kept + 1, dtype=jnp.int32)[None, None, :]
    parents = jnp.where(is_parent, number, 0).sum(axis=2)
    root = jnp.zeros((b, 1), jnp.int32)
    parents = jnp.concatenate([root, parents], axis=1)
    return Tree(
        tokens=jnp.concatenate([anchors[:, None], pick(tokens)], axis=1),
        parents=parents,
        depths=jnp.concatenate([root, pick(depths)], axis=1),
        sees=ancestors(parents, m),
    )


def ancestors(parents: Int[Array, "b n"], max_depth: int) -> Bool[Array, "b n n"]:
    """[i, j]: j is i or an ancestor of i. Example: parents (0, 0, 1) -> row 2 is all True."""
    n = parents.shape[1]
    index = jnp.arange(n, dtype=jnp.int32)
    is_up = parents[:, :, None] == index[None, None, :]
    sees = (is_up | jnp.eye(n, dtype=bool)[None]).astype(jnp.float32)
    steps = 1
    while steps < max_depth:  # sees covers `steps` generations
        sees = jnp.minimum(sees @ sees, 1.0)
        steps *= 2
    return sees > 0


def walk(
    tree: Tree, choices: Int[Array, "b n"], active_len: Int[Array, "b"], max_depth: int
) -> tuple[Int[Array, "b m1"], Int[Array, "b"]]:
    """Follows the target's choices from the root.

    Args:
      tree: The nodes.
      choices: The target's token after each node.
      active_len: Tokens that may be emitted; nodes of this depth and deeper are never accepted.
      max_depth: m; the path has m + 1 nodes.

    Returns:
      (nodes of the path by depth, 0 behind its end; accepted nodes, 0..m). The tokens to emit are
      the choices of the first accepted + 1 nodes of the path.

    Example: anchor with children 5 and 7, the target chooses 7 and after it 2 -> path (0, node of
      7), 1 accepted; emitted 7, 2.
    """
    after_parent = jnp.take_along_axis(choices, tree.parents, axis=1)
    is_good = (tree.tokens == after_parent) & (tree.depths < active_len[:, None])
    is_good |= tree.depths == 0
    on_path = (is_good[:, None, :] | ~tree.sees).all(axis=2)
    node = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None, None, :]
    depth = jnp.arange(max_depth + 1, dtype=jnp.int32)[None, :, None]
    is_here = on_path[:, None, :] & (tree.depths[:, None, :] == depth)
    path = jnp.where(is_here, node, 0).sum(axis=2)
    return path, on_path.sum(axis=1, dtype=jnp.int32) - 1


def first_choices(tree: Tree, ids: Int[Array, "b m k"]) -> Bool[Array, "b n"]:
    """Whether a node is the anchor, or the first choice at its depth as are all its ancestors."""
    first = jnp.concatenate([tree.tokens[:, :1], ids[:, :, 0]], axis=1)
    is_first = tree.tokens == jnp.take_along_axis(first, tree.depths, axis=1)
    return (is_first[:, None, :] | ~tree.sees).all(axis=2)


def tree_step(
    target: Target,
    drafter: BlockDrafter,
    state: DecodeState,
    *,
    mode: str,
    draft_block_len: int,
    num_nodes: int,
    most_active: Int[Array, "b"] | None = None,
) -> tuple[StepResult, Chain]:
    """Drafts, verifies and accepts one tree per row.

    Args:
      target: Merged target.
      drafter: Its drafter.
      state: Its drafter's memory holds every position before the anchor.
      mode: Sampling mode, of sampling.MODES.
      draft_block_len: Slots of the drafter's block: the deepest node is one less.
      num_nodes: Nodes verified per row, the anchor included.
      most_active: Tokens that a row may emit, 1..draft_block_len; None = all.
    """
    axis, m = target.mesh_axis, draft_block_len - 1
    anchors, active_len, logits = block_logits(target, drafter, state, draft_block_len, most_active)
    top, ids = top_over(logits, min(num_nodes - 1, target.config.vocab_size), axis)
    log_probs = top - log_total(logits, axis)[..., None]
    # A broken drafter's slots are the last choice: they cost speed only.
    log_probs = jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)
    tree = grow(anchors, log_probs, ids, num_nodes)
    start = state.length - 1
    out, nodes = target.look(
        tree.tokens,
        state.target_cache,
        start,
        tree.depths,
        tree.sees,
        tap_layer_ids=drafter.config.target_layer_ids,
    )
    assert out.context_features is not None  # taps were asked for
    assert out.cache is not None
    logits = adjusted(out.logits, state, tree.tokens[:, 1:], mode, axis, sees=tree.sees[:, :, 1:])
    choices = sample(logits, state.sampling, state.length[:, None] + tree.depths, mode, axis)
    path, num_accepted = walk(tree, choices, active_len, m)
    along = lambda x: jnp.take_along_axis(x, path.reshape(*path.shape, *(1,) * (x.ndim - 2)), 1)
    chain = first_choices(tree, ids)
    is_offered = chain & (tree.depths < active_len[:, None])
    is_accepted = is_offered & (tree.depths <= num_accepted[:, None])
    number = jnp.arange(num_nodes, dtype=jnp.int32)[None, :]
    is_accepted &= jnp.take_along_axis(path, tree.depths, axis=1) == number
    count = lambda of: of.sum(axis=1, dtype=jnp.int32) - 1  # without the anchor
    logprobs = noted_logprobs(out.logits, choices, state, axis)
    result = StepResult(
        emitted=along(choices),
        num_accepted=num_accepted,
        num_offered=active_len - 1,
        logprobs=None if logprobs is None else Logprobs(*map(along, logprobs)),
        target_cache=write_path(out.cache, nodes, path, start),
        drafter_cache=drafter.inject_context(
            target, state.drafter_cache, along(out.context_features), along(tree.tokens), start
        ),
    )
    return result, Chain(count(is_accepted), count(is_offered))
