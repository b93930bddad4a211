"""A trained model outside of Thinwire: transformers gives the same logits."""

from __future__ import annotations

import pytest
import torch

from thinwire.errors import ThinwireError
from thinwire.train import sample
from thinwire.train.data import Tokenizer
from thinwire.train.export import export
from thinwire.train.models import Decoder, ModelConfig

SHAPES = {
    "gpt": ModelConfig(layers=2, width=48, heads=4, hidden=100, context=24),
    "llama": ModelConfig(family="llama", layers=2, width=48, heads=4, kv_heads=2, hidden=64, context=24),
}


def decoder(family: str) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SHAPES[family]).eval()
    for parameter in model.parameters():  # biases too
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("family", SHAPES)
def test_transformers_gives_the_same_logits_and_tokens(family, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = decoder(family)
    tokenizer = Tokenizer("bytes", (), tmp_path)
    export(model.shape, dict(model.named_parameters()), tokenizer.as_hub(), tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    text = "Grüße, 17 Ω"
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")(text, return_tensors="pt").input_ids
    assert tokens[0].tolist() == list(text.encode())
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)


def test_a_folder_that_holds_a_model_and_a_shape_without_counterpart_are_refused(tmp_path):
    model, hub = decoder("gpt"), Tokenizer("bytes", (), tmp_path).as_hub()
    export(model.shape, dict(model.named_parameters()), hub, tmp_path / "hf")
    with pytest.raises(ThinwireError, match="holds a model already"):
        export(model.shape, dict(model.named_parameters()), hub, tmp_path / "hf")
    with pytest.raises(ThinwireError, match="grouped-query"):
        export(ModelConfig(heads=4, kv_heads=2), {}, hub, tmp_path / "other")


def test_tokens_are_drawn_as_asked():
    model, prompt = decoder("gpt"), torch.tensor([1, 2, 3])
    likeliest = list(sample.tokens(model, prompt, 40, temperature=0))  # beyond the context of 24
    assert likeliest[0] == int(model(prompt[None])[0, -1].argmax()) and len(likeliest) == 40
    assert list(sample.tokens(model, prompt, 40, top_k=1)) == likeliest
    drawn = [list(sample.tokens(model, prompt, 20, seed=seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    allowed = set(model(prompt[None])[0, -1].topk(5).indices.tolist())
    assert {next(sample.tokens(model, prompt, 1, top_k=5, seed=seed)) for seed in range(30)} <= allowed
