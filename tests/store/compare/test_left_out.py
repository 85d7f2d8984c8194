"""What does not arrive is counted and named by every verb, is a warning, and with `strict` an error (rule 2.23)."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.deploy import Deployment, DeploymentRule
from shardwise.store.rewritten.left_out import expression_for

from ..torch_files import ones, save, tensor

#: These tests are about what is said so, in the reports and in other ways.
pytestmark = pytest.mark.filterwarnings("ignore::shardwise.ShardwiseWarning")

WEIGHTS = {
    "decoder.layers.0.mlp.linear_fc2.weight": np.ones((8, 16), "f4"),
    "decoder.final_layernorm.weight": np.ones(8, "f4"),
}
MOMENTS = {
    f"optimizer.state.{kind}.{name}": value * 2
    for name, value in WEIGHTS.items()
    for kind in ("exp_avg", "exp_avg_sq", "fp32_param")
}
#: Three times the bytes of the weights, which are 128 + 8 numbers of four bytes.
LOST = 3 * 4 * (128 + 8)
DROP = (
    'drop = ["optimizer.{rest*}"]\n[rules]\n"fc2" = [[], []]\n"norm" = [[]]\n[mesh]\nshape = [1]\naxis_names = ["tp"]\n'
)


class Said(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> Said:
        status = main(list(map(str, arguments)))
        captured = capsys.readouterr()
        return Said(status, captured.out, captured.err)

    return run


@pytest.fixture
def state(tmp_path: Path) -> Path:
    sw.save_checkpoint(tmp_path / "a", WEIGHTS | MOMENTS, sync=False)
    (tmp_path / "r.toml").write_text(DROP)
    return tmp_path


class TestDropped:
    def test_reshard_and_plan(self, run: Any, state: Path) -> None:
        rules = "--source-rules", state / "r.toml"
        said = run("reshard", state / "a", state / "b", *rules, "--json", "--no-sync")
        assert said.status == 0
        (entry,) = said.json["left_out"]
        assert (entry["kind"], entry["count"], entry["bytes"]) == ("dropped", 6, LOST)
        assert sorted(entry["names"]) == sorted(MOMENTS)
        assert said.json["warnings"] == [entry["text"]]
        assert said.err.startswith("shardwise: warning: 6 tensors (1.6 KiB) are dropped by the rules: 'optimizer.state")
        for more in ([], ["--save", state / "p.swplan"]):
            planned = run("plan", state / "a", state / "c", *rules, "--json", *more)
            assert (planned.json["left_out"], planned.err) == ([entry], said.err)
        for verb in ("reshard", "plan"):
            strict = run(verb, state / "a", state / "c", *rules, "--strict")
            assert (strict.status, strict.out) == (1, "")
            assert strict.err == said.err.replace("warning", "error")
        assert not (state / "c").exists()
        # What the error advises.
        assert said.err.endswith("--drop '^(optimizer)[.]' says that this is wanted\n")
        asked = run(
            "reshard", state / "a", state / "c", *rules, "--strict", "--drop", "^(optimizer)[.]", "--json", "--no-sync"
        )
        assert (asked.status, asked.err, asked.json["warnings"]) == (0, "", [])
        (entry,) = asked.json["left_out"]
        assert (entry["kind"], sorted(entry["names"]), entry["bytes"]) == ("asked", sorted(MOMENTS), LOST)
        with sw.open_checkpoint(state / "c") as made, sw.open_checkpoint(state / "b") as other:
            assert set(made) == set(other) == set(WEIGHTS)

    def test_report(self, run: Any, state: Path) -> None:
        report = "report", state / "a", "--rules", state / "r.toml"
        said = run(*report, "--json")
        (entry,) = said.json["left_out"]
        assert (entry["kind"], sorted(entry["names"]), said.json["warnings"]) == (
            "dropped",
            sorted(MOMENTS),
            [entry["text"].replace("drop=", "--drop ")],
        )
        text = run(*report)
        assert (text.status, "warning: 6 tensors (1.6 KiB) are dropped" in text.out) == (0, True)
        strict = run(*report, "--strict")
        assert (strict.status, "error: 6 tensors (1.6 KiB) are dropped" in strict.out) == (1, True)
        asked = run(*report, "--strict", "--drop", "^(optimizer)[.]")
        assert (asked.status, "error" in asked.out, "6 tensors are left out" in asked.out) == (0, False, True)

    def test_diff(self, run: Any, state: Path) -> None:
        sw.save_checkpoint(state / "b", WEIGHTS, sync=False)
        # Without rules each is named.
        said = run("diff", state / "a", state / "b")
        assert (said.status, said.out.count("is only in the first")) == (1, 6)
        diff = "diff", state / "a", state / "b", "--source-rules", state / "r.toml"
        said = run(*diff)
        first, second = said.out.splitlines()
        assert (said.status, first) == (0, "the same tensors, as far as they were compared")
        assert second.startswith("warning: 6 tensors (1.6 KiB) are dropped by the rules: ")
        (entry,) = run(*diff, "--json").json
        assert (entry["what"], entry["kind"], sorted(entry["names"])) == ("not compared", "dropped", sorted(MOMENTS))
        assert run(*diff, "--strict").status == 1
        asked = run(*diff, "--strict", "--drop", "^(optimizer)[.]")
        assert (asked.status, asked.out.splitlines()[0]) == (0, "the same tensors")
        with pytest.warns(sw.ShardwiseWarning, match="6 tensors"):
            found = sw.diff_checkpoints(state / "a", state / "b", rewrites=sw.Rewrites(drop=["optimizer.{rest*}"]))
        assert found == []
        assert [each.kind for each in found.left_out] == ["dropped"]

    def test_in_python(self, state: Path) -> None:
        rewrites = sw.Rewrites(drop=["optimizer.{rest*}"])
        with pytest.warns(sw.ShardwiseWarning, match="6 tensors") as seen:
            report = sw.reshard_checkpoint(state / "a", state / "b", rewrites=rewrites, sync=False)
        assert [str(each.message) for each in seen] == list(report.warnings)
        assert seen[0].filename == __file__
        assert [(each.kind, len(each.names)) for each in report.left_out] == [("dropped", 6)]
        # Whoever has warnings raised has nothing written.
        with warnings.catch_warnings():
            warnings.simplefilter("error", sw.ShardwiseWarning)
            with pytest.raises(sw.ShardwiseWarning):
                sw.reshard_checkpoint(state / "a", state / "c", rewrites=rewrites, sync=False)
        assert not (state / "c").exists()

    def test_what_no_rewrite_takes(self, state: Path) -> None:
        rewrites = sw.Rewrites([{"from": "decoder.{rest*}", "to": "d.{rest*}"}], unmatched="drop")
        report = sw.reshard_checkpoint(state / "a", state / "b", rewrites=rewrites, sync=False)
        assert report.left_out == ()  # States go with their weights.
        with sw.open_checkpoint(state / "b") as made:
            assert set(made) & set(MOMENTS) == set()
            assert {name.replace(".d.", ".decoder.") for name in made} >= set(MOMENTS)

    def test_values_and_a_second_file_of_rules(self, tmp_path: Path) -> None:
        """Rules that come after others drop by the names of these; what is not a tensor is dropped as well."""
        held = {"w": tensor(ones(4), "0"), "old": tensor(ones(4), "1"), "opt": {"lr": 0.5}}
        (tmp_path / "m.pt").write_bytes(save(held))
        rewrites = sw.Rewrites([{"from": "old", "to": "new"}]) + sw.Rewrites(drop=["new", "opt.{rest*}"])
        report = sw.reshard_checkpoint(tmp_path / "m.pt", tmp_path / "b", rewrites=rewrites, to="hf", sync=False)
        (lost,) = report.left_out
        assert (lost.kind, lost.names, lost.nbytes) == ("dropped", ("old", "opt.lr"), 4 * 4)
        assert str(lost).startswith("1 tensor (16 B) and 1 value are dropped by the rules: 'old', 'opt.lr'; drop='")

    def test_a_drop_that_finds_nothing(self, state: Path) -> None:
        with pytest.raises(sw.LayoutError, match="drop is 'optimiser', which is found in no name"):
            sw.reshard_checkpoint(state / "a", state / "b", drop="optimiser", strict=True)

    def test_only_is_asked_for(self, state: Path) -> None:
        report = sw.reshard_checkpoint(state / "a", state / "b", only="^decoder", strict=True, sync=False)
        assert [(each.kind, set(each.names)) for each in report.left_out] == [("asked", set(MOMENTS))]
        assert report.warnings == ()

    @pytest.mark.parametrize(
        ("names", "others"),
        [
            (["opt.a", "opt.b"], ["model.opt.a"]),
            (["h.0.attn.bias", "h.1.attn.bias"], ["h.0.attn.w", "h.0.mlp.bias"]),
            (["h.0.inv_freq"], ["h.0.w", "inv_freq.w"]),
            (["a"], ["ab", "a.b"]),
            # As PyTorch's DCP has groups and a scheduler: too many last parts of names to list, and three beginnings.
            (
                [*(f"{part}.{at}" for part in ("optim.groups.0", "scheduler") for at in "abcdefghi"), "step"],
                ["optim.state.0.w.step", "model.w"],
            ),
            # As Megatron has states of FP8: a word in the middle of each.
            (
                [*(f"h.{i}.{word}._extra_state/shard_{i}_20" for i in range(20) for word in "qko"), "iteration"],
                ["h.0.q.weight", "h.iterations.w"],
            ),
        ],
    )
    def test_the_expression_that_is_advised(self, names: list[str], others: list[str], tmp_path: Path) -> None:
        """Carried out, it leaves out these and no others."""
        found = expression_for(names, [*names, *others])
        assert found is not None
        sw.save_checkpoint(tmp_path / "a", dict.fromkeys([*names, *others], np.ones(1)), sync=False)
        sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", drop=found, strict=True, sync=False)
        with sw.open_checkpoint(tmp_path / "b") as made:
            assert set(made) == set(others)


class TestStates:
    """States of an optimizer are of use with their weights only."""

    @pytest.mark.parametrize(
        "names",
        [
            ("optim.state.model.a.weight.exp_avg", "model.a.weight"),
            ("optimizer.state.exp_avg_sq.decoder.x", "decoder.x"),
            ("app.optim.state.a.w.momentum_buffer", "app.model.a.w"),
        ],
    )
    def test_with_and_without(self, names: tuple[str, str], tmp_path: Path) -> None:
        moment, weight = names
        sw.save_checkpoint(tmp_path / "a", {moment: np.ones(3), weight: np.ones(3)}, sync=False)
        assert sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", sync=False).left_out == ()
        report = sw.reshard_checkpoint(tmp_path / "a", tmp_path / "c", only="state", sync=False)
        assert [(each.kind, each.names) for each in report.left_out] == [("states", (moment,)), ("asked", (weight,))]
        assert report.warnings == (f"1 optimizer state is among the tensors without its weight: {moment!r}",)


class TestUnmatched:
    """A tensor for which a deployment has no rule has no place: no verb puts it anywhere."""

    @pytest.fixture
    def files(self, tmp_path: Path) -> Path:
        sw.save_checkpoint(tmp_path / "m", {"h.0.w": np.ones((4, 4)), "x": np.ones(3), "y": np.ones(3)}, sync=False)
        text = '[meshes]\nm = { shape = [2, 2], axis_names = ["pp", "tp"] }\n[rules]\n'
        (tmp_path / "d.toml").write_text(text + "'h.{i}.w' = { axes = ['tp', []], at = { pp = 0 } }\n")
        (tmp_path / "all.toml").write_text("default = 'replicated'\n" + (tmp_path / "d.toml").read_text())
        return tmp_path

    @pytest.mark.parametrize("to", ["ranks", "sharded", "dcp", "hf"])
    @pytest.mark.parametrize("more", [[], ["--strict"]])
    def test_every_verb_refuses(self, run: Any, files: Path, to: str, more: list[str]) -> None:
        assert run("report", files / "m", "--rules", files / "d.toml", *more).status == 1
        for verb in ("reshard", "plan"):
            said = run(verb, files / "m", files / "out", "--rules", files / "d.toml", "--to", to, *more)
            assert (said.status, said.out) == (2, "")
            assert (
                "2 tensors match no rule of the deployment, which has no default, so no device holds them" in said.err
            )
            assert "'x', 'y'" in said.err
        assert not (files / "out").exists()

    def test_the_ways_on(self, run: Any, files: Path) -> None:
        assert run("reshard", files / "m", files / "a", "--rules", files / "all.toml", "--to", "ranks").status == 0
        out = run("reshard", files / "m", files / "b", "--rules", files / "d.toml", "--to", "ranks", "--drop", "^[xy]$")
        assert out.status == 0
        with sw.open_checkpoint(files / "a") as made, sw.open_checkpoint(files / "b") as less:
            assert (set(made), set(less)) == ({"h.0.w", "x", "y"}, {"h.0.w"})

    def test_reading_a_device(self, tmp_path: Path) -> None:
        sw.save_checkpoint(tmp_path / "m", {"w": np.ones(2), "x": np.ones(3)}, sync=False)
        placed = Deployment(2, sw.DeviceMesh((2,), ("tp",)), {"w": DeploymentRule(("tp",))})
        with (
            sw.open_checkpoint(tmp_path / "m") as checkpoint,
            pytest.raises(sw.LayoutError, match=r"1 tensor matches no rule of the deployment.*'x'"),
        ):
            sw.store.device_reads(checkpoint, placed, "cpu:0")

    def test_a_weight_with_its_states_is_one_tensor(self, tmp_path: Path) -> None:
        trained = {name: np.ones(2) for name in ("v", "w", "optim.state.w.exp_avg", "optim.state.w.exp_avg_sq")}
        sw.save_checkpoint(tmp_path / "m", trained, sync=False)
        placed = Deployment(2, sw.DeviceMesh((2,), ("tp",)), {"^v$": DeploymentRule(("tp",))})
        with sw.open_checkpoint(tmp_path / "m") as checkpoint:
            for verb in (
                lambda: sw.save_checkpoint(tmp_path / "a", trained, placed),
                lambda: sw.reshard_checkpoint(tmp_path / "m", tmp_path / "a", placed),
                lambda: sw.store.device_reads(checkpoint, placed, "cpu:0"),
            ):
                with pytest.raises(sw.LayoutError, match=r"^1 tensor matches no rule of the deployment.*: 'w';"):
                    verb()

    def test_saving(self, tmp_path: Path) -> None:
        mesh = sw.DeviceMesh((2,), ("tp",))
        placed = Deployment(2, mesh, {"w": DeploymentRule(("tp",))})
        with pytest.raises(sw.LayoutError, match="1 tensor matches no rule of the deployment"):
            sw.save_checkpoint(tmp_path / "a", {"w": np.ones(2), "x": np.ones(3)}, placed)
        rules = sw.LayoutMap(mesh)
        rules["w"] = ("tp",)
        with pytest.warns(sw.ShardwiseWarning, match="1 name matches no rule"):
            report = sw.save_checkpoint(tmp_path / "a", {"w": np.ones(2), "x": np.ones(3)}, rules)
        assert [(each.kind, each.names) for each in report.left_out] == [("unmatched", ("x",))]
        with pytest.raises(sw.LayoutError, match="1 name matches no rule"):
            sw.save_checkpoint(tmp_path / "b", {"w": np.ones(2), "x": np.ones(3)}, rules, strict=True)
        assert not (tmp_path / "b").exists()


class TestAxes:
    """An axis that no rule uses replicates: that is said, unless the rules say that it is wanted."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        sw.save_checkpoint(tmp_path / "m", {"w": np.ones((4, 4), "f4")}, sync=False)
        (tmp_path / "r.toml").write_text("[rules]\n'w' = ['tp', []]\n")
        (tmp_path / "meant.toml").write_text("replicated = ['pp']\n[rules]\n'w' = ['tp', []]\n")
        return tmp_path

    @pytest.mark.parametrize("verb", ["report", "reshard", "plan"])
    def test_verbs(self, run: Any, model: Path, verb: str) -> None:
        def ask(mesh: str, rules: str, *more: str) -> Said:
            out = [] if verb == "report" else [model / f"out{len(list(model.iterdir()))}"]
            found = run(verb, model / "m", *out, "--rules", model / rules, "--mesh", mesh, *more)
            assert isinstance(found, Said)
            return found

        said = ask("pp=2,tp=2", "r.toml", "--json")
        (entry,) = said.json["left_out"]
        assert (said.status, entry["kind"], entry["names"]) == (0, "axes", ["pp"])
        assert entry["text"] in said.json["warnings"]
        assert ask("pp=2,tp=2", "r.toml", "--strict").status == 1
        # The ways on that it names, and an axis that cuts nothing since it has one coordinate.
        for mesh, rules in (("tp=2", "r.toml"), ("pp=2,tp=2", "meant.toml"), ("pp=1,tp=2", "r.toml")):
            assert ask(mesh, rules, "--strict").status == 0

    def test_a_deployment(self) -> None:
        mesh = sw.DeviceMesh((2, 2, 2), ("pp", "dp", "tp"))
        rules = {"w": DeploymentRule(("tp",), at={"pp": 0})}
        (found,) = Deployment(8, {"dense": mesh}, rules).report({"w": (2,)}).left_out
        assert (found.kind, found.names) == ("axes", ("dp",))
        assert "of the mesh 'dense'" in str(found)
        assert Deployment(8, mesh, rules, replicated=["dp"]).report({"w": (2,)}).ok
        # Of a mesh by which nothing is placed nothing is said; a sub-axis uses its axis.
        more = {"dense": mesh, "expert": sw.DeviceMesh((8,), ("ep",))}
        split = {"w": DeploymentRule((("dp", "tp:(1)2"),), "dense", at={"pp": 0})}
        assert Deployment(8, more, split).report({"w": (4,)}).ok

    def test_it_goes_with_the_rules(self, tmp_path: Path) -> None:
        mesh = sw.DeviceMesh((2, 2), ("dp", "tp"))
        for made in (
            sw.LayoutMap(mesh, replicated=["dp"]),
            Deployment(4, mesh, {"w": ("tp",)}, replicated=["dp"]),
        ):
            made.to_toml(tmp_path / "r.toml")
            back = type(made).from_toml(tmp_path / "r.toml")
            assert (back, back.replicated) == (made, ("dp",))
        with pytest.raises(TypeError, match="replicated must be a sequence of names of axes"):
            sw.LayoutMap(mesh, replicated="dp")
        (tmp_path / "r.toml").write_text("replicated = 'dp'\n[rules]\n")
        with pytest.raises(sw.ParseError, match="replicated"):
            sw.LayoutMap.from_toml(tmp_path / "r.toml")


