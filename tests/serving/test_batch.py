"""Batch jobs on the golden checkpoint, in this process. Run: pytest tests/serving/test_batch.py"""

import dataclasses
import errno
import json
import os
from pathlib import Path

import pytest

from mimo_jax import LLM, ConfigError
from mimo_jax.models.params import flatten, unflatten
from mimo_jax.serving.batch import run_batch
from mimo_jax.serving.jsonl import JobError, OutputWriter, read_finished, read_lines
from mimo_jax.serving.options import BatchOptions
from tests.golden.files import arrays
from tests.serving.checkpoints import make_text_checkpoint

GOLDEN = arrays("mimo_tiny_dflash")
PROMPTS = [GOLDEN[f"spec{b}_output_ids"][:16].tolist() for b in (0, 1)]
ANSWERS = [GOLDEN[f"spec{b}_output_ids"][16:].tolist() for b in (0, 1)]
PROGRAM = {"batch_size": 2, "quiet": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM.load(make_text_checkpoint(tmp_path_factory.mktemp("batch") / "model"))


@pytest.fixture
def job(llm, tmp_path):
    """Runs a job in tmp_path; returns (exit code, output records)."""

    def run(lines, **options):
        file = tmp_path / "in.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options = PROGRAM | {"output": tmp_path / "out.jsonl"} | options
        code = run_batch(BatchOptions(llm.directory, file, **options), llm)
        return code, read_records(options["output"])

    return run


def read_records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# The first answer is the longest, so the others are ready before they may be written.
MIXED = [
    {"id": "a", "prompt_token_ids": PROMPTS[0], "max_tokens": 48, "scene": "math"},
    {"id": "b", "prompt_token_ids": PROMPTS[1], "max_tokens": 3, "scene": "chat"},
    {"id": "c", "prompt_token_ids": PROMPTS[1], "max_tokens": 1, "scene": "chat"},
    {"id": "d", "prompt_token_ids": [300]},
    {"id": "e", "prompt": "Füße\n", "max_tokens": 7},
    {"custom_id": "f", "body": {"messages": [{"role": "user", "content": "q"}], "max_tokens": 4}},
    {"id": "g", "prompt_token_ids": PROMPTS[1], "max_tokens": 48, "scene": "math"},
]


def test_answers_statistics_and_errors(job, llm, tmp_path, capfd):
    metrics_file = tmp_path / "deep" / "metrics.json"
    code, records = job(MIXED, detailed=True, quiet=False, metrics_json=metrics_file)
    assert code == 1
    assert [record["id"] for record in records] == list("abcdefg")
    for i, b, num in ((0, 0, 48), (1, 1, 3), (2, 1, 1), (6, 1, 48)):
        record = records[i]
        assert record["prompt_token_ids"] == PROMPTS[b]
        assert record["token_ids"] == ANSWERS[b][:num]
        assert record["finish_reason"] == "length"
        assert record["text"] == llm.tokenizer.decode(record["token_ids"])
        assert record["usage"] == {
            "prompt_tokens": 16,
            "completion_tokens": num,
            "total_tokens": 16 + num,
        }
        assert sum(record["num_committed_per_step"]) == num - 1
        assert record["scene"] == MIXED[i]["scene"]
    for b, record in enumerate((records[0], records[6])):
        steps = GOLDEN[f"spec{b}_produced_per_step"].tolist()
        assert record["num_committed_per_step"][:-1] == steps[:-1]
        assert record["accept_stats"]["num_steps"] == len(steps)
        assert record["accept_stats"]["tau"] == pytest.approx(47 / len(steps), abs=1e-4)
    assert records[2]["accept_stats"]["tau"] is None
    assert set(records[3]) == {"id", "error"}
    assert "prompt token id 300 is not in the vocabulary" in records[3]["error"]
    assert records[4]["prompt_token_ids"] == llm.tokenizer.encode("Füße\n")
    assert records[5]["prompt_token_ids"] == llm.tokenizer.encode("user:q\n>")

    metrics = json.loads(metrics_file.read_text())
    assert (metrics["num_requests"], metrics["num_errors"], metrics["num_skipped"]) == (7, 1, 0)
    assert metrics["output_tokens"] == 48 + 3 + 1 + 7 + 4 + 48
    answers = [record["accept_stats"] for record in records if "error" not in record]
    for name in ("num_steps", "num_committed"):
        assert metrics[name] == sum(stats[name] for stats in answers)
    histogram = metrics["accept_length_histogram"]
    assert len(histogram) == 8
    assert sum(histogram) == metrics["num_steps"]
    committed = sum(i * count for i, count in enumerate(histogram, start=1))
    assert metrics["tau"] == pytest.approx(committed / sum(histogram), abs=1e-4)
    assert len(metrics["per_position_acceptance"]) == 7
    assert metrics["output_tokens_per_s"] > 0
    assert metrics["ttft_s"] > 0
    assert metrics["tpot_s"] > 0
    assert metrics["wall_s"] >= metrics["compile_s"]
    assert set(metrics["scenes"]) == {"chat", "math"}
    assert metrics["scenes"]["math"]["output_tokens"] == 96
    assert metrics["run"]["draft"] == "chain"

    out, err = capfd.readouterr()
    assert out == ""
    for word in ("7/7", "TTFT", "TPOT", "tokens/s", "τ", "math", "accepted", "compiled for"):
        assert word in err
    assert "1 of 7 lines have an error" in err


def test_a_stopped_job_ends_in_the_same_bytes(job, tmp_path):
    lines = [*MIXED, {"id": "a", "prompt": "again"}, {"id": "d", "prompt": "again"}]
    code, records = job(lines)
    assert code == 1
    assert records[7]["error"] == "line 8: id 'a' is already that of line 1"
    output = tmp_path / "out.jsonl"
    whole = output.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == len(lines)
    for size in (0, 5, ends[2], ends[2] + 3, ends[3] - 1, ends[7], len(whole)):
        output.write_bytes(whole[:size])
        assert job(lines)[0] == 1
        assert output.read_bytes() == whole
    output.write_bytes(whole[: ends[1]] + b"\0" * 100)
    job(lines)
    assert output.read_bytes() == whole


def test_a_continued_job_counts_what_it_did(job, tmp_path):
    lines = MIXED[:3]
    job(lines)
    metrics_file = tmp_path / "metrics.json"
    assert job(lines, metrics_json=metrics_file)[0] == 0
    metrics = json.loads(metrics_file.read_text())
    assert (metrics["num_requests"], metrics["num_skipped"]) == (0, 3)
    assert (metrics["tau"], metrics["ttft_s"], metrics["output_tokens_per_s"]) == (None, None, 0.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"my notes\n", "line 1 was not written by a batch job"),
        (b'{"id": "a", "token_ids": []}\n{"prompt": "b"}\n', "line 2 was not written"),
        (b"my notes", "its last line was not written"),
    ],
)
def test_a_file_that_is_not_ours_is_left_alone(job, tmp_path, content, message):
    (tmp_path / "out.jsonl").write_bytes(content)
    with pytest.raises(JobError, match=message):
        job(MIXED)
    assert (tmp_path / "out.jsonl").read_bytes() == content


