"""The project's own tests."""

import unittest

from textstats import count_words, most_common


class CountWords(unittest.TestCase):
    """What a word is."""

    def test_case_and_punctuation_do_not_matter(self) -> None:
        self.assertEqual(count_words("The cat. THE CAT, the end!"), {"the": 3, "cat": 2, "end": 1})

    def test_an_apostrophe_belongs_to_its_word(self) -> None:
        self.assertEqual(count_words("don't stop, don't"), {"don't": 2, "stop": 1})

    def test_letters_of_any_script_are_words(self) -> None:
        self.assertEqual(count_words("naïve 漢字 Straße"), {"naïve": 1, "漢字": 1, "straße": 1})


class MostCommon(unittest.TestCase):
    """The order of the result."""

    def test_ties_are_in_alphabetical_order(self) -> None:
        self.assertEqual(most_common("b a c b a", 2), [("a", 2), ("b", 2)])


if __name__ == "__main__":
    unittest.main()
