"""Shows on a CPU what a drafter buys: the same answers, decoded plain and with DFlash.

    python -m mimo_jax.demo                      # what `make demo` runs
    python -m mimo_jax.demo --num-prompts 5      # a first look

Held-out prompts of every scene are answered greedily by the embedded default, once token by token
and once with draft blocks. The two answers to a prompt must be the same ids; if a pair differs
where the target was not in a near tie, the exit status is 1. Beside the table this writes

    results.jsonl        one line per prompt: both durations, tokens committed per step, the text
    summary.json         {"identical": ..., "scenes": {scene: figures}} and what they depend on
    accept_lengths.png   per scene, how many tokens a step committed

How it measures: batch 1, float32. Every program is compiled before the clock starts. Plain and
DFlash take turns prompt by prompt, changing who goes first, so that a slow moment of the machine
hits both. Tokens per second count the prompt's prefill; the cost of a step does not.

Traps: prompts longer than 128 tokens are left out, as each prefill bucket is one more program to
compile in each engine. A CPU is chosen even where there is a GPU (set JAX_PLATFORMS to change it):
matrix products in reduced precision would break ties differently for 1 and for 8 rows. In float32
this is rare but not impossible: logits of one and of eight rows differ by about 1e-5 (1.4e-4 at
most, 3,832 positions, AMD EPYC, 2026-11-29), so a text may part where the target's two best
logits are that close (`near_ties.NEAR_TIE`). Prompts that lead there stand last in their files; a
pair that parts there is reported as a tie, any other difference fails the demo.
"""

import concurrent.futures
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from mimo_jax.config import SCENES, ConfigError
from mimo_jax.decode.engine import Engine, prompt_bucket
from mimo_jax.decode.jobs import Job, Output, run_jobs
from mimo_jax.decode.llm import LLM
from mimo_jax.decode.params import SamplingParams
from mimo_jax.decode.placement import Model
from mimo_jax.decode.stats import AcceptStats
from mimo_jax.text.tokenizer import IncrementalDetokenizer, Tokenizer
from mimo_jax.timing import Stopwatch
from mimo_jax.train.near_ties import NEAR_TIE, margin_between
from mimo_jax.train.provenance import machine

PLAIN, DFLASH = "plain", "dflash"
MAX_PROMPT_LEN = 128
EXAMPLE_SCENE = "code-gen"
# Black on a light colour reads on dark and light terminals alike.
RUN_STYLES = ("black on #a8dadc", "black on #ffd6a5")
FIRST_TOKEN_STYLE = "black on #d9d9d9"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Answer held-out prompts plain and with DFlash, compare the texts, and show the gain."""

    checkpoint: Path = Path("assets/mimo-nano")
    """Checkpoint directory with a tokenizer, and a drafter in dflash/."""
    prompts: Path = Path("assets/prompts")
    """Directory of prompts, one SCENE.jsonl per scene."""
    num_prompts: int = 40
    """Prompts per scene."""
    max_tokens: int = 128
    """Longest answer."""
    output_dir: Path = Path("out/demo")
    """Where results.jsonl, summary.json and accept_lengths.png are written."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A held-out prompt, ready to decode."""

    id: str
    scene: str
    job: Job


@dataclasses.dataclass(frozen=True)
class Pair:
    """Both answers to one prompt."""

    prompt: Prompt
    plain: Output
    dflash: Output

    @property
    def is_identical(self) -> bool:
        return self.plain.token_ids == self.dflash.token_ids

    @property
    def tau(self) -> float:
        """Accept length of this one answer; 0 if prefill's token ended it."""
        return self.dflash.tau or 0.0

    @property
    def num_shared(self) -> int:
        """Tokens before the answers part."""
        ours, theirs = self.dflash.token_ids, self.plain.token_ids
        shared = min(len(ours), len(theirs))
        return next((i for i in range(shared) if ours[i] != theirs[i]), shared)

    def difference(self) -> str:
        """One line that says where the answers part."""
        at = self.num_shared
        at_of = lambda ids: ids[at] if at < len(ids) else "the end"
        return (
            f"{self.prompt.id}: token {at} is {at_of(self.dflash.token_ids)} with DFlash, "
            f"{at_of(self.plain.token_ids)} plain; greedy outputs must be identical"
        )


