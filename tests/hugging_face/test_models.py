"""Usable Hugging Face models, and the errors of others."""

import copy

import pytest
import torch

from tests.hugging_face.common import (
    HOT,
    NEW,
    PROMPTS,
    TARGETS,
    TEMPERATURE,
    TRUNCATION,
    VOCAB,
    bert,
    decoder,
    llama,
    noisy,
    padded,
    ragged,
    texts,
)

transformers = pytest.importorskip("transformers")

from specdecode.integrations.transformers import PromptLookup, generate  # noqa: E402


class TestModels:
    @pytest.mark.parametrize("draft_vocab", [199, 201])
    def test_vocabularies_padded_differently_fit(self, draft_vocab):
        target = llama(200)
        ids = torch.tensor([[199, 7, 198]])  # the smaller drafter has no token 199
        expected = generate(target, None, ids, max_new_tokens=NEW, seeds=3).sequences
        draft = llama(draft_vocab, layers=1)
        for method in ("strict", "probabilistic", "block"):
            steps = []
            output = generate(target, draft, ids, method=method, max_new_tokens=NEW, seeds=3, on_step=steps.append)
            assert max(max(step.draft_token_ids, default=0) for step in steps) < min(draft_vocab, 200)
            assert method != "strict" or torch.equal(output.sequences, expected)

    @pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
    def test_tokens_that_the_draft_model_lacks_are_never_drafted(self, method):
        # All logits of the draft are near -50: a token of logit 0 would be drafted every time.
        target, draft, steps = llama(200), llama(198, layers=1), []

        def lower(_model, _inputs, output):
            output.logits -= 50

        draft.register_forward_hook(lower)
        ids = torch.tensor([[197, 7, 3]])
        output = generate(target, draft, ids, method=method, max_new_tokens=NEW, seeds=3, on_step=steps.append)
        assert output.stats.drafts > 0
        assert max(token for step in steps for token in step.draft_token_ids) < 198

    @pytest.mark.parametrize("draft_vocab", [180, 197, 203, 219])
    def test_vocabularies_that_differ_by_more_than_one_percent_are_refused(self, draft_vocab):
        target, ids = llama(200, layers=1), torch.tensor([[1]])
        with pytest.raises(ValueError, match=rf"^draft: .* 200 tokens, got {draft_vocab} tokens"):
            generate(target, llama(draft_vocab, layers=1), ids, max_new_tokens=2)
        for fits in (198, 202):
            generate(target, llama(fits, layers=1), ids, max_new_tokens=2)

    def test_a_wrapper_that_takes_any_argument_gets_all(self, plain):
        class Wrapper(torch.nn.Module):
            def __init__(self, model):
                super().__init__()
                self.model, self.config, self.device = model, model.config, model.device

            def forward(self, *args, **kwargs):
                return self.model(*args, **kwargs)

        class Adapter(Wrapper):
            """As in PEFT: some arguments by name, the others passed on."""

            def get_base_model(self):
                return self.model

            def forward(self, input_ids=None, attention_mask=None, **kwargs):
                return self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

        for wrapper in (Wrapper, Adapter):
            target = wrapper(TARGETS["gpt2"]).eval()
            output = ragged(target, PromptLookup(), method="strict")
            assert texts(output) == plain["gpt2"]
            assert output.target_calls <= NEW  # all requests at once
            config = transformers.GenerationConfig(repetition_penalty=1.5)
            expected = texts(ragged(TARGETS["gpt2"], None, generation_config=config))
            assert texts(ragged(target, PromptLookup(), method="strict", generation_config=config)) == expected

    def test_models_in_training_mode_are_refused(self):
        target, draft = copy.deepcopy(TARGETS["gpt2"]).train(), noisy(TARGETS["llama"], 0.03).train()
        message = r": expected a model in evaluation mode, got .* in training mode, .*: call \.eval\(\)"
        with pytest.raises(ValueError, match=f"^target{message}"):
            ragged(target, None)
        with pytest.raises(ValueError, match=f"^draft{message}"):
            ragged(target.eval(), draft)
        assert draft.training  # the models are left as they were
        assert ragged(target, draft.eval()).stats.drafts > 0

    def test_nothing_is_written_to(self):
        target, draft = copy.deepcopy(TARGETS["llama"]), noisy(TARGETS["llama"], 0.03)
        ids, mask = padded(PROMPTS)
        before, masked, temperature = ids.clone(), mask.clone(), TEMPERATURE.clone()
        output = generate(target, draft, ids, mask, max_new_tokens=4, temperature=temperature, seeds=0)
        assert torch.equal(ids, before)
        assert torch.equal(mask, masked)
        assert torch.equal(temperature, TEMPERATURE)
        with torch.inference_mode():
            inside = generate(target, draft, ids, mask, max_new_tokens=4, temperature=temperature, seeds=0)
        assert torch.equal(inside.sequences, output.sequences)
        assert all(weight.grad is None for weight in target.parameters())

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    @pytest.mark.parametrize("draft_device", ["cuda", "cpu"])
    def test_models_may_be_on_any_device(self, draft_device, plain, truncated):
        target = copy.deepcopy(TARGETS["llama"]).cuda()
        output = ragged(target, noisy(TARGETS["llama"], 0.03).to(draft_device), method="strict")
        assert output.sequences.device.type == "cpu"  # where the prompts were
        assert texts(output) == plain["llama"]
        assert ragged(target, copy.deepcopy(target).to(draft_device)).stats.acceptance_rate > 0.99
        draft = noisy(TARGETS["llama"], 0.03).to(draft_device)
        assert texts(ragged(target, draft, method="strict", temperature=HOT, **TRUNCATION)) == truncated["llama"]
        for method in ("probabilistic", "block"):
            output = ragged(target, copy.deepcopy(target).to(draft_device), method=method, **TRUNCATION)
            assert output.stats.acceptance_rate > 0.99

    @pytest.mark.parametrize("model_class", [transformers.BartForCausalLM, transformers.TrOCRForCausalLM])
    def test_models_without_position_ids_are_refused(self, model_class):
        other = decoder(model_class)
        for who, models in {"target": (other, None), "draft": (TARGETS["llama"], other)}.items():
            with pytest.raises(
                ValueError, match=rf"^{who}: expected a model that takes position_ids, .* got {model_class.__name__}"
            ):
                ragged(*models)

    @pytest.mark.parametrize("model_class", [transformers.BertLMHeadModel, transformers.BertForMaskedLM])
    def test_models_that_attend_in_both_directions_are_refused(self, model_class):
        with pytest.raises(
            ValueError, match=r"^target: expected a causal model, got Bert.* attends in both directions"
        ):
            ragged(bert(model_class, is_decoder=False), None)
        with pytest.raises(ValueError, match=r"^draft: expected a causal model, got Bert.* attends in both directions"):
            ragged(TARGETS["llama"], bert(model_class, is_decoder=False))

    def test_other_attention_in_both_directions_is_refused(self):
        sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
        config = transformers.GemmaConfig(**sizes, **heads, use_bidirectional_attention=True)
        with pytest.raises(ValueError, match=r"^target: expected a causal model, got GemmaForCausalLM"):
            ragged(transformers.GemmaForCausalLM(config).eval(), None)

    def test_bert_as_a_decoder_is_accepted(self):
        target = bert(transformers.BertLMHeadModel, is_decoder=True)
        expected = texts(ragged(target, None))
        assert texts(ragged(target, noisy(target, 0.03), method="strict")) == expected

    def test_encoder_decoders_are_refused(self):
        sizes = {"vocab_size": VOCAB, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
        t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
        with pytest.raises(ValueError, match=r"target: expected a decoder .* got T5"):
            ragged(t5, None)

    @pytest.mark.parametrize("drafter", ["none", "look-up", "model"])
    def test_logits_that_are_not_numbers_are_refused(self, drafter):
        # The third prompt ends in a token without an embedding.
        target = copy.deepcopy(TARGETS["llama"])
        with torch.no_grad():
            target.get_input_embeddings().weight[PROMPTS[2][-1]] = torch.nan
        draft = {"none": None, "look-up": PromptLookup(), "model": TARGETS["llama"]}[drafter]
        prompt = torch.tensor([PROMPTS[2][-1:] * 3])  # so that look-up finds something
        for options in ({"input_ids": prompt}, dict(zip(("input_ids", "attention_mask"), padded(PROMPTS)))):
            with pytest.raises(ValueError, match=r"^target: expected finite logits, got only NaN or -inf for request"):
                generate(target, draft, **options, max_new_tokens=4, seeds=0)
