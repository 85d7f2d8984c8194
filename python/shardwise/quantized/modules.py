"""Modules that a `quantization_config` names: those that a scheme is for, and those that are left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .._core import RuleSet
from .._text import shown
from ..rules.search import too_large
from .parts import StatedError

__all__ = ["Modules"]


class Modules:
    r"""Texts that name modules, one to many.

    Args:
        what: The name of the texts in messages.
        texts: Names, or after `re:` regular expressions, which are not to run for ever.
        pattern: Gives the regular expression of a name; it is matched from the beginning.

    >>> Modules("ignore", ["lm_head", r"re:.*\.gate"], re.escape).named("layers.0.gate")
    [1]
    """

    def __init__(self, what: str, texts: Sequence[str], pattern: Callable[[str], str]) -> None:
        self._what, self._texts = what, texts
        patterns = [text[3:] if text.startswith("re:") else pattern(text) for text in texts]
        try:
            self._rules = RuleSet(tuple(patterns), "match")
        except (TypeError, ValueError) as error:
            raise StatedError(f"quantization_config: {what}: {error}") from None
        self._too_large = dict(self._rules.too_large())
        #: The patterns of which a module can be named only by a search that may not end.
        self._slow = self._rules.backtracking()

    def named(self, module: str) -> list[int]:
        """Return the positions of the texts that name a module.

        Raises:
            ParseError: if one of the texts is no regular expression, or one that may take for ever.
        """
        for at in self._slow:
            text = self._texts[at]
            why = "uses look-around, a back-reference or another construct that needs a search that may take for ever"
            if at in self._too_large:
                why = too_large(self._too_large[at])
            try:
                re.compile(text.removeprefix("re:"))
            except (re.error, OverflowError, RecursionError) as error:
                why = f"is not a regular expression: {error}"
            raise StatedError(f"quantization_config: {self._what}: {shown(text)} {why}")
        found, undecided = self._rules.find(module)
        if undecided:
            raise StatedError(f"quantization_config: {self._what}: {shown(module)} is too long to be looked for")
        return list(found)