@dataclasses.dataclass(frozen=True)
class SceneFigures:
    """What summary.json says about a scene.

    Attributes:
      tau: Accept length, see GLOSSARY.md.
      plain_tokens_per_s: Emitted tokens over prefill and decode time, plain.
      dflash_tokens_per_s: The same with DFlash.
      speedup: The second over the first.
      num_prompts: Answers behind the figures.
    """

    tau: float
    plain_tokens_per_s: float
    dflash_tokens_per_s: float
    speedup: float
    num_prompts: int


def read_prompts(
    directory: Path, num_prompts: int, max_tokens: int, llm: LLM
) -> dict[str, list[Prompt]]:
    """The first num_prompts prompts of each scene, in the order of `config.SCENES`.

    A line's own `stop_token_ids` goes before the checkpoint's.

    Raises:
      ConfigError: If a scene has no usable prompt, there is no scene, or a number is out of range.
    """
    paths = [path for scene in SCENES if (path := directory / f"{scene}.jsonl").is_file()]
    if not paths:
        raise ConfigError(
            f"no prompts in {directory}; expected SCENE.jsonl, SCENE being one of "
            f"{', '.join(SCENES)}"
        )
    if num_prompts < 1:
        raise ConfigError(f"num_prompts {num_prompts} is out of range; allowed: >= 1")
    scenes = {}
    for path in paths:
        scene, prompts = path.stem, []
        with path.open(encoding="utf-8") as file:
            for line in map(json.loads, filter(str.strip, file)):
                ids = llm.encode(line["prompt"])
                if not 0 < len(ids) <= MAX_PROMPT_LEN:
                    continue
                stop_ids = line.get("stop_token_ids")
                params = SamplingParams(
                    max_tokens=max_tokens, stop_token_ids=tuple(stop_ids) if stop_ids else None
                )
                prompts.append(Prompt(line["id"], scene, llm.make_job(ids, params)))
                if len(prompts) == num_prompts:
                    break
        if not prompts:
            raise ConfigError(f"{path}: no prompt of 1..{MAX_PROMPT_LEN} tokens")
        scenes[scene] = prompts
    return scenes


def answer(engine: Engine, job: Job, tokenizer: Tokenizer | None) -> Output:
    """Decodes one prompt, in one dispatch after its prefill."""
    ((_, output),) = run_jobs(engine, [job], tokenizer, steps_per_group=job.request.max_tokens)
    return output


def compile_all(engines: dict[str, Engine], scenes: dict[str, list[Prompt]]) -> None:
    """Compiles and runs once every program that the prompts need; engines side by side."""
    by_bucket: dict[int, Job] = {}
    for prompt in (prompt for prompts in scenes.values() for prompt in prompts):
        bucket = prompt_bucket(len(prompt.job.request.prompt_ids))
        by_bucket.setdefault(bucket, prompt.job)

    def warm_up(engine: Engine) -> None:
        for job in by_bucket.values():
            answer(engine, job, None)

    with concurrent.futures.ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(warm_up, engines.values()))


def decode_scene(
    engines: dict[str, Engine],
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    on_pair: Callable[[], object],
) -> list[Pair]:
    """Answers every prompt with both engines, which take turns at going first."""
    pairs = []
    for number, prompt in enumerate(prompts):
        names = (PLAIN, DFLASH) if number % 2 == 0 else (DFLASH, PLAIN)
        answers = {name: answer(engines[name], prompt.job, tokenizer) for name in names}
        pairs.append(Pair(prompt, answers[PLAIN], answers[DFLASH]))
        on_pair()
    return pairs


def _total_s(outputs: Sequence[Output]) -> float:
    return sum(o.completion.ttft_s + o.completion.decode_s for o in outputs)


def _step_s(outputs: Sequence[Output]) -> float:
    """Mean seconds per decode step, prefill left out."""
    num_steps = sum(o.stats.num_steps for o in outputs)
    return sum(o.completion.decode_s for o in outputs if o.stats.num_steps) / max(num_steps, 1)


