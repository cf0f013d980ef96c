"""The text-book version: every algorithm of specdecode for one request, in NumPy and float64.

The setting. A language model, the *target*, produces one token per call: it turns the tokens so far into logits, and
the token is drawn from p = softmax(logits / temperature). A cheaper *draft model* proposes the next K tokens, the *drafts*,
each drawn from its own distribution q. The target then scores all of them in a single call, which gives K + 1 rows of
logits. Row i, counted from 0, is the target's distribution of the token at the position of draft i, given the text and
drafts 0 to i - 1. The last row is the distribution of the token after all drafts.

*Verification* accepts the first tau drafts, for some tau from 0 to K, and adds one token: a *recovered* token where draft
tau was rejected, a *bonus* token where all K were accepted. It must not change the distribution of the text: the tokens
must be distributed as if the target alone had drawn them. The more drafts it accepts, the fewer calls of the target a
text needs.

Each module is a page: an algorithm on probabilities, the proof that it is exact, and examples to redo by hand. (There *iff*
is short for if and only if.) Read them in this order: [`greedy`][reference.greedy],
[`probabilistic`][reference.probabilistic], [`selection`][reference.selection] (how a token is drawn),
[`strict`][reference.strict], [`block`][reference.block], [`tree`][reference.tree] (several candidates for each position),
[`planning`][reference.planning] (how many drafts), [`truncation`][reference.truncation] (top-k, top-p and min-p),
[`adjustments`][reference.adjustments] (biases, penalties and masks), [`synthetic`][reference.synthetic],
[`philox`][reference.philox] (the random numbers). Each method has a function `verify`; `tree` has one function for each
rule. In `greedy` and `strict` it returns the emitted tokens. In the others it returns the number of accepted drafts and the
distribution of the token after them, which `selection` draws.

[`oracle`][reference.oracle] puts them together: logits and seeds instead of probabilities and random numbers, with every
option. [`sampling`][reference.sampling] has the functions of a single row of logits. The tests require that the package
returns the oracle's tokens for the same logits, seed and position, except where two scores are so close that rounding
decides.

The examples of a module need its names: in a clone of the repository, `from reference.block import *` imports the names
of `block`.

This package imports nothing of specdecode, and specdecode imports nothing of it: a reference that shared code with what
it tests would repeat its mistakes.
"""