class TestBeside:
    """Files with tensors in the folder of a checkpoint that nobody reads."""

    FILES = ("optimizer.ema", "rng_state.pth", "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt")

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        sw.save_checkpoint(tmp_path / "m", {"w": np.ones(3)}, to="hf", sync=False)
        (tmp_path / "m" / "shardwise.json").unlink()
        for name in (*self.FILES, "config.json"):
            (tmp_path / "m" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "m" / name).write_bytes(b"{}")
        (tmp_path / "r.toml").write_text("[rules]\n'w' = ['tp']\n")
        return tmp_path

    @pytest.mark.parametrize("verb", ["inspect", "report", "verify", "diff", "reshard", "plan"])
    def test_verbs(self, run: Any, folder: Path, verb: str) -> None:
        sw.reshard_checkpoint(folder / "m", folder / "one.safetensors", sync=False)
        more: dict[str, list[object]] = {
            "report": ["--rules", folder / "r.toml", "--mesh", "tp=3"],
            "diff": [folder / "one.safetensors"],
            "reshard": [folder / "n"],
            "plan": [folder / "n"],
        }
        strict = run(verb, folder / "m", *more.get(verb, []), "--strict")
        assert strict.status == 1
        said = run(verb, folder / "m", *more.get(verb, []))
        for each, what in ((said, "warning: "), (strict, "error: ")):
            text = each.out + each.err
            assert f"{what}3 files are not read, next to " in text
            assert all(name in text for name in self.FILES)
        if verb == "reshard":
            more[verb] = [folder / "again"]
        found = run(verb, folder / "m", *more.get(verb, []), "--json").json
        (entry,) = found if verb == "diff" else found["left_out"]
        assert (entry["kind"], sorted(entry["names"])) == ("beside", sorted(self.FILES))

    @pytest.mark.parametrize("verb", ["report", "diff", "reshard", "plan"])
    def test_they_may_be_dropped_by_name(self, run: Any, folder: Path, verb: str) -> None:
        sw.reshard_checkpoint(folder / "m", folder / "one.safetensors", sync=False)
        more: dict[str, list[object]] = {
            "report": ["--rules", folder / "r.toml", "--mesh", "tp=3"],
            "diff": [folder / "one.safetensors"],
        }
        asked = "--strict", "--json", "--drop", "^(optimizer|rng_state|global_step2/)"
        said = run(verb, folder / "m", *more.get(verb, [folder / "n"]), *asked)
        assert (said.status, said.err) == (0, "")
        (entry,) = said.json if verb == "diff" else said.json["left_out"]
        assert (entry["kind"], sorted(entry["names"])) == ("asked", sorted(self.FILES))

    def test_around_a_file_anything_may_lie(self, run: Any, folder: Path) -> None:
        for verb in ("inspect", "verify"):
            said = run(verb, folder / "m" / "model.safetensors", "--strict")
            assert (said.status, "not read" in said.out) == (0, False)

    def test_stray_files_of_the_same_kind(self, tmp_path: Path) -> None:
        sw.save_checkpoint(tmp_path / "d", {"w": np.ones(4)}, to="dcp", sync=False)
        assert sw.verify_checkpoint(tmp_path / "d").left_out == ()
        (tmp_path / "d" / "__7_0.distcp").write_bytes(b"x")
        with pytest.warns(sw.ShardwiseWarning, match="__7_0"):
            (found,) = sw.verify_checkpoint(tmp_path / "d").left_out
        assert (found.kind, found.names) == ("beside", ("__7_0.distcp",))

    def test_names_tell_only_what_holds_no_tensors(self, tmp_path: Path) -> None:
        """What is not known to be a text, a picture or a log may be an optimizer, as deep as it may lie."""
        sw.save_checkpoint(tmp_path / "a", WEIGHTS, to="hf", sync=False)
        lost = ["model.ema", "moments.zst", "optimizer", "a/b/c/state.db", "optim.zarr/0.0"]
        for name in [
            *lost,
            "README.md",
            "a/figure.png",
            "LICENSE",
            "latest",
            ".cache/x.bin",
            "events.out.tfevents.1.x",
        ]:
            (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "a" / name).write_bytes(b"x")
        with pytest.warns(sw.ShardwiseWarning, match="5 files are not read"):
            report = sw.reshard_checkpoint(tmp_path / "a", tmp_path / "b", to="hf", sync=False)
        (found,) = report.left_out
        assert sorted(found.names) == sorted(lost)
