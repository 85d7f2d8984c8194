"""Reports on layout maps: what they do to the tensors of a model, and what looks wrong.

| module | answers |
|---|---|
| `layout_rule` | one rule |
| `book` | what layout maps and deployments answer alike |
| `keyed`, `layout_map` | rules under patterns, as a mapping; their layouts by name |
| `search`, `pattern`, `templates` | which rule matches a name |
| `toml`, `toml_tables`, `toml_text` | rules files, read and written; files of TOML as tables that are checked |
| `shipped` | the files of the package, in the folder of examples |
| `names` | what names of sizes and of weights mean: `names.toml`, and what engines of a version do: `engines.toml` |
| `numbers`, `model_shapes`, `type_tensors` | sizes by name; shapes from a configuration, also of recorded types |
| `parameter_order` | the order of a model's parameters, from its configuration |
| `rewrites`, `rewrite`, `arrangement` | other names, orders and dims |
| `wrapped` | models within models for text and images |
| `tp_plan`, `ordered` | rules from plans of transformers, and from ordered lists of projects on JAX |
| `states`, `adapters` | names of training states and of adapters, and the weights that they belong to |
| `state_splits` | the name of a state taken apart |
| `optax` | names of optax's states in PyTorch |
| `within` | layouts of what rewrites take, by the rules for what they make |
| `left_out` | tensors and axes without a rule |
| `report_maker`, `report`, `tensor_report`, `problems` | what rules do to a model |
| `report_text`, `page`, `drawn` | reports as text, pages and pictures |
| `page_table` | the table of a page, a row for each group of tensors |
"""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .left_out import LeftOut
    from .ordered import logical_layouts
    from .problems import Clash, IndivisibleDim, Misfit, RankMismatch
    from .report import LayoutReport
    from .tensor_report import TensorReport

__all__ = [
    "Clash",
    "IndivisibleDim",
    "LayoutReport",
    "LeftOut",
    "Misfit",
    "RankMismatch",
    "TensorReport",
    "logical_layouts",
]

__getattr__, __dir__ = lazy(
    globals(),
    {
        "left_out": ("LeftOut",),
        "ordered": ("logical_layouts",),
        "problems": ("Clash", "IndivisibleDim", "Misfit", "RankMismatch"),
        "report": ("LayoutReport",),
        "tensor_report": ("TensorReport",),
    },
)
