"""The Python API on the golden checkpoint. Run: pytest tests/decode/test_llm.py"""

import json
import sys

import numpy as np
import pytest

import mimo_jax
from mimo_jax import LLM, ConfigError, SamplingParams
from mimo_jax.checkpoint.safetensors_reader import CheckpointError
from mimo_jax.decode.loading import read_stop_ids, read_tokenizer
from mimo_jax.models.params import flatten
from tests.golden.files import arrays
from tests.serving.checkpoints import DRAFTER, END_ID, TARGET, make_text_checkpoint

GOLDEN = arrays("mimo_tiny_dflash")
PROMPTS = [GOLDEN[f"spec{b}_output_ids"][:16].tolist() for b in (0, 1)]
ANSWERS = [GOLDEN[f"spec{b}_output_ids"][16:].tolist() for b in (0, 1)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM.load(make_text_checkpoint(tmp_path_factory.mktemp("llm") / "model"))


def test_golden_answers_with_their_steps(llm):
    outputs = llm.generate(PROMPTS, max_tokens=48)
    for b, output in enumerate(outputs):
        assert output.prompt_ids == PROMPTS[b]
        assert output.token_ids == ANSWERS[b]
        assert output.finish_reason == "length"
        assert output.text == str(output) == llm.tokenizer.decode(output.token_ids)
        steps = GOLDEN[f"spec{b}_produced_per_step"].tolist()
        committed = output.completion.num_committed_per_step
        assert committed[:-1] == steps[:-1]
        assert sum(committed) == 47
        assert output.tau == pytest.approx(47 / len(steps))
        assert output.stats.num_steps == len(steps)


def test_one_prompt_in_every_form(llm):
    one, two = llm.generate([PROMPTS[0], PROMPTS[0]], max_tokens=5)
    assert one == two or one.token_ids == two.token_ids == ANSWERS[0][:5]
    for prompt in (PROMPTS[0], np.array(PROMPTS[0]).tolist()):
        assert [o.token_ids for o in llm.generate(prompt, max_tokens=5)] == [ANSWERS[0][:5]]
    text = llm.tokenizer.decode([40, 41, 42])
    assert llm.generate(text, max_tokens=3)[0].prompt_ids == [40, 41, 42]
    assert llm.generate([]) == []


def test_stop_ids(llm):
    stop = int(GOLDEN["stop0_token"])
    (output,) = llm.generate(PROMPTS[0], max_tokens=48, stop_token_ids=[stop])
    assert output.token_ids == GOLDEN["stop0_output_ids"][16:].tolist()
    assert output.finish_reason == "stop"
    assert output.text == llm.tokenizer.decode(output.token_ids[:-1])


def test_stream_gives_the_same_text(llm):
    (output,) = llm.generate(PROMPTS[1], max_tokens=48)
    pieces = list(llm.stream(PROMPTS[1], max_tokens=48))
    assert len(pieces) > 1
    assert "".join(pieces) == output.text
    stop = output.text[20:22]
    assert (
        "".join(llm.stream(PROMPTS[1], max_tokens=48, stop=stop))
        == (output.text[: output.text.find(stop)])
    )


def test_stop_string_over_two_tokens(llm):
    (whole,) = llm.generate(PROMPTS[0], max_tokens=48)
    stop = whole.text[10:12]
    (output,) = llm.generate(PROMPTS[0], max_tokens=48, stop=[stop, "never there"])
    assert output.text == whole.text[: whole.text.find(stop)]
    assert output.finish_reason == "stop"
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert llm.tokenizer.decode(output.token_ids).endswith(stop)
    assert sum(output.completion.num_committed_per_step) == len(output.token_ids) - 1


@pytest.mark.parametrize("draft", [True, False])
def test_stop_strings_anywhere(llm, draft):
    """One id is one byte here: stops of 1 to 11 characters begin and end at every place of a block.

    The limit falls right behind the stop, into the block that holds it, or far away: the stop wins.
    """
    (whole,) = llm.generate(PROMPTS[1], max_tokens=48, draft=draft)
    text = whole.text
    ends = []
    for i, length in enumerate((1, 2, 3, 11, 2, 5, 1, 4, 2, 3)):
        stop = text[8 + i : 8 + i + length]
        cut = text.find(stop)
        for max_tokens in (48, 24, 20):
            options = {"stop": stop, "max_tokens": max_tokens, "draft": draft}
            (output,) = llm.generate(PROMPTS[1], **options)
            limited = llm.tokenizer.decode(whole.token_ids[:max_tokens])
            is_stopped = stop in limited
            assert output.finish_reason == ("stop" if is_stopped else "length")
            assert output.text == (limited[:cut] if is_stopped else limited)
            assert output.token_ids == whole.token_ids[: len(output.token_ids)]
            assert sum(output.completion.num_committed_per_step) == len(output.token_ids) - 1
            assert "".join(llm.stream(PROMPTS[1], **options)) == output.text
            ends.append(output.finish_reason)
    assert {"stop", "length"} == set(ends)


def test_a_stop_string_that_ends_with_the_last_token(llm):
    """The limit and the stop are reached by the same token: the answer was stopped."""
    (whole,) = llm.generate(PROMPTS[0], max_tokens=48)
    begins = {n: llm.tokenizer.decode(whole.token_ids[:n]) for n in range(12, 40)}
    # The first place where two characters stand that have not stood side by side before.
    num, text = next((n, t) for n, t in begins.items() if t.find(t[-2:]) == len(t) - 2)
    (output,) = llm.generate(PROMPTS[0], max_tokens=num, stop=text[-2:])
    assert (output.text, output.finish_reason) == (text[:-2], "stop")
    assert len(output.token_ids) == num


def test_chat_and_special_stop_string(llm):
    messages = [{"role": "user", "content": "hi"}]
    prompt = llm.render_chat(messages, tools=[{}], template_kwargs={"mood": "glad"})
    assert prompt == "user:hi\nglad1>"
    output = llm.chat(messages, max_tokens=3)
    assert output.prompt_ids == llm.tokenizer.encode("user:hi\n>")
    job = llm.make_job([1], SamplingParams(stop=("<|end|>", "x")))
    assert (job.request.stop_ids, job.stops) == ((END_ID,), ("x",))


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, None),
        ("", {}, "prompt is empty"),
        ([256], {}, "prompt token id 256 is not in the vocabulary; allowed: 0..255"),
        ([1] * 512, {}, "prompt of 512 tokens is too long .* context of 512; allowed: 1..511"),
        ([1], {"max_tokens": 0}, "max_tokens 0 is out of range; allowed: >= 1"),
        ([1], {"temperature": -1.0}, "temperature -1.0 .* allowed: >= 0"),
        ([1], {"temperature": float("nan")}, "temperature nan"),
        ([1], {"top_p": 0.0}, "top_p 0.0"),
        ([1], {"seed": 2**31}, "seed 2147483648 is out of range; allowed: 0..2147483647"),
        ([1], {"seed": [1, 2]}, "2 seeds for 1 prompts"),
        ([1], {"stop": ""}, "stop '' is out of range"),
        ([1], {"stop_token_ids": [300]}, "stop token id 300 is not in the vocabulary"),
        ([1], {"draft_block_len": 9}, r"draft_block_len 9 .* allowed: 2\.\.8"),
        ([1], {"draft_block_len": 0}, r"draft_block_len 0 .* allowed: 2\.\.8"),
        ([1], {"draft_block_len": 4, "draft": False}, "draft_block_len 4 needs a drafter"),
        ([1], {"batch_size": 0}, "batch_size 0"),
        ([1], {"zzz": 0}, "unknown argument 'zzz'"),
    ],
)
def test_refusals(llm, prompt, options, message):
    if message is None:
        assert llm.generate(prompt, **options) == []
        return
    with pytest.raises(ConfigError, match=message):
        llm.generate(prompt, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprobs": 0}, "logprobs cannot be streamed"),
        ({"n": 2, "temperature": 1.0}, "n and best_of above 1 cannot be streamed"),
        ({"best_of": 2, "temperature": 1.0}, "n and best_of above 1 cannot be streamed"),
        ({"steps_per_group": 0}, "steps_per_group 0 is out of range; allowed: >= 1"),
        ({"acceptance": "maybe"}, "rule 'maybe' is unknown; allowed: match"),
        ({"rank": "majority"}, "unknown argument 'rank'"),
        ({"batch_size": 2}, "unknown argument 'batch_size'"),
    ],
)
def test_what_a_stream_cannot_give_is_refused_at_the_call(llm, options, message):
    with pytest.raises(ConfigError, match=message):
        llm.stream([1], **options)


