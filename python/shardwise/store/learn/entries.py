"""Relations turned into entries of rewrites, and entries into the text of a rules file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...rules.toml_text import value_text
from .dims import FIELDS, Relation
from .relations import NUMBER

__all__ = ["Directed", "Printed", "dropped_templates", "joined_entries", "rewrite_entries", "rules_text"]

#: A temporary name for a tensor whose new name still belongs to another.
_TEMPORARY = "learned:"
#: The contents of a rules file: rewrites, dropped names, and whether names are changed in two steps.
Printed = tuple[list[dict[str, Any]], list[str], bool]


@dataclass
class Directed:
    """A relation with its direction: from the first checkpoint, or back from the second."""

    relation: Relation
    is_back: bool

    @property
    def sources(self) -> frozenset[str]:
        """The tensors of the first checkpoint."""
        return frozenset([self.relation.target]) if self.is_back else self.relation.used

    @property
    def targets(self) -> frozenset[str]:
        """The tensors of the second checkpoint."""
        return self.relation.used if self.is_back else frozenset([self.relation.target])

    def named(self) -> list[str]:
        """Return the names that become templates: those of the parts, then that of the whole."""
        return [*self.relation.parts.values(), self.relation.target]


def rewrite_entries(group: list[Directed], *, is_general: bool) -> list[dict[str, Any]]:
    """Return one rewrite for relations that differ only in numbers of names, or one for each.

    Args:
        group: The relations.
        is_general: Whether one rewrite may match any number: true if it would not match further tensors wrongly.
    """
    names = [made.named() for made in group]
    first = group[0].relation
    texts = [[NUMBER.findall(name) for name in each] for each in names]
    numbers = [[[int(text) for text in said] for said in each] for each in texts]
    fields = list(FIELDS[len(first.stack) :])
    stack = {position: FIELDS[at] for at, position in enumerate(sorted(first.stack))}
    whole = len(names[0]) - 1
    templates: list[dict[int, str]] = [dict(stack) for _ in range(whole)] + [{}]
    # A number of the whole that is that of a part, or a constant more, in all of them.
    for at in range(len(numbers[0][whole]) if is_general else 0):
        for position in range(len(numbers[0][0])):
            if position in templates[0]:
                continue
            shifts = {each[whole][at] - each[0][position] for each in numbers}
            # Of 007 a template makes 007, and nothing else.
            pairs = [(each[whole][at], each[0][position]) for each in texts]
            is_counted = all(new == old or (new, old) == (str(int(new)), str(int(old))) for new, old in pairs)
            is_same = is_counted and all(
                len(part) > position and part[position] == each[0][position]
                for each in numbers for part in each[:whole]
            )  # fmt: skip
            if len(shifts) == 1 and is_same and fields:
                name, shift = fields.pop(0), shifts.pop()
                for part in range(whole):
                    templates[part][position] = f"{{{name}}}" if shift >= 0 else f"{{{name}+{-shift}}}"
                templates[whole][at] = f"{{{name}}}" if shift <= 0 else f"{{{name}+{shift}}}"
                break
    for part in range(whole):
        for position, name in stack.items():
            templates[part][position] = f"{{{name}}}"
    made = [[template_of(name, templates[at]) for at, name in enumerate(each)] for each in names]
    if any(each != made[0] for each in made):
        return [entry for one in group for entry in rewrite_entries([one], is_general=False)] if len(group) > 1 else []
    parts = dict(zip(first.parts, made[0][:whole], strict=True))
    own: dict[str, Any] = {"name": parts[""]} if list(parts) == [""] else {"parts": parts}
    sides = [own | first.own, {"name": made[0][whole], **first.side}]
    entry: dict[str, Any] = dict(zip(("from", "to"), reversed(sides) if group[0].is_back else sides, strict=True))
    return [entry | ({} if first.size is None else {"size": first.size})]


def template_of(name: str, changes: dict[int, str]) -> str:
    """Return the template of a name, in which some numbers are replaced by fields."""
    at, end, found = -1, 0, ""
    for at, number in enumerate(NUMBER.finditer(name)):
        found += name[end : number.start()].replace("{", "{{").replace("}", "}}") + changes.get(at, number[0])
        end = number.end()
    return found + name[end:].replace("{", "{{").replace("}", "}}")


def dropped_templates(unused: Sequence[str], used: Collection[str]) -> list[str]:
    """Return the templates of names that are dropped, with fields for their numbers if no other such name is used."""
    skeletons = {NUMBER.sub("#", name) for name in used}
    found: dict[str, None] = {}
    for name in unused:
        count = len(NUMBER.findall(name))
        is_general = NUMBER.sub("#", name) not in skeletons and count <= len(FIELDS)
        found[template_of(name, {at: f"{{{FIELDS[at]}}}" for at in range(count)} if is_general else {})] = None
    return list(found)


def joined_entries(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries without those that change nothing; several that give one tensor further names become one."""
    by_source: dict[str, dict[str, Any]] = {}
    for entry in entries:
        known = by_source.get(repr(entry["from"]))
        plain = {key: value for key, value in entry["to"].items() if key != "name"}
        if known is None or {key: value for key, value in known["to"].items() if key not in ("name", "also")} != plain:
            by_source.setdefault(repr(entry["from"]), entry)
            if known is not None:
                by_source[repr(entry)] = entry
            continue
        known["to"].setdefault("also", []).append(entry["to"]["name"])
    return [entry for entry in by_source.values() if entry["from"] != entry["to"] or "size" in entry]


def rules_text(
    entries: Sequence[dict[str, Any]], drop: list[str], *, in_two_steps: bool, numbers: Mapping[str, Any] | None = None
) -> str:
    """Return the text of a rules file. Names are changed in two steps if a new name is another tensor's old one."""
    lines = []
    if drop:
        lines += [f"drop = {value_text(drop)}", ""]
    if numbers:
        lines += ["[numbers]", *(f"{name} = {value_text(given)}" for name, given in numbers.items()), ""]
    for entry in entries:
        target = dict(entry["to"])
        if in_two_steps:
            for key, value in entry["to"].items():
                if key == "name":
                    target[key] = _TEMPORARY + value
                elif key == "parts":
                    target[key] = {part: _TEMPORARY + name for part, name in value.items()}
                elif key == "also":
                    target[key] = [_TEMPORARY + name for name in value]
        lines += ["[[rewrite]]", f"from = {value_text(_short(entry['from']))}", f"to = {value_text(_short(target))}"]
        lines += [f"size = {value_text(entry['size'])}"] if "size" in entry else []
        lines.append("")
    if in_two_steps and entries:
        lines += ["[[rewrite]]", f'from = "{_TEMPORARY}{{rest*}}"', 'to = "{rest*}"', ""]
    return "\n".join(lines) or 'unmatched = "keep"\n'


def _short(side: Mapping[str, Any]) -> Any:
    return side["name"] if list(side) == ["name"] else side
