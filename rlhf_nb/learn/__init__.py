"""The course's helpers: `learn.start`, `learn.check`, `learn.hint`, `learn.quiz`, `learn.find_bug`, `learn.submit`,
`learn.grade`."""

import rlhf_nb.learn.more_exercises  # registers the later lessons' exercises
from rlhf_nb.learn.checks import EXERCISES, check, grade, hint, submit
from rlhf_nb.learn.dojo import find_bug
from rlhf_nb.learn.exercises import course_command, quiz, start
from rlhf_nb.learn.figure import Figure

__all__ = ["EXERCISES", "Figure", "check", "course_command", "find_bug", "grade", "hint", "quiz", "start", "submit"]
