"""Problems about numbers, measures and shapes; see `math_problems`."""

import random

from mimo_jax.train.corpora.arithmetic import add, add_all, divide, multiply, subtract
from mimo_jax.train.corpora.document import maybe, pick, usual
from mimo_jax.train.corpora.math_words import NAMES, Problem, upper_first


def average(rng: random.Random) -> Problem:
    """The mean of three or four numbers."""
    name = pick(rng, NAMES)
    count, mean = rng.choice((3, 4)), rng.randint(5, 20)
    offsets = [rng.randint(-4, 4) for _ in range(count - 1)]
    numbers = [mean + offset for offset in offsets]
    numbers.append(mean * count - sum(numbers))
    if numbers[-1] < 0:
        return average(rng)
    what = pick(rng, ("scores", "marks", "results", "catches", "jumps", "throws"))
    listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    question = f"{name} notes the {what} {listed}. What is their average?"
    steps = [
        f"Add the {what}: {add_all(rng, numbers)}.",
        f"There are {count} {what}, so {divide(mean * count, count)}.",
    ]
    return question, steps, mean


def percent(rng: random.Random) -> Problem:
    """A price after a discount that is a multiple of ten percent."""
    name, item = pick(rng, NAMES), pick(rng, ("coat", "table", "clock", "vase", "desk", "radio"))
    price, rate = rng.randint(2, 30) * 10, rng.choice((10, 20, 30, 40, 50))
    tenth, off = price // 10, price // 10 * (rate // 10)
    question = (
        f"A {item} costs {price} euros. {name} gets {rate} percent off. What does {name} pay?"
    )
    steps = [
        f"Ten percent of {price} is {divide(price, 10)} euros.",
        f"So {rate} percent is {multiply(tenth, rate // 10)} euros.",
        f"{name} pays {subtract(price, off)} euros.",
    ]
    return question, steps, price - off


def equation(rng: random.Random) -> Problem:
    """A linear equation."""
    x, a, b = rng.randint(2, 15), rng.randint(2, 9), rng.randint(1, 30)
    letter = pick(rng, "xyznkt")
    total = a * x + b
    question = pick(
        rng,
        (
            f"Solve {a} * {letter} + {b} = {total}.",
            f"Find {letter} if {a} * {letter} + {b} equals {total}.",
            f"For which {letter} is {a} * {letter} + {b} = {total}?",
        ),
    )
    steps = [
        f"Take {b} from both sides: {subtract(total, b)}.",
        f"So {a} * {letter} = {total - b}.",
        f"Divide both sides by {a}: {divide(total - b, a)}.",
        f"Check: {multiply(x, a)}, and {add(a * x, b)}.",
    ]
    return question, steps, x


def expression(rng: random.Random) -> Problem:
    """An expression with a product and sums."""
    a, b, c, d = rng.randint(2, 25), rng.randint(2, 9), rng.randint(5, 40), rng.randint(2, 20)
    total = a * b + c - d
    if total < 0:
        return expression(rng)
    ask = pick(rng, ("What is", "Compute", "Work out", "Find the value of"))
    question = f"{ask} {a} * {b} + {c} - {d}" + ("?" if ask == "What is" else ".")
    steps = [
        f"The product comes first: {multiply(a, b)}.",
        f"Then {add(a * b, c)}.",
        f"Finally {subtract(a * b + c, d)}.",
    ]
    return question, steps, total


def brackets(rng: random.Random) -> Problem:
    """A product of a sum and a number."""
    a, b, c, d = rng.randint(2, 15), rng.randint(2, 15), rng.randint(2, 9), rng.randint(2, 20)
    question = pick(rng, ("What is ({}) * {} - {}?", "Work out ({}) * {} - {}.")).format(
        f"{a} + {b}", c, d
    )
    steps = [
        f"The bracket is {add(a, b)}.",
        f"Times {c}: {multiply(a + b, c)}.",
        f"Minus {d}: {subtract((a + b) * c, d)}.",
    ]
    return question, steps, (a + b) * c - d


def sum_list(rng: random.Random) -> Problem:
    """The sum of a few numbers."""
    numbers = [rng.randint(3, 40) for _ in range(rng.randint(4, 6))]
    listed = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    question = pick(rng, ("Add {}.", "What is the sum of {}?", "Find the total of {}.")).format(
        listed
    )
    total, steps = numbers[0], []
    for number in numbers[1:]:
        steps.append(
            f"{upper_first(usual(rng, ('add', 'plus', 'with')))} {number}: {add(total, number)}."
        )
        total += number
    return question, steps, total


