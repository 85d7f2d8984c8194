"""The DTensor dialect: meshes and layouts with TensorFlow's names, defaults, text and bytes, and no TensorFlow.

| module | answers |
|---|---|
| `mesh`, `mesh_util` | meshes; meshes of clients and devices |
| `layout`, `layout_map` | layouts; layouts by name |
| `api` | tensors on a mesh, as numpy arrays |
| `device_spec`, `config` | names of devices; the client of this process |
| `proto` | messages of `layout.proto` |

What `tf.experimental.dtensor` writes for a valid mesh or layout is read here, and written again byte for byte. Where
TensorFlow is wrong, `docs/dtensor-differences.md` says what it does and what is done here.

>>> import numpy as np
>>> mesh = create_mesh({"x": 2, "y": 2}, device_type="TPU")
>>> layout = Layout(["x", UNSHARDED], mesh)
>>> [component.tolist() for component in unpack(copy_to_mesh(np.arange(4).reshape(2, 2), layout))]
[[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]
>>> Layout.from_string(layout.to_string()) == layout
True
"""

from .api import DTensor, check_layout, copy_to_mesh, fetch_layout, is_dtensor, pack, relayout, unpack
from .config import client_id, full_job_name, job_name, jobs, num_clients
from .device_spec import DeviceSpec
from .layout import MATCH, UNSHARDED, Layout, LayoutType
from .layout_map import LayoutMap, layout_map_scope
from .mesh import Mesh, MeshDimension
from .mesh_util import create_distributed_mesh, create_mesh
from .proto import LayoutProto, MeshDimensionProto, MeshProto, ShardingSpec

__all__ = [
    "MATCH",
    "UNSHARDED",
    "DTensor",
    "DeviceSpec",
    "Layout",
    "LayoutMap",
    "LayoutProto",
    "LayoutType",
    "Mesh",
    "MeshDimension",
    "MeshDimensionProto",
    "MeshProto",
    "ShardingSpec",
    "check_layout",
    "client_id",
    "copy_to_mesh",
    "create_distributed_mesh",
    "create_mesh",
    "fetch_layout",
    "full_job_name",
    "is_dtensor",
    "job_name",
    "jobs",
    "layout_map_scope",
    "num_clients",
    "pack",
    "relayout",
    "unpack",
]
