"""What mkdocstrings calls for each docstring, before it reads it."""

from __future__ import annotations

from typing import Any

import griffe

from release.site.docstrings import examples_first

__all__ = ["ExamplesFirst"]


class ExamplesFirst(griffe.Extension):  # type: ignore[misc]
    """Puts examples first."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = examples_first(obj.docstring.value)
