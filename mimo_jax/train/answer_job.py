"""The target answers a file of prompts, through the engine that serves users.

A drafter must foresee what its target says, so it learns the target's own text and not the corpus.
With a drafter at hand the answers are the same and come sooner: each round of training makes the
next one cheaper.

An answer depends on its prompt, its id and the settings alone: its seed is made of the seed and the
id, so that neither order nor batch nor a stop in between changes it (up to near ties of rounding).
Prompts are held in memory, 8 bytes and more for a token: cut a corpus of millions with --limit, or
into files.
"""

import collections
import dataclasses
import itertools
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mimo_jax import __version__
from mimo_jax.checkpoint.fingerprint import fingerprint
from mimo_jax.checkpoint.hf_drafter import find_drafter
from mimo_jax.config import ConfigError, require
from mimo_jax.decode.jobs import Job, Output, run_jobs, share_prefixes
from mimo_jax.decode.llm import LLM
from mimo_jax.decode.stats import AcceptStats
from mimo_jax.timing import Stopwatch
from mimo_jax.train.answer_file import AnswerFile
from mimo_jax.train.answer_options import AUTO, NONE, NUM_SEEDS, AnswerOptions
from mimo_jax.train.conversations import TextFormat, num_prompt_messages, prompt_ids_of
from mimo_jax.train.loop import progress_bar
from mimo_jax.train.provenance import machine
from mimo_jax.train.records import Record
from mimo_jax.train.sources import find_files, read_source

