"""Problems about people and their things; see `math_problems`."""

import random

from mimo_jax.train.corpora.arithmetic import add, add_all, divide, multiply, subtract
from mimo_jax.train.corpora.document import pick
from mimo_jax.train.corpora.math_words import BINS, ITEMS, NAMES, PLACES, Problem, upper_first

_LINKS = ("Then", "Next", "After that", "Now", "Afterwards")


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
        roll, link = rng.randrange(5), pick(rng, _LINKS)
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
            steps.append(f"{upper_first(link.lower())} {k} are gone: {subtract(amount, k)}.")
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
        f"{upper_first(a)}: {multiply(x, factor)}.",
        f"{upper_first(b)}: {multiply(y, factor)}.",
        f"Together {add(x * factor, y * factor)}.",
    ]
    return question, steps, (x + y) * factor


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
            f"{upper_first(stop)} stop: {now} - {out} = {stayed}, {stayed} + {on} = {stayed + on}."
        )
        now = stayed + on
    question.append(f"How many people are on the {vehicle} now?")
    return " ".join(question), steps, now


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
        f"{upper_first(a)} left: {subtract(x, u)}.",
        f"{upper_first(b)} left: {subtract(y, v)}.",
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
