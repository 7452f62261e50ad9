"""How deep a JSON schema is when its references are followed: llguidance recurses there, and a stack has an end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any
from urllib.parse import unquote


def depth(schema: Any) -> int:
    """At most how many values lie inside one another on a way that comes to no reference's target twice.

    Targets that lead to each other count together, whichever of them a walk begins with.
    """
    refs = {ref for value, _ in _inside(schema) if (ref := _ref(value)) is not None}
    found = {ref: _resolved(schema, ref) for ref in refs}
    targets = {id(value): value for value in (schema, *found.values())}
    leads: dict[int, set[int]] = {}
    lengths: dict[int, int] = {}
    for name, target in targets.items():
        leads[name], lengths[name] = set(), 0
        for value, level in _inside(target, targets):
            lengths[name] = max(lengths[name], level)
            if id(value) != name and id(value) in targets:
                leads[name].add(id(value))
            elif (ref := _ref(value)) is not None:
                leads[name].add(id(found[ref]))
    return _longest(leads, lengths)


def _ref(value: Any) -> str | None:
    ref = value.get("$ref") if isinstance(value, Mapping) else None
    return ref if isinstance(ref, str) else None


def _inside(value: Any, closed: Collection[int] = ()) -> Iterator[tuple[Any, int]]:
    """A value and the objects and lists in it, each with its level; what is in closed ones is left out."""
    waiting = [(value, 1)]
    while waiting:
        one, level = waiting.pop()
        yield one, level
        if one is value or id(one) not in closed:
            inner = one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
            waiting += [(part, level + 1) for part in inner if isinstance(part, (Mapping, list))]


def _resolved(schema: Any, ref: str) -> Any:
    """What a reference leads to; all of the schema where that is not a place in it, as of anchors."""
    found = schema
    for key in unquote(ref).removeprefix("#").split("/")[1:] if ref.startswith("#") else ():
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and len(key) < 9 and int(key) < len(found):
            found = found[int(key)]
        else:
            return schema
    return found


def _longest(leads: dict[int, set[int]], lengths: Mapping[int, int]) -> int:
    """The longest way, where what is on a circle, or between two, counts as a whole."""
    total = 0
    for _ in range(2):  # what ends somewhere is taken off behind the circles, then, turned round, before them
        total += _taken_off(leads, lengths)
        left: dict[int, set[int]] = {name: set() for name in leads}
        for name, others in leads.items():
            for other in others & left.keys():
                left[other].add(name)
        leads = left
    return total + sum(lengths[name] for name in leads)


def _taken_off(leads: MutableMapping[int, set[int]], lengths: Mapping[int, int]) -> int:
    """Remove, in place, what leads to no circle; the length of the longest way through it."""
    users: defaultdict[int, list[int]] = defaultdict(list)
    for name, others in leads.items():
        for other in others:
            users[other].append(name)
    longest: defaultdict[int, int] = defaultdict(int)
    count = {name: len(others) for name, others in leads.items()}
    ready, most = [name for name, number in count.items() if not number], 0
    while ready:
        name = ready.pop()
        here = longest[name] + lengths[name]
        most = max(most, here)
        for user in users[name]:
            longest[user] = max(longest[user], here)
            count[user] -= 1
            if not count[user]:
                ready.append(user)
        del leads[name]
    return most
