"""The progress bar fits a terminal, also one that says that it has no columns."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

CODE = "from diloco.util.bar import make_bar; make_bar(total=9, initial=3).close()"


def test_a_file_gets_lines():
  code = "from diloco.util.bar import make_bar; bar = make_bar(total=9, initial=3);"
  code += "bar.refresh(); bar.update(6); bar.close()"
  shown = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE).stderr
  assert re.findall(rb"(\d/9).*\n", shown) == [b"3/9", b"3/9", b"9/9"]
  assert b"\r" not in shown


@pytest.mark.parametrize(("columns", "width"), [(80, 80), (0, 80), (60, 60)])
def test_the_bar_fits_the_terminal(columns, width):
  ours, its = pty.openpty()
  fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
  subprocess.run([sys.executable, "-c", CODE], stderr=its, check=True)
  frames = os.read(ours, 4096).decode().strip().split("\r")
  assert "3/9" in frames[-1]
  assert width - 5 < len(frames[-1]) <= width
