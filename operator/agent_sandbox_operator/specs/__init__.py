"""Pure builders: a Sandbox in, the whole JSON of one object out, so that a test can compare it whole. No clock, no client, no settings object."""

from .canary import CANARY, CONTROL, build_canary
from .identity import (
    ANNOTATION_CAUSE,
    ANNOTATION_DELIVERY,
    ANNOTATION_STARTS_BEFORE,
    ANNOTATION_TEMPLATE_HASH,
    Cause,
    child_labels,
    owner_reference,
    template_hash,
)
from .network import POLICY_NAMES, allow_policy, namespace_policies
from .pod import Birth, PodOptions, build_pod
from .workspace import build_pvc

__all__ = [
    "ANNOTATION_CAUSE",
    "ANNOTATION_DELIVERY",
    "ANNOTATION_STARTS_BEFORE",
    "ANNOTATION_TEMPLATE_HASH",
    "CANARY",
    "CONTROL",
    "POLICY_NAMES",
    "Birth",
    "Cause",
    "PodOptions",
    "allow_policy",
    "build_canary",
    "build_pod",
    "build_pvc",
    "child_labels",
    "namespace_policies",
    "owner_reference",
    "template_hash",
]
