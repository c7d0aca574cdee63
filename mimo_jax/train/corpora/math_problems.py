"""Scene `math`: word problems with a worked solution, ending in a line `#### N`.

Each problem function returns (question, steps, result). Numbers stay small and every product is
split into partial products, because a model of four million parameters learns steps, not tables.
"""

import random
from collections.abc import Callable, Iterator

from mimo_jax.train.corpora.arithmetic import add, add_all, divide, multiply, subtract
from mimo_jax.train.corpora.chat_format import question_prompt
from mimo_jax.train.corpora.document import END_OF_TURN, Document, maybe, pick, scene_rng

MIN_ANSWER_CHARS = 160

Problem = tuple[str, list[str], int]

NAMES = (
    "Anna Ben Carla David Emma Felix Grace Hugo Ida Jonas Kira Leo Mona Noah Olga Paul Rosa Sam "
    "Tina Umar Vera Walt Yuki Zoe Amir Bella Chen Dora Eli Fatima Gus Hana Ivan June Karl Lily "
    "Marco Nina Oscar Petra Quinn Ravi Sofia Tom Ulla Viktor Wendy Xena Yara Zack"
).split()
ITEMS = (
    "apples pears plums eggs coins stamps books pens cards shells marbles beads cookies candles "
    "stickers balloons tickets bricks buttons bottles cups plates chairs lamps roses tulips seeds "
    "peaches melons muffins rolls pies toys balls hats socks keys stones sticks badges posters "
    "magnets crayons brushes ribbons tiles nails boxes flags kites"
).split()
BINS = "boxes bags baskets shelves crates jars trays drawers rows packs bundles tins".split()
PLACES = "market school farm library garden harbor museum bakery office station park club".split()
OPENINGS = (
    "Let us go step by step.", "We solve it in steps.", "First we look at what is given.",
    "Here is the work.", "Let us count carefully.", "We can find this in a few steps.",
    "Take it one step at a time.", "Start from what we know.",
)  # fmt: skip
CLOSINGS = (
    "So the answer is {n}.", "The answer is {n}.", "That makes {n}.", "The result is {n}.",
    "Hence we get {n}.", "In the end it is {n}.",
)  # fmt: skip
LINKS = ("Then", "Next", "After that", "Now", "Afterwards")


def generate(seed: int) -> Iterator[Document]:
    """Yields an endless stream of documents; the same seed gives the same stream."""
    rng = scene_rng("math", seed)
    while True:
        question, steps, result = pick(rng, PROBLEMS)(rng)
        if result < 0:
            continue
        opening = [pick(rng, OPENINGS)] if maybe(rng, 0.7) else []
        closing = pick(rng, CLOSINGS).format(n=result)
        if maybe(rng, 0.3):
            lines = [f"Step {i}: {step}" for i, step in enumerate(steps, start=1)]
            body = "\n".join([*opening, *lines, closing])
        else:
            body = " ".join([*opening, *steps, closing])
        answer = f"{body}\n#### {result}{END_OF_TURN}"
        if len(question) <= 320 and len(answer) >= MIN_ANSWER_CHARS:
            yield Document("math", question_prompt(question), answer)


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def story(rng: random.Random) -> Problem:
    """A quantity that grows and shrinks over two to four events."""
    name, item, place = pick(rng, NAMES), pick(rng, ITEMS), pick(rng, PLACES)
    amount = rng.randint(5, 60)
    question = [
        pick(
            rng,
            (
                f"{name} has {amount} {item}.",
                f"There are {amount} {item} at the {place} where {name} works.",
                f"{name} starts the day with {amount} {item}.",
                f"In the morning {name} counts {amount} {item}.",
            ),
        )
    ]
    steps = [f"{name} begins with {amount} {item}."]
    for _ in range(rng.randint(2, 4)):
        roll, link = rng.randrange(5), pick(rng, LINKS)
        if roll == 0 and amount <= 60:
            k = rng.randint(2, 4)
            word = {2: "doubles", 3: "triples", 4: "grows to four times as much"}[k]
            question.append(f"{link} the number {word}.")
            steps.append(f"The number {word}: {multiply(amount, k)} {item}.")
            amount *= k
        elif roll == 1 and amount % 2 == 0:
            other = pick(rng, NAMES)
            question.append(f"{link} half of them go to {other}.")
            steps.append(f"Half of {amount} leaves {divide(amount, 2)} {item}.")
            amount //= 2
        elif roll in (1, 2) and amount > 4:
            k = rng.randint(2, min(40, amount - 1))
            verb = pick(rng, ("sells", "loses", "gives away", "breaks", "returns"))
            question.append(f"{link} {name} {verb} {k}.")
            steps.append(f"{_upper(link.lower())} {k} are gone: {subtract(amount, k)}.")
            amount -= k
        else:
            k = rng.randint(2, 45)
            verb = pick(rng, ("buys", "finds", "gets", "makes", "collects"))
            question.append(f"{link} {name} {verb} {k} more.")
            steps.append(f"{name} {verb} {k}, so {add(amount, k)}.")
            amount += k
    question.append(
        pick(rng, (f"How many {item} are there now?", f"How many {item} does {name} have at last?"))
    )
    return " ".join(question), steps, amount


