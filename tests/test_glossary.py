"""GLOSSARY.md says what it computes: its numbers are recomputed here from its own text.

Run: .venv/bin/python -m pytest tests/test_glossary.py

Two kinds of numbers stand there. An Example column holds equations, `7 + 1 = 8`, whose sides must
agree. The worked trace holds four verify steps, whose counts are derived again from the token ids
by the definitions, spelled out below in plain Python.
"""

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest

GLOSSARY = Path(__file__).resolve().parent.parent / "GLOSSARY.md"
ARITHMETIC = {"exp": math.exp, "log": math.log, "len": len, "int": int, "min": min}
END_OF_SEQUENCE = 0


def tables() -> list[list[dict[str, str]]]:
    """All tables of the glossary, each a list of rows by column heading."""
    found, heading = [], None
    for line in GLOSSARY.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            heading = None
        elif heading is None:
            heading = [cell.strip() for cell in line.strip("|").split("|")]
            found.append([])
        elif not re.fullmatch(r"[|\-: ]+", line):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == len(heading), f"row does not fit its heading: {line}"
            found[-1].append(dict(zip(heading, cells, strict=True)))
    return found


def rows_with(column: str) -> list[dict[str, str]]:
    return [row for table in tables() for row in table if column in row]


def evaluate(expression: str) -> float:
    return eval(expression, {"__builtins__": {}}, ARITHMETIC)


@pytest.mark.parametrize("row", rows_with("Example"), ids=lambda row: row["Quantity"])
def test_examples_add_up(row):
    equations = [span for span in re.findall(r"`([^`]+)`", row["Example"]) if " = " in span]
    assert equations, "a counted quantity needs an example with numbers"
    for equation in equations:
        left, right = equation.split(" = ")
        assert evaluate(left) == pytest.approx(evaluate(right), rel=1e-12), equation


def ids(cell: str) -> list[int]:
    return [int(word) for word in cell.split()]


def count_accepted(draft: list[int], choices: list[int]) -> int:
    """Length of the longest prefix of the draft that the target would have picked itself."""
    num_accepted = 0
    while num_accepted < len(draft) and draft[num_accepted] == choices[num_accepted]:
        num_accepted += 1
    return num_accepted


def test_trace_follows_from_its_tokens():
    for row in rows_with("Draft tokens"):
        draft, choices = ids(row["Draft tokens"]), ids(row["Target's choices"])
        assert len(choices) == len(draft) + 1
        num_accepted = count_accepted(draft, choices)
        committed = [*draft[:num_accepted], choices[num_accepted]]
        if END_OF_SEQUENCE in committed:
            committed = committed[: committed.index(END_OF_SEQUENCE) + 1]
        assert row["Bonus"] == str(choices[num_accepted])
        assert row["`num_accepted`"] == str(num_accepted)
        assert ids(row["Committed"]) == committed
        assert row["`num_committed`"] == str(len(committed))


def test_trace_anchors_are_the_last_committed_tokens():
    rows = rows_with("Draft tokens")
    assert len(rows) == 4
    for before, after in pairwise(rows):
        assert ids(after["Anchor"]) == ids(before["Committed"])[-1:]


def test_rates_follow_from_the_trace():
    rows = rows_with("Draft tokens")
    accepted = [int(row["`num_accepted`"]) for row in rows]
    committed = [int(row["`num_committed`"]) for row in rows]
    num_draft_tokens = len(ids(rows[0]["Draft tokens"]))
    reached = [sum(a >= i for a in accepted) for i in range(num_draft_tokens + 1)]
    reach_rates = [count / len(rows) for count in reached[1:]]
    alphas = [now / before for before, now in pairwise(reached)]

    stated = {row["Read off the trace"]: row["Value"] for row in rows_with("Read off the trace")}
    values = [[float(v) for v in cell.split(",")] for cell in stated.values()]
    assert list(stated) == ["accept length τ", "`reach_rate` 1, 2, 3", "acceptance rate α 1, 2, 3"]
    assert values[0] == [sum(committed) / len(rows)]
    assert values[1] == reach_rates
    assert values[2] == pytest.approx(alphas, abs=5e-5)
    # α multiplies up to the reach rate; and without the cut, τ would be 1 + Σ reach rates.
    assert math.prod(alphas) == pytest.approx(reach_rates[-1])
    assert 1 + sum(reach_rates) == sum(a + 1 for a in accepted) / len(rows)


def test_no_term_is_defined_twice():
    terms = [row["Term"] for row in rows_with("Term")]
    terms += [row["Quantity"] for row in rows_with("Quantity")]
    assert len(terms) > 30
    assert sorted(terms) == sorted(set(terms))
