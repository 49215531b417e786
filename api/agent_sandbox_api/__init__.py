"""The facade: HTTP in, backend calls out. Belongs here: routes, auth, settings, metrics, backends. Must not be here: kopf, the operator, the client."""
