"""JSON schemas whose every text is short: a random model would fill an open one for ever."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = ("name", "age", "ok", "tags", "é ü", 'a"b', "x\\y", "")
_VALUES: tuple[Any, ...] = ("red", "green", "Ünï", '"', 1, -20, 2.5, True, None, [1, "a"], {"b": 0})


def _bounded(kind: str, least: str, most: str, largest: int) -> st.SearchStrategy[dict]:
    bounds = st.tuples(st.integers(0, largest), st.integers(0, largest)).map(sorted)
    return bounds.map(lambda pair: {"type": kind, least: pair[0], most: pair[1]})


_leaves = st.one_of(
    _bounded("string", "minLength", "maxLength", 4),
    _bounded("integer", "minimum", "maximum", 1200),
    st.sampled_from(["[a-c]{1,3}", "(yes|no), (and|or)?", "20[0-9]{2}-[01]", "é+x?(ab){2}y"]).map(
        lambda pattern: {"type": "string", "pattern": f"^{pattern}$", "maxLength": 9}
    ),
    st.lists(st.sampled_from(_VALUES), min_size=1, max_size=4).map(lambda of: {"enum": of}),
    st.sampled_from(_VALUES).map(lambda value: {"const": value}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
)


@st.composite
def _objects(draw: st.DrawFn, values: st.SearchStrategy[dict]) -> dict:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), values, max_size=3))
    required = (
        draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    )
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


@st.composite
def _arrays(draw: st.DrawFn, items: st.SearchStrategy[dict]) -> dict:
    least, most = sorted(draw(st.tuples(st.integers(0, 2), st.integers(0, 3))))
    return {"type": "array", "items": draw(items), "minItems": least, "maxItems": most}


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Objects, arrays and choices of short values, a few levels deep."""
    return st.recursive(
        _leaves,
        lambda inner: st.one_of(
            _objects(inner),
            _arrays(inner),
            st.lists(inner, min_size=1, max_size=2).map(lambda of: {"anyOf": of}),
        ),
        max_leaves=5,
    )
