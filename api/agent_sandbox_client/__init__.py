"""The client side: the command line. Must not be here: anything that runs in a server."""
