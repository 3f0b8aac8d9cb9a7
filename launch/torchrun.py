"""Run torchrun, and end with status 2 if that is how a rank ended: after a mistake of the user.

torchrun itself ends with status 1, as after a fault. Then whoever starts pods again can't tell that
it is of no use.

python -m launch.torchrun --nproc-per-node=8 pretrain.py ...
"""

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from utils.terminal import tell


def main(argv: list[str] | None = None) -> int:
    try:
        run.main(argv)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode == 2:
            return 2  # a rank has told the mistake, which the report would hide
        tell(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
