"""What deployments refuse, each with its message, and the sizes beside those that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwise import DeviceMesh, LayoutError, MeshError
from shardwise.deploy import Deployment, DeploymentRule, ExpertMap, Stages, balanced_experts, fsdp2, megatron
from shardwise.deploy.stages import Chunk

from ..checks import refused


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "why"),
    [
        (8, 2, 2, ""),
        (6, 2, 2, "3 layers on each stage are not divisible by vpp, 2"),
        (12, 4, 2, "3 layers on each stage are not divisible by vpp, 2"),
        (7, 2, None, "7 layers are not divisible by pp, 2"),
    ],
)
def test_chunks_of_equal_stages(layers: int, pp: int, vpp: int | None, why: str) -> None:
    """Megatron's `TransformerConfig`: `num_layers / pipeline_model_parallel_size` must divide by the chunks."""
    if why:
        with refused(LayoutError, why):
            megatron.pipeline(layers, pp, vpp=vpp)
    else:
        assert [len(stage) for stage in megatron.pipeline(layers, pp, vpp=vpp).chunks] == [vpp] * pp


@pytest.mark.parametrize("counts", [{"embedding_counts": True}, {"loss_counts": True}])
def test_chunks_where_the_embedding_or_the_loss_counts(counts: Any) -> None:
    """Five layers and one that counts are three places on each of two stages."""
    with refused(
        LayoutError, "3 layers, with the embedding or the loss counted, on each stage are not divisible by vpp, 2"
    ):
        megatron.pipeline(5, 2, vpp=2, **counts)
    assert [len(stage) for stage in megatron.pipeline(7, 2, vpp=2, **counts).chunks] == [2, 2]


def test_layers_of_multi_token_prediction_come_last() -> None:
    assert megatron.pipeline(2, 2, layout="Et|tmL", mtp=1).stage == (0, 1)
    assert megatron.pipeline(2, 2, layout="Et|tL").stage == (0, 1)
    with refused(LayoutError, "has layers after those of multi-token prediction"):
        megatron.pipeline(2, 2, layout="Et|mtL", mtp=1)


@pytest.mark.parametrize("chunks", ["t", 3, [Chunk((0,)), "t"], {0}])
def test_a_stage_that_is_none(chunks: Any) -> None:
    with refused(TypeError, "chunks[1] must be chunks or a list of layers"):
        Stages([[0], chunks])


def test_layers_are_counted_from_0_and_lie_on_one_stage() -> None:
    with refused(LayoutError, "layers is [1, -1]; layers are counted from 0"):
        Chunk((1, -1))
    with refused(LayoutError, "mtp is [-1]; layers are counted from 0"):
        Chunk((), mtp=(-1,))
    with refused(LayoutError, "layer 0 is on no stage, of 1 layer"):
        _ = Stages([[1], []]).stage
    with refused(LayoutError, "layer 1 is on stage 0 and on stage 1"):
        _ = Stages([[0, 1], [1]]).stage
    assert Stages([[0], [2, 1]]).stage == (0, 1, 1)
    with refused(LayoutError, "layer 2 is on no stage, of 4 layers"):
        _ = Stages([[0], [1]], num_layers=4).stage
    with refused(LayoutError, "layer 1 is on no stage, of 3 layers"):
        _ = Stages([[0], [2, 3]], num_layers=2).stage
    assert Stages([[0], [1, 2]], num_layers=2).stage == (0, 1, 1)  # As many as are there, if that is more.


def test_worlds_by_number_label_and_mesh() -> None:
    def world(given: Any) -> DeviceMesh:
        return Deployment(given, {"m": DeviceMesh((2,), ("tp",), ["a", "b"])}, {}).world

    assert list(world(["a", "b"]).devices.flat) == ["a", "b"]
    assert list(world(np.array(["a", "b"])).devices.flat) == ["a", "b"]
    assert Deployment(2, {"m": DeviceMesh((2,), ("tp",))}, {}).world.size == 2
    for given in ("ab", b"ab", 2.5, None):
        with refused(TypeError, "world must be a number of devices, their labels or a mesh"):
            world(given)


@pytest.mark.parametrize("name", ["", "world", 3])
def test_names_that_no_mesh_can_have(name: Any) -> None:
    with refused(LayoutError, "cannot be the name of a mesh"):
        Deployment(2, {name: DeviceMesh((2,), ("tp",))}, {})


