"""Texts on which tokenizers may differ: every plane of Unicode, marks, white space, special tokens, repetitions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

_OTHER_VALUES = [
    "😀",
    "👍🏽",
    "👨\u200d👩\u200d👧\u200d👦",
    "🇩🇪",
    "❤️",
    "☺",
    "\u200d",
    "️",
    "é",
    "ﬁ",
    "Å",
    "İ",
    "ß",
    "ǆ",
    "é",
    "́",
    "가",
    "각",
    "ﷺ",
    "\xad",
    "\u200b",
    "\ufeff",
    "\x00",
    "\x01",
    "\x7f",
    "�",
    "½",
    "²",
    "٣",
    "Ⅷ",
    "①",
    "ạ́",
    "̴ͅ",
    "𑤸",
    "אָּ",
    "न्दी",
    "<0x41>",
    "▁",
    "Ġ",
    "ĉ",
]
_WHITE = (
    " ",
    "  ",
    "   ",
    "\n",
    "\r\n",
    "\r",
    "\t",
    "\x0b",
    "\x0c",
    "\xa0",
    "\u2003",
    "\u3000",
    "\n\n\n",
    "\x85",
    "\u2028",
)
_ARGUMENTS = [
    "the",
    "Hello",
    "WORLD",
    "don't",
    "I'LL",
    "they'VE",
    "x1y22z333",
    "123456789",
    "foo_bar",
    "__init__",
    "!!!",
    "...",
    "naïve",
    "Straße",
    "ſ",
    "'ſ",
    "日本語",
    "русский",
    "ελληνικά",
    "हिन्दी",
    "ไทย",
    "tokenizer",
    "numbers",
]
_PLANES = (
    (0, 0x80),
    (0x80, 0x3000),
    (0x300, 0x370),
    (0x3000, 0xD800),
    (0xE000, 0x10000),
    (0x10000, 0x20000),
    (0x20000, 0x110000),
)


def fuzz_texts(count: int, specials: Sequence[str], seed: int = 5) -> Iterator[str]:
    draw = random.Random(seed)
    pools = (
        [*_OTHER_VALUES, *_WHITE],
        [*_ARGUMENTS, *_WHITE, *_OTHER_VALUES],
        [*specials, *_WHITE, *_ARGUMENTS],
        [*" \n\r\t", "\r\n", "a", "1", ".", "\xa0"],
        [*"acgt"],
        [chr(code) for code in range(0x20, 0x7F)],
    )
    for number in range(count):
        if number % 4 == 0:
            yield "".join(chr(draw.randrange(*draw.choice(_PLANES))) for _ in range(draw.randrange(1, 60)))
        elif number % 97 == 1:
            yield draw.choice(("a", "1", "!", "\n", " ", "é", "日", "😀", "\u0301", "aA")) * draw.choice(
                (2, 50, 101, 3000)
            )
        else:
            pool = pools[number % len(pools)]
            yield "".join(draw.choice(pool) for _ in range(draw.randrange(0, 50)))
