"""What decoding costs and what drafting buys, measured in one run.

Two questions, two models:

  * the embedded default on held-out prompts: accept length per scene (greedy and sampled, all
    answers and those that do not loop), and tokens/s of plain decoding against DFlash, batch 1,
    prompt by prompt in alternation, since the machine's speed drifts;
  * a dense model larger than the CPU's cache, with random weights: the cost of a plain step and
    of a DFlash round, from which the speed-up at any accept length follows.

Ratios are the figures to quote.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mimo_jax.bench.race import race
from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.config import GLOBAL, AttentionConfig, DrafterConfig, TargetConfig
from mimo_jax.decode import controller
from mimo_jax.decode.costs import Learnt
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import Completion, generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import GREEDY, SAMPLED
from mimo_jax.decode.stats import AcceptStats, is_looping
from mimo_jax.decode.tree import NUM_NODES
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import split
from mimo_jax.models.target import Target
from mimo_jax.text.tokenizer import Tokenizer
from mimo_jax.timing import alternate

DEFAULT_STOP_IDS = (0, 2)  # of the embedded default; a line may have its own
SEED_SCENES = {"agent": 4.29, "math": 5.56, "code": 6.30}  # accept lengths claimed at 1.02T


def load_models(checkpoint: Path) -> tuple[Model, Model]:
    """Target and drafter of a checkpoint directory, in float32."""
    return (
        Model(*load_target(checkpoint, dtype=jnp.float32)),
        Model(*load_drafter(checkpoint / "dflash", dtype=jnp.float32)),
    )


def read_requests(
    prompts: Path, tokenizer: Tokenizer, num_prompts: int, max_tokens: int, temperature: float
) -> dict[str, list[Request]]:
    """Held-out prompts per scene as requests."""
    requests = {}
    for path in sorted(prompts.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()[:num_prompts]]
        requests[path.stem] = [
            Request(
                tokenizer.encode(line["prompt"]),
                max_tokens,
                tuple(line.get("stop_token_ids", DEFAULT_STOP_IDS)),
                temperature=temperature,
                seed=number,
            )
            for number, line in enumerate(lines)
        ]
    return requests


def ceiling(completions: list[Completion], draft_block_len: int) -> float:
    """Accept length of the same answers if every draft were accepted."""
    counts = [len(c.token_ids) - 1 for c in completions if len(c.token_ids) > 1]
    return sum(counts) / max(sum(-(-n // draft_block_len) for n in counts), 1)


def accept_lengths(
    target: Model,
    drafter: Model,
    requests: dict[str, list[Request]],
    *,
    max_len: int,
    batch_size: int = 8,
) -> dict[str, dict]:
    """τ per scene over all answers and over those that do not loop."""
    sampled = any(r.temperature > 0 for scene in requests.values() for r in scene)
    engine = Engine(
        target,
        drafter,
        max_len=max_len,
        batch_size=batch_size,
        mode=SAMPLED if sampled else GREEDY,
    )
    rows = {}
    for scene, scene_requests in requests.items():
        completions = generate_all(engine, scene_requests)
        straight = [c for c in completions if not is_looping(c.token_ids)]
        stats = AcceptStats.of(completions, engine.draft_block_len)
        rows[scene] = {
            "tau": stats.tau,
            "tau_no_loops": AcceptStats.of(straight, engine.draft_block_len).tau,
            "looping": 1 - len(straight) / len(completions),
            "ceiling": ceiling(completions, engine.draft_block_len),
            "per_position_acceptance": stats.per_position_acceptance,
            "mean_tokens": float(np.mean([len(c.token_ids) for c in completions])),
            "num_prompts": len(completions),
        }
    return rows


def speeds(
    target: Model, drafter: Model, requests: dict[str, list[Request]], *, max_len: int
) -> dict[str, dict]:
    """Tokens/s of plain and DFlash, batch 1, alternating prompt by prompt; greedy, float32."""
    engines = {
        "plain": Engine(target, max_len=max_len),
        "dflash": Engine(target, drafter, max_len=max_len),
    }
    rows = {}
    for scene, laps in race(engines, requests).items():
        plain, dflash = laps["plain"], laps["dflash"]
        rows[scene] = {
            "plain_tokens_per_s": plain.tokens_per_s,
            "dflash_tokens_per_s": plain.num_decoded / dflash.decode_s,
            "speedup": plain.decode_s / dflash.decode_s,
            "speedup_with_prefill": plain.total_s / dflash.total_s,
            "tau": plain.num_decoded / dflash.num_steps,
            "plain_step_ms": plain.step_ms,
            "dflash_round_ms": dflash.step_ms,
            "break_even_tau": dflash.step_ms / plain.step_ms,
            "identical": dflash.identical,
            "num_prompts": len(requests[scene]),
        }
    return rows


def adaptive_jobs(
    target: Model, drafter: Model, requests: dict[str, list[Request]], *, max_len: int
) -> dict:
    """Decode time of whole jobs: plain, full blocks, trees, and what pays ("auto").

    Every prompt is answered by all engines, one after the other, in an order that turns with each
    prompt; what auto has learnt is carried from prompt to prompt. First every scene's job, then one
    with the scenes in turn. Answers must be identical.

    Returns:
      {"scenes": {scene: times and ratios}, "mixed": the same of the mixed job, "costs": measured
      seconds of a step of each rung}; best_fixed of the mixed job is the sum over its scenes of the
      best of the fixed choices for each.
    """
    engines = {
        "plain": Engine(target, max_len=max_len),
        "chain": Engine(target, drafter, max_len=max_len),
        "tree": Engine(target, drafter, max_len=max_len, max_verify_nodes=NUM_NODES),
        "auto": Engine(
            target, drafter, max_len=max_len, policy=controller.COSTS, max_verify_nodes=NUM_NODES
        ),
    }
    fixed = [name for name in engines if name != "auto"]
    jobs = {
        scene: [dataclasses.replace(r, scene=scene) for r in scene_requests]
        for scene, scene_requests in requests.items()
    }
    for engine in engines.values():  # compile and measure before the clock
        for job in jobs.values():
            for request in job:
                engine.prefill(request)
        generate_all(engine, next(iter(jobs.values()))[:1])

    def run(job: list[Request]) -> tuple[dict[str, list[float]], bool]:
        """Seconds of each answer's decoding by engine, and whether texts agree."""
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        learnt = {name: Learnt() for name in engines}
        identical = True
        for turn, request in enumerate(job):
            order = [list(engines)[(turn + i) % len(engines)] for i in range(len(engines))]
            ids = []
            for name in order:
                (done,) = generate_all(
                    engines[name], [request], learnt=learnt[name], steps_per_group=256
                )
                seconds[name].append(done.decode_s)
                ids.append(done.token_ids)
            identical &= all(one == ids[0] for one in ids)
        return seconds, identical

    def row(seconds: dict[str, list[float]], best_fixed: float, identical: bool) -> dict:
        total = {name: sum(times) for name, times in seconds.items()}
        return {f"{name}_s": total[name] for name in engines} | {
            "auto_over_plain_time": total["auto"] / total["plain"],
            "best_fixed_over_auto": best_fixed / total["auto"],
            "identical": identical,
        }

    scenes = {}
    for scene, job in jobs.items():
        seconds, identical = run(job)
        scenes[scene] = row(seconds, min(sum(seconds[name]) for name in fixed), identical)
    mixed = [r for together in zip(*jobs.values(), strict=False) for r in together]
    seconds, identical = run(mixed)
    best = 0.0
    for scene in jobs:
        own = [i for i, r in enumerate(mixed) if r.scene == scene]
        best += min(sum(seconds[name][i] for i in own) for name in fixed)
    auto = engines["auto"]
    costs = dict(zip(auto.rung_names, auto.costs or auto.nominal_costs, strict=True))
    return {"scenes": scenes, "mixed": row(seconds, best, identical), "costs": costs}


