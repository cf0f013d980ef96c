"""The checks of the exactness tests fail on *mutants*: the reference with one piece of its source replaced by a mistake.

The mistakes are ones that people make. A check that passed on its mutants would test nothing.
"""

from collections.abc import Callable

import pytest

from reference import block, greedy, oracle, philox, probabilistic, sampling, selection, strict, synthetic
from tests.support.enumeration import decode, distribution, marginal
from tests.support.exactness import (
    CASES,
    accepted_distribution_of_blocks,
    assert_same_distribution,
    check_method,
    fresh_domains,
    verify_block,
)
from tests.support.mutants import Mutant, assert_caught
from tests.test_exact_selection import PAIRS, check_coupling, check_real_selection, check_selection
from tests.test_exactness import (
    CERTAIN,
    CLOSED_FORMS,
    GOLDEN,
    SEVERAL_STEPS,
    VERIFIERS,
    check_block_formulas,
    check_closed_forms,
    check_deterministic,
    check_deterministic_blocks,
    check_formulas,
    check_greedy,
    check_impossible_blocks,
    check_impossible_drafts,
    check_margins,
    check_published_speedups,
    check_real_noise,
    check_strict_formulas,
    check_strict_is_plain_sampling,
    check_synthetic,
    check_synthetic_formulas,
    check_synthetic_greedy,
)


def method_on(method: str, *cases: str) -> Callable[[], None]:
    def check() -> None:
        for case in cases:
            check_method(method, CASES[case])

    return check


def formulas() -> None:
    check_formulas(CASES["history-V3-K2"])


def strict_formulas() -> None:
    check_strict_formulas(CASES["iid-V3-K2"])


def synthetic_formulas() -> None:
    check_synthetic_formulas(CASES["history-V3-K2"], with_draft_logits=True)


def closed_forms() -> None:
    check_closed_forms(*CLOSED_FORMS[1])


def deterministic() -> None:
    check_deterministic(CASES["history-V3-K2"])


def synthetic_cases() -> None:
    check_synthetic(CASES["history-V3-K2"], with_draft_logits=True)
    check_synthetic(CASES["history-V3-K2"], with_draft_logits=False)
    check_synthetic(CASES["ragged-1-of-3"], with_draft_logits=True)


def selection_cases() -> None:
    check_selection((5, 1, 3, 1, 2), block_size=2)


def coupling() -> None:
    check_coupling(*PAIRS["V5"], block_size=None)
    check_coupling(*PAIRS["V5"], block_size=2)


def greedy_everywhere() -> None:
    for name in VERIFIERS:
        check_greedy(name)


def greedy_alone() -> None:
    check_greedy("greedy")


def golden() -> None:
    check_real_noise(GOLDEN)


def certain() -> None:
    check_real_noise(CERTAIN)


def block_formulas() -> None:
    check_block_formulas(CASES["history-V2-K3"])
    check_block_formulas(CASES["truncated-supports"])


def deterministic_blocks() -> None:
    check_deterministic_blocks(CASES["history-V3-K2"])


def several_steps() -> None:
    check_method("block", SEVERAL_STEPS["V2-K2-2"])


def accepted_by_blocks() -> None:
    """Check the number of accepted drafts alone: these mutants are exact, but accept fewer drafts."""
    for case in (CASES["history-V2-K3"], CASES["ragged-1-of-3"]):
        joint = distribution(lambda chance, case=case: decode(chance, case, verify_block, fresh_domains))
        assert_same_distribution(marginal(joint, lambda outcome: outcome[1][0]), accepted_distribution_of_blocks(case))


blocks = method_on("block", "history-V3-K2", "history-V3-K3")
ragged_blocks = method_on("block", "ragged-1-of-3", "ragged-2-of-4")
warm_blocks = method_on("block", "temperature-0.6")
joint = method_on("probabilistic", "history-V3-K2")
ragged = method_on("probabilistic", "ragged-1-of-3", "ragged-0-of-2")
warm = method_on("probabilistic", "temperature-0.6")
one_more = method_on("probabilistic", "one-more-token")
strict_joint = method_on("strict", "history-V3-K2")
strict_iid = method_on("strict", "iid-V3-K2")
strict_warm = method_on("strict", "temperature-0.6")

