"""What the suites share: a real facade process, a thin HTTP client, the Docker engine, bounded waits. No tests here."""
