"""MLServer: adaptive batching on; V2 JSON with BYTES in base64, the closest to binary that its REST takes."""

import base64

from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput

from bench.serving.race.served_model import ServedModel


class Runtime(MLModel):
    """One engine in each worker."""

    async def load(self) -> bool:
        """Load the engine."""
        self.model = ServedModel()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """One batch."""
        data = payload.inputs[0].data
        outputs = self.model.answers([base64.b64decode(item) for item in getattr(data, "root", data)])
        words = [base64.b64encode(output).decode() for output in outputs]
        answer = ResponseOutput(name="output", datatype="BYTES", shape=[len(words), 1], data=words)
        return InferenceResponse(model_name=self.name, outputs=[answer])