def boxes(rng: random.Random) -> Problem:
    """Equal groups plus loose items."""
    name, item, bins = pick(rng, NAMES), pick(rng, ITEMS), pick(rng, BINS)
    n, k, extra = rng.randint(3, 12), rng.randint(3, 24), rng.randint(2, 30)
    question = pick(
        rng,
        (
            f"{name} fills {n} {bins} with {k} {item} each and has {extra} left over. "
            f"How many {item} are there in all?",
            f"There are {n} {bins} of {k} {item} and {extra} single ones. "
            f"How many {item} does {name} own?",
        ),
    )
    total = n * k
    steps = [
        f"The {n} {bins} hold {multiply(k, n)} {item}.",
        f"With the {extra} others that is {add(total, extra)}.",
    ]
    return question, steps, total + extra


def boxes_given(rng: random.Random) -> Problem:
    """Equal groups of which some leave."""
    name, item, bins = pick(rng, NAMES), pick(rng, ITEMS), pick(rng, BINS)
    n, k = rng.randint(4, 12), rng.randint(3, 20)
    gone = rng.randint(1, n - 2)
    left = n - gone
    question = (
        f"{name} has {n} {bins} with {k} {item} in each. {gone} of the {bins} are sold. "
        f"How many {item} are left?"
    )
    steps = [
        f"Of the {n} {bins}, {subtract(n, gone)} remain.",
        f"Each holds {k} {item}, so {multiply(k, left)} {item} are left.",
    ]
    return question, steps, left * k


def change(rng: random.Random) -> Problem:
    """Change from a bill after buying several things."""
    name, item, other = pick(rng, NAMES), pick(rng, ITEMS), pick(rng, ITEMS)
    a, b, p, q = rng.randint(2, 6), rng.randint(1, 4), rng.randint(2, 12), rng.randint(2, 9)
    cost = a * p + b * q
    bill = next(x for x in (20, 50, 100, 150) if x >= cost)
    question = (
        f"{name} buys {a} {item} at {p} euros each and {b} {other} at {q} euros each, and pays "
        f"with {bill} euros. How much change does {name} get?"
    )
    steps = [
        f"The {item} cost {multiply(p, a)} euros.",
        f"The {other} cost {multiply(q, b)} euros.",
        f"Together {add(a * p, b * q)} euros.",
        f"The change is {subtract(bill, cost)} euros.",
    ]
    return question, steps, bill - cost


def savings(rng: random.Random) -> Problem:
    """Weeks of saving towards a price."""
    name, thing = pick(rng, NAMES), pick(rng, ("bike", "guitar", "camera", "tent", "drum", "phone"))
    have, weekly, weeks = rng.randint(5, 40), rng.randint(2, 12), rng.randint(3, 9)
    price = have + weekly * weeks
    question = (
        f"A {thing} costs {price} euros. {name} has {have} euros and saves {weekly} euros a week. "
        f"After how many weeks can {name} buy the {thing}?"
    )
    steps = [
        f"{name} still needs {subtract(price, have)} euros.",
        f"At {weekly} euros a week, {divide(price - have, weekly)}.",
    ]
    return question, steps, weeks


def ages(rng: random.Random) -> Problem:
    """Ages told by differences and multiples."""
    a, b, c = rng.sample(NAMES, 3)
    young, gap, k = rng.randint(3, 14), rng.randint(2, 12), rng.randint(2, 4)
    second, third = young + gap, young * k
    question = (
        f"{a} is {young} years old. {b} is {gap} years older than {a}. {c} is {k} times as old as "
        f"{a}. How old are the three together?"
    )
    steps = [
        f"{b} is {add(young, gap)} years old.",
        f"{c} is {multiply(young, k)} years old.",
        f"Together: {add_all(rng, [young, second, third])}.",
    ]
    return question, steps, young + second + third