def dense_models() -> tuple[Model, Model]:
    """57.9M parameters in the Qwen3 shape and a 2-layer drafter, random: larger than the cache."""
    attention = AttentionConfig(
        num_heads=8, num_kv_heads=4, head_dim=64, v_head_dim=64, rope_theta=1e6, rope_dim=64
    )
    target = TargetConfig(
        vocab_size=32000,
        hidden_size=512,
        layer_kinds=(GLOBAL,) * 8,
        attention={GLOBAL: attention},
        dense_hidden_size=1536,
        use_qk_norm=True,
        norm_eps=1e-6,
    )
    drafter = DrafterConfig(
        hidden_size=512,
        num_layers=2,
        attention=attention,
        dense_hidden_size=1536,
        target_layer_ids=(1, 5),
        num_target_layers=8,
        draft_block_len=8,
        mask_token_id=31999,
        vocab_size=32000,
    )
    return (
        Model(target, *split(Target(target, rngs=nnx.Rngs(0)))),
        Model(drafter, *split(Drafter(drafter, rngs=nnx.Rngs(1)))),
    )


def dense_costs(num_steps: int = 48, rounds: int = 7) -> dict:
    """Cost of a plain step and a DFlash round of `dense_models`, batch 1, float32, prompt 64."""
    target, drafter = dense_models()
    prompt = np.random.default_rng(0).integers(0, 31000, 64).tolist()
    request = Request(prompt, max_tokens=192)
    engines = {
        "plain": Engine(target, max_len=256),
        "dflash": Engine(target, drafter, max_len=256),
    }
    # A random drafter accepts nothing, so every round commits one token and costs what any costs.
    states = {name: engine.prefill(request) for name, engine in engines.items()}

    def stepper(name):
        def run():
            states[name] = dataclasses.replace(
                engines[name].run(states[name], num_steps),
                length=jnp.full((1,), 65, jnp.int32),
                finish=jnp.zeros((1,), jnp.int32),
                num_steps=jnp.zeros((1,), jnp.int32),
            )
            return states[name].length

        return run

    timing = alternate({name: stepper(name) for name in engines}, rounds=rounds, num_warmup=2)
    plain_ms = timing.timings["plain"].median_s / num_steps * 1e3
    round_ms = timing.timings["dflash"].median_s / num_steps * 1e3
    ratio = timing.median_ratios["dflash"]
    return {
        "plain_step_ms": plain_ms,
        "plain_step_min_ms": timing.timings["plain"].min_s / num_steps * 1e3,
        "plain_tokens_per_s": 1e3 / plain_ms,
        "dflash_round_ms": round_ms,
        "dflash_round_min_ms": timing.timings["dflash"].min_s / num_steps * 1e3,
        "round_in_plain_steps": ratio,
        "speedup_at_tau": {f"{tau:.2f}": tau / ratio for tau in SEED_SCENES.values()},
    }


def steps_per_call(target: Model, drafter: Model, request: Request, max_len: int) -> dict:
    """Milliseconds per round for calls of 8 and of 64 rounds: the loop holds nothing that grows."""
    engine = Engine(target, drafter, max_len=max_len)
    start = engine.prefill(request)

    def run(num_steps):
        def call():
            state = dataclasses.replace(
                jax.tree.map(jnp.copy, start),
                max_len=np.full((1,), 10**6, np.int32),
                finish=np.zeros((1,), np.int32),
                stop_ids=np.full(start.stop_ids.shape, -1, np.int32),
            )
            return engine.run(state, num_steps).length

        return call

    timing = alternate({"8": run(8), "64": run(64)}, rounds=9)
    return {n: t.median_s / int(n) * 1e3 for n, t in timing.timings.items()}
