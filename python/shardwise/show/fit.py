"""Names that fit a column: each loses what it has in common with the others, and stays distinct."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from .lines import width_of

__all__ = ["fit_names"]

# What is between dots or slashes; the dots of {0..79} do not count.
_PART = re.compile(r"(?:\{[^{}]*\}|[^./])+[./]?|[./]")

# For names of more parts, not all ways to leave some out are tried: their number is the square of the parts.
_MOST_PARTS = 32


def fit_names(names: Sequence[str], size: int) -> list[str] | None:
    """Return the names in at most `size` columns each; None if that would leave out what tells them apart.

    The parts that are left out are neighbours, and common to many of the names. Different names stay different.

    >>> names = [f"model.layers.{{0..79}}.mlp.{name}.weight" for name in ("up_proj", "down_proj")] + ["lm_head.weight"]
    >>> fit_names(names, 28)
    ['model.layers.…up_proj.weight', 'model.…mlp.down_proj.weight', 'lm_head.weight']
    """
    parts = [_PART.findall(name) for name in names]
    counts = Counter(part for name in parts for part in set(name))
    taken = {name for name in names if width_of(name) <= size}
    fitting: dict[str, str] = {}
    for name, own in zip(names, parts, strict=True):
        if width_of(name) > size and name not in fitting:
            short = next((text for text in _shortened(own, counts, len(names), size) if text not in taken), None)
            if short is None:
                return None
            taken.add(short)
            fitting[name] = short
    return [fitting.get(name, name) for name in names]


def _shortened(parts: Sequence[str], counts: Counter[str], names: int, size: int) -> Iterator[str]:
    """Yield the ways to leave out neighbouring parts but neither the last nor the rarest, the best first."""
    if not 1 < len(parts) <= _MOST_PARTS:
        return
    worth = [math.log(1 + names / counts[part]) for part in parts]
    rarest = max(range(len(parts)), key=worth.__getitem__)
    found = []
    for begin in range(len(parts)):
        for end in range(begin + 1, len(parts)):
            text = f"{''.join(parts[:begin])}…{''.join(parts[end:])}"
            if width_of(text) <= size and not begin <= rarest < end:
                found.append((sum(worth[begin:end]), -len(text), begin, text))
    yield from (text for _, _, _, text in sorted(found))
