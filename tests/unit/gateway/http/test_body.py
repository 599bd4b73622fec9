"""Parsing of request bodies."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http import body
from gateway.http.body import parse_object
from gateway.text.json_text import MAX_DEPTH
from shared.errors import InvalidRequestError


@pytest.mark.parametrize("is_ascii", [True, False])
def test_valid_objects_are_parsed_as_they_are(is_ascii):
    value = {"": [None, True, -5, 2**70, 1e-300, '\u2028\0"\\é😀'], "é": {"a": {}, "b": []}, "a": "{["}
    assert parse_object(json.dumps(value, ensure_ascii=is_ascii).encode()) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_refused(raw):
    try:
        parse_object(raw)
    except InvalidRequestError as error:
        assert error.code in ("invalid_json", "too_many_values")


def test_a_message_does_not_repeat_the_body():
    for raw in (b'{"secret": "a" "b"}', b'{"a": secret}', b"secret"):
        with pytest.raises(InvalidRequestError) as refused:
            parse_object(raw)
        assert "secret" not in refused.value.message


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ('{"a":1,"b":2,"a":3}', "a"),
        ('{"a":{"b":1,"b":2}}', "a.b"),
        ('{"x":[1,[],{"a":[{},{"b":1,"c":2,"c":{"b":1}}]}]}', "x[2].a[1].c"),
        # The last value of a repeated key replaces the others.
        ('{"a":{"b":{"c":1,"c":2},"b":1}}', "a.b"),
        ('{"z":{"y":1,"y":2},"z":3}', "z"),
        ('{"%s":{"b":1,"b":2}}' % ("k" * 100), "k" * 64 + ".b"),
        ('{"a":' * 100 + '{"b":1,"b":2}' + "}" * 100, "a." * 100 + "b"),
        ('{"abcd":' * 100 + '{"b":1,"b":2}' + "}" * 100, "b"),
    ],
)
def test_a_key_that_is_given_twice_is_named_with_its_place(raw, path):
    with pytest.raises(InvalidRequestError) as refused:
        parse_object(raw.encode())
    assert (refused.value.param, refused.value.code) == (path, "invalid_json")
    assert repr(path) in refused.value.message


def test_many_deep_objects_with_a_key_twice_take_no_long_paths():
    wide = b"[" + b",".join([b'{"b":1}'] * 9000) + b',{"c":1,"c":2}]'
    deep = (b'{"%s":' % (b"k" * 100)) * 120 + wide + b"}" * 120
    with pytest.raises(InvalidRequestError) as refused:
        parse_object(deep)
    assert refused.value.param == "c"


@pytest.mark.parametrize(
    ("limits", "raw", "words"),
    [
        ({"MAX_VALUES": 10}, b'{"a":[1,1,1,1,1,1,1,1,1,1,1,1]}', "more than 10"),
        # 16 MB of brackets held the interpreter for 3 s.
        *(
            ({"MAX_STRUCTURE": 10}, raw, "more than 10 objects")
            for raw in (
                b'{"a":' + b"[" * 11 + b"]" * 11 + b"}",
                b'{"a":[' + b"{}," * 11 + b"1]}",
                b'{"a":{' + b",".join(b'"k%d" : 1' % number for number in range(11)) + b"}}",
                b'{"a":{' + b",".join(b'"k%d\\\\":1' % number for number in range(11)) + b"}}",
                b"[" * 1000,
            )
        ),
        ({"MAX_STRUCTURE": 3, "MAX_STRINGS": 2}, b'{"a":["[","[","["]}', "2 strings"),
    ],
)
def test_values_are_counted_before_they_are_parsed(monkeypatch, limits, raw, words):
    for name, limit in limits.items():
        monkeypatch.setattr(body, name, limit)
    with pytest.raises(InvalidRequestError, match=words):
        parse_object(raw)


@pytest.mark.parametrize("text", ["[{:" * 50, '{"a":[1]}\\' * 50, '\\"[' * 50])
def test_brackets_in_texts_and_values_up_to_the_limit_are_fine(monkeypatch, text):
    monkeypatch.setattr(body, "MAX_STRUCTURE", 10)
    assert parse_object(json.dumps({"a": text}).encode()) == {"a": text}
    monkeypatch.setattr(body, "MAX_VALUES", 10)
    assert parse_object(b'{"a":[1,1,1,1,1,1,1,1,1,1,1]}')


def test_depth_is_that_of_objects_and_arrays_together():
    def nested(depth):
        value: object = {"b": 1}
        for index in range(depth - 1):
            value = {"a": value, "c": [1]} if index % 2 else [value, 2]
        return json.dumps({"x": value} if depth % 2 else value).encode()

    assert parse_object(nested(MAX_DEPTH - 1)) and parse_object(b'{"a":"%s"}' % (b"[{" * 500))
    wide = json.dumps({"a": [[1, {"b": []}]] * 500}).encode()
    assert parse_object(wide)
    for depth in (MAX_DEPTH, MAX_DEPTH + 1):
        with pytest.raises(InvalidRequestError, match="deeper than 128"):
            parse_object(b'{"x":%s}' % nested(depth))


def test_surrogate_pairs_are_fine_and_halves_are_not():
    assert parse_object(b'{"a":"\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    for raw in (b'{"a":"\\ud83d"}', b'{"a":"\\ude00"}', b'{"\\ud83d":1}', b'{"a":"\\ud83d\\u0041"}'):
        with pytest.raises(InvalidRequestError):
            parse_object(raw)
