"""Word counting that ignores case and punctuation: the variant without a regular expression."""

from __future__ import annotations

from collections import Counter


def count_words(text: str) -> Counter[str]:
    """How often each word occurs, in lower case."""
    kept = "".join(letter if letter.isalpha() or letter == "'" else " " for letter in text)
    return Counter(word for word in (part.strip("'").lower() for part in kept.split()) if word)


def most_common(text: str, limit: int = 3) -> list[tuple[str, int]]:
    """The `limit` most frequent words; equally frequent ones in alphabetical order."""
    return sorted(count_words(text).items(), key=lambda item: (-item[1], item[0]))[:limit]
