"""BentoML: adaptive batching on; tensors in base64 within JSON, since it takes raw bodies for files alone."""

import base64

import bentoml

from bench.serving.race.served_model import ServedModel, told

asked = told()


@bentoml.service(
    workers=asked.workers, traffic={"timeout": 60, "max_concurrency": 1024}, logging={"access": {"enabled": False}}
)
class Api:
    """One engine in each worker."""

    def __init__(self) -> None:
        self.model = ServedModel()

    @bentoml.api(batchable=True, max_batch_size=asked.max_batch, max_latency_ms=60_000)
    def answers(self, items: list[str]) -> list[str]:
        """One batch."""
        outputs = self.model.answers([base64.b64decode(item) for item in items])
        return [base64.b64encode(output).decode() for output in outputs]
