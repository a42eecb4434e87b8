"""Whether this node's agent is alive, as a health check outside of it can tell."""

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from services.contract.redis import redis_keys

_ANSWER_WITHIN_S = 2.0


def lease_is_held(redis_url: str, node_id: str) -> bool:
    """Whether the node's lease lives; an agent that no longer beats loses it within seconds."""
    client = Redis.from_url(
        redis_url,
        socket_timeout=_ANSWER_WITHIN_S,
        socket_connect_timeout=_ANSWER_WITHIN_S,
        retry=Retry(NoBackoff(), 0),
    )
    with client:
        try:
            return bool(client.exists(redis_keys.node_lease(node_id)))
        except RedisError:
            return False
