"""A server of buckets over HTTP, for S3 and GCS, that tests can interrupt."""

import contextlib
import io
import json
import threading
import urllib.request

import pytest

# moto lets nobody write without it, and checks no signature.
_SIGNED = (
  "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request,"
  " SignedHeaders=host, Signature=any"
)


class Server:
  """moto's S3 server, which also understands the headers of GCS's XML interface.

  Attributes:
    on_put: called with the path of every file before it is written; the server fails
      for the client if it raises OSError.
    faults: what happens to the next PUTs, one each: "lost before" or "lost after" they
      have an effect, "twice", "late" (it has an effect, `late` is set, and the answer
      comes when `goes_on` is set), or "".
    env: environment variables with which a client finds the server.
  """

  def __init__(self, folder):
    from moto.moto_server.werkzeug_app import (
      DomainDispatcherApplication,
      create_backend_app,
    )
    from werkzeug.serving import make_server

    self.on_put = lambda path: None
    self.faults: list[str] = []
    self.late, self.goes_on = threading.Event(), threading.Event()
    self._app = DomainDispatcherApplication(create_backend_app)
    self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
    threading.Thread(target=self._server.serve_forever, daemon=True).start()
    self.url = f"http://127.0.0.1:{self._server.port}"
    account = {"gcs_base_url": self.url, "disable_oauth": True, "private_key_id": ""}
    account |= {"client_email": "", "private_key": ""}
    (folder / "account.json").write_text(json.dumps(account))
    self.env = {
      "AWS_ACCESS_KEY_ID": "any",
      "AWS_SECRET_ACCESS_KEY": "any",
      "AWS_ENDPOINT_URL": self.url,
      "GOOGLE_SERVICE_ACCOUNT": str(folder / "account.json"),
    }

  def make(self, bucket):
    request = urllib.request.Request(f"{self.url}/{bucket}", method="PUT")
    urllib.request.urlopen(request).close()

  def close(self):
    self._server.shutdown()

  def _answer(self, environ, start):
    put = environ["REQUEST_METHOD"] == "PUT"
    fault = self.faults.pop(0) if put and self.faults else ""
    try:
      if put:
        self.on_put(environ["PATH_INFO"])
      if fault == "lost before":
        raise OSError
      head, body = self._pass(environ)
      if fault == "twice":  # As a network may deliver a packet again.
        head, body = self._pass(environ)
      if fault == "late":
        self.late.set()
        self.goes_on.wait(60)
      if fault == "lost after":
        raise OSError
    except OSError:
      start("503 Service Unavailable", [("Content-Length", "0")])
      return []
    start(*head)
    return [body]

  def _pass(self, environ):
    if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS4"):
      environ["HTTP_AUTHORIZATION"] = _SIGNED
    if environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", "") == "0":
      environ["HTTP_IF_NONE_MATCH"] = "*"
    if source := environ.pop("HTTP_X_GOOG_COPY_SOURCE", ""):
      environ["HTTP_X_AMZ_COPY_SOURCE"] = source
    sent = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"], heads = io.BytesIO(sent), []
    body = b"".join(self._app({**environ}, lambda *head: heads.append(head)))
    environ["wsgi.input"].seek(0)
    return heads[-1], body


@contextlib.contextmanager
def serving(folder):
  server = Server(folder)
  try:
    yield server
  finally:
    server.close()


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
  """A server with a bucket named `bucket`, which clients find."""
  pytest.importorskip("moto.server")
  folder = tmp_path_factory.mktemp("server")
  with serving(folder) as server, pytest.MonkeyPatch.context() as patch:
    for name, value in server.env.items():
      patch.setenv(name, value)
    server.make("bucket")
    yield server
