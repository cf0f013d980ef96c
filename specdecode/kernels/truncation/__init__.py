"""Truncation: the tokens that top-k, top-p and min-p keep of a row, and their statistics.

| file | what is in it |
|---|---|
| `kernel` | the launch: the last token kept of each row |
| `narrow`, `wide` | where that token is looked for: among the likeliest tokens of a row, or in all of it |
| `early` | which drafts are rejected or accepted before it is known |
"""
