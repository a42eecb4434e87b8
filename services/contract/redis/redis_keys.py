"""Every Redis key of Meshloom, built here and nowhere else.

| key | type | life |
| --- | --- | --- |
| ``ml:jobs`` | zset: job id by creation time in ms | permanent |
| ``ml:jobs:active`` | set: ids of jobs that are neither terminal nor PAUSED | permanent |
| ``ml:jobs:state:<state>`` | zset: ids of the jobs in that state by creation time in ms | with its jobs |
| ``ml:jobs:owner:<owner>`` | zset: the same of an owner's jobs | with its jobs |
| ``ml:jobs:label:<key>``, ``ml:jobs:label:<key>=<value>`` | zset: the same of jobs with that label | with its jobs |
| ``ml:jobs:index`` | string: the format of these indexes, once they hold all jobs | permanent |
| ``ml:job:<id>`` | hash: ``doc``, without its ``spec``, ``plan`` and ``attempts`` once a leader wrote it, which are beside it; ``version``, ``fence``, ``state``, ``summary`` for lists, ``listed``: the indexes in which it stands | until the job is deleted |
| ``ml:job:<id>:events`` | stream: ``m`` = JSON event | with the job, trimmed; to the newest 8, once storage has them |
| ``ml:job:<id>:events:older`` | stream: the same, of storage | TTL 15 min, when somebody asked |
| ``ml:job:<id>:history`` | stream: ``m`` = JSON of what was decided | with the job, 7 days after its end (15 min, once storage has its records), trimmed |
| ``ml:job:<id>:ranks`` | hash: rank to RankSample JSON | with the job, 7 days after its end |
| ``ml:job:<id>:steps`` | stream: ``m`` = StepRecord JSON | with the job, 7 days after its end (15 min, once storage has it), trimmed |
| ``ml:job:<id>:metrics`` | stream: ``m`` = MetricRecord JSON | with the job, 7 days after its end (15 min, once storage has it), trimmed |
| ``ml:job:<id>:logs`` | stream: ``m`` = LogLine JSON | with the job, 7 days after its end (15 min, once storage has it), trimmed |
| ``ml:job:<id>:records`` | string: that the three streams above hold all that is kept of them | with those streams |
| ``ml:job:<id>:last`` | hash: ``steps``, ``metrics``: the newest few, a JSON a line; ``events``: the first that is kept beside them | from the end of a job whose records storage has, with the job |
| ``ml:job:<id>:recalled`` | hash: ``asked``: by whom records are wanted back from storage, ``done`` | TTL, until they are back |
| ``ml:job:<id>:recalled:steps``, ``…:metrics``, ``…:logs``, ``…:events`` | stream: what an agent reads there | the same |
| ``ml:jobs:recalled`` | zset: ``<id>`` of ended jobs whose records were brought back, by time in µs | TTL 15 min, when the last one was |
| ``ml:job:<id>:stacks`` | hash: rank to RankStacks JSON | with the job, 7 days after its end |
| ``ml:job:<id>:checkpoints`` | hash: checkpoint id to JSON | with the job (an index of storage) |
| ``ml:jobs:changes`` | stream: ``m`` = job id, ``v`` = its version, ``a`` = 1 while it is active | permanent, trimmed |
| ``ml:events`` | stream: ``m`` = JSON event, ``j`` = job id, of all jobs | permanent, trimmed |
| ``ml:jobs:deleted`` | set: ids of jobs that had an attempt and that people deleted | permanent |
| ``ml:nodes`` | hash: node id to JSON | until it was lost for 7 days, or is deleted |
| ``ml:nodes:draining`` | hash: node id to Drain JSON | until it is undrained |
| ``ml:nodes:measured`` | hash: ``<node id>/<device type>`` to Measurement JSON | with the node |
| ``ml:reservations`` | hash: reservation id to Reservation JSON | until its nodes are given back |
| ``ml:reservations:ended`` | list: Reservation JSON, the newest first | permanent, trimmed to 100 |
| ``ml:node:<id>:measuring:<device type>`` | string: that it was asked to | TTL 60 s |
| ``ml:node:<id>:lease`` | string: incarnation | TTL, renewed by the agent's beat |
| ``ml:node:<id>:beat`` | hash: ``incarnation``, ``number`` of the last beat applied | with the node |
| ``ml:node:<id>:inbox`` | stream: ``m`` = Command JSON | permanent, trimmed as acknowledged |
| ``ml:plan:<id>`` | hash: ``doc``, ``state`` | TTL 7 days |
| ``ml:plans`` | zset: plan id by creation time in ms | TTL 7 days from the last one, trimmed to that |
| ``ml:probe:<id>`` | string: ModelProbed JSON | TTL 24 h, of a failure 60 s |
| ``ml:probe:<id>:paces`` | list: Pace JSON of jobs that ran the model | TTL 7 days from the last one, trimmed |
| ``ml:probe:<id>:asked`` | string: that a node was asked | TTL, until it is answered or overdue |
| ``ml:probe:<id>:node`` | string: the node that was asked last | TTL 24 h |
| ``ml:node:<id>:facts`` | list: Fact JSON, as the node's agent adds them | until they are taken into the stream, or the node is deleted |
| ``ml:facts:senders`` | list: node ids, one for each fact of these lists, in the order in which the facts came | the same |
| ``ml:facts:senders:taken`` | list: the one for which a controller waited | until its fact is in the stream |
| ``ml:facts:arrived``, ``ml:facts:taken`` | list: the same of agents of the last release, which have one list for all nodes | until they are taken into the stream |
| ``ml:facts`` | stream: ``m`` = Fact JSON, ``n`` = the node whose agent added it | permanent, trimmed as acknowledged |
| ``ml:idempotency:<subject>:<key>`` | string | TTL 24 h, the newest 2 000 of a subject |
| ``ml:idempotency:<subject>`` | zset: those keys by creation in ms | TTL 24 h |
| ``ml:plans:owner:<owner>`` | zset: id of a plan by creation in ms; the newest 1 000, and those being made | TTL 7 days |
| ``ml:leader`` | string: controller id | TTL, renewed by the leader |
| ``ml:epoch`` | integer: leaderships so far | permanent |
| ``ml:codes`` | zset: hex digest of an uploaded archive by its last use in ms | permanent |
| ``ml:codes:bytes`` | hash: subject to what its archives are counted as; all of them without a name | permanent |
| ``ml:code:<hex>`` | hash: ``doc``, and by its number each part of the archive | a day after its last use, while no job names it |
| ``ml:code:<hex>:draft:<random>`` | hash: the same, as it is being written | TTL 10 min |
| ``ml:tokens`` | hash: token id to JSON, with the digest of its secret | permanent |
| ``ml:webhooks`` | hash: webhook id to JSON, with the secret that signs | permanent |
| ``ml:webhooks:deliveries`` | hash: webhook id to JSON: how far it is | with the webhook |
| ``ml:audit`` | stream: ``m`` = JSON entry of what an operator asked for | permanent, trimmed |
| ``ml:audit:others`` | stream: the same of everybody else | permanent, trimmed |
| ``ml:audit:refused`` | stream: the same of what was refused | permanent, trimmed |
| ``ml:wake`` | pub/sub channel | never stored; only wakes |

In ``ml:jobs:recalled``, and in the names of ``ranks``, ``steps``, ``metrics``, ``logs``, ``records`` and ``recalled``, ``<id>`` is
what ``telemetry_name`` answers.
"""

