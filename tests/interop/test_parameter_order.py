"""The order of parameters by a configuration, beside models that transformers makes."""

from typing import Any

import pytest

from shardwise.rules.parameter_order import _FAMILIES, parameter_order

SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 12, "num_attention_heads": 4, "head_dim": 4},
    **{"num_key_value_heads": 2, "vocab_size": 32, "n_embd": 16, "n_layer": 12, "n_head": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


@pytest.mark.parametrize("more", [{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}])
@pytest.mark.parametrize("family", sorted(_FAMILIES))
def test_the_order_is_that_of_the_modules(family: str, more: dict[str, Any]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **SIZES, **more)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    names = [name for name, _ in model.named_parameters()]
    assert parameter_order(config.to_dict(), sorted(names)) == names
