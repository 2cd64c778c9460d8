"""`GET /metrics`."""

from fastapi import FastAPI, Request, Response

from cluster.frontend import Frontend
from cluster.metrics import Exposition
from configs.sections import MetricsCompat


def add_metrics_route(app: FastAPI, frontend: Frontend, compat: MetricsCompat) -> None:
    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """For Prometheus: of all replicas together, whichever of them is asked."""
        engine = frontend.engine
        counts, gauges = await engine.metrics.everything()
        exposition = Exposition(frontend.model_names[0], counts, gauges, engine.info(), compat)
        text, content_type = exposition.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})
