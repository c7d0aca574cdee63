"""Replays answers of `serve.py batch --detailed` in independent code: same ids, same steps.

The other side is transformers' `MiMoV2FlashForCausalLM` and the published package `dflash`, both in
torch. Not part of the test suite (0.9 GB of packages); run it in an environment of its own:

    python3.11 -m venv /tmp/outside && . /tmp/outside/bin/activate
    pip install torch==2.13.0 transformers==5.24.0 && pip install --no-deps dflash==0.1.0
    python tests/outside/replay.py assets/mimo-nano out/answers.jsonl

A checkpoint with MXFP4 experts is written anew for this, in plain numbers of the same values:

    python -m mimo_jax.checkpoint export assets/mimo-nano out/plain --dtype float32

The answers must be greedy float32 ones. Differences at near ties are printed with the margin of the
two best logits; the exit status is 1 if any id or step differs.
"""

import json
import sys
from pathlib import Path

import dflash.model as dflash
import torch
from transformers import MiMoV2FlashForCausalLM


def main(checkpoint: Path, answers: Path) -> int:
    torch.manual_seed(0)
    dflash._cuda_time = lambda: 0.0  # its statistics want a GPU's clock
    target = MiMoV2FlashForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    drafter = dflash.DFlashDraftModel.from_pretrained(
        checkpoint / "dflash", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    totals = {"lines": 0, "same_ids": 0, "same_steps": 0}
    for line in answers.read_text().splitlines():
        answer = json.loads(line)
        prompt, ids = answer["prompt_token_ids"], answer["token_ids"]
        stop_ids = answer["stop_token_ids"] if "stop_token_ids" in answer else None
        if stop_ids is None:
            stop_ids = [ids[-1]] if answer["finish_reason"] == "stop" else []
        with torch.no_grad():
            replay = dflash.dflash_generate(
                drafter,
                target,
                torch.tensor([prompt]),
                # The limit shapes the last blocks, so it must be the one of the run.
                answer["max_tokens"] if "max_tokens" in answer else 128,
                stop_ids or None,
                return_stats=True,
            )
        other = replay.output_ids[0, len(prompt) :].tolist()
        totals["lines"] += 1
        totals["same_ids"] += other == ids
        totals["same_steps"] += replay.acceptance_lengths == answer["num_committed_per_step"]
        if other != ids:
            first = next(
                (i for i, pair in enumerate(zip(other, ids, strict=False)) if pair[0] != pair[1]),
                min(len(other), len(ids)),
            )
            with torch.no_grad():
                logits = target(torch.tensor([prompt + ids[:first]])).logits[0, -1]
            best = torch.topk(logits, 2).values
            print(f"{answer['id']}: ids differ at {first}, margin {best[0] - best[1]:.2e}")
        elif replay.acceptance_lengths != answer["num_committed_per_step"]:
            print(f"{answer['id']}: steps {replay.acceptance_lengths}")
            print(f"{' ' * len(answer['id'])}  ours  {answer['num_committed_per_step']}")
    print(json.dumps(totals))
    return int(not totals["lines"] == totals["same_ids"] == totals["same_steps"])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
