"""`python -m mimo_jax.bench decode|drafters|load`: tables on the terminal, JSON beside them."""

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
class Drafters:
    """DFlash, several passes, EAGLE-3 and MTP heads on one target, trained equally long.

    Trains each kind for --seconds of processor time (kept, resumed and reused), then measures for
    about 10 minutes on 2 cores.
    """

    checkpoint: Path = Path("assets/mimo-nano")
    """Checkpoint directory with a DFlash drafter in dflash/, which gives the others their shape."""
    prompts: Path = Path("assets/prompts")
    """Directory of held-out prompts, SCENE.jsonl."""
    directory: Path = Path("out/bench/drafters")
    """Where trained drafters are kept."""
    text: Path = Path("out/bench/drafters/text")
    """The target's own answers as training rows; made if missing. Another home of them is the
    directory regenerate/ of a training run of this target."""
    seconds: float = 480.0
    """Processor seconds of training per drafter."""
    num_prompts: int = 20
    """Prompts per scene."""
    max_tokens: int = 200
    """Longest answer."""
    json: Path | None = Path("out/bench/drafters.json")
    """Where the figures are written."""


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
        {"decode": Decode, "drafters": Drafters, "load": Load},
        description="Measures: tables on the terminal, JSON beside.",
    )
    if isinstance(arguments, Load):
        return run_load(arguments)
    return run_drafters(arguments) if isinstance(arguments, Drafters) else run_decode(arguments)


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


def _table(
    title: str, rows: dict[str, dict], columns: dict[str, str], of: str = "scene"
) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(of, no_wrap=True)
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


def run_drafters(arguments: Drafters) -> int:
    """Trains or takes up every drafter, measures, prints and writes the JSON."""
    from mimo_jax.bench import drafters_bench as bench
    from mimo_jax.bench.decode_bench import load_models, read_requests
    from mimo_jax.checkpoint.safetensors_reader import CheckpointError
    from mimo_jax.text.tokenizer import Tokenizer
    from mimo_jax.train.loop import progress_bar
    from mimo_jax.train.provenance import machine

    console = Console()
    try:
        target, embedded = load_models(arguments.checkpoint)
        tokenizer = Tokenizer.from_file(arguments.checkpoint)
    except (CheckpointError, OSError, ValueError) as error:
        console.print(f"bench: {error}")
        return 2
    lines = [line for path in arguments.prompts.glob("*.jsonl") for line in path.open()]
    heldout = {json.loads(line)["prompt"] for line in lines}
    with progress_bar() as bar:
        tasks = {}

        def on_progress(scene: str, count: int, quota: int) -> None:
            if scene not in tasks:
                tasks[scene] = bar.add_task(f"answers {scene}", total=quota, figures="tokens")
            bar.update(tasks[scene], completed=count)

        rows = bench.answer_rows(target, tokenizer, arguments.text, heldout, on_progress)
    found = bench.contenders(target, embedded, rows, arguments.seconds, arguments.directory)
    requests = read_requests(
        arguments.prompts, tokenizer, arguments.num_prompts, arguments.max_tokens, 0.0
    )
    with progress_bar() as bar:
        total = 2 * sum(len(scene) for scene in requests.values())
        task = bar.add_task("measuring", total=total, figures="")
        rows = bench.compare(
            target,
            found,
            requests,
            max_len=target.config.max_position,
            on_progress=lambda: bar.advance(task),
        )
    columns = {
        "tau": ".2f",
        "draft_ms": ".3f",
        "verify_ms": ".3f",
        "step_ms": ".3f",
        "tokens_per_s": ",.0f",
        "over_plain": ".2f",
        "identical": "",
    }
    console.print(_table("Drafters, greedy, batch 1", rows, columns, of="drafter, block"))
    scenes = {name: row | row["scenes"] for name, row in rows.items()}
    columns = dict.fromkeys(requests, ".2f") | {"cpu_s": ".0f", "parameters": ",d"}
    console.print(_table("Accept length by scene", scenes, columns, of="drafter, block"))
    results = {"machine": machine(), "seconds": arguments.seconds, "drafters": rows}
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"written to {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
