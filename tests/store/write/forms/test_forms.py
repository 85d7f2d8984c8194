"""Names of the files of each form."""

from __future__ import annotations

import pytest

import shardwise as sw
from shardwise.store.write.forms.forms import check_names


@pytest.mark.parametrize("form", ["safetensors", "hf", "sharded", "dcp"])
def test_a_plan_names_no_files_but_those_of_its_form(form: str) -> None:
    """The names are those that save_checkpoint gives: nothing else can be written, and nothing else replaced."""
    right = {
        "safetensors": ["m.safetensors"],
        "hf": ["model.safetensors", "model-00001-of-00002.safetensors", "model-123456-of-123456.safetensors"],
        "sharded": ["shard-00001-model-00001-of-00002.safetensors"],
        "dcp": ["__0_0.distcp", "__12_0.distcp"],
    }
    for name in right[form]:
        check_names(form, "/a/m.safetensors", [name])
    others = [name for other, names in right.items() if other != form for name in names]
    bad = ["", ".", "..", "a/b", "/a", "a\\b", "a\0", "shardwise.json", ".metadata", "model.safetensors.index.json"]
    for name in [*others, *bad, right[form][0] + "\n", "../" + right[form][0]]:
        with pytest.raises(sw.ParseError, match="which no checkpoint of the form"):
            check_names(form, "/a/m.safetensors", [name])
    with pytest.raises(sw.ParseError, match="two of its files"):
        check_names(form, "/a/m.safetensors", [right[form][0]] * 2)
