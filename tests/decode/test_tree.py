"""Draft trees: their shape, the walk, and that what is emitted does not depend on them.

Run: .venv/bin/python -m pytest tests/decode/test_tree.py

Seen red: see tests/MUTATIONS.md.
"""

import heapq

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.config import ConfigError
from mimo_jax.decode import tree as trees
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import ADJUSTED, FILTERED, GREEDY, SAMPLED
from mimo_jax.layers.masks import tree_mask
from mimo_jax.layers.vocab import top_over
from mimo_jax.models.params import split
from mimo_jax.testing.drafters import ScriptedDrafter
from tests.golden.files import DATA

PROMPT = list(range(9, 25))


@pytest.fixture(scope="module")
def mimo():
    return (
        Model(*load_target(DATA / "mimo-tiny")),
        Model(*load_drafter(DATA / "mimo-tiny-dflash")),
    )


def _grow(probs, num_nodes, anchors=(99,)):
    """A tree over marginals [b, m, v]."""
    log_probs, ids = top_over(jnp.log(jnp.asarray(probs, jnp.float32)), min(num_nodes - 1, 5))
    return trees.grow(jnp.asarray(anchors, jnp.int32), log_probs, ids, num_nodes)


def test_literal_tree():
    tree = _grow([[[0.6, 0.4, 0.0], [0.1, 0.0, 0.9]]], 4)
    assert tree.tokens.tolist() == [[99, 0, 2, 1]]
    assert tree.parents.tolist() == [[0, 0, 1, 0]]
    assert tree.depths.tolist() == [[0, 1, 2, 1]]
    sees = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert tree.sees.astype(jnp.int32).tolist() == [sees]


def test_ancestors_of_a_long_line():
    line = jnp.asarray([[0, 0, 1, 2, 3, 4, 5]], jnp.int32)
    assert (trees.ancestors(line, 6)[0] == jnp.tril(jnp.ones((7, 7), bool))).all()


def _heap_tree(probs, num_nodes):
    """Prefixes of the largest products of marginals [m, v], best first, by a heap."""
    order = np.argsort(-probs, axis=1, kind="stable")
    heap, found = [(-probs[0].max(), (0,))], []
    while heap and len(found) < num_nodes - 1:
        score, ranks = heapq.heappop(heap)
        found.append((-score, tuple(order[d, r] for d, r in enumerate(ranks))))
        depth, last = len(ranks), ranks[-1]
        if last + 1 < probs.shape[1]:
            before = -score / probs[depth - 1, order[depth - 1, last]]
            next_score = before * probs[depth - 1, order[depth - 1, last + 1]]
            heapq.heappush(heap, (-next_score, (*ranks[:-1], last + 1)))
        if depth < len(probs):
            child = -score * probs[depth].max()
            heapq.heappush(heap, (-child, (*ranks, 0)))
    return found


@pytest.mark.parametrize(("m", "num_nodes"), [(1, 5), (3, 12), (7, 33)])
def test_it_holds_the_likeliest_prefixes(m, num_nodes):
    rng = np.random.default_rng(m)
    probs = rng.dirichlet(np.full(40, 0.15), size=(2, m))
    log_probs, ids = top_over(jnp.log(jnp.asarray(probs, jnp.float32)), num_nodes - 1)
    tree = trees.grow(jnp.asarray([7, 8], jnp.int32), log_probs, ids, num_nodes)
    for row in range(2):
        got = []
        for node in range(1, num_nodes):
            path = np.flatnonzero(tree.sees[row, node])
            assert tree.depths[row, path].tolist() == list(range(len(path)))  # parents first
            assert int(tree.parents[row, node]) == path[-2]
            got.append(tuple(tree.tokens[row, path[1:]].tolist()))
        want = [prefix for _, prefix in _heap_tree(probs[row], num_nodes)]
        assert got == want


def test_literal_walk():
    """Anchor with children 5 and 7; 7 has the child 2, whose child is 3."""
    parents = jnp.asarray([[0, 0, 0, 2, 3]], jnp.int32)
    tree = trees.Tree(
        jnp.asarray([[1, 5, 7, 2, 3]], jnp.int32),
        parents,
        jnp.asarray([[0, 1, 1, 2, 3]], jnp.int32),
        trees.ancestors(parents, 3),
    )
    walk = lambda choices, active: [
        x.tolist()[0]
        for x in trees.walk(
            tree, jnp.asarray([choices], jnp.int32), jnp.asarray([active], jnp.int32), 3
        )
    ]
    assert walk([7, 0, 2, 9, 3], 4) == [[0, 2, 3, 0], 2]
    assert walk([7, 0, 2, 3, 3], 4) == [[0, 2, 3, 4], 3]
    assert walk([7, 0, 2, 3, 3], 2) == [[0, 2, 0, 0], 1]  # room for two tokens
    assert walk([6, 0, 2, 3, 3], 4) == [[0, 0, 0, 0], 0]  # 2 and 3 fit, but hang on 7


