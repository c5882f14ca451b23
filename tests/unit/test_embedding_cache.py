"""Remembered results of a text encoder: what decides a key, copies, and the bound."""

import uuid

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen_l40s.optimizations.embedding_cache import EmbeddingCache, content_key

FLOATS = 1024  # of 4 bytes, so that an entry takes 4 KiB


def result(value: float = 1.0) -> dict:
    return {"cond": torch.full((1, FLOATS), value), "pooled_output": None, "count": 3}


def test_what_is_recalled_is_equal_and_a_copy():
    cache = EmbeddingCache()
    given_result = {"cond": torch.randn(1, 5, 7)[:, 2:], "more": (torch.arange(3), [True, "x"])}
    expected = given_result["cond"].clone()
    cache.keep(b"a", given_result)
    given_result["cond"].zero_()  # what the caller does to the original
    first = cache.recall(b"a")
    assert torch.equal(first["cond"], expected)
    assert torch.equal(first["more"][0], torch.arange(3)) and first["more"][1] == [True, "x"]
    first.pop("cond").zero_()
    first["more"][1].append("mine")
    second = cache.recall(b"a")
    assert torch.equal(second["cond"], expected) and second["more"][1] == [True, "x"]
    assert cache.recall(b"b") is None and cache.recall(None) is None


def test_only_what_a_view_shows_is_held():
    cache = EmbeddingCache()
    cache.keep(b"a", torch.zeros(1, 100 * FLOATS)[:, :FLOATS])
    assert cache.bytes == 4 * FLOATS
    [(kept, _)] = cache._entries.values()
    assert kept.values.untyped_storage().nbytes() == 4 * FLOATS


def test_what_is_asked_for_stays_and_the_rest_goes():
    cache = EmbeddingCache(limit=3 * 4 * FLOATS)
    for name in (b"a", b"b", b"c"):
        cache.keep(name, result())
    assert cache.recall(b"a") is not None
    cache.keep(b"d", result())
    assert cache.recall(b"b") is None
    assert all(cache.recall(name) is not None for name in (b"a", b"c", b"d"))
    assert cache.bytes == cache.limit and len(cache) == 3
    cache.keep(b"e", torch.zeros(2 * FLOATS))
    assert len(cache) == 2 and cache.bytes == cache.limit
    cache.clear()
    assert (len(cache), cache.bytes, cache.recall(b"e")) == (0, 0, None)


def test_keeping_again_replaces():
    cache = EmbeddingCache(limit=2 * 4 * FLOATS)
    cache.keep(b"a", result(1.0))
    cache.keep(b"b", result(2.0))
    cache.keep(b"a", result(3.0))
    assert cache.recall(b"a")["cond"][0, 0] == 3 and cache.recall(b"b") is not None


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(FLOATS + 1),
        {"cond": torch.zeros(3), "hooks": object()},
        torch.zeros(3, requires_grad=True),
        torch.zeros(3).to_sparse(),
        [torch.zeros(3), {uuid.uuid4()}],
    ],
    ids=["too large", "an object", "gradients", "sparse", "a set"],
)
def test_what_is_not_kept(value):
    cache = EmbeddingCache(limit=4 * FLOATS)
    cache.keep(b"a", result())
    cache.keep(b"b", value)
    cache.keep(None, result())
    assert cache.recall(b"b") is None and cache.recall(b"a") is not None and len(cache) == 1


def test_a_result_of_inference_mode_outside_of_it():
    cache = EmbeddingCache()
    with torch.inference_mode():
        cache.keep(b"a", torch.ones(3))
    found = cache.recall(b"a")
    assert not found.is_inference()
    found.add_(1)
    with torch.inference_mode():
        assert torch.equal(cache.recall(b"a"), torch.ones(3))


IMAGE = torch.arange(12.0).reshape(1, 2, 2, 3)
DIFFERENT = [
    {"a": [[(1, 1.0), (2, 1.0)]]},
    {"a": [[(1, 1.0), (2, 1.1)]]},
    {"a": [[(1, 1.0)], [(2, 1.0)]]},
    {"b": [[(1, 1.0), (2, 1.0)]]},
    {"a": [[(1, 1.0), ({"type": "image", "data": IMAGE}, 1.0)]]},
    {"a": [[(1, 1.0), ({"type": "image", "data": IMAGE + 1}, 1.0)]]},
    {"a": [[(1, 1.0), ({"type": "image", "data": IMAGE.half()}, 1.0)]]},
    {"a": [[(1, 1.0), ({"type": "image", "data": IMAGE.reshape(1, 2, 3, 2)}, 1.0)]]},
    *(None, True, False, 1, 0, 1.0, "1", b"1", "", [], {}, [[]], "None", ["a", "b"], ["ab"]),
    *(torch.zeros(0), torch.zeros(()), torch.zeros(1), torch.zeros(1, dtype=torch.bool)),
]


def test_different_content_has_different_keys():
    keys = [content_key(value) for value in DIFFERENT]
    assert None not in keys and len(set(keys)) == len(DIFFERENT)


def test_equal_content_has_one_key():
    strided = torch.arange(24.0).reshape(1, 2, 2, 6)[..., ::2]
    assert content_key(strided) == content_key(strided.contiguous())
    parameter = torch.nn.Parameter(IMAGE, requires_grad=False)
    assert content_key(parameter) == content_key(IMAGE.clone())
    assert content_key(("a", {"x": 1})) == content_key(("a", {"x": 1}))


@pytest.mark.parametrize("value", [object(), {1}, uuid.uuid4(), IMAGE.to_sparse(), [{"a": object}]])
def test_unknown_content_has_no_key(value):
    assert content_key(value) is None
    assert content_key({"tokens": [value]}) is None


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@given(NESTED, NESTED)
def test_keys_are_equal_only_where_the_content_is(one, other):
    same = repr(one) == repr(other)
    assert (content_key(one) == content_key(other)) == same
