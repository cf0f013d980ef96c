"""Generation with Hugging Face models: exactness, batching, caches, limits, streaming and errors.

Models are tiny, random and float64, with large weights: their distributions are peaked, so rounding
does not change tokens. The oracle is `one_by_one`, which uses no cache, no batch and no padding.
"""

import copy
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.sampling import Sampling, truncate
from specdecode import AcceptanceSchedule, RejectionSampler, sample
from tests.distributions import FALSE_ALARM, p_value, softmax

transformers = pytest.importorskip("transformers")

from specdecode.integrations.transformers import PromptLookup, TokenKind, generate  # noqa: E402
from specdecode.integrations.transformers.models import CachedModel  # noqa: E402
from specdecode.integrations.transformers.supported import CACHED_BY_COLUMN  # noqa: E402

VOCAB = 8
NEW = 16
PROMPTS = [[3, 1, 4, 1, 5], [2], [7, 1, 0], [6, 6, 2, 5, 3, 1, 4], [0, 5]]
TEMPERATURE = torch.tensor([1.0, 0.7, 0.0, 1.3, 0.0])
TRUNCATION = {
    "top_k": torch.tensor([3, 0, 2, 4, 7]),
    "top_p": torch.tensor([0.9, 0.8, 0.5, 0.6, 1.0]),
    "min_p": torch.tensor([0.0, 0.1, 0.0, 0.05, 1.0]),
}


def build(model_class, config, scale=0.35):
    model = model_class(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(scale * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        model.get_output_embeddings().weight.mul_(3)
    return model


def llama(vocab_size=VOCAB, layers=2, positions=64, scale=0.35):
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=layers,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
    )
    return build(transformers.LlamaForCausalLM, config, scale)


def gpt2(positions=64):
    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": positions}
    config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    return build(transformers.GPT2LMHeadModel, config)


def mistral():
    config = transformers.MistralConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        max_position_embeddings=64,
        sliding_window=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return build(transformers.MistralForCausalLM, config)


def lfm2(**options):
    """Attention among short convolutions."""
    config = transformers.Lfm2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **options,
    )
    return build(transformers.Lfm2ForCausalLM, config, scale=0.8)


def bert(model_class, is_decoder):
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=64,
        is_decoder=is_decoder,
        pad_token_id=None,
    )
    return build(model_class, config)


def decoder(model_class, **options):
    """The decoder of an encoder-decoder, which takes no position_ids."""
    config = model_class.config_class(
        vocab_size=VOCAB,
        d_model=16,
        decoder_layers=2,
        decoder_ffn_dim=16,
        decoder_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=1,
        forced_eos_token_id=None,
        **options,
    )
    return build(model_class, config)


def phi3(switch):
    """Rotary factors that differ by a factor of 9 beyond `switch` tokens."""
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
    config = transformers.Phi3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        max_position_embeddings=64,
        original_max_position_embeddings=switch,
        rope_parameters=rotary,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return build(transformers.Phi3ForCausalLM, config)


def noisy(model, scale, seed=1):
    """A drafter that correlates with the target: its weights plus noise."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return model


TARGETS = {"llama": llama(), "gpt2": gpt2()}
DRAFTERS = {
    "close": lambda target: noisy(target, 0.03),
    "far": lambda target: noisy(target, 0.5),
    "other": lambda target: TARGETS["gpt2" if target is TARGETS["llama"] else "llama"],
    "itself": lambda target: target,
    "lookup": lambda target: PromptLookup(),
}


def padded(prompts):
    """Left-padded ids, the padding being ids that no embedding knows, and the mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[-100] * (width - len(prompt)) + prompt for prompt in prompts])
    return ids, (ids >= 0).long()


def texts(output, prompts=PROMPTS):
    """Prompt and new tokens of every request, without padding."""
    width = max(map(len, prompts))
    rows = zip(prompts, output.sequences.tolist(), output.num_generated.tolist())
    return [row[width - len(prompt) : width + count] for prompt, row, count in rows]


@torch.no_grad()
def one_by_one(target, prompt, new, temperature, seed, **truncation):
    ids = list(prompt)
    for _ in range(new):
        logits = target(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]
        noise = {"seeds": torch.tensor([seed]), "positions": torch.tensor([len(ids)])}
        ids.append(int(sample(logits, float(temperature), **noise, **truncation)))
    return ids


@pytest.fixture(scope="module")
def plain():
    """What plain seeded sampling says, per target: request i has seed 100 + i."""
    return {
        name: [one_by_one(target, prompt, NEW, TEMPERATURE[i], 100 + i) for i, prompt in enumerate(PROMPTS)]
        for name, target in TARGETS.items()
    }


