"""What the command line alone reads from the environment; where the controller is stands in ``meshloom.client``."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.contract.jobs.code_archives import DEFAULT_CODE_MIB


class CliSettings(BaseSettings):
    """Each is the environment variable ``MESHLOOM_<NAME>``; docs/configuration.md lists them."""

    model_config = SettingsConfigDict(env_prefix="MESHLOOM_", extra="ignore")

    max_code_mib: int = Field(
        default=DEFAULT_CODE_MIB,
        description="The largest code archive that `--code` uploads, in MiB; the controller has its own limit.",
    )
