"""Truncation: the tokens that top-k, top-p and min-p keep of a row, and their statistics.

| file | content |
|---|---|
| `kernel` | the launch: the last token kept of each row |
| `narrow`, `wide` | the search for that token: among a row's likeliest tokens, or in the whole row |
| `early` | decisions about drafts before that token is known |
"""