B, P, S = block, probabilistic, selection
RECOVER = "return request.emit(offset, log(probabilistic.residual(np.exp(target), np.exp(draft))))"
BONUS = "return request.emit(len(request.drafts), request.target(len(request.drafts)))"
RECOVER_BLOCK = "return request.emit(accepted, log(block.residual(ratio, *probs[accepted])))"
SAMPLES = "(request.draw(offset, request.target(offset)) for offset in offsets)"

MUTANTS = [
    # The formulas.
    Mutant("accept with q/p", P.acceptance_probability, "target_prob / draft_prob", "draft_prob / target_prob",
           formulas),
    Mutant("accept with p/q, not cut at 1", P.acceptance_probability, "min(1, target_prob / draft_prob)",
           "target_prob / draft_prob", formulas),
    Mutant("accept with p", P.acceptance_probability, "target_prob / draft_prob)", "target_prob)", formulas),
    Mutant("residual |p - q|", P.residual, "np.maximum(0, target_probs - draft_probs)",
           "abs(target_probs - draft_probs)",
           formulas),
    Mutant("residual q - p", P.residual, "target_probs - draft_probs", "draft_probs - target_probs", formulas),
    Mutant("residual not normalised", P.residual, "weights / total if", "weights if", formulas),
    Mutant("residual p", P.residual, "weights / total if total > 0 else target_probs", "target_probs", formulas),
    Mutant("alpha from maxima", P.acceptance_rate, "np.minimum(", "np.maximum(", closed_forms),
    Mutant("no bonus token in the average", P.expected_tokens, "range(num_draft_tokens + 1)", "range(num_draft_tokens)",
           closed_forms),
    Mutant("no bonus token in table 1", P.expected_tokens, "range(num_draft_tokens + 1)", "range(num_draft_tokens)",
           check_published_speedups),
    # The text-book algorithms.
    Mutant("accept the complement", P.verify, "uniform > acceptance", "uniform <= acceptance", formulas),
    Mutant("resample from p", P.verify, "residual(target, draft)", "target", formulas),
    Mutant("target row of the next position", P.verify, "target_probs[offset], draft",
           "target_probs[offset + 1], draft",
           formulas),
    Mutant("bonus from the last draft's row", P.verify, "target_probs[len(draft_token_ids)]",
           "target_probs[len(draft_token_ids) - 1]", formulas),
    Mutant("one draft too few accepted", P.verify, "return offset, residual", "return max(offset - 1, 0), residual",
           formulas),
    Mutant("stop at the first failure", B.verify, "range(length - 1, 0, -1)", "range(length - 1, length - 2, -1)",
           block_formulas),
    Mutant("first success, not last", B.verify, "range(length - 1, 0, -1)", "range(1, length)", block_formulas),
    Mutant("stale ratio", B.verify, "residual_mass(ratios[i],", "residual_mass(ratios[i - 1],", block_formulas),
    Mutant("residual of the last ratio", B.verify, "residual(ratios[i], target_probs[i]",
           "residual(ratios[-1], target_probs[i]", block_formulas),
    Mutant("accept the last draft by a residual mass, as drafts before it", B.verify, "<= ratios[length]:",
           "<= acceptance_probability(ratios[-1], residual_mass(ratios[-1], target_probs[-1], draft_probs[-1])):",
           block_formulas),
    Mutant("accept the complement", synthetic.verify, "uniform > rate", "uniform <= rate", synthetic_formulas),
    Mutant("emit from p after a rejection", synthetic.verify, "target if draft_probs is None else",
           "target if True else",
           synthetic_formulas),
    # The accept decision.
    Mutant("accept with q/p", oracle.accepts, "slack = target_logprob - draft_logprob - log_uniform",
           "slack = draft_logprob - target_logprob - log_uniform", joint),
    Mutant("accept the complement", oracle.accepts, "int(slack >= 0)", "int(slack <= 0)", joint),
    Mutant("accept with p", oracle.accepts, "target_logprob - draft_logprob - log_uniform",
           "target_logprob - log_uniform",
           joint),
    Mutant("accept p/q >= 1 only", oracle.accepts, "target_logprob - draft_logprob - log_uniform",
           "target_logprob - draft_logprob", joint),
    Mutant("accept where q is 0", oracle.accepts, " or draft_logprob == -np.inf", "", check_impossible_drafts),
    Mutant("accept uniform without logarithm", oracle.Request.log_uniform,
           "np.log(uniform(self.seed, self.position + offset, index, Domain.ACCEPT))",
           "uniform(self.seed, self.position + offset, index, Domain.ACCEPT)", joint),
    Mutant("same accept noise at every position", oracle.Request.log_uniform, "self.position + offset, index",
           "self.position, index", joint),
    # The recovered token.
    Mutant("resample from p", oracle.verify_probabilistic, "probabilistic.residual(np.exp(target), np.exp(draft))",
           "np.exp(target)", joint),
    Mutant("residual |p - q|", oracle.verify_probabilistic, "probabilistic.residual(np.exp(target), np.exp(draft))",
           "abs(np.exp(target) - np.exp(draft))", joint),
    Mutant("residual of logarithms", oracle.verify_probabilistic,
           "probabilistic.residual(np.exp(target), np.exp(draft))",
           "probabilistic.residual(target - target.min(), draft - draft.min())", joint),
    Mutant("recover with the draft's noise", oracle.Request.draw, "self.position + offset)",
           "self.position + offset, (Domain.DRAFT_BLOCK, Domain.DRAFT_TOKEN))", joint),
    Mutant("recover with the draft's noise, seen in real noise", oracle.Request.draw, "self.position + offset)",
           "self.position + offset, (Domain.DRAFT_BLOCK, Domain.DRAFT_TOKEN))", golden),
    Mutant("recover with the accept noise, seen in real noise", oracle.Request.draw, "self.position + offset)",
           "self.position + offset, (Domain.SELECT_BLOCK, Domain.ACCEPT))", certain),
    Mutant("recover with the next position's noise", oracle.verify_probabilistic, RECOVER,
           RECOVER.replace("request.emit(offset,", "[*request.drafts[:offset], request.draw(offset + 1,") + "]", joint),
    Mutant("bonus with the next position's noise", oracle.verify_probabilistic, BONUS,
           "return [*request.drafts, request.draw(len(request.drafts) + 1, request.target(len(request.drafts)))]",
           one_more),
    Mutant("recover from the residual of the first row", oracle.verify_probabilistic,
           "probabilistic.residual(np.exp(target),", "probabilistic.residual(np.exp(request.target(0)),", joint),
    # The loop.
    Mutant("target row of the next position", oracle.verify_probabilistic, "target, draft = request.target(offset),",
           "target, draft = request.target(offset + 1),", joint),
    Mutant("draft row of the first position", oracle.Request.draft, "self.draft_logits[offset]",
           "self.draft_logits[0]", joint),
    Mutant("go on after a rejection", oracle.verify_probabilistic, "return request.emit(offset,",
           "request.drafts[offset] = request.draw(offset,", joint),
    Mutant("emit the rejected draft", oracle.verify_probabilistic, RECOVER, "return request.drafts[: offset + 1]",
           joint),
    Mutant("bonus from the last draft's row", oracle.verify_probabilistic, "request.target(len(request.drafts))",
           "request.target(len(request.drafts) - 1)", joint),
    Mutant("bonus from the last slot's row", oracle.verify_probabilistic, "request.target(len(request.drafts))",
           "request.target(-1)",
           ragged),
    Mutant("-1 skipped, later slots used", oracle.leading_drafts, "break", "continue", ragged),
    Mutant("-1 used as an index", oracle.leading_drafts, "0 <= token", "-1 <= token", ragged),
    # Temperature.
    Mutant("draft rows not scaled", oracle.Request.draft, "self.draft_sampling)",
           "self.draft_sampling._replace(temperature=1.0))", warm),
    Mutant("target rows not scaled", oracle.Request.target, "self.sampling)",
           "self.sampling._replace(temperature=1.0))", warm),
    Mutant("bonus row not scaled", oracle.verify_probabilistic, "request.target(len(request.drafts))",
           "log_softmax(request.target_logits[len(request.drafts)])", warm),
    Mutant("temperature multiplied", sampling.log_softmax, "/ temperature", "* temperature", warm),
    # Drafters without logits.
    Mutant("the rejected draft left in the residual", oracle.verify_probabilistic, "np.exp(draft)))",
           "np.exp(draft) * (request.draft_logits is not None)))", deterministic),
    Mutant("uniform draft assumed", oracle.Request.draft, "point_mass(self.drafts[offset], self.vocab_size)",
           "np.full(self.vocab_size, -np.log(self.vocab_size))", deterministic),
    # Blocks: the formulas.
    Mutant("ratio q/p", B.running_ratio, "target_prob / draft_prob", "draft_prob / target_prob", block_formulas),
    Mutant("ratio not cut at 1", B.running_ratio, "min(1, before * target_prob / draft_prob)",
           "before * target_prob / draft_prob", block_formulas),
    Mutant("ratio of the last draft alone", B.running_ratio, "before * target_prob", "target_prob", block_formulas),
    Mutant("residual mass |c p - q|", B.residual_mass, "np.maximum(0, ratio * target_probs - draft_probs)",
           "abs(ratio * target_probs - draft_probs)", block_formulas),
    Mutant("unscaled residual mass", B.residual_mass, "ratio * target_probs", "target_probs", block_formulas),
    Mutant("unscaled residual", B.residual, "ratio * target_probs", "target_probs", block_formulas),
    Mutant("residual q - c p", B.residual, "ratio * target_probs - draft_probs", "draft_probs - ratio * target_probs",
           block_formulas),
    Mutant("accept with the ratio", B.acceptance_probability, "mass / (mass + 1 - ratio)", "ratio", block_formulas),
    Mutant("accept with the mass", B.acceptance_probability, "mass / (mass + 1 - ratio)", "mass", block_formulas),
    Mutant("accept with the mass over the ratio", B.acceptance_probability, "mass / (mass + 1 - ratio)",
           "mass / ratio if ratio else 0", block_formulas),
    # Blocks: the search.
    Mutant("stop at the first failure", oracle.verify_block, "            accepted = i\n            break",
           "            accepted = max(accepted, i)\n        else:\n            accepted = 0", blocks),
    Mutant("first success, not last", oracle.verify_block, "range(len(log_ratios) - 1, 0, -1)",
           "range(1, len(log_ratios))",
           blocks),
    Mutant("all or nothing", oracle.verify_block, "range(len(log_ratios) - 1, 0, -1)",
           "range(len(log_ratios) - 1, max(len(log_ratios) - 2, 0), -1)", accepted_by_blocks),
    Mutant("stale ratio", oracle.verify_block, "log_ratios[i], next_row", "log_ratios[i - 1], next_row", blocks),
    Mutant("residual of a stale ratio", oracle.verify_block, "log_ratios[accepted])",
           "log_ratios[max(accepted - 1, 0)])", blocks),
    Mutant("residual of the last ratio", oracle.verify_block, "log_ratios[accepted])", "log_ratios[-1])", blocks),
    Mutant("unscaled residual", oracle.verify_block, "np.exp(min(0.0, log_ratios[accepted]))", "1.0", blocks),
    Mutant("unscaled residual mass", oracle.accepts_block, "residual_mass(ratio,", "residual_mass(1.0,", blocks),
    Mutant("ratio not cut at 1", oracle.verify_block, "min(0.0, log_ratios[-1]) +", "log_ratios[-1] +", blocks),
    Mutant("ratio of the last draft alone", oracle.verify_block, "min(0.0, log_ratios[-1]) +", "0.0 +", blocks),
    Mutant("mass of the row before", oracle.verify_block, "probs[i] if", "probs[i - 1] if", blocks),
    Mutant("residual of the row before", oracle.verify_block, "*probs[accepted])", "*probs[max(accepted - 1, 0)])",
           blocks),
    Mutant("a residual mass after the last draft", oracle.verify_block, "if i < length else None",
           "if i < length else probs[-1]",
           blocks),
    Mutant("padded width as K", oracle.verify_block, "probs[i] if i < length else None",
           "probs[min(i, length - 1)] if i < len(request.draft_logits) else None", ragged_blocks),
    Mutant("padded width as K, in the test for the bonus token", oracle.verify_block, "if accepted == length:",
           "if accepted == len(request.draft_logits) or not probs or accepted == length and probs.append(probs[-1]):",
           ragged_blocks),
    Mutant("-1 skipped, later slots used", oracle.leading_drafts, "break", "continue", ragged_blocks),
    Mutant("go on after an impossible draft", oracle.verify_block, "== -np.inf:\n            break",
           "== np.inf:\n            break", check_impossible_blocks),
    Mutant("accept the complement", oracle.accepts_block, "slack = log(", "slack = -log(", blocks),
    Mutant("rows not scaled", oracle.Request.target, "self.sampling)", "self.sampling._replace(temperature=1.0))",
           warm_blocks),
    Mutant("bonus row not scaled", oracle.verify_block, "request.target(length)",
           "log_softmax(request.target_logits[length])",
           warm_blocks),
    Mutant("the rejected draft left in the residual", oracle.verify_block, "*probs[accepted])",
           "probs[accepted][0], probs[accepted][1] * (request.draft_logits is not None))", deterministic_blocks),
    # Blocks: the noise.
    Mutant("same accept noise at every position", oracle.verify_block, "request.log_uniform(i - 1, index=i - 1)",
           "request.log_uniform(0)", blocks),
    Mutant("accept noise used again by later steps", oracle.verify_block, "request.log_uniform(i - 1, index=i - 1)",
           "request.log_uniform(i - 1)", several_steps),
    Mutant("drafts' noise used again by later steps", philox.draft_domains,
           "block_domain + (offset << 8), token_domain + (offset << 8)", "block_domain, token_domain", several_steps),
    Mutant("recover with the draft's noise", oracle.Request.draw, "self.position + offset)",
           "self.position + offset, (Domain.DRAFT_BLOCK + (offset << 8), Domain.DRAFT_TOKEN + (offset << 8)))", blocks),
    Mutant("recover with the next position's noise", oracle.verify_block, RECOVER_BLOCK,
           RECOVER_BLOCK.replace("request.emit(accepted,",
           "[*request.drafts[:accepted], request.draw(accepted + 1,") + "]", blocks),
    # Blocks: margins.
    Mutant("margin of the ratio after it was cut at 1", oracle.accepts_block, "abs(log_ratio - log_critical_ratio",
           "abs(min(0.0, log_ratio) - log_critical_ratio", check_margins),
    Mutant("margin from the total mass alone", oracle.log_critical_ratio, "np.cumsum([0.0, *probs[order]])",
           "np.array([0.0, probs.sum()])", check_margins),
    # Strict.
    Mutant("compare with the argmax", oracle.verify_strict, f"return greedy.compare({SAMPLES}, request.drafts)",
           "same = greedy.compare((greedy.argmax(request.target(offset)) for offset in offsets), request.drafts)\n"
           "    return [request.draw(offset, request.target(offset)) for offset, _ in enumerate(same)]", strict_joint),
    Mutant("compare with the argmax, where only the number accepted shows it", oracle.verify_strict,
           f"return greedy.compare({SAMPLES}, request.drafts)",
           "same = greedy.compare((greedy.argmax(request.target(offset)) for offset in offsets), request.drafts)\n"
           "    return [request.draw(offset, request.target(offset)) for offset, _ in enumerate(same)]", strict_iid),
    Mutant("go on after a mismatch", greedy.compare, "if token != draft:", "if draft is None:", strict_joint),
    Mutant("go on after a mismatch, on probabilities", greedy.compare, "if token != draft:", "if draft is None:",
           strict_formulas),
    Mutant("same noise at every row, on probabilities", strict.verify, "gumbel_max(row, noise)",
           "gumbel_max(row, gumbels[0])", strict_formulas),
    Mutant("same noise at every position", oracle.verify_strict, "request.draw(offset,", "request.draw(0,", strict_iid),
    Mutant("same noise at every position, plain sampling", oracle.verify_strict, "request.draw(offset,",
           "request.draw(0,",
           check_strict_is_plain_sampling),
    Mutant("off by one position", oracle.verify_strict, "request.draw(offset,", "request.draw(offset + 1,",
           check_strict_is_plain_sampling),
    Mutant("rows not scaled", oracle.Request.target, "self.sampling)", "self.sampling._replace(temperature=1.0))",
           strict_warm),
    # Greedy.
    Mutant("ties to the right", greedy.argmax, "int(np.argmax(logits))",
           "len(logits) - 1 - int(np.argmax(np.asarray(logits)[::-1]))", greedy_everywhere),
    Mutant("NaN wins", sampling.without_nan, "logits[np.isnan(logits)] = -np.inf", "logits[np.isnan(logits)] = np.inf",
           greedy_everywhere),
    Mutant("go on after a mismatch", greedy.compare, "if token != draft:", "if draft is None:", greedy_alone),
    Mutant("stop before the bonus token", greedy.compare, "zip_longest(", "zip(", greedy_alone),
    Mutant("-1 skipped, later slots used", oracle.leading_drafts, "break", "continue", greedy_everywhere),
    # Selection.
    Mutant("block by its maximum, not its sum", S.log_block_sums, "log_sum(log_weights[start : start + block_size])",
           "log_weights[start : start + block_size].max()", selection_cases),
    Mutant("block by its unnormalised mean", S.log_block_sums, "log_sum(log_weights[start : start + block_size])",
           "log_sum(log_weights[start : start + block_size]) - np.log(len(log_weights[start : start + block_size]))",
           selection_cases),
    Mutant("block noise used again for tokens", sampling.select, "domains[1]", "domains[0]", selection_cases),
    Mutant("first block always", S.select, "[block * block_size :]", "[0:]", selection_cases),
    Mutant("wrong sign in the noise, seen in real noise", philox.gumbel, "-np.log(-np.log1p", "np.log(-np.log1p",
           check_real_selection),
    Mutant("drafts share the target's noise", sampling.sample,
           "log_softmax(logits, temperature), seed, position, domains)",
           "log_softmax(logits, temperature), seed, position)", joint),
    Mutant("match by minima", strict.match_probabilities, "max(p / pj, q / qj)", "min(p / pj, q / qj)", coupling),
    Mutant("match without blocks", strict.match_probability, "size = block_size or len(target_probs)",
           "size = len(target_probs)", coupling),
    # Synthetic.
    Mutant("accept the complement", oracle.verify_synthetic, "if not request.decide(", "if request.decide(",
           synthetic_cases),
    Mutant("first rate at every position", oracle.verify_synthetic, "conditional_rates[offset]", "conditional_rates[0]",
           synthetic_cases),
    Mutant("same accept noise at every position", oracle.verify_synthetic, "request.log_uniform(offset)",
           "request.log_uniform(0)",
           synthetic_cases),
    Mutant("joint for conditional rates", oracle.verify_synthetic, "log(conditional_rates[offset])",
           "log(np.prod(conditional_rates[: offset + 1]))", synthetic_cases),
    Mutant("emit from p after a rejection", oracle.verify_synthetic, "or request.draft_logits is None", "or True",
           synthetic_cases),
    Mutant("draft row of the first position", oracle.verify_synthetic, "request.draft(offset)", "request.draft(0)",
           synthetic_cases),
    Mutant("draw at temperature 0", oracle.verify_synthetic, "target = request.target(offset)",
           "target = log_softmax(request.target_logits[offset])", check_synthetic_greedy),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants_are_caught(mutant):
    assert_caught(mutant)


def test_checks_that_catch_mutants_pass_on_the_reference():
    for check in {mutant.check for mutant in MUTANTS} - {golden, certain}:  # these two have their own test
        check()
