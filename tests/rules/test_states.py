"""Names of training states, as the frameworks write them for a model of 17 parameters and for optax's trees."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.rules.state_splits import MASTER, StateName
from shardwise.rules.states import training_names

BLOCK = "input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.q_proj.bias", "mlp.up_proj.weight"
#: Parameters of a model, whose own module is called `model`.
NAMES = [
    "model.scale",
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.{name}" for layer in range(2) for name in BLOCK),
    "model.norm.weight",
]
ADAM = "step", "exp_avg", "exp_avg_sq"
#: Keys of Megatron's `torch_dist`.
KEYS = ["embedding.word_embeddings.weight", "decoder.layers.mlp.linear_fc1.weight", "decoder.final_layernorm.bias"]
#: Leaves of a tree of flax, and what optax adds to a path for each of its states.
LEAVES = ["embed.embedding", "layer_0.attn.kernel", "layer_1.mlp.up.bias", "temperature"]
INNER = "opt_state.inner_opt_state.inner_states"
OPTAX: dict[str, dict[str, tuple[str, ...]]] = {
    "adamw": {"opt_state.0": ("mu", "nu")},
    "a chain": {"opt_state.1.inner_state.0": ("mu", "nu")},
    "adafactor": {"opt_state.0": ("v_row", "v_col", "v"), "opt_state.4": ("ema",)},
    "multisteps": {f"{INNER}.decay.inner_state.0": ("mu", "nu"), "opt_state": ("acc_grads",)},
    "sgd": {f"{INNER}.rest.inner_state.0": ("trace",)},
    "labels that are called as fields": {f"{INNER}.{label}.inner_state.0": ("mu", "nu") for label in "mv"},
    "something new": {"opt_state.2": ("hessian",)},
    "flax.nnx": {"optimizer.opt_state.0": ("mu", "nu")},
    "nested": {"state.opt_state.0": ("mu", "nu")},
}
OTHERS = [
    "opt_state.0.count",
    "opt_state.1.hyperparams.learning_rate",
    "opt_state.1.hyperparams.b1",
    "opt_state.mini_step",
    "step",
]


def torch_names(optimizer: str, kinds: tuple[str, ...] = ADAM) -> dict[str, tuple[str, str]]:
    """Names of states, and of each the parameter and the kind."""
    return {f"{optimizer}.state.{name}.{kind}": (name, kind) for name in NAMES for kind in kinds}


def check(weights: dict[str, str], states: dict[str, tuple[str, str]], others: list[str] | None = None) -> None:
    """Check what is said of these names, in any order: states are given by parameter and kind."""
    others = others or []
    names = [*weights.values(), *states, *others]
    for seed in range(3):
        random.Random(seed).shuffle(names)
        found = training_names(names)
        assert dict(found.weights) == weights
        assert {name: (state.parameter, state.kind) for name, state in found.states.items()} == states
        for name, state in found.states.items():
            assert state.before + state.parameter + state.after == name
            assert state.weight == weights.get(state.parameter)
        assert sorted(found.others) == sorted(others)
        assert all(found.is_state(name) for name in (*states, *others))
        assert not any(map(found.is_state, weights.values()))


class TestForms:
    @pytest.mark.parametrize(
        ("prefix", "optimizer"),
        [
            ("app.model.", "app.optim"),  # get_state_dict, under the user's own key
            ("model.", "optim"),
            ("", "optimizer"),  # torchtitan
            ("model.", "optimizer"),  # FSDP.optim_state_dict
            ("model.module.", "optimizer"),  # under DDP
            ("", "optimizer.0"),
            ("net.", "a.b.c.my_optimizer_1"),
        ],
    )
    def test_torch(self, prefix: str, optimizer: str) -> None:
        tied = {"lm_head.weight": f"{prefix}lm_head.weight"}
        check({name: prefix + name for name in NAMES} | tied, torch_names(optimizer))

    @pytest.mark.parametrize("kinds", [("momentum_buffer",), ("row_var", "col_var", "step"), ("shampoo.0.factor", "x")])
    def test_other_optimizers(self, kinds: tuple[str, ...]) -> None:
        check({name: f"model.{name}" for name in NAMES}, torch_names("optim", kinds))

    def test_two_optimizers(self) -> None:
        muon = {f"optimizer.0.state.{name}.momentum_buffer": (name, "momentum_buffer") for name in NAMES[1:]}
        check({name: name for name in NAMES}, muon | {f"optimizer.1.state.{NAMES[0]}.step": (NAMES[0], "step")})

    def test_two_models(self) -> None:
        """Parameters of the same names, each with its own optimizer beside it: weights keep their whole names."""
        names = [f"{model}.{part}" for model in ("generator", "critic") for part in ("net.w", "optim.state.w.exp_avg")]
        found = training_names(names)
        assert {name: state.weight for name, state in found.states.items()} == {
            f"{model}.optim.state.w.exp_avg": f"{model}.net.w" for model in ("generator", "critic")
        }
        assert dict(found.weights) == {name: name for name in ("generator.net.w", "critic.net.w")}

    @pytest.mark.parametrize("master", ["param", "fp32_param"])
    @pytest.mark.parametrize("chain", ["", "chained_0."])
    def test_megatron(self, master: str, chain: str) -> None:
        kinds = {master: MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
        states = {f"{chain}optimizer.state.{kind}.{key}": (key, said) for kind, said in kinds.items() for key in KEYS}
        check({key: key for key in KEYS}, states)

    def test_megatron_buffers(self) -> None:
        """They say no parameter, and no weight is what they are."""
        begin = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
        check({key: key for key in KEYS}, {}, [f"{begin}.{kind}" for kind in ("param", "exp_avg", "exp_avg_sq")])

    @pytest.mark.parametrize("form", OPTAX)
    @pytest.mark.parametrize("prefix", ["params.", "params.params.", "model."])
    def test_optax(self, form: str, prefix: str) -> None:
        states = {
            f"{path}.{kind}.{leaf}": (leaf, kind)
            for path, kinds in OPTAX[form].items()
            for kind in kinds
            for leaf in LEAVES
        }
        check({leaf: prefix + leaf for leaf in LEAVES}, states, OTHERS if "opt_state.0" in OPTAX[form] else [])

    def test_parameters_called_as_hyperparameters(self) -> None:
        states = {f"opt_state.1.inner_state.0.mu.{leaf}": (leaf, "mu") for leaf in ("b1", "v", "mu")}
        check({leaf: f"params.{leaf}" for leaf in ("b1", "v", "mu")}, states, OTHERS[:4])

    def test_a_state_without_its_weight(self) -> None:
        """A folder of an optimizer alone: accelerate's `optimizer_0`, Megatron's, optax's."""
        check({}, torch_names("optimizer"))
        check({}, {f"optimizer.state.exp_avg.{key}": (key, "exp_avg") for key in KEYS})
        check({}, {f"opt_state.0.mu.{leaf}": (leaf, "mu") for leaf in LEAVES}, ["opt_state.0.count"])
        check({}, torch_names("optim", ("exp_avg", "of_my_own")))

    def test_beside(self) -> None:
        others = ["lr_scheduler.last", "train_state.step", "rng_state.cpu", "optimizer.param_groups.0.lr"]
        check({name: name for name in NAMES}, torch_names("optimizer"), others)
        found = training_names(["app.model.w", "app.optim.state.w.step"])
        assert found.is_state("app.rng")
        assert not found.is_state("rng")
        assert not found.is_state("app.model._extra_state/shard_0_2")

    def test_values(self) -> None:
        """Groups may be the only sign of an optimizer: that without a moment, that which lies on top."""
        assert training_names(["model.w"], ["optim.param_groups.0.lr"]).is_state("optim.param_groups.0.lr")
        found = training_names(["state.w.exp_avg"], ["param_groups.0.lr"])
        assert found.states["state.w.exp_avg"] == StateName("w", "exp_avg", "state.", ".exp_avg")
        assert training_names(["w", "state.w.exp_avg", "param_groups.0.lr"]).others == ("param_groups.0.lr",)