_STEPS_PER_GROUP = 16  # decode steps between two looks of the host, after which a row is refilled


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One answer that is wanted.

    Attributes:
      answer_id: Of its line; of several answers to a prompt each has its own.
      record: Where it comes from.
      prompt_ids: What is answered.
    """

    answer_id: str
    record: Record
    prompt_ids: list[int]


def asked_text(record: Record) -> str | None:
    """What the user asks, however it is wrapped; None for exact ids.

    Example: messages system, user "2+2?", assistant "4" -> "2+2?"; prompt " 2+2?\\n" -> "2+2?".
    """
    if record.messages is not None:
        contents = [m.get("content", "") for m in record.messages if m["role"] == "user"]
        return contents[-1].strip()
    return None if record.prompt is None else record.prompt.strip()


def answer_seed(seed: int, answer_id: str) -> int:
    """The seed of one answer, in 0..2^31-1. Example: answer_seed(0, "a") -> 1947945454."""
    return zlib.crc32(f"{seed} {answer_id}".encode()) % NUM_SEEDS


def read_prompts(
    options: AnswerOptions, text_format: TextFormat, max_len: int
) -> tuple[list[Prompt], dict[str, int]]:
    """Prompts to answer, and how many were left out for which reason.

    Args:
      options: Of the run.
      text_format: Of the model.
      max_len: Context of the model.

    Raises:
      ConfigError: In one line naming file and line; also if an id stands twice.
    """
    held_out: set[Any] = set()
    for source in options.exclude:
        for record in read_source(source):
            held_out |= {asked_text(record), tuple(prompt_ids_of(text_format, record))}
    held_out -= {None, ()}
    prompts, left_out, where = [], collections.Counter[str](), {}
    end = None if options.limit is None else options.skip + options.limit
    for record in itertools.islice(read_source(options.data), options.skip, end):
        first = where.setdefault(record.line_id, record.where)
        require(
            first is record.where,
            f"{record.where}: id {record.line_id!r} is already that of {first}; ids must differ",
        )
        ids = prompt_ids_of(text_format, record)
        if not ids:
            left_out["empty"] += 1
        elif len(ids) >= max_len:
            left_out["too_long"] += 1
        elif asked_text(record) in held_out or tuple(ids) in held_out:
            left_out["held_out"] += 1
        else:
            names = [record.line_id]
            if options.samples > 1:
                names = [f"{record.line_id}#{k}" for k in range(options.samples)]
            prompts += [Prompt(name, record, ids) for name in names]
    return prompts, dict(left_out)


def line_of(prompt: Prompt, output: Output) -> dict[str, Any]:
    """The line of an answer: exact ids, and the text beside them in the shape of the record."""
    record, text = prompt.record, output.text
    line: dict[str, Any] = {
        "id": prompt.answer_id,
        "prompt_ids": prompt.prompt_ids,
        "response_ids": output.token_ids,
        "finish_reason": output.finish_reason,
    }
    if record.messages is not None:
        asked = record.messages[: num_prompt_messages(record)]
        line["messages"] = [*asked, {"role": "assistant", "content": text}]
        if record.tools is not None:
            line["tools"] = list(record.tools)
    elif record.prompt is not None:
        line |= {"prompt": record.prompt, "response": text}
    return line


def _settings(options: AnswerOptions, drafter_dir: Path | None) -> dict[str, Any]:
    """What decides the answers, as the sidecar has it."""
    return {
        "model": fingerprint(options.model),
        "drafter": None if drafter_dir is None else fingerprint(drafter_dir),
        **{
            name: getattr(options, name)
            for name in (
                "temperature", "top_p", "max_tokens", "seed", "samples", "thinking", "dtype"
            )
        },
    }


def _make_jobs(llm: LLM, prompts: Sequence[Prompt], options: AnswerOptions) -> list[Job]:
    params = options.sampling()
    return share_prefixes(
        [
            llm.make_job(
                prompt.prompt_ids,
                dataclasses.replace(params, seed=answer_seed(options.seed, prompt.answer_id)),
            )
            for prompt in prompts
        ]
    )


def _decode(
    llm: LLM,
    jobs: Sequence[Job],
    pending: Sequence[int],
    options: AnswerOptions,
    on_answer: Callable[[int, Output], object],
) -> dict[str, Any]:
    """Decodes jobs[i] for i in pending, calls on_answer(i, output) as they come; gives figures."""
    # The engine fits all jobs, answered or not: a run that goes on then runs the same programs.
    engine = llm.open_engine(jobs, batch_size=min(options.batch_size, len(jobs)))
    compiled_before_s = engine.compile_s
    reasons, num_tokens, stats = collections.Counter[str](), 0, AcceptStats()
    has_drafter, tokens_per_s = engine.drafter is not None, None
    with progress_bar(is_shown=not options.quiet) as bar, Stopwatch() as watch:
        task = bar.add_task("regenerate", total=len(pending), figures="compiling")
        todo = [jobs[i] for i in pending]
        for number, output in run_jobs(
            engine, todo, llm.tokenizer, steps_per_group=_STEPS_PER_GROUP
        ):
            on_answer(pending[number], output)
            reasons[output.finish_reason] += 1
            num_tokens += len(output.token_ids)
            stats += output.stats
            run_s = watch.elapsed_s - (engine.compile_s - compiled_before_s)
            tokens_per_s = num_tokens / max(run_s, 1e-9)
            tau = f"  τ {stats.tau:.2f}" if has_drafter and stats.tau else ""
            bar.update(task, advance=1, figures=f"{tokens_per_s:,.1f} tokens/s{tau}")
    return {
        "answers": reasons.total() - reasons["error"],
        "tokens": num_tokens,
        "tokens_per_s": None if tokens_per_s is None else round(tokens_per_s, 1),
        "accept_length": round(stats.tau, 4) if has_drafter and stats.tau else None,
        "finish_reasons": dict(reasons),
    }


def run_answer_job(options: AnswerOptions, llm: LLM | None = None) -> dict[str, Any]:
    """Answers all prompts that OUT does not answer yet.

    Args:
      options: See there.
      llm: A loaded model, in place of what options.model and options.drafter name.

    Returns:
      The summary: prompts, those skipped since OUT answers them, what was left out; if any were
      pending also answers, tokens, tokens_per_s (compiling apart), accept_length (None without a
      drafter) and finish_reasons. Answers that broke off (reason "error") are counted and not
      written: the next run tries again.

    Raises:
      ConfigError: In one line: a bad line of text, other settings than OUT was made with, a prompt
        that has changed since its answer was written.
      CheckpointError: If the checkpoint cannot be used.
      OSError: If the disk takes no more; the same command goes on when there is room.
    """
    options.check()  # before anything is loaded
    find_files(options.data)
    drafter_dir = None
    if options.drafter == AUTO:
        drafter_dir = find_drafter(options.model)
    elif options.drafter != NONE:
        drafter_dir = Path(options.drafter)
    if llm is None:
        llm = LLM.load(options.model, drafter_dir, options.dtype)
    settings = _settings(options, drafter_dir)
    text_format = TextFormat.of_checkpoint(
        options.model, llm.tokenizer, llm.config.vocab_size, options.thinking
    )
    prompts, left_out = read_prompts(options, text_format, llm.config.max_position)
    versions = {"mimo_jax": __version__, **machine()["packages"]}
    with AnswerFile(options.out, settings, versions) as file:
        for prompt in prompts:
            if file.prompts.get(prompt.answer_id, prompt.prompt_ids) != prompt.prompt_ids:
                raise ConfigError(
                    f"{prompt.record.where}: {options.out} answers another prompt with id "
                    f"{prompt.answer_id!r}; the data has changed, name another --out"
                )
        pending = [i for i, p in enumerate(prompts) if p.answer_id not in file.prompts]

        def on_answer(index: int, output: Output) -> None:
            if output.error is None:
                file.write(line_of(prompts[index], output))

        figures = {}
        if pending:
            jobs = _make_jobs(llm, prompts, options)
            figures = _decode(llm, jobs, pending, options, on_answer)
    return {
        "out": str(options.out),
        "prompts": len(prompts),
        "skipped": len(prompts) - len(pending),
        "left_out": left_out,
        **figures,
    }