def sequence(rng: random.Random) -> Problem:
    """The next terms of an arithmetic sequence."""
    start, step, more = rng.randint(1, 30), rng.randint(2, 12), rng.randint(2, 4)
    terms = [start + step * i for i in range(4)]
    listed = ", ".join(map(str, terms))
    question = f"A sequence begins {listed}. Which number stands {more} places after {terms[-1]}?"
    steps = [f"From {terms[0]} to {terms[1]} it grows by {subtract(terms[1], terms[0])}."]
    value = terms[-1]
    for _ in range(more):
        steps.append(f"Next: {add(value, step)}.")
        value += step
    return question, steps, value


def reverse(rng: random.Random) -> Problem:
    """Finding the number that someone thinks of."""
    name = pick(rng, NAMES)
    x, k, plus = rng.randint(2, 20), rng.randint(2, 6), rng.randint(2, 25)
    total = x * k + plus
    question = (
        f"{name} thinks of a number, multiplies it by {k} and adds {plus}. The result is {total}. "
        "Which number was it?"
    )
    steps = [
        f"Undo the addition: {subtract(total, plus)}.",
        f"Undo the multiplication: {divide(x * k, k)}.",
        f"{name} thought of {x}.",
    ]
    return question, steps, x


def rectangle(rng: random.Random) -> Problem:
    """Fence around, or tiles on, a rectangle."""
    name, thing = pick(rng, NAMES), pick(rng, ("garden", "field", "yard", "pool", "hall", "floor"))
    a, b, k = rng.randint(4, 30), rng.randint(3, 12), rng.randint(2, 6)
    if maybe(rng, 0.5):
        perimeter = 2 * (a + b)
        question = (
            f"The {thing} of {name} is {a} meters long and {b} meters wide. A fence costs {k} "
            f"euros per meter. What does a fence around the {thing} cost?"
        )
        steps = [
            f"Length and width together: {add(a, b)} meters.",
            f"All the way around: {multiply(a + b, 2)} meters.",
            f"The price is {multiply(perimeter, k)} euros.",
        ]
        return question, steps, perimeter * k
    question = (
        f"A {thing} is {a} meters long and {b} meters wide. {name} covers it with tiles of one "
        f"square meter and breaks {k} of them. How many tiles are needed in all?"
    )
    steps = [
        f"The area is {multiply(a, b)} square meters.",
        f"That many tiles and {k} broken ones: {add(a * b, k)}.",
    ]
    return question, steps, a * b + k


def clock(rng: random.Random) -> Problem:
    """Minutes of several activities, in all or left of two hours."""
    name = pick(rng, NAMES)
    acts = rng.sample(("reading", "cooking", "running", "drawing", "cleaning", "piano", "chess"), 3)
    minutes = [rng.randint(2, 7) * 5 for _ in acts]
    listed = ", ".join(f"{m} minutes for {a}" for m, a in zip(minutes[:2], acts[:2], strict=True))
    question = (
        f"{name} needs {listed} and {minutes[2]} minutes for {acts[2]}. How many minutes of two "
        "hours are left?"
    )
    total = sum(minutes)
    steps = [
        f"Two hours are {multiply(60, 2)} minutes.",
        f"Used: {add_all(rng, minutes)} minutes.",
        f"Left: {subtract(120, total)} minutes.",
    ]
    return question, steps, 120 - total


def temperature(rng: random.Random) -> Problem:
    """Temperature through a day."""
    place = pick(rng, ("Oslo", "Rome", "Lima", "Cairo", "Kyoto", "Boston", "Quito", "Perth"))
    t, up, down, more = rng.randint(5, 20), rng.randint(3, 12), rng.randint(2, 8), rng.randint(1, 5)
    question = (
        f"In {place} it is {t} degrees at dawn. It rises by {up} until noon, falls by {down} in "
        f"the evening and by {more} more at night. How many degrees is it then?"
    )
    noon, evening = t + up, t + up - down
    if evening - more < 0:
        return temperature(rng)
    steps = [
        f"At noon it is {add(t, up)} degrees.",
        f"In the evening {subtract(noon, down)} degrees.",
        f"At night {subtract(evening, more)} degrees.",
    ]
    return question, steps, evening - more


def coins(rng: random.Random) -> Problem:
    """Value of a purse of coins."""
    name = pick(rng, NAMES)
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 6)
    question = (
        f"{name} has {a} coins of 2 cents, {b} coins of 5 cents and {c} coins of 10 cents. "
        "How many cents is that?"
    )
    steps = [
        f"The 2 cent coins: {multiply(a, 2)}.",
        f"The 5 cent coins: {multiply(b, 5)}.",
        f"The 10 cent coins: {multiply(c, 10)}.",
        f"In all: {add_all(rng, [2 * a, 5 * b, 10 * c])}.",
    ]
    return question, steps, 2 * a + 5 * b + 10 * c