def test_a_path_in_place_of_models_is_one_line(unchecked_annotations):
    with pytest.raises(ConfigError, match=r"LLM takes models in memory; LLM\.load\('here'\) reads"):
        LLM("here")


def test_log_probabilities_of_an_output(llm):
    (output,) = llm.generate(PROMPTS[0], max_tokens=5, logprobs=2)
    assert len(output.logprobs) == len(output.top_logprobs) == 5
    assert [top[0][0] for top in output.top_logprobs] == output.token_ids  # greedy
    assert [top[0][1] for top in output.top_logprobs] == pytest.approx(output.logprobs, abs=1e-5)


def test_prompts_that_begin_alike_are_answered_the_same(llm):
    """Text in, shared beginning of 64 ids: one call against calls of one prompt each."""
    texts = [llm.tokenizer.decode(range(40, 105)) + end for end in ("a", "bc", "def", "g", "hi")]
    alone = [llm.generate(text, max_tokens=9)[0] for text in texts]
    together = llm.generate(texts, max_tokens=9)
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.stats for o in together] == [o.stats for o in alone]


def test_chat_refusals(llm):
    with pytest.raises(ConfigError, match="allowed are system"):
        llm.render_chat([{"role": "robot", "content": "hi"}])
    with pytest.raises(ConfigError, match="template failed: TypeError"):
        llm.render_chat([{"role": "user", "content": None}])


