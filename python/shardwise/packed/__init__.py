"""Packed dims: a dim that is several parts one after the other, as in fused weights.

| module | answers |
|---|---|
| `parts` | parts, factors, what is cut |
| `short` | the common cases |
| `notation` | the text of files and of the command line, read |
| `written` | the same, written |

`concat` and `part` spell one out, `parse` reads the notation of rules files and of the command line, and `qkv`,
`gate_up`, `experts` and `padded_vocab` are the common cases. Their results go wherever a spec may go in a layout.

>>> import shardwise as sw
>>> mesh = sw.DeviceMesh((8,), ("tp",))
>>> layout = sw.TensorLayout((sw.packed.qkv(64, 8, 128, "tp"), None), mesh)
>>> for piece in layout.partition((10240, 8192)).pieces("cpu:3"):
...     print(piece.box[0], piece.start)
slice(3072, 4096, None) (0, 0)
slice(8576, 8704, None) (1024, 0)
slice(9600, 9728, None) (1152, 0)
"""

from typing import TYPE_CHECKING

from .._lazy import lazy
from .parts import PackedDim, Part, concat, part
from .short import experts, gate_up, padded_vocab, qkv

if TYPE_CHECKING:
    from .notation import parse

__all__ = ["PackedDim", "Part", "concat", "experts", "gate_up", "padded_vocab", "parse", "part", "qkv"]


# What reads the notation is compiled when it is first wanted, which keeps `import shardwise` quick.
__getattr__, __dir__ = lazy(globals(), {"notation": ("parse",)})