def test_window_hides_far_ancestors():
    depths = jnp.asarray([[0, 1, 2, 1]], jnp.int32)
    sees = trees.ancestors(jnp.asarray([[0, 0, 1, 0]], jnp.int32), 2)
    got = tree_mask(depths, sees, 2)[0].astype(jnp.int32)
    assert got.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]


def test_each_node_reads_as_the_text_of_its_ancestors(mimo):
    """Logits and features of every node equal those of its path as a text of its own."""
    model = mimo[0]
    target = nnx.merge(model.graph, model.params)
    p, taps = 45, (0, 2)  # longer than the window of 39, shorter than the ring
    prompt = np.random.default_rng(0).integers(3, 90, size=(1, p)).astype(np.int32)
    cache = target.make_cache(1, 96, 8)
    start, num_valid = jnp.asarray([0], jnp.int32), jnp.asarray([p], jnp.int32)
    out = target.prefill(jnp.asarray(prompt), cache, start, num_valid, is_first=True)
    # Positions at or past the anchor hold garbage, as after a rollback.
    garbage = jnp.full((1, 8), 3, jnp.int32)
    cache = target.step(garbage, out.cache, num_valid).cache
    parents = jnp.asarray([[0, 0, 0, 2, 3, 1]], jnp.int32)
    depths = jnp.asarray([[0, 1, 1, 2, 3, 2]], jnp.int32)
    tokens = jnp.asarray([[50, 5, 7, 2, 3, 7]], jnp.int32)
    sees = trees.ancestors(parents, 3)
    got, nodes = target.look(tokens, cache, num_valid, depths, sees, tap_layer_ids=taps)
    assert nodes[0].keys.shape[2] == 6
    for node in range(6):
        path = np.flatnonzero(sees[0, node])
        text = np.concatenate([prompt, np.asarray(tokens)[:, path]], axis=1)
        want = target(jnp.asarray(text), tap_layer_ids=taps)
        np.testing.assert_allclose(got.logits[:, node], want.logits[:, -1], atol=2e-5)
        np.testing.assert_allclose(
            got.context_features[:, node], want.context_features[:, -1], atol=2e-5
        )


