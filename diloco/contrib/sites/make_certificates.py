"""Makes certificates for the coordinator and the sites of a run (docs/sites.md).

  python -m diloco make_certificates --out=runs/certificates --sites=4

Writes one folder per party: coordinator/, site-0/, ..., each with ca.pem, cert.pem and
key.pem. Copy each folder only to the machine of its party, which takes it as --tls. The
folder authority/ can sign new certificates, so keep it offline. A second call with more
sites adds them to the same authority and leaves all other files as they are.

Needs the library `cryptography` (pip install 'diloco[sites]').
"""

import datetime
import os
import pathlib
import sys

from diloco.contrib.sites import security
from diloco.errors import ConfigError
from diloco.util import command

try:
  from cryptography import x509
  from cryptography.hazmat.primitives import hashes, serialization
  from cryptography.hazmat.primitives.asymmetric import ec
  from cryptography.x509.oid import ExtendedKeyUsageOID as Usage
except ImportError:
  print(
    "error: certificates need cryptography: pip install cryptography.", file=sys.stderr
  )
  sys.exit(2)

Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def make(out: pathlib.Path, sites: int, days: int = 365) -> list[str]:
  """Writes the certificates that do not exist yet; returns the new parties.

  Args:
    out: folder of the authority; made if it does not exist.
    sites: number of sites, K.
    days: days until the new certificates end.

  Raises:
    ConfigError: the folder has an authority that cannot be read.
  """
  made = []
  authority = _authority(out / "authority", days)
  for name in (security.NAME, *(security.site_name(k) for k in range(sites))):
    if not (out / name / "cert.pem").exists():
      _make_party(out / name, name, days, authority)
      made.append(name)
  return made


def _authority(folder: pathlib.Path, days: int) -> Authority:
  """Returns the authority's certificate and key; makes them if there are none."""
  cert_file, key_file = folder / "cert.pem", folder / "key.pem"
  if not cert_file.exists():
    return _make_party(folder, "diloco authority", days)
  try:
    cert = x509.load_pem_x509_certificate(cert_file.read_bytes())
    key = serialization.load_pem_private_key(key_file.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"the authority in {folder} cannot be read ({error}); choose another --out."
    ) from error
  return cert, key


def _make_party(
  folder: pathlib.Path, name: str, days: int, authority: Authority | None = None
) -> Authority:
  """Writes ca.pem, key.pem (for its owner only) and, at last, cert.pem.

  Args:
    authority: signs the certificate; None: the party is the authority.

  Returns:
    The party's certificate and key.
  """
  key = ec.generate_private_key(ec.SECP256R1())
  subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
  now = datetime.datetime.now(datetime.UTC)
  builder = (
    x509.CertificateBuilder()
    .subject_name(subject)
    .public_key(key.public_key())
    .serial_number(x509.random_serial_number())
    .not_valid_before(now - datetime.timedelta(hours=1))  # Clocks differ.
    .not_valid_after(now + datetime.timedelta(days=days))
  )
  if authority:
    ca, ca_key = authority
    # With a site's certificate nobody can pretend to be the coordinator.
    usage = Usage.SERVER_AUTH if name == security.NAME else Usage.CLIENT_AUTH
    cert = (
      builder.issuer_name(ca.subject)
      .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
      .add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
      .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
      .sign(ca_key, hashes.SHA256())
    )
  else:
    ca = cert = (
      builder.issuer_name(subject)
      .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
      .sign(key, hashes.SHA256())
    )
  folder.mkdir(parents=True, exist_ok=True)
  s, pem = serialization, serialization.Encoding.PEM
  (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
  key_file = folder / "key.pem"
  key_file.unlink(missing_ok=True)
  with os.fdopen(os.open(key_file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
    file.write(key.private_bytes(pem, s.PrivateFormat.PKCS8, s.NoEncryption()))
  (folder / "cert.pem").write_bytes(cert.public_bytes(pem))
  return cert, key


def main() -> None:
  prog = "python -m diloco make_certificates"
  parser = command.Parser(prog=prog, description=__doc__)
  add = parser.add_argument
  add("--out", type=command.as_path, required=True, help="folder of all parties")
  add("--sites", type=int, required=True, help="number of sites, K")
  add("--days", type=int, default=365, help="days until they end")
  args = parser.parse_args()
  if min(args.sites, args.days) < 1:
    parser.error(f"--sites is {args.sites} and --days {args.days}; give at least 1")
  command.make_folder(args.out, "--out")
  made = make(args.out, args.sites, args.days)
  print(f"new in {args.out}: {', '.join(made) or 'nothing'}")


if __name__ == "__main__":
  sys.exit(command.guarded(main))
