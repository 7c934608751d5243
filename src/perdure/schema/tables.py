"""TOML tables as typed structs, with messages that name the key and say what was expected.

A struct that derives from `Table` is one table and its fields are the keys. `convert` checks, in this order:
unknown keys, numbers that are not finite, missing keys, types and ranges (the fields' annotations), and each
table's own `problem`. Everything wrong is a `UsageError` of one line: `FILE: KEY: found, expected`.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

import msgspec

from perdure.schema.errors import UsageError
from perdure.schema.text import DIGITS_MAX, quoted, read_plain


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of a file."""

    PLAIN: ClassVar[str | None] = None
    """The key that is meant when a plain number stands where this table is expected."""
    HIDDEN: ClassVar[frozenset[str]] = frozenset()
    """Fields that are filled in later and are no keys of the file."""

    def problem(self) -> str | None:
        """What is wrong with the table as a whole, as `key: found, expected`, or None."""
        return None


_T = TypeVar("_T", bound=Table)


def read_toml(path: Path) -> dict[str, Any]:
    """The file as plain data. Raises `UsageError` if it cannot be read or is not TOML."""
    try:
        return parse_toml(read_plain(path), str(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}), expected a TOML file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not TOML: {error}") from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """`text` as plain data. Raises `UsageError` that starts with `where`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where}: not TOML: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{where}: too many brackets within brackets, expected a plain table") from error
    except ValueError as error:  # Python refuses to read integers of thousands of digits
        raise UsageError(f"{where}: an integer is too long, expected at most {DIGITS_MAX} digits") from error


def convert(raw: dict[str, Any], kind: type[_T], where: str) -> _T:
    """`raw` as a `kind`. Raises `UsageError` that starts with `where`."""
    prepared = _prepared(raw, kind, "", where)
    try:
        value = msgspec.convert(prepared, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {_reworded(str(error), raw)}") from error
    for key, table in _tables(value, ""):
        if text := table.problem():
            raise UsageError(f"{where}: {key}{'.' if key else ''}{text}")
    return value


def override(raw: dict[str, Any], overrides: Mapping[str, object], where: str) -> None:
    """Set values of `raw` in place by dotted keys (`job.NAME.weight`); a name may have dots itself.

    Raises `UsageError`.
    """
    for key, value in overrides.items():
        table: Any = raw
        parts = key.split(".")
        while len(parts) > 1 and not (isinstance(table, dict) and ".".join(parts) in table):
            table, taken = _entered(table, parts)
            parts = parts[taken:]
        if not isinstance(table, dict) or table is raw:
            raise UsageError(
                f"{where}: {_shown(key)}: no such table, expected a key like cluster.spares or "
                "job.NAME.weight"
            )
        table[".".join(parts)] = value


def _entered(table: Any, parts: list[str]) -> tuple[Any, int]:
    """The table that the first of `parts` name, the longest name that is there, and how many they are.

    A table that is not there is made, but never an item of a list; at least one part is left over.
    """
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        if isinstance(table, list):
            found = next(
                (item for item in table if isinstance(item, dict) and item.get("name") == name), None
            )
        else:
            found = table.get(name) if isinstance(table, dict) else None
        if found is not None:
            return found, count
    return (table.setdefault(parts[0], {}) if isinstance(table, dict) else None), 1


def _prepared(value: Any, kind: type[Table] | None, key: str, where: str) -> Any:
    """`value` with plain numbers put into the tables they stand for; refuses unknown keys and infinities."""
    if isinstance(value, int) and abs(value) >= 10**DIGITS_MAX:
        raise UsageError(
            f"{where}: {key}: an integer of more than {DIGITS_MAX} digits, expected at most that many"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where}: {key}: {value} is not a finite number, expected one")
    if isinstance(value, list):
        return [_prepared(item, kind, _item_key(key, item, i), where) for i, item in enumerate(value)]
    if kind is not None and kind.PLAIN and isinstance(value, int | float) and not isinstance(value, bool):
        return {kind.PLAIN: value}
    if not isinstance(value, dict):
        return value
    inner = _keys(kind) if kind is not None else {}
    prefix = f"{key}." if key else ""
    out = {}
    for name, item in value.items():
        if kind is not None and name not in inner:
            raise UsageError(
                f"{where}: {prefix}{_shown(name)}: unknown key, expected one of {', '.join(inner)}"
            )
        out[name] = _prepared(item, inner.get(name), f"{prefix}{_shown(name)}", where)
    return out


def _shown(name: str) -> str:
    """A key or name as it stands in a message: as it is where it is plain, else in quotes."""
    return name if len(name) <= 64 and name.isprintable() else quoted(name)


def _keys(kind: type[Table]) -> dict[str, type[Table] | None]:
    """The keys of a table, each with the kind of table it holds, if any."""
    fields = msgspec.structs.fields(kind)
    return {field.encode_name: _inner(field.type) for field in fields if field.name not in kind.HIDDEN}


def _inner(annotation: Any) -> type[Table] | None:
    """The `Table` that a field holds, alone, optional or in a tuple; not the values of a dictionary."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return annotation
    if getattr(annotation, "__origin__", None) is dict:
        return None
    return next((found for part in get_args(annotation) if (found := _inner(part))), None)


def _item_key(key: str, item: Any, index: int) -> str:
    """`job.NAME` where the item has a name, else `job[index]`."""
    name = item.get("name") if isinstance(item, dict) else None
    return f"{key}.{_shown(name)}" if isinstance(name, str) else f"{key}[{index}]"


def _tables(value: Any, key: str) -> Iterator[tuple[str, Table]]:
    """Every table in `value` with its dotted key, inner ones first."""
    if isinstance(value, Table):
        for field in value.__struct_fields__:
            yield from _tables(getattr(value, field), f"{key}.{field}" if key else field)
        yield key, value
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            name = getattr(item, "name", None)
            yield from _tables(item, f"{key}.{name}" if name else f"{key}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _tables(item, f"{key}.{name}")


_WORDS = {"`": "", " | null": "", "object": "table", "array": "[[array of tables]]", ">=": "≥", "<=": "≤"}
"""msgspec's words and TOML's."""


def _reworded(message: str, raw: dict[str, Any]) -> str:
    """msgspec's message with the key in front and the value that was found."""
    text, _, at = message.partition(" - at `$")
    value: Any = raw
    key = ""
    for step in re.findall(r"\[[^\]]*\]|[^.\[\]]+", at.rstrip("`")):
        if (
            step == "[...]"
        ):  # an entry of a dictionary; msgspec does not say which, so only a lone one has a name
            names = list(value) if isinstance(value, dict) else []
            value, key = (value[names[0]], f"{key}.{names[0]}") if len(names) == 1 else (None, f"{key}.*")
        elif step.startswith("["):
            value = value[int(step[1:-1])] if isinstance(value, list) else None
            key = _item_key(key, value, int(step[1:-1]))
        elif isinstance(value, int | float):
            break  # a plain number that stands for a table of one key, which the file does not have
        else:
            value = value.get(step) if isinstance(value, dict) else None
            key = f"{key}.{step}" if key else step
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    if text.startswith("Object missing required field "):
        name = text.removeprefix("Object missing required field ")
        return f"{key}{'.' if key else ''}{name}: missing, expected a value"
    found = ""
    if isinstance(value, str | int | float):
        found = f"found {quoted(value) if isinstance(value, str) else value}, "
    return f"{key or 'file'}: {found}{text.replace('Expected', 'expected', 1).partition(', got')[0]}"