def scene_stats(pairs: Sequence[Pair]) -> AcceptStats:
    """Counts of all steps of some pairs."""
    return sum((pair.dflash.stats for pair in pairs), start=AcceptStats())


def figures(pairs: Sequence[Pair]) -> SceneFigures:
    """Accept length and speeds of one scene's pairs.

    Raises:
      ConfigError: If no answer has a second token: then nothing was drafted.
    """
    tau = scene_stats(pairs).tau
    if tau is None:
        raise ConfigError(f"{pairs[0].prompt.scene}: every answer ends with its first token")
    plain, dflash = [p.plain for p in pairs], [p.dflash for p in pairs]
    plain_per_s = sum(len(c.token_ids) for c in plain) / _total_s(plain)
    dflash_per_s = sum(len(c.token_ids) for c in dflash) / _total_s(dflash)
    return SceneFigures(
        tau=tau,
        plain_tokens_per_s=plain_per_s,
        dflash_tokens_per_s=dflash_per_s,
        speedup=dflash_per_s / plain_per_s,
        num_prompts=len(pairs),
    )


def break_even_tau(pairs: Sequence[Pair]) -> float:
    """Cost of a DFlash step in plain steps: the accept length from which drafting pays."""
    return _step_s([p.dflash for p in pairs]) / _step_s([p.plain for p in pairs])


def margin(llm: LLM, pair: Pair) -> float | None:
    """By how much the target prefers one of the two tokens at which a pair parts; None at an end.

    Below `NEAR_TIE` rounding decides; more is a bug.
    """
    ours, theirs = pair.dflash.token_ids, pair.plain.token_ids
    return margin_between(llm.target, pair.prompt.job.request, ours, theirs)[1]


