"""Ends all processes of a run after the same launch of the training program.

A signal may reach one process or all processes, in the middle of any launch. Process 0
then asks every process how many launches it has finished. If n is the largest answer,
all processes end after launch n + 1. A process that has answered finishes no launch
before process 0 has told this number.

JAX's preemption service does the same, but hides SIGTERM from Python. With the service,
SIGTERM could not end a process that waits in JAX for a lost process.
"""

import threading
import time

from diloco.processes.peers import Peers

# Seconds. A process ends if it cannot agree with the others in this time plus its
# longest launch. Launchers wait two minutes before they kill a process.
PATIENCE = 90.0


class CommonEnd:
  """Knows whether all processes end after the present launch.

  Attributes:
    asked: whether any process asks all to end.
  """

  def __init__(self, peers: Peers):
    self.asked, self._over = False, False
    self._peers, self._launches, self._last = peers, 0, 0
    self._answers = dict[int, int]()  # On process 0: {process: launches}.
    self._began, self._longest = time.monotonic(), 0.0  # Longest launch, seconds.
    self._change = threading.Condition()
    self._timer: threading.Timer | None = None
    threading.Thread(target=self._serve, daemon=True).start()

  def ask(self, reason: str) -> None:
    """Asks all processes to end; only the first call counts. Any thread may call this.

    If the processes do not agree in time, first this process and then the others end
    with an error.

    Args:
      reason: such as SIGTERM, for the error message.
    """
    with self._change:  # Several threads may call at the same time.
      if self._timer or self._over:
        return
      seconds = PATIENCE + self._longest
      self._timer = threading.Timer(seconds, self._give_up, [reason, seconds])
      self._timer.daemon = True
      self._timer.start()
    if self._peers.index:
      self._peers.send("end?", None)
    else:
      self._peers.news.put((0, "end?", None))

  def after_launch(self) -> bool:
    """Returns whether all processes end now; each calls this after every launch."""
    with self._change:
      self._change.wait_for(lambda: self._last or not self.asked)
      self._launches += 1
      now = time.monotonic()
      self._longest, self._began = max(self._longest, now - self._began), now
      ends = 0 < self._last <= self._launches
    if ends:
      self.over()
    return ends

  def over(self) -> None:
    """Stops the timer: the agreement is over, and the end of the run may take long."""
    with self._change:
      self._over = True
      if self._timer:
        self._timer.cancel()

  def close(self) -> None:
    """Stops answering the other processes, which have finished their launches."""
    self.over()
    self._peers.news.put((self._peers.index, "closed", None))

  def _serve(self) -> None:
    """Answers the other processes, even while this process waits in JAX."""
    while True:
      p, kind, value = self._peers.news.get()
      if kind == "closed":
        return
      with self._change:
        if kind == "end?" and not self.asked:  # Only process 0 gets this kind.
          self._peers.send("launches?", None)
          self._answers[0] = self._launches
        elif kind == "launches?":
          self._peers.send("launches", self._launches)
        elif kind == "launches":
          self._answers[p] = value
        elif kind == "last":
          self._last = value
        self.asked = True
        if len(self._answers) == self._peers.count and not self._last:
          self._last = max(self._answers.values()) + 1
          self._peers.send("last", self._last)
        self._change.notify_all()

  def _give_up(self, reason: str, seconds: float) -> None:
    self._peers.fail(
      f"{reason}: the {self._peers.count} processes did not finish a common step within"
      f" {seconds:.0f} s, so process {self._peers.index} ends; see where the others"
      " hang. The same command goes on from the last checkpoint."
    )
