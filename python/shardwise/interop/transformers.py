"""The tensor-parallel plans of the models of Hugging Face transformers; needs transformers, and no PyTorch."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from .._fork import importing
from .._text import shown
from ..errors import LayoutError

with importing:
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["tp_plan_of", "version"]

#: That of transformers.
version: str = __version__


def tp_plan_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Give the tensor-parallel plan of the model that a `config.json` describes, which `LayoutMap.from_tp_plan` takes.

    Args:
        config: What the file holds: `model_type` says the configuration's class, `architectures` the model's,
            which is that for texts if left out.

    Raises:
        LayoutError: if transformers does not have the model, or a plan for it.

    The plan has three parts: that of the configuration's class, `base_model_tp_plan`; that of the model's own class,
    `_tp_plan`, such as the one for `lm_head`; and the embedding, which transformers cuts by rows if it is called
    `embed_tokens`. The last two are read from the text of the model's module, as its import would need PyTorch. Of a
    model made of several, such as one for text and pictures, ask the model itself: `model.tp_plan`.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise LayoutError(
            f"transformers {version} has no model of the type {shown(kind)}; for one that brings its own code, save "
            "its `model.tp_plan` as JSON"
        )
    described = CONFIG_MAPPING[kind]
    plan = getattr(described, "base_model_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        parts = sorted(getattr(described, "sub_configs", {}))
        several = f", which is made of {', '.join(parts)}: save its `model.tp_plan` as JSON" if parts else ""
        raise LayoutError(f"transformers {version} has no tensor-parallel plan for {shown(kind)}{several}")
    classes = _classes(described.__module__.replace(".configuration_", ".modeling_"))
    own: dict[str, str] = {}
    named = config.get("architectures") or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, ())
    for name in named if isinstance(named, (list, tuple)) else [named]:
        if not isinstance(name, str) or name not in classes:
            raise LayoutError(
                f"transformers {version} has no class {shown(name)} beside {described.__name__}; save the model's "
                "`model.tp_plan` as JSON"
            )
        own |= _own_plan(classes[name])
    found = dict(plan)
    if any(_makes_embedding(one) for one in classes.values()) and "embed_tokens" not in found:
        found["embed_tokens"] = "embedding_rowwise"
    return found | own


def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module, by name, from its text."""
    spec = importlib.util.find_spec(module)
    loader: Any = None if spec is None else spec.loader
    text = None if loader is None else loader.get_source(module)
    return {} if text is None else {one.name: one for one in ast.parse(text).body if isinstance(one, ast.ClassDef)}


def _makes_embedding(described: ast.ClassDef) -> bool:
    return any(
        isinstance(target, ast.Attribute) and target.attr == "embed_tokens" and isinstance(one.value, ast.Call)
        for one in ast.walk(described)
        if isinstance(one, ast.Assign)
        for target in one.targets
    )


def _own_plan(described: ast.ClassDef) -> dict[str, str]:
    for one in described.body:
        if isinstance(one, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "_tp_plan" for target in one.targets
        ):
            plan = ast.literal_eval(one.value)
            return plan if isinstance(plan, dict) else {}
    return {}
