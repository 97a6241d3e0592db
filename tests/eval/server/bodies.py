"""Bodies drawn from an OpenAPI schema, and what is wrong with them on purpose."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["\0", "\ud800"])
)
ANYTHING: SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
"""What JSON holds, NaN and half characters too."""


def of_schema(schema: dict[str, Any], root: dict[str, Any]) -> SearchStrategy[Any]:
    """Values that a schema allows."""
    if "$ref" in schema:
        found: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return of_schema(found, root)
    if "anyOf" in schema:
        return st.one_of(*(of_schema(each, root) for each in schema["anyOf"]))
    kind = schema["type"]
    if kind == "null":
        return st.none()
    if kind == "boolean":
        return st.booleans()
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if kind == "integer":
            # Small ones more often: with a large number of new tokens every body would be the same refusal.
            whole = st.integers(low, high if high is None or "maximum" in schema else int(high) - 1)
            return st.integers(max(low or 0, 0), min(high or 6, 6)) | whole if (low or 0) <= 6 else whole
        return st.floats(low, high, allow_nan=False, exclude_min="exclusiveMinimum" in schema)
    if kind == "string":
        return st.text(min_size=schema.get("minLength", 0), max_size=12)
    if kind == "array":
        most = min(schema.get("maxItems", 3), 3)
        return st.lists(of_schema(schema["items"], root), min_size=schema.get("minItems", 0), max_size=most)
    assert kind == "object", schema
    fields = schema.get("properties")
    if fields is None:
        return st.dictionaries(st.text(max_size=4), of_schema(schema["additionalProperties"], root), max_size=2)
    needed = {name: of_schema(fields[name], root) for name in schema.get("required", ())}
    rest = {name: of_schema(each, root) for name, each in fields.items() if name not in needed}
    return st.fixed_dictionaries(needed, optional=rest)


@st.composite
def hostile(draw: Any, schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """A body of the schema with some fields replaced by anything, or anything at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(ANYTHING)
    body = draw(of_schema(schema, root))
    for name in draw(st.lists(st.sampled_from(sorted(body)) | st.text(max_size=5), max_size=2)) if body else []:
        body[name] = draw(ANYTHING)
    return body
