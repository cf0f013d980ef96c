"""Train the two demo language models from the Python standard library's own sources.

    python -m tests.tools.train_demo --output DIR

writes DIR/target (8 narrow layers, 1.9M parameters) and DIR/draft (one layer, 0.5M),
each a folder that `AutoModelForCausalLM` and `AutoTokenizer` load.  The target learns the text;
the draft is then distilled from the target, because what a draft is good for is to put its
probability where the target puts it.  The defaults want a GPU; on a CPU, lower --steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdecode.cli import replace_unencodable

VOCAB_SIZE = 1024
CONTEXT = 1024  # trained at full length: RoPE is poor at positions it never saw
END = "<|endoftext|>"  # written between files; id 0

TARGET_SHAPE = {
    "hidden_size": 144,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 352,
}
DRAFT_SHAPE = {
    "hidden_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "intermediate_size": 448,
}

# Folders and files that are tests, generated tables or not the library's own.
SKIP_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"}
SKIP_FOLDERS |= {"pydoc_data", "__pycache__"}
SKIP_FILES = {"html/entities.py", "msilib/schema.py", "lib2to3/pgen2/token.py"}

# An indent is one piece of its own, and so is a run of newlines: a prompt then splits the same
# way whether it ends after a word, a newline or an indent.
PIECES = r"(?<![^\n])[ \t]+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s+(?!\S)|\s+"


def read_corpus(stdlib: Path) -> tuple[list[str], list[str]]:
    """The library's files as (training texts, held-out texts), in a fixed order."""
    train, held_out = [], []
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        if SKIP_FOLDERS & set(name.split("/")) or name in SKIP_FILES or "_sysconfigdata" in name:
            continue
        text = path.read_text("utf-8", errors="replace")
        # The hash of its name decides where a file goes, so it stays there between versions.
        chosen = hashlib.sha256(name.encode()).digest()[0] < 13  # 13 in 256: 5 %
        (held_out if chosen else train).append(text)
    return train, held_out


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text comes back exactly, and no token is added to it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        bos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str], device: str) -> torch.Tensor:
    """All texts as one row of token ids, an end-of-text token before each file and at the end."""
    ids = [tokenizer.eos_token_id]
    for row in tokenizer(texts, verbose=False)["input_ids"]:
        ids += [*row, tokenizer.eos_token_id]
    return torch.tensor(ids, device=device)


