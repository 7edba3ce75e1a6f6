"""Commands and certificates of a run of several sites in network namespaces.

Node 0 of the star is the coordinator's, node K + 1 is that of site K.
"""

import datetime
import pathlib
import sys
from collections.abc import Sequence

import netns
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

ROOT = pathlib.Path(__file__).resolve().parents[1]
PORT = 7777
COORDINATOR = "coordinator"


def names(sites: int) -> list[str]:
  """Returns the names of the coordinator and of the sites: those of their folders."""
  return [COORDINATOR, *(f"site-{k}" for k in range(sites))]


def listen(network: netns.Network) -> str:
  """Returns the coordinator's address."""
  return f"{network.addresses[0]}:{PORT}"


def coordinator(
  network: netns.Network, folder: pathlib.Path, config: str, fields: Sequence[str]
) -> list[str]:
  """Returns the command of the coordinator; `folder` has its workdir and its keys."""
  own = [f"--listen={listen(network)}"]
  return _python(network, 0, "coordinator", folder, config, [*own, *fields])


def site(
  network: netns.Network,
  k: int,
  folder: pathlib.Path,
  config: str,
  fields: Sequence[str],
) -> list[str]:
  """Returns the command of site k; `folder` has its workdir and its keys."""
  own = [f"--site={k}", f"--coordinator={listen(network)}"]
  return _python(network, k + 1, "main", folder, config, [*own, *fields])


def _python(network, node, module, folder, config, fields) -> list[str]:
  name = names(node)[node]
  argv = [
    *(sys.executable, "-m", f"diloco.{module}", f"--config={config}"),
    *("--config.overlap.transport=sites", f"--workdir={folder / name}"),
    *(f"--tls={folder / 'tls' / name}", *fields),
  ]
  return network.command(node, argv)


def certificates(folder: pathlib.Path, sites: int) -> None:
  """Makes folder/tls/NAME with ca.pem, cert.pem and key.pem for each of `names`."""
  ca_key = ec.generate_private_key(ec.SECP256R1())
  ca = _sign("diloco", ca_key.public_key(), "diloco", ca_key, ca=True)
  for name in names(sites):
    key = ec.generate_private_key(ec.SECP256R1())
    own = folder / "tls" / name
    own.mkdir(parents=True, exist_ok=True)
    cert = _sign(name, key.public_key(), "diloco", ca_key, ca=False)
    pem = serialization.Encoding.PEM
    (own / "ca.pem").write_bytes(ca.public_bytes(pem))
    (own / "cert.pem").write_bytes(cert.public_bytes(pem))
    (own / "key.pem").write_bytes(
      key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
      )
    )


def _sign(subject: str, key, issuer: str, issuer_key, ca: bool) -> x509.Certificate:
  now = datetime.datetime.now(datetime.UTC)
  name = lambda text: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
  builder = (
    x509.CertificateBuilder()
    .subject_name(name(subject))
    .issuer_name(name(issuer))
    .public_key(key)
    .serial_number(x509.random_serial_number())
    .not_valid_before(now - datetime.timedelta(days=1))
    .not_valid_after(now + datetime.timedelta(days=30))
    .add_extension(x509.BasicConstraints(ca, None), critical=True)
    .add_extension(x509.SubjectAlternativeName([x509.DNSName(subject)]), critical=False)
  )
  return builder.sign(issuer_key, hashes.SHA256())