import re
from typing import Final

JOBS: Final = "ml:jobs"
ACTIVE_JOBS: Final = "ml:jobs:active"
CHANGED_JOBS: Final = "ml:jobs:changes"
EVENT_FEED: Final = "ml:events"
DELETED_JOBS: Final = "ml:jobs:deleted"
JOB_INDEX: Final = "ml:jobs:index"
RECALLED_JOBS: Final = "ml:jobs:recalled"
# Another number has all indexes built again.
JOB_INDEX_FORMAT: Final = "2"
NODES: Final = "ml:nodes"
DRAINING_NODES: Final = "ml:nodes:draining"
MEASURED_NODES: Final = "ml:nodes:measured"
RESERVATIONS: Final = "ml:reservations"
ENDED_RESERVATIONS: Final = "ml:reservations:ended"
PLANS: Final = "ml:plans"
FACTS: Final = "ml:facts"
# Agents add to lists, for a user of Redis may be allowed RPUSH and nothing else: XADD also trims, and
# takes ids behind which nothing can be added.
FACT_SENDERS: Final = "ml:facts:senders"
TAKEN_FACT_SENDERS: Final = "ml:facts:senders:taken"
ARRIVED_FACTS: Final = "ml:facts:arrived"
TAKEN_FACTS: Final = "ml:facts:taken"
FACTS_GROUP: Final = "controllers"
INBOX_GROUP: Final = "agents"
LEADER: Final = "ml:leader"
EPOCH: Final = "ml:epoch"
TOKENS: Final = "ml:tokens"
# Apart, for each is trimmed: neither refusals nor what submitters do may push out what operators did. No two
# have an id in common.
WEBHOOKS: Final = "ml:webhooks"
WEBHOOK_DELIVERIES: Final = "ml:webhooks:deliveries"
AUDIT: Final = "ml:audit"
AUDIT_OF_OTHERS: Final = "ml:audit:others"
AUDIT_OF_REFUSALS: Final = "ml:audit:refused"
WAKE: Final = "ml:wake"
CODES: Final = "ml:codes"
CODES_BYTES: Final = "ml:codes:bytes"
MESSAGE_FIELD: Final = "m"
SENDER_FIELD: Final = "n"
JOB_FIELD: Final = "j"
# With the look that the reconciler takes each second, a silent node is fenced within six seconds.
NODE_LEASE_MS: Final = 5_000
LEADER_LEASE_MS: Final = 4_000
IDEMPOTENCY_TTL_S: Final = 86_400
PLAN_TTL_S: Final = 7 * 86_400
# Each may take 64 KiB and more; without a bound one subject could fill the memory.
CLAIMS_KEPT: Final = 2_000
PLANS_KEPT: Final = 1_000
# A node profiles one model at a time: the others wait in its inbox, each with its spec.
PLANS_PROBING: Final = 64
PROBE_TTL_S: Final = 86_400
FAILED_PROBE_TTL_S: Final = 60
MEASURING_TTL_S: Final = 60
TELEMETRY_KEPT_S: Final = 7 * 86_400
# What storage has is kept this long: whoever reads it reads on, and it is brought back for whoever comes later.
RECALLED_S: Final = 900
# All that was brought back takes so much, beside what came in the last minute, which whoever asked for it still reads.
RECALLED_BYTES: Final = 1 << 29
RECALLED_STAYS_S: Final = 60
# Of an ended job whose records are in storage, so many of each kind tell how it stood.
LAST_KEPT: Final = 4
LAST_EVENTS_KEPT: Final = 8
# Of a model's profile the most; to parse so much takes less than a lease.
LONGEST_FACT: Final = 8 << 20
# As `proto-max-bulk-len` is set: Redis closes the connection of one that sends more, and does not say why.
LONGEST_TEXT: Final = 16 << 20
LOGS_KEPT: Final = 20_000
STEPS_KEPT: Final = 200_000
METRICS_KEPT: Final = 50_000
EVENTS_KEPT: Final = 10_000
EVENT_FEED_KEPT: Final = 20_000
HISTORY_KEPT: Final = 20_000
# Behind an entry of 20 KiB, as patches may have it, fewer are kept, so that about so much is all of a job's.
HISTORY_BYTES: Final = 16 << 20
CHANGES_KEPT: Final = 10_000
AUDIT_KEPT: Final = 50_000
CODE_KEPT_S: Final = 86_400
CODE_DRAFT_TTL_S: Final = 600
CODE_PART_BYTES: Final = 1 << 18
CODE_PARTS: Final = "parts"
_HEX: Final = re.compile("[0-9a-f]{32}")
# redis-py cuts the commands that it quotes in errors.
_SECRET: Final = re.compile(r"(?<=:job_[0-9a-z]{26}):[0-9a-f]{1,32}(?![0-9a-z])")


