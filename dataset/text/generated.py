"""Generate reasoning problems in words with the package reasoning-gym."""

import difflib
import hashlib
from collections.abc import Iterator, Sequence

from dataset.text.sources import Document
from utils.errors import UserError

# It mixes other tasks and does nothing without their settings.
_NO_TASK = "composite"


def generate(tasks: Sequence[str], num: int, seed: int) -> Iterator[Document]:
    """Yield `num` problems of each task, one task after the other."""
    if not tasks:
        return
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError(
            "--generate needs the package reasoning-gym, which is missing; pip install -r requirements-text.txt"
        ) from None
    known = sorted(set(DATASETS) - {_NO_TASK})
    for task in tasks:
        if task not in known:
            near = difflib.get_close_matches(task, known)
            others = f", such as {', '.join(near)}" if near else ""
            raise UserError(f"--generate {task}: reasoning-gym has no such task; give another{others}")
    for task in tasks:
        # reasoning-gym makes problem n from the seed plus n. So neighbouring seeds would share all
        # problems but one. NumPy takes seeds of 32 bits, also for the last problem.
        digest = hashlib.blake2b(f"{task} {seed}".encode(), digest_size=4).digest()
        problems = reasoning_gym.create_dataset(task, size=num, seed=int.from_bytes(digest, "big") // 2)
        for number in range(num):
            problem = problems[number]
            # Some problems have several answers, and none is named. The builder leaves them out.
            answer = problem["answer"] or ""
            yield Document(f"problem {number:,} of {task}", problem["question"].encode(), str(answer).encode(), task)
