"""Where the controller is, read from the environment once."""

from pydantic_settings import BaseSettings, SettingsConfigDict


class CliSettings(BaseSettings):
    """The client's settings: ``MESHLOOM_URL`` (else the local ``MESHLOOM_PORT``) and token."""

    model_config = SettingsConfigDict(env_prefix="MESHLOOM_", extra="ignore")

    url: str | None = None
    port: int = 8400
    token: str | None = None

    @property
    def base_url(self) -> str:
        """The controller's root, without a slash at its end."""
        return (self.url or f"http://127.0.0.1:{self.port}").rstrip("/")
