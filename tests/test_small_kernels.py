"""The small kernels: the oracle's tokens in both versions; length on a page; compilation for a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from reference import oracle
from reference.kernels import block, greedy, probabilistic, strict, tree
from reference.sampling import sample
from tests.conftest import ON_GPU
from tests.support.differential import FLOAT32_BAND, assert_same_tokens, case

ROOT = Path(__file__).parent.parent
DEVICE = "cuda" if ON_GPU else "cpu"
METHODS = {"greedy": greedy, "strict": strict, "probabilistic": probabilistic, "block": block}
TEMPERATURE = 0.7

# The interpreter computes with NumPy, which warns about infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def run(method: str, version: str, target, ids, draft, keys, temperature: float = TEMPERATURE):
    """Return the tokens of one version of a method, on the CPU."""
    arguments = [target, ids]
    if method in ("probabilistic", "block"):
        arguments.append(draft)
    arguments = [each.to(DEVICE) for each in [*arguments, *([] if method == "greedy" else [keys])]]
    return getattr(METHODS[method], version)(*arguments, *([] if method == "greedy" else [temperature])).cpu()


def outcomes(method: str, target, ids, draft, keys, temperature: float = TEMPERATURE) -> list[oracle.Outcome]:
    """Return the oracle's outcomes, one per request."""
    name, temperature = ("strict", 0.0) if method == "greedy" else (method, temperature)
    return [
        oracle.verify(
            name, p.double().numpy(), tokens, q.double().numpy(), temperature=temperature, seed=s, position=at
        )
        for p, tokens, q, (s, at) in zip(target, ids.tolist(), draft, keys.tolist())
    ]


def rows_of(requests: int, drafts: int, vocab: int, seed: int = 0):
    """Return random arguments: likely drafts, a tenth of them -1, seeds and positions of more than 32 bits."""
    batch = case(requests, drafts, vocab, torch.float32, seed=seed)
    keys = torch.stack([batch.seeds, batch.positions], dim=1)
    return batch.target_logits, batch.draft_token_ids, batch.draft_logits, keys


def own_tokens(target, keys):
    """Return the tokens that the target itself draws."""
    return torch.tensor(
        [
            [sample(row.numpy(), temperature=TEMPERATURE, seed=s, position=at + i).index for i, row in enumerate(rows)]
            for rows, (s, at) in zip(target.double(), keys.tolist())
        ]
    )


@pytest.mark.parametrize("method", METHODS)
def test_small_kernels_emit_the_oracles_tokens(method):
    for sizes in ((12, 3, 2100), (60, 4, 40)) if not ON_GPU else ((200, 3, 2100), (40, 7, 50_257), (20, 3, 151_936)):
        target, ids, draft, keys = rows_of(*sizes, seed=sizes[2])
        if method == "greedy":
            target[:, :, [5, sizes[2] - 1]] = 20.0  # a tie, in two blocks if there are two
            ids[::2] = 5
        if method == "strict":  # otherwise hardly any draft is the target's own token
            ids[::2] = own_tokens(target[::2], keys[::2])[:, : sizes[1]]
        expected = outcomes(method, target, ids, draft, keys)
        for version in ("verify", "verify_by_blocks"):
            assert_same_tokens(run(method, version, target, ids, draft, keys), expected, FLOAT32_BAND)
        assert len({outcome.num_accepted for outcome in expected}) > 1


@pytest.mark.parametrize("version", ["verify", "verify_by_blocks"])
@pytest.mark.parametrize("method", METHODS)
def test_small_kernels_follow_the_corner_rules(method, version):
    target, _, draft, keys = rows_of(8, 2, 1030, seed=3)
    ids = target[:, :2].argmax(dim=2)
    ids[0] = torch.tensor([-1, 3])  # no drafts, whatever follows
    ids[1, 1] = -1
    target[2, 0, ids[2, 0]] = -torch.inf  # p = 0
    draft[3, 0, ids[3, 0]] = -torch.inf  # q = 0
    target[4, :2], draft[4] = target[4, 2].clone(), target[4, 2].clone()  # p = q, so the residual is empty ...
    target[4, 0, ids[4, 0]] = draft[4, 0, ids[4, 0]] = -torch.inf  # ... after a draft with p = q = 0
    target[5, :, :1024], draft[5, :, 1024:] = (
        -torch.inf,
        -torch.inf,
    )  # blocks without weight; p and q have no token in common
    draft[6:] = target[6:, :2]  # p = q: everything is accepted,
    target[7, 1, ids[7, 1]] = draft[7, 1, ids[7, 1]] = -torch.inf  # except a draft with p = q = 0
    got = run(method, version, target, ids, draft, keys)
    expected = outcomes(method, target, ids, draft, keys)
    assert_same_tokens(got, expected, FLOAT32_BAND)
    assert (got[:1, 1:] == -1).all()
    if method in ("probabilistic", "block"):  # where p = q the oracle's margin is 0, which would allow any result
        assert (got[2:] >= 0).sum(dim=1).tolist() == [1, 1, 1, 1, 3, 2]
        assert [outcome.num_accepted for outcome in expected[2:]] == [0, 0, 0, 0, 2, 1]


