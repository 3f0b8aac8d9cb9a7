# What a pod of Kubernetes runs: torchrun with the arguments of this script, below which $RUN is the
# folder of the run. Backquotes, because Kubernetes replaces $(NAME) by a variable.
#
# bash gets the SIGTERM of an eviction, and passes it on to the ranks of its pod, if there are any
# yet. torchrun does not get it: the torchruns of the other pods would wait for it for five minutes.
# All ranks of all pods then save and end with status 0, which would mean that the work is done.
# Therefore a new marker of a graceful stop makes status 75 of it (EX_TEMPFAIL). A marker that was
# there before is of an earlier stop. `ls` reads the folder anew, also on NFS. A mistake (status 2)
# is only taken for one as long as the run has no checkpoint: later it may be a fault of the volume,
# which passes.
marker() { ls -i --full-time "$RUN" 2> /dev/null | grep ' stopped$'; }
before=`marker`
trap 'ranks=`cat /proc/$!/task/*/children`; kill -TERM ${ranks:-$!}' TERM
python -m launch.torchrun "$@" &
while wait $!; status=$?; kill -0 $! 2> /dev/null; do :; done
after=`marker`
if [ "${after:-$before}" != "$before" ]; then exit 75; fi
if [ $status = 2 ] && ls "$RUN" 2> /dev/null | grep -qx latest; then exit 1; fi
exit $status
