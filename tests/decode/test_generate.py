"""python -m pytest tests/decode/test_generate.py

Greedy speculative output must equal plain output token for token whatever is drafted, and the
loop must stay on the device.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.tiny import tiny_drafter, tiny_target
from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.config import ConfigError
from mimo_jax.decode.accept import RULES
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate, generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import FILTERED, SAMPLED
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import split
from mimo_jax.models.target import Target
from mimo_jax.testing.drafters import RandomDrafter, ScriptedDrafter

GOLDEN = "tests/golden/data"


def _model(config, module) -> Model:
    return Model(config, *split(module))


def _golden_pair(name: str) -> tuple[Model, Model]:
    return (
        Model(*load_target(f"{GOLDEN}/{name}-tiny")),
        Model(*load_drafter(f"{GOLDEN}/{name}-tiny-dflash")),
    )


@pytest.fixture(scope="module")
def mimo():
    return _golden_pair("mimo")


def _script(request: Request, answer: list[int]) -> np.ndarray:
    return np.asarray([*request.prompt_ids, *answer, *[0] * 16])


@pytest.mark.parametrize("name", ["mimo", "qwen3"])
def test_ids_and_committed_per_step_equal_the_goldens(name):
    """Goldens: two independent loops (z-lab's package, transformers); window 8 wraps the ring."""
    target, drafter = _golden_pair(name)
    golden = np.load(f"{GOLDEN}/{name}_tiny_dflash.npz")
    engine = Engine(target, drafter, max_len=64)
    for row in (0, 1):
        ids = golden[f"spec{row}_output_ids"]
        request = Request(ids[:16].tolist(), 48)
        (completion,) = generate_all(engine, [request])
        assert completion.token_ids == ids[16:].tolist()
        per_step = golden[f"spec{row}_produced_per_step"].tolist()
        assert completion.num_committed_per_step == per_step
        stop = Request(ids[:16].tolist(), 48, (int(golden[f"stop{row}_token"]),))
        (completion,) = generate_all(engine, [stop])
        assert completion.token_ids == golden[f"stop{row}_output_ids"][16:].tolist()
        assert completion.finish_reason == "stop"


def _drafters(target: Model, request: Request, answer: list[int]) -> dict[str, Model]:
    """Always right, always wrong, random and trained-shaped drafters for the golden target."""
    trained = Model(*load_drafter(f"{GOLDEN}/mimo-tiny-dflash"))
    script = _script(request, answer)
    config = trained.config
    return {
        "right": _model(config, ScriptedDrafter(config, script)),
        "wrong": _model(config, ScriptedDrafter(config, script, is_right=False)),
        "random": _model(config, RandomDrafter(config)),
        "trained": trained,
    }


@pytest.mark.parametrize("kind", ["right", "wrong", "random", "trained"])
def test_greedy_equals_plain_for_any_drafter(mimo, kind):
    target, _ = mimo
    prompt = np.random.default_rng(5).integers(0, 255, 21).tolist()
    plain = Engine(target, max_len=128)
    request = Request(prompt, 96)
    (expected,) = generate_all(plain, [request])
    engine = Engine(target, _drafters(target, request, expected.token_ids)[kind], max_len=128)
    stop_at = {where: expected.token_ids[i] for where, i in (("early", 3), ("late", 40))}
    cases = [(n, ()) for n in (1, 2, 8, 9, 17, 96)]
    cases += [(96, (stop,)) for stop in stop_at.values()]
    for max_tokens, stop_ids in cases:
        request = Request(prompt, max_tokens, stop_ids)
        want, got = (generate_all(e, [request])[0] for e in (plain, engine))
        assert got.token_ids == want.token_ids
        assert got.finish_reason == want.finish_reason
        assert sum(got.num_committed_per_step) == len(got.token_ids) - 1
    (whole,) = generate_all(engine, [Request(prompt, 96)])
    if kind == "right":
        assert whole.num_committed_per_step == [8] * 11 + [7]
    if kind == "wrong":
        assert whole.num_committed_per_step == [1] * 95


@pytest.mark.parametrize("position", range(9))
def test_stop_id_anywhere_in_a_block(mimo, position):
    """With an always-right drafter the first block commits tokens 1..8: a stop at each of them."""
    target, _ = mimo
    prompt = list(range(40, 60))
    (free,) = generate_all(Engine(target, max_len=128), [Request(prompt, 24)])
    stop_id = free.token_ids[position]
    first = free.token_ids.index(stop_id)
    drafters = _drafters(target, Request(prompt, 24), free.token_ids)
    engine = Engine(target, drafters["right"], max_len=128)
    (got,) = generate_all(engine, [Request(prompt, 24, (stop_id,))])
    assert got.token_ids == free.token_ids[: first + 1]
    assert got.finish_reason == "stop"


@pytest.fixture(scope="module")
def wide():
    """A tiny target with the published window of 128 and a random-weight drafter."""
    config = tiny_target(window=128)
    target = Target(config, rngs=nnx.Rngs(0))
    flat = target.embedding[...]
    target.embedding[...] = flat * 6  # larger embeddings: less repetitive greedy text
    drafter = Drafter(tiny_drafter(window=128), rngs=nnx.Rngs(1))
    return _model(config, target), _model(drafter.config, drafter)


@pytest.mark.parametrize("prompt_len", [120, 131, 243, 259])
def test_window_and_ring_crossings_at_128(wide, prompt_len):
    """Window 128; the ring has 136 slots and 5 behind: lengths 126-140 and 248-264 cross both."""
    target, drafter = wide
    prompt = np.random.default_rng(prompt_len).integers(0, 61, prompt_len).tolist()
    request = Request(prompt, 22)
    (plain,) = generate_all(Engine(target, max_len=384), [request])
    ids = jnp.asarray([prompt + plain.token_ids], jnp.int32)
    whole = jax.jit(lambda p: nnx.merge(target.graph, p)(ids).logits)(target.params)
    assert jnp.argmax(whole[0, prompt_len - 1 : -1], axis=-1).tolist() == plain.token_ids
    right = ScriptedDrafter(drafter.config, _script(request, plain.token_ids))
    for model in (drafter, _model(drafter.config, right)):
        (got,) = generate_all(Engine(target, model, max_len=384), [request])
        assert got.token_ids == plain.token_ids


def _mixed_requests(rng, count: int, temperature: float) -> list[Request]:
    return [
        Request(
            rng.integers(0, 255, int(rng.integers(3, 40))).tolist(),
            int(rng.integers(1, 40)),
            (int(rng.integers(0, 255)),),
            temperature=temperature if i % 3 else 0.0,
            top_p=0.9 if i % 2 else 1.0,
            top_k=20 if i % 5 == 0 else 0,
            seed=i,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("batch_size", [3, 11])
def test_batch_of_requests_equals_single_runs(mimo, batch_size):
    """Rows of different length, refilled while others run; 3 rows unroll, 11 scatter."""
    target, drafter = mimo
    requests = _mixed_requests(np.random.default_rng(0), 14, temperature=1.0)
    single = Engine(target, drafter, max_len=128, mode=FILTERED)
    batch = Engine(target, drafter, max_len=128, mode=FILTERED, batch_size=batch_size)
    want = generate_all(single, requests)
    got = generate_all(batch, requests, steps_per_group=5)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    per_step = [c.num_committed_per_step for c in want]
    assert [c.num_committed_per_step for c in got] == per_step


def test_sampled_speculation_equals_plain_sampling_token_for_token(mimo):
    target, drafter = mimo
    requests = [Request(list(range(9, 25)), 40, temperature=0.8, seed=s) for s in range(12)]
    plain = generate_all(Engine(target, max_len=128, mode=SAMPLED), requests)
    spec = generate_all(Engine(target, drafter, max_len=128, mode=SAMPLED), requests)
    assert [c.token_ids for c in spec] == [c.token_ids for c in plain]
    assert len({tuple(c.token_ids) for c in plain}) == len(requests)
    assert max(max(c.num_committed_per_step) for c in spec) > 1


@pytest.mark.parametrize("rule", RULES)
def test_sampled_decoding_follows_the_target_distribution(rule):
    """Chi-square of 1,200 speculative continuations of two tokens over 49 outcomes.

    The power check: the same counts against a law at another temperature are rejected.
    """
    config = tiny_target(vocab_size=7)
    target = Target(config, rngs=nnx.Rngs(4))
    drafter = RandomDrafter(tiny_drafter(vocab_size=7))
    models = _model(config, target), _model(drafter.config, drafter)
    prompt = [1, 5, 2]
    engine = Engine(*models, max_len=32, mode=SAMPLED, batch_size=40, rule=rule)
    requests = [Request(prompt, 3, temperature=1.0, seed=s) for s in range(1200)]
    pairs = collections.Counter(
        tuple(c.token_ids[1:]) for c in generate_all(engine, requests, steps_per_group=4)
    )

    rows = jnp.asarray([[*prompt, a, b] for a in range(7) for b in range(7)], jnp.int32)
    logits = jax.jit(lambda ids: target(ids).logits)(rows)

    def law(temperature):
        """P(second, third token), the first summed out."""
        probs = np.asarray(jax.nn.softmax(logits / temperature, axis=-1), np.float64)
        first, second, third = probs[0, 2], probs[::7, 3], probs[:, 4].reshape(7, 7, 7)
        return np.einsum("a,ab,abc->bc", first, second, third)

    def chi_square(temperature):
        expected = law(temperature) * len(requests)
        counts = np.asarray([[pairs[b, c] for c in range(7)] for b in range(7)])
        return float(((counts - expected) ** 2 / expected).sum())

    assert chi_square(1.0) < 84.04  # 0.999 quantile of chi-square with 48 degrees
    assert chi_square(0.5) > 84.04


def test_loop_stays_on_the_device_and_a_group_is_one_dispatch(mimo, monkeypatch):
    target, drafter = mimo
    engine = Engine(target, drafter, max_len=128, mode=SAMPLED)
    state = engine.prefill(Request([1, 2, 3], 40, temperature=1.0))
    text = engine.group_program(state).as_text()
    assert "while(" in text
    for forbidden in ("callback", "infeed", "outfeed", " send(", " recv(", "host_compute"):
        assert forbidden not in text.lower()
    calls = []
    monkeypatch.setattr(
        Engine, "run", lambda self, s, n, run=Engine.run: (calls.append(n), run(self, s, n))[1]
    )
    generate_all(engine, [Request([1, 2, 3], 40)], steps_per_group=64)
    assert calls == [64]


def test_streaming_gives_every_token_once(mimo):
    target, drafter = mimo
    engine = Engine(target, drafter, max_len=128, batch_size=2)
    seen = collections.defaultdict(list)
    done = dict(
        generate(
            engine,
            [Request([7, 8, 9], 30), Request([3] * 20, 11), Request([5], 19)],
            steps_per_group=2,
            on_tokens=lambda index, ids: seen[index].extend(ids),
        )
    )
    assert {i: c.token_ids for i, c in done.items()} == dict(seen)


def test_long_prompts_are_prefilled_in_chunks(wide):
    target, drafter = wide
    prompt = np.random.default_rng(1).integers(0, 61, 490).tolist()
    import mimo_jax.decode.engine as module

    (want,) = generate_all(Engine(target, drafter, max_len=512), [Request(prompt, 12)])
    chunk, module.PROMPT_CHUNK = module.PROMPT_CHUNK, 128
    try:
        (got,) = generate_all(Engine(target, drafter, max_len=512), [Request(prompt, 12)])
    finally:
        module.PROMPT_CHUNK = chunk
    assert got == want or got.token_ids == want.token_ids
    assert got.num_committed_per_step == want.num_committed_per_step


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 4), "prompt is empty"),
        (Request([1], 0), "max_tokens 0"),
        (Request([256], 4), "not in the vocabulary 0..255"),
        (Request([1] * 100, 40), "exceed the context of 128"),
        (Request([1], 4, tuple(range(9))), "at most 8"),
        (Request([1], 4, temperature=0.5), "needs an engine of mode sampled"),
    ],
)
def test_bad_requests_get_one_line(mimo, request_, message):
    with pytest.raises(ConfigError, match=message) as error:
        Engine(*mimo, max_len=128).prefill(request_)
    assert "\n" not in str(error.value)


def test_engine_refuses_what_cannot_work(mimo):
    target, drafter = mimo
    with pytest.raises(ConfigError, match="beyond the model's context of 512"):
        Engine(target, max_len=513)
    with pytest.raises(ConfigError, match=r"allowed: 2\.\.8"):
        Engine(target, drafter, max_len=64, draft_block_len=9)
    qwen = Model(*load_target(f"{GOLDEN}/qwen3-tiny"))
    with pytest.raises(ConfigError, match="num_target_layers is 7, expected 6"):
        Engine(qwen, drafter, max_len=64)


def test_shorter_blocks_than_trained_are_exact(mimo):
    target, drafter = mimo
    request = Request(list(range(30, 46)), 40)
    (plain,) = generate_all(Engine(target, max_len=128), [request])
    for draft_block_len in (2, 5):
        engine = Engine(target, drafter, max_len=128, draft_block_len=draft_block_len)
        (got,) = generate_all(engine, [request])
        assert got.token_ids == plain.token_ids
        assert max(got.num_committed_per_step) <= draft_block_len
