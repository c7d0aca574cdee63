"""`python -m mimo_jax.bench decode|context|load`: tables on the terminal, JSON beside them."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Decode:
    """Accept length, tokens/s and step costs of plain decoding and DFlash.

    Takes about 6 minutes on 2 quiet cores; --num-prompts 40 about 3.
    """

    checkpoint: Path = Path("assets/mimo-nano")
    """Checkpoint directory with a drafter in dflash/."""
    prompts: Path = Path("assets/prompts")
    """Directory of held-out prompts, SCENE.jsonl."""
    num_prompts: int = 200
    """Prompts per scene for accept lengths."""
    num_speed_prompts: int = 40
    """Prompts per scene for tokens/s."""
    max_tokens: int = 200
    """Longest answer."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    """Temperatures at which accept lengths are measured."""
    only: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Parts to run, any of tau, speed, auto, dense, loop; default all."""
    json: Path | None = Path("out/bench/decode.json")
    """Where the figures are written."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Time of a step and of a prompt chunk by context, and answers with quantised memory.

    Takes about 15 minutes on 2 quiet cores and 2 GB of memory.
    """

    checkpoint: Path = Path("assets/mimo-nano")
    """Checkpoint directory with a drafter in dflash/."""
    prompts: Path = Path("assets/prompts")
    """Directory of held-out prompts, SCENE.jsonl."""
    num_prompts: int = 12
    """Prompts per scene for answers."""
    rounds: int = 7
    """Turns per measurement."""
    only: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Parts to run, any of steps, short, prefill, answers; default all."""
    json: Path | None = Path("out/bench/context.json")
    """Where the figures are written."""
    plot: Path | None = Path("out/bench/context.png")
    """Where the picture of part steps is drawn."""


@dataclasses.dataclass(frozen=True)
class Load:
    """Rate and memory of reading a checkpoint into 8 virtual CPU devices, against dd."""

    directory: Path = Path("out/bench/load")
    """Where the synthetic checkpoint is written, once; it stays there."""
    num_layers: int = 20
    """Layers of it, 0.2 GB each."""
    json: Path | None = Path("out/bench/load.json")
    """Where the figures are written."""


def main() -> int:
    arguments = tyro.extras.subcommand_cli_from_dict(
        {"decode": Decode, "context": Context, "load": Load},
        description="Measures: tables on the terminal, JSON beside.",
    )
    if isinstance(arguments, Context):
        return run_context(arguments)
    return run_load(arguments) if isinstance(arguments, Load) else run_decode(arguments)


def run_context(arguments: Context) -> int:
    """Runs the asked parts, prints them, writes the JSON and draws the picture."""
    from mimo_jax.bench import context_bench as bench
    from mimo_jax.bench import decode_bench, kv_bench
    from mimo_jax.bench.context_plot import draw_context
    from mimo_jax.text.tokenizer import Tokenizer
    from mimo_jax.train.provenance import machine

    console = Console()
    parts = arguments.only or ("steps", "short", "prefill", "answers")
    rounds = arguments.rounds
    results: dict = {"machine": machine()}
    if "steps" in parts:
        results["memory"] = memory = bench.memory_rate()
        console.print(f"Summing memory: {memory}")
        results["steps"] = steps = {}
        for v in bench.VARIANTS:
            steps[v.name] = rows = bench.step_times(
                v, bench.CONTEXTS, bench.CAPACITY, num_steps=8, rounds=rounds
            )
            columns = {"ms": ".3f", "min_ms": ".3f", "processor_ms": ".3f", "read_mb": ",.1f"}
            by_context = {f"{n:,}": row for n, row in rows.items()}
            console.print(_table(f"A step, {v.name}", by_context, columns))
        results["growth"] = {name: bench.growth(rows) for name, rows in steps.items()}
        columns = {
            "ratio": ".2f",
            "processor_ratio": ".2f",
            "gb_per_s": ".1f",
            "processor_gb_per_s": ".1f",
        }
        console.print(_table("From the shortest to the longest", results["growth"], columns))
        if arguments.plot is not None:
            draw_context(steps, memory["processor_gb_per_s"], arguments.plot)
    if "short" in parts:
        results["short"] = short = bench.short_rows(100, (512, bench.CAPACITY), rounds=rounds)
        columns = {"ms": ".3f", "min_ms": ".3f", "processor_ms": ".3f"}
        rows = {f"{v} in {c:,}": row for v, by in short.items() for c, row in by.items()}
        console.print(_table("A row of 100 tokens", rows, columns))
    if "prefill" in parts:
        results["prefill"] = {
            v.name: bench.prefill_costs(v, (0, 99_840, 199_680), bench.CAPACITY, rounds=rounds)
            for v in bench.VARIANTS
        }
        console.print(f"Prompt chunks of 512: {json.dumps(results['prefill'], indent=1)}")
    if "answers" in parts:
        target, drafter = decode_bench.load_models(arguments.checkpoint)
        max_len = target.config.max_position
        requests = decode_bench.read_requests(
            arguments.prompts,
            Tokenizer.from_file(arguments.checkpoint),
            arguments.num_prompts,
            max_len,
            0.0,
        )
        results["answers"] = kv_bench.quantised_answers(target, drafter, requests, max_len=max_len)
        columns = {
            "identical": ".0%",
            "agreed_share": ".2f",
            "nll": ".4f",
            "tau": ".2f",
            "mean_tokens": ".0f",
            "drafting_changes": "d",
            "bytes_per_token": ".0f",
        }
        for name, rows in results["answers"].items():
            console.print(_table(f"Answers, {name}", rows, columns))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"written to {arguments.json}")
    return 0


def run_load(arguments: Load) -> int:
    """Writes the checkpoint if needed, measures, prints and writes the JSON."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from mimo_jax.bench import load_bench
    from mimo_jax.train.provenance import machine

    console = Console()
    with console.status("writing the checkpoint"):
        load_bench.write_synthetic(arguments.directory, arguments.num_layers)
    figures = load_bench.measure_load(arguments.directory)
    results = dataclasses.asdict(figures) | {"machine": machine()}
    console.print(json.dumps(results, indent=1))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _table(title: str, rows: dict[str, dict], columns: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("scene")
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    for scene, row in rows.items():
        cells = [
            "-" if row[name] is None else format(row[name], spec) for name, spec in columns.items()
        ]
        table.add_row(scene, *cells)
    return table


def run_decode(arguments: Decode) -> int:
    """Runs the asked parts, prints them and writes the JSON."""
    from mimo_jax.bench import decode_bench as bench
    from mimo_jax.checkpoint.safetensors_reader import CheckpointError
    from mimo_jax.text.tokenizer import Tokenizer
    from mimo_jax.train.provenance import machine

    console = Console()
    parts = arguments.only or ("tau", "speed", "auto", "dense", "loop")
    results: dict = {"machine": machine(), "max_tokens": arguments.max_tokens}
    try:
        target, drafter = bench.load_models(arguments.checkpoint)
        tokenizer = Tokenizer.from_file(arguments.checkpoint)
    except (CheckpointError, OSError, ValueError) as error:
        console.print(f"bench: {error}")
        return 2
    max_len = target.config.max_position

    def requests(count: int, temperature: float):
        return bench.read_requests(
            arguments.prompts, tokenizer, count, arguments.max_tokens, temperature
        )

    if "speed" in parts:
        results["speed"] = bench.speeds(
            target, drafter, requests(arguments.num_speed_prompts, 0.0), max_len=max_len
        )
        columns = {
            "plain_tokens_per_s": ",.0f",
            "dflash_tokens_per_s": ",.0f",
            "speedup": ".2f",
            "speedup_with_prefill": ".2f",
            "tau": ".2f",
            "break_even_tau": ".2f",
            "plain_step_ms": ".3f",
            "dflash_round_ms": ".3f",
            "identical": "",
        }
        console.print(_table("Embedded default, greedy, batch 1", results["speed"], columns))
    if "auto" in parts:
        results["auto"] = auto = bench.adaptive_jobs(
            target, drafter, requests(arguments.num_speed_prompts, 0.0), max_len=max_len
        )
        columns = {
            "plain_s": ".2f",
            "chain_s": ".2f",
            "auto_s": ".2f",
            "auto_over_plain_time": ".3f",
            "best_fixed_over_auto": ".3f",
            "identical": "",
        }
        rows = auto["scenes"] | {"mixed": auto["mixed"]}
        console.print(_table("Decode seconds of a job, greedy, batch 1", rows, columns))
        console.print(f"Seconds of a step by block length: {auto['costs']}")
    if "dense" in parts:
        results["dense"] = dense = bench.dense_costs()
        console.print(f"Dense 57.9M, float32, batch 1: {json.dumps(dense, indent=1)}")
    if "tau" in parts:
        results["tau"] = {}
        for temperature in arguments.temperatures:
            rows = bench.accept_lengths(
                target, drafter, requests(arguments.num_prompts, temperature), max_len=max_len
            )
            results["tau"][f"{temperature:.1f}"] = rows
            columns = {
                "tau": ".2f",
                "tau_no_loops": ".2f",
                "looping": ".1%",
                "ceiling": ".2f",
                "mean_tokens": ".0f",
                "num_prompts": "d",
            }
            console.print(_table(f"Accept length, temperature {temperature:.1f}", rows, columns))
    if "loop" in parts:
        request = next(iter(requests(1, 0.0).values()))[0]
        results["loop"] = bench.steps_per_call(target, drafter, request, max_len)
        console.print(f"Milliseconds per round by rounds per call: {results['loop']}")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"written to {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
