"""The version of the distribution; the guest is built with the same one."""

__version__ = "0.1.0"
