"""A failure on a terminal: the user's own frames, and nothing that is said already."""

from services.cli.terminal import console
from services.cli.tracebacks import own_frames, own_place
from services.cli.watching import print_failure
from services.contract.api.views import FailureView
from services.contract.words.states import JobState
from tests.cli.views import job

OURS = """\
  File "/opt/meshloom/services/worker/rank/loop/trainer.py", line 93, in train
    end = _loop(run)
          ^^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1, in inner
    result = forward_call(*args)
"""
THEIRS = """\
  File "/nodes/vm/code/9c8d/own.py", line 52, in forward
    raise ValueError("no")
"""
HEAD = "Traceback (most recent call last):\n"


def test_frames_of_others_are_counted_and_the_users_own_are_whole() -> None:
    shown = own_frames(f"{HEAD}{OURS}{THEIRS}{OURS}ValueError: no\n    indented\n")
    counted = "  (2 frames of Meshloom or packages; -o json has all)\n"
    assert shown == f"{HEAD}{counted}{THEIRS}{counted}ValueError: no\n    indented"


def test_the_place_of_a_failure_is_the_innermost_frame_of_the_user() -> None:
    outer = '  File "/nodes/vm/code/9c8d/train.py", line 3\n'
    whole = f"{HEAD}{OURS}{outer}{THEIRS}{OURS}ValueError: no\n"
    assert own_place(whole) == "/nodes/vm/code/9c8d/own.py:52 in forward"
    assert own_place(f"{HEAD}{outer}{OURS}ValueError: no") == "/nodes/vm/code/9c8d/train.py:3"
    assert own_place(f"{HEAD}{OURS}ValueError: no\n") is None


def test_a_traceback_without_a_frame_of_the_user_stays_whole() -> None:
    text = f"{HEAD}{OURS}RuntimeError: ours\n"
    assert own_frames(text) == text


def test_a_failure_of_no_rank_is_not_told_again_below_its_job() -> None:
    failed = job(state=JobState.FAILED, failure=FailureView(error="model.args: no 'dim'"))
    with console.capture() as printed:
        print_failure(failed)
    assert printed.get() == ""


def test_the_first_rank_to_fail_is_named_with_its_step_and_error() -> None:
    failure = FailureView(rank=3, step=7, error="ValueError: no", traceback=f"{HEAD}{OURS}{THEIRS}")
    with console.capture() as printed:
        print_failure(job(state=JobState.FAILED, failure=failure))
    told, _, rest = printed.get().partition("\n")
    assert told == "rank 3 failed first at step 7: ValueError: no"
    assert "own.py" in rest
    assert "trainer.py" not in rest
