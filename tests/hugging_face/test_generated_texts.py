"""Texts generated with Hugging Face models: equal to plain sampling, or with its distribution."""

from itertools import product

import numpy as np
import pytest
import torch

from reference.sampling import Sampling, truncate
from specdecode import AcceptanceSchedule, RejectionSampler
from tests.hugging_face.common import (
    DRAFTERS,
    FIELDS,
    HOT,
    NEW,
    PROMPTS,
    TARGETS,
    TEMPERATURE,
    TRUNCATION,
    VOCAB,
    llama,
    mistral,
    noisy,
    one_by_one,
    padded,
    ragged,
    texts,
)
from tests.support.distributions import FALSE_ALARM, p_value, softmax

transformers = pytest.importorskip("transformers")

from specdecode.integrations.transformers import PromptLookup, TokenKind, generate  # noqa: E402

CONFIG = transformers.GenerationConfig(**FIELDS["several"])


class TestStrict:
    @pytest.mark.parametrize("name", TARGETS)
    def test_no_drafter_is_plain_seeded_sampling(self, name, plain):
        output = ragged(TARGETS[name], None)
        assert texts(output) == plain[name]
        assert (output.target_calls, output.draft_calls, output.stats) == (NEW, 0, None)
        assert (output.token_kinds == TokenKind.PLAIN).all()

    @pytest.mark.parametrize("drafter", DRAFTERS)
    @pytest.mark.parametrize("name", TARGETS)
    def test_any_drafter_gives_the_plain_tokens_in_a_ragged_batch(self, name, drafter, plain):
        output = ragged(TARGETS[name], DRAFTERS[drafter](TARGETS[name]), method="strict")
        assert texts(output) == plain[name]
        assert 0 < output.stats.accepted_tokens < output.stats.draft_tokens or drafter == "itself"

    def test_sliding_windows_slide_past_their_width(self):
        target = mistral()
        expected = [one_by_one(target, prompt, NEW, TEMPERATURE[i], 100 + i) for i, prompt in enumerate(PROMPTS)]
        for draft in (None, noisy(target, 0.05), PromptLookup()):
            assert texts(ragged(target, draft, method="strict")) == expected


class TestGreedy:
    @pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
    @pytest.mark.parametrize("name", TARGETS)
    def test_temperature_zero_is_greedy_generation(self, name, method):
        target, (ids, mask) = TARGETS[name], padded(PROMPTS)
        ids = ids.clamp(min=0)
        expected = target.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None
        )
        for draft in (None, noisy(target, 0.05), PromptLookup()):
            output = generate(target, draft, ids, mask, method=method, max_new_tokens=NEW, temperature=0.0)
            assert torch.equal(output.sequences, expected)


class TestDistribution:
    """Chi-square of the joint distribution of 3 tokens, by many requests with different seeds in one call.

    With 50,000 requests and at most 63 degrees of freedom, an error of total variation 0.027 is found 999 times in 1,000:
    N = lambda / (4 TV^2), lambda = 142.
    """

    VOCAB, NEW, REQUESTS = 4, 3, 50_000
    PROMPT = (0, 0, 3, 3)

    @torch.no_grad()
    def distribution(self, model):
        """Return the joint distribution by enumeration: [VOCAB ** NEW] probabilities."""
        ids = torch.tensor([[*self.PROMPT, *tokens] for tokens in product(range(self.VOCAB), repeat=self.NEW)])
        log_probs = model(input_ids=ids).logits.log_softmax(-1)[:, -self.NEW - 1 : -1]
        return log_probs.gather(2, ids[:, -self.NEW :, None]).sum((1, 2)).exp().numpy()

    @pytest.mark.parametrize(("drafter", "method"), [("model", "block"), ("lookup", "probabilistic")])
    def test_several_steps_have_the_distribution_of_the_target(self, drafter, method):
        target = llama(self.VOCAB, layers=1, scale=0.2)
        other = noisy(target, 0.1)
        ids = torch.tensor([self.PROMPT]).expand(self.REQUESTS, -1)
        draft = other if drafter == "model" else PromptLookup()
        output = generate(target, draft, ids, method=method, num_draft_tokens=2, max_new_tokens=self.NEW, seeds=0)
        assert 0.2 < output.stats.acceptance_rate < 0.8  # drafts are accepted and rejected
        codes = output.sequences[:, -self.NEW :].numpy() @ self.VOCAB ** np.arange(self.NEW)[::-1]
        counts = np.bincount(codes, minlength=self.VOCAB**self.NEW)

        right, wrong = self.distribution(target), self.distribution(other)
        assert p_value(counts, right) > FALSE_ALARM
        weight = 0.027 / (0.5 * abs(wrong - right).sum())
        assert p_value(counts, right + weight * (wrong - right)) < FALSE_ALARM  # the test can fail