REQUESTS = {
    GREEDY: {},
    SAMPLED: {"temperature": 0.9, "seed": 5},
    FILTERED: {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 6},
    ADJUSTED: {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.3,
               "logit_bias": ((17, 3.0),), "seed": 7},
}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "batch_size", "num_nodes", "policy"),
    [
        (GREEDY, 1, 2, None),
        (GREEDY, 3, 12, None),
        (SAMPLED, 1, 16, None),
        (FILTERED, 1, 7, "costs"),
        (ADJUSTED, 3, 9, None),
    ],
)
def test_text_is_that_of_plain_decoding(mimo, mode, batch_size, num_nodes, policy):
    target, drafter = mimo
    fields = REQUESTS[mode]
    requests = [
        Request(PROMPT, 70, **fields),
        Request(list(range(40, 60)), 61, stop_ids=(11,), **fields),
        Request(list(range(3, 60)), 50, **fields),
        Request([5], 9, **fields),
    ]
    options = {"max_len": 128, "mode": mode, "max_bias_ids": 1, "num_logprobs": 2}
    plain = generate_all(Engine(target, **options), requests)
    engine = Engine(
        target, drafter, batch_size=batch_size, max_verify_nodes=num_nodes, policy=policy, **options
    )
    if policy is not None:
        engine.costs = [1.0, 1.0, 1.0, 1.0]
    got = generate_all(engine, requests, steps_per_group=5)
    assert [c.token_ids for c in got] == [c.token_ids for c in plain]
    for ours, theirs in zip(got, plain, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
        assert sum(ours.num_committed_per_step) == len(ours.token_ids) - 1
    assert max(sum(c.num_accepted_per_step) for c in got) > 0


class _TwoGuesses(ScriptedDrafter):
    """The script is its second choice everywhere; its first is always wrong."""

    def draft_logits(self, target, anchors, cache, anchor_pos, active_len, draft_block_len):
        right = super().draft_logits(
            target, anchors, cache, anchor_pos, active_len, draft_block_len
        )
        return 40.0 * jnp.roll(right, 1, axis=-1) + 39.9 * right


def _scripted(mimo, kind, mode=GREEDY, **fields):
    target, trained = mimo
    plain = Engine(target, max_len=160, mode=mode)
    (free,) = generate_all(plain, [Request(PROMPT, 90, **fields)])
    script = np.asarray([*PROMPT, *free.token_ids, *[0] * 16])
    return target, Model(trained.config, *split(kind(trained.config, script))), free.token_ids


def test_a_second_choice_that_is_right_is_found(mimo):
    """A chain accepts nothing; 15 nodes hold all prefixes of 3 choices of two."""
    target, drafter, want = _scripted(mimo, _TwoGuesses)
    chain = Engine(target, drafter, max_len=160)
    tree = Engine(target, drafter, max_len=160, max_verify_nodes=15)
    (by_chain,), (by_tree,) = (generate_all(e, [Request(PROMPT, 90)]) for e in (chain, tree))
    assert by_chain.token_ids == by_tree.token_ids == want
    assert set(by_chain.num_committed_per_step) == {1}
    assert np.mean(by_tree.num_committed_per_step) > 3


def test_penalties_count_the_ancestors_of_a_node(mimo):
    """Siblings and cousins are not said; deep paths that are accepted would show it."""
    fields = {"frequency_penalty": -0.5, "temperature": 0.7, "seed": 3}  # what was said attracts
    target, drafter, want = _scripted(mimo, _TwoGuesses, ADJUSTED, **fields)
    options = {"max_len": 160, "mode": ADJUSTED, "max_verify_nodes": 15}
    request = Request(PROMPT, 90, **fields)
    (got,) = generate_all(Engine(target, drafter, **options), [request])
    assert got.token_ids == want
    assert np.mean(got.num_committed_per_step) > 3


@pytest.mark.parametrize("num_trees", [12, 30])
def test_the_path_reaches_the_memories(mimo, num_trees):
    """Blocks after some trees accept what they accept right after a prompt of that text."""
    target, drafter = mimo
    engine = Engine(target, drafter, max_len=300, policy="costs", max_verify_nodes=12)
    engine.costs = [1.0, 1.0, 1.0, 1.0]
    state = engine.prefill(Request(PROMPT, 280))
    for rung, count in ((3, num_trees), (2, 6)):
        state = engine.run(state, count, held=rung)
    committed, accepted = (
        np.asarray(x)[0, : num_trees + 6]
        for x in (state.committed_per_step, state.accepted_per_step)
    )
    assert committed[:num_trees].max() > 1
    said = len(PROMPT) + 1 + committed[:num_trees].sum()
    ids = np.asarray(state.tokens)[0, : said - 1].tolist()
    (want,) = generate_all(Engine(target, drafter, max_len=300), [Request(ids, 60)])
    assert accepted[num_trees:].tolist() == want.num_accepted_per_step[:6]


@pytest.mark.parametrize(("tree_cost", "is_tree"), [(2.0, True), (30.0, False)])
def test_auto_takes_a_tree_only_where_it_is_faster(mimo, tree_cost, is_tree):
    target, drafter, want = _scripted(mimo, _TwoGuesses)
    engine = Engine(target, drafter, max_len=160, max_verify_nodes=15, policy="costs")
    engine.costs = [1.0, 1.5, 2.0, tree_cost]
    requests = [Request(PROMPT, 90, scene="math")] * 2
    first, second = generate_all(engine, requests)
    assert first.token_ids == second.token_ids == want
    tau = np.mean(second.num_committed_per_step)
    assert tau > 3 if is_tree else tau < 1.3


def test_bad_trees_are_one_line(mimo):
    v = mimo[0].config.vocab_size
    with pytest.raises(ConfigError, match=f"max_verify_nodes 1 is out of range; allowed: 2..{v}"):
        Engine(*mimo, max_len=64, max_verify_nodes=1)
    with pytest.raises(ConfigError, match="trees know the rule match only, not block"):
        Engine(*mimo, max_len=64, max_verify_nodes=8, rule="block")
    with pytest.raises(ConfigError, match="the policy profile knows chains only, not trees"):
        Engine(*mimo, max_len=64, max_verify_nodes=8, policy="profile")