def jobs_in_state(state: str) -> str:
    """The jobs in a state."""
    return f"ml:jobs:state:{state}"


def jobs_of_owner(owner: str) -> str:
    """The jobs of an owner."""
    return f"ml:jobs:owner:{owner}"


def jobs_not_ended(owner: str) -> str:
    """The jobs of an owner that have not ended."""
    return f"ml:jobs:not-ended:{owner}"


def jobs_with_label(label: str) -> str:
    """The jobs with a label, as ``key`` or as ``key=value``."""
    return f"ml:jobs:label:{label}"


def job(job_id: str) -> str:
    """The job's record."""
    return f"ml:job:{job_id}"


def job_events(job_id: str) -> str:
    """What happened to the job."""
    return f"ml:job:{job_id}:events"


def job_older_events(job_id: str) -> str:
    """What happened to a job that has ended, before the last few things, brought back from storage."""
    return f"ml:job:{job_id}:events:older"


def job_history(job_id: str) -> str:
    """All that was decided, from its creation on."""
    return f"ml:job:{job_id}:history"


def telemetry_name(job_id: str, secret: str) -> str:
    """Under which name agents write what they report of a job, or bring back of it.

    Args:
        job_id: The job.
        secret: 32 hexadecimal digits that those know who may; empty: the name can be derived by everyone.
    """
    return f"{job_id}:{secret}" if secret else job_id


