"""A file of prompts in, a file of answers out, in the order of the input; resumable.

One engine serves the whole job: its length comes from the longest request and its sampling mode
from the most demanding one, counted over all lines, also those that an earlier run has answered,
so that a continued job, and every process of one, runs the same program. Answers finish out of
order; each is written as soon as all earlier lines are, so the output is always a prefix of the
finished file. It holds nothing that depends on the clock: a job that was stopped and continued ends
in the same bytes.

An output line holds id, scene (if any), text, token_ids, finish_reason ("stop" or "length"), usage
and accept_stats, with `detailed` also prompt_token_ids and num_committed_per_step, which sum to
one less than there are token_ids: prefill gives the first. Or it holds id, scene and error: the
line could not be used, or the model broke down on it (logits that are not finite).

Where a line asked for several candidates, its text and ids are the best one's; it also holds score
and the others as alternatives (n - 1 of them, best first). usage and accept_stats then count
everything that was decoded for the line.
"""

import dataclasses
import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from rich.console import Console

from mimo_jax import __version__
from mimo_jax.config import ConfigError
from mimo_jax.decode import controller
from mimo_jax.decode.best_of_n import candidates_of, check_rank, choose, run_candidates
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.jobs import Job, Output, share_prefixes
from mimo_jax.decode.llm import LLM
from mimo_jax.decode.params import CHAIN, OFF, SamplingParams
from mimo_jax.decode.stats import AcceptStats
from mimo_jax.distributed import ALONE, ProcessGroup
from mimo_jax.serving import parts, report
from mimo_jax.serving.jsonl import (
    Finished,
    JobError,
    OutputWriter,
    is_stdio,
    read_finished,
    read_lines,
    write_whole,
)
from mimo_jax.serving.options import BatchOptions
from mimo_jax.serving.progress import JobBar, loading_bar
from mimo_jax.serving.requests import Line, LineError, parse_line
from mimo_jax.sharding import DECODE, make_mesh, parse_mesh
from mimo_jax.timing import Stopwatch

# Steps between two looks of the host: often where a row may be refilled or end at a stop string.
_STEPS_PER_GROUP, _STEPS_PER_SHORT_GROUP = 32, 8


@dataclasses.dataclass
class _Entry:
    """One input line on its way: `line` or `error` first, `candidates` or `error` in the end."""

    line_id: str
    scene: str | None = None
    line: Line | None = None
    candidates: list[Job] = dataclasses.field(default_factory=list)
    error: str | None = None


def _parse(
    lines: list[tuple[int, bytes]], defaults: SamplingParams, scene: str | None
) -> list[_Entry]:
    entries: list[_Entry] = []
    first_with: dict[str, int] = {}
    for number, raw in lines:
        try:
            line = parse_line(raw, number, defaults, scene)
        except LineError as error:
            entry = _Entry(error.line_id, error=str(error))
        else:
            entry = _Entry(line.line_id, line.scene, line)
        first = first_with.setdefault(entry.line_id, number)
        if first != number and entry.error is None:
            entry.error = f"line {number}: id {entry.line_id!r} is already that of line {first}"
        entries.append(entry)
    return entries


def _prompt_text(llm: LLM, line: Line, template_variables: dict) -> str | None:
    """Text that is still to be tokenized; None if the line gives ids."""
    if line.messages is not None:
        variables = template_variables | (line.chat_template_kwargs or {})
        return llm.render_chat(line.messages, line.tools, variables)
    return line.prompt