def test_mixed_sampling_in_one_batch(job, tmp_path):
    prompt = {"prompt_token_ids": PROMPTS[0], "max_tokens": 12}
    sampled = prompt | {"temperature": 1.5, "top_p": 0.95}
    lines = [
        prompt | {"id": "greedy"},
        sampled | {"id": "one", "seed": 1},
        sampled | {"id": "two", "seed": 2},
        sampled | {"id": "one more", "seed": 1},
    ]
    _, records = job(lines)
    greedy, one, two, again = (record["token_ids"] for record in records)
    assert greedy == ANSWERS[0][:12]
    assert one == again
    assert one != two
    # The flag gives the seed of lines that have none.
    no_seed = [sampled | {"id": "one"}, sampled | {"id": "two", "seed": 2}]
    _, records = job(no_seed, seed=1, output=tmp_path / "other.jsonl")
    assert [record["token_ids"] for record in records] == [one, two]


def test_stop_strings_of_flag_and_line(job, tmp_path):
    lines = [{"id": str(b), "prompt_token_ids": PROMPTS[b], "max_tokens": 48} for b in (0, 1)]
    _, plain = job(lines)
    stops = [record["text"][12:14] for record in plain]
    lines[1]["stop"] = [stops[1], "zzzz"]
    _, records = job(lines, stop=(stops[0],), detailed=True, output=tmp_path / "stopped.jsonl")
    for record, whole, stop in zip(records, plain, stops, strict=True):
        assert record["text"] == whole["text"][: whole["text"].find(stop)]
        assert record["finish_reason"] == "stop"
        num = len(record["token_ids"])
        assert record["token_ids"] == whole["token_ids"][:num]
        assert record["usage"]["completion_tokens"] == num
        assert sum(record["num_committed_per_step"]) == num - 1


