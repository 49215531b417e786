"""The operator of Sandboxes.

Belongs here: what watches the custom resources and makes the cluster look like them. Must not be here: how an agent's call reaches a sandbox (the
facade), how files are kept (mover/), how the API server is spoken to (agent_sandbox_kube). Only handlers.py and main.py know kopf.
"""
