"""Counts words in text: the small project that the demo works on."""

from .count import count_words, most_common

__all__ = ["count_words", "most_common"]
