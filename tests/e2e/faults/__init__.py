"""Faults in Docker mode: an engine that stops, a facade that crashes, a store that fails, archives that attack."""
