"""Scene `chat`: short generated dialogues, plus `chatterbot-corpus` when it is installed.

Chat is the scene with the most freedom: openings and choice of sentences are the writer's, by
habit more than by rule, so it is the hardest to draft for. The package (BSD, extra `train`) adds
0.3 MB of text written by people; without it the generator alone is used.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import resources

from absl import logging

from mimo_jax.train.corpora import chat_format
from mimo_jax.train.corpora import chat_topics as topics
from mimo_jax.train.corpora.document import END_OF_TURN, Document, maybe, pick, scene_rng, usual

Turns = list[str]  # user, assistant, user, assistant …; the last one is the answer

_LEADS = (
    "Sure.",
    "Gladly.",
    "Good question.",
    "Of course.",
    "Let me think.",
    "Yes, happily.",
    "Well,",
    "",
    "I like that question.",
    "That is easy.",
    "Here is what I know.",
    "Let me tell you.",
    "",
)
_TO_YOU = {"my": "your", "our": "your", "I am": "you are", "I": "you", "we": "you"}
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_ENDS = (
    "Does that help?",
    "I hope that helps.",
    "Ask me if you want more.",
    "What do you think?",
    "",
    "Tell me how it goes.",
    "Is there anything else?",
    "Let me know what you find.",
    "",
    "Good luck!",
    "Have fun!",
    "What would you like to know next?",
    "",
)


def generate(seed: int) -> Iterator[Document]:
    """Yields an endless stream of generated dialogues; the same seed gives the same stream."""
    rng = scene_rng("chat", seed)
    while True:
        turns = _with_setting(rng, pick(rng, _KINDS)(rng))
        if maybe(rng, 0.2):
            turns = [*_small_talk(rng), *turns]
        yield _document(turns)


def read_chatterbot() -> Iterator[Document]:
    """Yields the dialogues of the English part of `chatterbot-corpus`, none if not installed."""
    try:
        import yaml

        root = resources.files("chatterbot_corpus") / "data" / "english"
        files = sorted((f for f in root.iterdir() if f.name.endswith(".yml")), key=lambda f: f.name)
    except (ImportError, OSError):
        logging.info("chatterbot-corpus is not installed: scene chat uses generated dialogues only")
        return
    for file in files:
        for lines in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
            turns = [str(line).strip() for line in lines if line and "<|" not in str(line)]
            turns = turns[: len(turns) // 2 * 2]
            if turns and all(turns) and sum(map(len, turns)) < 1500:
                yield _document(turns)


def _document(turns: Turns) -> Document:
    roles = ("user", "assistant")
    history = "".join(chat_format.turn(roles[i % 2], text) for i, text in enumerate(turns[:-1]))
    return Document("chat", history + chat_format.answer_header(), turns[-1] + END_OF_TURN)


def _with_setting(rng: random.Random, turns: Turns) -> Turns:
    """Lets the user say where and with whom, and the answer come back to it."""
    if maybe(rng, 0.2):
        return turns
    friend, place = _friend(rng), pick(rng, topics.PLACES)
    ask, answer = turns
    roll = rng.randrange(4)
    said = _to_listener(friend)
    if roll == 0:
        ask = f"I am at {place} with {friend}. {ask}"
        remark = usual(
            rng,
            (
                f"Greetings to {said} and enjoy {place}.",
                f"Have a good time at {place} with {said}.",
                f"You can talk it over with {said} while you are at {place}.",
            ),
        )
    elif roll == 1:
        ask = f"{ask} {_upper(friend)} wants to know it too."
        remark = usual(
            rng,
            (
                f"Please pass it on to {said}.",
                f"I am glad that {said} wants to know it too.",
                f"Perhaps {said} has another idea, so listen to both of us.",
            ),
        )
    elif roll == 2:
        ask = f"{_upper(friend)} and I talked at {place}. {ask}"
        remark = usual(
            rng,
            (
                f"Next time you meet at {place}, tell {said} what you think.",
                f"It is nice that you and {said} talk about such things at {place}.",
                f"I wonder what {said} said about it at {place}.",
            ),
        )
    else:
        day, activity = pick(rng, _DAYS), pick(rng, tuple(topics.ACTIVITIES))
        ask = f"{ask} I have time until {day}, then I go {activity} with {friend}."
        remark = usual(
            rng,
            (
                f"Until {day} you have enough time, and then enjoy {activity} with {said}.",
                f"Think about it until {day}; {activity} with {said} will do you good.",
                f"For {activity} with {said} on {day} I would say: {topics.ACTIVITIES[activity]}.",
            ),
        )
    return [ask, f"{answer} {remark}" if maybe(rng, 0.7) else f"{remark} {answer}"]


def _to_listener(text: str) -> str:
    """Turns the user's "my" and "I" into the assistant's "your" and "you"."""
    return re.sub(r"\b(my|I am|I|we|our)\b", lambda match: _TO_YOU[match[0]], text)


def _some(rng: random.Random, options: Sequence[str], count: int) -> list[str]:
    """A few of the options, in their own order."""
    return [options[i] for i in sorted(rng.sample(range(len(options)), count))]


def _reply(rng: random.Random, sentences: list[str]) -> str:
    parts = [usual(rng, _LEADS), *sentences, usual(rng, _ENDS)]
    return " ".join(part for part in parts if part)


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _friend(rng: random.Random) -> str:
    return pick(rng, topics.FRIENDS).replace("_", " ")


def _small_talk(rng: random.Random) -> Turns:
    greeting, feeling = pick(rng, topics.GREETINGS), pick(rng, tuple(topics.FEELINGS))
    user = pick(
        rng, (f"{greeting}!", f"{greeting}, how are you?", f"{greeting}. I feel {feeling} today.")
    )
    answer = usual(
        rng,
        (
            f"{usual(rng, topics.GREETINGS)}! What can I do for you?",
            "I am fine, thank you. How can I help?",
            f"{topics.FEELINGS[feeling]}. What would you like to talk about?"
            if feeling in user
            else "Nice to meet you. What is on your mind?",
        ),
    )
    return [user, answer]


def _fact(rng: random.Random) -> Turns:
    subject = pick(rng, tuple(topics.FACTS))
    ask = pick(
        rng,
        (
            "Tell me about {}.",
            "What do you know about {}?",
            "I would like to learn about {}.",
            "Can you explain {} to me?",
            "What is special about {}?",
            "My child asked me about {}.",
            "Give me some facts about {}.",
            "I have to write a short text about {}.",
        ),
    ).format(subject)
    sentences = _some(rng, topics.FACTS[subject], 4)
    if maybe(rng, 0.3):
        sentences[1] = usual(rng, ("Also, ", "Besides, ", "By the way, ", "And ")) + _lower(
            sentences[1]
        )
    return [ask, _reply(rng, sentences)]


def _lower(sentence: str) -> str:
    first = sentence.split(" ", 1)[0]
    is_name = first in ("Mars", "Jupiter", "Paris", "Rome", "Cairo", "Tokyo", "I")
    return sentence if is_name else sentence[0].lower() + sentence[1:]


def _two_facts(rng: random.Random) -> Turns:
    a, b = rng.sample(tuple(topics.FACTS), 2)
    ask = pick(
        rng,
        (
            f"Tell me one thing about {a} and one about {b}.",
            f"What should I know about {a} and {b}?",
            f"Which is more interesting, {a} or {b}?",
        ),
    )
    x, y = _some(rng, topics.FACTS[a], 2), _some(rng, topics.FACTS[b], 2)
    sentences = [f"First {a}.", *x, f"Now {b}.", *y]
    return [ask, _reply(rng, sentences)]


def _advice(rng: random.Random) -> Turns:
    trouble = pick(rng, tuple(topics.ADVICE))
    ask = pick(
        rng,
        (
            "{}. What can I do?",
            "Please help me: {}.",
            "{}. Do you have a tip?",
            "What would you do? {}.",
            "{} and I need some advice.",
        ),
    ).format(_upper(trouble))
    tips = _some(rng, topics.ADVICE[trouble], 4)
    shape = usual(rng, (0, 1, 2))
    if shape == 0:
        starts = ("You could", "Try to", "It helps to", "I would", "Maybe you can")
        sentences = [f"{usual(rng, starts)} {tip}." for tip in tips]
    elif shape == 1:
        sentences = [
            f"{word}, {tip}."
            for word, tip in zip(("First", "Second", "Third", "Fourth", "Last"), tips, strict=False)
        ]
    else:
        sentences = [
            f"There are {len(tips)} things I would try.",
            *(f"{_upper(tip)}." for tip in tips),
        ]
    return [ask, _reply(rng, sentences)]


def _howto(rng: random.Random) -> Turns:
    task = pick(rng, tuple(topics.HOWTO))
    steps = topics.HOWTO[task]
    ask = pick(
        rng,
        (
            f"How do I {task}?",
            f"Explain how to {task}.",
            f"I want to {task}. How does it work?",
            f"Please show {_friend(rng)} how to {task}.",
            f"What do I do to {task}?",
        ),
    )
    if maybe(rng, 0.4):
        body = "\n".join(f"{i}. {_upper(step)}." for i, step in enumerate(steps, start=1))
        intro = usual(rng, ("Here are the steps:", f"To {task}, do this:", "Follow this list:"))
        return [
            ask,
            f"{intro}\n{body}\n{usual(rng, ('That is all.', 'Then you are done.', 'Enjoy!'))}",
        ]
    sentences = [f"First {steps[0]}."]
    sentences += [f"{usual(rng, ('Then', 'Next', 'After that', 'Now'))} {s}." for s in steps[1:-1]]
    sentences.append(f"{usual(rng, ('Finally', 'At the end', 'Last of all'))} {steps[-1]}.")
    return [ask, _reply(rng, sentences)]


def _choice(rng: random.Random) -> Turns:
    pair = pick(rng, tuple(topics.CHOICES))
    order = (0, 1) if maybe(rng, 0.5) else (1, 0)
    a, b = pair[order[0]], pair[order[1]]
    pro_a, pro_b = (_some(rng, topics.CHOICES[pair][i], 2) for i in order)
    ask = pick(
        rng,
        (
            f"Do you prefer {a} or {b}?",
            f"{_upper(a)} or {b}, what is better?",
            f"Which would you choose: {a} or {b}?",
            f"Help me decide between {a} and {b}.",
        ),
    )
    winner = usual(rng, (a, b))
    sentences = [
        usual(
            rng,
            (
                f"With {a}, {pro_a[0]} and {pro_a[1]}.",
                f"What I like about {a}: {pro_a[0]}, and {pro_a[1]}.",
            ),
        ),
        usual(
            rng,
            (
                f"But with {b}, {pro_b[0]} and {pro_b[1]}.",
                f"On the other side, {b}: {pro_b[0]}, {pro_b[1]}.",
            ),
        ),
        usual(
            rng,
            (
                f"I would choose {winner} today.",
                f"For me it is {winner}.",
                f"In the end I like {winner} more.",
                "Both are fine, it depends on the day.",
            ),
        ),
    ]
    return [ask, _reply(rng, sentences)]


def _plan(rng: random.Random) -> Turns:
    activity = pick(rng, tuple(topics.ACTIVITIES))
    friend, place = _friend(rng), pick(rng, topics.PLACES)
    said = _to_listener(friend)
    day = pick(
        rng, ("on Saturday", "on Sunday", "tomorrow", "tonight", "next week", "this afternoon")
    )
    ask = pick(
        rng,
        (
            f"I am going {activity} with {friend} {day}. Any ideas?",
            f"{_upper(friend)} wants to try {activity} {day}. What should we take care of?",
            f"What do you think of {activity} {day} with {friend}?",
            f"{_upper(day)} we meet at {place} for {activity}. What do we need?",
        ),
    )
    sentences = [
        usual(
            rng,
            (
                f"{_upper(activity)} with {said} sounds great.",
                f"{_upper(activity)} {day} is a fine idea.",
                f"I am sure {said} will enjoy {activity}.",
            ),
        ),
        f"{_upper(topics.ACTIVITIES[activity])}.",
        usual(
            rng,
            (
                f"Afterwards you could go to {place}.",
                f"If it rains, {place} is a good second plan.",
                f"You might meet at {place} first.",
                f"I would end the day at {place}.",
            ),
        ),
    ]
    return [ask, _reply(rng, sentences)]


def _feeling(rng: random.Random) -> Turns:
    feeling = pick(rng, tuple(topics.FEELINGS))
    reason = pick(rng, topics.REASONS[feeling])
    activity = pick(rng, tuple(topics.ACTIVITIES))
    friend = _to_listener(_friend(rng))
    ask = pick(
        rng,
        (
            f"I am {feeling} because {reason}.",
            f"I feel {feeling}: {reason}.",
            f"{_upper(reason)} and now I am {feeling}.",
            f"Today I am {feeling}. {_upper(reason)}.",
        ),
    )
    said = _to_listener(reason)
    sentences = [
        f"{topics.FEELINGS[feeling]}.",
        usual(
            rng, (f"So {said}.", f"When {said}, it is normal to be {feeling}.", f"I see, {said}.")
        ),
        usual(
            rng,
            (
                f"How about {activity} to change your mood?",
                f"Maybe {activity} would be good now.",
                f"Talk to {friend} about it.",
                f"You could go to {usual(rng, topics.PLACES)} with {friend}.",
            ),
        ),
        usual(
            rng,
            (
                f"It is good that you tell me when you are {feeling}.",
                "Many people know this from their own life.",
                "I like that you say it so openly.",
                f"Being {feeling} is part of life.",
            ),
        ),
        usual(
            rng,
            (
                "Take your time.",
                "Tomorrow is another day.",
                "I am here if you want to talk.",
                "Tell me more about it.",
            ),
        ),
    ]
    return [ask, _reply(rng, sentences)]


_KINDS: tuple[Callable[[random.Random], Turns], ...] = (
    _fact,
    _fact,
    _two_facts,
    _advice,
    _advice,
    _howto,
    _choice,
    _plan,
    _feeling,
)
