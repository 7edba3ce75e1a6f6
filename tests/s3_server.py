"""An S3 server over HTTP, behind a proxy that loses, repeats or delays requests."""

import threading
import urllib.request
from http import server

import pytest


class Proxy(server.BaseHTTPRequestHandler):
  """Stands before an S3 server, and loses, repeats or delays what is written."""

  protocol_version = "HTTP/1.1"

  def _pass(self):
    size = int(self.headers.get("Content-Length", 0))
    body, put = self.rfile.read(size) if size else None, self.command == "PUT"
    fault = self.server.faults.pop(0) if put and self.server.faults else ""
    if fault == "lost before":
      self.close_connection = True
      return
    answer = self._ask(body)
    if fault == "twice":  # As a network may deliver a packet again.
      answer = self._ask(body)
    if fault == "late":
      self.server.late.set()
      self.server.goes_on.wait(60)
    if fault == "lost after":
      self.close_connection = True
      return
    status, headers, data = answer
    self.send_response(status)
    for name in ("ETag", "Content-Type", "Last-Modified"):
      if name in headers:
        self.send_header(name, headers[name])
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def _ask(self, body):
    own = ("connection", "content-length", "transfer-encoding")
    headers = {k: v for k, v in self.headers.items() if k.lower() not in own}
    headers["Content-Type"] = "application/octet-stream"
    url = f"http://127.0.0.1:{self.server.behind}{self.path}"
    ask = urllib.request.Request(url, body, headers, method=self.command)
    try:
      with urllib.request.urlopen(ask) as answer:
        return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
      return error.code, error.headers, error.read()

  do_GET = do_PUT = do_POST = _pass

  def log_message(self, *_):
    pass


@pytest.fixture(scope="module")
def s3():
  """An S3 server over HTTP, behind a proxy with bad manners."""
  moto = pytest.importorskip("moto.server")
  with pytest.MonkeyPatch.context() as patch:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
      patch.setenv(name, "any")
    behind = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    behind.start()
    proxy = server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.behind = behind.get_host_and_port()[1]
    proxy.faults, proxy.late, proxy.goes_on = [], threading.Event(), threading.Event()
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
    make = f"http://127.0.0.1:{proxy.behind}/bucket"
    urllib.request.urlopen(urllib.request.Request(make, method="PUT")).close()
    yield proxy
    proxy.shutdown()
    behind.stop()