def age_future(rng: random.Random) -> Problem:
    """An age difference some years later."""
    a, b = rng.sample(NAMES, 2)
    x, y, years = rng.randint(4, 30), rng.randint(4, 30), rng.randint(2, 15)
    question = f"{a} is {x} and {b} is {y}. What is the sum of their ages in {years} years?"
    steps = [
        f"In {years} years {a} is {add(x, years)}.",
        f"In {years} years {b} is {add(y, years)}.",
        f"The sum is {add(x + years, y + years)}.",
    ]
    return question, steps, x + y + 2 * years


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


def travel(rng: random.Random) -> Problem:
    """Distance from two legs at steady speeds."""
    name = pick(rng, NAMES)
    how, v, w = pick(
        rng,
        (("walks", 4, 6), ("rides", 12, 18), ("drives", 50, 70), ("sails", 8, 11), ("runs", 9, 12)),
    )
    h, g = rng.randint(2, 6), rng.randint(2, 6)
    question = (
        f"{name} {how} for {h} hours at {v} km per hour and then for {g} hours at {w} km per hour. "
        "How many kilometers is that?"
    )
    steps = [
        f"The first part is {multiply(v, h)} km.",
        f"The second part is {multiply(w, g)} km.",
        f"In total {add(v * h, w * g)} km.",
    ]
    return question, steps, v * h + w * g


def pages(rng: random.Random) -> Problem:
    """Days needed for the rest of a book."""
    name = pick(rng, NAMES)
    read, per_day, days = rng.randint(5, 60), rng.randint(4, 12), rng.randint(3, 10)
    total = read + per_day * days
    question = (
        f"A book has {total} pages and {name} has read {read} of them. {name} reads {per_day} "
        "pages a day. How many days does the rest take?"
    )
    steps = [
        f"Pages left: {subtract(total, read)}.",
        f"With {per_day} pages a day it takes {divide(total - read, per_day)} days.",
    ]
    return question, steps, days


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


def share(rng: random.Random) -> Problem:
    """Sharing with a remainder."""
    name, item = pick(rng, NAMES), pick(rng, ITEMS)
    people, each = rng.randint(3, 9), rng.randint(2, 12)
    rest = rng.randint(1, people - 1)
    total = people * each + rest
    question = (
        f"{name} shares {total} {item} equally among {people} children. How many {item} are left "
        "over?"
    )
    steps = [
        f"We look for the largest multiple of {people} up to {total}.",
        f"That is {multiply(each, people)}, so each child gets {each}.",
        f"Left over: {subtract(total, people * each)}.",
    ]
    return question, steps, rest


def compare(rng: random.Random) -> Problem:
    """How many more one person has than another."""
    a, b = rng.sample(NAMES, 2)
    item, bins = pick(rng, ITEMS), pick(rng, BINS)
    n, k, m, j = (rng.randint(2, 9) for _ in range(4))
    if n * k <= m * j:
        return compare(rng)
    question = (
        f"{a} has {n} {bins} with {k} {item} each, {b} has {m} {bins} with {j} {item} each. "
        f"How many more {item} does {a} have?"
    )
    steps = [
        f"{a} has {multiply(k, n)} {item}.",
        f"{b} has {multiply(j, m)} {item}.",
        f"The difference is {subtract(n * k, m * j)}.",
    ]
    return question, steps, n * k - m * j


def wages(rng: random.Random) -> Problem:
    """Pay for hours, less costs."""
    name, place = pick(rng, NAMES), pick(rng, PLACES)
    hours, pay, days = rng.randint(2, 8), rng.randint(8, 15), rng.randint(2, 5)
    cost = rng.randint(5, 15)
    gross = hours * days * pay if hours * days <= 12 else hours * pay
    if hours * days <= 12:
        question = (
            f"{name} works {hours} hours a day for {days} days at the {place} and earns {pay} "
            f"euros an hour. The bus costs {cost} euros. How much is left?"
        )
        steps = [
            f"The hours are {multiply(hours, days)}.",
            f"The pay is {multiply(pay, hours * days)} euros.",
            f"After the bus {subtract(gross, cost)} euros are left.",
        ]
    else:
        question = (
            f"{name} works {hours} hours at the {place} for {pay} euros an hour and spends {cost} "
            "euros on lunch. How much is left?"
        )
        steps = [
            f"The pay is {multiply(pay, hours)} euros.",
            f"After lunch {subtract(gross, cost)} euros are left.",
        ]
    return question, steps, gross - cost


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
            f"{_upper(pick(rng, ('add', 'plus', 'with')))} {number}: {add(total, number)}."
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