def test_the_residual_of_block_verification_is_that_of_the_running_ratio():
    """After the first draft c = 1/2. Then c p - q = (.14, -.01, -.63): only token 0 remains. In p - q token 1 would, too."""
    target = torch.tensor([[0.3, 0.6, 0.1], [0.48, 0.48, 0.04], [1.0, 1.0, 1.0]]).log().repeat(40, 1, 1)
    draft = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.25, 0.65]]).log().repeat(40, 1, 1)
    keys = torch.stack([torch.arange(40), torch.zeros(40, dtype=torch.int64)], dim=1)
    got = run("block", "verify", target, torch.tensor([0, 2]).repeat(40, 1), draft, keys, temperature=1.0)
    one_accepted = got[(got >= 0).sum(dim=1) == 2]
    assert len(one_accepted) > 5
    assert (one_accepted[:, :2] == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_small_kernels_take_calls_without_drafts(method):
    target, ids, draft, keys = rows_of(3, 1, 1500, seed=4)
    arguments = target[:, :1].contiguous(), ids[:, :0], draft[:, :0], keys
    for version in ("verify", "verify_by_blocks"):
        assert_same_tokens(run(method, version, *arguments), outcomes(method, *arguments), FLOAT32_BAND)


def test_the_tree_kernel_walks_as_the_oracle_does():
    """Nodes of any order, equal siblings, padding and cycles; two blocks and a bit."""
    generator = torch.Generator().manual_seed(0)
    requests, nodes, vocab, max_depth = 24 if ON_GPU else 8, 9, 2500, 2
    target = 12 * torch.randn(requests, nodes, vocab, generator=generator)
    parents = torch.randint(-1, nodes + 1, (requests, nodes), generator=generator)
    parents[:, 1:5] = torch.tensor([0, 0, 0, 1])
    likely = target.topk(2, dim=-1).indices[torch.arange(requests)[:, None], parents.clamp(0, nodes - 1)]
    ids = likely.gather(2, torch.randint(0, 2, (requests, nodes, 1), generator=generator))[..., 0]
    keys = torch.randint(0, 2**40, (requests, 2), generator=generator)
    given = [each.to(DEVICE) for each in (target, ids, parents, keys)]
    tokens, path = (each.tolist() for each in tree.verify(*given, TEMPERATURE, max_depth))
    accepted = excused = 0
    for i, (seed, position) in enumerate(keys.tolist()):
        arguments = target[i].double().numpy(), ids[i].tolist(), parents[i].tolist()
        expected = oracle.verify_tree(
            *arguments, max_depth=max_depth, temperature=TEMPERATURE, seed=seed, position=position
        )
        accepted += len(expected.nodes)
        got = [[each for each in row if each >= 0] for row in (tokens[i], path[i])]
        excused += got != [expected.token_ids, expected.nodes] and expected.margin < FLOAT32_BAND
        assert got == [expected.token_ids, expected.nodes] or expected.margin < FLOAT32_BAND
    assert accepted > requests // 2
    assert excused <= 1


def test_each_small_kernel_fits_on_a_page():
    files = sorted((ROOT / "reference" / "kernels").glob("*.py"))
    assert set(METHODS) < {file.stem for file in files}
    assert {file.stem: n for file in files if (n := len(file.read_text().splitlines())) > 80} == {}


COMPILE = """
import torch, triton
from tests.tools.portability import Driver
driver = Driver(90)
triton.runtime.driver.set_active(driver)
from reference.kernels import block, greedy, probabilistic, strict, tree
target, draft, ids, keys = torch.zeros(2, 4, 33_024), torch.zeros(2, 3, 33_024), *torch.zeros(2, 2, 3, dtype=torch.int64)
for name in ("verify", "verify_by_blocks"):
    getattr(greedy, name)(target, ids)
    getattr(strict, name)(target, ids, keys, 0.7)
    for method in (probabilistic, block):
        getattr(method, name)(target, ids, draft, keys, 0.7)
tree.verify(target, torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64), keys, 0.7, 2)
print(*driver.compiled)
"""


def test_small_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = [sys.executable, "-c", COMPILE]
    result = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    sources = "".join(file.read_text() for file in (ROOT / "reference" / "kernels").glob("*.py"))
    names = re.findall(r"^def (\w+_kernel)\(", sources, re.M)
    # `probabilistic` and `block` have one kernel each, compiled with block sums and without.
    assert sorted(result.stdout.split()) == sorted([*names, "verify_kernel", "verify_kernel"])


PAGE = ROOT / "docs" / "kernels.md"


@pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout")
def test_the_kernels_page_names_every_bundle():
    from specdecode.kernels import arguments

    bundles = {name for name, value in vars(arguments).items() if hasattr(value, "_fields")}
    section = PAGE.read_text().partition("| bundle |")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([A-Z][a-z]\w+)`", section)) == bundles
