"""Speculative decoding with heads that are split over processes: each computes a part of every row of logits.

    torchrun --nproc-per-node=2 tensor_parallel.py

runs on CPUs with the two small models that come with the package, and prints the same text for any number of processes. To
keep it short, every process computes all layers but the last one, and nothing is cached.
"""

import argparse

import torch
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdecode import AcceptanceStats, RejectionSampler, VocabShard
from specdecode.demo import DRAFT, TARGET

K = 3


class ParallelModel:
    """A language model with this rank's rows of the head, as tensor-parallel engines split it."""

    def __init__(self, folder, start: int, end: int):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.body, self.head = model.base_model, model.lm_head.weight[start:end]

    def logits(self, tokens: Tensor, rows: int) -> Tensor:
        """Return this rank's logits after each of the last tokens: [batch, n] -> [batch, rows, local]."""
        return self.body(tokens).last_hidden_state[:, -rows:] @ self.head.T


@torch.no_grad()
def generate(group, method: str, prompt: str, num_new: int, temperature: float = 0.7, seed: int = 0):
    """Return the text that follows the prompt, and the acceptance statistics."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    vocab_size, rank, size = len(tokenizer), group.rank(), group.size()
    start, end = vocab_size * rank // size, vocab_size * (rank + 1) // size  # such as 0 to 512 and 512 to 1,024
    target, draft = ParallelModel(TARGET, start, end), ParallelModel(DRAFT, start, end)
    sampler = RejectionSampler(method, shard=VocabShard(group, start, vocab_size))

    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    length, stats = tokens.shape[1], AcceptanceStats(num_draft_tokens=K)
    while tokens.shape[1] < length + num_new:
        options = {"temperature": temperature, "seeds": torch.tensor([seed])}  # the same on every rank
        position, drafted, rows = torch.tensor([tokens.shape[1]]), tokens, []
        for i in range(K):
            rows.append(draft.logits(drafted, rows=1)[:, 0])
            step = sampler.draft(rows[i], positions=position + i, offset=i, **options)
            drafted = torch.cat([drafted, step.token_ids[:, None]], dim=1)
        output = sampler(
            target.logits(drafted, rows=K + 1),
            drafted[:, -K:],
            torch.stack(rows, dim=1),
            positions=position,
            **options,
        )
        stats.update(output)
        tokens = torch.cat([tokens, output.token_ids[:, : output.num_tokens[0]]], dim=1)  # the same on every rank, too
    return tokenizer.decode(tokens[0, length : length + num_new]), stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="probabilistic", choices=["probabilistic", "strict", "block"])
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--num-new", type=int, default=60)
    arguments = parser.parse_args()
    distributed.init_process_group("gloo")
    text, stats = generate(distributed.group.WORLD, arguments.method, arguments.prompt, arguments.num_new)
    if distributed.get_rank() == 0:
        print(f"{arguments.prompt}{text}\n\n{stats}\nranks: {distributed.get_world_size()}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
