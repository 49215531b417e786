"""HTTP routes, one module a resource. They adapt: parse, call the backend, shape the answer."""
