"""What it saves to read a shared system prompt once: time to the first token, and time of a job.

The same requests, a system prompt and a held-out question each, go through one engine with and
without their shared beginning known, in turn. Texts and accept lengths must be equal.
"""

import statistics
from pathlib import Path

from mimo_jax.bench.decode_bench import load_models, read_requests
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import Completion, generate_all
from mimo_jax.decode.prefix import PromptReader, shared_borders
from mimo_jax.decode.request import Request
from mimo_jax.decode.stats import AcceptStats
from mimo_jax.text.tokenizer import Tokenizer
from mimo_jax.timing import alternate

_RULE = "Answer in one short sentence. Name every step. If a number is asked for, give it last. "


def requests_behind(
    system_len: int, checkpoint: Path, prompts: Path, num_prompts: int, max_tokens: int
) -> list[Request]:
    """Held-out questions of the scenes chat and math, each behind the same system_len ids."""
    tokenizer = Tokenizer.from_file(checkpoint)
    system = tokenizer.encode("<|im_start|>system\n" + _RULE * system_len)[:system_len]
    by_scene = read_requests(prompts, tokenizer, num_prompts, max_tokens, 0.0)
    pairs = zip(by_scene["chat"], by_scene["math"], strict=True)
    asked = [request for pair in pairs for request in pair][:num_prompts]
    return [Request([*system, *r.prompt_ids], r.max_tokens, r.stop_ids) for r in asked]


def prefix_gain(
    checkpoint: Path,
    requests: list[Request],
    *,
    max_len: int,
    batch_size: int,
    rounds: int = 5,
) -> dict:
    """Median time to the first token and of a whole job, without and with reuse; float32, drafting.

    Args:
      checkpoint: Directory with a drafter in dflash/.
      requests: That begin alike.
      max_len: Of the engine.
      batch_size: Rows.
      rounds: Runs of each.
    """
    engine = Engine(*load_models(checkpoint), max_len=max_len, batch_size=batch_size)
    prompts = [r.prompt_ids for r in requests]
    ways = {"alone": [()] * len(prompts), "shared": shared_borders(prompts)}
    runs: dict[str, list[list[Completion]]] = {name: [] for name in ways}
    num_read = {}

    def job(name: str):
        def run():
            reader = PromptReader(engine, prompts, ways[name])
            done = generate_all(engine, requests, reader=reader, steps_per_group=8)
            runs[name].append(done)
            num_read[name] = reader.num_read
            return done[0].token_ids

        return run

    timing = alternate({name: job(name) for name in ways}, rounds=rounds, num_warmup=1)
    ttft_ms = {
        name: 1e3 * statistics.median(c.ttft_s for done in all_done[1:] for c in done)
        for name, all_done in runs.items()
    }
    ids = {name: [c.token_ids for c in all_done[-1]] for name, all_done in runs.items()}
    tau = {n: AcceptStats.of(done[-1], engine.draft_block_len).tau for n, done in runs.items()}
    return {
        "num_prompts": len(requests),
        "prompt_tokens": sum(map(len, prompts)),
        "read_alone": num_read["alone"],
        "read_shared": num_read["shared"],
        "ttft_alone_ms": ttft_ms["alone"],
        "ttft_shared_ms": ttft_ms["shared"],
        "job_alone_s": timing.timings["alone"].median_s,
        "job_shared_s": timing.timings["shared"].median_s,
        "job_ratio": timing.median_ratios["shared"],
        "tau_alone": tau["alone"],
        "tau_shared": tau["shared"],
        "identical": ids["alone"] == ids["shared"],
    }
