"""The benchmark over shards: ranks that each verify some of the requests give the tokens of one process; tables show all."""

import json

import pytest
import torch

from specdecode import RejectionSampler
from tests.benchmarks.batch_sharded import BatchSharded
from tests.benchmarks.shards import ALL_TO_ALL, GATHER, WHOLE
from tests.support.ranks import groups, on_ranks

COLUMNS, NUM_DRAFT_TOKENS = 16, 5


@pytest.mark.parametrize(("ranks", "batch"), [(2, 4), (2, 3), (3, 7), (3, 2)])
def test_each_rank_gets_the_tokens_of_one_process_for_all_requests(ranks, batch):
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(batch, NUM_DRAFT_TOKENS + 1, ranks * COLUMNS, generator=generator)
    draft = target[:, :-1] + 0.5 * torch.randn(batch, NUM_DRAFT_TOKENS, ranks * COLUMNS, generator=generator)
    drafts = draft.softmax(dim=-1).flatten(0, 1).multinomial(1, generator=generator).view(batch, NUM_DRAFT_TOKENS)
    sampler, seeds = RejectionSampler("probabilistic", backend="eager"), torch.arange(batch)

    def run(group):
        sharded = BatchSharded(group, batch)
        mine = [rows[..., COLUMNS * group.rank() :][..., :COLUMNS].contiguous() for rows in (target, draft)]
        target_rows, draft_rows = map(sharded.own_rows, mine)
        assert torch.equal(target_rows, target[sharded.own])
        own = sampler(target_rows, drafts[sharded.own], draft_rows, seeds=seeds[sharded.own]) if sharded.count else None
        return sharded.gather(own, drafts)

    expected = sampler(target, drafts, draft, seeds=seeds)
    for results in on_ranks(run, [(group,) for group in groups(ranks)]):
        assert torch.equal(results.token_ids, expected.token_ids)
        assert torch.equal(results.num_accepted, expected.num_accepted.long())
    assert 0 < expected.num_accepted.sum() < NUM_DRAFT_TOKENS * batch  # some drafts are accepted, some not


def test_a_table_shows_every_way_that_was_measured_and_no_other(tmp_path, monkeypatch):
    benchmarks, records = (
        pytest.importorskip(f"docs._tools.{name}", exc_type=ImportError) for name in ("benchmarks", "records")
    )
    old = ["verify whole rows", GATHER, "shards, triton, all_gather", "shards, triton, symmetric_memory"]
    for name, ways in {"old": old, "new": [*old, GATHER + WHOLE, ALL_TO_ALL, ALL_TO_ALL + WHOLE]}.items():
        result = {"batch": 1, "drafts": 3, "method": "strict", "bytes": 8}
        results = [result | {"way": way, "us": 1000 + i} for i, way in enumerate(ways)]
        (tmp_path / f"{name}.json").write_text(json.dumps({"commit": "aaaaaaa", "results": results}))
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    records.load.cache_clear()
    tables = [benchmarks.shards_table(name, "strict") for name in ("old", "new")]
    records.load.cache_clear()
    assert [[f">1,{i:03}<" in table for i in range(7)] for table in tables] == [[True] * 4 + [False] * 3, [True] * 7]
    assert ["all-to-all" in table for table in tables] == [False, True]
