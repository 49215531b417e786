"""The client of `sandbox-init` (init/API.md).

Belongs here: everything that speaks the guest API. Must not be here: how a channel is opened.
"""

from .calls import Explain
from .client import ChannelGuest
from .processes import ExitReason

__all__ = ["ChannelGuest", "ExitReason", "Explain"]
