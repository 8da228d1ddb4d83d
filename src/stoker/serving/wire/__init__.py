"""The Open Inference Protocol's data: what HTTP and gRPC have in common, and REST bodies; no sockets in here."""

from stoker.serving.wire.classes import classify
from stoker.serving.wire.fitting import fit
from stoker.serving.wire.forms import Form, check_form
from stoker.serving.wire.requests import decode, decode_raw
from stoker.serving.wire.responses import Encoded, encode

__all__ = ["Encoded", "Form", "check_form", "classify", "decode", "decode_raw", "encode", "fit"]
