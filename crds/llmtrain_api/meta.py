"""The base of every type in the contract: camelCase on the wire, frozen, and strict about unknown fields."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """A frozen value with camelCase names on the wire; an unknown field is an error, never ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    def to_wire(self) -> dict[str, Any]:
        """Return plain JSON data with camelCase names, without the fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class LenientModel(ApiModel):
    """Like ApiModel, but an unknown field is ignored: for what a newer or older peer may send us."""

    model_config = ConfigDict(extra="ignore")


Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1, json_schema_extra={"format": "int32"})]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1, json_schema_extra={"format": "int64"})]
Count32 = Annotated[int, Field(ge=0, le=2**31 - 1, json_schema_extra={"format": "int32"})]
Positive32 = Annotated[int, Field(ge=1, le=2**31 - 1, json_schema_extra={"format": "int32"})]
Count64 = Annotated[int, Field(ge=0, le=2**63 - 1, json_schema_extra={"format": "int64"})]
"""Integers of Kubernetes' two widths; the format is part of the generated schema."""

Timestamp = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
"""RFC 3339 in UTC, for instance 2026-11-30T21:24:53Z (fractions of a second allowed)."""
