"""`python -m agent_sandbox_client` is `sandboxctl`."""

from .cli import main

main()
