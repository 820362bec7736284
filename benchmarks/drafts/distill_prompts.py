"""Prompts for a draft to learn from: requests and beginnings of texts, times subjects."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_SUBJECTS = """
photosynthesis|the French Revolution|black holes|making sourdough bread|learning the guitar|the water cycle
climate change|the stock market|a trip to Japan|electric cars|the human heart|Roman aqueducts|machine learning
gardening in a small yard|volcanoes|a lost dog|the Silk Road|healthy breakfasts|chess openings|time management
the moon landing|how vaccines work|a broken laptop|the Great Barrier Reef|public speaking|a birthday party
renewable energy|the Industrial Revolution|coffee|a haunted lighthouse|world religions|running a marathon
plate tectonics|the internet|a job interview|the Amazon rainforest|saving money|jazz music|the solar system
a small bakery|gravity|ancient Egypt|remote work|sleep|a robot that learns to paint|the immune system
bird migration|a family dinner|cryptography|the Olympic Games|moving to a new city|bees|quantum computers
a mysterious letter|the Renaissance|learning a new language|earthquakes|a school project|honesty|bicycles
the printing press|a rainy day|friendship|supply and demand|dinosaurs|a dragon and a librarian|recycling
the digestive system|World War I|a science fair|yoga|the speed of light|a late delivery|tea in China|whales
probability|a neighbour's loud music|antibiotics|the Arctic|photography|a train journey|democracy|spices
sailing|artificial intelligence in medicine|a garden gnome|noise in cities|the Aztecs|insomnia|magnets|deserts
a secret recipe|fractions|online privacy|Shakespeare|mushrooms|a lighthouse keeper|bridges|team conflicts|glass
astronauts|a summer camp|the Black Death|composting|the violin|traffic jams|an old photograph|steam engines|maps
"""

_REQUESTS = """
What is the most important thing to know about {}?|Explain {} to a ten-year-old.|Write a short story about {}.
Give me five facts about {}.|Write an email to a colleague about {}.|What are the pros and cons of {}?
Summarize what you know about {} in three sentences.|Write a poem about {}.|How did {} change over time?
List ten words that have to do with {} and explain each.|Why do people care about {}?|Write a dialogue about {}.
Make a quiz with four questions and answers about {}.|Describe {} as if you saw it for the first time.
I have to give a talk about {}. Outline it.|What is a common misunderstanding about {}?|Tell me a joke about {}.
Compare {} with something similar.|Write a step-by-step guide for a beginner who is interested in {}.
Write a news article about {}.|Which questions about {} are still open?|Write a tweet about {}.
Can you recommend three books about {}?|What would happen in a world without {}?|Write a product review about {}.
Help me plan a lesson on {}.|Write a formal letter of complaint about {}.|Translate "I like {}" into French.
What is the history of {}?|Write the first paragraph of a novel about {}.|Give advice to someone who fears {}.
Write a table in Markdown with three columns about {}.|How would a scientist study {}?|Define {} in one sentence.
What are the main causes and effects of {}?|Write a diary entry about {}.|Write a speech of one minute about {}.
Create a to-do list about {}.|Is {} a good subject for a child? Why?|Rewrite this politely: "{} is boring."
Invent a name and a slogan for a shop about {}.|What are the costs of {}?|Write a haiku about {}.
Answer briefly: who should learn about {}?|Write a thank-you note that mentions {}.|Describe a painting of {}.
"""

_CODE = """
Write a function in {} that reverses a string.|How do I read a file line by line in {}?|Explain recursion in {}.
Write a {} program that prints the first twenty prime numbers.|Implement a stack in {}.|Sort a list in {}.
Write a class for a bank account in {}.|What does an exception do in {}? Show an example.|Binary search in {}, please.
Show how to use a dictionary or a map in {}.|Write unit tests in {} for a function that adds two numbers.
Write a loop in {} that sums the even numbers up to one hundred.|Count the words of a text in {}.|FizzBuzz in {}.
"""
_LANGUAGES = "Python|JavaScript|Java|C|C++|Rust|Go|SQL|Ruby|TypeScript|Bash|Haskell"

_BEGINNINGS = r"""
Once upon a time, there was a story about {}.|The history of {}|Chapter 1:|Dear Sir or Madam, I am writing about {}
In this article, we look at {}.|Q: What is {}?\nA:|# Notes on {}\n\n- |Recent research on {} shows that|It was late when
Breaking news: {}|The three main points about {} are:\n1.|def main():\n    '''About {}.'''\n|My thoughts on {}:
"""


def _items(text: str) -> list[str]:
    return [item.replace("\\n", "\n") for line in text.strip().splitlines() for item in line.split("|") if item]


def prompts(rng: np.random.Generator, held_out: bool) -> Iterator[tuple[str, bool]]:
    """Texts without end, each with whether it is a user's message; else it is the beginning of a plain text.

    Every eighth subject, language and form is held out: prompts of the two kinds share none of them."""
    kinds = (
        (_items(_REQUESTS, held_out), _items(_SUBJECTS, held_out), True),
        (_items(_CODE, held_out), _items(_LANGUAGES, held_out), True),
        (_items(_BEGINNINGS, held_out), _items(_SUBJECTS, held_out), False),
    )
    while True:
        forms, subjects, is_message = kinds[rng.choice(3, p=(0.75, 0.1, 0.15))]
        form, subject = (items[rng.integers(len(items))] for items in (forms, subjects))
        yield form.replace("{}", subject), is_message


def _items(text: str, held_out: bool) -> list[str]:
    items = [item.replace("\\n", "\n") for line in text.strip().splitlines() for item in line.split("|")]
    return [item for i, item in enumerate(items) if (i % 8 == 3) == held_out]
