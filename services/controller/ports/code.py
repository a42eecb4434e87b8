"""Where uploaded code is kept until no job needs it."""

from typing import Protocol

from services.controller.domain.access.code import CodeLimits, Kept, UploadedCode


class CodeStore(Protocol):
    """All uploaded archives, by digest. Their contents are for agents: the controller reads none."""

    async def keep(self, code: UploadedCode, body: bytes, limits: CodeLimits) -> Kept:
        """Keep an archive, whole or not at all; one that is known is noted as used now."""
        ...

    async def get(self, digest: str) -> UploadedCode | None:
        """What is known of an archive; None if it is not there."""
        ...

    async def use(self, digest: str) -> bool:
        """Note an archive as used now, by which it is kept for a while; whether it is there."""
        ...

    async def unused(self, before_ms: int) -> list[str]:
        """The digests of archives that were last used before that moment."""
        ...

    async def forget(self, digest: str, before_ms: int, epoch: int) -> bool:
        """Remove an archive, unless it was used since ``before_ms``; whether it was removed.

        Raises:
            DeposedError: ``epoch`` is not the present one.
        """
        ...
