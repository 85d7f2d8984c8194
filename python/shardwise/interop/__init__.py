"""Layouts in the dialects of other frameworks and compilers, and back.

| module | dialect | needs |
|---|---|---|
| `shardwise.interop.jax` | `PartitionSpec`, `NamedSharding`, meshes and arrays of JAX | JAX |
| `shardwise.interop.torch` | placements, meshes and local tensors of PyTorch | PyTorch only for its objects |
| `shardwise.interop.hlo` | XLA's `HloSharding` text | nothing |
| `shardwise.interop.shardy` | Shardy's text | nothing |
| `shardwise.interop.spmd_types` | types per mesh axis | the package only for its objects |
| `shardwise.interop.megatron` | Megatron's rank offsets; recordings | Megatron-Bridge only for recordings |
| `shardwise.interop.transformers` | tensor-parallel plans of Hugging Face's models | transformers and PyTorch |
| `shardwise.interop.tensorflow` | `Mesh` and `Layout` objects of DTensor | TensorFlow |
| `shardwise.interop.keras` | `keras.distribution`; models under `layout_map_scope` | Keras 3 |
| `shardwise.interop.tf_variable` | plain `tf.Variable`s under `layout_map_scope` | TensorFlow |
| `shardwise.interop.vllm`, `shardwise.interop.sglang` | loaders that these engines import | the engine |
| `shardwise.interop.translation` | `translate`: one layout in all of them, as text | nothing |

TensorFlow's text and bytes are in `shardwise.dtensor`; the names of Keras are those of `shardwise` itself. Each
conversion is exact, or raises an error that says what cannot be expressed. `translate` shows a layout in all of them.
Each module is loaded when it is first used: `shardwise.interop.hlo` needs no import of its own.
"""

from .._lazy import lazy
from .translation import DIALECTS, translate

__all__ = ["DIALECTS", "translate"]

# Not listed by `dir`: a module whose framework is missing cannot be imported.
__getattr__, _ = lazy(
    globals(),
    {},
    (
        "hlo",
        "jax",
        "keras",
        "megatron",
        "sglang",
        "shardy",
        "spmd_types",
        "tensorflow",
        "torch",
        "transformers",
        "vllm",
    ),
)
