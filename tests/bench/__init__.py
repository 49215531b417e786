"""Speed, measured side by side in one run: ours beside what Docker alone costs on the same engine. Nothing here is asserted as a time in a test."""