def windows(data: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """`count` stretches of `length` tokens from random places."""
    starts = torch.randint(len(data) - length + 1, (count, 1), device=data.device)
    return data[starts + torch.arange(length, device=data.device)]


def new_model(shape: dict[str, int], device: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **shape,
    )
    model = LlamaForCausalLM(config).to(device)
    model.model.embed_tokens.padding_idx = None  # id 0 is also a real token: let it learn
    return model


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Weights in float16 for half the bytes; the config asks for float32 at loading."""
    rewritten = {
        "config.json": {"dtype": "float32"},
        # The name that transformers 4 and 5 both know.
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    model.generation_config.pad_token_id = 0
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, changes in rewritten.items():
        settings = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    (folder / "model.safetensors").chmod(0o644)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, data: torch.Tensor) -> float:
    """Mean negative log likelihood per token, over consecutive full windows."""
    rows = data[: len(data) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    losses = []
    for part in rows.split(16):
        logits = model(input_ids=part).logits[:, :-1].float()
        losses.append(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) * len(part))
    return float(sum(losses) / len(rows))


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: torch.Tensor, new_tokens: int, temperature: float) -> torch.Tensor:
    """Prompts and their continuations; temperature 0 is greedy."""
    text, cache = [prompts], None
    for _ in range(new_tokens):
        out = model(input_ids=text[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        if temperature == 0:
            text.append(logits.argmax(-1, keepdim=True))
        else:
            text.append(torch.multinomial((logits / temperature).softmax(-1), 1))
    return torch.cat(text, dim=1)


@torch.no_grad()
def overlap(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    text: torch.Tensor,
    begin: int = 0,
    temperature: float = 1.0,
) -> float:
    """Mean of sum_v min(p(v), q(v)) over the places from `begin` on: expected acceptance."""
    total = 0.0
    for part in text.split(16):
        p, q = (m(input_ids=part).logits[:, begin:-1].float() for m in (target, draft))
        if temperature == 0:
            same = (p.argmax(-1) == q.argmax(-1)).float()
        else:
            p, q = ((x / temperature).softmax(-1) for x in (p, q))
            same = torch.minimum(p, q).sum(-1)
        total += float(same.mean()) * len(part)
    return total / len(text)


def acceptance(target: LlamaForCausalLM, draft: LlamaForCausalLM, data: torch.Tensor, temperature: float) -> float:
    """The overlap where the target itself has written 200 tokens after each held-out prompt."""
    prompts = data[: len(data) // CONTEXT * CONTEXT].view(-1, CONTEXT)[:, :64]
    text = sample(target, prompts, 200, temperature)
    return overlap(target, draft, text, begin=63, temperature=temperature)


def fit(
    model: LlamaForCausalLM,
    loss_of: Callable[[], torch.Tensor],
    score: Callable[[], float],
    steps: int,
    peak_lr: float,
    weight_decay: float,
) -> None:
    """AdamW with a cosine schedule; leaves the weights that had the lowest held-out score."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}]
    groups += [{"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.95))
    warmup = max(1, min(200, steps // 10))
    best, best_weights, begun = math.inf, {}, time.time()
    for step in range(1, steps + 1):
        cosine = 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * min(step / warmup, cosine if step > warmup else 1.0)
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(1, steps // 15) == 0 or step == steps:
            value = score()
            seconds = time.time() - begun
            print(f"  step {step:6d}  {seconds:5.0f} s  train {loss.item():.4f}  held {value:.4f}")
            if value < best:
                best = value
                best_weights = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(best_weights)


def train_target(data: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace) -> LlamaForCausalLM:
    """Next-token prediction on random windows of the corpus.

    Half of the steps see four times as many windows of a quarter of the length: a prompt is
    short, and in long windows alone few places have little before them.
    """
    model = new_model(TARGET_SHAPE, args.device)
    forward = torch.compile(model, dynamic=False) if args.device == "cuda" else model

    def loss_of() -> torch.Tensor:
        parts = 4 if torch.rand(()) < 0.5 else 1
        batch = windows(data, args.batch * parts, CONTEXT // parts + 1)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            logits = forward(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    score = partial(held_out_loss, model, held_out)
    fit(model, loss_of, score, args.steps, args.lr, args.weight_decay)
    return model.eval()


def distil_draft(
    target: LlamaForCausalLM, data: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace
) -> LlamaForCausalLM:
    """Match the target's distribution, mostly on text that the target itself has written.

    The loss is the total variation distance, which is one minus the acceptance probability,
    and some KL divergence, whose gradient is of more use as long as the two are far apart.
    """
    with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
        prompts = windows(data, args.samples, 32)
        written = sample(target, prompts, CONTEXT - 32, temperature=1.0)
    model = new_model(DRAFT_SHAPE, args.device)
    compiled = args.device == "cuda"
    teacher, student = (torch.compile(m) if compiled else m for m in (target, model))

    def loss_of() -> torch.Tensor:
        own = written[torch.randint(len(written), (args.batch * 3 // 4,), device=args.device)]
        batch = torch.cat([own, windows(data, args.batch - len(own), CONTEXT)])
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            with torch.no_grad():
                wanted = teacher(input_ids=batch, use_cache=False).logits
            logits = student(input_ids=batch, use_cache=False).logits
        log_p, log_q = (x.float().log_softmax(-1) for x in (wanted, logits))
        p, q = log_p.exp(), log_q.exp()
        kl = (p * (log_p - log_q)).sum(-1).mean()
        return 0.5 * (p - q).abs().sum(-1).mean() + 0.3 * kl

    rows = held_out[: len(held_out) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    fit(
        model,
        loss_of,
        lambda: 1 - overlap(target, model, rows),
        args.draft_steps,
        args.draft_lr,
        0.01,
    )
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for target/ and draft/")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--steps", type=int, default=2400, help="training steps of the target")
    parser.add_argument("--draft-steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=32, help=f"windows of {CONTEXT} per step")
    parser.add_argument("--samples", type=int, default=4096, help="texts the target writes")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--draft-lr", type=float, default=6e-3)
    parser.add_argument("--weight-decay", type=float, default=1.5, help="strong, for the corpus is small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    replace_unencodable()
    torch.manual_seed(args.seed)
    begun = time.time()

    train, held_out = read_corpus(args.stdlib)
    size, held_size = (sum(len(t.encode()) for t in texts) for texts in (train, held_out))
    print(f"library at {args.stdlib} (this is Python {platform.python_version()}):")
    print(f"  {len(train)} files, {size} bytes; held out {len(held_out)} files, {held_size} bytes")
    tokenizer = train_tokenizer(train)
    data, held = (encode(tokenizer, texts, args.device) for texts in (train, held_out))
    print(f"  {len(data)} tokens; held out {len(held)}")

    print("target")
    target = train_target(data, held, args)
    save(target.eval(), tokenizer, args.output / "target")
    # Go on from the saved file, so that the draft learns the model that is shipped.
    target = LlamaForCausalLM.from_pretrained(args.output / "target").to(args.device).eval()
    print("draft")
    save(distil_draft(target, data, held, args), tokenizer, args.output / "draft")
    draft = LlamaForCausalLM.from_pretrained(args.output / "draft").to(args.device).eval()

    for name, model in (("target", target), ("draft", draft)):
        count = sum(p.numel() for p in model.parameters())
        print(f"{name}: {count} parameters, held-out loss {held_out_loss(model, held):.4f}")
    for temperature in (1.0, 0.7, 0.0):
        alpha = acceptance(target, draft, held, temperature)
        print(f"acceptance at temperature {temperature}: {alpha:.4f}")
    print("sample:\n" + tokenizer.decode(sample(target, held[None, :1] * 0, 200, 0.8)[0].tolist()))
    print(f"{time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()