class TestWeights:
    """Names that are a model's own: nothing is said to be a state that nobody knows to be one."""

    @pytest.mark.parametrize(
        "names",
        [
            ["model.state.proj.weight", "model.state.proj.bias"],
            ["state.encoder.weight", "state.encoder.step", "encoder_2.weight"],
            ["model.state.embed.variance", "model.embed.weight"],
            ["model.opt.decoder.weight", "opt.state_proj.weight", "model.optimizer.net.0.weight"],
            ["optimizer.net.weight", "optimizer.net.bias", "net.weight"],  # a learned optimizer
            ["step", "rng", "scheduler.weight", "param_groups_embed.weight"],
            ["m.param_groups.0.weight", "m.state.proj.weight", "m.head.weight", "proj.weight"],
            ["encoder.step", "decoder.exp_avg"],
            ["", ".", "..", "state.", "state..", "optim.", "a..b"],
        ],
    )
    def test_of_a_model(self, names: list[str]) -> None:
        found = training_names(names)
        assert not found.states
        assert not found.others
        assert sorted(found.weights.values()) == sorted(names)

    def test_a_module_called_state_that_is_trained(self) -> None:
        names = ["state.proj.weight", "optimizer.proj.step", "step.weight"]
        check({name: f"model.{name}" for name in names}, {
            f"optim.state.{name}.{kind}": (name, kind) for name in names for kind in ADAM
        })  # fmt: skip
        check({name: name for name in names}, {
            f"optim.state.{name}.{kind}": (name, kind) for name in names for kind in ADAM
        })  # fmt: skip

    def test_on_top(self) -> None:
        """A state dict of an optimizer on top of the names: its parameters are weights, and its kinds are known."""
        check({"w": "model.w"}, {"state.w.exp_avg": ("w", "exp_avg")})
        assert not training_names(["model.w", "state.w.gate"]).states

    def test_copies_of_weights(self) -> None:
        """Of several copies the weights are those of the model; if nothing says which, no weight is named."""
        state = "optim.state.w.exp_avg"
        assert training_names(["ema.w", "model.w", state]).states[state].weight == "model.w"
        found = training_names(["ema.w", "net.w", state])
        assert found.states[state] == StateName("w", "exp_avg", "optim.state.", ".exp_avg")
        assert sorted(found.weights) == ["ema.w", "net.w"]

    def test_the_longest(self) -> None:
        names = ["a", "a.b", "optim.state.a.b.step", "optim.state.a.step"]
        found = training_names(names).states
        assert {name: state.weight for name, state in found.items()} == {names[2]: "a.b", names[3]: "a"}

    def test_none_is_lost(self) -> None:
        """Two weights that would have one parameter's name keep their own."""
        found = training_names(["model.w", "w", "optim.state.w.step", "model.v", "optim.state.v.step"])
        assert dict(found.weights) == {name: name for name in ("model.w", "w", "model.v")}

    def test_no_state_is_a_weight(self) -> None:
        names = ["a.optimizer.mu.state.exp_avg", "a.optimizer.mu.mu.state.exp_avg"]
        assert not training_names(names).states


