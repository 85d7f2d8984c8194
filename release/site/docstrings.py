"""Docstrings as the site shows them: what a name does, its example, then arguments, answers and errors.

In the source the example stands last, where it does not part the text from what it is about.
"""

from __future__ import annotations

import inspect

__all__ = ["examples_first"]


def examples_first(text: str) -> str:
    r"""Put all examples behind the first paragraph, under their heading.

    >>> print(examples_first("Give one.\n\nArgs:\n    x: what.\n\n>>> one(2)\n1\n"))
    Give one.
    <BLANKLINE>
    Examples:
        >>> one(2)
        1
    <BLANKLINE>
    Args:
        x: what.
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    examples = [paragraph for paragraph in paragraphs if paragraph.lstrip().startswith(">>> ")]
    rest = [paragraph for paragraph in paragraphs if paragraph not in examples]
    if not examples or not rest:
        return text
    indented = "\n\n".join(
        "\n".join(f"    {line}" if line else "" for line in inspect.cleandoc(example).split("\n"))
        for example in examples
    )
    return "\n\n".join([rest[0], f"Examples:\n{indented}", *rest[1:]])