def _make_jobs(llm: LLM, entries: list[_Entry], template_variables: dict) -> None:
    """Gives every entry its jobs or an error; all texts are tokenized in one call."""
    texts: list[tuple[_Entry, str]] = []
    prompts: list[tuple[_Entry, list[int]]] = []
    for entry in entries:
        if entry.line is None or entry.error is not None:
            continue
        try:
            text = _prompt_text(llm, entry.line, template_variables)
            if text is not None:
                llm.need_tokenizer("text prompts need a tokenizer")
                texts.append((entry, text))
        except ConfigError as error:
            entry.error = f"line {entry.line.number}: {error}"
        if entry.line.prompt_token_ids is not None:
            prompts.append((entry, entry.line.prompt_token_ids))
    if texts and llm.tokenizer is not None:
        ids = llm.tokenizer.encode_batch([text for _, text in texts])
        prompts += [(entry, prompt) for (entry, _), prompt in zip(texts, ids, strict=True)]
    for entry, prompt_ids in prompts:
        assert entry.line is not None
        params = entry.line.params
        try:
            job = llm.make_job(prompt_ids, params, entry.scene)
            entry.candidates = candidates_of(job, params.num_candidates)
        except ConfigError as error:
            entry.error = f"line {entry.line.number}: {error}"
    # Of all lines, answered or not, so that a continued job reads prompts as one that was not
    # stopped.
    shared = iter(share_prefixes([job for entry in entries for job in entry.candidates]))
    for entry in entries:
        entry.candidates = [next(shared) for _ in entry.candidates]


def _split_finished(entries: list[_Entry], finished: Finished) -> tuple[list[_Entry], list[_Entry]]:
    """(entries answered by an earlier run, entries still to do)."""
    left = finished.ids.copy()
    done, pending = [], []
    for entry in entries:
        is_done = left[entry.line_id] > 0
        left[entry.line_id] -= is_done
        (done if is_done else pending).append(entry)
    return done, pending


def _record(entry: _Entry, candidates: Sequence[Output], options: BatchOptions) -> dict:
    """The output line of an entry; `id` first, see `jsonl`."""
    record: dict = {"id": entry.line_id}
    if entry.scene is not None:
        record["scene"] = entry.scene
    if entry.line is None or not candidates:
        return record | {"error": entry.error}
    params = entry.line.params
    best = choose(candidates, params.n, options.rank, keeps_logprobs=params.logprobs is not None)
    num_prompt = len(best.prompt_ids)
    num_output = sum(len(output.token_ids) for output in candidates)
    record |= _choice(best) | {
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        },
        "accept_stats": sum((o.stats for o in candidates), AcceptStats()).to_json(),
    }
    if len(candidates) > 1:
        record["alternatives"] = [_choice(output) for output in best.alternatives]
    if options.detailed:
        record["prompt_token_ids"] = best.prompt_ids
        record["num_committed_per_step"] = best.completion.num_committed_per_step
    return record


def _choice(output: Output) -> dict:
    """What an output line says of one answer."""
    fields: dict = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
    }
    if output.score is not None:
        fields["score"] = output.score
    if output.logprobs is not None:
        fields |= {"logprobs": output.logprobs, "top_logprobs": output.top_logprobs}
    return fields


def _answers(
    engine: Engine | None, llm: LLM, entries: Sequence[_Entry], on_tokens
) -> Iterator[tuple[int, list[Output]]]:
    """(index in entries, all its candidates, none for an error), as they come."""
    for index, entry in enumerate(entries):
        if entry.error is not None:
            yield index, []
    indices = [index for index, entry in enumerate(entries) if entry.candidates]
    if engine is None or not indices:
        return
    groups = [entries[index].candidates for index in indices]
    must_hurry = engine.batch_size > 1 or any(group[0].stops for group in groups)
    for group_idx, outputs in run_candidates(
        engine,
        groups,
        llm.tokenizer,
        steps_per_group=_STEPS_PER_SHORT_GROUP if must_hurry else _STEPS_PER_GROUP,
        on_tokens=on_tokens,
    ):
        index = indices[group_idx]
        entry = entries[index]
        broken = [output.error for output in outputs if output.error is not None]
        if broken and entry.line is not None:
            entry.error, outputs = f"line {entry.line.number}: {broken[0]}", []
        yield index, outputs