class TestTruncation:
    @pytest.mark.parametrize("drafter", [None, *DRAFTERS])
    @pytest.mark.parametrize("name", TARGETS)
    def test_strict_gives_the_tokens_of_truncated_sampling(self, name, drafter, truncated):
        draft = drafter and DRAFTERS[drafter](TARGETS[name])
        output = ragged(TARGETS[name], draft, method="strict", temperature=HOT, **TRUNCATION)
        assert texts(output) == truncated[name]

    def test_one_number_is_for_all_requests(self):
        target, numbers = TARGETS["llama"], {"top_k": 5, "top_p": 0.9, "min_p": 0.05}
        expected = [one_by_one(target, prompt, NEW, 1.0, 100 + i, **numbers) for i, prompt in enumerate(PROMPTS)]
        assert texts(ragged(target, noisy(target, 0.03), method="strict", temperature=1.0, **numbers)) == expected

    @pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
    @pytest.mark.parametrize("drafter", ["close", "lookup"])
    def test_greedy_requests_are_not_changed(self, drafter, method):
        target = TARGETS["llama"]
        draft = DRAFTERS[drafter](target)
        expected = ragged(target, None, temperature=0.0)
        for options in ({"top_k": 3, "top_p": 0.5, "min_p": 0.3}, TRUNCATION):
            output = ragged(target, draft, method=method, temperature=0.0, **options)
            assert torch.equal(output.sequences, expected.sequences)
        one = ragged(target, draft, method=method, temperature=1.0, top_k=1)  # which is greedy too
        assert torch.equal(one.sequences, expected.sequences)

    @pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
    def test_neutral_values_change_nothing(self, method):
        target = TARGETS["llama"]
        draft = noisy(target, 0.1)
        expected = ragged(target, draft, method=method).sequences
        for options in ({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"top_k": VOCAB}):
            assert torch.equal(ragged(target, draft, method=method, **options).sequences, expected)

    @pytest.mark.parametrize("options", [{}, TRUNCATION, {"top_k": 4, "generation_config": CONFIG}], ids=str)
    @pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
    def test_a_drafter_that_is_the_target_is_always_right(self, method, options):
        # The draft model's rows are processed and truncated like the target's, each with its own prefix.
        for target in TARGETS.values():
            assert ragged(target, target, method=method, **options).stats.acceptance_rate == 1

    @pytest.mark.parametrize("rate", [0.0, 1.0])
    @pytest.mark.parametrize("top_k", [None, 3])
    def test_a_synthetic_sampler_brings_its_schedule(self, rate, top_k):
        schedule = AcceptanceSchedule.from_mean_rate(rate, num_draft_tokens=3)
        sampler, target = RejectionSampler("synthetic", schedule=schedule), TARGETS["llama"]
        options = {"method": sampler, "num_draft_tokens": 3, "temperature": 1.0, "top_k": top_k}
        output = ragged(target, noisy(target, 0.5), **options)
        assert output.stats.acceptance_rate == rate
        assert output.num_generated.tolist() == [NEW] * len(PROMPTS)
        with pytest.raises(
            ValueError, match=r"^num_draft_tokens: expected at most 3, as many as the method's schedule"
        ):
            ragged(target, target, **options | {"num_draft_tokens": 4})

    @pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
    @pytest.mark.parametrize("draft_vocab", [199, 201])
    def test_draft_rows_are_truncated_after_they_have_the_vocabulary_of_the_target(self, draft_vocab, method):
        target, draft, steps = llama(200), llama(draft_vocab, layers=1), []

        def raise_the_last(_model, _inputs, output):
            best = output.logits.amax(-1, keepdim=True)
            output.logits[..., 198:] = best + 0.5  # with 201 tokens only these three would be kept of the whole row

        draft.register_forward_hook(raise_the_last)
        ids, options = torch.tensor([[197, 7, 3]]), {"max_new_tokens": NEW, "seeds": 3, "top_k": 3}
        output = generate(target, draft, ids, method=method, on_step=steps.append, **options)
        drafted, text = [], ids[0].tolist()
        for step in steps:
            for i, token in enumerate(step.draft_token_ids):
                prefix = torch.tensor([[*text, *step.draft_token_ids[:i]]]).clamp(max=draft_vocab - 1)
                with torch.no_grad():
                    row = draft(input_ids=prefix, use_cache=False).logits[0, -1, :200]
                assert token in row.argsort(descending=True, stable=True)[:3]
                drafted.append(token)
            text += step.token_ids
        assert min(drafted) < 198 <= max(drafted) < min(draft_vocab, 200)
        if method == "strict":
            assert torch.equal(output.sequences, generate(target, None, ids, **options).sequences)


