"""Who may connect: mutual TLS, or plain text on this machine only. No JAX.

A folder of credentials has three files in PEM: ca.pem (the authority that signs all
certificates), cert.pem and key.pem (of this process). The command
`python -m diloco make_certificates` makes them. The coordinator's certificate is for
the name `coordinator`; that of site K has the common name `site-K`, so a site cannot
pretend to be another.
"""

import ipaddress
import ssl

import grpc

from diloco.contrib.sites import SitesConfig
from diloco.contrib.sites.messages import LARGEST
from diloco.errors import ConfigError
from diloco.util.files import local_path

NAME = "coordinator"


def options(keepalive_s: float) -> list[tuple[str, int]]:
  """Returns gRPC's options; a lost machine is noticed within 2 `keepalive_s`."""
  keepalive_ms = round(1000 * keepalive_s)
  return [
    ("grpc.max_receive_message_length", LARGEST),
    ("grpc.max_send_message_length", LARGEST),
    ("grpc.keepalive_time_ms", keepalive_ms),
    ("grpc.keepalive_timeout_ms", keepalive_ms),
    ("grpc.keepalive_permit_without_calls", 1),
    # While a ping of another kind has no answer, gRPC sends no keepalive: by default it
    # waits a minute.
    ("grpc.http2.ping_timeout_ms", keepalive_ms),
    ("grpc.http2.max_pings_without_data", 0),
    # The other party may ask more often, down to the least `sites.keepalive_s`.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
  ]


def site_name(site: int) -> str:
  """Returns the common name of a site's certificate."""
  return f"site-{site}"


def server_credentials(
  address: str, folder: str, insecure: bool
) -> grpc.ServerCredentials | None:
  """Returns the coordinator's credentials; None: plain text.

  Raises:
    ConfigError: see `_check`.
  """
  if not _check(address, folder, insecure, "--listen"):
    return None
  ca, cert, key = _read(folder)
  return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)


def channel(
  address: str,
  folder: str,
  insecure: bool,
  keepalive_s: float = SitesConfig.keepalive_s,
) -> grpc.Channel:
  """Opens a site's channel to the coordinator; connects later.

  Raises:
    ConfigError: see `_check`.
  """
  # Retries are ours: they must join again first.
  own: list[tuple[str, int | str]] = [*options(keepalive_s), ("grpc.enable_retries", 0)]
  if not _check(address, folder, insecure, "--coordinator"):
    return grpc.insecure_channel(address, own)
  ca, cert, key = _read(folder)
  own.append(("grpc.ssl_target_name_override", NAME))
  return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), own)


def _check(address: str, folder: str, insecure: bool, flag: str) -> bool:
  """Returns whether to use TLS.

  Raises:
    ConfigError: the address is no host:port, neither or both of --tls and --insecure
      are given, or plain text would leave this machine.
  """
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or int(port) > 65535:
    other = ", or a folder such as ./group" if flag == "--coordinator" else ""
    raise ConfigError(f"{flag} is {address!r}; give host:port{other}.")
  if bool(folder) == insecure:
    raise ConfigError(
      f"--tls is {folder!r} and --insecure is {insecure}; give --tls=FOLDER with"
      " certificates (python -m diloco make_certificates), or on one machine"
      " --insecure."
    )
  if insecure and not _is_loopback(host.strip("[]")):
    raise ConfigError(
      f"--insecure is given, but {flag} is {address!r}; plain text is only for"
      " localhost, so give --tls=FOLDER with certificates"
      " (python -m diloco make_certificates)."
    )
  return bool(folder)


def _is_loopback(host: str) -> bool:
  try:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def _read(folder: str) -> list[bytes]:
  """Reads ca.pem, cert.pem and key.pem.

  Raises:
    ConfigError: a file is missing or damaged, or the key is of another certificate.
  """
  path = local_path(folder, "--tls")
  ca, cert, key = (path / f"{n}.pem" for n in ("ca", "cert", "key"))
  try:
    found = [path.read_bytes() for path in (ca, cert, key)]
    # gRPC would find mistakes only when it connects, and without a reason.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    context.load_cert_chain(cert, key, password="")
  except (OSError, ValueError) as error:  # ssl.SSLError is an OSError.
    name = getattr(error, "filename", None) or "a certificate or the key"
    raise ConfigError(
      f"--tls is {folder!r}, where {name} cannot be read ({error.args[-1]});"
      " make certificates by python -m diloco make_certificates."
    ) from error
  return found
