"""Uploaded code in memory."""

from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.access.code import CodeLimits, Kept, UploadedCode


class MemoryCode:
    """The port ``CodeStore``."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def keep(self, code: UploadedCode, body: bytes, limits: CodeLimits) -> Kept:
        """See ``CodeStore.keep``."""
        known = self._server.code
        if code.digest not in known:
            everyone = [kept for kept, _ in known.values()]
            own = [kept for kept in everyone if kept.uploaded_by == code.uploaded_by]
            if sum(c.counted_bytes for c in [*everyone, code]) > limits.store_bytes:
                return "full"
            if sum(c.counted_bytes for c in [*own, code]) > limits.share_bytes:
                return "share"
        is_new = known.setdefault(code.digest, (code, body))[0] is code
        await self.use(code.digest)
        return "new" if is_new else "known"

    async def get(self, digest: str) -> UploadedCode | None:
        """See ``CodeStore.get``."""
        found = self._server.code.get(digest)
        return None if found is None else found[0]

    async def use(self, digest: str) -> bool:
        """See ``CodeStore.use``."""
        if digest in self._server.code:
            self._server.code_used_ms[digest] = self._server.now_ms()
        return digest in self._server.code

    async def unused(self, before_ms: int) -> list[str]:
        """See ``CodeStore.unused``."""
        return [digest for digest, used in self._server.code_used_ms.items() if used < before_ms]

    async def forget(self, digest: str, before_ms: int, epoch: int) -> bool:
        """See ``CodeStore.forget``."""
        self._server.refuse_deposed(epoch)
        if self._server.code_used_ms.get(digest, before_ms) >= before_ms:
            return False
        del self._server.code[digest], self._server.code_used_ms[digest]
        return True
