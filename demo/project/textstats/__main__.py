"""`python -m textstats FILE`: prints the most frequent words."""

import sys
from pathlib import Path

from . import most_common

for word, count in most_common(Path(sys.argv[1]).read_text(encoding="utf-8")):
    print(f"{count:6d} {word}")
