"""A real Kubernetes to test on, from one command: `python3 -m tests.cluster up`. See README.md beside this file.

Belongs here: building, starting, stopping and watching the cluster, its test images, and the fixtures of tests that run on it. Does not belong
here: anything about sandboxes. All but fixtures and tests is standard library only, so that it runs before any virtual environment exists.
"""