def with_vocabulary(model, size):
    """Return the same model with fewer or more tokens; new tokens are twice as likely as the likeliest."""
    other, weights = llama(size, layers=1), model.state_dict()
    for name, weight in other.state_dict().items():
        kept = min(len(weight), len(weights[name]))
        weight[:kept] = weights[name][:kept]

    def raise_new(_model, _inputs, output):
        output.logits[..., 100:] = output.logits[..., :100].amax(-1, keepdim=True) + np.log(2)

    other.register_forward_hook(raise_new)
    return other


class TestTruncatedDistribution:
    """The chi-square of `TestDistribution`, with rows that are truncated, and draft vocabularies of other sizes.

    With 30,000 requests and at most 26 degrees of freedom, an error of total variation 0.031 is found 999 times in 1,000:
    N = lambda / (4 TV^2), lambda = 110.
    """

    REQUESTS, NEW, PROMPT = 30_000, 3, (0, 0, 3, 3)
    SAMPLING = Sampling(temperature=2.0, top_k=3, top_p=0.8, min_p=0.1)

    @torch.no_grad()
    def distribution(self, model, vocab, new):
        """Return the joint distribution of truncated rows, by enumeration: {tokens: probability}."""
        joint = {(): 1.0}
        for _ in range(new):
            prefixes = list(joint)
            ids = torch.tensor([[*self.PROMPT, *prefix] for prefix in prefixes])
            rows = model(input_ids=ids).logits[:, -1, :vocab].numpy()
            joint = {
                (*prefix, token): joint[prefix] * float(probability)
                for prefix, row in zip(prefixes, rows)
                for token, probability in enumerate(self.truncated(row))
                if probability > 0
            }
        return joint

    def truncated(self, row):
        kept, _ = truncate(row, self.SAMPLING)
        return softmax(kept / self.SAMPLING.temperature)

    def counts(self, output, joint):
        """Return the count of each sequence of tokens, in the order of `joint`; no other sequence may occur."""
        found = dict.fromkeys(joint, 0)
        sequences, counts = output.sequences[:, len(self.PROMPT) :].unique(dim=0, return_counts=True)
        for tokens, count in zip(sequences.tolist(), counts.tolist()):
            found[tuple(tokens)] += count
        return np.array(list(found.values()))

    def generate(self, target, draft, method, new):
        ids = torch.tensor([self.PROMPT]).expand(self.REQUESTS, -1)
        options = {"num_draft_tokens": 2, "max_new_tokens": new, "seeds": 0} | self.SAMPLING._asdict()
        output = generate(target, draft, ids, method=method, **options)
        assert 0.1 < output.stats.acceptance_rate < 0.9  # drafts are accepted and rejected
        return output

    @pytest.mark.parametrize(("drafter", "method"), [("model", "probabilistic"), ("lookup", "block")])
    def test_several_steps_have_the_distribution_of_the_truncated_target(self, drafter, method):
        target = llama(4, layers=1, scale=0.2)
        draft = noisy(target, 0.1) if drafter == "model" else PromptLookup()
        right = self.distribution(target, 4, self.NEW)
        assert len(right) <= 27  # of 64
        counts = self.counts(self.generate(target, draft, method, self.NEW), right)
        assert p_value(counts, np.array(list(right.values()))) > FALSE_ALARM

    def test_a_draft_with_another_vocabulary_changes_nothing(self):
        target = llama(100, layers=1, scale=0.2)
        with torch.no_grad():
            weight = target.get_output_embeddings().weight
            weight[[45, 99]] = weight[[99, 45]]  # now 99 is likely after the prompt
        draft = with_vocabulary(noisy(target, 0.01, seed=2), 101)
        right = self.distribution(target, 100, 2)
        assert {99, 75, 83} == {tokens[0] for tokens in right}
        counts = self.counts(self.generate(target, draft, "probabilistic", 2), right)
        assert p_value(counts, np.array(list(right.values()))) > FALSE_ALARM

    @pytest.mark.parametrize("method", ["probabilistic", "block"])
    def test_drafts_of_whole_rows_are_caught(self, method):
        class Careless(RejectionSampler):
            """Draws drafts from whole rows, and returns the logsumexp and cutoff of truncated rows."""

            def draft(self, logits, *arguments, top_k, top_p, min_p, **options):
                whole = super().draft(logits, *arguments, **options)
                cut = super().draft(logits, *arguments, top_k=top_k, top_p=top_p, min_p=min_p, **options)
                return cut._replace(token_ids=whole.token_ids)

        target = llama(4, layers=1, scale=0.2)
        right = self.distribution(target, 4, self.NEW)
        counts = self.counts(self.generate(target, noisy(target, 0.1), Careless(method), self.NEW), right)
        assert p_value(counts, np.array(list(right.values()))) < FALSE_ALARM
