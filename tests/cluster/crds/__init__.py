"""The custom resource definitions on a real API server: what it accepts, what it refuses, and with which words."""