def _decode(
    options: BatchOptions,
    llm: LLM,
    engine: Engine | None,
    entries: Sequence[_Entry],
    writer: OutputWriter,
    is_quiet: bool,
) -> tuple[report.JobReport, float, float]:
    """Answers entries into the writer; returns (report, wall seconds, compile seconds)."""
    tally = report.JobReport()
    compiled_before = engine.compile_s if engine else 0.0
    compile_s = lambda: engine.compile_s - compiled_before if engine else 0.0
    num_tokens, num_written = 0, 0
    waiting: dict[int, dict] = {}
    with JobBar(len(entries), is_quiet) as bar, Stopwatch() as watch:

        def show():
            run_s = max(watch.elapsed_s - compile_s(), 1e-9)
            bar.update(tally.total.num_requests, num_tokens / run_s, tally.total.accept.tau)

        def on_tokens(index: int, new_ids: list[int]) -> None:
            nonlocal num_tokens
            num_tokens += len(new_ids)
            show()

        for index, outputs in _answers(engine, llm, entries, None if is_quiet else on_tokens):
            tally.add(entries[index].scene, outputs)
            waiting[index] = _record(entries[index], outputs, options)
            while num_written in waiting:
                writer.write(waiting.pop(num_written))
                num_written += 1
            show()
    return tally, watch.elapsed_s, compile_s()


def _load(options: BatchOptions, is_quiet: bool) -> LLM:
    drafter = None if options.draft == OFF else (options.drafter or "auto")
    mesh = None
    if options.mesh is not None:  # of this process alone: processes share lines, not rows
        mesh = make_mesh(DECODE, parse_mesh(options.mesh), jax.local_devices())
    with loading_bar(is_quiet) as report:
        return LLM.load(
            options.checkpoint,
            drafter,
            options.dtype,
            mesh=mesh,
            has_whole_drafter=options.whole_drafter,
            qkv_layout=options.qkv_layout,
            kv_format=options.kv_format,
            implementation=options.implementation,
            on_progress=report,
        )


def _check_paths(options: BatchOptions) -> None:
    paths = {"output": options.output, "metrics_json": options.metrics_json}
    for name, path in paths.items():
        if path is None or is_stdio(path):
            continue
        if path.is_dir():
            raise JobError(f"{name} {path}: is a directory, expected a file")
        if path.resolve() == options.input.resolve():
            raise JobError(f"{name} {path}: is the input; name another file")


def _describe_run(
    options: BatchOptions, llm: LLM, engine: Engine | None, num_processes: int
) -> dict:
    has_draft = engine is not None and engine.drafter is not None
    device = jax.local_devices()[0]
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "date": datetime.date.today().isoformat(),
        "mimo_jax": __version__,
        "jax": jax.__version__,
        "device": f"{device.platform}: {device.device_kind}",
        "num_processes": num_processes,
        "checkpoint": str(options.checkpoint),
        "dtype": llm.dtype,
        "draft": (options.draft or CHAIN) if has_draft else OFF,
        "acceptance": engine.rule if engine else None,
        "step_s_by_rung": _step_times(engine),
        "draft_block_len": engine.draft_block_len if engine else None,
        "max_verify_nodes": engine.max_verify_nodes if engine else None,
        "batch_size": engine.batch_size if engine else None,
        "sampling_mode": engine.mode if engine else None,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "seed": options.seed,
    }


def _step_times(engine: Engine | None) -> dict[str, float] | None:
    """Measured seconds of a step of each block length, where the job went by them."""
    if engine is None or engine.policy != controller.COSTS or engine.costs is None:
        return None
    return dict(zip(engine.rung_names, engine.costs, strict=True))


