"""What `python -m mimo_jax.bench` runs: measures, draws the tables, writes the JSON."""

import dataclasses
import json
import tempfile

from rich.console import Console
from rich.table import Table

from mimo_jax.bench.options import (
    Context,
    Decode,
    Drafters,
    Fp8,
    Load,
    Lossless,
    Moe,
    Optimizers,
    Prefix,
    Qat,
    Train,
)


def run_prefix(arguments: Prefix) -> int:
    """Measures every batch size, prints and writes the JSON."""
    from mimo_jax.bench import prefix_bench as bench
    from mimo_jax.train.provenance import machine

    console = Console()
    requests = bench.requests_behind(
        arguments.system_len,
        arguments.checkpoint,
        arguments.prompts,
        arguments.num_prompts,
        arguments.max_tokens,
    )
    longest = max(len(r.prompt_ids) + r.max_tokens for r in requests)
    rows = {
        f"batch {batch_size}": bench.prefix_gain(
            arguments.checkpoint, requests, max_len=longest, batch_size=batch_size
        )
        for batch_size in arguments.batch_sizes
    }
    columns = {
        "ttft_alone_ms": ".1f",
        "ttft_shared_ms": ".1f",
        "job_ratio": ".2f",
        "tau_alone": ".3f",
        "tau_shared": ".3f",
        "identical": "",
    }
    console.print(_table("A shared system prompt, read for each and read once", rows, columns))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        results = {"machine": machine(), "system_len": arguments.system_len, "rows": rows}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def run_qat(arguments: Qat) -> int:
    """Measures the three forms, prints the table and writes the JSON."""
    from mimo_jax.bench import qat_bench as bench
    from mimo_jax.checkpoint.safetensors_reader import CheckpointError
    from mimo_jax.train.provenance import machine
    from mimo_jax.train.row_files import read_rows
    from mimo_jax.train.start import load_float_target

    console = Console()
    texts = read_rows(arguments.text)
    if not texts:
        console.print(f"bench: {arguments.text}: no SCENE.npz; train.py writes them", markup=False)
        return 2
    try:
        for directory in (arguments.plain, arguments.qat):
            bench.check_same_ids(directory, arguments.text)
        plain, qat = map(load_float_target, (arguments.plain, arguments.qat))
    except (CheckpointError, OSError, ValueError) as error:
        console.print(f"bench: {error}", markup=False)
        return 2
    rows = bench.compare(plain, qat, texts, arguments.rule)
    losses = {"tokens": ",d"} | dict.fromkeys(bench.FORMS, ".4f")
    console.print(_table("Held-out loss, nats per token", rows, losses))
    columns = dict.fromkeys(("gap", "gap_pm", "left", "left_pm"), ".4f") | {"closed": ".0%"}
    console.print(_table("Gap from naive to float, and what qat left of it", rows, columns))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        results = {"machine": machine(), "rule": arguments.rule, "scenes": rows}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def run_optimizers(arguments: Optimizers) -> int:
    """Trains with every rate, prints curves and the count of steps, writes the JSON."""
    from mimo_jax.bench import optimizers_bench as bench
    from mimo_jax.checkpoint.hf_target import open_target
    from mimo_jax.checkpoint.safetensors_reader import CheckpointError
    from mimo_jax.text.tokenizer import Tokenizer
    from mimo_jax.train.muon import ADAMW, MUON
    from mimo_jax.train.provenance import machine

    console = Console()
    try:
        packed, _ = open_target(arguments.checkpoint)
        tokenizer = Tokenizer.from_file(arguments.checkpoint)
    except (CheckpointError, OSError, ValueError) as error:
        console.print(f"bench: {error}", markup=False)
        return 2
    moe = None if packed.moe is None else dataclasses.replace(packed.moe, is_mxfp4=False)
    text = bench.read_text(tokenizer, bench.CHARS, arguments.row_len)
    runs = bench.measure(
        dataclasses.replace(packed, moe=moe),
        text,
        {ADAMW: arguments.adamw_rates, MUON: arguments.muon_rates},
        num_steps=arguments.steps,
        batch_rows=arguments.batch_rows,
        eval_every=arguments.eval_every,
    )
    rows = {
        f"{name} {run.rate:g}": {f"step {step}": loss for step, loss in run.losses.items()}
        for name, of_rate in runs.items()
        for run in of_rate
    }
    last = list(next(iter(rows.values())))
    fifths = [last[max(len(last) * k // 5, 1) - 1] for k in range(1, 6)]
    shown = dict.fromkeys(fifths, ".3f")
    console.print(_table("Held-out loss, nats per token", rows, shown, of="optimizer, rate"))
    summary = bench.compare(runs)
    console.print(json.dumps(summary, indent=1), markup=False)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        results = {"machine": machine(), "summary": summary, "losses": rows}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
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
            "tree_s": ".2f",
            "auto_s": ".2f",
            "auto_over_plain_time": ".3f",
            "best_fixed_over_auto": ".3f",
            "identical": "",
        }
        rows = auto["scenes"] | {"mixed": auto["mixed"]}
        console.print(_table("Decode seconds of a job, greedy, batch 1", rows, columns))
        console.print(f"Seconds of a step by rung: {auto['costs']}")
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


def run_lossless(arguments: Lossless) -> int:
    """Compares, prints a row per mode and batch size and writes the JSON."""
    import jax
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from mimo_jax.bench import decode_bench, lossless
    from mimo_jax.checkpoint.safetensors_reader import CheckpointError
    from mimo_jax.config import ConfigError, require
    from mimo_jax.text.tokenizer import Tokenizer
    from mimo_jax.train.provenance import machine

    console = Console()
    try:
        known = [mode.name for mode in lossless.MODES]
        for name in arguments.only:
            require(name in known, f"only {name!r} is unknown; allowed: {', '.join(known)}")
        target, drafter = decode_bench.load_models(arguments.checkpoint)
        tokenizer = Tokenizer.from_file(arguments.checkpoint)
        requests = decode_bench.read_requests(
            arguments.prompts, tokenizer, arguments.count, arguments.max_tokens, 0.0
        )
        require(bool(requests), f"no prompts in {arguments.prompts}; expected SCENE.jsonl")
    except (CheckpointError, ConfigError, OSError, ValueError) as error:
        console.print(f"bench: {error}")
        return 2
    modes = [m for m in lossless.MODES if not arguments.only or m.name in arguments.only]
    num_prompts = sum(map(len, requests.values()))
    total = num_prompts * (1 + len(modes) * len(arguments.batch_sizes))
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar, tempfile.TemporaryDirectory() as cache:
        # Engines of other batch sizes prefill by the same programs.
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        task = bar.add_task("compiling", total=total)
        outcomes = list(
            lossless.run_lossless(
                target,
                drafter,
                requests,
                max_len=target.config.max_position,
                modes=modes,
                batch_sizes=arguments.batch_sizes,
                on_answer=lambda what: bar.update(task, advance=1, description=what),
            )
        )
    counted = ("answers", "tokens", "identical", "near_ties", "different")
    rows: dict[str, dict] = {}
    for outcome in outcomes:
        name = f"{outcome.mode}, batch {outcome.batch_size}"
        row = rows.setdefault(name, dict.fromkeys(counted, 0) | {"largest_margin": None})
        row["answers"] += outcome.num_answers
        row["tokens"] += outcome.num_tokens
        row["identical"] += outcome.num_identical
        row["near_ties"] += len(outcome.near_ties)
        row["different"] += len(outcome.differences)
        margins = [tie["margin"] for tie in outcome.near_ties]
        row["largest_margin"] = max([row["largest_margin"] or 0.0, *margins]) or None
    formats = dict.fromkeys(counted, ",d") | {"largest_margin": ".1e"}
    title = f"Greedy against plain, float32, {arguments.count} prompts of {len(requests)} scenes"
    console.print(_table(title, rows, formats, of="drafting"))
    if arguments.json is not None:
        results = {
            "machine": machine(),
            "max_tokens": arguments.max_tokens,
            "table": rows,
            "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
        console.print(f"written to {arguments.json}")
    return 1 if any(row["different"] for row in rows.values()) else 0


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


def run_moe(arguments: Moe) -> int:
    """Measures every number of tokens, prints and writes the JSON."""
    from mimo_jax.bench.moe_bench import Layer, compare_forms
    from mimo_jax.config import ConfigError, require
    from mimo_jax.train.provenance import machine
    from pallas_kernels.formats import MX_GROUP_LEN

    console = Console()
    try:
        for name in ("width", "hidden"):
            size = getattr(arguments, name)
            require(
                size > 0 and size % MX_GROUP_LEN == 0,
                f"{name} {size} is no multiple of {MX_GROUP_LEN}, a group of MXFP4",
            )
        require(
            1 <= arguments.top_k <= arguments.experts,
            f"top-k {arguments.top_k} must be in 1..experts {arguments.experts}",
        )
        require(min(arguments.tokens) >= 1, f"tokens {min(arguments.tokens)} must be >= 1")
        require(arguments.rounds >= 1, f"rounds {arguments.rounds} must be >= 1")
    except ConfigError as error:
        console.print(f"bench: {error}")
        return 2
    layer = Layer(arguments.experts, arguments.top_k, arguments.width, arguments.hidden)
    tables = {}
    for t in arguments.tokens:
        tables[str(t)] = rows = compare_forms(layer, t, rounds=arguments.rounds)
        console.print(_table(f"Sparse layer, {t} tokens", rows, _FORM_COLUMNS, of="form"))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        results = {"machine": machine(), "layer": dataclasses.asdict(layer), "tokens": tables}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


_FORM_COLUMNS = {
    "ms": ".3f",
    "min_ms": ".3f",
    "over_first": ".2f",
    "temp_mb": ",.2f",
    "weights_per_ns": ".2f",
}


def run_train(arguments: Train) -> int:
    """Both forms of the loss in turns, the cost of an anchor by row length, a long step; JSON."""
    from mimo_jax.bench import train_bench as bench
    from mimo_jax.checkpoint.safetensors_reader import CheckpointError
    from mimo_jax.config import ConfigError, require
    from mimo_jax.train.provenance import machine

    console = Console()
    try:
        for name in ("row_len", "anchors", "long_row_len", "long_anchors", "rounds"):
            size = getattr(arguments, name)
            require(size >= 1, f"{name} {size} must be >= 1")
        require(
            arguments.long_row_len % 1024 == 0,
            f"long_row_len {arguments.long_row_len} must be a multiple of 1024",
        )
        pair = bench.load_pair(arguments.checkpoint)
    except (CheckpointError, ConfigError, OSError, ValueError) as error:
        console.print(f"bench: {error}", markup=False)
        return 2
    row = (arguments.row_len, arguments.anchors)
    forms = bench.time_losses(
        pair,
        {
            bench.OURS: (bench.OURS, *row, bench.BLOCK_CHUNK),
            "ours, one chunk": (bench.OURS, *row, None),
            bench.DENSE: (bench.DENSE, *row, None),
        },
        rounds=arguments.rounds,
    )
    title = f"Loss and gradient, a row of {row[0]:,} with {row[1]} anchors"
    console.print(_table(title, forms, _SIGNAL_COLUMNS, of="form"))
    long_row = (arguments.long_row_len, arguments.long_anchors, bench.LONG_BLOCK_CHUNK)
    by_length = bench.time_losses(
        pair,
        {
            f"{row[0]:,}": (bench.OURS, *row, bench.BLOCK_CHUNK),
            f"{long_row[0]:,}": (bench.OURS, *long_row),
        },
        rounds=min(3, arguments.rounds),
        is_processor_time=True,
    )
    title = "Loss and gradient by row length, processor time"
    console.print(_table(title, by_length, _SIGNAL_COLUMNS, of="row"))
    step = {"long row": bench.long_step(pair, *long_row)}
    columns = {"signals": ",d", "seconds": ".1f", "temp_mb": ",.0f", "loss": ".3f"}
    console.print(_table(f"A whole step on a row of {long_row[0]:,}", step, columns, of="step"))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        results = {"machine": machine(), "forms": forms, "by_length": by_length, "step": step}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


_SIGNAL_COLUMNS = {
    "signals": ",d",
    "seconds": ".2f",
    "signals_per_s": ",.0f",
    "ms_per_anchor": ".2f",
    "over_first": ".2f",
    "temp_mb": ",.0f",
}


def run_fp8(arguments: Fp8) -> int:
    """Measures every number of tokens, prints and writes the JSON."""
    from mimo_jax.bench.fp8_bench import compare_products
    from mimo_jax.config import ConfigError, require
    from mimo_jax.train.provenance import machine

    console = Console()
    try:
        for name, size in (
            ("rows", arguments.rows),
            ("width", arguments.width),
            ("tokens", min(arguments.tokens)),
            ("rounds", arguments.rounds),
        ):
            require(size >= 1, f"{name} {size} must be >= 1")
    except ConfigError as error:
        console.print(f"bench: {error}")
        return 2
    size = (arguments.rows, arguments.width)
    tables = {}
    for t in arguments.tokens:
        tables[str(t)] = rows = compare_products(*size, t, rounds=arguments.rounds)
        title = f"Weight of {size[0]} x {size[1]}, {t} tokens"
        console.print(_table(title, rows, _FORM_COLUMNS, of="form"))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        results = {"machine": machine(), "shape": size, "tokens": tables}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0