#: Parts of names that mean something, and some that do not.
PARTS = st.sampled_from(
    [
        *("model", "optim", "optimizer", "my_opt", "opt_state", "state", "params", "param_groups", "distributed", "a"),
        *("exp_avg", "step", "mu", "param", "fp32_param", "hyperparams", "inner_state", "0", "", "rng", "count", "w"),
    ]
)


def test_places_in_a_chain_of_optax() -> None:
    """Numbers there are no names of parameters in a list."""
    weights = {name: f"params.{name}" for name in ("head.0", "head.1", "layers.0.w")}
    states = {f"opt_state.0.{kind}.{name}": (name, kind) for name in weights for kind in ("mu", "nu")}
    check(weights, states, ["opt_state.0.count", "step"])


@pytest.mark.parametrize("prefix", ["", "model."])
def test_numbers_of_an_optimizer(prefix: str) -> None:
    """Numbers are no names, unless all parameters of the model are called by numbers: a `ParameterList` alone."""
    states = {f"optim.state.{number}.exp_avg": (f"{number}", "exp_avg") for number in range(3)}
    alone = {f"{number}": f"{prefix}{number}" for number in range(3)}
    check(alone, states, ["step"])
    for more in ("w", "list.0", "5.weight"):
        names = [*alone.values(), f"{prefix}{more}", *states]
        assert all(state.weight is None for state in training_names(names).states.values())
    inside = [f"{prefix}list.{number}" for number in range(3)]
    assert all(state.weight is None for state in training_names([*inside, f"{prefix}w", *states]).states.values())


@given(st.lists(st.lists(PARTS, min_size=1, max_size=6).map(".".join), unique=True, max_size=14), st.randoms())
def test_laws(names: list[str], chance: random.Random) -> None:
    """Each name is a weight, a state or another of the state, whatever the order; a state's weight is a weight."""
    found = training_names(names)
    assert sorted([*found.weights.values(), *found.states, *found.others]) == sorted(names)
    for name, state in found.states.items():
        assert state.before + state.parameter + state.after == name
        assert state.parameter
        assert state.kind
        assert state.weight is None or state.weight in found.weights.values()
    for name in names:
        assert found.is_state(name) == (name in found.states or name in found.others)
    chance.shuffle(names)
    again = training_names(names)
    assert (again.states, sorted(again.others)) == (found.states, sorted(found.others))
