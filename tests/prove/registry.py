"""All subjects, in the order in which `make prove` goes through them."""

from __future__ import annotations

from . import (
    against_dask,
    against_engines,
    against_engines_code,
    against_engines_loaders,
    against_jax,
    against_numpy,
    against_quantized,
    against_tensorflow,
    against_torch,
    against_xla,
    computations,
    exhaustive,
    factor_rules,
    laws,
    layout_maps,
    reshards,
)

SUBJECTS = [
    *against_numpy.SUBJECTS,
    *laws.SUBJECTS,
    *reshards.SUBJECTS,
    *factor_rules.SUBJECTS,
    *computations.SUBJECTS,
    *layout_maps.SUBJECTS,
    *against_quantized.SUBJECTS,
    *exhaustive.SUBJECTS,
    *against_engines.SUBJECTS,
    *against_engines_code.SUBJECTS,
    *against_engines_loaders.SUBJECTS,
    *against_dask.SUBJECTS,
    *against_jax.SUBJECTS,
    *against_xla.SUBJECTS,
    *against_torch.SUBJECTS,
    *against_tensorflow.SUBJECTS,
]
