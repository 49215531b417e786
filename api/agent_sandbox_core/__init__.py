"""The shared core: models, errors, names, the channel, the guest client, snapshots and the two interfaces (Backend, Guest).

Belongs here: what facade, operator and clients all need. Must not be here: kopf, fastapi, docker or kubernetes (import-linter checks).
"""
