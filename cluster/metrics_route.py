"""`GET /metrics`."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from cluster.frontend import Frontend
from cluster.metrics import Exposition
from configs.sections import MetricsCompat


def metrics_routes(frontend: Frontend, compat: MetricsCompat) -> APIRouter:
    router = APIRouter(tags=["server"])

    content: dict[str, object] = {"application/openmetrics-text": {}}

    @router.get("/metrics", response_class=PlainTextResponse, responses={200: {"content": content}})
    async def metrics(request: Request) -> Response:
        """For Prometheus: of all replicas together, whichever of them is asked."""
        engine = frontend.engine
        counts, gauges = await engine.metrics.everything()
        exposition = Exposition(frontend.model_names[0], counts, gauges, engine.info(), compat)
        text, content_type = exposition.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    return router
