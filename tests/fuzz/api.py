"""Calls of every public name with arbitrary and nearly right objects; only documented exceptions may come out."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.arguments import FOLDER, SHARDWISE, argument
from tests.fuzz.limits import is_documented, limited
from tests.fuzz.surface import Name, documentation, members, public_classes, public_names

#: What may say that a mapping has no such key.
KEYED = ("__getitem__", "__delitem__", "pop", "popitem")


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """A name, what to ask it of, and arguments by position and by name."""

    name: Name
    receiver: Any
    positional: list[Any]
    named: dict[str, Any]

    def __repr__(self) -> str:
        """The call, with whatever stands for arguments that cannot be shown."""
        try:
            shown = ascii((self.receiver, self.positional, self.named))
        except Exception as error:
            shown = f"arguments of types {[type(x) for x in (*self.positional, *self.named.values())]}, {error!r}"
        return f"{self.name} {shown}"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """So that Hypothesis shows no argument by itself: some cannot be."""
        printer.text(repr(self))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """A call of anything."""
    if draw(st.integers(0, 2)) == 0:
        name = draw(st.sampled_from(NAMES))
        receiver = name.owner
    else:
        maker = draw(st.sampled_from(RECEIVERS))
        receiver = maker()
        name = draw(st.sampled_from(MEMBERS[type(receiver)]))
    positional, named = [], {}
    by_name = False
    for parameter in name.parameters():
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += draw(st.lists(argument(parameter.name), max_size=3))
            by_name = True
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.default is not parameter.empty and draw(st.booleans()):
            by_name = True
            continue
        value = draw(argument(parameter.name))
        if parameter.kind is parameter.POSITIONAL_ONLY or (
            not by_name and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ):
            positional.append(value)
        else:
            named[parameter.name] = value
    return Call(name, receiver, positional, named)


def use(result: Any) -> None:
    """What a caller does with any value."""
    repr(result)
    if type(result) in MEMBERS:
        result == result  # noqa: B015
        copy.copy(result)
        if type(result).__hash__ is not None:
            hash(result)
    if inspect.isgenerator(result):
        next(result, None)


def call_anything(call: Call) -> None:
    """Make a call, use the result, and let out only what is not documented."""
    texts = [*documentation(call.name), *documentation(Name(type(call.receiver), "__init__"))]
    takes_files = any(parameter.name in ("file", "path") for parameter in call.name.parameters())
    os.chdir(FOLDER)
    with warnings.catch_warnings(), limited():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RuntimeWarning)
        try:
            # A constructor makes a value; called on one that is there, it would change what all other calls share.
            made_anew = call.name.name == "__init__"
            attribute = type(call.receiver) if made_anew else getattr(call.receiver, call.name.name)
            use(attribute(*call.positional, **call.named) if callable(attribute) else attribute)
        except Exception as error:
            usual = (
                (takes_files and isinstance(error, OSError))
                or (isinstance(error, KeyError) and call.name.name in KEYED)
                # As numpy's protocol has it, and the standard library's mappings.
                or (isinstance(error, ValueError) and call.name.name in ("__array__", "update"))
            )
            if not usual and not is_documented(error, *texts):
                raise


def pickle_anything(value: Any) -> None:
    """Values come back from pickling equal, where they can be pickled."""
    try:
        back = pickle.loads(pickle.dumps(value))
    except TypeError:  # Open files and the like say that they cannot.
        return
    assert type(back) is type(value)


NAMES = public_names()
MEMBERS = {kind: list(members(kind)) for kind in {*public_classes(), *(type(maker()) for maker in SHARDWISE)}}
MEMBERS = {kind: names for kind, names in MEMBERS.items() if names}
RECEIVERS = [maker for maker in SHARDWISE if type(maker()) in MEMBERS]