def ragged(target, draft, **options):
    """Generate for all prompts at once."""
    options = {"max_new_tokens": NEW, "temperature": TEMPERATURE, "seeds": 100} | options
    return generate(target, draft, *padded(PROMPTS), **options)


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

    @pytest.mark.parametrize("drafter", DRAFTERS)
    @pytest.mark.parametrize("name", TARGETS)
    def test_any_drafter_gives_the_plain_tokens_to_one_request(self, name, drafter, plain):
        target, ids = TARGETS[name], torch.tensor([PROMPTS[0]])
        output = generate(
            target, DRAFTERS[drafter](target), ids, method="strict", num_draft_tokens=3, max_new_tokens=NEW, seeds=100
        )
        assert output.sequences.tolist() == plain[name][:1]

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

    With 50,000 requests and at most 63 degrees of freedom a distribution that is wrong by a total variation of 0.027 is seen
    999 times in 1,000: N = lambda / (4 TV^2), lambda = 142.
    """

    VOCAB, NEW, REQUESTS = 4, 3, 50_000
    PROMPT = (0, 0, 3, 3)

    @torch.no_grad()
    def distribution(self, model):
        """The joint distribution by enumeration: [VOCAB ** NEW] probabilities."""
        ids = torch.tensor([[*self.PROMPT, *tokens] for tokens in product(range(self.VOCAB), repeat=self.NEW)])
        log_probs = model(input_ids=ids).logits.log_softmax(-1)[:, -self.NEW - 1 : -1]
        return log_probs.gather(2, ids[:, -self.NEW :, None]).sum((1, 2)).exp().numpy()

    @pytest.mark.parametrize("method", ["probabilistic", "block"])
    @pytest.mark.parametrize("drafter", ["model", "lookup"])
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


HOT = 2 * TEMPERATURE
"""At these temperatures truncation changes the text of every request that is not greedy."""


def of_request(i):
    """The truncation of one request, as plain numbers."""
    return {name: values[i].item() for name, values in TRUNCATION.items()}


@pytest.fixture(scope="module")
def truncated():
    """What plain seeded sampling gives when rows are truncated, per target."""
    expected = {}
    for name, target in TARGETS.items():
        rows = [(target, prompt, NEW, HOT[i], 100 + i) for i, prompt in enumerate(PROMPTS)]
        expected[name] = [one_by_one(*row, **of_request(i)) for i, row in enumerate(rows)]
        whole = [one_by_one(*row) for row in rows]
        assert [one != other for one, other in zip(expected[name], whole)] == (HOT > 0).tolist()
    return expected


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

    @pytest.mark.parametrize("method", ["probabilistic", "block"])
    @pytest.mark.parametrize("drafter", ["far", "lookup"])
    def test_a_request_alone_says_what_it_says_in_a_batch(self, drafter, method):
        target = TARGETS["llama"]
        draft = DRAFTERS[drafter](target)
        together = texts(ragged(target, draft, method=method, temperature=HOT, **TRUNCATION))
        for i, prompt in enumerate(PROMPTS):
            options = {"temperature": float(HOT[i]), "seeds": 100 + i, "max_new_tokens": NEW} | of_request(i)
            alone = generate(target, draft, torch.tensor([prompt]), method=method, **options)
            assert alone.sequences.tolist() == [together[i]]

    def test_a_drafter_that_is_the_target_is_always_right(self):
        target = TARGETS["llama"]
        for method in ("strict", "probabilistic", "block"):
            assert ragged(target, target, method=method, **TRUNCATION).stats.acceptance_rate == 1

    def test_a_synthetic_sampler_brings_its_schedule(self):
        schedule = AcceptanceSchedule.from_mean_rate(1.0, num_draft_tokens=3)
        sampler, target = RejectionSampler("synthetic", schedule=schedule), TARGETS["llama"]
        output = ragged(target, noisy(target, 0.5), method=sampler, num_draft_tokens=3, temperature=1.0, top_k=3)
        assert output.stats.acceptance_rate == 1
        with pytest.raises(
            ValueError, match=r"^num_draft_tokens: expected at most 3, as many as the method's schedule"
        ):
            ragged(target, target, method=sampler, num_draft_tokens=4)

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

    def test_what_is_left_out_of_a_draft_row_is_handed_on(self):
        handed = []

        class Recorder(RejectionSampler):
            def __call__(self, target_logits, draft_token_ids, draft_logits=None, **options):
                handed.append((draft_logits, options["draft_logsumexp"], options["draft_cutoff"], options["top_k"]))
                return super().__call__(target_logits, draft_token_ids, draft_logits, **options)

        target = TARGETS["llama"]
        ragged(target, noisy(target, 0.1), method=Recorder("block"), num_draft_tokens=2, temperature=1.0, top_k=3)
        rows = [row for row in handed if row[0] is not None]
        assert rows
        for logits, logsumexp, cutoff, top_k in rows:
            best, ids = logits.topk(3)
            assert top_k == 3
            assert torch.equal(cutoff, ids[..., -1])
            torch.testing.assert_close(logsumexp, best.logsumexp(-1).float())

    @pytest.mark.parametrize(
        ("message", "options", "error"),
        [
            ("top_k: expected an int >= 0, got -1", {"top_k": -1}, ValueError),
            (r"top_k: expected shape \[5\], got \[2\]", {"top_k": torch.tensor([1, 2])}, ValueError),
            (r"top_p: expected a float in \(0, 1\], got 0.0", {"top_p": 0.0}, ValueError),
            (r"min_p: expected a float in \[0, 1\], got 1.5", {"min_p": 1.5}, ValueError),
            ("top_k: expected an int >= 0, got 2.0", {"top_k": 2.0}, TypeError),
            ("top_p: expected a float .* got str", {"top_p": "0.9"}, TypeError),
        ],
    )
    def test_values_that_make_no_sense_are_refused_before_a_model_is_called(self, message, options, error):
        target = copy.deepcopy(TARGETS["llama"])
        target.register_forward_pre_hook(lambda *_: pytest.fail("the target was called"))
        with pytest.raises(error, match=f"^{message}"):
            ragged(target, None, **options)


class TestTruncatedDistribution:
    """The chi-square of `TestDistribution`, with rows that are truncated, and draft vocabularies of other sizes.

    With 30,000 requests and at most 26 degrees of freedom a distribution that is wrong by a total variation of 0.031 is seen
    999 times in 1,000: N = lambda / (4 TV^2), lambda = 110.
    """

    REQUESTS, NEW, PROMPT = 30_000, 3, (0, 0, 3, 3)
    SAMPLING = Sampling(temperature=2.0, top_k=3, top_p=0.8, min_p=0.1)

    @torch.no_grad()
    def distribution(self, model, vocab, new):
        """The joint distribution of truncated rows, by enumeration: {tokens: probability}."""
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
        """How often each sequence of tokens occurred, in the order of `joint`; none may occur that is not in it."""
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

    @pytest.mark.parametrize("method", ["probabilistic", "block"])
    @pytest.mark.parametrize("drafter", ["model", "lookup"])
    def test_several_steps_have_the_distribution_of_the_truncated_target(self, drafter, method):
        target = llama(4, layers=1, scale=0.2)
        draft = noisy(target, 0.1) if drafter == "model" else PromptLookup()
        right = self.distribution(target, 4, self.NEW)
        assert len(right) <= 27  # of 64
        counts = self.counts(self.generate(target, draft, method, self.NEW), right)
        assert p_value(counts, np.array(list(right.values()))) > FALSE_ALARM

    @pytest.mark.parametrize("method", ["probabilistic", "block"])
    @pytest.mark.parametrize("draft_vocab", [99, 101])
    def test_a_draft_with_another_vocabulary_changes_nothing(self, draft_vocab, method):
        target = llama(100, layers=1, scale=0.2)
        with torch.no_grad():
            weight = target.get_output_embeddings().weight
            weight[[45, 99]] = weight[[99, 45]]  # now 99 is likely after the prompt
        draft = with_vocabulary(noisy(target, 0.01, seed=2), draft_vocab)
        right = self.distribution(target, 100, 2)
        assert {99, 75, 83} == {tokens[0] for tokens in right}
        counts = self.counts(self.generate(target, draft, method, 2), right)
        assert p_value(counts, np.array(list(right.values()))) > FALSE_ALARM

    @pytest.mark.parametrize("method", ["probabilistic", "block"])
    def test_drafts_of_whole_rows_are_caught(self, method):
        class Careless(RejectionSampler):
            """Draws drafts from whole rows, and hands on what truncated rows would give."""

            def draft(self, logits, *arguments, top_k, top_p, min_p, **options):
                whole = super().draft(logits, *arguments, **options)
                cut = super().draft(logits, *arguments, top_k=top_k, top_p=top_p, min_p=min_p, **options)
                return cut._replace(token_ids=whole.token_ids)

        target = llama(4, layers=1, scale=0.2)
        right = self.distribution(target, 4, self.NEW)
        counts = self.counts(self.generate(target, noisy(target, 0.1), Careless(method), self.NEW), right)
        assert p_value(counts, np.array(list(right.values()))) < FALSE_ALARM


def with_vocabulary(model, size):
    """The same model with fewer or more tokens; those that it gains are twice as likely as the likeliest."""
    other, weights = llama(size, layers=1), model.state_dict()
    for name, weight in other.state_dict().items():
        kept = min(len(weight), len(weights[name]))
        weight[:kept] = weights[name][:kept]

    def raise_new(_model, _inputs, output):
        output.logits[..., 100:] = output.logits[..., :100].amax(-1, keepdim=True) + np.log(2)

    other.register_forward_hook(raise_new)
    return other


class TestBatching:
    @pytest.mark.parametrize("drafter", DRAFTERS)
    @pytest.mark.parametrize("name", TARGETS)
    def test_a_request_alone_says_what_it_says_in_a_batch(self, name, drafter):
        target, draft = TARGETS[name], DRAFTERS[drafter](TARGETS[name])
        together = texts(ragged(target, draft))
        for i, prompt in enumerate(PROMPTS):
            options = {"temperature": TEMPERATURE[i : i + 1], "seeds": 100 + i, "max_new_tokens": NEW}
            assert generate(target, draft, torch.tensor([prompt]), **options).sequences.tolist() == [together[i]]

    def test_requests_that_end_leave_the_others_alone(self, plain):
        target = TARGETS["llama"]
        stop = plain["llama"][0][len(PROMPTS[0]) + 3]
        cut = [row[: ([*row, stop]).index(stop, len(prompt)) + 1] for row, prompt in zip(plain["llama"], PROMPTS)]
        assert len({len(row) - len(prompt) for row, prompt in zip(cut, PROMPTS)}) >= 3  # they end at different times
        for draft in (None, noisy(target, 0.03), target, PromptLookup()):
            output = ragged(target, draft, method="strict", eos_token_id=stop)
            assert texts(output) == cut
            generated = output.sequences[:, -int(output.num_generated.max()) :]
            padding = torch.arange(generated.shape[1]) >= output.num_generated[:, None]
            assert (generated[padding] == stop).all()
            assert torch.equal(output.token_kinds == -1, padding)

    def test_an_accepted_stop_token_cuts_the_drafts_behind_it(self, plain):
        target = TARGETS["llama"]
        row = plain["llama"][0]
        stop = row[len(PROMPTS[0]) + 1]
        end = row.index(stop, len(PROMPTS[0])) + 1
        steps = []
        output = generate(
            target,
            target,
            torch.tensor(PROMPTS[:1]),
            method="strict",
            max_new_tokens=NEW,
            seeds=100,
            eos_token_id=[stop],
            on_step=steps.append,
        )
        assert output.sequences.tolist() == [row[:end]]
        drafted = end - len(PROMPTS[0])
        assert drafted <= 4
        assert [step.draft_token_ids for step in steps] == [row[len(PROMPTS[0]) : end]]
        assert output.stats.draft_tokens == output.stats.accepted_tokens == drafted

    def test_stop_and_padding_tokens_default_to_the_generation_config(self, plain):
        target = copy.deepcopy(TARGETS["llama"])
        stop = plain["llama"][0][len(PROMPTS[0]) + 3]
        target.generation_config.eos_token_id, target.generation_config.pad_token_id = [stop], 6
        output = ragged(target, PromptLookup(), method="strict")
        assert texts(output) == texts(ragged(TARGETS["llama"], None, eos_token_id=stop))
        assert (output.sequences[:, -output.token_kinds.shape[1] :][output.token_kinds == -1] == 6).all()
        assert texts(ragged(target, None, eos_token_id=[])) == plain["llama"]


class TestLimits:
    @pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 6, 11])
    def test_never_a_token_nor_a_call_too_many(self, new):
        target = TARGETS["llama"]
        output = ragged(target, target, max_new_tokens=new)
        assert output.num_generated.tolist() == [new] * len(PROMPTS)
        assert output.target_calls == -(-new // 5)  # all drafts are accepted, so 4 + 1 tokens a call
        assert output.draft_calls == new - output.target_calls
        assert output.stats.acceptance_rate == 1 or new == 1

    def test_max_length_counts_the_prompt_and_its_padding(self):
        output = ragged(TARGETS["llama"], PromptLookup(), max_new_tokens=None, max_length=12)
        assert output.sequences.shape[1] == 12

    @pytest.mark.parametrize("build_model", [llama, gpt2])
    def test_the_last_position_of_a_model_can_be_used(self, build_model):
        positions = 7 + NEW
        target = build_model(positions=positions)
        expected = texts(ragged(target, None))
        assert max(map(len, expected)) == positions
        assert texts(ragged(target, noisy(target, 0.03), method="strict", num_draft_tokens=9)) == expected

    def test_rotary_factors_that_change_with_the_length(self):
        target = phi3(switch=16)
        for prompts, new in [(PROMPTS, 10), ([[*range(8), *range(8), 5], [3, 1] * 9], 8)]:  # all within, or all beyond
            options = {"max_new_tokens": new, "temperature": 1.0, "seeds": 100, "method": "strict"}
            expected = [one_by_one(target, prompt, new, 1.0, 100 + i) for i, prompt in enumerate(prompts)]
            for draft in (None, noisy(target, 0.03), PromptLookup()):
                output = generate(target, draft, *padded(prompts), num_draft_tokens=9, **options)
                assert texts(output, prompts) == expected
        for who, models in {"target": (target, TARGETS["llama"]), "draft": (TARGETS["llama"], target)}.items():
            with pytest.raises(
                ValueError, match=rf"^max_new_tokens: the rotary factors of the {who} model .* 16 tokens"
            ):
                ragged(*models, max_new_tokens=11)

    @pytest.mark.parametrize("who", ["target", "draft"])
    def test_positions_beyond_the_last_are_refused(self, who):
        short, long = llama(positions=7 + NEW - 1), TARGETS["llama"]
        with pytest.raises(ValueError, match=rf"max_new_tokens: the {who} model has 22 positions, .* 23 tokens"):
            ragged(*((short, long) if who == "target" else (long, short)))


class TestCaches:
    def test_caches_are_rolled_back_to_the_longest_request(self):
        target = copy.deepcopy(TARGETS["llama"])
        draft = noisy(target, 0.1)
        lengths = dict(enumerate(map(len, PROMPTS)))  # of requests that go on
        calls = {target: [], draft: []}

        def on_call(model, _args, options, _output):
            cache = options["cache" if "cache" in options else "past_key_values"]
            (columns,) = {layer.keys.shape[-2] for layer in cache.layers}
            calls[model].append((columns - max(lengths.values()), options["input_ids"].shape[1]))

        def on_step(step):
            lengths[step.request] += len(step.token_ids)
            if lengths[step.request] == len(PROMPTS[step.request]) + NEW:
                del lengths[step.request]

        for model in calls:
            model.register_forward_hook(on_call, with_kwargs=True)
        output = ragged(target, draft, num_draft_tokens=3, on_step=on_step)
        assert 0.1 < output.stats.acceptance_rate < 0.9
        # The prompt is fed once; then the last token and the drafts, and the cache holds the longest request and these.
        assert calls[target][0] == (3, 7 + 3)
        assert all(beyond == fed - 1 <= 3 for beyond, fed in calls[target][1:])
        assert calls[draft][0] == (0, 7)
        assert all(beyond <= 2 and fed <= 2 for beyond, fed in calls[draft][1:])
        assert len(calls[target]) == output.target_calls
        assert len(calls[draft]) == output.draft_calls

    @pytest.mark.parametrize("method", ["strict", "block"])
    def test_each_draft_is_drawn_at_its_position_and_offset(self, method):
        # The offset is what gives a position other noise when a later step of block verification drafts it again.
        drawn = []

        class Recorder(RejectionSampler):
            def draft(self, *arguments, positions, offset=0, **options):
                drawn.append((positions.tolist(), offset))
                return super().draft(*arguments, positions=positions, offset=offset, **options)

        steps, target = [], TARGETS["llama"]
        draft, prompt = noisy(target, 0.1), torch.tensor(PROMPTS[:1])
        generate(target, draft, prompt, method=Recorder(method), max_new_tokens=NEW, seeds=100, on_step=steps.append)
        length, expected = len(PROMPTS[0]), []
        for step in steps:
            expected += [([length + i], i) for i in range(len(step.draft_token_ids))]
            length += len(step.token_ids)
        assert drawn == expected
        assert len({positions[0] for positions, _ in drawn}) < len(drawn)  # some positions were drafted again

    @pytest.mark.parametrize("name", TARGETS)
    def test_drafts_are_what_the_draft_model_says_without_a_cache(self, name):
        target = TARGETS[name]
        draft = noisy(target, 0.1)
        texts, steps = dict(enumerate(PROMPTS)), []
        output = ragged(target, draft, method="strict", num_draft_tokens=3, on_step=steps.append)
        assert 0.1 < output.stats.acceptance_rate < 0.9
        for row, token_ids, _, draft_ids in steps:
            drafted = one_by_one(draft, texts[row], len(draft_ids), TEMPERATURE[row], 100 + row)
            assert drafted == texts[row] + draft_ids
            texts[row] = texts[row] + token_ids

    def test_a_drafter_that_is_the_target_is_always_right(self):
        for method in ("strict", "probabilistic", "block"):
            for name in TARGETS:
                assert ragged(TARGETS[name], TARGETS[name], method=method).stats.acceptance_rate == 1

    @pytest.mark.parametrize(
        "mutant", ["keeps rejected columns", "moves all rows alike", "drops no finished row's cache"]
    )
    def test_mutants_are_caught(self, mutant, monkeypatch, plain):
        """Break the roll-back and see the tokens of strict verification change."""
        target = TARGETS["llama"]
        original = CachedModel.realign

        def realign(self, alignment):
            alignment = copy.copy(alignment)
            if mutant == "keeps rejected columns":
                alignment.columns = alignment.columns + 1
                alignment.max_shift = min(alignment.max_shift + 1, self.cache.num_columns - alignment.width + 1)
            elif mutant == "moves all rows alike":
                alignment.is_crop = True
            elif alignment.rows is not None:
                alignment.rows = torch.arange(len(alignment.rows))
            original(self, alignment)

        stop = plain["llama"][0][len(PROMPTS[0]) + 3]
        good = texts(ragged(target, noisy(target, 0.1), method="strict", eos_token_id=stop))
        assert good == texts(ragged(target, None, eos_token_id=stop))
        monkeypatch.setattr(CachedModel, "realign", realign)
        assert texts(ragged(target, noisy(target, 0.1), method="strict", eos_token_id=stop)) != good


class TestSteps:
    @pytest.mark.parametrize("drafter", [None, *DRAFTERS])
    def test_steps_add_up_to_the_output(self, drafter):
        target, steps = TARGETS["gpt2"], []
        draft = drafter and DRAFTERS[drafter](target)
        output = ragged(target, draft, on_step=steps.append)
        tokens, kinds = [[] for _ in PROMPTS], [[] for _ in PROMPTS]
        for step in steps:
            accepted = step.kinds.count(TokenKind.ACCEPTED)
            assert step.kinds[:accepted] == [TokenKind.ACCEPTED] * accepted
            assert step.token_ids[:accepted] == step.draft_token_ids[:accepted]
            last = TokenKind.RECOVERED if accepted < len(step.draft_token_ids) else TokenKind.BONUS
            assert step.kinds[accepted:] == [last if step.draft_token_ids else TokenKind.PLAIN]
            if last == TokenKind.RECOVERED and drafter == "lookup":
                assert step.token_ids[-1] != step.draft_token_ids[accepted]
            tokens[step.request] += step.token_ids
            kinds[step.request] += step.kinds
        assert output.sequences[:, -NEW:].tolist() == tokens
        assert output.token_kinds.tolist() == kinds
        if drafter:
            assert output.stats.accepted_tokens == int((output.token_kinds == TokenKind.ACCEPTED).sum())
            assert output.stats.draft_tokens == sum(len(step.draft_token_ids) for step in steps)
            assert output.stats.drafts == sum(bool(step.draft_token_ids) for step in steps)

    @pytest.mark.parametrize("rate", [0.0, 1.0])
    def test_a_synthetic_sampler_brings_its_schedule(self, rate):
        target = TARGETS["llama"]
        schedule = AcceptanceSchedule.from_mean_rate(rate, num_draft_tokens=3)
        sampler = RejectionSampler("synthetic", schedule=schedule)
        output = ragged(target, noisy(target, 0.5), method=sampler, num_draft_tokens=3, temperature=1.0)
        assert output.stats.acceptance_rate == rate
        assert output.num_generated.tolist() == [NEW] * len(PROMPTS)

    @pytest.mark.parametrize("drafter", ["close", "lookup"])
    def test_a_synthetic_sampler_need_not_accept_stop_tokens(self, drafter):
        target, stop, steps = TARGETS["llama"], 5, []
        sampler = RejectionSampler("synthetic", schedule=AcceptanceSchedule.from_mean_rate(1.0, num_draft_tokens=3))
        options = {"method": sampler, "num_draft_tokens": 3, "eos_token_id": stop, "on_step": steps.append}
        draft = DRAFTERS[drafter](target)
        ragged(target, draft, **options)
        assert any(TokenKind.ACCEPTED in step.kinds and step.token_ids[-1] == stop for step in steps)
        assert any(stop in step.draft_token_ids for step in steps)
        steps.clear()
        output = ragged(target, draft, accept_stop_tokens=False, **options)
        assert output.stats.acceptance_rate == 1
        assert not any(stop in step.draft_token_ids for step in steps)
        config = transformers.GenerationConfig(min_new_tokens=NEW)  # so that the target does not emit one either
        output = ragged(target, draft, accept_stop_tokens=False, generation_config=config, **options)
        assert output.num_generated.tolist() == [NEW] * len(PROMPTS)
        with pytest.raises(
            ValueError, match=r"^accept_stop_tokens: False is only for method 'synthetic', got .* 'strict'"
        ):
            ragged(target, draft, method="strict", accept_stop_tokens=False)


class TestStreamer:
    class Recorder(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.calls = []

        def put(self, value):
            self.calls.append(value.tolist())

        def end(self):
            self.calls.append("end")

    @pytest.mark.parametrize("drafter", [None, "itself", "lookup"])
    def test_it_gets_what_transformers_gives_it(self, drafter):
        target, prompt = TARGETS["llama"], torch.tensor(PROMPTS[:1])
        expected, got, steps = self.Recorder(), self.Recorder(), []
        target.generate(prompt, do_sample=False, max_new_tokens=NEW, pad_token_id=0, streamer=expected)
        options = {"temperature": 0, "max_new_tokens": NEW, "streamer": got, "on_step": steps.append}
        generate(target, drafter and DRAFTERS[drafter](target), prompt, **options)
        assert got.calls == expected.calls
        assert sum(len(step.token_ids) for step in steps) == NEW

    def test_it_is_for_one_request(self):
        with pytest.raises(ValueError, match=r"^streamer: expected one request, got 5: use on_step"):
            ragged(TARGETS["llama"], None, streamer=self.Recorder())
        with pytest.raises(TypeError, match=r"^streamer: expected one with the methods put and end, got int"):
            ragged(TARGETS["llama"], None, streamer=3)


class TestReturnSequences:
    @pytest.mark.parametrize("drafter", [None, "close", "lookup"])
    def test_each_prompt_is_continued_several_times(self, drafter):
        target = TARGETS["llama"]
        draft = drafter and DRAFTERS[drafter](target)
        ids, mask = padded(PROMPTS)
        options = {"method": "strict", "max_new_tokens": 5, "seeds": 100}
        output = generate(target, draft, ids, mask, num_return_sequences=3, temperature=HOT + 0.5, **options)
        thrice = {"temperature": (HOT + 0.5).repeat_interleave(3)}
        expected = generate(
            target, None, ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0), **thrice, **options
        )
        assert torch.equal(output.sequences, expected.sequences)
        assert len(set(map(tuple, output.sequences[:3].tolist()))) > 1  # each has its own noise
        config = transformers.GenerationConfig(do_sample=True, num_return_sequences=3)
        assert len(ragged(target, draft, generation_config=config, max_new_tokens=1).sequences) == 15

    def test_copies_of_greedy_text_are_refused(self):
        for options in ({"temperature": 0}, {"generation_config": transformers.GenerationConfig(do_sample=False)}):
            options = {"temperature": None} | options
            with pytest.raises(ValueError, match=r"^num_return_sequences: expected 1 with greedy decoding.* got 2"):
                ragged(TARGETS["llama"], None, num_return_sequences=2, **options)
        with pytest.raises(ValueError, match=r"^num_return_sequences: expected a positive int, got 0"):
            ragged(TARGETS["llama"], None, num_return_sequences=0)


class TestPromptLookup:
    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=3),
        st.integers(1, 4).flatmap(lambda most: st.tuples(st.just(most), st.integers(1, most))),
        st.integers(0, 6),
    )
    def test_it_copies_what_followed_the_latest_longest_match(self, rows, ngrams, num_draft_tokens):
        width = max(map(len, rows))
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows])  # padding that looks like a token
        lengths = torch.tensor([len(row) for row in rows])
        drafts = PromptLookup(*ngrams).propose(tokens, lengths, num_draft_tokens)
        assert drafts.tolist() == [self.look_up(row, *ngrams, num_draft_tokens) for row in rows]

    @staticmethod
    def look_up(row, max_ngram, min_ngram, num_draft_tokens):
        for size in range(min(max_ngram, len(row) - 1), min_ngram - 1, -1):
            for start in range(len(row) - size - 1, -1, -1):
                if row[start : start + size] == row[-size:]:
                    copied = list(row)
                    for i in range(num_draft_tokens):
                        copied.append(copied[start + size + i])
                    return copied[len(row) :]
        return [-1] * num_draft_tokens


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
        # All logits of the draft are near -50: a token of logit 0 beside them would be drafted every time.
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
            """As in PEFT: some arguments by name, the others handed on."""

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
        assert not output.sequences.is_inference()
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

    def test_inference_mode_changes_nothing(self):
        target, draft = TARGETS["llama"], noisy(TARGETS["llama"], 0.03)
        with torch.inference_mode():
            inside = ragged(target, draft)
        assert torch.equal(inside.sequences, ragged(target, draft).sequences)
        assert inside.stats.acceptance_rate > 0

    def test_layers_that_keep_other_state_are_refused(self):
        target = copy.deepcopy(TARGETS["llama"])
        target.config.layer_types = ["full_attention", "linear_attention"]
        with pytest.raises(ValueError, match="LlamaForCausalLM with layers of type linear_attention"):
            ragged(target, None)

    @pytest.mark.parametrize("model_class", [transformers.BartForCausalLM, transformers.TrOCRForCausalLM])
    def test_models_without_position_ids_do_not_count_padding(self, model_class):
        target = decoder(model_class)
        expected = [one_by_one(target, prompt, NEW, TEMPERATURE[i], 100 + i) for i, prompt in enumerate(PROMPTS)]
        for draft in (None, noisy(target, 0.03), PromptLookup()):
            assert texts(ragged(target, draft, method="strict")) == expected
        # A drafter of that kind beside a target that takes position_ids: its drafts are those without padding.
        steps, prompts = [], dict(enumerate(PROMPTS))
        ragged(TARGETS["llama"], target, method="strict", on_step=steps.append, max_new_tokens=5)
        for row, token_ids, _, draft_ids in steps:
            drafted = one_by_one(target, prompts[row], len(draft_ids), TEMPERATURE[row], 100 + row)
            assert drafted == prompts[row] + draft_ids
            prompts[row] = prompts[row] + token_ids

    def test_positions_that_depend_on_the_padding_token_are_refused(self):
        target = decoder(transformers.TrOCRForCausalLM, use_learned_position_embeddings=False)
        with pytest.raises(
            ValueError, match=r"^target: .* got TrOCRForCausalLM with use_learned_position_embeddings=False"
        ):
            ragged(target, None)

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
        # The third prompt ends in a token without an embedding. Its first step has no drafts, drafts or a model's drafts.
        target = copy.deepcopy(TARGETS["llama"])
        with torch.no_grad():
            target.get_input_embeddings().weight[PROMPTS[2][-1]] = torch.nan
        draft = {"none": None, "look-up": PromptLookup(), "model": TARGETS["llama"]}[drafter]
        prompt = torch.tensor([PROMPTS[2][-1:] * 3])  # so that look-up finds something
        for options in ({"input_ids": prompt}, dict(zip(("input_ids", "attention_mask"), padded(PROMPTS)))):
            with pytest.raises(ValueError, match=r"^target: expected finite logits, got only NaN or -inf for request"):
                generate(target, draft, **options, max_new_tokens=4, seeds=0)


def with_config(model, **fields):
    """The same model with a generation config of its own."""
    model = copy.copy(model)
    model.generation_config = transformers.GenerationConfig(**fields)
    return model


FIELDS = {
    "repetition_penalty": {"repetition_penalty": 1.9},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[4], [5], [1, 2]]},
    "suppress_tokens": {"suppress_tokens": [1, 3, 4]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [0, 1, 2, 4, 5]},
    "sequence_bias": {"sequence_bias": [[[2], 4.0], [[4, 5], -9.0]]},
    "min_new_tokens": {"min_new_tokens": 7, "eos_token_id": [1, 2, 3, 4]},
    "min_length": {"min_length": 13, "eos_token_id": [1, 2, 3, 4]},
    "forced_eos_token_id": {"forced_eos_token_id": 6},
    "exponential_decay": {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 7},
    "several": {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [4],
        "renormalize_logits": True,
    },
}
"""Fields that become logits processors, with values that change the text of at least one prompt."""


class Ban(transformers.LogitsProcessor):
    """A processor of a user: no token may follow itself, or a token that is one less."""

    def __call__(self, input_ids, scores):
        scores = scores.scatter(1, input_ids[:, -1:], -torch.inf)
        return scores.scatter(1, (input_ids[:, -1:] + 1) % VOCAB, -torch.inf)


class TestGenerationConfig:
    def expected(self, target, alone=False):
        """What transformers generates greedily for all prompts at once, or for each alone: new tokens of every request."""
        options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
        prompts = [padded([prompt]) for prompt in PROMPTS] if alone else [padded(PROMPTS)]
        rows = [
            target.generate(ids.clamp(min=0), attention_mask=mask, **options)[:, ids.shape[1] :]
            for ids, mask in prompts
        ]
        return torch.cat(rows)

    @pytest.mark.parametrize("field", FIELDS)
    def test_greedy_tokens_are_those_of_transformers(self, field):
        target = with_config(TARGETS["llama"], do_sample=False, **FIELDS[field])
        # In a padded batch transformers takes the padding for tokens, and bans n-grams that occur in it.
        expected = self.expected(target, alone="no_repeat_ngram_size" in FIELDS[field])
        assert not torch.equal(expected, self.expected(TARGETS["llama"])[:, : expected.shape[1]])  # the field matters
        for draft in (None, noisy(target, 0.05), PromptLookup()):
            output = ragged(target, draft, temperature=None)
            generated = output.sequences[:, -output.token_kinds.shape[1] :]
            assert torch.equal(generated.masked_fill(output.token_kinds == -1, 0), expected)

    @pytest.mark.parametrize("field", FIELDS)
    def test_strict_tokens_do_not_depend_on_the_drafter(self, field):
        target = with_config(TARGETS["gpt2"], **FIELDS[field])
        plain = texts(ragged(target, None))
        for draft in (noisy(target, 0.03), target, PromptLookup()):
            assert texts(ragged(target, draft, method="strict")) == plain

    @pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
    def test_a_drafter_that_is_the_target_is_always_right(self, method):
        # The rows of the draft model are processed as those of the target are, each with its own prefix.
        target = with_config(TARGETS["llama"], **FIELDS["several"], top_k=4)
        assert ragged(target, target, method=method, temperature=1.5).stats.acceptance_rate == 1

    def test_a_given_config_wins_over_the_target_and_arguments_win_over_both(self):
        target = with_config(TARGETS["llama"], do_sample=True, temperature=0.5, top_k=2, suppress_tokens=[1, 3])
        given_config = transformers.GenerationConfig(temperature=2.0, suppress_tokens=[4])
        options = {"temperature": None, "generation_config": given_config, "max_new_tokens": 8}
        bare, new = TARGETS["llama"], {"max_new_tokens": 8}
        four = transformers.GenerationConfig(suppress_tokens=[4])
        expected = texts(ragged(bare, None, temperature=2.0, top_k=2, generation_config=four, **new))
        assert texts(ragged(target, None, **options)) == expected
        expected = texts(ragged(bare, None, temperature=0.9, generation_config=four, **new))
        assert texts(ragged(target, None, **options | {"temperature": 0.9, "top_k": 0})) == expected
        assert given_config.top_k is None  # which was not written to

    def test_the_config_decides_how_tokens_are_drawn(self):
        bare = TARGETS["llama"]
        for fields, same in [
            ({"do_sample": True, "temperature": 1.4, "top_k": 3}, {"temperature": 1.4, "top_k": 3}),
            ({"top_p": 0.6}, {"temperature": 1.0, "top_p": 0.6}),
            ({"do_sample": True, "min_p": 0.3}, {"temperature": 1.0, "min_p": 0.3}),
            ({"do_sample": False, "top_k": 3}, {"temperature": 0.0}),
            ({}, {"temperature": 1.0}),
        ]:
            target = with_config(bare, **fields)
            assert texts(ragged(target, None, temperature=None)) == texts(ragged(bare, None, **same))

    def test_lengths_come_from_the_config(self):
        target, none = TARGETS["llama"], {"max_new_tokens": None}
        for fields, new in [({"max_new_tokens": 3, "max_length": 30}, 3), ({"max_length": 12}, 5)]:
            assert ragged(with_config(target, **fields), None, **none).num_generated.tolist() == [new] * len(PROMPTS)
        longer = with_config(target, max_new_tokens=3)
        assert ragged(longer, None, max_new_tokens=None, max_length=11).num_generated.tolist() == [4] * len(PROMPTS)

    def test_processors_that_are_given_see_their_own_prefix(self):
        target, prompt = TARGETS["llama"], torch.tensor(PROMPTS[:1])
        options = {"max_new_tokens": NEW, "logits_processor": transformers.LogitsProcessorList([Ban()])}
        expected = target.generate(prompt, do_sample=False, pad_token_id=0, **options)
        assert not torch.equal(expected, target.generate(prompt, do_sample=False, pad_token_id=0, max_new_tokens=NEW))
        for draft in (None, noisy(target, 0.05), PromptLookup()):
            assert torch.equal(generate(target, draft, prompt, temperature=0, **options).sequences, expected)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"num_beams": 4}, "num_beams = 4 is not supported: beam search .* Set it to 1 in generation_config"),
            ({"guidance_scale": 1.5}, "guidance_scale = 1.5 is not supported"),
            ({"stop_strings": ["a"]}, r"stop_strings = \['a'\] .* Set it to None in target.generation_config"),
            ({"max_time": 2.0}, "max_time = 2.0 is not supported"),
            ({"typical_p": 0.5}, "typical_p = 0.5 is not supported: use top_k"),
            ({"encoder_repetition_penalty": 1.5}, "encoder_repetition_penalty = 1.5 is not supported"),
            ({"top_p": 0.9, "min_p": 0.1}, "min_p = 0.1 and top_p = 0.9 together"),
            (
                {"exponential_decay_length_penalty": (2, 1.5)},
                "exponential_decay_length_penalty = .* needs a stop token",
            ),
        ],
    )
    def test_what_cannot_be_honoured_is_refused_by_name(self, fields, message):
        with pytest.raises(ValueError, match=f"^generation_config: {message}"):
            ragged(with_config(TARGETS["llama"], **fields), None)

    def test_fields_in_the_config_of_the_model_are_refused_as_by_transformers(self):
        target = copy.deepcopy(TARGETS["llama"])
        target.config.repetition_penalty = 1.5
        with pytest.raises(
            ValueError, match=r"^target.config: .*repetition_penalty.* set it in target.generation_config"
        ):
            ragged(target, None)

    def test_what_changes_nothing_is_not_refused(self):
        neutral = {
            "num_beams": 1,
            "guidance_scale": 1.0,
            "typical_p": 1.0,
            "use_cache": False,
            "top_p": 1.0,
            "min_p": 0.1,
        }
        ragged(with_config(TARGETS["llama"], **neutral), None, max_new_tokens=1)
        ragged(with_config(TARGETS["llama"], typical_p=0.5), None, max_new_tokens=1, temperature=0)
        both = with_config(TARGETS["llama"], top_p=0.9, min_p=0.1)
        ragged(both, None, max_new_tokens=1, top_p=0.9, min_p=0.1)

    def test_processors_with_state_and_other_things_are_refused(self):
        state = transformers.PrefixConstrainedLogitsProcessor(lambda *_: [1], 1)
        with pytest.raises(ValueError, match=r"^logits_processor: PrefixConstrainedLogitsProcessor is not supported"):
            ragged(TARGETS["llama"], None, logits_processor=[state])
        with pytest.raises(TypeError, match=r"^logits_processor: expected scores to be returned, got NoneType"):
            ragged(TARGETS["llama"], None, logits_processor=[lambda ids, scores: None])
        with pytest.raises(TypeError, match=r"^logits_processor: expected a list of functions"):
            ragged(TARGETS["llama"], None, logits_processor=Ban())
        with pytest.raises(TypeError, match=r"^generation_config: expected a GenerationConfig or None, got dict"):
            ragged(TARGETS["llama"], None, generation_config={"top_k": 3})
        with pytest.raises(ValueError, match=r"^logits_processor: expected scores of shape"):
            ragged(TARGETS["llama"], None, logits_processor=[lambda ids, scores: scores[:, :3]])
        with pytest.raises(ValueError, match="got only NaN or -inf for request 0, logits processors included"):
            ragged(with_config(TARGETS["llama"], suppress_tokens=list(range(VOCAB))), None)

    @pytest.mark.parametrize("method", ["probabilistic", "block"])
    def test_several_steps_have_the_distribution_of_the_processed_target(self, method):
        # With 20,000 requests a total variation of 0.045 is seen 999 times in 1,000, as in `TestDistribution`.
        target, vocab, new, prompt = llama(4, layers=1, scale=0.2), 4, 3, [0, 0, 3, 3]
        processor = transformers.RepetitionPenaltyLogitsProcessor(3.0)
        joint = {(): 1.0}
        for _ in range(new):
            ids = torch.tensor([[*prompt, *tokens] for tokens in joint])
            with torch.no_grad():
                rows = processor(ids, target(input_ids=ids).logits[:, -1]).softmax(-1).tolist()
            joint = {(*old, v): joint[old] * row[v] for old, row in zip(list(joint), rows) for v in range(vocab)}
        config = transformers.GenerationConfig(repetition_penalty=3.0)
        options = {"num_draft_tokens": 2, "max_new_tokens": new, "seeds": 0, "generation_config": config}
        ids = torch.tensor([prompt]).expand(20_000, -1)
        output = generate(target, noisy(target, 0.1), ids, method=method, **options)
        codes = output.sequences[:, -new:].numpy() @ vocab ** np.arange(new)[::-1]
        assert p_value(np.bincount(codes, minlength=vocab**new), np.array(list(joint.values()))) > FALSE_ALARM


class TestErrors:
    @pytest.mark.parametrize(
        ("message", "options"),
        [
            ("max_new_tokens: expected exactly one of .* got None and None", {"max_new_tokens": None}),
            (
                "max_new_tokens: expected exactly one of .* got 3 and 4",
                {"max_new_tokens": 3, "max_length": 4},
            ),
            ("max_new_tokens: expected a positive int, got 0", {"max_new_tokens": 0}),
            (
                "max_length: expected more than the 3 columns of input_ids, got 3",
                {"max_new_tokens": None, "max_length": 3},
            ),
            ("num_draft_tokens: expected a positive int, got 0", {"num_draft_tokens": 0}),
            ("method: expected one of .* got 'greedy'", {"method": "greedy"}),
            ("temperature: expected a finite float >= 0, got -1", {"temperature": -1.0}),
            (r"temperature: expected shape \[1\], got \[2\]", {"temperature": torch.ones(2)}),
            (r"seeds: expected shape \[1\], got \[2\]", {"seeds": torch.zeros(2, dtype=torch.int64)}),
            (r"attention_mask: expected shape \[1, 3\]", {"attention_mask": torch.ones(1, 2, dtype=torch.int64)}),
            (r"eos_token_id: expected ids in \[0, 8\), got -1", {"eos_token_id": -1}),
            ("attention_mask: expected 0 or 1", {"attention_mask": torch.tensor([[0, 1, 2]])}),
            (r"padding on the left only, .* got \[1, 1, 0\] in row 0", {"attention_mask": torch.tensor([[1, 1, 0]])}),
            (r"padding on the left only, .* got \[1, 0, 1\] in row 0", {"attention_mask": torch.tensor([[1, 0, 1]])}),
            (r"at least one token, got \[0, 0, 0\] in row 0", {"attention_mask": torch.tensor([[0, 0, 0]])}),
            (r"input_ids: expected ids in \[0, 8\), got 8", {"input_ids": torch.tensor([[1, 8, 2]])}),
            (r"input_ids: expected ids in \[0, 8\), got -100", {"input_ids": torch.tensor([[-100, 1]])}),
            (r"input_ids: expected shape \[batch, prompt\]", {"input_ids": torch.tensor([1, 2])}),
            (r"input_ids: expected shape \[batch, prompt\]", {"input_ids": torch.zeros(1, 0, dtype=torch.int64)}),
            ("draft: expected a model with the target's tokenizer, .* 8 tokens, got 9", {"draft": llama(9)}),
        ],
    )
    def test_values(self, message, options):
        options = {"draft": PromptLookup(), "input_ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 4} | options
        with pytest.raises(ValueError, match=message):
            generate(TARGETS["llama"], **options)

    def test_types(self):
        ids = torch.tensor([[1, 2, 3]])
        with pytest.raises(TypeError, match="draft: expected a Hugging Face causal language model, got str"):
            generate(TARGETS["llama"], "lookup", ids, max_new_tokens=4)
        with pytest.raises(TypeError, match="input_ids: expected dtype int64, got float32"):
            generate(TARGETS["llama"], None, ids.float(), max_new_tokens=4)
        for eos_token_id in ("2", 3.0, [1, None], torch.tensor(2)):
            with pytest.raises(TypeError, match="eos_token_id: expected an int"):
                generate(TARGETS["llama"], None, ids, max_new_tokens=4, eos_token_id=eos_token_id)
        with pytest.raises(TypeError, match="on_step: expected a function of a Step, got int"):
            generate(TARGETS["llama"], None, ids, max_new_tokens=4, on_step=5)
        with pytest.raises(TypeError, match=r"num_draft_tokens: expected a positive int, got 2\.0"):
            generate(TARGETS["llama"], None, ids, num_draft_tokens=2.0, max_new_tokens=4)

    def test_ngrams(self):
        with pytest.raises(ValueError, match="max_ngram: expected a positive int, got 0"):
            PromptLookup(0)
        with pytest.raises(ValueError, match="min_ngram: expected a positive int, got 0"):
            PromptLookup(min_ngram=0)
        with pytest.raises(ValueError, match="min_ngram: expected at most max_ngram = 3, got 4"):
            PromptLookup(min_ngram=4)


@pytest.mark.skipif("conv" not in CACHED_BY_COLUMN, reason="of a newer transformers")
class TestConvolutions:
    """Decoders with short convolutions among their attention layers: what these are over is kept by column."""

    @pytest.mark.parametrize("drafter", ["close", "far", "itself", "lookup", None])
    @pytest.mark.parametrize("prompts", [PROMPTS, [[i] for i in range(VOCAB)]], ids=["ragged", "of one token"])
    def test_strict_emits_what_the_model_says_without_a_cache(self, prompts, drafter):
        target, new = lfm2(), 8
        draft = drafter and DRAFTERS[drafter](target)
        output = generate(target, draft, *padded(prompts), max_new_tokens=new, method="strict", seeds=100)
        for row, prompt in enumerate(prompts):
            expected = one_by_one(target, prompt, new, 1.0, 100 + row)
            assert output.sequences[row, -new:].tolist() == expected[-new:]
        assert drafter != "itself" or output.stats.acceptance_rate == 1

    def test_greedy_tokens_are_those_of_transformers(self):
        target, ids = lfm2(), torch.tensor([PROMPTS[0]])
        expected = target.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        output = generate(target, noisy(target, 0.05), ids, max_new_tokens=NEW, temperature=0)
        assert torch.equal(output.sequences, expected)
        assert 0 < output.stats.acceptance_rate < 1

    def test_a_bias_which_padding_has_too_changes_nothing(self):
        target = lfm2(conv_bias=True)
        prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2], [1, 2, 3]]
        output = generate(
            target, noisy(target, 0.05), *padded(prompts), max_new_tokens=8, method="strict", temperature=1, seeds=100
        )
        expected = [one_by_one(target, prompt, 8, 1.0, 100 + row) for row, prompt in enumerate(prompts)]
        assert texts(output, prompts) == expected
