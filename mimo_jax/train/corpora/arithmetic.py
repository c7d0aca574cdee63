"""Worked arithmetic in words: every sum or product in steps small enough for a tiny model.

A model of four million parameters does not learn tables of large products, but it does learn to add
two digits and to carry a partial result into the next step.
"""

import random

from mimo_jax.train.corpora.document import usual


def add(a: int, b: int) -> str:
    """Returns "a + b = c", with ones and tens apart when both numbers have tens.

    Example: add(47, 38) -> "7 + 8 = 15 and 40 + 30 = 70, so 47 + 38 = 70 + 15 = 85"
    """
    plain = f"{a} + {b} = {a + b}"
    ones, tens = a % 10 + b % 10, a // 10 * 10 + b // 10 * 10
    if min(a, b) < 10 or ones == 0:
        return plain
    tens_text = f"{a // 10 * 10} + {b // 10 * 10} = {tens}"
    if max(a, b) < 100:
        ones_text = f"{a % 10} + {b % 10} = {ones}"
        return f"{ones_text} and {tens_text}, so {a} + {b} = {tens} + {ones} = {a + b}"
    if ones < 10 or a % 100 == 0 or b % 100 == 0:  # no carry: the columns can be read off
        return plain
    return f"{tens_text}, plus {ones} gives {plain}"


def subtract(a: int, b: int) -> str:
    """Returns "a - b = c", first taking away the tens when there are any; needs a >= b.

    Example: subtract(52, 17) -> "52 - 10 = 42 and 42 - 7 = 35, so 52 - 17 = 35"
    """
    plain = f"{a} - {b} = {a - b}"
    tens = b // 10 * 10
    if b < 10 or tens == b:
        return plain
    return f"{a} - {tens} = {a - tens} and {a - tens} - {b - tens} = {a - b}, so {plain}"


def multiply(a: int, b: int) -> str:
    """Returns "a * b = c", with the tens and ones of a apart when it has both.

    Example: multiply(23, 4) -> "20 * 4 = 80 and 3 * 4 = 12, so 23 * 4 = 80 + 12 = 92"
    """
    tens, ones = a // 10 * 10, a % 10
    if a < 10 or ones == 0 or b < 2:
        return f"{a} * {b} = {a * b}"
    return (
        f"{tens} * {b} = {tens * b} and {ones} * {b} = {ones * b}, "
        f"so {a} * {b} = {tens * b} + {ones * b} = {a * b}"
    )


def divide(a: int, b: int) -> str:
    """Returns "a / b = c" with its reason; needs a to be a multiple of b.

    Example: divide(42, 6) -> "42 / 6 = 7 because 6 * 7 = 42"
    """
    return f"{a} / {b} = {a // b} because {b} * {a // b} = {a}"


def add_all(rng: random.Random, numbers: list[int]) -> str:
    """Returns the running sums of at least two numbers; rng picks the word between them.

    Example: add_all(rng, [2, 5, 10]) may give "2 + 5 = 7, then 7 + 10 = 17"
    """
    total, steps = numbers[0], []
    for number in numbers[1:]:
        steps.append(f"{total} + {number} = {total + number}")
        total += number
    return usual(rng, (", ", ", then ")).join(steps)
