"""The HTTP contract, run over every backend by fixture."""
