"""Pictures for notebooks: text shaded by decode step, masks, ring caches.

Everything takes plain values (strings, NumPy-like arrays, matplotlib axes) and computes nothing
about models: what a picture shows was made by the package. Text becomes HTML with its own dark on
light colours, since a notebook's theme may be either.
"""

import html
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

from mimo_jax.decode.jobs import Output
from mimo_jax.text.tokenizer import IncrementalDetokenizer, Tokenizer

RUN_COLORS = ("#a8dadc", "#ffd6a5")
FIRST_COLOR = "#d9d9d9"
SEEN, UNSEEN = "#2a7f9e", "#f1f3f4"
# Slots of a ring, by what the block that is being verified does with them.
RING_COLORS = {
    "empty": "#ffffff",
    "held, seen by nobody": "#dcdfe1",
    "seen by later slots only": "#bfe0e6",
    "seen by the anchor": "#7fc4d1",
}


def step_texts(output: Output, tokenizer: Tokenizer) -> list[str]:
    """Text of an answer cut where its steps end; entry 0 is the token that prefill sampled.

    A character whose bytes two steps share counts to the later one. Special tokens are kept.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=False)
    texts = [detokenizer.push(ids) for ids in output.ids_by_step()]
    texts[-1] += detokenizer.flush()
    return texts


def shade_steps(output: Output, tokenizer: Tokenizer, prompt: str = "") -> str:
    """HTML of an answer in which each step has a colour of its own; hover to count its tokens.

    Args:
      output: From `LLM.generate`.
      tokenizer: Of the same checkpoint.
      prompt: Shown in grey before the answer.
    """
    spans = [f'<span style="color:#777777">{html.escape(prompt)}</span>']
    counts = (1, *output.completion.num_committed_per_step)
    for step, (text, count) in enumerate(zip(step_texts(output, tokenizer), counts, strict=True)):
        color = RUN_COLORS[step % 2] if step else FIRST_COLOR
        title = f"step {step}: {count} tokens" if step else "sampled by prefill"
        spans.append(
            f'<span title="{title}" style="background:{color};color:#111111">'
            f"{html.escape(text)}</span>"
        )
    style = "white-space:pre-wrap;background:#ffffff;padding:8px;border:1px solid #dddddd"
    return f'<pre style="{style}">{"".join(spans)}</pre>'


def draw_mask(
    axis: Axes,
    mask,
    *,
    title: str = "",
    query_labels: Sequence | None = None,
    key_labels: Sequence | None = None,
    query_name: str = "query",
    key_name: str = "key",
    splits: Sequence[int] = (),
) -> None:
    """Draws one mask: rows are queries, columns keys, a filled cell is a key that is seen.

    Args:
      axis: Drawn into.
      mask: bool [t, s].
      title: Above the picture.
      query_labels: One per row; default: the row's number.
      key_labels: One per column.
      query_name: What a row is.
      key_name: What a column is.
      splits: Columns before which a line is drawn, where two stretches of keys meet.
    """
    seen = np.asarray(mask)
    if seen.ndim != 2 or seen.dtype != bool:
        raise ValueError(f"expected a bool mask [t, s], got {seen.dtype} {list(seen.shape)}")
    t, s = seen.shape
    axis.imshow(seen, cmap=ListedColormap([UNSEEN, SEEN]), vmin=0, vmax=1, aspect="equal")
    axis.set_xticks(range(s), [str(x) for x in (range(s) if key_labels is None else key_labels)])
    axis.set_yticks(
        range(t), [str(x) for x in (range(t) if query_labels is None else query_labels)]
    )
    axis.set_xticks(np.arange(0.5, s - 1), minor=True)
    axis.set_yticks(np.arange(0.5, t - 1), minor=True)
    axis.grid(which="minor", color="white", linewidth=1.5)
    axis.tick_params(which="both", length=0, labelsize=8)
    for column in splits:
        axis.axvline(column - 0.5, color="#c8553d", linewidth=2)
    axis.spines[:].set_visible(False)
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel(key_name, fontsize=9)
    axis.set_ylabel(query_name, fontsize=9)


def draw_ring(
    axis: Axes,
    positions,
    seen_by_anchor,
    seen_by_block,
    written,
    *,
    row_labels: Sequence[str],
    ring_len: int,
    title: str = "",
) -> None:
    """Draws a ring cache over steps: one row per step, in each slot the position that it holds.

    Args:
      axis: Drawn into.
      positions: int [steps, slots], -1 = empty.
      seen_by_anchor: bool [steps, slots], what the block's first query sees.
      seen_by_block: bool [steps, slots], what any query of the block sees.
      written: bool [steps, slots], what the step wrote; framed.
      row_labels: One per step.
      ring_len: Slots before the slack; a line is drawn there.
      title: Above the picture.
    """
    positions = np.asarray(positions)
    seen_by_anchor, seen_by_block = np.asarray(seen_by_anchor), np.asarray(seen_by_block)
    shade = np.where(positions < 0, 0, 1)
    shade = np.where(seen_by_block, 2, shade)
    shade = np.where(seen_by_anchor, 3, shade)
    num_steps, num_slots = positions.shape
    axis.imshow(shade, cmap=ListedColormap(list(RING_COLORS.values())), vmin=0, vmax=3)
    for row, column in np.ndindex(num_steps, num_slots):
        if positions[row, column] >= 0:
            text = str(positions[row, column])
            axis.text(column, row, text, ha="center", va="center", fontsize=8, color="#222222")
        if written[row][column]:
            corner = (column - 0.44, row - 0.44)
            frame = Rectangle(corner, 0.88, 0.88, fill=False, edgecolor="#c8553d", linewidth=1.6)
            axis.add_patch(frame)
    axis.set_xticks(range(num_slots))
    axis.set_yticks(range(num_steps), list(row_labels))
    axis.set_xticks(np.arange(0.5, num_slots - 1), minor=True)
    axis.set_yticks(np.arange(0.5, num_steps - 1), minor=True)
    axis.grid(which="minor", color="#eeeeee", linewidth=1)
    axis.axvline(ring_len - 0.5, color="#222222", linewidth=1.5)
    axis.tick_params(which="both", length=0, labelsize=8)
    axis.set_xlabel("slot (behind the line: slack)", fontsize=9)
    axis.set_title(title, fontsize=10, loc="left")
    legend = [
        Patch(facecolor=color, edgecolor="#999999", label=name)
        for name, color in RING_COLORS.items()
    ]
    legend.append(Patch(facecolor="white", edgecolor="#c8553d", label="written by this step"))
    axis.legend(
        handles=legend, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=5, fontsize=8,
        frameon=False,
    )  # fmt: skip


def draw_tree(
    axis: Axes,
    labels: Sequence[str],
    parents: Sequence[int],
    tokens: Sequence[int],
    said: Sequence[int],
) -> None:
    """Draws a draft tree from left to right; the path that the target agreed with is red.

    Args:
      axis: Drawn into.
      labels: Text of each node; node 0 is the anchor.
      parents: Parent of each node, earlier in the list; the anchor's is itself.
      tokens: Id of each node.
      said: Ids that the step committed, the target's own last.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node in range(1, len(parents)):
        children[parents[node]].append(node)
    x, y, path = [0] * len(parents), [0.0] * len(parents), {0}
    num_leaves = 0

    def place(node: int) -> None:
        nonlocal num_leaves
        for child in children[node]:
            x[child] = x[node] + 1
            place(child)
        if children[node]:
            y[node] = y[children[node][0]]  # the likeliest child goes straight on
        else:
            y[node], num_leaves = -float(num_leaves), num_leaves + 1

    place(0)
    here = 0
    for token in said:
        here = next((child for child in children[here] if tokens[child] == token), -1)
        if here < 0:
            break
        path.add(here)
    for node in range(1, len(parents)):
        color = "#c8553d" if node in path else "#9aa5ab"
        axis.plot([x[parents[node]], x[node]], [y[parents[node]], y[node]], color=color, zorder=1)
    for node, label in enumerate(labels):
        edge = "#c8553d" if node in path else "#9aa5ab"
        axis.text(
            x[node], y[node], repr(label)[1:-1], ha="center", va="center", fontsize=8,
            family="monospace", bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": edge},
        )  # fmt: skip
    axis.set_xlim(-0.5, max(x) + 0.5)
    axis.set_ylim(-num_leaves + 0.4, 0.6)
    axis.set_xticks(range(max(x) + 1))
    axis.set_yticks([])
    axis.spines[["left", "right", "top"]].set_visible(False)
    axis.set_xlabel("depth: positions after the anchor", fontsize=9)
