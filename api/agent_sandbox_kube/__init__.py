"""A thin layer over the Kubernetes API, shared by operator, mover and facade: raw JSON over aiohttp, configuration and tokens by `kubernetes.aio`."""
