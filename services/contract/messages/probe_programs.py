"""What an agent tells the programs that it asks one question: on stdin, a JSON object each."""

from typing import Final

from pydantic import Field

from fsdp_core.plan.model import NodeFacts
from services.contract.messages.base import Message
from services.contract.messages.probing import DeviceType, ProbeModel
from services.contract.words.bounds import Details
from services.contract.words.ids import NodeId

SELF_TEST_VERSION: Final = 3
"""Of what the self-test measures; figures of another version are measured again."""


class ProbeSeat(Message):
    """A model to profile, and what its job may have here.

    Args:
        node_id: Whose answer it will be.
        question: The model, and the limits.
        memory_bytes: How much private memory it may take beyond what PyTorch itself does.
        secrets: Those that the spec refers to, by name; they are nowhere else.
        data_roots: Below which built-in data sources read.
        private_folders: In which they do not.
        code_folder: Holds the code that was uploaded for the job.
    """

    node_id: NodeId
    question: ProbeModel
    memory_bytes: int = Field(gt=0)
    secrets: dict[str, str] = Field(default_factory=dict, repr=False)
    data_roots: tuple[str, ...] = ()
    private_folders: tuple[str, ...] = ()
    code_folder: str | None = None


class SelfTestSeat(Message):
    """Devices to measure.

    Args:
        device_type: Their kind.
        seats: Ranks that the node takes at a time.
        processors: That these ranks share.
    """

    device_type: DeviceType
    seats: int = Field(ge=1)
    processors: int = Field(ge=1)


class SelfTestResult(Message):
    """What was measured, and how, for people."""

    facts: NodeFacts
    detail: Details = Field(default_factory=dict)
