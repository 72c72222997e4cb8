"""The key of a call, and the entry of the table that has it."""

from __future__ import annotations

from gemmery.cpu.abi import Args
from gemmery.cpu.entry_arguments import is_null
from gemmery.cpu.entry_layout import (
    CALL,
    ENTRIES_AT,
    ENTRY,
    ENTRY_BYTES,
    FACTORS,
    FACTORS_AT,
    HASHES_AT,
    MIX,
    MOST_WORDS,
    OPERAND,
    SET_BITS,
    WAYS,
    at,
)
from gemmery.cpu.ir import Function, Module, Value, Var

_KEY_AT = at(CALL, "key_0")


def set_of(key_hash: Value) -> Value:
    """Return the number of the set where a key may be, as `entry_layout.place` does."""
    return (key_hash ^ key_hash >> MIX) * FACTORS[1] >> (64 - SET_BITS)


def define_find(module: Module) -> None:
    """Define `find(table, call)`: writes the key of a call, returns its entry or NULL."""
    with module.function("find", ("ptr", "table"), ("ptr", "call"), local=True, returns="ptr") as f:
        match = f.var(Value(f, "ptr", "null"))
        fields = Args(f, f["call"], CALL)
        words = 7 + 2 * (fields.a_ndim + fields.b_ndim + fields.out_ndim + fields.bias_ndim)
        with f.if_(words <= MOST_WORDS):
            key_hash = _key(f, fields)
            at_set = set_of(key_hash)
            hashes = f["table"] + (HASHES_AT + at_set * (8 * WAYS))
            with f.loop(0, WAYS) as way, f.if_(f.load("i64", hashes + way * 8, align=8).equals(key_hash)):
                entry = f["table"] + (ENTRIES_AT + (at_set * WAYS + way) * ENTRY_BYTES)
                with f.if_(_equal(f, fields, entry)):
                    match.value = entry
        f.ret(match.value)


def _key(f: Function, fields: Args) -> Value:
    """Write the key: numbers of dimensions and options; then element, lengths and strides of each array."""
    at_word, at_factor = f.var(f["call"] + _KEY_AT), f.var(f["table"] + FACTORS_AT)
    total = f.var(f.index(0))
    has_out = is_null(f, fields.out_object) ^ True
    out = f.select(has_out, fields.out_ndim + 1, f.index(0))
    first = fields.a_ndim | fields.b_ndim << 8 | out << 16 | fields.bias_kind << 24 | fields.options << 32
    _word(f, at_word, at_factor, total, first)
    for name in ("a", "b"):
        _array(f, at_word, at_factor, total, name)
    with f.if_(has_out):
        _array(f, at_word, at_factor, total, "out")
    with f.if_(is_null(f, fields.bias_object) ^ True):
        _array(f, at_word, at_factor, total, "bias")
    for passed in (fields.dtype, fields.threads):
        with f.if_(is_null(f, passed) ^ True):
            _word(f, at_word, at_factor, total, f.emit("i64", f"ptrtoint {passed} to i64"))
    start, stop = (f.emit("i64", f"ptrtoint {x} to i64") for x in (f["call"] + _KEY_AT, at_word.value))
    fields.count = (stop - start) >> 3
    fields.hash = total.value | 1
    return fields.hash


def _word(f: Function, at_word: Var, at_factor: Var, total: Var, word: Value) -> None:
    f.store(word, at_word.value, align=8)
    total.value = total.value + word * f.load("i64", at_factor.value, align=8)
    at_word.value, at_factor.value = at_word.value + 8, at_factor.value + 8


def _array(f: Function, at_word: Var, at_factor: Var, total: Var, name: str) -> None:
    operand = Args(f, f["call"] + at(CALL, f"{name}_object"), OPERAND)
    _word(f, at_word, at_factor, total, operand.element)
    shape, strides, unit = operand.shape, operand.strides, operand.unit
    with f.loop(0, operand.ndim) as i:
        _word(f, at_word, at_factor, total, f.load("i64", shape + i * 8, align=8))
        _word(f, at_word, at_factor, total, f.load("i64", strides + i * 8, align=8) * unit)


def _equal(f: Function, fields: Args, entry: Value) -> Value:
    """Return whether the entry has this key; the first word of an entry is the number of its words."""
    entry_at = Args(f, entry, ENTRY)
    count, different = fields.count, f.var(f.index(0))
    with f.if_(entry_at.count.equals(count)), f.loop(0, count) as i:
        mine, other = (f.load("i64", x + i * 8, align=8) for x in (f["call"] + _KEY_AT, entry + 8))
        different.value = different.value | (mine ^ other)
    with f.else_():
        different.value = 1
    return different.value.equals(0)
