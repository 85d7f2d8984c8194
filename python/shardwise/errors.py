"""The exceptions of shardwise, each also the built-in exception that a caller would expect, and its warning.

Wrong types raise `TypeError`, an offset or a position outside its range raises `IndexError`; everything else that
shardwise refuses is a `ShardwiseError`. The message names the argument, what was given, and the limit.
"""

__all__ = [
    "InternalError",
    "LayoutError",
    "MeshError",
    "ParseError",
    "ShardwiseError",
    "ShardwiseWarning",
    "SizeOverflowError",
]


_LONGEST = 1000


def _cut(message: str) -> str:
    half = _LONGEST // 2
    return message if len(message) <= _LONGEST else f"{message[:half]} … {message[-half:]}"


class ShardwiseError(Exception):
    """The base of every exception that shardwise defines.

    A message of more than a thousand characters is shortened in the middle: it may quote a file or an argument.

    >>> issubclass(MeshError, ShardwiseError) and issubclass(MeshError, ValueError)
    True
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(_cut(arg) if isinstance(arg, str) else arg for arg in args))


class MeshError(ShardwiseError, ValueError):
    """An invalid mesh: sizes, names or devices that contradict each other, or a device that the mesh does not have."""


class LayoutError(ShardwiseError, ValueError):
    """An invalid layout, partition or layout map, or one that does not fit the array it is applied to."""


class ParseError(ShardwiseError, ValueError):
    """A text or a message that does not follow its format; the message names the place."""


class SizeOverflowError(ShardwiseError, OverflowError):
    """A size, a product of sizes or a number of bytes above 2**63 - 1."""


class InternalError(ShardwiseError, RuntimeError):
    """A fault of shardwise itself (a panic in its core); please report it. Nothing was changed."""


class ShardwiseWarning(UserWarning):
    """A likely mistake, or data that will be missing. The call continues; with `strict` it is an error."""
