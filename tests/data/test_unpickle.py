"""Pickles are read as data: what NumPy writes comes back, and nothing in a file is ever executed."""

import os
import pickle
import pickletools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chipwise.data import originals
from chipwise.errors import DataError
from refusals import refused

VALUE = {
    "data": np.arange(24, dtype=np.uint8).reshape(2, 12),
    "columns": np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3)),
    "labels": [0, 9, 255, 256, 70_000, -1, -70_000, 2**40],
    "text": "grün",
    "raw": b"\x00\xff",
    "none": b"",
    "rest": (None, True, False, (), (1,), (1, 2), (1, 2, 3, 4), [], {}, {"a": [1]}),
}
GRAMMAR = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.binary(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


def unpickle(data):
    return originals.unpickle(data, "batch")


def same(a, b):
    if isinstance(b, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    else:
        assert type(a) is type(b) and a == b


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_and_plain_values_come_back(protocol):
    got = unpickle(pickle.dumps(VALUE, protocol))
    assert got.keys() == VALUE.keys()
    for key in VALUE:
        same(got[key], VALUE[key])


@given(value=GRAMMAR, protocol=st.sampled_from([3, 4]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_plain_values_are_what_pickle_itself_reads(value, protocol):
    assert unpickle(pickle.dumps(value, protocol)) == value


def test_what_python_2_wrote():
    """The exact shape of CIFAR-10's files: protocol 2, byte strings, numpy.core names."""
    pixels = bytes(range(12))
    data = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
        b"U\x01b\x87Rq\x05(K\x01K\x02K\x06\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x0c\x00\x00\x00" + pixels + b"tb"
        b"U\x06labelsq\x08]q\x09(K\x03K\x07eu."
    )
    got = unpickle(data)
    np.testing.assert_array_equal(got[b"data"], np.frombuffer(pixels, np.uint8).reshape(2, 6))
    assert got[b"labels"] == [3, 7]
    theirs = pickle.loads(data, encoding="bytes")
    np.testing.assert_array_equal(theirs[b"data"], got[b"data"])


class Attack:
    """Pickles to a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_call_in_the_file_is_named_and_not_made(tmp_path, protocol):
    target = tmp_path / "made"
    for attack in (
        Attack(os.system, f"touch {target}"),
        Attack(eval, f"open({str(target)!r}, 'w')"),
        {"data": Attack(os.mkdir, str(target))},
    ):
        with refused(DataError, "pickle-refused", path="batch"):
            unpickle(pickle.dumps(attack, protocol))
        assert not target.exists()
    if protocol >= 2:
        with refused(DataError, "pickle-refused", name=f"{os.system.__module__}.system"):
            unpickle(pickle.dumps(Attack(os.system, "true"), protocol))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cnumpy\ndtype\n(U\x02O8K\x00K\x01tR.",  # object arrays would hold pointers
        b"\x80\x02cnumpy\ndtype\n(cnumpy\nndarray\ntR.",
        b"\x80\x02cnumpy\ndtype\n.",
        b"\x80\x02cnumpy.core.multiarray\nscalar\n.",
        b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.",
        b"\x80\x02c_codecs\nencode\n(K\x01X\x06\x00\x00\x00latin1tR.",
        b"\x80\x02c__builtin__\nbytes\n(J\xff\xff\xff\x7ftR.",  # bytes(2**31 - 1)
        b"\x80\x02(ios\nsystem\n.",
        b"\x80\x02K\x01Q.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02(.",
        b"\x80\x02(q\x00h\x00.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02}]K\x01s.",
        b"\x80\x02a.",
        b"\x80\x02e.",
        b"\x80\x02h\x07.",
        b"\x80\x02K\x01K\x02.",
        b"\x80\x02}b.",
        b"K\x01",
        b"",
        b"\x80\x05\x97.",
        pickle.dumps(1) + b"!",
    ],
)
def test_oddities_are_refused(data):
    with pytest.raises(DataError) as caught:
        got = unpickle(data)
        assert type(got) is originals._StandIn  # what nobody could take for data
        raise DataError("pickle-refused", path="batch", name=got, at=0)
    assert "\n" not in str(caught.value)


def test_limits(monkeypatch):
    whole = pickle.dumps(list(range(300)), 3)
    monkeypatch.setattr(originals, "MAX_BYTES", len(whole))
    assert unpickle(whole) == list(range(300))
    with refused(DataError, "file-too-large", bytes=len(whole) + 1, limit=len(whole)):
        unpickle(whole + b"!")
    monkeypatch.setattr(originals, "MAX_STEPS", 300)
    with refused(DataError, "pickle-too-long", limit=300):
        unpickle(whole)


def test_shared_tuples_cost_no_exponential_time():
    """60 levels of (x, x): hashing or printing it would not end."""
    data = b"\x80\x02K\x00" + b"q\x00h\x00\x86" * 60
    assert isinstance(unpickle(data + b"."), tuple)
    with refused(DataError, "pickle-damaged"):
        unpickle(b"\x80\x02}" + data[2:] + b"K\x01s.")


def test_a_memo_and_a_shape_of_any_size_cost_nothing():
    assert unpickle(b"\x80\x02K\x01r\xff\xff\xff\xff.") == 1  # the place 2**32 - 1 of the memo
    numpy = b"\x80\x02}U\x01d(cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
    array = b"(K\x01J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86cnumpy\ndtype\n(U\x02u1tR\x89U\x01atb"
    with refused(DataError, "pickle-damaged"):
        unpickle(numpy + array + b"1s.")


def test_every_cut_of_a_file_is_refused():
    whole = pickle.dumps(VALUE, 4)
    for length in range(len(whole)):
        with pytest.raises(DataError):
            unpickle(whole[:length])


OPCODES = b"".join(op.code.encode("latin-1") for op in pickletools.opcodes)


@given(
    st.binary(max_size=80)
    | st.lists(st.sampled_from([bytes([b]) for b in OPCODES]) | st.binary(min_size=1, max_size=5)).map(
        b"".join
    )
)
@example(b"\x80\x02cos\nsystem\n(U\x04truetR.")
@example(b"\x8a\xffK.")
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_bytes_give_data_or_a_data_error(data):
    try:
        unpickle(data)
    except DataError as error:
        assert "\n" not in str(error)


@given(st.integers(0, 10**6), st.integers(0, 255), st.sampled_from([3, 4]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_one_changed_byte_gives_data_or_a_data_error(at, byte, protocol):
    whole = bytearray(pickle.dumps(VALUE, protocol))
    whole[at % len(whole)] = byte
    try:
        unpickle(bytes(whole))
    except DataError as error:
        assert "\n" not in str(error)
