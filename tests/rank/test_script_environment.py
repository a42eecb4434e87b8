"""What torchrun would tell a script."""

from fsdp_core.plan.model import MeshPlan, ShardingPlan
from services.contract.jobs.plans import GangPlan, RankPlacement
from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import RankSeat
from services.contract.words.ids import new_job_id
from services.worker.rank.script.environment import torchrun_environment

JOB = new_job_id(1, bytes(10))
# Rank by rank: the node, the place there, the device.
SEATS = [("b", 0, "cuda:2"), ("b", 1, "cuda:5"), ("a", 0, "cuda:0"), ("a", 1, "cuda:3")]


def told(rank: int, **inherited: str) -> dict[str, str]:
    spec = JobSpec.model_validate({"entrypoint": {"module": "train"}, "resources": {"ranks": 4}})
    placements = tuple(
        RankPlacement(rank=number, node_id=node, local_rank=place, device=device)
        for number, (node, place, device) in enumerate(SEATS)
    )
    seat = RankSeat(
        job_id=JOB,
        fence=3,
        rank=rank,
        local_rank=SEATS[rank][1],
        device=SEATS[rank][2],
        spec=spec,
        plan=GangPlan(
            device_type="cuda", sharding=ShardingPlan(MeshPlan(dp_shard=4)), ranks=placements
        ),
        storage_root="/nowhere",
        board_path="/nowhere/board",
        log_folder="/nowhere",
        store_host="10.0.0.7",
        store_port=4321,
        threads=6,
    )
    return torchrun_environment(seat, inherited)


def test_a_rank_is_told_its_place_in_the_gang_and_on_its_node() -> None:
    found = told(3)
    assert {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "4321",
        "TORCHELASTIC_RUN_ID": JOB,
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "6",
    }.items() <= found.items()
    assert told(0)["GROUP_RANK"] == "0"
    assert "OMP_NUM_THREADS" not in {k for k, v in told(0, OMP_NUM_THREADS="2").items() if v != "2"}


def test_a_local_rank_is_the_number_of_its_accelerator_among_those_that_it_sees() -> None:
    assert told(1)["CUDA_VISIBLE_DEVICES"] == "2,5"
    assert told(2)["CUDA_VISIBLE_DEVICES"] == "0,3"
    assert told(2, CUDA_VISIBLE_DEVICES="GPU-a,GPU-b,GPU-c,GPU-d")["CUDA_VISIBLE_DEVICES"] == (
        "GPU-a,GPU-d"
    )
