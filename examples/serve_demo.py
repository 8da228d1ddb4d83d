"""From trained to served: the demo's model exported, compressed, served, and asked for a real image's class.

    make demo-serve                       # or: python examples/serve_demo.py

Each step is a command that is printed before it runs. It takes the newest finished run of examples/demo.py, or trains
one, and leaves `models/demo` with its versions and `predictions/demo` with the test images' classes.
"""

import argparse
import json
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

import stoker

HERE = Path(__file__).parent
MODEL, IMAGES, ANSWERS = Path("models/demo"), Path("predictions/test.parquet"), Path("predictions/demo")
SHADES = " .:-=+*#%@"


def stoker_command(*words: object) -> list[str]:
    """A command of Stoker's, shown as a user would type it."""
    shown = [str(word) for word in words]
    print(f"\n$ stoker {shlex.join(shown)}", flush=True)
    return [sys.executable, "-m", "stoker", *shown]


def run(*words: object, or_else: str = "") -> None:
    """Run a command of Stoker's; if it fails, say what happens instead, or end with it."""
    done = subprocess.run(stoker_command(*words), check=False)
    if done.returncode and not or_else:
        raise SystemExit(done.returncode)
    if done.returncode:
        print(or_else)


def newest_run() -> str:
    """The newest finished run of the demo; trains one where there is none."""
    listed = subprocess.run([sys.executable, "-m", "stoker", "runs", "--json"], check=True, capture_output=True)
    runs = [entry["run"] for entry in json.loads(listed.stdout)["runs"]]
    finished = [one["name"] for one in runs if one["name"].startswith("demo-") and one["status"] == "finished"]
    if not finished:
        run("train", HERE / "demo.py")
        return newest_run()
    return str(finished[0])


def write_images() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The test images and their classes, also as a Parquet file."""
    _, test = stoker.data.images()
    images, labels = (array.numpy() for array in test.arrays())
    column = pa.FixedSizeListArray.from_arrays(pa.array(images.reshape(-1)), images[0].size)
    IMAGES.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": column, "label": labels}), IMAGES)
    return images, labels


@contextmanager
def served(models: Path) -> Iterator[str]:
    """The address of a server of these models; it ends with the block."""
    words = ("serve", models, "--http-port", 0, "--grpc-port", -1, "--admin-port", -1, "--json")
    with subprocess.Popen(stoker_command(*words), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            text = ""
            while not text.endswith("\n}\n"):  # one JSON document, when it is up
                line = server.stdout.readline()
                if not line:
                    raise SystemExit("the server did not start")
                text += line
            yield json.loads(text)["http"]
        finally:
            server.terminate()


def ask(address: str, image: NDArray[np.uint8]) -> list[str]:
    """The three likeliest classes of an image, over the Open Inference Protocol, each as `value:index:name`."""
    request = {
        "inputs": [{"name": "image", "shape": [1, *image.shape], "datatype": "UINT8", "data": image.ravel().tolist()}],
        "outputs": [{"name": "output", "parameters": {"classification": 3}}],
    }
    url = f"{address}/v2/models/{MODEL.name}/infer"
    print(f"\nPOST {url}", flush=True)
    posted = urllib.request.Request(url, json.dumps(request).encode(), {"Content-Type": "application/json"})  # noqa: S310 - http, from the server just started
    with urllib.request.urlopen(posted) as answer:  # noqa: S310 - likewise
        found: list[str] = json.load(answer)["outputs"][0]["data"]
    return found


def accuracy(out: Path) -> float:
    """The share of rows whose largest output is their label."""
    table = pq.read_table(out / "predictions", columns=["label", "output"])
    outputs = np.array(table["output"].to_pylist())
    return float((outputs.argmax(axis=1) == table["label"].to_numpy()).mean())


def predict(model: Path) -> float:
    """The accuracy of a model on the test images, predicted offline."""
    words = ("predict", model, IMAGES, "-o", ANSWERS, "--keep", "label", "--new", "--json")
    done = subprocess.run(stoker_command(*words), check=True, capture_output=True, text=True)
    finished = json.loads(done.stdout.splitlines()[-1])
    print(f"{finished['rows']:,} rows, {finished['rows_per_s']:,.0f} rows/s")
    return accuracy(Path(finished["out"]))


def draw(image: NDArray[np.uint8]) -> None:
    """The image in characters, every second row, since characters are twice as high as wide."""
    for row in image[0, ::2].astype(int):
        print("   ", "".join(SHADES[pixel * len(SHADES) // (int(image.max()) + 1)] for pixel in row))


def main() -> None:
    """Train or find, export, compress, serve, ask, predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="time to search for a smaller model")
    parser.add_argument("--image", type=int, default=0, help="which test image to ask for")
    asked = parser.parse_args()

    trained = newest_run()
    run("export", trained, "-o", MODEL)
    exported = max((path for path in MODEL.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    otherwise = "the exported model is served as it is"  # the digits of the package are too few rows to be sure
    run("compress", MODEL, "--max-drop", "0.5%", "--seconds", asked.seconds, or_else=otherwise)

    images, labels = write_images()
    image, label = images[asked.image], labels[asked.image]
    with served(MODEL) as address:
        found = ask(address, image)
    draw(image)
    _, classes = stoker.data.images()
    print(f"is class {label}, {classes.classes[label]}; the service says {', '.join(found)}")

    in_training = json.loads((stoker.load(trained).path / "run.json").read_text())["metrics"]["test/accuracy"]
    print(
        f"\naccuracy on the {len(labels):,} test images: {in_training:.4f} in training, "
        f"{predict(exported):.4f} exported, {predict(MODEL):.4f} compressed"
    )


if __name__ == "__main__":
    main()
