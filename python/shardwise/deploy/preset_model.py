"""The model that a preset is made for: its configuration, its rules, and the form of files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .._arguments import integer
from ..errors import LayoutError
from ..rules.model_shapes import is_tied
from ..rules.names import stated
from ..rules.shipped import example_rules
from ..rules.toml import read_compared, read_models
from ..rules.wrapped import language_config, model_types

__all__ = ["PresetModel"]


class PresetModel(NamedTuple):
    """The model, the rules and the form of files for which a preset is made."""

    config: Mapping[str, Any]
    rules: Any
    form: str | None

    def file(self, engine: str, *others: str) -> Any:
        """Return the rules file of an engine for the model's family, or for one whose file is for this family too."""
        if self.rules is not None:
            return self.rules
        types = model_types(self.config)
        if not types:
            raise LayoutError(
                "the model's configuration has no model_type, so it is not known which rules to take: give its "
                "config.json, or rules"
            )
        known = example_rules()
        for folder in (engine, *others):
            found = [
                name
                for name in known
                if name.startswith(f"{folder}/")
                and not name.endswith("-mtp")
                and not {*types}.isdisjoint(read_models(known[name]))
                and (folder == engine or engine in " ".join(read_compared(known[name])).lower())
            ]
            if len(found) > 1:
                found = self._chosen(found)
            if found:
                return found[0]
        raise LayoutError(
            f"the package has no rules for models of the type {' with '.join(types)} in {engine}: give the rules file "
            "of another family that has the same names, or one of your own; `shardwise rules` lists all"
        )

    def _chosen(self, names: list[str]) -> list[str]:
        """Return that one of several files for models of one type that fits this model.

        Raises:
            LayoutError: if the configuration does not tell.
        """
        method = self.config.get("quantization_config") or {}
        told = {
            "-mxfp4": isinstance(method, Mapping) and method.get("quant_method") == "mxfp4",
            "/falcon-7b": not language_config(self.config).get("new_decoder_architecture", False),
        }
        for end, is_so in told.items():
            one = [name for name in names if name.endswith(end)]
            if one:
                names = one if is_so else [name for name in names if name not in one]
        if len(names) > 1:
            raise LayoutError(
                f"several rules are for this type of models: {', '.join(names)}; give one of them as rules"
            )
        return names

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        said = language_config(self.config)
        found = stated(said, "layers")
        kinds = said.get("layers_block_type") or said.get("hybrid_override_pattern")
        if found is None and isinstance(kinds, (list, str)) and kinds:
            return len(kinds)
        if found is None:
            raise LayoutError("the model's configuration does not say how many layers there are (num_hidden_layers)")
        return integer(f"config[{found[0]!r}]", found[1])

    @property
    def is_tied(self) -> bool:
        """True if the output layer is the embedding."""
        return is_tied(self.config)

    @property
    def config_if_any(self) -> Mapping[str, Any] | None:
        """The configuration, if there is one."""
        return self.config or None

    @property
    def experts(self) -> int:
        """The number of routed experts."""
        found = stated(language_config(self.config), "experts")
        return 0 if found is None else integer(f"config[{found[0]!r}]", found[1])

    @property
    def predicted(self) -> int:
        """The number of layers that predict further tokens."""
        name = "num_nextn_predict_layers"
        return integer(f"config[{name!r}]", language_config(self.config).get(name) or 0)
