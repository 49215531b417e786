"""Rules that the API server checks at admission (CEL), in the words that a person gets to read.

A rule stands beside the model or field that it is about: `json_schema_extra=schema(Rule(...))`. Types that CEL must understand are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from agent_sandbox_core.models import Timestamp

VALIDATIONS: Final = "x-kubernetes-validations"


@dataclass(frozen=True)
class Rule:
    """One CEL expression and what is said when it is false. `path`: the field of the model that it is about, in JSON notation."""

    rule: str
    message: str
    path: str | None = None

    def to_wire(self) -> dict[str, str]:
        """As an entry of x-kubernetes-validations."""
        return {"rule": self.rule, "message": self.message} | ({"fieldPath": self.path} if self.path else {})


def schema(*rules: Rule, **keywords: Any) -> dict[str, Any]:
    """Extra parts of a schema: rules, and `x-kubernetes-…` keywords by their names with underscores."""
    extra: dict[str, Any] = {f"x-kubernetes-{key.replace('_', '-')}": value for key, value in keywords.items()}
    return extra | ({VALIDATIONS: [rule.to_wire() for rule in rules]} if rules else {})


def unchanged(field: str, message: str) -> Rule:
    """An optional field that may be set at creation only."""
    return Rule(same(field), message, path=f".{field}")


def same(field: str) -> str:
    """Expression: an optional field is as it was. Not with CEL's `.?`, whose comparison counts as of unlimited cost."""
    here, before = f"self.{field}", f"oldSelf.{field}"
    return f"has({here}) == has({before}) && (!has({here}) || {here} == {before})"


NAME_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
"""A DNS label."""
_SUBDOMAIN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
_QUANTITY: Final = r"^[0-9]+(\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i|e[0-9]{1,2})?$"
_DAY: Final = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
_TIME: Final = f"^[0-9]{{4}}-{_DAY}T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{{1,9}})?(Z|[+-](0[0-9]|1[0-9]|2[0-3]):[0-5][0-9])$"
MAX_NAME_LENGTH: Final = 50
"""Of a CR's name: children are called `<name>-<8 of the uid>`, which must be a DNS label (63)."""


def own_name(kind: str) -> Rule:
    """What the name of an object of ours must be; for the root of its schema."""
    return Rule(
        f"size(self.metadata.name) <= {MAX_NAME_LENGTH} && self.metadata.name.matches(r'{NAME_PATTERN}')",
        f"the name of a {kind} has at most {MAX_NAME_LENGTH} characters, lower-case letters, digits and '-', and begins and ends with a letter or a digit: "
        "pods and volumes are named after it",
    )


def shaped(pattern: str, message: str, longest: int) -> Any:
    """Field of a text that a pattern describes to machines and a message to people."""
    return Field(max_length=longest, pattern=pattern, json_schema_extra=schema(Rule(f"self.matches(r'{pattern}')", message)))


def object_name(kind: str) -> Any:
    """Field of the name of an object of another kind."""
    return shaped(_SUBDOMAIN, f"this is no name that a {kind} can have: lower-case letters, digits, '-' and '.'", 253)


def own_name_field(kind: str) -> Any:
    """Field of the name of an object of ours."""
    return shaped(NAME_PATTERN, f"this is no name that a {kind} can have: lower-case letters, digits and '-'", MAX_NAME_LENGTH)


def _as_text(value: Any) -> Any:
    """A whole number is a quantity too, as in a pod."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _positive(value: str) -> str:
    if not any(digit in "123456789" for digit in value.split("e", maxsplit=1)[0]):
        raise ValueError("must be above zero")
    return value


Quantity = Annotated[
    str,
    BeforeValidator(_as_text),
    AfterValidator(_positive),
    Field(max_length=32, pattern=_QUANTITY),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": 32,
            **schema(
                Rule(
                    f"string(self).matches(r'{_QUANTITY}') && quantity(string(self)).isGreaterThan(quantity('0'))",
                    "must be a quantity above zero, e.g. 500m, 2 or 512Mi",
                ),
                int_or_string=True,
            ),
        }
    ),
]
"""A Kubernetes quantity above zero: 500m, 1.5, 512Mi, 1Gi."""

Deadline = Annotated[
    Timestamp,
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": 40,
            # Not format date-time: its message names neither the zone that is missing nor what is right.
            **schema(
                Rule(
                    f"self.matches(r'{_TIME}') && timestamp(self) > timestamp('1970-01-01T00:00:00Z')",
                    "must be a time with its zone (RFC 3339), e.g. 2030-12-24T18:00:00Z",
                )
            ),
        }
    ),
]
"""A moment that a person writes."""