def test_lines_that_only_the_model_can_refuse(job, llm):
    code, records = job(
        [
            {"prompt_token_ids": [7] * 512},
            {"prompt": "x" * 600},
            {"messages": []},
            {"messages": [{"role": "robot", "content": ""}]},
            {"prompt": "a", "stop_token_ids": [256]},
        ]
    )
    assert code == 1
    messages = [
        "prompt of 512 tokens is too long for the model's context of 512; allowed: 1..511",
        "prompt of 600 tokens is too long",
        "messages is empty",
        "'robot': allowed are system",
        "stop token id 256 is not in the vocabulary; allowed: 0..255",
    ]
    for number, (record, message) in enumerate(zip(records, messages, strict=True), start=1):
        assert record["id"] == str(number)
        assert record["error"].startswith(f"line {number}: ")
        assert message in record["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens 0 is out of range; allowed: >= 1"),
        ({"batch_size": 0}, "batch_size 0 is out of range"),
        ({"scene": "maths"}, "scene 'maths' is unknown; allowed: code-stdlib"),
        ({"draft": "off", "draft_block_len": 4}, "no meaning with draft off"),
        ({"draft_block_len": 9}, r"draft_block_len 9 is out of range; allowed: 2\.\.8"),
    ],
)
def test_wrong_flags_leave_no_output(job, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        job(MIXED[:1], **options)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_job_without_tokenizer_and_drafter(job, llm, tmp_path):
    bare = LLM(llm.target)
    file = tmp_path / "lines.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt_token_ids": [1], "stop": "x"}\n')
    options = BatchOptions(tmp_path, file, tmp_path / "out.jsonl", quiet=True)
    assert run_batch(options, bare) == 1
    first, second = read_records(options.output)
    assert "line 1: text prompts need a tokenizer" in first["error"]
    assert (second["id"], second["error"][:37]) == ("3", "line 3: stop strings need a tokenizer")
    with pytest.raises(ConfigError, match="draft chain needs a drafter, and .*dflash holds none"):
        run_batch(BatchOptions(tmp_path, file, options.output, draft="chain"), bare)
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        run_batch(BatchOptions(tmp_path, file, options.output, stop=("x",)), bare)


def test_paths_that_cannot_work(job, llm, tmp_path):
    with pytest.raises(JobError, match="is the input; name another file"):
        job(MIXED, output=tmp_path / "in.jsonl")
    with pytest.raises(JobError, match="is a directory"):
        job(MIXED, output=tmp_path)
    with pytest.raises(JobError, match=r"input .*none\.jsonl: cannot be read: No such file"):
        run_batch(BatchOptions(llm.directory, tmp_path / "none.jsonl", tmp_path / "out"), llm)


