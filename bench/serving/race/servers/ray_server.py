"""Ray Serve: its proxy and replicas, `serve.batch`, bodies as raw bytes."""

import asyncio
import time

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from bench.serving.race.served_model import ServedModel, told

asked = told()


@serve.deployment(num_replicas=asked.workers, max_ongoing_requests=512, ray_actor_options={"num_cpus": 0.1})
class Api:
    """One engine in each replica."""

    def __init__(self) -> None:
        self.model = ServedModel()

    @serve.batch(max_batch_size=asked.max_batch, batch_wait_timeout_s=asked.delay_s)
    async def answers(self, bodies: list[bytes]) -> list[bytes]:
        """One batch, computed next to the replica's event loop."""
        return await asyncio.to_thread(self.model.answers, bodies)

    async def __call__(self, request: Request) -> Response:
        """Raw bytes in and out."""
        return Response(await self.answers(await request.body()), media_type="application/octet-stream")


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    serve.start(http_options={"host": "127.0.0.1", "port": asked.port})
    serve.run(Api.bind(), route_prefix="/")
    while True:
        time.sleep(3600)
