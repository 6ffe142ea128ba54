"""Types that an API server could not be told about are refused when the definition is made, not when it is applied."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field

from llmtrain_api.meta import ApiModel
from llmtrain_api.structural import (
    SchemaError,
    complete_object_defaults,
    structural_schema,
    with_defaults,
    without_nulls,
)

Text = Annotated[str, Field(max_length=9)]


class Inner(ApiModel):
    """Inner."""

    number: int = 3
    text: Text | None = None


class Sound(ApiModel):
    """Sound."""

    inner: Inner = Inner()
    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5
    many: Annotated[list[Inner], Field(max_length=2)]
    counts: Annotated[dict[str, int], Field(max_length=4)] = Field(default_factory=dict)


class Union(ApiModel):
    both: int | Text


class LongText(ApiModel):
    text: str


class LongList(ApiModel):
    many: list[Text]


class LongMap(ApiModel):
    many: dict[str, int]


class OtherDefault(ApiModel):
    inner: Inner = Inner(number=4)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Union, "x.both: a union is not structural"),
        (LongText, "x.text: string without maxLength"),
        (LongList, r"x.many: array without maxItems"),
        (LongMap, "x.many: object without maxProperties"),
    ],
)
def test_a_type_that_is_not_structural_or_has_no_bound_is_refused_by_name(model: type[ApiModel], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        structural_schema(model, "x")


def test_an_objects_default_may_not_differ_from_its_fields_defaults() -> None:
    schema = structural_schema(OtherDefault, "x")
    with pytest.raises(SchemaError, match="inner: the default"):
        complete_object_defaults(schema)


def test_optional_fields_exclusive_bounds_and_references_are_translated() -> None:
    schema = structural_schema(Sound, "x")
    assert schema["properties"]["ratio"] == {
        "type": "number",
        "default": 0.5,
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 1,
        "exclusiveMaximum": True,
    }
    assert schema["properties"]["inner"]["properties"]["text"] == {"type": "string", "maxLength": 9}
    assert schema["properties"]["many"]["items"]["properties"]["number"]["format"] == "int32"
    assert schema["required"] == ["many"]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"inner": None}, {}),
        ({"many": [{"number": None}]}, {"many": [{}]}),
        ({"inner": {"number": 8.0}}, {"inner": {"number": 8}}),
        ({"inner": {"number": 8.5}}, {"inner": {"number": 8.5}}),
        ({"unknown": None}, {"unknown": None}),
        ("text", "text"),
    ],
    ids=str,
)
def test_a_value_is_read_as_an_api_server_reads_it(given: Any, read: Any) -> None:
    assert without_nulls(structural_schema(Sound, "x"), given) == read


def test_defaults_are_filled_in_below_lists_and_objects_and_the_value_is_not_changed() -> None:
    schema = structural_schema(Sound, "x")
    complete_object_defaults(schema)
    given = {"many": [{}, {"number": 1}]}
    assert with_defaults(schema, given) == {
        "many": [{"number": 3}, {"number": 1}],
        "inner": {"number": 3},
        "ratio": 0.5,
    }
    assert given == {"many": [{}, {"number": 1}]}
