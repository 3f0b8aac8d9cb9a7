"""Find secrets of the environment, which must not get into configs, checkpoints or W&B."""

import os
import re

# The ends of names of secret variables, perhaps with a number: API_KEY, HF_TOKEN and SECRET_1, but
# not KEYBOARD or TOKENIZER_DIR.
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASS(WORD|WD|PHRASE)?|_PWD|_PAT|CREDENTIALS?)(_\w{1,2})?$", re.IGNORECASE)


def secret_in(text: str) -> str | None:
    """Return the name of a secret environment variable whose value the text contains, else None."""
    for name, value in os.environ.items():  # short values may be ordinary words
        if len(value) >= 8 and value in text and _SECRET.search(name):
            return name
    return None