def test_lines_of_a_file(tmp_path):
    file = tmp_path / "lines"
    file.write_bytes(b"\xef\xbb\xbf{}\r\n\n \n" + "{\u2028}".encode() + b"\nlast")
    lines = [(1, b"{}\r"), (4, "{\u2028}".encode()), (5, b"last")]
    assert read_lines(file) == lines


class FullDisk:
    """A file on a disk that has room for some bytes more."""

    def __init__(self, room: int):
        self.data, self.room, self.is_closed = b"", room, False

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = bytes(data[: self.room])
        self.data, self.room = self.data + taken, self.room - len(taken)
        return len(taken)

    def truncate(self, size):
        self.data = self.data[:size]
        return size

    def seek(self, offset):
        return offset

    def fileno(self):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def close(self):
        self.is_closed = True


def test_a_full_disk_leaves_whole_lines():
    record = {"id": "a", "token_ids": [1, 2, 3]}
    line = (json.dumps(record) + "\n").encode()

    def write_three(file):
        with OutputWriter(file, "out.jsonl") as writer:
            for _ in range(3):
                writer.write(record)

    size = len(line)
    for room in (0, 5, size, size + 7, 2 * size + 1):
        file = FullDisk(room)
        with pytest.raises(JobError, match=r"out\.jsonl: cannot be written: No space left"):
            write_three(file)
        assert file.data == line * (room // size)
        assert file.is_closed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_device(job):
    with pytest.raises(JobError, match="/dev/full: cannot be written: No space left on device"):
        job([{"prompt": ""}], output=Path("/dev/full"))


def test_opening_cuts_a_torn_line(tmp_path):
    path = tmp_path / "out"
    torn = b'{"id": "b", "text": "a text that is longer than the new line", "tok'
    path.write_bytes(b'{"id": "a", "error": "x"}\n' + torn)
    finished = read_finished(path)
    assert (dict(finished.ids), finished.error_ids) == ({"a": 1}, {"a"})
    with OutputWriter.open(path, finished) as writer:
        writer.write({"id": "b", "token_ids": []})
    assert [record["id"] for record in read_records(path)] == ["a", "b"]


def test_template_variables_of_the_job_and_of_a_line(job):
    """The job's variables reach every conversation; a line's own go before them."""
    ask = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 1}
    lines = [{"id": "plain", **ask}, {"id": "own", **ask, "chat_template_kwargs": {"mood": "sad"}}]
    job(lines[:1], detailed=True)
    _, records = job(
        [{**line, "id": line["id"] + "2"} for line in lines],
        detailed=True,
        chat_template_kwargs='{"mood": "glad"}',
    )
    lengths = {record["id"]: len(record["prompt_token_ids"]) for record in records}
    assert lengths["plain2"] - lengths["plain"] == len("glad")
    assert lengths["own2"] - lengths["plain"] == len("sad")
    with pytest.raises(ConfigError, match=r"chat_template_kwargs '\[\]' is no JSON object"):
        job(lines, chat_template_kwargs="[]")


def test_drafting_by_cost_or_profile_answers_the_same(job, tmp_path):
    lines = [{"id": str(b), "prompt_token_ids": PROMPTS[b], "scene": "chat"} for b in (0, 1)]
    for draft in ("auto", "profile"):
        metrics = tmp_path / f"{draft}.json"
        code, records = job(
            lines, max_tokens=48, draft=draft, metrics_json=metrics, output=tmp_path / draft
        )
        assert code == 0
        assert [record["token_ids"] for record in records] == ANSWERS
        run = json.loads(metrics.read_text())["run"]
        assert run["draft"] == draft
        times = run["step_s_by_rung"]
        assert (set(times or ()) == {"1", "4", "8", "tree of 16"}) == (draft == "auto")


