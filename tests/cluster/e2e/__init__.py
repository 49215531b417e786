"""The operator, the mover and the facade on a real cluster."""
