"""Numbers as people write them."""

__all__ = ["bytes_text", "seconds_text"]

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def bytes_text(count: int) -> str:
    """Write a number of bytes for people.

    >>> bytes_text(768), bytes_text(3 << 20), bytes_text(1536)
    ('768 B', '3.0 MiB', '1.5 KiB')
    """
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(_UNITS))
    return f"{count / 1024**power:.1f} {_UNITS[power - 1]}"


def seconds_text(seconds: float) -> str:
    """Write a time for people.

    >>> seconds_text(1.87e-5), seconds_text(0.25), seconds_text(0)
    ('18.7 µs', '250 ms', '0 s')
    """
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1 or seconds == 0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