def test_log_probabilities_and_penalties_of_lines(job):
    line = {"prompt_token_ids": PROMPTS[0], "max_tokens": 6}
    lines = [
        line | {"id": "a", "logprobs": 2},
        line | {"id": "b"},
        line | {"id": "c", "logit_bias": {str(ANSWERS[0][0]): -100}},
        {"custom_id": "d", "body": line | {"logprobs": True, "top_logprobs": 1}},
        {"custom_id": "e", "body": line | {"top_logprobs": 1}},
    ]
    code, (a, b, c, d, e) = job(lines)
    assert code == 1
    assert a["token_ids"] == b["token_ids"] == d["token_ids"] == ANSWERS[0][:6]
    assert len(a["logprobs"]) == len(a["top_logprobs"]) == 6
    assert [len(top) for top in a["top_logprobs"]] == [2] * 6
    assert [top[0][0] for top in a["top_logprobs"]] == ANSWERS[0][:6]  # greedy
    assert [len(top) for top in d["top_logprobs"]] == [1] * 6
    assert "logprobs" not in b
    assert c["token_ids"][0] != ANSWERS[0][0]
    assert e["error"] == "line 5: top_logprobs has no meaning without logprobs true"


CANDIDATES = {"prompt_token_ids": PROMPTS[0], "max_tokens": 12, "temperature": 1.5, "seed": 3}


def test_several_answers_per_line(job, llm, tmp_path):
    lines = [
        CANDIDATES | {"id": "three", "n": 3, "logprobs": 0},
        CANDIDATES | {"id": "one of three", "best_of": 3},
        {"custom_id": "two of three", "body": CANDIDATES | {"n": 2, "best_of": 3}},
        CANDIDATES | {"id": "one"},
        CANDIDATES | {"id": "greedy", "temperature": 0.0, "n": 2},
        CANDIDATES | {"id": "less", "n": 3, "best_of": 2},
        CANDIDATES | {"id": "none", "n": 0},
    ]
    metrics_file = tmp_path / "metrics.json"
    code, records = job(lines, detailed=True, metrics_json=metrics_file)
    assert code == 1
    three, of_three, two, one, *errors = records
    answers = [three, *three["alternatives"]]
    assert len(answers) == 3
    values = [a["score"] for a in answers]
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx([sum(a["logprobs"]) / 12 for a in answers], abs=1e-5)
    ids = [a["token_ids"] for a in answers]
    assert len({tuple(i) for i in ids}) == 3
    assert one["token_ids"] in ids  # candidate 0 has the seed of the line
    assert "score" not in one
    assert (of_three["token_ids"], of_three["alternatives"]) == (ids[0], [])
    assert [two["token_ids"], two["alternatives"][0]["token_ids"]] == ids[:2]
    assert "logprobs" not in two
    for record in (three, of_three, two):
        assert record["usage"] == {
            "prompt_tokens": 16,
            "completion_tokens": 36,
            "total_tokens": 52,
        }
        assert record["accept_stats"]["num_committed"] == 33
        assert sum(record["num_committed_per_step"]) == 11
    messages = ("n 2 has no meaning at temperature 0", "best_of 2 is out of range", "n 0 is out")
    for number, (record, message) in enumerate(zip(errors, messages, strict=True), start=5):
        assert record["error"].startswith(f"line {number}: {message}")
    metrics = json.loads(metrics_file.read_text())
    assert (metrics["num_requests"], metrics["num_errors"]) == (7, 3)
    assert (metrics["prompt_tokens"], metrics["output_tokens"]) == (4 * 16, 10 * 12)


def test_several_answers_by_flags(job, tmp_path):
    line = {"id": "a", "prompt_token_ids": PROMPTS[0], "max_tokens": 12, "seed": 3}
    options = {"n": 2, "best_of": 3, "temperature": 1.5, "rank": "majority"}
    code, (record,) = job([line], **options)
    assert code == 0
    assert record["usage"]["completion_tokens"] == 36
    assert 0 <= record["alternatives"][0]["score"] <= record["score"] <= 1
    for options, message in (
        ({"n": 2}, "n 2 has no meaning at temperature 0, .* or a temperature above 0"),
        ({"n": 3, "best_of": 2, "temperature": 1.0}, "best_of 2 is out of range"),
        ({"n": -1}, "n -1 is out of range"),
        ({"rank": "majority"}, "rank majority has no meaning for one candidate"),
    ):
        with pytest.raises(ConfigError, match=message):
            job([line], output=tmp_path / "no", **options)


