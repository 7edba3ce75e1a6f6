r"""Writes a small stand-in for a TFDS text data set, from State of the Union texts.

  python -m diloco make_standin --name=c4/en:3.1.0 --data_dir=/tmp/tfds
  python -m diloco.main --config=configs/sample.py --workdir=runs/c4 \
    --config.data.source=tfds:c4/en:3.1.0 --config.data.data_dir=/tmp/tfds

The stand-in has the name, version, features and splits of the real data set, so the
same loading code reads both. Needs no TensorFlow and no network.
"""

import argparse
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence

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

  # Not registered, so TFDS keeps its own builders of these names.
  class Standin(  # type: ignore[call-arg]
    tfds.core.GeneratorBasedBuilder, skip_registration=True
  ):
    VERSION = tfds.core.Version(version)
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []
    name = dataset

    def _info(self) -> tfds.core.DatasetInfo:
      features = {feature: tfds.features.Text() for feature in FEATURES[dataset]}
      # Unshuffled, so that the stand-in gives the same batches as its text.
      return tfds.core.DatasetInfo(
        builder=self,
        features=tfds.features.FeaturesDict(features),
        disable_shuffling=True,
      )

    def _split_generators(self, dl_manager: object) -> dict[str, Iterator]:
      del dl_manager
      return {s: self._generate_examples(ours) for s, ours in SPLITS[dataset].items()}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, str]]]:
      source = make_source(DataConfig(), split)
      for i in range(len(source)):
        yield i, dict.fromkeys(FEATURES[dataset], "") | {"text": source[i]}

  builder = Standin(
    data_dir=data_dir, config=config or None, file_format="array_record"
  )
  builder.download_and_prepare()
  return pathlib.Path(builder.data_path)


def run(args: argparse.Namespace) -> None:
  make_folder(args.data_dir, "--data_dir")
  print(write(args.name, args.data_dir))


def main(argv: Sequence[str] | None = None) -> int:
  parser = Parser(prog="python -m diloco make_standin", description=__doc__)
  names = "c4/en:3.1.0, which is the default, or dolma:1.0.0"
  parser.add_argument("--name", default="c4/en:3.1.0", help=names)
  parser.add_argument("--data_dir", required=True, help="root folder of TFDS data sets")
  return guarded(run, parser.parse_args(argv), mistakes=ConfigError)


if __name__ == "__main__":
  sys.exit(main())
