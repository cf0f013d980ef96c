"""Steps over shards of the vocabulary: what ranks tell each other, and what each does with it.

| file | what is in it |
|---|---|
| `channel` | how words travel between ranks |
| `tell`, `arrange` | what a rank tells of its part of the rows; what all told, put in order |
| `cut` | the cutoffs of truncated rows, without gathering but few |
| `offer` | the token that each rank offers, and which is taken |
| `rivals` | what a rank knows of the others' scores while it searches |
| `arguments` | what kernels receive, besides what they do on one GPU |
| `memory`, `plan` | what such a step has to do, and its memory; its launches and exchanges |
| `launches` | how these are run |
| `rows` | the steps whose rows are gathered first |
"""
