"""LitServe: workers in processes of their own, its batching on, bodies as raw bytes."""

from typing import Annotated

import litserve
from fastapi import Body, Response

from bench.serving.race.served_model import ServedModel, told


class Api(litserve.LitAPI):
    """Raw bytes in and out; LitServe collects them into lists."""

    def setup(self, device: str) -> None:
        """Load the engine in the worker."""
        self.model = ServedModel()

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]) -> bytes:
        """The body as it is."""
        return request

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        """Bodies are stacked with the model's own padding."""
        return inputs

    def predict(self, inputs: list[bytes] | bytes) -> list[bytes] | bytes:
        """One batch; without batching LitServe hands a single body."""
        return self.model.answers(inputs) if isinstance(inputs, list) else self.model.answers([inputs])[0]

    def unbatch(self, output: list[bytes]) -> list[bytes]:
        """Answers as they are."""
        return output

    def encode_response(self, output: bytes) -> Response:
        """Raw bytes."""
        return Response(output, media_type="application/octet-stream")


if __name__ == "__main__":
    asked = told()
    api = Api(max_batch_size=asked.max_batch, batch_timeout=asked.delay_s)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=asked.workers, timeout=60)
    server.run(host="127.0.0.1", port=asked.port, generate_client_file=False, log_level="warning", num_api_servers=1)