def recipe(rng: random.Random) -> Problem:
    """Scaling a recipe."""
    name = pick(rng, NAMES)
    dish = pick(rng, ("soup", "cakes", "bread", "pasta", "salad", "stew", "punch"))
    people, factor = rng.randint(2, 6), rng.randint(2, 5)
    x, y = rng.randint(2, 12), rng.randint(2, 12)
    a, b = rng.sample(("cups of flour", "spoons of oil", "carrots", "eggs", "onions", "lemons"), 2)
    question = (
        f"For {people} people the {dish} of {name} needs {x} {a} and {y} {b}. How many {a} and {b} "
        f"together are needed for {people * factor} people?"
    )
    steps = [
        f"{people * factor} people are {divide(people * factor, people)} times as many.",
        f"{_upper(a)}: {multiply(x, factor)}.",
        f"{_upper(b)}: {multiply(y, factor)}.",
        f"Together {add(x * factor, y * factor)}.",
    ]
    return question, steps, (x + y) * factor


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


def team_points(rng: random.Random) -> Problem:
    """Points from wins and draws."""
    team = pick(rng, ("Reds", "Blues", "Lions", "Hawks", "Foxes", "Bears", "Stars", "Wolves"))
    win, draw, loss = rng.randint(3, 12), rng.randint(1, 9), rng.randint(1, 6)
    p, q = rng.randint(2, 5), 1
    question = (
        f"The {team} win {win} games, draw {draw} and lose {loss}. A win gives {p} points, a draw "
        "one point and a loss none. How many points do they have?"
    )
    steps = [
        f"Wins: {multiply(win, p)} points.",
        f"Draws: {multiply(draw, q)} points.",
        "Losses give 0 points.",
        f"Altogether {add(win * p, draw)} points.",
    ]
    return question, steps, win * p + draw


def bus(rng: random.Random) -> Problem:
    """Passengers at several stops."""
    vehicle = pick(rng, ("bus", "tram", "train", "ferry"))
    now = rng.randint(10, 50)
    question = [f"A {vehicle} leaves with {now} people."]
    steps = [f"At the start there are {now} people."]
    for stop in ("first", "second", "third")[: rng.randint(2, 3)]:
        out, on = rng.randint(1, min(9, now)), rng.randint(1, 12)
        question.append(f"At the {stop} stop {out} get off and {on} get on.")
        stayed = now - out
        steps.append(
            f"{_upper(stop)} stop: {now} - {out} = {stayed}, {stayed} + {on} = {stayed + on}."
        )
        now = stayed + on
    question.append(f"How many people are on the {vehicle} now?")
    return " ".join(question), steps, now


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


def two_sorts(rng: random.Random) -> Problem:
    """Two groups of which parts are used."""
    name = pick(rng, NAMES)
    a, b = rng.sample(ITEMS, 2)
    x, y = rng.randint(10, 60), rng.randint(10, 60)
    u, v = rng.randint(2, x - 2), rng.randint(2, y - 2)
    question = (
        f"{name} has {x} {a} and {y} {b} and uses {u} {a} and {v} {b}. "
        "How many things are left together?"
    )
    steps = [
        f"{_upper(a)} left: {subtract(x, u)}.",
        f"{_upper(b)} left: {subtract(y, v)}.",
        f"Together {add(x - u, y - v)}.",
    ]
    return question, steps, x - u + y - v


def growth(rng: random.Random) -> Problem:
    """Steady growth over weeks."""
    plant = pick(rng, ("bean", "sunflower", "vine", "bamboo", "tomato", "cactus", "fern"))
    start, rate, weeks = rng.randint(3, 30), rng.randint(2, 9), rng.randint(3, 9)
    cut = rng.randint(1, start)
    question = (
        f"A {plant} is {start} cm tall and grows {rate} cm a week for {weeks} weeks. Then {cut} cm "
        "are cut off. How tall is it now?"
    )
    steps = [
        f"It grows {multiply(rate, weeks)} cm.",
        f"The height is {add(start, rate * weeks)} cm.",
        f"After the cut {subtract(start + rate * weeks, cut)} cm.",
    ]
    return question, steps, start + rate * weeks - cut


PROBLEMS: tuple[Callable[[random.Random], Problem], ...] = (
    story, story, story, story, boxes, boxes_given, change, savings, ages, age_future, rectangle,
    travel, pages, average, percent, share, compare, wages, equation, expression, brackets,
    sum_list, sequence, clock, recipe, temperature, team_points, bus, coins, reverse, two_sorts,
    growth,
)  # fmt: skip
