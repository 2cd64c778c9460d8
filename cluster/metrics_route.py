"""`GET /metrics`."""

from fastapi import APIRouter, Request, Response

from cluster.frontend import Frontend
from cluster.metrics import Exposition
from configs.sections import MetricsCompat


def metrics_routes(frontend: Frontend, compat: MetricsCompat) -> APIRouter:
    router = APIRouter(tags=["server"])

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """For Prometheus: of all replicas together, whichever of them is asked."""
        engine = frontend.engine
        counts, gauges = await engine.metrics.everything()
        exposition = Exposition(frontend.model_names[0], counts, gauges, engine.info(), compat)
        text, content_type = exposition.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    return router
