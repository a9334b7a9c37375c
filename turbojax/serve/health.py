"""Whether the server is alive, and whether it should be sent requests: for probes, balancers and proxies."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from turbojax.serve.service import Service, service_of

router = APIRouter(tags=["operations"])

OK, STUCK, FAILED, DRAINING = "ok", "stuck", "failed", "draining"
UNHEALTHY: dict[int | str, dict[str, Any]] = {503: {"description": "`status` says why, in a word."}}


# The routes are coroutines, so that they are answered though all threads for other routes are busy.


def state_of(service: Service) -> str:
    """`failed`: the engine takes no requests any more. `stuck`: it has work, and finished no step for `stall_s`."""
    status = service.pipe.status
    if status.failure is not None:
        return FAILED
    if status.stalled_s > service.config.stall_s:
        return STUCK
    return DRAINING if service.is_draining else OK


def answer(state: str, *healthy: str) -> JSONResponse:
    """A state in one word: why an engine failed is in the log, not for everyone who can reach the address."""
    return JSONResponse({"status": state}, 200 if state in healthy else 503)


@router.get("/health/live", responses=UNHEALTHY)
async def live(service: Annotated[Service, Depends(service_of)]) -> JSONResponse:
    """503 once only a restart helps: the engine has failed, or is stuck."""
    return answer(state_of(service), OK, DRAINING)


@router.get("/health/ready", responses=UNHEALTHY)
async def ready(service: Annotated[Service, Depends(service_of)]) -> JSONResponse:
    """503 while requests should go elsewhere, which a server that drains is the one more case of."""
    return answer(state_of(service), OK)


@router.get("/health", responses=UNHEALTHY)
async def health(service: Annotated[Service, Depends(service_of)]) -> JSONResponse:
    """The same, for whoever asks one address only."""
    return answer(state_of(service), OK)
