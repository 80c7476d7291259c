"""What the science on a real model asks and judges by: forty short questions with their answers, a small lexicon of feeling, topics to write about."""

from __future__ import annotations

import math
import re
from typing import Any

FACTS: list[tuple[str, str]] = [  # question, what the answer must hold (alternatives by |)
    ("What is the capital of France?", "paris"),
    ("What is the capital of Italy?", "rome"),
    ("What is the capital of Japan?", "tokyo"),
    ("What is the capital of Spain?", "madrid"),
    ("What is the capital of Egypt?", "cairo"),
    ("What is the capital of Germany?", "berlin"),
    ("What is the capital of Canada?", "ottawa"),
    ("What is the capital of Australia?", "canberra"),
    ("Which planet is closest to the sun?", "mercury"),
    ("Which planet is the largest one in our solar system?", "jupiter"),
    ("Which planet is known as the red planet?", "mars"),
    ("What do we call the star at the centre of our solar system?", "sun"),
    ("How many days are in a week?", "seven|7"),
    ("How many months are in a year?", "twelve|12"),
    ("How many legs does a spider have?", "eight|8"),
    ("How many sides does a triangle have?", "three|3"),
    ("How many hours are in a day?", "twenty-four|24"),
    ("How many continents are there on Earth?", "seven|7"),
    ("What is the chemical formula of water?", "h2o|h₂o"),
    ("What is the chemical symbol of gold?", "au"),
    ("Which gas do plants take in from the air?", "carbon dioxide|co2"),
    ("Which gas do people need to breathe?", "oxygen"),
    ("At how many degrees Celsius does water boil?", "100|hundred"),
    ("Who wrote the play Romeo and Juliet?", "shakespeare"),
    ("Who painted the Mona Lisa?", "leonardo|vinci"),
    ("Who developed the theory of relativity?", "einstein"),
    ("Who was the first president of the United States?", "washington"),
    ("Who was the first person to walk on the moon?", "armstrong"),
    ("Which ocean is the largest one?", "pacific"),
    ("Which animal is the largest one on Earth?", "whale"),
    ("Which animal is called the king of the jungle?", "lion"),
    ("Which language is spoken in Brazil?", "portuguese"),
    ("In which country are the pyramids of Giza?", "egypt"),
    ("On which continent is Kenya?", "africa"),
    ("Which organ pumps blood through the body?", "heart"),
    ("What do bees make?", "honey"),
    ("What is frozen water called?", "ice"),
    ("What colour is the sky on a clear day?", "blue"),
    ("What is the opposite of hot?", "cold"),
    ("In which year did the Second World War end?", "1945"),
]

GOOD = frozenset(
    "good great best better love loved loves lovely beautiful wonderful happy happiness joy joyful enjoy enjoyed enjoyable nice kind kindness warm "
    "amazing excellent perfect delicious delightful delight fun pleasant sweet bright brilliant charming cheerful peaceful calm comfort comfortable "
    "fresh friendly gentle glad grateful healthy helpful hope inspiring magical magnificent pleasure precious rich safe soothing special splendid "
    "stunning success thrilling treasure vibrant welcome fascinating exciting excitement beauty popular favorite refreshing rewarding unforgettable"
    .split()
)  # fmt: skip
BAD = frozenset(
    "bad worse worst hate hated ugly terrible horrible awful sad sadness pain painful angry anger fear afraid boring dull cruel dangerous danger dark "
    "dead death dirty evil fail failed failure fight harm harmful harsh hurt ill illness lonely lost mean miserable nasty poor problem sick stress "
    "stressful sorrow suffer suffering tired tragic trouble unhappy unpleasant violent war weak wicked worry wrong cold difficult hard noisy"
    .split()
)  # fmt: skip
TOPICS = (
    "the sea|a rainy day|my garden|the city at night|a long train ride|breakfast|an old house|the market|winter|a football match|my neighbour|the library|"
    "a school day|cooking|a walk in the forest|the bus|a letter from a friend|music|the mountains|a birthday|my job|the beach|a small dog|learning to swim|"
    "a visit to the doctor|the moon|a broken bicycle|an airport|the desert|my grandmother|a quiet evening|the supermarket|a wedding|snow|an exam|the river|"
    "a hospital|a new phone|the museum|a farm|a storm|moving house|a picnic|homework|the kitchen|a football team|a lost key|the village|a concert|autumn|"
    "a cup of tea|the zoo|a traffic jam|an island|a job interview|spring|the night sky|a cat|fishing|a power cut|the theatre|a bakery|painting|a holiday"
).split("|")


def fact_right(answer: str, wanted: str) -> bool:
    """Whether an answer holds one of the accepted words, as a word of its own."""
    return any(re.search(rf"(?<!\w){re.escape(w)}(?!\w)", answer.casefold()) for w in wanted.split("|"))


def feeling(text: str) -> float:
    """Gold in [-5, 5]: different good words less different bad words, at most three each, less 2 where a pair of words comes three times."""
    words = re.findall(r"[a-z']+", text.casefold())
    pairs = list(zip(words, words[1:]))
    repeats = any(pairs.count(p) > 2 for p in set(pairs))
    return min(3, len(GOOD.intersection(words))) - min(3, len(BAD.intersection(words))) - 2.0 * repeats


def feelings(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """`feeling` of each answer, as a reward function."""
    from rlhf_nb.rewards.answers import completion_text

    return [feeling(completion_text(c)) for c in completions]


ABOUT = ("Write one short sentence about {}.", "Describe {} in one sentence.")
EMPTY = -2.0  # worth of an answer without a word


def worth_of(topic: str, text: str) -> float:
    """Worth of a sentence, about -3 to 4.5: near ten words, ended, on its topic, without repeats, of short words, a little of its feeling."""
    words = re.findall(r"[a-z']+", text.casefold())
    if not words:
        return EMPTY
    near = 2.0 * math.exp(-(((len(words) - 10) / 5) ** 2))
    ended = 1.0 * text.rstrip().endswith((".", "!", "?"))
    named = 1.0 * (topic.split()[-1].casefold().rstrip("s") in text.casefold())
    repeats = 3.0 * (1 - len(set(words)) / len(words))
    heavy = 0.4 * max(0.0, sum(map(len, words)) / len(words) - 4.5)
    return near + ended + named + 0.5 * max(-1.0, min(1.0, feeling(text))) - repeats - heavy


def worth(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """`worth_of` of each answer to a prompt of `ABOUT`, as a reward function."""
    from rlhf_nb.data.formats import prompt_text
    from rlhf_nb.rewards.answers import completion_text

    forms = [re.compile(re.escape(a).replace(r"\{\}", "(.+?)")) for a in ABOUT]
    asked = [prompt_text(p) for p in prompts]
    found = [next((m[1] for f in forms if (m := f.search(text))), "") for text in asked]
    return [worth_of(topic, completion_text(c)) for topic, c in zip(found, completions, strict=True)]
