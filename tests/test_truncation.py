"""Top-k, top-p and min-p: the kept tokens, and exactness of every method for the truncated target."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import torch

from reference import oracle, sampling, truncation
from reference.sampling import Sampling, cutoff, truncate
from reference.sampling import sample as sample_row
from specdecode import RejectionSampler, backends, eager, sample
from specdecode import Sampling as PackageSampling
from tests.conftest import ON_GPU, combine
from tests.support import distributions
from tests.support.differential import case
from tests.support.enumeration import Case as Models
from tests.support.enumeration import (
    Table,
    decode,
    distribution,
    history,
    iid,
    marginal,
    normalised,
    sequence_distribution,
)
from tests.support.exactness import METHODS, assert_same_distribution
from tests.support.mutants import Mutant, assert_caught
from tests.support.oracle import SCHEDULE
from tests.support.truncated import ROWS_THAT_HURT, TRUNCATIONS, kept_tokens, of_request

NAN, INF = float("nan"), float("inf")
DEVICES = ["cpu", "cuda"] if ON_GPU else ["cpu"]

# ---------------------------------------------------------------------------------------------------------------------
# The reference, by enumeration
# ---------------------------------------------------------------------------------------------------------------------


def truncated(model: Table, options: Mapping) -> Table:
    """Return the model with truncated rows."""

    def row(prefix: tuple[int, ...]) -> list[Fraction]:
        whole = model(prefix)
        kept = kept_tokens(whole, **options)
        mass = sum(whole[token] for token in kept)
        return [probability / mass if token in kept else Fraction(0) for token, probability in enumerate(whole)]

    return row


def mapped(**options: float) -> Mapping:
    return options


MODELS = Models(history(1, 4), history(2, 4), (2,), 3)
CASES = {
    "top-k": replace(MODELS, truncation=mapped(top_k=2)),
    "top-k of one": replace(MODELS, truncation=mapped(top_k=1)),
    "top-p": replace(MODELS, truncation=mapped(top_p=0.61)),
    "min-p": replace(MODELS, truncation=mapped(min_p=0.37)),
    "all three": replace(MODELS, truncation=mapped(top_k=3, top_p=0.77, min_p=0.13)),
    "top-k before top-p": Models(
        iid(40, 30, 20, 10), iid(30, 40, 20, 10), (2,), 3, truncation=mapped(top_k=3, top_p=0.75)
    ),
    "ties": Models(iid(2, 3, 3, 3), iid(3, 3, 2, 3), (2,), 3, truncation=mapped(top_k=2)),
    "untruncated drafts": replace(MODELS, truncation=mapped(top_p=0.61), draft_truncation=mapped()),
    "drafts truncated otherwise": replace(MODELS, truncation=mapped(top_k=3), draft_truncation=mapped(top_p=0.41)),
    "only drafts truncated": replace(MODELS, draft_truncation=mapped(top_k=2)),
    "two steps": Models(history(1, 3), history(2, 3), (2, 1), 4, truncation=mapped(top_k=2)),
    "temperature": replace(MODELS, temperature=0.6, truncation=mapped(top_p=0.71)),
}


def check(method: str, models: Models) -> None:
    """Check that tokens have the joint distribution of the truncated target, and drafts the expected acceptance."""
    run, plain = METHODS[method], replace(models, truncation={}, draft_truncation=None)
    of_drafts = models.truncation if models.draft_truncation is None else models.draft_truncation
    plain = replace(plain, target=truncated(models.target, models.truncation), draft=truncated(models.draft, of_drafts))
    verify = run.verify
    if "strict" in method or "no-draft-logits" in method:  # drafts may have any sampling parameters
        verify = without_draft_sampling(verify)
    joint = distribution(lambda chance: decode(chance, models, verify, run.domains))
    assert_same_distribution(
        marginal(joint, lambda outcome: outcome[0]), sequence_distribution(plain.target, models.num_tokens)
    )
    accepted = marginal(joint, lambda outcome: outcome[1][0])
    assert_same_distribution(accepted, run.accepted_distribution(plain))


def without_draft_sampling(verify):
    def call(*arguments, draft_sampling=None, **keywords):
        return verify(*arguments, **keywords)

    return call


@pytest.mark.parametrize("models", CASES)
@pytest.mark.parametrize("method", [method for method in METHODS if method != "strict-shared-noise"])
def test_the_joint_distribution_of_the_tokens_is_the_truncated_targets(method, models):
    check(method, CASES[models])


def random_rows(count: int) -> Iterator[tuple[list[Fraction], dict]]:
    """Yield random rows, many of them with ties, and options for each."""
    random = np.random.default_rng(0)
    for _ in range(count):
        weights = random.integers(0, 6, size=random.integers(1, 9))
        weights[random.integers(len(weights))] = 6
        options = {
            "top_k": int(random.integers(0, 5)),
            "top_p": float(random.choice([1.0, 0.93, 0.5001, 0.17])),
            "min_p": float(random.choice([0.0, 0.17, 0.51])),
        }
        yield normalised(weights), options


def check_formulas(rows: int = 200) -> None:
    """Check that the text-book rules, on probabilities, give exactly the distribution of the rules in fractions."""
    for row, options in random_rows(rows):
        exact = {name: Fraction(value) if name != "top_k" else value for name, value in options.items()}
        kept = kept_tokens(row, **options)
        mass = sum(row[token] for token in kept)
        expected = [row[token] / mass if token in kept else 0 for token in range(len(row))]
        probs = np.array(row, dtype=object)
        assert truncation.truncate(probs, **exact).tolist() == expected, (row, options)
        assert truncation.cutoff(probs, **exact) == kept[-1]


def check_kept(rows: int = 200) -> None:
    """Check that the oracle keeps the same tokens as the rules in fractions."""
    for row, options in random_rows(rows):
        with np.errstate(divide="ignore"):
            logits = np.log(np.array(row, dtype=float))
        kept = kept_tokens(row, **options)
        result, margin = truncate(logits, Sampling(**options))
        if margin > 1e-9:
            assert np.flatnonzero(np.isfinite(result)).tolist() == sorted(kept), (row, options)
            assert cutoff(logits, Sampling(**options)) == kept[-1]


def test_what_is_kept_follows_the_rules():
    check_kept(2000)
    check_formulas(2000)


def test_rows_with_nothing_to_leave_out_stay_as_they_are():
    for row in ([NAN, -INF], [-INF, -INF]):
        assert np.array_equal(truncate(row, Sampling(top_k=1, top_p=0.5))[0][0], row[0], equal_nan=True)
    assert truncate([1.0, INF, INF], Sampling(top_k=2))[0].tolist() == [-INF, INF, -INF]  # a point mass


T, S = truncation, sampling
joint = partial(check, "probabilistic", CASES["all three"])
order = partial(check, "probabilistic", CASES["top-k before top-p"])
ties = partial(check, "probabilistic", CASES["ties"])
MUTANTS = [
    Mutant("top-p before top-k", S.choose_num_kept, "probs = np.exp(logprobs[:count])", "probs = np.exp(logprobs)", order),
    Mutant("the mass not renormalised after top-k", S.choose_num_kept, "sampling.top_p * probs.sum()", "sampling.top_p",
           order),
    Mutant("the token that crosses p dropped", S.choose_num_kept, "count = 1 + int((slack > 0).sum())",
           "count = max(1, int((np.log(sampling.top_p * probs.sum()) >= np.log(before + probs)).sum()))", joint),
    Mutant("ties kept", S.truncate, "logits[order[kept.index :]] = -np.inf",
           "logits[logits < logits[order[kept.index - 1]]] = -np.inf", ties),
    Mutant("the order of ids reversed", T.token_order, 'np.argsort(-scores, kind="stable")',
           'np.argsort(scores, kind="stable")[::-1]', ties),
    Mutant("min-p of the mass", S.choose_num_kept, "logprobs[:count] - logprobs[0] - np.log", "logprobs[:count] - np.log",
           partial(check, "probabilistic", CASES["min-p"])),
    Mutant("q not truncated", oracle.Request.draft, "self.draft_sampling)", "Sampling(self.draft_sampling.temperature))",
           joint),
    Mutant("q truncated as the target samples", oracle.Request.draft, "self.draft_sampling)", "self.sampling)",
           partial(check, "probabilistic", CASES["untruncated drafts"])),
    *(Mutant(f"p not truncated, {method}", oracle.Request.target, "self.sampling)", "Sampling(self.sampling.temperature))",
             partial(check, method, CASES["all three"])) for method in ("probabilistic", "block", "strict")),
    Mutant("top-p before top-k, on probabilities", T.num_kept, "probs.sum()", "1", check_formulas),
    Mutant("the token that crosses p dropped, on probabilities", T.num_kept, "before < top_p * probs.sum()",
           "(before + probs <= top_p * probs.sum()) | (before == 0)", check_formulas),
    Mutant("min-p of the smallest, on probabilities", T.num_kept, "min_p * probs[0]", "min_p * probs[-1]", check_formulas),
    Mutant("tokens without probability kept", T.num_kept, "(probs > 0) & ", "", check_formulas),
    Mutant("not normalised", T.truncate, "truncated / truncated.sum()", "truncated", check_formulas),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants_are_caught(mutant):
    assert_caught(mutant)


# ---------------------------------------------------------------------------------------------------------------------
# The package against the reference
# ---------------------------------------------------------------------------------------------------------------------

VERIFY = ("strict", "probabilistic", "block", "synthetic")


def sampler_of(method: str) -> RejectionSampler:
    return RejectionSampler(method, schedule=SCHEDULE if method == "synthetic" else None)


def truncated_tables(rows: list[np.ndarray], temperature: float, options: Mapping) -> list[np.ndarray]:
    """Return logits for every prefix, -inf for excluded tokens."""
    result = []
    for logits in rows:
        cut = np.full_like(logits, -INF)
        for row, whole, probabilities in zip(cut, logits, distributions.softmax(logits / temperature)):
            kept = kept_tokens(list(probabilities), **options)
            row[kept] = whole[kept]
        result.append(cut)
    return result


OF_DRAFTS = {"as the target": None, "not truncated": {}, "otherwise": {"top_k": 2}}
STEPS = [
    (method, drafts)
    for method in ("strict", "probabilistic", "block")
    for drafts in OF_DRAFTS
    if ON_GPU or (method, drafts) in {("probabilistic", "not truncated"), ("block", "as the target")}
]


@pytest.mark.parametrize(("method", "of_drafts"), STEPS)
@pytest.mark.parametrize(
    ("vocab", "drafts", "options"),
    [(5, 2, {"top_k": 4, "top_p": 0.85, "min_p": 0.02}), *([(3, 3, {"top_p": 0.8}), (8, 1, {"top_k": 4})] * ON_GPU)],
)
def test_many_steps_have_the_truncated_targets_distribution(place, method, of_drafts, vocab, drafts, options):
    (backend, device), temperature, of_drafts = place, 0.8, OF_DRAFTS[of_drafts]
    model = distributions.tables(vocab, drafts, seed=vocab)
    sampler = RejectionSampler(method, backend=backend)
    tokens, num_accepted = distributions.run(sampler, model, device, temperature, options, of_drafts)
    cut = distributions.Tables(
        truncated_tables(model.target, temperature, options),
        truncated_tables(model.draft, temperature, options if of_drafts is None else of_drafts),
    )
    counts = distributions.counts_of_tokens(model, tokens)
    distributions.assert_distribution(counts, distributions.joint_distribution(cut, temperature))
    whole = distributions.joint_distribution(model, temperature)
    assert distributions.p_value(counts, whole) < distributions.FALSE_ALARM  # the test can distinguish the two
    if method != "strict":
        accepted = {
            "probabilistic": partial(distributions.accepted_distribution, accepted_draft=np.minimum),
            "block": distributions.accepted_distribution_of_blocks,
        }[method]
        distributions.assert_distribution(
            np.bincount(num_accepted, minlength=drafts + 1), accepted(cut, temperature=temperature)
        )


@pytest.mark.parametrize("method", VERIFY)
def test_a_top_k_of_one_is_greedy_where_no_draft_row_matters(method, monkeypatch):
    batch, seen = case(6, 3, 40, torch.float32, seed=3), []
    batch.target_logits[0, 0], batch.target_logits[1, 0, 3] = NAN, INF

    def verify(method, arguments, schedule):
        seen.append((arguments.temperature, arguments.is_truncated))
        return eager.verify(method, arguments, schedule)

    monkeypatch.setattr(backends, "verifier_of", lambda *_: Namespace(verify=verify))
    draft_logits = batch.draft_logits if method == "strict" else None
    rows = batch.target_logits, batch.draft_token_ids, draft_logits
    numbers = {"seeds": batch.seeds, "positions": batch.positions, "logprobs": "processed"}
    one, as_tensor, greedy = (
        sampler_of(method)(*rows, **numbers, **options)
        for options in (
            {"temperature": batch.temperature, "top_k": 1, "top_p": 0.9},
            {"temperature": batch.temperature, "top_k": torch.ones(6, dtype=torch.int64)},
            {"temperature": 0.0},
        )
    )
    assert seen[0] == seen[2] == (0.0, False)
    assert seen[1][1]
    for got, want in zip((*one, *one), (*greedy, *as_tensor)):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    rows, seeds = batch.target_logits[:, 1], batch.seeds
    assert torch.equal(sample(rows, batch.temperature, seeds, top_k=1), sample(rows, 0.0))


@pytest.mark.parametrize("options", TRUNCATIONS)
@pytest.mark.parametrize("method", ["probabilistic", "block", "strict"])
def test_drafting_hands_on_what_verification_needs(method, options):
    """With the logsumexp and the cutoff of truncated draft rows, the tokens are the same as after reading the rows again."""
    batch, options, sampler = case(6, 3, 1500, torch.bfloat16, seed=4), TRUNCATIONS[options], sampler_of(method)
    numbers = {"temperature": batch.temperature, "seeds": batch.seeds}
    steps = [
        sampler.draft(batch.draft_logits[:, i], **numbers, positions=batch.positions + i, offset=i, **options)
        for i in range(3)
    ]
    columns = zip(*steps)
    ids, logsumexp, cutoffs = (torch.stack(column, dim=1) for column in columns)
    assert logsumexp.dtype == torch.float32
    for index in range(6):
        sampling = Sampling(float(batch.temperature[index]), **of_request(options, index))
        for offset in range(3):
            row = batch.draft_logits[index, offset].double().numpy()
            result, margin = truncate(row, sampling)
            if margin > batch.band("eager") and sampling.temperature > 0:
                is_whole = of_request(options, index) == {"top_k": 0, "top_p": 1, "min_p": 0}
                assert int(cutoffs[index, offset]) == (-1 if is_whole else cutoff(row, sampling))
                kept = result[np.isfinite(result)] / sampling.temperature
                whole = kept.max() + np.log(np.exp(kept - kept.max()).sum())
                np.testing.assert_allclose(float(logsumexp[index, offset]), whole, rtol=1e-5, atol=1e-5)
    arguments = batch.target_logits, ids, batch.draft_logits
    read = sampler(*arguments, **numbers, positions=batch.positions, **options)
    handed = sampler(
        *arguments, **numbers, positions=batch.positions, **options, draft_logsumexp=logsumexp, draft_cutoff=cutoffs
    )
    assert torch.equal(read.token_ids, handed.token_ids)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
def test_neutral_values_change_nothing(method, device):
    batch = case(6, 3, 1500, torch.float32, seed=2).to(device)
    arguments = batch.target_logits, batch.draft_token_ids, batch.draft_logits
    numbers = {"temperature": batch.temperature, "seeds": batch.seeds, "positions": batch.positions}
    eager = RejectionSampler(method, backend="eager")
    plain = eager(*arguments, **numbers)
    ones, zeros = torch.ones(6, device=device), torch.zeros(6, device=device)
    for options in (
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"top_k": 1500},
        {"top_k": zeros.long(), "top_p": ones, "min_p": zeros},
        {"draft_sampling": PackageSampling(batch.temperature)},
    ):
        assert all(map(torch.equal, eager(*arguments, **numbers, **options)[:4], plain[:4])), options
        rows, how = batch.target_logits[:, 0], {name: options[name] for name in options if name != "draft_sampling"}
        draft = eager.draft(rows, **numbers, **how)
        assert torch.equal(draft.token_ids, eager.draft(rows, **numbers).token_ids)
        assert torch.equal(draft.logsumexp, eager.draft(rows, **numbers).logsumexp)


def test_strict_emits_what_sample_draws():
    batch, options = case(6, 3, 1500, torch.bfloat16, seed=3), TRUNCATIONS["all"]
    numbers = {"temperature": batch.temperature, "seeds": batch.seeds}
    output = sampler_of("strict")(
        batch.target_logits, batch.draft_token_ids, **numbers, positions=batch.positions, **options
    )
    for offset in range(4):
        rows = batch.target_logits[:, offset]
        drawn = sample(rows, **numbers, positions=batch.positions + offset, **options)
        emitted = output.token_ids[:, offset]
        assert torch.equal(emitted[emitted >= 0], drawn[emitted >= 0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("row", ROWS_THAT_HURT)
def test_rows_that_hurt_are_cut_where_a_sort_in_float64_cuts_them(row, dtype, device):
    row = ROWS_THAT_HURT[row].to(dtype)
    vocab = len(row)
    values = combine((None, 1, 2, vocab - 1), (None, 1e-9, 0.5, 0.95, 1 - 2**-24), (None, 0.3))
    for top_k, top_p, min_p in values:
        options = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        if all(value in (None, 0) for value in options.values()):
            continue
        logits = row.to(device).expand(3, vocab)
        draft = RejectionSampler("strict", backend="eager").draft(logits, 0.8, seeds=5, **options)
        whole = Sampling(0.8, top_k, 1.0 if top_p is None else top_p, min_p or 0.0)
        result, margin = truncate(row.double().numpy(), whole)
        if margin > 1e-4:
            if top_k != 0 and (top_k or top_p or min_p):
                assert draft.cutoff is None or draft.cutoff.tolist() == [cutoff(row.double().numpy(), whole)] * 3, (
                    options
                )
            want = [sample_row(result, temperature=0.8, seed=5 + i).index for i in range(3)]
            assert draft.token_ids.tolist() == want, options


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_k": -1}, ValueError, r"top_k: expected an int >= 0, got -1"),
        ({"top_k": 2.0}, TypeError, r"top_k: expected an int >= 0 or a \[batch\] tensor, got float"),
        ({"top_k": torch.tensor([1.0, 2.0])}, TypeError, r"top_k: expected dtype int32, int64, got float32"),
        ({"top_k": torch.tensor([1, -2])}, ValueError, r"top_k: expected numbers >= 0, .*got -2 at \[1\]"),
        ({"top_p": 0.0}, ValueError, r"top_p: expected a float in \(0, 1\], got 0.0"),
        ({"top_p": NAN}, ValueError, r"top_p: expected a float in \(0, 1\], got nan"),
        ({"top_p": "most"}, TypeError, r"top_p: expected a float in \(0, 1\] or a \[batch\] tensor, got str"),
        ({"top_p": torch.tensor([0.5])}, ValueError, r"top_p: expected shape \[2\], got \[1\]"),
        ({"min_p": 1.5}, ValueError, r"min_p: expected a float in \[0, 1\], got 1.5"),
        ({"min_p": torch.tensor([0.5, NAN])}, ValueError, r"min_p: expected numbers in \[0, 1\], got nan at \[1\]"),
        ({"draft_sampling": {"top_k": 1}}, TypeError, r"draft_sampling: expected a Sampling, got dict"),
        (
            {"draft_sampling": PackageSampling(top_p=2.0)},
            ValueError,
            r"draft_sampling.top_p: expected a float in \(0, 1\], got 2.0",
        ),
        ({"draft_sampling": PackageSampling(-1.0)}, ValueError, r"draft_sampling.temperature: expected a finite float"),
        (
            {"top_k": 2, "draft_logsumexp": torch.zeros(2, 1)},
            ValueError,
            r"draft_cutoff: needed beside draft_logsumexp",
        ),
        ({"draft_cutoff": torch.zeros(2, 1).long()}, ValueError, r"draft_cutoff: given without the draft_logsumexp"),
        (
            {"draft_cutoff": torch.zeros(2, 1).long(), "draft_logsumexp": torch.zeros(2, 1)},
            ValueError,
            r"draft_cutoff: given, but the drafts were drawn without",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_named(options, error, message):
    target, drafts = torch.zeros(2, 2, 9), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(error, match=message):
        RejectionSampler("probabilistic")(target, drafts, target[:, :1], **options)


def test_how_drafts_were_drawn_is_said_only_where_their_logits_are():
    target, drafts = torch.zeros(2, 2, 9), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="draft_sampling: given without the draft_logits"):
        RejectionSampler("probabilistic")(target, drafts, draft_sampling=PackageSampling(top_k=3))