def test_max_tokens_ends_at_the_context(llm):
    job = llm.make_job([1] * 500, SamplingParams(max_tokens=100))
    assert job.request.max_tokens == 12


def test_how_an_llm_drafts_where_a_call_does_not_say(llm):
    plain = LLM(llm.target, llm.drafter, draft=False)
    job = plain.make_job([1] * 10, SamplingParams(max_tokens=5))
    assert (plain.draft, llm.draft) == ("off", "chain")
    assert plain.open_engine([job]).drafter is None
    assert plain.open_engine([job], draft="profile").policy == "profile"
    for wrong in ({"draft": "often"}, {"draft": ""}):
        with pytest.raises(ConfigError, match=r"draft '.*' is unknown; allowed: off, chain, tree"):
            LLM(llm.target, llm.drafter, **wrong)
        with pytest.raises(ConfigError, match=r"draft '.*' is unknown; allowed: off, chain, tree"):
            llm.generate([1], **wrong)


def test_trees(llm):
    job = llm.make_job([1] * 10, SamplingParams(max_tokens=5))
    assert llm.open_engine([job], draft="tree").max_verify_nodes == 16
    assert llm.open_engine([job], draft="tree", max_verify_nodes=9).max_verify_nodes == 9
    assert llm.open_engine([job]).max_verify_nodes is None
    auto = llm.open_engine([job], draft="auto")
    assert (auto.policy, auto.rung_names) == ("costs", ("1", "4", "8", "tree of 16"))
    by_samples = llm.open_engine([job], draft="auto", acceptance="block")
    assert by_samples.rung_names == ("1", "4", "8")
    with pytest.raises(ConfigError, match="max_verify_nodes is of trees; allowed with draft tree"):
        llm.open_engine([job], max_verify_nodes=9)


