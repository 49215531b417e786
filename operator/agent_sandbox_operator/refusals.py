"""What the API server's refusal of a child means for the Sandbox: a reason, what it said, and what to do next."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agent_sandbox_core.v1alpha1 import SandboxReason

_QUOTA = re.compile(r"exceeded quota", re.IGNORECASE)
_POD_SECURITY = re.compile(r"violates PodSecurity", re.IGNORECASE)
_TERMINATING = re.compile(r"because it is being terminated|namespaces? \S+ not found", re.IGNORECASE)
_RIGHTS = re.compile(r'User "[^"]*" cannot |cannot (create|get|list|patch|delete|update) resource', re.IGNORECASE)
_RUNTIME_CLASS = re.compile(r"RuntimeClass", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason, a message, and after how many seconds it is worth another try."""

    reason: SandboxReason
    message: str
    seconds: float


def read_refusal(what: str, namespace: str, said: str) -> Refusal:
    """From the API server's message about making `what` (a pod, a PVC, a NetworkPolicy)."""
    text = said.strip().rstrip(".")
    if _TERMINATING.search(text):
        return Refusal("Deleting", f"namespace {namespace} is being deleted, and this Sandbox with it", 60.0)
    if _QUOTA.search(text):
        return Refusal(
            "QuotaExceeded", f"its {what} does not fit into the quota of namespace {namespace}: {text}. Free something or raise the quota", 3.0
        )
    if _POD_SECURITY.search(text):
        message = f"Pod Security of namespace {namespace} refuses its {what}: {text}. Sandboxes fit the profile restricted; look at what this one asks for besides"
        return Refusal("PodSecurityRejected", message, 8.0)
    if _RIGHTS.search(text):
        message = (
            f"the operator has no right to make a {what} in namespace {namespace}: {text}. Bind its role there (chart value sandboxNamespaces), "
            "or create the Sandbox in a namespace that is enabled"
        )
        return Refusal("NamespaceNotEnabled", message, 8.0)
    hint = (
        "Correct spec.runtimeClassName, or install that class"
        if _RUNTIME_CLASS.search(text)
        else "Change what it objects to, or the policy behind it"
    )
    return Refusal("AdmissionRejected", f"the API server refuses its {what}: {text}. {hint}", 8.0)
