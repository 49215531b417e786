"""The facade's own logic over the memory engine: settings, policy, LocalBackend, middleware, streams. The HTTP contract is in tests/contract."""
