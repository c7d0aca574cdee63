"""Pictures for notebooks: what is drawn is what was given.

Run: .venv/bin/python -m pytest tests/testing/test_show.py
"""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from mimo_jax.decode.generate import Completion
from mimo_jax.decode.jobs import Output
from mimo_jax.decode.stats import AcceptStats
from mimo_jax.testing import show
from mimo_jax.text.tokenizer import Tokenizer
from tests.serving.checkpoints import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


def output_of(token_ids: list[int], committed: list[int]) -> Output:
    accepted = [count - 1 for count in committed]
    completion = Completion(
        token_ids, "length", committed, accepted, [7] * len(committed), 0.1, 0.2
    )
    stats = AcceptStats.of([completion], 8)
    return Output([1], token_ids, None, "length", completion, stats)


def test_text_is_cut_where_steps_end(tokenizer):
    ids = tokenizer.encode("a<b> cé")
    output = output_of(ids, [3, 1, 3])
    assert show.step_texts(output, tokenizer) == ["a", "<b>", " ", "cé"]
    # The two bytes of é in two steps: the character belongs to the later one.
    output = output_of(ids, [3, 1, 2, 1])
    assert show.step_texts(output, tokenizer) == ["a", "<b>", " ", "c", "é"]


def test_shaded_text_is_escaped_and_changes_colour_at_every_step(tokenizer):
    output = output_of(tokenizer.encode("a<b> cé"), [3, 1, 3])
    page = show.shade_steps(output, tokenizer, prompt="if x < y:")
    assert "if x &lt; y:" in page
    assert "<b>" not in page
    first, second = show.RUN_COLORS
    colors = re.findall(r"background:(#\w+);color", page)
    assert colors == [show.FIRST_COLOR, second, first, second]
    assert re.findall(r"step \d: (\d) tokens", page) == ["3", "1", "3"]


def test_a_mask_is_drawn_cell_by_cell():
    mask = np.array([[True, False, True], [False, True, True]])
    axis = Figure().subplots()
    show.draw_mask(axis, mask, title="here", query_labels=["q5", "q6"], splits=[2])
    np.testing.assert_array_equal(np.asarray(axis.images[0].get_array()), mask)
    assert [label.get_text() for label in axis.get_yticklabels()] == ["q5", "q6"]
    assert axis.get_title(loc="left") == "here"


def test_a_mask_with_a_batch_axis_is_refused():
    with pytest.raises(ValueError, match=r"bool mask \[t, s\], got bool \[1, 2, 2\]"):
        show.draw_mask(Figure().subplots(), np.ones((1, 2, 2), bool))


def test_a_ring_shows_positions_and_who_sees_them():
    positions = np.array([[8, 9, 6, 7, -1]])
    anchor = np.array([[False, False, True, True, False]])
    block = np.array([[True, False, True, True, False]])
    axis = Figure().subplots()
    written = positions == 8
    show.draw_ring(axis, positions, anchor, block, written, row_labels=["step"], ring_len=4)
    assert [text.get_text() for text in axis.texts] == ["8", "9", "6", "7"]
    np.testing.assert_array_equal(np.asarray(axis.images[0].get_array()), [[2, 1, 3, 3, 0]])
    assert len(axis.patches) == 1