def test_engines_are_kept_and_shared(llm):
    job = lambda **params: llm.make_job([1] * 10, SamplingParams(**params))
    engine = llm.open_engine([job(max_tokens=5)])
    assert llm.open_engine([job(max_tokens=100)]) is engine
    assert llm.open_engine([job(max_tokens=200)]) is not engine
    mixed = llm.open_engine([job(), job(temperature=1.0, top_k=5), job(temperature=0.5)])
    assert mixed.mode == "filtered"
    assert llm.open_engine([job()], draft=False).draft_block_len == 1
    many_stops = job(stop_token_ids=tuple(range(20)))
    assert llm.open_engine([many_stops]).max_stop_ids == 24


def test_without_tokenizer_or_drafter(llm):
    bare = LLM(llm.target)
    assert (bare.trained_block_len, bare.stop_ids) == (1, ())
    with pytest.raises(ConfigError, match="text prompts need a tokenizer"):
        bare.generate("hi")
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        bare.generate([1], stop="x")
    with pytest.raises(ConfigError, match="no chat template"):
        bare.render_chat([{"role": "user", "content": "hi"}])


def test_bfloat16_is_of_all_weights_but_the_router():
    loaded = LLM.load(TARGET, DRAFTER, dtype="bfloat16")
    assert loaded.dtype == "bfloat16"
    assert str(flatten(loaded.drafter.params)["w_fuse"].dtype) == "bfloat16"
    assert "blocks of 8" in repr(loaded)
    with pytest.raises(ConfigError, match="dtype 'int4' is unknown; allowed: float32, bfloat16"):
        LLM.load(TARGET, dtype="int4")


def test_drafter_of_another_tokenizer(tmp_path):
    """Same vocabulary size, two pieces exchanged: fluent text, drafts of other words."""
    directory = make_text_checkpoint(tmp_path / "model", with_drafter=False)
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    for file in DRAFTER.iterdir():
        (drafter / file.name).symlink_to(file.resolve())
    values = json.loads((directory / "tokenizer.json").read_text())
    (drafter / "tokenizer.json").write_text(json.dumps(values))
    LLM.load(directory, drafter)
    vocab = values["model"]["vocab"]
    first, second = (next(p for p, i in vocab.items() if i == token_id) for token_id in (65, 66))
    vocab[first], vocab[second] = 66, 65
    (drafter / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="id 65 is .* expected .* another tokenizer"):
        LLM.load(directory, drafter)


def test_drafter_of_another_target():
    with pytest.raises(ConfigError, match="num_target_layers is 6, expected 7"):
        LLM.load(TARGET, TARGET.parent / "qwen3-tiny-dflash")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 5, 7]}, {"eos_token_id": 1}, (7, 5)),
        ({"eos_token_id": 3}, {}, (3,)),
        ({"eos_token_id": None}, {"eos_token_id": 1}, (1,)),
        (None, {}, ()),
    ],
)
def test_stop_ids_of_a_checkpoint(tmp_path, generation, config, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_stop_ids(tmp_path, 10) == expected
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [10]}')
    with pytest.raises(CheckpointError, match=r"eos_token_id is \[10\]; allowed: ids in 0\.\.9"):
        read_stop_ids(tmp_path, 10)


def test_tokenizer_must_fit_the_vocabulary(llm, tmp_path):
    llm.tokenizer.save(tmp_path)
    with pytest.raises(CheckpointError, match="ids up to 255, but vocab_size .* is 200"):
        read_tokenizer(tmp_path, 200)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        read_tokenizer(tmp_path, 256)


def test_public_names():
    for name in mimo_jax._HOME:
        assert name in mimo_jax.__dir__()
        assert getattr(mimo_jax, name).__name__ == name
    assert set(mimo_jax._HOME) < set(dir(mimo_jax))
    assert "mimo_jax.decode.llm" in sys.modules
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = mimo_jax.Nothing
