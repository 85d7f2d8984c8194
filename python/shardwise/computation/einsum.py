"""Einsums as text: letters for the dims of one or two operands and of a result, as `numpy.einsum` has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._text import counted, shown
from ..errors import LayoutError
from .factor_rule import FactorRule

__all__ = ["Einsum"]

#: The most operands: with three, the moves depend on the two that go first.
_MOST = 2


@dataclass(frozen=True)
class Einsum:
    """An einsum, as the letters of its operands and of its result.

    >>> einsum = Einsum.parse("bsd,df->bsf")
    >>> einsum.operands, einsum.result, einsum.summed
    (('bsd', 'df'), 'bsf', ('d',))
    """

    operands: tuple[str, ...]
    result: str

    @classmethod
    def parse(cls, text: str) -> Einsum:
        """Return the einsum of a text such as `"bsd,df->bsf"`; spaces are ignored.

        Raises:
            LayoutError: if the text is not of this form, has three operands, a letter twice in one tensor, or one in
                the result only.
            TypeError: if `text` is not a string.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a string such as 'bsd,df->bsf', got {shown(text)}")
        left, arrow, result = text.replace(" ", "").partition("->")
        operands = tuple(left.split(","))
        if not arrow or not all(
            all("A" <= letter <= "z" and letter.isalpha() for letter in side) for side in (*operands, result)
        ):
            raise LayoutError(
                f"einsum {shown(text)} is not of the form 'bsd,df->bsf': letters, and the result after '->'"
            )
        if len(operands) > _MOST:
            raise LayoutError(
                f"einsum {shown(text)} has {len(operands)} operands; write it as several of two each, because "
                "what moves depends on their order"
            )
        for side in (*operands, result):
            twice = next((letter for letter in side if side.count(letter) > 1), None)
            if twice is not None:
                raise LayoutError(f"einsum {shown(text)}: {twice!r} is twice in {side!r}; a diagonal is not supported")
        unknown = next((letter for letter in result if not any(letter in side for side in operands)), None)
        if unknown is not None:
            raise LayoutError(f"einsum {shown(text)}: {unknown!r} of the result is in no operand")
        return cls(operands, result)

    @property
    def letters(self) -> tuple[str, ...]:
        """All letters in the order of the result of a `dot_general`, batch first, then those that are summed."""
        both = [letter for letter in self.result if all(letter in side for side in self.operands)]
        own = [letter for side in self.operands for letter in side if letter in self.result]
        return (*dict.fromkeys([*both, *own]), *self.summed)

    @property
    def summed(self) -> tuple[str, ...]:
        """The letters that the result lacks, sorted, as `jax.numpy.einsum` takes them."""
        return tuple(sorted({*"".join(self.operands)} - {*self.result}))

    @property
    def rule(self) -> FactorRule:
        """The factor rule, whose factors are the letters, in the order of `letters`."""
        sides = [f"[{','.join(side)}]" for side in (*self.operands, self.result)]
        text = f"({','.join(sides[:-1])})->({sides[-1]})"
        return FactorRule._ordered(text, self.summed, self.letters)

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return the size of each letter for operands of these shapes.

        Raises:
            LayoutError: if there are more or fewer shapes, one has another number of dims, or a letter has two sizes.

        >>> Einsum.parse("ik,kj->ij").sizes([(2, 3), (3, 5)])
        {'i': 2, 'k': 3, 'j': 5}
        """
        if len(shapes) != len(self.operands):
            raise LayoutError(
                f"shapes has {counted(len(shapes), 'entry', 'entries')} for {counted(len(self.operands), 'operand')}"
            )
        sizes: dict[str, int] = {}
        for number, (side, shape) in enumerate(zip(self.operands, shapes, strict=True)):
            if len(side) != len(shape):
                raise LayoutError(
                    f"shapes[{number}] is {shown(tuple(shape))}, but {side!r} has {counted(len(side), 'dim')}"
                )
            for letter, size in zip(side, shape, strict=True):
                if sizes.setdefault(letter, size) != size:
                    raise LayoutError(f"{letter!r} is {sizes[letter]} in one operand and {size} in {side!r}")
        return sizes

    def __str__(self) -> str:
        return f"{','.join(self.operands)}->{self.result}"
