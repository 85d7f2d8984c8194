"""Folders of ranks of FSDP2 that are written: what each rank's file has, and what DTensors cannot hold."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw
from shardwise.store.data.location import open_file
from shardwise.store.formats.torch.tensors import Container
from tests.store.formats.torch.test_rank_states import check_all, unpacked

RULES = 'default = { axes = ["fsdp"], uneven = "ceil" }\n[rules]\n'


def rules(tmp_path: Path, *sizes: int) -> sw.LayoutMap:
    names = ["ddp", "fsdp"][-len(sizes) :]
    (tmp_path / "rules.toml").write_text(f"{RULES}[mesh]\nshape = {list(sizes)}\naxis_names = {json.dumps(names)}\n")
    return sw.LayoutMap.from_toml(tmp_path / "rules.toml")


def pickle_of(path: Path) -> Any:
    """What a file says, with inert records for tensors: read apart from names."""
    file = open_file(path)
    try:
        return Container(file).read_objects()
    finally:
        file.close()


@pytest.mark.parametrize("case", ["local_flat", "verl_fsdp2_ddp", "verl_fsdp1", "verl_fsdp1_orig_params"])
@pytest.mark.filterwarnings("ignore::shardwise.ShardwiseWarning")
def test_a_training_state_goes_to_other_worlds_and_back(case: str, tmp_path: Path) -> None:
    """The expected values are of the live tensors; twice re-cut, to one mesh axis and to two."""
    source = unpacked(case, tmp_path)
    for number, sizes in enumerate([(3,), (2, 2), (5,)]):
        new = tmp_path / f"new-{number}"
        sw.reshard_checkpoint(source, new, rules(tmp_path, *sizes), to="fsdp2")
        world = int(np.prod(sizes))
        assert json.loads((new / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": world}
        with sw.open_checkpoint(new) as checkpoint:
            assert checkpoint.format == "fsdp2"
            assert checkpoint.metadata["meshes"] == {str(sizes): checkpoint.metadata["meshes"][str(sizes)]}
            check_all(checkpoint, case)
        assert sw.verify_checkpoint(new).tensors
        # Also without a schedule: verl's loader asks for the file of each rank, and for this key in it.
        extra = [pickle_of(path) for path in new.glob("extra_state*")]
        assert len(extra) == world
        assert all(list(each) == ["lr_scheduler"] for each in extra)
        schedules = [each["lr_scheduler"] for each in extra]
        assert all(each["last_epoch"] == 0 for each in schedules) if case == "verl_fsdp1" else not any(schedules)
        source = new


@pytest.mark.filterwarnings("ignore:.*matches no rule:shardwise.ShardwiseWarning")
def test_each_rank_has_its_rows_and_a_file_is_one_of_torch_save(tmp_path: Path) -> None:
    """By hand: 5 rows among 4 ranks are 2, 2, 1 and none, as FSDP2 cuts them."""
    weight = np.arange(15, dtype=np.float32).reshape(5, 3)
    tensors = {"w": weight, "s": np.float32(2)}
    sw.save_checkpoint(tmp_path / "new", tensors, rules_without_steps(4), uneven="ceil", to="fsdp2")
    for rank, rows in enumerate([(0, 2), (2, 4), (4, 5), (5, 5)]):
        state = pickle_of(tmp_path / "new" / f"model_world_size_4_rank_{rank}.pt")
        held = state["w"].args[3][1]
        assert held["_local_tensor"].args[2] == (rows[1] - rows[0], 3)
        assert held["_spec"].state["tensor_meta"].args[0].args == ((5, 3),)
        mesh = held["_spec"].state["mesh"].state
        assert (mesh["_coordinate_on_dim"], mesh["_flatten_rank_map"], mesh["_rank"]) == ((rank,), (0, 1, 2, 3), rank)
        assert state["s"].name == "torch._utils._rebuild_tensor_v2"
    with sw.open_checkpoint(tmp_path / "new") as checkpoint:
        assert checkpoint.read("w").tolist() == weight.tolist()
        assert checkpoint["w"].boxes.tolist() == [[[0, 2], [0, 3]], [[2, 4], [0, 3]], [[4, 5], [0, 3]]]
        assert len(checkpoint["s"].replicas) == 3
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["fsdp_config.json", *(f"model_world_size_4_rank_{rank}.pt" for rank in range(4)), "shardwise.json"]


def rules_without_steps(world: int) -> sw.LayoutMap:
    mesh = sw.DeviceMesh((world,), ("fsdp",))
    layouts = sw.LayoutMap(mesh)
    layouts["w"] = sw.TensorLayout(("fsdp", None), mesh)
    return layouts


def test_what_dtensors_cannot_hold_is_refused(tmp_path: Path) -> None:
    mesh = sw.DeviceMesh((2, 2), ("a", "b"))
    layouts = {"w": sw.TensorLayout((("b", "a"), None), mesh)}
    tensors = {"w": np.zeros((4, 2), np.float32)}
    with pytest.raises(sw.LayoutError, match="tensor 'w' is cut in a way that a DTensor cannot be"):
        sw.save_checkpoint(tmp_path / "new", tensors, layouts, to="fsdp2")
    layouts = {"w": sw.TensorLayout((("a", "b"), None), mesh)}
    with pytest.raises(sw.LayoutError, match="stores only the mesh's device_type"):
        sw.save_checkpoint(tmp_path / "new", tensors, layouts, to="fsdp2", metadata={"a": "b"})
    with pytest.raises(sw.LayoutError, match="files for ranks need layouts with a mesh"):
        sw.save_checkpoint(tmp_path / "new", tensors, to="fsdp2")
    with pytest.raises(sw.LayoutError, match="mesh and layouts are both given"):
        sw.save_checkpoint(tmp_path / "new", tensors, layouts, mesh=mesh, to="fsdp2")
    with pytest.raises(sw.LayoutError, match="mesh is given, but layouts must say how the tensors are cut"):
        sw.save_checkpoint(tmp_path / "new", tensors, mesh=mesh, to="dcp")
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh or None"):
        sw.save_checkpoint(tmp_path / "new", tensors, mesh=4, to="fsdp2")  # type: ignore[arg-type]
    sw.save_checkpoint(tmp_path / "new", tensors, layouts, to="fsdp2", metadata={"device_type": "cuda"})
    state = pickle_of(tmp_path / "new" / "model_world_size_4_rank_3.pt")
    assert state["w"].args[3][1]["_spec"].state["mesh"].state["_device_type"] == "cuda"
