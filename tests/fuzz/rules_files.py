"""Commands of the command line with rules files, configurations and arguments that nobody means.

Whatever a file or an argument holds, a command ends with a sentence on the standard error and a status. It is run in
this process, by its main function.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from shardwise import save_checkpoint
from shardwise.cli import main

#: The names and shapes of the model, and its configuration, which are drawn into.
NAMES = {
    "model.embed_tokens.weight": [16, 8],
    "model.layers.0.self_attn.q_proj.weight": [8, 8],
    "model.layers.1.self_attn.q_proj.weight": [8, 8],
    "model.layers.0.self_attn.k_proj.weight": [4, 8],
    "model.layers.0.mlp.experts.0.up_proj.weight": [12, 8],
    "model.layers.0.mlp.experts.1.up_proj.weight": [12, 8],
    "norm": [8],
    "scalar": [],
}
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 8,
    "head_dim": None,
    "vocab_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "text_config": {"num_experts": 2},
}

_KEYS = """
rules default match mesh numbers lists world meshes parameters rewrite drop after unmatched backtracking compared prefix
axes packed uneven shared optional unreduced shape axis_names devices size label at stages layers experts slots ep
redundant placement layout pp vpp first last name parts stack from to where also dim dims transpose pad_to zigzag
refused n heads stage tp a.b Ω
"""
_TEXTS = r"""
tp pp dp None - null tp:(1)2 tp:(2)2 m replicated search fullmatch keep drop refuse ceil even chunk balanced floor
linear hf/llama vllm/llama own.toml num_attention_heads heads n stage[i] stage[0] i//2 heads//0 a.b layers\.{i}\.
q_proj .* ( [
\d+ (?i)x (?=a) ((a{1,50}){1,50}){1,50} (a+)+$ é h.{i} {i}.{j} {rest*} {q,k} {i+1} {i*2+j} { {{ b.{i} {i}{i}{i}
model.{rest*} model.layers.{i}.self_attn.{q,k}_proj.weight (4@tp/max8) (n@tp) (8@tp/unit4/pad64each)
E|t*2|L Et|tL cpu:{} gpu:{}{} 9223372036854775807 1e5 0x10 __proto__ .. / -1 \b
"""
_MESHES = """tp=2 tp=2 tp=2,pp=2 pp=2 m=4 tp=0 tp tp=2,tp=2 = tp=9223372036854775807 tp=99999999999,pp=99999999999
é=2"""
KEYS = [*_KEYS.split(), "", "\0"]
MESHES = _MESHES.split()
TEXTS = [*_TEXTS.split(),
    "", "-" * 40, "(" * 40, "9" * 30, "i // 2", "(4@tp 2)", "q:(n@tp) + k:(n)", "(2 [q:4*n k:n])",
    "(heads@tp/max8 [q:2 k:n])", "a b -> b a", "(a b) c -> a b c", "1 a ->", "\ud800", "\0", "x" * 5000, "a\nb", "\x08",
]  # fmt: skip
NUMBERS = [0, 1, 2, 3, 4, 8, -1, 64, 1 << 20, 1 << 31, (1 << 63) - 1, -(1 << 63), 1.5, float("inf"), float("nan"), True]


#: The last kind of command that needs no checkpoint; see `_arguments`.
LAST_OF_NAMES = 8
QUANTIZATION = ["quantization_config", "compression_config", "quantization"]


def quantized() -> st.SearchStrategy[Any]:
    """Configurations of quantized weights, of which most parts have the right form."""
    text, number = st.sampled_from(TEXTS), st.sampled_from(NUMBERS)
    names = st.lists(text | text.map("re:{}".format), max_size=3)
    weights = _table(num_bits=number, type=text, strategy=text, group_size=number, block_structure=st.lists(number))
    group = _table(targets=names, weights=weights, input_activations=weights, format=text)
    method = st.sampled_from(["fp8", "awq", "gptq", "compressed-tensors", "modelopt", "mxfp4", "bitsandbytes"]) | text
    said = _table(
        quant_method=method, bits=number, group_size=number, ignore=names,
        weight_block_size=st.lists(number, max_size=3), modules_to_not_convert=names,
        config_groups=st.dictionaries(text, group, max_size=2), format=text,
        quant_algo=text, sym=st.booleans(), desc_act=st.booleans(), version=text, kv_cache_scheme=weights,
    )  # fmt: skip
    return st.builds(lambda key, value: CONFIG | {key: value}, st.sampled_from(QUANTIZATION), said)


def values() -> st.SearchStrategy[Any]:
    """Anything that TOML can say."""
    plain = st.sampled_from(TEXTS) | st.sampled_from(NUMBERS) | st.text(max_size=8)
    keys = st.sampled_from(KEYS) | st.sampled_from(TEXTS)
    return st.recursive(
        plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
    )


def _table(**entries: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A table that mostly has entries of the right form, and sometimes any."""
    each = {key: st.one_of(value, value, value, values()) for key, value in entries.items()}
    return st.fixed_dictionaries({}, optional=each)


def documents() -> st.SearchStrategy[Any]:
    """Rules files, of which most parts have the right form."""
    text, number = st.sampled_from(TEXTS), st.sampled_from(NUMBERS)
    size = number | text
    spec = st.sampled_from(["tp", "", []]) | st.lists(text, max_size=2) | st.fixed_dictionaries({"packed": text})
    axes = st.lists(spec | values(), max_size=3)
    at = st.dictionaries(text, size | st.lists(size, max_size=3), max_size=2)
    unreduced = st.lists(text, max_size=2)
    rule = axes | _table(axes=axes, uneven=text, shared=st.booleans(), unreduced=unreduced, mesh=text, at=at)
    side = text | _table(name=text, parts=st.dictionaries(text, text, max_size=3), packed=text, dims=text, dim=number,
                         stack=text | st.lists(text, max_size=2), pad_to=size, zigzag=size, transpose=st.booleans(),
                         where=text, also=st.lists(text, max_size=2), n=size)  # fmt: skip
    rewrite = _table(**{"from": side, "to": side}, size=size, optional=st.just(True), refused=text)
    mesh = _table(
        shape=st.lists(size, max_size=3), axis_names=st.lists(text, max_size=3), devices=st.lists(size, max_size=4)
    )
    made = _table(stages=st.lists(size, max_size=4), layers=size, layout=text, pp=size, vpp=size, first=size, last=size,
                  experts=size, slots=size, ep=size, redundant=size, placement=text)  # fmt: skip
    listed = st.lists(size | st.lists(size | st.lists(size, max_size=2), max_size=3), max_size=4) | made
    parameter = _table(name=text, parts=st.lists(text, max_size=3), stack=text, slots=text)
    keys = st.sampled_from(["q_proj", "k_proj", ".*", r"layers\.{i}\.", "norm"]) | text
    return _table(
        rules=st.dictionaries(keys, rule, max_size=4), default=text | rule, match=text, mesh=mesh,
        numbers=st.dictionaries(st.sampled_from(KEYS), size | st.lists(size, max_size=3), max_size=4),
        lists=st.dictionaries(st.sampled_from(["stage", "a", "n", ""]), listed, max_size=3),
        world=_table(size=size, devices=st.lists(size, max_size=4), label=text),
        meshes=st.dictionaries(st.sampled_from(["m", "dense", "", "Ω"]), mesh, max_size=2),
        parameters=st.lists(parameter, max_size=2), rewrite=st.lists(rewrite, max_size=3),
        drop=st.lists(text, max_size=3), prefix=text,
        after=text, unmatched=text, backtracking=st.just(False), compared=st.lists(text, max_size=2),
    ) | values()  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command, and the files that it is given."""

    kind: int
    rules: Any
    config: Any
    raw: str | None
    mesh: str
    texts: tuple[str, ...]


def commands() -> st.SearchStrategy[Command]:
    """Commands with files."""
    text = st.sampled_from(TEXTS)
    other = st.dictionaries(st.sampled_from([*CONFIG, *QUANTIZATION]), values(), max_size=4)
    config = st.just(CONFIG) | other.map(lambda changed: CONFIG | changed) | quantized()
    mesh = st.sampled_from(MESHES) | text
    raw = st.none() | st.none() | st.text(max_size=40)
    return st.builds(Command, st.integers(0, 12), documents(), config, raw, mesh, st.tuples(text, text, text))


def run(command: Command) -> None:
    """Run a command, which is to end with a status, and with a sentence if that is 2."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = _arguments(command, Path(folder))
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = main(arguments)
        except SystemExit:  # `--help` in the place of a value.
            return
        said = err.getvalue()
        assert status in (0, 1, 2, 3, 4), (arguments, status)
        assert status != 2 or (said.startswith("shardwise: error: ") and said.count("\n") == 1), (arguments, said)
        assert len(said) < 20_000, (arguments, said[:400])
        place = repr(str(Path(folder) / "rules.toml"))
        assert all(line.count(place) < 2 for line in said.splitlines()), said


def _arguments(command: Command, folder: Path) -> list[str]:
    names, rules, config = folder / "names.json", folder / "rules.toml", folder / "config.json"
    names.write_text(json.dumps(NAMES))
    text = toml_of(command.rules) if command.raw is None else command.raw
    rules.write_bytes(text.encode(errors="surrogatepass"))
    config.write_bytes(json.dumps(command.config).encode())
    first, second, third = command.texts
    model, new = folder / "model", str(folder / "new")
    if command.kind > LAST_OF_NAMES:
        save_checkpoint(model, {name: np.zeros(shape, "f4") for name, shape in NAMES.items()}, sync=False)
        (model / "config.json").write_bytes(json.dumps(command.config).encode())
    return [
        ["report", str(names), "--rules", str(rules), f"--mesh={command.mesh}", "--config", str(config)],
        ["report", str(names), "--rules", str(rules), "--config", str(config), "--json"],
        ["report", str(config), "--rules", str(rules), f"--mesh={command.mesh}", "--devices", "--ranks"],
        ["fits", str(config), "--rules", str(rules)],
        ["fits", str(config), f"--tp={first}", f"--ep={second}"],
        ["report", str(names), f"--rules={first}", f"--mesh={command.mesh}", f"--uneven={second}"],
        ["show", first, f"--mesh={command.mesh}", f"--layout={second},{third}", f"--dtype={third}"],
        ["translate", f"--mesh={command.mesh}", f"--layout={first},{second}", f"--unreduced={third}", "--to=hlo"],
        ["rules", "--from-tp-plan", str(config), f"--axis={first}"],
        ["reshard", str(model), new, "--rules", str(rules), f"--mesh={command.mesh}", "--to=ranks", "--no-sync"],
        ["plan", str(model), new, f"--only={first}", f"--rename={second}={third}"],
        ["diff", str(model), str(model), "--rules", str(rules), f"--memory={first}"],
        ["reshard", str(model), new, "--rules", str(rules), f"--mesh={command.mesh}", f"--only={first}", "--no-sync"],
    ][command.kind]


def toml_of(value: Any) -> str:
    """A document as TOML, of inline tables."""
    if not isinstance(value, dict):
        return f"x = {_value(value)}"
    return "\n".join(f"{_string(key)} = {_value(one)}" for key, one in value.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_string(key)} = {_value(one)}' for key, one in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return _string(value)
    return str(value).lower() if isinstance(value, (bool, float)) else str(value)


def _string(text: str) -> str:
    return json.dumps(text) if text.isascii() else json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