def run_batch(
    options: BatchOptions, llm: LLM | None = None, group: ProcessGroup = ALONE
) -> int:
    """Runs a batch job, or this process's part of one.

    Args:
      options: See there.
      llm: A loaded model, in place of what options.checkpoint and options.drafter name.
      group: The processes that share the lines; see `parts`.

    Returns:
      Exit code: 0, or 1 if some line of the job has an error, also from an earlier run or in
      another process.

    Raises:
      ConfigError: If a flag is out of range or does not fit the model.
      CheckpointError: If the checkpoint cannot be used.
      JobError: If a file cannot be read or written. The output is a valid prefix then.
    """
    defaults, template_variables = options.sampling(), options.template_variables()
    _check_paths(options)
    parts.check_paths(options, group)
    is_quiet = options.quiet or not group.is_first
    lines = read_lines(options.input)
    entries = _parse(lines, defaults, options.scene)
    finished = read_finished(options.output)
    llm = _load(options, is_quiet) if llm is None else llm
    if options.draft not in (None, OFF) and llm.drafter is None:
        raise ConfigError(
            f"draft {options.draft} needs a drafter, and {options.checkpoint / 'dflash'} holds "
            "none; name one with --drafter"
        )
    if options.stop:
        llm.need_tokenizer("stop strings need a tokenizer")
    _make_jobs(llm, entries, template_variables)
    most = max((len(entry.candidates) for entry in entries), default=0)
    check_rank(options.rank, None, llm.tokenizer, most)
    jobs = [job for entry in entries for job in entry.candidates]
    engine = None
    if jobs:
        engine = llm.open_engine(
            jobs,
            batch_size=min(options.batch_size, -(-len(jobs) // group.count)),
            draft=options.draft or CHAIN,
            draft_block_len=options.draft_block_len,
            max_verify_nodes=options.max_verify_nodes,
            acceptance=options.acceptance,
        )
    done, pending = _split_finished(entries, finished)
    if not pending and group.is_first:  # a run may have been killed after it had merged
        parts.clean_up(options.output)
    parts.claim(options.output, group, parts.job_hash(options, lines, finished))

    path, share, before = options.output, pending, finished
    if group.count > 1:
        path = parts.part_path(options.output, group.index, group.count)
        share = pending[group.index :: group.count]
        before = parts.read_part(path, [entry.line_id for entry in share])
        done_here, share = _split_finished(share, before)
        done = done_here + (done if group.is_first else [])  # each line counts in one process
    with OutputWriter.open(path, before) as writer:
        tally, wall_s, compile_s = _decode(options, llm, engine, share, writer, is_quiet)
    error_ids = finished.error_ids | before.error_ids
    figures = {
        "report": tally.to_json(),
        "seconds": [wall_s, compile_s],
        "num_skipped": len(done),
        "num_errors": tally.total.num_errors + sum(e.line_id in error_ids for e in done),
    }
    all_figures = group.gather("figures", figures)  # comes when all are done
    code = 0
    if group.is_first:
        if group.count > 1:
            parts.merge(options.output, group, finished, [entry.line_id for entry in pending])
        run = _describe_run(options, llm, engine, group.count)
        code = _conclude(options, all_figures, run, len(entries))
    return group.share("exit code", code)


def _conclude(options: BatchOptions, all_figures: list[dict], run: dict, num_lines: int) -> int:
    """Adds up what the processes counted, shows and writes it; returns the exit code."""
    # The job took as long as its slowest process, compiling aside.
    wall_s, compile_s = max((f["seconds"] for f in all_figures), key=lambda s: s[0] - s[1])
    tally = report.JobReport.joined([figures["report"] for figures in all_figures])
    num_skipped = sum(figures["num_skipped"] for figures in all_figures)
    metrics = tally.metrics(wall_s, compile_s, num_skipped, run)
    if options.metrics_json is not None:
        write_whole(options.metrics_json, json.dumps(metrics, indent=1) + "\n")
    console = Console(stderr=True)
    if not options.quiet:
        console.print(report.render(metrics))
    num_errors = sum(figures["num_errors"] for figures in all_figures)
    if num_errors:
        console.print(f"{num_errors} of {num_lines} lines have an error", style="red")
    return 1 if num_errors else 0