def test_the_least_sizes() -> None:
    assert fsdp2(1).partition("norm.weight", (6,)).num_shards == (1,)
    sizes: Any
    for sizes, name in (((0,), "shard"), ((2, 0), "replicate"), ((2, 1, -1), "tp")):
        with refused(MeshError, f"{name} is {min(sizes)}; it must be at least 1"):
            fsdp2(sizes[0], **dict(zip(("replicate", "tp"), sizes[1:], strict=False)))
    assert ExpertMap(((), ())).num_experts == 0
    assert ExpertMap(((0,), (1, 0))).num_experts == 2


def test_tensor_parallel_rows_are_cut_again_in_chunks() -> None:
    """PyTorch chunks once per mesh dim: 9 rows are 5 and 4, and these 2, 2, 1, 0 and 1 each."""
    layout = fsdp2(4, tp=2, tp_rules={"up_proj": ("tp", None)})
    rows = [stop - start for start, stop in layout.partition("up_proj.weight", (9, 4)).boxes()[:, 0].tolist()]
    assert rows == [2, 1, 2, 1, 1, 1, 0, 1]  # Devices are (shard, tp), tp minor.


def test_what_pipelines_numbers_and_experts_cannot_be() -> None:
    with refused(LayoutError, "layout cannot be given with first, last, embedding_counts or loss_counts"):
        megatron.pipeline(2, 2, layout="Et|tL", first=1)
    for name in ("1a", "a-b", "", 3):
        with refused(LayoutError, "is not a name of letters, digits and _"):
            Deployment(2, {"m": DeviceMesh((2,), ("tp",))}, {}, numbers={name: 1})  # type: ignore[dict-item]
    with refused(LayoutError, "at['tp'] is empty; give at least one coordinate"):
        DeploymentRule((None,), "m", at={"tp": []})


def test_round_robin_gives_one_rank_more_than_experts() -> None:
    """vLLM starts with as many ranks as experts, and one more; each expert is still once there."""
    for ep in (4, 5):
        assert sorted(slot for slots in ExpertMap.round_robin(4, ep=ep).slots for slot in slots) == [0, 1, 2, 3]
    with refused(LayoutError, "ep is 6"):
        ExpertMap.round_robin(4, ep=6)


def test_a_rank_that_has_an_expert_twice_is_listed_once() -> None:
    assert ExpertMap(((0, 0, 1), (1, 0))).where == ((0, 1), (0, 1))
    assert ExpertMap(((1, 0, 1, 1),)).where == ((0,), (0,))


def test_more_experts_than_slots() -> None:
    with refused(LayoutError, "slots is 2; it must be at least the number of experts, 4"):
        balanced_experts([[1, 2, 3, 4]], slots=2, ep=2)
    with refused(LayoutError, "must be from 1 to"):
        balanced_experts([[1, 2, 3, 4]], slots=4, ep=0)
    assert len(ExpertMap.even(1, 1).slots) == 1
    with refused(LayoutError, "ep is 0; it must be from 1"):
        ExpertMap.even(4, 0)
    with refused(MeshError, "world is 0; it must be from 1"):
        megatron.Ranks(0)


def test_one_stage_may_have_chunks_of_other_lengths() -> None:
    """As Megatron, which asks for equal chunks only where there is a pipeline."""
    assert megatron.pipeline(3, pp=1, vpp=2).stage == (0, 0, 0)
    with refused(LayoutError, "are not divisible by vpp, 2"):
        megatron.pipeline(6, pp=2, vpp=2)


@pytest.mark.parametrize(
    ("layers", "pp", "own", "message"),
    [
        (4, 3, {"first": 5}, "first is 5, but there are only 4 layers"),
        (4, 2, {"first": 3, "last": 2}, "first is 3 and last is 2, but there are only 4 layers"),
        (4, 2, {"first": 1, "last": 2}, "first is 1 and last is 2: 1 of 4 layers are left for 0 stages in the middle"),
        (4, 3, {"last": 4}, "last is 4: 0 of 4 layers are left for 2 stages in the middle"),
    ],
)
def test_first_and_last_are_named_where_they_leave_no_layers(
    layers: int, pp: int, own: dict[str, Any], message: str
) -> None:
    with refused(LayoutError, message):
        megatron.pipeline(layers, pp, **own)
