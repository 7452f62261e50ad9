"""The depth of a JSON schema if references are followed; llguidance recurses to this depth on a limited stack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

from .json_schema import referred


def depth(schema: Any) -> int:
    """Return an upper bound on the nesting depth over all paths that visit no reference target twice.

    Targets that refer to each other are counted together, whichever target a path enters first.
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
    """Yield a value and all objects and lists in it, with their levels; skip the content of values in `closed`."""
    waiting = [(value, 1)]
    while waiting:
        one, level = waiting.pop()
        yield one, level
        if one is value or id(one) not in closed:
            inner = one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
            waiting += [(part, level + 1) for part in inner if isinstance(part, (Mapping, list))]


def _resolved(schema: Any, ref: str) -> Any:
    """Return the target of a reference; the whole schema if the reference is not a path, such as an anchor."""
    found = referred(schema, ref)
    return schema if found is None else found


def _longest(leads: dict[int, set[int]], lengths: Mapping[int, int]) -> int:
    """Return the length of the longest path; everything on a cycle, or between two cycles, counts in full."""
    total = 0
    for _ in range(2):  # removes the parts after all cycles, and then, with edges reversed, the parts before all cycles
        total += _taken_off(leads, lengths)
        left: dict[int, set[int]] = {name: set() for name in leads}
        for name, others in leads.items():
            for other in others & left.keys():
                left[other].add(name)
        leads = left
    return total + sum(lengths[name] for name in leads)


def _taken_off(leads: MutableMapping[int, set[int]], lengths: Mapping[int, int]) -> int:
    """Remove, in place, the nodes that lead to no cycle; return the length of the longest path through them."""
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
