"""Parts that go wrong in every way, for the run of the GPU check; called in a child process."""

import os
import time


def fails(size, note):
    note({"begun": size})
    raise ValueError("the third row is wrong")


def hangs(size, note):
    note({"begun": size})
    time.sleep(600)


def dies(size, note, argument):
    note({"begun": argument})
    os.abort()
