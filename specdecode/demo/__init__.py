"""Two small language models that are part of the package, and the script that trained them.

`TARGET` and `DRAFT` are the folders to give to `AutoModelForCausalLM.from_pretrained` and
`AutoTokenizer.from_pretrained`.  README.md beside this file is their model card.
"""

from pathlib import Path

TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"
