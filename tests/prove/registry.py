"""All subjects, in the order in which `make prove` goes through them."""

from __future__ import annotations

from . import against_jax, against_numpy, against_tensorflow, against_torch, laws, reshards

SUBJECTS = [
    *against_numpy.SUBJECTS,
    *laws.SUBJECTS,
    *reshards.SUBJECTS,
    *against_jax.SUBJECTS,
    *against_torch.SUBJECTS,
    *against_tensorflow.SUBJECTS,
]
