"""Word counting that ignores case and punctuation: the variant that lowers the whole text once."""

from __future__ import annotations

import re
from collections import Counter

WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")


def count_words(text: str) -> Counter[str]:
    """How often each word occurs, in lower case."""
    return Counter(WORD.findall(text.lower()))


def most_common(text: str, limit: int = 3) -> list[tuple[str, int]]:
    """The `limit` most frequent words; equally frequent ones in alphabetical order."""
    return sorted(count_words(text).items(), key=lambda item: (-item[1], item[0]))[:limit]
