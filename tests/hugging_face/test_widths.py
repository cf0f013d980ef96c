"""The width of a model's logits defines its tokens, not its config; and objects that are not language models are refused."""

import copy

import pytest
import torch

from tests.hugging_face.common import NEW, TARGETS, VOCAB, build, noisy, with_config

transformers = pytest.importorskip("transformers")

from specdecode.integrations.transformers import PromptLookup, generate  # noqa: E402

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
WIDER = 12


def widened(model, embeddings=WIDER, head=WIDER):
    """Return the model with more tokens, the new ones likelier than the others; its config keeps the old number."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(5)

    def longer(weight, rows):
        added = torch.randn(rows - len(weight), weight.shape[1], generator=generator, dtype=weight.dtype)
        return torch.nn.Parameter(torch.cat([weight.detach(), added * 2]))

    model.get_input_embeddings().weight = longer(model.get_input_embeddings().weight, embeddings)
    model.get_output_embeddings().weight = longer(model.get_output_embeddings().weight, head)
    return model


def by_transformers(target, prompt=PROMPT):
    return target.generate(prompt, do_sample=False, max_new_tokens=NEW, pad_token_id=0)


class TestWidths:
    @pytest.mark.parametrize("name", TARGETS)
    def test_a_target_widened_by_hand_emits_what_transformers_emits(self, name):
        target = widened(TARGETS[name])
        expected = by_transformers(target)
        assert expected.max() >= VOCAB
        for draft in (None, PromptLookup(), noisy(target, 0.02), target):
            for method in ("strict", "probabilistic", "block"):
                output = generate(target, draft, PROMPT, method=method, max_new_tokens=NEW, temperature=0)
                assert torch.equal(output.sequences, expected)
        ids = torch.tensor([[WIDER - 1, 3]])  # which the config does not know
        assert torch.equal(
            generate(target, None, ids, max_new_tokens=NEW, temperature=0).sequences, by_transformers(target, ids)
        )

    @pytest.mark.parametrize("penalty", [1.0, 1.9])
    def test_a_prompt_may_hold_tokens_that_are_never_emitted(self, penalty):
        target, ids = widened(TARGETS["llama"], head=VOCAB), torch.tensor([[3, WIDER - 1, 4, 1]])
        target = with_config(target, repetition_penalty=penalty)
        expected = by_transformers(target, ids)
        for draft in (None, PromptLookup(), noisy(target, 0.02), TARGETS["llama"]):
            output = generate(target, draft, ids, max_new_tokens=NEW, temperature=0)
            assert torch.equal(output.sequences, expected)
        with pytest.raises(ValueError, match=rf"^input_ids: expected ids in \[0, {WIDER}\), got {WIDER}"):
            generate(target, None, torch.tensor([[WIDER]]), max_new_tokens=1)

    def test_errors_name_both_sizes(self):
        target = TARGETS["llama"]
        options = {"input_ids": PROMPT, "max_new_tokens": 2}
        with pytest.raises(ValueError, match=r"^target: .* 12 tokens of its logits, got 8 embeddings"):
            generate(widened(target, embeddings=VOCAB), None, **options)
        with pytest.raises(ValueError, match=r"^draft: .* target's 8 tokens, got 12 tokens"):
            generate(target, widened(target), **options)
        with pytest.raises(ValueError, match=r"^draft: .* target's 12 tokens, got 8 tokens"):
            generate(widened(target), target, **options)
        narrow = copy.deepcopy(target)

        def cut(_model, _inputs, output):
            output.logits = output.logits[..., :6]

        narrow.register_forward_hook(cut)
        with pytest.raises(ValueError, match=r"^target: expected logits of 8 tokens, .* got logits of 6 tokens"):
            generate(narrow, None, **options)
        for draft in (PromptLookup(), narrow):
            with pytest.raises(ValueError, match=r"expected logits of 8 tokens, .* got logits of 6 tokens"):
                generate(narrow if draft is not narrow else target, draft, **options)


class Bare(torch.nn.Module):
    """A wrapper without information about the wrapped model."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config, self.device = model, model.config, model.device

    def forward(self, **options):
        return self.model(**options)


def no_language_models():
    labels = copy.deepcopy(TARGETS["llama"].config)
    labels.num_labels, labels.pad_token_id = 3, 0
    return {
        "a body": TARGETS["llama"].model,
        "a classifier": build(Classifier, labels),
        "a wrapped body": Bare(TARGETS["llama"].model).eval(),
        "a wrapped classifier": Bare(build(Classifier, labels)).eval(),
        "no module": "gpt2",
        "a layer": torch.nn.Linear(2, 2),
    }


class Classifier(transformers.LlamaForSequenceClassification):
    def get_output_embeddings(self):
        return self.score


OTHERS = no_language_models()


class TestNoLanguageModels:
    @pytest.mark.parametrize("who", ["target", "draft"])
    @pytest.mark.parametrize("name", OTHERS)
    def test_what_is_no_causal_language_model_is_named(self, name, who):
        models = (OTHERS[name], PromptLookup()) if who == "target" else (TARGETS["llama"], OTHERS[name])
        with pytest.raises(TypeError, match=rf"^{who}: expected a Hugging Face causal language model") as raised:
            generate(*models, PROMPT, max_new_tokens=3)
        assert type(OTHERS[name]).__name__ in str(raised.value)

    @pytest.mark.parametrize("name", ["Gemma4Assistant", "Gemma4UnifiedAssistant"])
    def test_assistants_that_read_their_target_are_named(self, name):
        model_class = getattr(transformers, f"{name}ForCausalLM", None)
        if model_class is None:
            pytest.skip("of a newer transformers")
        model = model_class.__new__(model_class)
        torch.nn.Module.__init__(model)
        model.config = TARGETS["llama"].config
        with pytest.raises(TypeError, match=f"^draft: .* got {name}ForCausalLM, which cannot generate by itself"):
            generate(TARGETS["llama"], model.eval(), PROMPT, max_new_tokens=3)
