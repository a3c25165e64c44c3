"""Short conversations over asyncio's streams, which leave nothing behind however they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(opening: Awaitable[Connection]) -> AsyncIterator[Connection]:
    """The two ends of what `opening` opens, cut at the end, whatever was not sent by then.

    asyncio keeps the error of a connection that broke for whoever waits until it is closed, and logs it as one that was
    never retrieved if nobody does.
    """
    reader, writer = await opening
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()
