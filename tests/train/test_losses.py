"""Run: pytest tests/train/test_losses.py"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.train import losses

B, T, V, M = 3, 5, 11, 7


@pytest.mark.parametrize(
    ("num_draft_tokens", "gamma", "total", "head"),
    [
        (7, 4.0, 3.7352, [1, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231]),
        (9, 5.0, 4.6048, [1]),
        (15, 7.0, 6.6306, [1, 0.8669, 0.7515, 0.6514, 0.5647, 0.4895, 0.4244, 0.3679, 0.3189]),
    ],
)
def test_position_weights_match_published_values(
    num_draft_tokens: int, gamma: float, total: float, head: list[float]
) -> None:
    weights = losses.draft_position_weights(num_draft_tokens, gamma)
    assert weights.shape == (num_draft_tokens,)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights[: len(head)], head, atol=5e-5)
    np.testing.assert_allclose(weights.sum(), total, atol=1e-4)


def random_case(dtype: jnp.dtype = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    logits = 3 * jax.random.normal(keys[0], (B, T, V)).astype(dtype)
    labels = jax.random.randint(keys[1], (B, T), 0, V, jnp.int32)
    weights = jax.random.uniform(keys[2], (B, T)).at[:, 2].set(0.0)
    return logits, labels, weights


def loop_cross_entropy(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> float:
    total = 0.0
    for row, label, weight in zip(
        np.asarray(logits, np.float64).reshape(-1, V), labels.ravel(), weights.ravel(), strict=True
    ):
        total += float(weight) * (np.log(np.exp(row - row.max()).sum()) + row.max() - row[label])
    return total / float(np.asarray(weights, np.float64).sum())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weighted_cross_entropy_matches_a_float64_loop(dtype: jnp.dtype) -> None:
    logits, labels, weights = random_case(dtype)
    loss, aux = losses.weighted_cross_entropy(logits, labels, weights)
    expected = loop_cross_entropy(*map(np.asarray, (logits, labels, weights)))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected, rtol=2e-6)  # float32 sums of 15 terms
    hits = np.asarray(jnp.argmax(logits, -1) == labels)
    share = (hits * np.asarray(weights)).sum() / np.asarray(weights).sum()
    np.testing.assert_allclose(aux.accuracy, share, rtol=1e-6)
    np.testing.assert_allclose(aux.weight_sum, np.asarray(weights).sum(), rtol=1e-6)


def test_worked_example() -> None:
    loss, aux = losses.weighted_cross_entropy(
        jnp.array([[0.0, 0.0], [0.0, jnp.log(3.0)]]),
        jnp.array([0, 1], jnp.int32),
        jnp.array([1.0, 0.5]),
    )
    np.testing.assert_allclose(loss, (np.log(2) + 0.5 * np.log(4 / 3)) / 1.5, rtol=1e-6)
    np.testing.assert_allclose(aux.cross_entropy, [np.log(2), np.log(4 / 3)], rtol=1e-6)
    assert aux.is_correct.tolist() == [True, True]


def test_unweighted_positions_reach_neither_value_nor_gradient() -> None:
    logits, labels, weights = random_case()

    def loss_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return losses.weighted_cross_entropy(logits, labels, weights)[0]

    clean, clean_grad = jax.value_and_grad(loss_of)(logits, labels)
    poisoned, poisoned_grad = jax.value_and_grad(loss_of)(
        logits.at[:, 2].set(jnp.nan), labels.at[:, 2].set(-100)
    )
    np.testing.assert_array_equal(clean, poisoned)
    np.testing.assert_array_equal(clean_grad, poisoned_grad)
    assert not clean_grad[:, 2].any()
    assert clean_grad[:, 1].any()


def test_gradient_is_softmax_minus_one_hot() -> None:
    logits, labels, weights = random_case()
    grad = jax.grad(lambda x: losses.weighted_cross_entropy(x, labels, weights)[0])(logits)
    share = (weights / weights.sum())[..., None]
    expected = share * (jax.nn.softmax(logits, -1) - jax.nn.one_hot(labels, V))
    np.testing.assert_allclose(grad, expected, atol=1e-7)


def test_all_weights_zero_is_zero_with_zero_gradient() -> None:
    logits, labels, weights = random_case()
    value, grad = jax.value_and_grad(
        lambda x: losses.weighted_cross_entropy(x, labels, 0 * weights)[0]
    )(logits)
    assert value == 0
    assert not grad.any()


def test_global_mean_is_not_a_mean_of_row_means() -> None:
    logits, labels, _ = random_case()
    mask = jnp.arange(T)[None, :] < jnp.array([1, 4, 5])[:, None]
    loss, aux = losses.next_token_loss(logits, labels, mask)
    assert aux.weight_sum == 10
    np.testing.assert_allclose(loss, aux.cross_entropy.sum() / 10, rtol=1e-6)
    per_row = aux.cross_entropy.sum(1) / mask.sum(1).astype(jnp.float32)
    assert abs(loss - per_row.mean()) > 1e-2


def test_equal_logits_give_log_vocab() -> None:
    _, labels, _ = random_case()
    loss, _ = losses.next_token_loss(jnp.ones((B, T, V)), labels, jnp.ones((B, T), bool))
    np.testing.assert_allclose(loss, np.log(V), rtol=1e-6)


def test_divergence_of_a_student() -> None:
    """KL(.25 .75 | .5 .5); what is masked out may be NaN."""
    student = jnp.zeros((1, 3, 2)).at[0, 1].set(jnp.nan)
    teacher = jnp.log(jnp.asarray([[[0.25, 0.75], [1.0, jnp.nan], [0.5, 0.5]]]))
    mask = jnp.asarray([[True, False, True]])
    apart, back = jax.value_and_grad(losses.divergence)(student, teacher, mask)
    np.testing.assert_allclose(apart, 0.1308120 / 2, atol=1e-6)
    np.testing.assert_allclose(back[0], [[0.125, -0.125], [0, 0], [0, 0]], atol=1e-7)


def test_shift_labels_stays_inside_documents() -> None:
    labels, mask = losses.shift_labels(
        jnp.array([[5, 6, 7, 8, 9, 1]], jnp.int32),
        jnp.array([[False, True, True, True, True, True]]),
        jnp.array([[1, 1, 2, 2, 0, 0]], jnp.int32),
    )
    assert labels.tolist() == [[6, 7, 8, 9, 1, 0]]
    # 7 starts a document; 9 and 1 are padding; nothing follows the last token
    assert mask.tolist() == [[True, False, True, False, False, False]]


def test_accept_lengths_match_a_loop() -> None:
    keys = jax.random.split(jax.random.key(3), 2)
    is_correct = jax.random.bernoulli(keys[0], 0.7, (B, T, M))
    is_valid = jnp.arange(M)[None, None, :] < jax.random.randint(keys[1], (B, T, 1), 0, M + 1)
    lengths = []
    for correct, valid in zip(
        np.asarray(is_correct).reshape(-1, M), np.asarray(is_valid).reshape(-1, M), strict=True
    ):
        if valid[0]:
            prefix = 0
            while prefix < M and correct[prefix] and valid[prefix]:
                prefix += 1
            lengths.append(prefix + 1)
    assert 0 < len(lengths) < B * T
    actual, is_counted = losses.accept_lengths(is_correct, is_valid)
    np.testing.assert_array_equal(actual[is_counted], lengths)
    assert not actual[~is_counted].any()


@pytest.mark.parametrize(("hit", "expected"), [(True, M + 1), (False, 1)])
def test_accept_lengths_bounds(hit: bool, expected: int) -> None:
    is_valid = jnp.ones((B, M), bool)
    lengths, is_counted = losses.accept_lengths(jnp.full((B, M), hit), is_valid)
    assert is_counted.all()
    assert lengths.tolist() == [expected] * B
    lengths, is_counted = losses.accept_lengths(jnp.full((B, M), hit), ~is_valid)
    assert not is_counted.any()
    assert not lengths.any()
