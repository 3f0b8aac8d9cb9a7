"""Secrets of the environment, which must not get into configs, checkpoints or W&B."""

import os
import re

# Names of what is secret end so, perhaps with a number: API_KEY, HF_TOKEN, SECRET_1, not KEYBOARD or TOKENIZER_DIR.
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASS(WORD|WD|PHRASE)?|_PWD|_PAT|CREDENTIALS?)(_\w{1,2})?$", re.IGNORECASE)


def secret_in(text: str) -> str | None:
    """The name of the environment variable whose value stands in the text, if there is one whose name says that it is
    a secret. Shorter values than eight characters are words.
    """
    for name, value in os.environ.items():
        if len(value) >= 8 and value in text and _SECRET.search(name):
            return name
    return None
