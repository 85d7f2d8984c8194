"""The subjects of `planted` that are to fail."""

from __future__ import annotations

from .planted import RIGHT, deadly, draw, wrong
from .subject import Subject, one_by_one, sampled

SUBJECTS = [
    RIGHT,
    Subject("nobody", "wrong", 40, 40, sampled(draw, one_by_one(wrong))),
    Subject("nobody", "deadly", 40, 40, sampled(draw, one_by_one(deadly))),
    Subject("nobody", "absent", 40, 40, sampled(draw, one_by_one(wrong)), missing=lambda: "not installed"),
]