def shaded(output: Output, tokenizer: Tokenizer, has_color: bool) -> Text:
    """The answer with a new background colour, or a bar, at every step."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=False)
    text = Text()
    for number, ids in enumerate(output.ids_by_step()):
        style = RUN_STYLES[number % 2] if number else FIRST_TOKEN_STYLE
        text.append(detokenizer.push(ids), style=style)
        if not has_color:
            text.append("│")
    text.append(detokenizer.flush())
    return text


def typical(pairs: Sequence[Pair], tau: float) -> Pair:
    """Of the answers of 32 tokens and more, the one whose accept length is nearest to tau."""
    long_enough = [p for p in pairs if len(p.dflash.token_ids) >= 32] or list(pairs)
    return min(long_enough, key=lambda p: abs(p.tau - tau))


def draw_accept_lengths(
    scenes: dict[str, list[Pair]], draft_block_len: int, threshold: float, path: Path
) -> None:
    """Per scene, the share of steps by tokens committed, with τ and the break-even marked."""
    figure = Figure(figsize=(2.5 * len(scenes) + 0.6, 3.1), layout="constrained")
    axes = figure.subplots(1, len(scenes), sharey=True, squeeze=False)[0]
    lengths = list(range(1, draft_block_len + 1))
    for axis, (scene, pairs) in zip(axes, scenes.items(), strict=True):
        stats = scene_stats(pairs)
        tau = stats.tau or 0.0
        shares = [count / max(stats.num_steps, 1) for count in stats.histogram]
        colors = ["#2a7f9e" if n > threshold else "#a9cbd7" for n in lengths]
        axis.bar(lengths, shares, width=0.86, color=colors, zorder=2)
        axis.axvline(threshold, color="#888888", linewidth=1, linestyle=":", zorder=3)
        axis.axvline(tau, color="#c8553d", linewidth=1.8, zorder=4)
        axis.set_title(f"{scene}\n", loc="left", fontsize=11, fontweight="bold")
        axis.text(0, 1.03, f"τ = {tau:.2f}", transform=axis.transAxes, color="#c8553d", fontsize=11)
        axis.set_xlim(0.3, draft_block_len + 0.7)
        axis.set_xticks(lengths)
        axis.grid(axis="y", color="#e5e5e5", zorder=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(length=0)
    axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0].set_ylabel("share of steps")
    note = f"red: accept length τ, dotted: break-even at {threshold:.1f}"
    if threshold > draft_block_len + 0.7:
        note = f"red: accept length τ; the break-even, {threshold:.1f}, is further right"
    figure.supxlabel(f"tokens committed by one step   ({note})", fontsize=10)
    figure.savefig(path, dpi=150)


def write_results(path: Path, scenes: dict[str, list[Pair]]) -> None:
    """One JSON line per prompt."""
    with path.open("w", encoding="utf-8") as file:
        for pair in (pair for pairs in scenes.values() for pair in pairs):
            line = {
                "id": pair.prompt.id,
                "scene": pair.prompt.scene,
                "identical": pair.is_identical,
                "num_prompt_tokens": len(pair.dflash.prompt_ids),
                "num_tokens": len(pair.dflash.token_ids),
                "finish_reason": pair.dflash.finish_reason,
                "tau": round(pair.tau, 4),
                "num_committed_per_step": pair.dflash.completion.num_committed_per_step,
                "plain_s": round(_total_s([pair.plain]), 6),
                "dflash_s": round(_total_s([pair.dflash]), 6),
                "text": pair.dflash.text,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def load(arguments: Arguments) -> LLM:
    """The checkpoint; raises ConfigError if it lacks what the demo needs."""
    checkpoint = arguments.checkpoint
    if not (checkpoint / "config.json").is_file():
        raise ConfigError(
            f"no checkpoint in {checkpoint}; run this from the repository's root, give one with "
            "--checkpoint, or train one with `make train-demo`"
        )
    llm = LLM.load(checkpoint)
    llm.need_tokenizer("the demo's prompts are text")
    if llm.drafter is None:
        raise ConfigError(f"no drafter in {checkpoint / 'dflash'}: nothing to compare")
    return llm


def _num_params(model: Model | None) -> int:
    return 0 if model is None else sum(leaf.size for leaf in jax.tree.leaves(model.params))


def _table(rows: dict[str, SceneFigures]) -> Table:
    table = Table(title="Greedy, batch 1, float32; prefill included", title_justify="left")
    table.add_column("scene")
    for heading in ("τ", "plain tok/s", "DFlash tok/s", "ratio", "prompts"):
        table.add_column(heading, justify="right")
    for scene, row in rows.items():
        style = "bold green" if row.speedup >= 1 else "yellow"
        table.add_row(
            scene,
            f"{row.tau:.2f}",
            f"{row.plain_tokens_per_s:,.0f}",
            f"{row.dflash_tokens_per_s:,.0f}",
            f"[{style}]{row.speedup:.2f}[/]",
            str(row.num_prompts),
        )
    return table


def run(arguments: Arguments, console: Console) -> int:
    """The demo; returns the exit status: 0, or 1 if two answers differ beyond a near tie.

    Raises:
      ConfigError: If checkpoint or prompts cannot be used.
    """
    llm = load(arguments)
    tokenizer = llm.need_tokenizer("the demo's prompts are text")
    prompts = read_prompts(arguments.prompts, arguments.num_prompts, arguments.max_tokens, llm)
    jobs = [prompt.job for scene_prompts in prompts.values() for prompt in scene_prompts]
    engines = {PLAIN: llm.open_engine(jobs, draft=False), DFLASH: llm.open_engine(jobs)}
    facts = machine()
    console.print(
        f"{arguments.checkpoint}: target of {_num_params(llm.target) / 1e6:.1f}M parameters, "
        f"drafter of {_num_params(llm.drafter) / 1e6:.2f}M, blocks of {llm.trained_block_len}; "
        f"{facts['cores']} cores, {facts['processor']}",
        highlight=False,
    )
    with console.status("compiling both engines"), Stopwatch() as watch:
        compile_all(engines, prompts)
    compile_s = watch.elapsed_s
    console.print(f"compiled in {compile_s:.0f} s, which the figures below leave out")

    scenes: dict[str, list[Pair]] = {}
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("decoding", total=len(jobs))
        for scene, scene_prompts in prompts.items():
            bar.update(task, description=f"decoding {scene}")
            scenes[scene] = decode_scene(
                engines, scene_prompts, tokenizer, lambda: bar.advance(task)
            )
        bar.update(task, description="decoded twice")

    everything = [pair for pairs in scenes.values() for pair in pairs]
    different = [pair for pair in everything if not pair.is_identical]
    gaps = [(pair, margin(llm, pair)) for pair in different]
    rows = {scene: figures(pairs) for scene, pairs in scenes.items()}
    threshold = break_even_tau(everything)
    out = arguments.output_dir
    out.mkdir(parents=True, exist_ok=True)
    write_results(out / "results.jsonl", scenes)
    summary = {
        "identical": not different,
        "num_near_ties": sum(gap is not None and gap < NEAR_TIE for _, gap in gaps),
        "scenes": {scene: dataclasses.asdict(row) for scene, row in rows.items()},
        "break_even_tau": threshold,
        "compile_s": compile_s,
        "max_tokens": arguments.max_tokens,
        "machine": facts,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    draw_accept_lengths(scenes, llm.trained_block_len, threshold, out / "accept_lengths.png")

    console.print(_table(rows))
    for pair, gap in gaps:
        if gap is not None and gap < NEAR_TIE:
            console.print(
                f"{pair.prompt.id}: the answers part at token {pair.num_shared}, a near tie of the "
                f"target (its logits for the two differ by {gap:.1e}): rounding decides, both are "
                "right"
            )
        else:
            note = "" if gap is None else f" (the target's logits for the two differ by {gap:.1e})"
            print(f"demo: {pair.difference()}{note}", file=sys.stderr)
            return 1
    _explain(console, scenes, rows, threshold, llm.trained_block_len)
    scene = EXAMPLE_SCENE if EXAMPLE_SCENE in scenes else next(iter(scenes))
    _show_example(console, typical(scenes[scene], rows[scene].tau), tokenizer)
    console.print(f"Written to {out}: results.jsonl, summary.json, accept_lengths.png")
    return 0


def _explain(
    console: Console,
    scenes: dict[str, list[Pair]],
    rows: dict[str, SceneFigures],
    threshold: float,
    draft_block_len: int,
) -> None:
    num_pairs = sum(len(pairs) for pairs in scenes.values())
    num_same = sum(pair.is_identical for pairs in scenes.values() for pair in pairs)
    num_tokens = sum(len(p.dflash.token_ids) for pairs in scenes.values() for p in pairs)
    best, worst = (pick(rows, key=lambda s: rows[s].tau) for pick in (max, min))
    faster = [scene for scene, row in rows.items() if row.speedup > 1]
    pays = (
        f"drafting pays where τ is above {threshold:.2f}, the break-even: here in "
        f"{', '.join(faster) or 'no scene, plain decoding is faster'}."
    )
    notes = Table.grid(padding=(0, 1))
    for note in (
        f"{num_same} of {num_pairs} pairs of answers ({num_tokens:,} tokens each way) are "
        "identical: the drafter decides the speed, the target the text.",
        f"τ is the tokens that one step commits, from 1 to {draft_block_len}. It follows how "
        f"predictable a text is: {rows[best].tau:.2f} in {best} and {rows[worst].tau:.2f} in "
        f"{worst}.",
        f"A DFlash step costs {threshold:.2f} plain steps on this machine, so {pays} (The ratio "
        "counts prefill too, which drafting does not shorten.)",
        "That cost falls as models grow: this small one sits in the processor's cache; weights "
        f"that come from memory at every step are read once for all {draft_block_len} tokens.",
    ):
        notes.add_row("  •", note)
    console.print("\n[bold]What to look at[/]")
    console.print(notes)


def _show_example(console: Console, pair: Pair, tokenizer: Tokenizer) -> None:
    has_color = console.color_system is not None
    mark = "colour" if has_color else "stretch between bars"
    prompt = Text(tokenizer.decode(pair.dflash.prompt_ids, skip_special=False), "dim")
    console.print(
        Panel(
            prompt + shaded(pair.dflash, tokenizer, has_color),
            title=f"{pair.prompt.id}: one {mark} = one step, τ {pair.tau:.2f}",
            title_align="left",
        )
    )


def main() -> int:
    """Command line; 2 means that something given cannot be used."""
    arguments = tyro.cli(Arguments)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    try:
        return run(arguments, Console())
    except (ValueError, OSError) as error:  # ConfigError and CheckpointError among them
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("demo: stopped; nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