def test_a_shared_beginning_in_a_job_that_is_continued(job, tmp_path):
    """Conversations, text and ids behind one beginning of 64 ids or more; stopped after two lines.

    What was answered counts as sharing too, so that the rest is read in the same pieces.
    """
    system = {"role": "system", "content": "answer briefly " * 5}
    ask = lambda n: [system, {"role": "user", "content": "?" * n}]
    lines = [{"id": str(n), "messages": ask(n), "max_tokens": 9} for n in range(1, 7)]
    lines.append({"id": "text", "prompt": "system:" + system["content"] + "\nx", "max_tokens": 5})
    code, records = job(lines)
    assert code == 0
    alone = [job([line], output=tmp_path / f"{line['id']}.jsonl")[1][0] for line in lines]
    for record, single in zip(records, alone, strict=True):
        assert record["token_ids"] == single["token_ids"]
        assert record["accept_stats"] == single["accept_stats"]
    output = tmp_path / "out.jsonl"
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    job(lines)
    assert output.read_bytes() == whole


@pytest.mark.multi_device
def test_a_mesh_answers_the_same(llm, tmp_path):
    """Of one device each way: what is cut is tested in tests/decode/test_mesh.py."""
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": PROMPTS[0], "max_tokens": 20}) + "\n")
    options = BatchOptions(
        llm.directory, file, output, mesh="1x1", whole_drafter=True, quiet=True
    )
    assert run_batch(options) == 0
    assert read_records(output)[0]["token_ids"] == ANSWERS[0][:20]
    for mesh, message in (("1x3", "cannot be cut into 3 parts"), ("1x2x3", "does not fit rules")):
        options = BatchOptions(llm.directory, file, tmp_path / "no", mesh=mesh, quiet=True)
        with pytest.raises(ConfigError, match=message):
            run_batch(options)


def test_a_model_that_breaks_down_on_one_line(llm, tmp_path):
    """NaN in one row of the embedding: that answer is an error line, the other one is whole."""
    broken = next(i for i in ANSWERS[0][4:] if i not in ANSWERS[1] + PROMPTS[0] + PROMPTS[1])
    num_good = ANSWERS[0].index(broken) + 1
    flat = flatten(llm.target.params)
    flat["embedding"] = flat["embedding"].at[broken].set(float("nan"))
    params = unflatten(llm.target.params, flat)
    bad = LLM(
        dataclasses.replace(llm.target, params=params), llm.drafter, tokenizer=llm.tokenizer
    )
    lines = [{"id": str(b), "prompt_token_ids": PROMPTS[b], "scene": "chat"} for b in (0, 1)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = BatchOptions(
        tmp_path, tmp_path / "in.jsonl", tmp_path / "out.jsonl", max_tokens=48, **PROGRAM
    )
    for _ in range(2):  # continued, it counts the error of the earlier run
        assert run_batch(options, bad) == 1
        first, second = read_records(options.output)
        assert set(first) == {"id", "scene", "error"}
        message = f"logits after {num_good} tokens of the answer are not finite (NaN or infinity)"
        assert first["error"].startswith("line 1: the model's ")
        assert message in first["error"]
        assert second["token_ids"] == ANSWERS[1]
    output, whole = bad.generate(PROMPTS, max_tokens=48, batch_size=2)
    assert (output.finish_reason, output.token_ids) == ("error", ANSWERS[0][:num_good])
    assert message in output.error
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert (whole.token_ids, whole.error) == (ANSWERS[1], None)
    (nothing,) = bad.generate([broken], max_tokens=4)
    assert (nothing.token_ids, nothing.text, nothing.tau) == ([], "", None)
    assert nothing.finish_reason == "error"
