"""The batch script of a reservation: one agent on each node, told on USR1 that it is to end.

Only the script holds the agents' environments: a command line can be read by everyone on a machine. srun
copies its standard input to all nodes, so the program that each node runs arrives there by it, and so does
the word to end: a signal by Slurm would reach the ranks, too, which must live on until their agent has had
them write a checkpoint.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Final

from services.contract.words.ids import NodeId
from services.controller.ports.pools import AgentProcess, PoolRefusedError

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def batch_script(agents: Mapping[NodeId, AgentProcess], grace_s: float) -> str:
    """The script for sbatch's standard input.

    Args:
        agents: One for each node of the batch job.
        grace_s: Seconds that agents have to end after USR1; then the batch job ends, and they with it.

    Raises:
        PoolRefusedError: The name of a variable cannot be one.
    """
    program = shlex.quote(_node_program(agents))
    return f"""#!/bin/bash
coproc agents {{
    exec srun --ntasks={len(agents)} --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0 \\
        --cpu-bind=none --mpi=none --export=ALL bash -s >&3
}} 3>&1
srun=$agents_PID
exec 4>&"${{agents[1]}}"
end_agents() {{
    trap '' USR1
    echo end >&4
    sleep {grace_s:g} &
    wait -n "$srun" "$!"
    exit 0
}}
trap end_agents USR1
printf '%s\\n' {program} >&4
wait "$srun"
"""


def _node_program(agents: Mapping[NodeId, AgentProcess]) -> str:
    """What bash runs on each node: the agent, until it ends or a line comes by standard input.

    Bash outlives the agent, for without cgroups Slurm knows its processes by their parents only.
    An agent that ends unasked fails its task, so that Slurm ends the others: ranks of one gang run
    on all of them.
    """
    processes = list(agents.values())
    shared = dict(
        set(processes[0].environment.items()).intersection(
            *(process.environment.items() for process in processes)
        )
    )
    cases = "\n".join(
        f"    {place}) {_exports(process.environment, shared)} set -- {shlex.join(process.command)} ;;"
        for place, process in enumerate(processes)
    )
    return f"""{{
exec 5<&0 </dev/null
agent() {{
    {_exports(shared, {})}
    case $SLURM_PROCID in
{cases}
    esac
    unset "${{!SLURM_@}}"
    exec "$@"
}}
asked=
trap 'asked=1; kill -TERM "$agent"' USR1 TERM
agent 5<&- &
agent=$!
{{ read -r _ <&5; kill -USR1 $$; }} &
listener=$!
while wait "$agent"; code=$?; kill -0 "$agent" 2>/dev/null; do :; done
kill "$listener" 2>/dev/null
test -n "$asked" && exit 0
exit $((code ? code : 1))
}}"""


def _exports(environment: Mapping[str, str], known: Mapping[str, str]) -> str:
    """Shell commands that set the variables that are not known yet."""
    for name in environment:
        if _VARIABLE.fullmatch(name) is None:
            raise PoolRefusedError(f"/agent/environment/{name}: not the name of a variable")
    own = sorted(environment.items() - known.items())
    return "".join(f"export {name}={shlex.quote(value)};" for name, value in own) or ":;"