def is_telemetry_name(job_id: str, text: str) -> bool:
    """Whether it is a name that ``telemetry_name`` answers for the job."""
    head, _, secret = text.partition(":")
    return head == job_id and (text == job_id or _HEX.fullmatch(secret) is not None)


def without_secret(key: str) -> str:
    """The key as it is shown to people, who are not to learn the secret in it."""
    return _SECRET.sub("", key)


def job_ranks(name: str) -> str:
    """The last sample of each rank."""
    return f"ml:job:{name}:ranks"


def job_steps(name: str) -> str:
    """One record a training step."""
    return f"ml:job:{name}:steps"


def job_metrics(name: str) -> str:
    """What the user's code measures, a record a step."""
    return f"ml:job:{name}:metrics"


def job_logs(name: str) -> str:
    """The ranks' output."""
    return f"ml:job:{name}:logs"


def job_records(name: str) -> str:
    """That the streams of steps, metrics and output hold all that is kept of them."""
    return f"ml:job:{name}:records"


def job_last(job_id: str) -> str:
    """The newest steps and metrics of an ended job whose records are in storage."""
    return f"ml:job:{job_id}:last"


def recalled(name: str) -> str:
    """Who wants the job's records back from storage, and whether they are."""
    return f"ml:job:{name}:recalled"


def recalled_steps(name: str) -> str:
    """Steps on their way back from storage."""
    return f"ml:job:{name}:recalled:steps"


def recalled_metrics(name: str) -> str:
    """Metrics on their way back from storage."""
    return f"ml:job:{name}:recalled:metrics"


def recalled_logs(name: str) -> str:
    """Output on its way back from storage."""
    return f"ml:job:{name}:recalled:logs"


def recalled_events(name: str) -> str:
    """Events on their way back from storage."""
    return f"ml:job:{name}:recalled:events"


def job_stacks(job_id: str) -> str:
    """The Python stacks that each rank was last found in."""
    return f"ml:job:{job_id}:stacks"


def job_checkpoints(job_id: str) -> str:
    """The index of the job's checkpoints."""
    return f"ml:job:{job_id}:checkpoints"


def node_lease(node_id: str) -> str:
    """The node's lease."""
    return f"ml:node:{node_id}:lease"


def node_beat(node_id: str) -> str:
    """The last beat whose records were written: a repeated one writes none twice."""
    return f"ml:node:{node_id}:beat"


def node_inbox(node_id: str) -> str:
    """The commands to the node's agent."""
    return f"ml:node:{node_id}:inbox"


def node_facts(node_id: str) -> str:
    """What the node's agent tells, until a controller takes it."""
    return f"ml:node:{node_id}:facts"


def measuring(node_id: str, device_type: str) -> str:
    """That the node was asked to measure its devices."""
    return f"ml:node:{node_id}:measuring:{device_type}"


def plan(plan_id: str) -> str:
    """The plan's record."""
    return f"ml:plan:{plan_id}"


def probe(probe_id: str) -> str:
    """The answer to a probe."""
    return f"ml:probe:{probe_id}"


def probe_paces(probe_id: str) -> str:
    """How long steps of that model took."""
    return f"ml:probe:{probe_id}:paces"


def probe_asked(probe_id: str) -> str:
    """That a node was asked this and has not answered yet."""
    return f"ml:probe:{probe_id}:asked"


def probe_node(probe_id: str) -> str:
    """The node that was asked this last: nobody else may answer."""
    return f"ml:probe:{probe_id}:node"


def code(hex_digest: str) -> str:
    """An uploaded archive: its record, and its parts by number."""
    return f"ml:code:{hex_digest}"


def code_draft(hex_digest: str, random: str) -> str:
    """The same while it is being written."""
    return f"ml:code:{hex_digest}:draft:{random}"


def idempotency_of(subject: str) -> str:
    """The names of all answers that this subject's keys were given."""
    return f"ml:idempotency:{subject}"


def plans_of(owner: str) -> str:
    """The plans of an owner."""
    return f"ml:plans:owner:{owner}"


def idempotency(subject: str, key: str) -> str:
    """The answer that this subject's ``Idempotency-Key`` was given; no subject has a colon."""
    return f"ml:idempotency:{subject}:{key}"
