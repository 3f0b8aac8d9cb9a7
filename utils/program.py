"""Run a program of several ranks, with exit status, one-line errors and a report after a fault."""

import faulthandler
import gc
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from utils.errors import UserError
from utils.files import require_utf8
from utils.out_of_memory import OutOfMemory
from utils.ranks.config import MeetingConfig
from utils.ranks.launch import Launch, end_with_launcher, may_be_first
from utils.ranks.lost_ranks import is_lost_peer, is_reported, report_first, show_stacks_when_asked, silent_ranks
from utils.ranks.rendezvous import MissingRank, require_meeting_point
from utils.ranks.setup import join_ranks
from utils.ranks.world import World
from utils.shell import known_errors, memory_report, tell_mistake, wanted_traceback
from utils.terminal import leave, tell

# What a rank reports to the others, which then end without a word.
_NO_MEMORY = "out of memory"


def run(main: Callable[[World], None]) -> NoReturn:
    """Run `main(world)` as a program, and exit.

    A mistake of the user has status 2. A fault is a traceback, a line that names the rank, and
    status 1; a lack of memory is two lines. A worker ends when its launcher is gone.
    """
    gc.freeze()  # what is imported by now stays, and no collection of garbage has to go through it
    faulthandler.enable()  # SIGBUS and SIGSEGV raise no exception, and print where they struck
    show_stacks_when_asked()
    try:
        require_utf8(sys.argv[1:])
        meeting = MeetingConfig.typed(sys.argv[1:])
        launch = Launch.from_environment(meeting.launcher)
        require_meeting_point(launch, meeting)
    except UserError as error:  # the same on every rank
        if may_be_first():
            tell_mistake(error)
        leave(2)
    end_with_launcher(launch)
    world = World(rank=launch.rank)  # for faults before the ranks have met

    @record  # passes the tracebacks of faults to torchrun's report; mistakes are not faults
    def attempt() -> UserError | None:
        try:
            with known_errors():
                main(world)
        except UserError as error:
            return error
        except OutOfMemory as error:
            # The report is ready before any rank ends, because torchrun then ends the others.
            report = memory_report(error, f" on rank {world.rank}")
            if report_first(_NO_MEMORY, world):
                tell(report)
            os._exit(1)
        except Exception as error:
            if is_lost_peer(error) and is_reported(_NO_MEMORY, world):
                os._exit(1)  # that rank said why
            raise
        return None

    try:
        world = join_ranks(launch, meeting)
        mistake = attempt()
        if mistake is not None:
            if world.is_main:
                tell_mistake(mistake)
            elif mistake.__cause__ is not None and (lines := wanted_traceback(mistake)):  # made on this rank
                tell(lines.rstrip())
            world.barrier()  # torchrun ends all ranks when one exits, so the line must be out before
        world.close()
    except UserError as error:  # before the ranks have met
        if launch.rank <= 1 or launch.local_rank == 0:  # the ranks of a host find the same mistake
            tell_mistake(error)
        leave(2)
    except MissingRank as error:  # the traceback would be of the wait
        tell(f"fault on rank {world.rank}: {error}")
        os._exit(1)
    except KeyboardInterrupt:  # in a program without a graceful stop
        tell("error: interrupted")
        os._exit(130)
    except Exception as error:
        tell(traceback.format_exc().rstrip())
        reason = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        tell(f"fault on rank {world.rank}: {reason}")
        for line in silent_ranks(world, error):
            tell(line)
        with suppress(OSError):
            sys.stdout.flush()
        # sys.exit would close the process groups, and wait for ranks that wait for this one.
        os._exit(1)
    # A thread of gloo that asks for Python's lock after finalization has begun aborts the process.
    leave(0 if mistake is None else 2, finalize=world.size == 1)
