"""What ``meshloom doctor`` says of the storage of several nodes."""

from services.cli.doctor import _storage
from services.contract.api.views import NodeView
from tests.cli import views

ONE, OTHER = "a1" * 16, "b2" * 16


def node(name: str, storage: str | None, fault: str | None = None) -> NodeView:
    known = views.nodes().items[1]
    told = {"storage_id": storage, "storage_fault": fault}
    inventory = known.inventory.model_copy(update=told)
    return known.model_copy(update={"id": name, "inventory": inventory})


def test_nodes_with_different_storages_are_told_apart() -> None:
    (shared,) = _storage([node("loom-1", ONE), node("loom-2", ONE)])
    assert (shared.healthy, shared.detail) == (True, "shared by 2 nodes")
    (apart,) = _storage([node("loom-1", ONE), node("loom-2", OTHER), node("loom-3", ONE)])
    assert not apart.healthy
    assert apart.detail == "2 different storages (loom-1, loom-3: a1a1a1a1; loom-2: b2b2b2b2)"
    assert "MESHLOOM_CHECKPOINT_ROOT" in apart.advice


def test_a_node_that_could_not_use_its_storage_is_named_and_one_alone_needs_none_to_share() -> None:
    (unread,) = _storage([node("loom-1", None)])
    assert unread.detail.startswith("not known of loom-1: ")
    assert not list(_storage([node("loom-1", ONE)]))


def test_why_a_bucket_cannot_be_used_is_told_once_for_all_its_nodes() -> None:
    why = "s3://b answers AccessDenied (HTTP 403) to PutObject"
    (fault,) = _storage([node("loom-1", ONE, why)])
    assert (fault.healthy, fault.detail) == (False, f"of loom-1: {why}")
    nodes = [node("loom-1", None, why), node("loom-2", None, why)]
    assert [f.detail for f in _storage(nodes) if not f.healthy] == [f"of loom-1, loom-2: {why}"]
