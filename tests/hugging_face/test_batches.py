"""Batches of requests with Hugging Face models: limits, caches, steps, streaming, prompt lookup."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode import AcceptanceSchedule, RejectionSampler
from tests.conftest import combine
from tests.hugging_face.common import (
    DRAFTERS,
    HOT,
    NEW,
    PROMPTS,
    TARGETS,
    TEMPERATURE,
    TRUNCATION,
    VOCAB,
    build,
    gpt2,
    llama,
    noisy,
    of_request,
    one_by_one,
    padded,
    phi3,
    ragged,
    texts,
)

transformers = pytest.importorskip("transformers")

from specdecode.integrations.transformers import PromptLookup, TokenKind, generate  # noqa: E402
from specdecode.integrations.transformers.models import CachedModel  # noqa: E402


class TestBatching:
    @pytest.mark.parametrize(
        ("drafter", "truncates", "method"),
        combine(["close", "far", "lookup"], [False, True], ["probabilistic", "block"]),
    )
    def test_a_request_alone_says_what_it_says_in_a_batch(self, drafter, truncates, method):
        target, draft = TARGETS["llama"], DRAFTERS[drafter](TARGETS["llama"])
        together = texts(ragged(target, draft, method=method, temperature=HOT, **TRUNCATION if truncates else {}))
        for i, prompt in enumerate(PROMPTS):
            options = {"temperature": float(HOT[i]), "seeds": 100 + i, "max_new_tokens": NEW, "method": method}
            options |= of_request(i) if truncates else {}
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

    @pytest.mark.parametrize("build_model", [llama, gpt2])
    def test_the_last_position_of_a_model_can_be_used(self, build_model):
        positions = 7 + NEW
        target = build_model(positions=positions)
        expected = texts(ragged(target, None))
        assert max(map(len, expected)) == positions
        assert texts(ragged(target, noisy(target, 0.03), method="strict", num_draft_tokens=9)) == expected

    @pytest.mark.parametrize("who", ["target", "draft"])
    @pytest.mark.parametrize("name", ["table", "dynamic", "longrope"])
    def test_models_are_used_up_to_the_length_where_positions_end_or_change(self, name, who):
        limited = {
            "table": lambda: gpt2(positions=17),
            "dynamic": lambda: llama(
                positions=17, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "longrope": lambda: phi3(switch=17),
        }[name]()
        models = (limited, TARGETS["llama"]) if who == "target" else (TARGETS["llama"], limited)
        options = {"method": "strict", "temperature": 1.0, "num_draft_tokens": 9, "max_new_tokens": 10}
        expected = [one_by_one(models[0], prompt, 10, 1.0, 100 + i) for i, prompt in enumerate(PROMPTS)]
        assert texts(ragged(*models, **options)) == expected
        with pytest.raises(ValueError, match=rf"^max_new_tokens: the {who} model has 17 positions, .* 18 tokens"):
            ragged(*models, **options | {"max_new_tokens": 11})

    @pytest.mark.parametrize("rope_type", ["default", "linear", "llama3"])
    def test_other_rotary_positions_go_on_beyond_what_the_config_names(self, rope_type):
        rope = {
            "rope_type": rope_type,
            "rope_theta": 1e4,
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        target = llama(positions=10, rope_parameters=rope | {"original_max_position_embeddings": 5})
        expected = [one_by_one(target, prompt, NEW, TEMPERATURE[i], 100 + i) for i, prompt in enumerate(PROMPTS)]
        assert texts(ragged(target, noisy(target, 0.03), method="strict")) == expected

    def test_positions_by_distance_go_on_without_end(self):
        sizes = {"vocab_size": VOCAB, "hidden_size": 16, "n_head": 2, "n_layer": 2, "bos_token_id": None}
        config = transformers.BloomConfig(**sizes, eos_token_id=None)
        target = build(transformers.BloomForCausalLM, config).float()  # its padding masks overflow in float64
        ids, mask = padded(PROMPTS)
        options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        expected = target.generate(ids.clamp(min=0), **options)[:, -NEW:]
        output = generate(target, PromptLookup(), ids, mask, max_new_tokens=NEW, temperature=0)
        assert torch.equal(output.sequences[:, -NEW:], expected)


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
        # The offset changes the noise of a position that a later step of block verification drafts again.
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

    @pytest.mark.parametrize(
        "mutant", ["keeps rejected columns", "moves all rows alike", "drops no finished row's cache"]
    )
    def test_mutants_are_caught(self, mutant, monkeypatch, plain):
        """Break the roll-back: the tokens of strict verification change."""
        target = TARGETS["llama"]
        original = CachedModel.realign

        def realign(self, alignment):
            alignment = copy.copy(alignment)
            if mutant == "keeps rejected columns":
                alignment.columns = alignment.columns + 1
                alignment.max_shift = min(alignment.max_shift + 1, self.num_columns - alignment.width + 1)
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
    def test_tensors_do_not_come_from_the_default_device(self):
        target, batch, prompt = TARGETS["llama"], padded(PROMPTS), torch.tensor(PROMPTS[:1])
        options, streamer = {"max_new_tokens": NEW, "seeds": 100, "eos_token_id": [5, 6]}, self.Recorder()
        for draft in (None, noisy(target, 0.1), PromptLookup()):
            expected = generate(target, draft, *batch, **options)
            with torch.device("meta"):  # whose tensors have no data
                output = generate(target, draft, *batch, **options)
                generate(target, draft, prompt, max_new_tokens=2, streamer=streamer)
            assert torch.equal(output.sequences, expected.sequences)
        assert len(streamer.calls) == 3 * 4

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
